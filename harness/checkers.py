"""What a trial's stored history says about it: one small check each, pure.

A check answers ``pass``, ``fail``, ``unknown`` or ``skipped`` (it does not apply); one that lacks what it needs
says ``unknown``, never ``pass``. Here single trials are judged; what the trials of an arm say together is
``reports.verdicts``. Not here: reading files (``judge.py``) and the diagnosis (``diagnose.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["pass", "fail", "unknown", "skipped"]

NAMES = ("hang", "leak", "tokens", "pressure")
"""Those that every trial has. ``diagnosis`` and ``fault`` are there where the scenario expects one, or breaks
something."""
HANGS = ("hang", "livelock", "dead", "stopped")
"""Outcomes that count as a hang."""


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. ``reason`` is a sentence for a person."""

    name: str
    verdict: Verdict
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "verdict": self.verdict, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the checks look at. ``tokens`` and ``reference``: output token ids by request."""

    outcome: str
    """Of the trial before tokens are compared: healthy, or the kind of the diagnosis, or unknown."""
    why_unknown: str
    expected: str
    mechanism_expected: str | None
    mechanism: str | None
    tokens_expected: str
    tokens_exact: bool
    """Equal tokens can be asked of a single trial: in float32. Below it a changed batch flips one now and then."""
    finished: bool
    """Every rank brought its result."""
    leaks: Sequence[str]
    retractions: int
    retractions_required: int
    aborted: Sequence[str]
    """Requests that the engine gave up, with its reason."""
    tokens: Mapping[str, Sequence[int]]
    reference: Mapping[str, Sequence[int]] | None
    reference_why: str = ""
    diagnosis_expected: Mapping[str, Any] = field(default_factory=dict)
    """Of kind, mechanism, culprits, stream and group those that the scenario names."""
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    """The same of the trial's diagnosis; empty where it has none."""
    silent_faults: Sequence[str] = ()
    """Faults of this arm that never acted, in words."""
    faults: int = 0
    """How many faults this arm has that should act."""
    slow_s: float | None = None
    """Of a slow trial: from its last progress until it went on, where that was seen."""
    aborts_required: int = 0
    """Requests that it has to give up."""
    reference_is_itself: bool = False
    """It was the first trial of its seed to finish, and the others are held against it."""


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """Requests whose common prefix with the reference is not whole. ``compared``: tokens looked at."""

    differ: int
    compared: int
    first: str | None
    """The request, and the position in its output, of the first difference."""


def compare_tokens(
    tokens: Mapping[str, Sequence[int]], reference: Mapping[str, Sequence[int]], *, whole: bool
) -> TokenComparison:
    """Position by position. A trial that ended early is compared as far as it came (``whole`` False).

    After a first difference in a request all later tokens follow from it, so a request counts once.
    """
    places = differing(tokens, reference, whole=whole)
    compared = sum(_length(tokens.get(one, ()), wanted, whole) for one, wanted in reference.items())
    first = next((f"request {request}, token {place}" for request, place in places.items()), None)
    return TokenComparison(len(places), compared, first)


def differing(
    tokens: Mapping[str, Sequence[int]], reference: Mapping[str, Sequence[int]], *, whole: bool
) -> dict[str, int]:
    """The requests that differ, each with the position in its output of the first difference."""
    found = {}
    for request, wanted in reference.items():
        got = tokens.get(request, ())
        length = _length(got, wanted, whole)
        place = next((i for i in range(length) if list(got[i : i + 1]) != list(wanted[i : i + 1])), None)
        if place is not None:
            found[request] = place
    return found


def _length(got: Sequence[int], wanted: Sequence[int], whole: bool) -> int:
    return max(len(got), len(wanted)) if whole else min(len(got), len(wanted))


def check(facts: Facts) -> tuple[Check, ...]:
    """All checks of one trial, in the order in which a person wants them."""
    if facts.outcome == "skipped":
        return tuple(Check(name, "skipped", facts.why_unknown) for name in NAMES)
    more = [_diagnosis(facts)] if facts.diagnosis_expected else []
    more += [_fault(facts)] if facts.faults else []
    return (_hang(facts), _leak(facts), _tokens(facts), _pressure(facts), *more)


def verdict(checks: Sequence[Check]) -> Verdict:
    """Of a whole trial: failed if a check failed, unknown if one was, else passed; skipped if all were.

    Nothing checked is unknown.
    """
    said = {one.verdict for one in checks}
    worst: tuple[Verdict, ...] = ("fail", "unknown", "pass")
    return next((one for one in worst if one in said), "skipped" if said else "unknown")


