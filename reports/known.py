"""Is a hang known? The issues that run.json remembers, held against a trial's diagnosis.

    known     its signature is listed, the entry has not expired, and all else that the entry says fits
    changed   its signature is listed and something else does not fit; or its signature is not listed, and an
              entry names its kind and mechanism and its scenario or operation: the same root in another shape
    new       everything else, and what only an expired entry lists

An entry that names neither a scenario nor an operation is matched by its signature alone: that two hangs have
the same mechanism says little. Expiry is judged for the day that run.json remembers, so that reports written
again are the same. Pure; the file and its rules are `harness.known_issues`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any

from reports import fields
from reports.fields import Document
from reports.model import Diagnosis, Recognition, Result, TrialResult
from reports.words import clean, listing

NEW = Recognition("new")
DEFAULT_LIFE_DAYS = 90
"""What the block for a new hang proposes as its life."""


@dataclass(frozen=True, slots=True)
class Issue:
    """An entry as run.json remembers it; what it does not say is None. ``expires`` None: unreadable, and so
    expired."""

    signature: str
    link: str
    expires: date | None
    note: str
    title: str | None
    scenario: str | None
    kind: str | None
    mechanism: str | None
    stream: str | None
    operation: str | None
    culprit: str | None


@dataclass(frozen=True, slots=True)
class KnownIssues:
    """``on``: the day for which expiries are judged; None: not known, and nothing is known then."""

    on: date | None = None
    issues: tuple[Issue, ...] = ()

    def recognise(self, scenario: str, found: Diagnosis | None) -> Recognition | None:
        """None for a trial without a signature."""
        if found is None or not found.signature:
            return None
        ranked = sorted(
            (
                ranked
                for place, issue in enumerate(self.issues)
                if (ranked := self._match(place, issue, scenario, found)) is not None
            ),
            key=lambda one: one[:2],
        )
        return ranked[0][2] if ranked else NEW

    def _match(
        self, place: int, issue: Issue, scenario: str, found: Diagnosis
    ) -> tuple[int, int, Recognition] | None:
        """The nearer the match, the smaller the first number; then the order of the file."""
        listed = issue.signature == found.signature
        if not listed and not _same_root(issue, scenario, found):
            return None
        said = Recognition("known", link=issue.link, note=issue.note, title=issue.title)
        if issue.expires is None or self.on is None or self.on > issue.expires:
            when = "an unknown day" if issue.expires is None else issue.expires.isoformat()
            why = f"its entry expired on {when}"
            return 3 if listed else 4, place, replace(said, status="new", why=why)
        expires = issue.expires.isoformat()
        differences = _differences(issue, scenario, found)
        if not differences:
            return 0, place, replace(said, expires=expires)
        why = listing(differences, most=len(differences))
        return 1 if listed else 2, place, replace(said, status="changed", expires=expires, why=why)


def read_known(run: Document) -> KnownIssues:
    """From run.json, leniently. Without the table everything is new."""
    table = fields.table(run, "known_issues")
    rows = fields.rows(table, "issues")
    return KnownIssues(_day(fields.optional_text(table, "on")), tuple(map(_issue, rows)))


def _issue(row: Document) -> Issue:
    said = {
        key: fields.optional_text(row, key)
        for key in ("title", "scenario", "kind", "mechanism", "stream", "operation", "culprit")
    }
    return Issue(
        signature=fields.text(row, "signature"),
        link=fields.text(row, "link"),
        expires=_day(fields.optional_text(row, "expires")),
        note=fields.text(row, "note"),
        **said,
    )


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        return None


# --- matching ----------------------------------------------------------------------------------------------


def _same_root(issue: Issue, scenario: str, found: Diagnosis) -> bool:
    parts = [*issue.signature.split("/"), "", ""]
    root = (issue.kind or parts[0], issue.mechanism or parts[1])
    if root != (found.kind, found.mechanism) or (issue.scenario is None and issue.operation is None):
        return False
    if issue.scenario is not None and issue.scenario != scenario:
        return False
    return issue.operation is None or _family(issue.operation) == _family(_operation(found))


def _differences(issue: Issue, scenario: str, found: Diagnosis) -> list[str]:
    """What the entry says and the trial does not show, a clause each."""
    clauses = []
    if issue.signature != found.signature:
        clauses.append(f"the signature is {found.signature}, listed is {issue.signature}")
    for name, listed, shown in (
        ("scenario", issue.scenario, scenario),
        ("kind", issue.kind, found.kind),
        ("mechanism", issue.mechanism, found.mechanism),
        ("stream", issue.stream, found.stream or "not known"),
    ):
        if listed is not None and listed != shown:
            clauses.append(f"the {name} is {shown}, listed is {listed}")
    operation = _operation(found)
    if issue.operation is not None and not without_digits(operation).startswith(
        without_digits(issue.operation)
    ):
        clauses.append(f"the operation is {operation or 'not known'}, listed is {issue.operation}")
    roles = list(dict.fromkeys(culprit.role for culprit in found.culprits))
    if issue.culprit is not None and issue.culprit not in roles:
        clauses.append(f"the culprit is {listing(roles) or 'not known'}, listed is {issue.culprit}")
    return clauses


def _operation(found: Diagnosis) -> str:
    if found.operation is not None:
        return found.operation.label
    return "" if found.collective is None else found.collective.operation


def without_digits(label: str) -> str:
    """A label as it is for every step, bucket and layer: ``graph.replay decode`` of ``graph.replay decode.8``."""
    return re.sub(r"[\W_]*\d+", "", label).strip()


def _family(label: str) -> str:
    return (without_digits(label).split() or [""])[0]


# --- the block for a new one -------------------------------------------------------------------------------


def block(trial: TrialResult, on: str) -> str:
    """An ``[[issue]]`` for the file of known issues that fits ``trial``; only the link is left to be written.

    ``on``: the run's start (UTC), whose day the life of the entry is counted from.
    """
    found = trial.diagnosis
    assert found is not None
    first = _day(on[:10]) or date.min
    lines = [
        "[[issue]]",
        f"signature = {_toml(found.signature)}",
        'link = "the address of the report, where it is being dealt with"',
        f"expires = {(first + timedelta(days=DEFAULT_LIFE_DAYS)).isoformat()}",
        f"note = {_toml(f'first seen on {first.isoformat()}: {trial.scenario}, {trial.name}')}",
        f"scenario = {_toml(trial.scenario)}",
    ]
    told: Mapping[str, Any] = {
        "stream": found.stream,
        "operation": without_digits(_operation(found)) or None,
        "culprit": found.culprits[0].role if found.culprits else None,
    }
    return "\n".join([*lines, *(f"{key} = {_toml(text)}" for key, text in told.items() if text)])


def new_issues(result: Result) -> tuple[str, ...]:
    """A block for each signature that no entry names, not even an expired one (its day is what to change)."""
    trials = {trial.id: trial for trial in result.trials}
    return tuple(
        block(trials[row.trials[0]], result.started_utc)
        for row in result.signatures
        if row.status == "new" and not row.known.link
    )


def web_address(link: str) -> str | None:
    """``link`` where a page may point at it, else None."""
    return link if re.fullmatch(r"https?://[^\s<>|`\"']+", link) else None


def _toml(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for those of characters that need none."""
    return json.dumps(clean(" ".join(text.split())), ensure_ascii=False)


# --- a signature's trials ----------------------------------------------------------------------------------


def combine(found: Sequence[Recognition]) -> Recognition:
    """Of all trials with one signature: changed where one of them is, else what the first is."""
    return next((one for one in found if one.status == "changed"), found[0])


def known_lines(known: Recognition | None) -> list[str]:
    """What is said beside a diagnosis; nothing about a hang that no entry has ever named."""
    if known is None or not known.link:
        return []
    name = known.title or known.note
    told = f"{name}, {known.link}" if name else known.link
    if known.status == "known":
        return [f"known issue: {told} (until {known.expires})"]
    if known.status == "changed":
        return [f"a known issue that has changed: {told} (until {known.expires}): {known.why}"]
    return [f"new again: {told}: {known.why}"]
