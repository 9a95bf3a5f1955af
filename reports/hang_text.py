"""A hang in a few lines of plain text, for sinks without room for tables: terminal, Markdown, JUnit."""

from __future__ import annotations

from collections.abc import Iterable

from reports.known import known_lines
from reports.model import Culprit, Diagnosis, Result, TrialResult
from reports.words import count, listing, seconds

_URGENCY = {"fail": 0, "unknown": 1, "pass": 2}


def hang_groups(result: Result) -> list[tuple[TrialResult, list[TrialResult]]]:
    """Trials that were not healthy, by signature (by outcome without one): the first of each and the others.

    What was not expected comes first, then what is known and has changed. A ``corrupt`` trial stopped nowhere: its
    check says all there is.
    """
    groups: dict[tuple[str, str], list[TrialResult]] = {}
    for trial in sorted(result.trials, key=_urgency):
        if trial.outcome in ("healthy", "skipped", "corrupt"):
            continue
        signature = trial.diagnosis.signature if trial.diagnosis else ""
        groups.setdefault((signature, "" if signature else trial.outcome), []).append(trial)
    return [(members[0], members[1:]) for members in groups.values()]


def _urgency(trial: TrialResult) -> tuple[int, bool]:
    changed = trial.known is not None and trial.known.status == "changed"
    return _URGENCY.get(trial.verdict, 1), not changed


def heading(firsts: Iterable[TrialResult]) -> str:
    """Over the groups whose first trials these are."""
    slow = {trial.outcome == "slow" for trial in firsts}
    if slow == {True}:
        return "What was slow"
    return "What stopped, and what was slow" if len(slow) > 1 else "What stopped"


def diagnosis_lines(trial: TrialResult) -> list[str]:
    """The title, then a fact a line: where, who, which operation, which collective, the proof's last word."""
    found = trial.diagnosis
    where = f"{trial.scenario}, {trial.name}"
    if found is None:
        return [f"{trial.outcome}, without a diagnosis", where]
    title = f"{found.kind}: {found.mechanism} ({found.confidence})"
    if found.kind == "none":
        title = f"{trial.outcome}, without a diagnosis"
    lines = [title, where, *known_lines(trial.known)]
    if found.culprits:
        lines.append(f"culprit: {listing([_culprit(item) for item in found.culprits])}")
    if found.operation is not None or found.stream is not None:
        lines.append(_stalled(found))
    if found.collective is not None:
        collective = found.collective
        line = f"collective: {collective.operation} #{collective.sequence} of group {collective.group}"
        line += f", waiting {list(collective.waiting)}, missing {list(collective.missing)}"
        if collective.mismatch_what:
            line += (
                f", sides differ in {collective.mismatch_what}: {' against '.join(collective.mismatch_sides)}"
            )
        lines.append(line)
    lines += [f"proof: {fact.fact}" for fact in found.proof[:3]]
    if len(found.proof) > 3:
        lines.append(f"and {count(len(found.proof) - 3, 'more fact')} in the report")
    if trial.engine is not None:
        lines.append(trial.engine.sentence(found.last_progress_s, found.captured_s))
    if found.went_on_s is not None and found.last_progress_s is not None:
        lines.append(f"it went on after {seconds(found.went_on_s - found.last_progress_s)}")
    if found.missing_evidence:
        lines.append(f"missing evidence: {listing([item.what for item in found.missing_evidence])}")
    return lines


def _culprit(item: Culprit) -> str:
    pid = "" if item.pid is None else f", pid {item.pid}"
    return f"{item.name} ({item.role} on {item.node}{pid})"


def _stalled(found: Diagnosis) -> str:
    line = f"stream: {found.stream or 'not known'}"
    if found.operation is not None:
        operation = found.operation
        line += f", {operation.label}"
        if operation.sequence is not None:
            line += f" #{operation.sequence}"
        line += f" from {operation.site}, unfinished for {seconds(operation.pending_s)}"
    return line
