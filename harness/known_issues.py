"""The file of known issues: which hangs somebody has reported already, where, and until when that counts.

    [[issue]]
    signature = "hang/stream-order/compute/graph.replay/-/-"    as a report prints it
    link = "https://github.com/..."                                   where it is being dealt with
    expires = 2027-01-31                                              the last day on which the entry counts
    note = "waits for the fence before the update"
    # optional: what else is known of it. A hang that differs from it has changed
    title, scenario, kind, mechanism, stream, operation, culprit

Here: the file's keys, its mistakes told, and the record of it in run.json, from which the reports work
(``reports.known`` decides what is known, new or changed). An entry changes no verdict.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from harness.diagnosis_model import Mechanism, StreamName
from harness.request import BadRequest

DEFAULT_NAME = "known-issues.toml"
"""Taken from the current directory where no file is named."""


def _address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not re.search(r"[A-Za-z0-9]", parts.hostname or ""):
        raise ValueError("is no http or https address; write the address of the report")
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds credentials, and every report would print them; write it without")
    return text


_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class KnownIssue(BaseModel):
    """One ``[[issue]]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    signature: _Text
    """As reports print it; equal for the same defect under other seeds, ranks and pids."""
    link: Annotated[str, AfterValidator(_address)]
    """Where the defect is being dealt with."""
    expires: date
    """The last day (UTC) on which the entry counts. After it the hang is new again, so that nothing is known for
    ever."""
    note: _Text
    """One line: what is being waited for."""
    title: _Text | None = None
    scenario: _Text | None = None
    """A scenario's name. In another scenario the same signature has changed."""
    kind: Literal["hang", "slow", "dead", "stopped", "livelock"] | None = None
    """``kind`` and ``mechanism`` of other signatures that are the same root; those of ``signature`` else."""
    mechanism: Mechanism | None = None
    stream: StreamName | None = None
    operation: _Text | None = None
    """How the label of the unfinished operation (or the collective) begins; digits do not count."""
    culprit: _Text | None = None
    """Role of the culprit: ``rank``, ``scheduler``, ``server``."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    issue: tuple[KnownIssue, ...] = ()


def load_known_issues(path: Path, today: date | None = None) -> dict[str, Any]:
    """The record of the file for run.json: ``{"file", "on", "issues"}``. ``today`` (UTC) is the day for which
    expiries are judged, in this report and whenever it is written again. Raises BadRequest with every mistake."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(
            f"{path}: cannot be read: {error.strerror}; name a file of known issues, or leave it out"
        ) from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: is no UTF-8: {error}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path}: is no TOML: {error}; mend it there") from error
    try:
        issues = _File.model_validate(document).issue
    except ValidationError as error:
        told = [f"{path}: {line}" for line in _problems(error, document)]
        raise BadRequest("\n".join(told)) from error
    if twice := list(_twice(issues)):
        raise BadRequest("\n".join(f"{path}: {line}" for line in twice))
    return _record(path.name, issues, today or datetime.now(UTC).date())


def known_issues_here(named: Path | None) -> dict[str, Any] | None:
    """The file that the user named, else DEFAULT_NAME of the current directory, else None. Raises BadRequest."""
    if named is not None:
        return load_known_issues(named)
    default = Path(DEFAULT_NAME)
    return load_known_issues(default) if default.is_file() else None


def again(remembered: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What an earlier run remembers, for a run of today."""
    return None if remembered is None else {**remembered, "on": datetime.now(UTC).date().isoformat()}


def _record(name: str, issues: tuple[KnownIssue, ...], on: date) -> dict[str, Any]:
    rows = [issue.model_dump(mode="json", exclude_none=True) for issue in issues]
    return {"file": name, "on": on.isoformat(), "issues": rows}


def _twice(issues: tuple[KnownIssue, ...]) -> Iterator[str]:
    seen: dict[tuple[str, str | None], int] = {}
    for place, issue in enumerate(issues, 1):
        key = (issue.signature, issue.scenario)
        if key in seen:
            yield (
                f"issue.{place}.signature={issue.signature}: is listed as issue {seen[key]} too; leave one out, or "
                "give them different scenarios"
            )
        seen.setdefault(key, place)


def _problems(error: ValidationError, document: Mapping[str, Any]) -> Iterator[str]:
    """File, key, value, what to do; entries are counted from 1, as people count."""
    for detail in error.errors(include_url=False):
        key = ".".join(str(part + 1 if isinstance(part, int) else part) for part in detail["loc"])
        shown = "" if detail["type"] == "missing" else f"={detail['input']}"
        yield f"{key}{shown}: {_words(detail, document)}"


def _words(detail: ErrorDetails, document: Mapping[str, Any]) -> str:
    match detail["type"]:
        case "missing":
            return "is missing; add it"
        case "extra_forbidden":
            keys = list(KnownIssue.model_fields) if len(detail["loc"]) > 1 else ["issue"]
            near = difflib.get_close_matches(str(detail["loc"][-1]), keys, n=1)
            guess = f"did you mean {near[0]}? " if near else ""
            return f"unknown key; {guess}allowed: {', '.join(keys)}"
        case "value_error":
            return str(detail.get("ctx", {}).get("error"))
        case "literal_error":
            return f"is not allowed; allowed: {str(detail['ctx']['expected']).replace(chr(39), '')}"
        case "string_too_short":
            return "is empty; write it, or leave the key out where it is optional"
        case "tuple_type":
            return "is no list of tables; write [[issue]]"
        case kind if kind.startswith("date"):
            return "is no date; write a day without quotes, as 2027-01-31"
    return f"{detail['msg'].removeprefix('Input ')}; change it"