def _hang(facts: Facts) -> Check:
    outcome, expected = facts.outcome, facts.expected
    if outcome == "unknown":
        return Check("hang", "unknown", facts.why_unknown or "nothing is known of how the trial ended")
    if outcome == "slow":
        if not facts.finished:
            return Check("hang", "unknown", "it was slow, and had not finished when it was ended")
        after = "" if facts.slow_s is None else f" after {facts.slow_s:.1f} s"
        return Check("hang", "unknown" if expected == "always" else "pass", f"slow, went on{after}")
    if outcome not in HANGS:
        if expected == "always":
            return Check("hang", "fail", "a hang was expected in every trial, this one was healthy")
        return Check("hang", "pass", "no hang")
    what = f"{outcome}, mechanism {facts.mechanism or 'unknown'}"
    if expected == "never":
        return Check("hang", "fail", f"no hang was expected: {what}")
    wanted = facts.mechanism_expected
    if wanted is None or facts.mechanism == wanted:
        return Check("hang", "pass", f"as expected ({expected}): {what}")
    if facts.mechanism in (None, "unknown"):
        return Check("hang", "unknown", f"{what}; expected was {wanted}")
    return Check("hang", "fail", f"{what}; expected was {wanted}")


def _diagnosis(facts: Facts) -> Check:
    """What a hang, a slow rank or a corruption was found to be, against what the scenario names."""
    if facts.outcome == "unknown":
        return Check("diagnosis", "unknown", facts.why_unknown or "nothing is known of how the trial ended")
    nothing = facts.diagnosis.get("kind", "none") == "none" and facts.diagnosis_expected.get("kind") != "none"
    if nothing and facts.expected in ("sometimes", "any"):
        return Check("diagnosis", "skipped", "nothing stopped")
    if not facts.diagnosis:
        return Check("diagnosis", "fail", "nothing was found to explain")
    wrong = [
        f"{name} is {_plain(facts.diagnosis.get(name))}, expected was {_plain(wanted)}"
        for name, wanted in facts.diagnosis_expected.items()
        if facts.diagnosis.get(name) != wanted
    ]
    if wrong:
        return Check("diagnosis", "fail", "; ".join(wrong))
    return Check("diagnosis", "pass", f"{', '.join(facts.diagnosis_expected)} as expected")


def _plain(value: Any) -> str:
    return "none" if value is None or value == [] else str(value)


def _fault(facts: Facts) -> Check:
    if facts.silent_faults:
        return Check("fault", "unknown", f"never acted: {'; '.join(facts.silent_faults)}")
    return Check("fault", "pass", f"{facts.faults} acted")


def _leak(facts: Facts) -> Check:
    if not facts.finished:
        return Check("leak", "skipped", "the ranks did not finish and were replaced")
    if facts.leaks:
        return Check("leak", "fail", "; ".join(facts.leaks))
    return Check("leak", "pass", "pages, memory and threads are back to idle")


def _tokens(facts: Facts) -> Check:
    if facts.reference_is_itself:
        return Check(
            "tokens", "skipped", "the first of its seed to finish: the other arms are held against it"
        )
    if facts.reference is None and facts.tokens_expected == "any":
        return Check("tokens", "skipped", f"there is no reference: {facts.reference_why}")
    if facts.reference is None:
        return Check("tokens", "unknown", f"there is no reference: {facts.reference_why}")
    found = compare_tokens(facts.tokens, facts.reference, whole=facts.finished)
    if not found.compared:
        if facts.tokens_expected == "any" and not facts.finished:
            return Check("tokens", "skipped", "it stopped before its first token")
        return Check("tokens", "unknown", "no token to compare")
    if found.differ:
        what = f"{found.differ} of {len(facts.reference)} requests differ, first {found.first}"
        if facts.tokens_expected == "equal" and not facts.tokens_exact:
            return Check("tokens", "pass", f"{what}; below float32 the arm decides, by how often")
        return Check("tokens", "fail" if facts.tokens_expected == "equal" else "pass", what)
    return Check("tokens", "pass", f"all {found.compared} tokens equal those of the reference")


def _pressure(facts: Facts) -> Check:
    if facts.finished and len(facts.aborted) != facts.aborts_required:
        count = len(facts.aborted)
        first = f", first {facts.aborted[0]}" if count else f" of {facts.aborts_required}"
        what = f"{count} request{' was' if count == 1 else 's were'} aborted{first}"
        return Check("pressure", "unknown", f"the workload was not served whole: {what}")
    wanted = facts.retractions_required
    if wanted == 0:
        return Check("pressure", "pass", f"{facts.retractions} retractions, none required")
    if facts.retractions >= wanted:
        return Check("pressure", "pass", f"{facts.retractions} retractions, at least {wanted} required")
    if not facts.finished:
        return Check("pressure", "skipped", f"{facts.retractions} retractions until it stopped")
    return Check(
        "pressure", "unknown", f"only {facts.retractions} retractions, at least {wanted} are required"
    )
