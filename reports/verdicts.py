"""The rules that turn trials into an arm's verdict, arms into a scenario's, and scenarios into a run's.

Pure. The rules are those of the design's "Toggles are requests" and of the contract's exit statuses; they
lean one way only: what could not be seen makes ``unknown``, never ``pass``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.rates import CONFIDENCE, Rate, more_often, rate
from reports.model import Expectation, TrialResult, Verdict
from reports.words import count, interval, k_of_n, listing, percent

INTERNAL_ERROR_EXIT = 70
_EXIT: dict[Verdict, int] = {"fail": 1, "unknown": 3, "skipped": 4, "pass": 0}
_SURPRISE = 1.0 - CONFIDENCE
_ORDER: tuple[Verdict, ...] = ("fail", "unknown", "skipped", "pass")


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict and the clause that gives its reason."""

    verdict: Verdict
    why: str


def hang_rate(trials: Sequence[TrialResult]) -> Rate:
    """Trials that stopped, of those whose outcome is known: an unknown one is evidence for neither side."""
    known = [trial for trial in trials if trial.conclusive]
    return rate(sum(trial.stopped for trial in known), len(known))


def corrupt_rate(trials: Sequence[TrialResult]) -> Rate:
    """Trials whose tokens differ, of those that compared any."""
    compared = [trial for trial in trials if trial.conclusive and (trial.tokens_compared or trial.differs)]
    return rate(sum(trial.differs for trial in compared), len(compared))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first of fail, unknown, skipped, pass that occurs; nothing at all is ``unknown``."""
    seen = set(verdicts)
    return next((verdict for verdict in _ORDER if verdict in seen), "unknown")


def exit_status(verdict: Verdict, *, allow_skip: bool, internal_error: bool) -> int:
    """The first that holds of 70, 1, 3, 4, 0 (2, bad usage, ends a command before there is a run)."""
    if internal_error:
        return INTERNAL_ERROR_EXIT
    return 0 if verdict == "skipped" and allow_skip else _EXIT[verdict]


def judge_arm(
    expectation: Expectation,
    trials: Sequence[TrialResult],
    never_run: int = 0,
    left_out: int = 0,
    leaver: str = "the time budget",
    pageable: Rate | None = None,
) -> Finding:
    """The arm's verdict: the first failing rule, else the first unknown one, else what was seen.

    ``never_run`` counts planned trials of this arm that left no directory. ``left_out`` counts those that
    ``leaver`` left out: the others are judged by their own interval, and the reason says how many they were.
    ``pageable``: how often tokens differ in the arm with pageable copies, where less than float32 has noise.
    """
    ran = [trial for trial in trials if trial.verdict != "skipped"]
    finding = _judge_arm(expectation, trials, ran, never_run, pageable)
    if not left_out:
        return finding
    why = f"{leaver} left out {left_out} of {count(left_out + len(trials) + never_run, 'planned trial')}"
    return Finding(finding.verdict, f"{finding.why}; {why}")


def _judge_arm(
    expectation: Expectation,
    trials: Sequence[TrialResult],
    ran: Sequence[TrialResult],
    never_run: int,
    pageable: Rate | None,
) -> Finding:
    if not ran and not never_run:
        return _skipped(trials)
    findings = [
        *_RULES[expectation.hang if expectation.hang in _RULES else "any"](expectation, hang_rate(ran)),
        *_mechanism(expectation, ran),
        *_tokens(expectation, ran, pageable),
        *_trial_verdicts(ran),
    ]
    if never_run:
        findings.append(Finding("unknown", f"{count(never_run, 'planned trial')} never ran"))
    for verdict in ("fail", "unknown"):
        found = [finding for finding in findings if finding.verdict == verdict]
        if found:
            return found[0]
    return Finding("pass", "; ".join(finding.why for finding in findings) or "as expected")


def _skipped(trials: Sequence[TrialResult]) -> Finding:
    if not trials:
        return Finding("unknown", "no trial ran")
    reasons = [check.reason for check in trials[0].checks if check.verdict == "skipped" and check.reason]
    return Finding("skipped", reasons[0] if reasons else "every trial was skipped")


def _seen(hangs: Rate) -> str:
    return f"{k_of_n(hangs)} hung ({interval(hangs)})"


def _never(expectation: Expectation, hangs: Rate) -> list[Finding]:
    if hangs.k:
        return [Finding("fail", f"no hang was allowed, {_seen(hangs)}")]
    if hangs.n == 0:
        return [Finding("unknown", "no trial has a known outcome")]
    return [Finding("pass", f"no hang in {count(hangs.n, 'trial')}, rate at most {percent(hangs.high)}")]


def _sometimes(expectation: Expectation, hangs: Rate) -> list[Finding]:
    if hangs.k:
        return [Finding("pass", f"a hang was expected sometimes, {_seen(hangs)}")]
    least = expectation.min_rate
    if least is not None and hangs.n and hangs.high < least:
        why = f"a hang was expected in at least {percent(least)}, {_seen(hangs)}"
        return [Finding("fail", why)]
    why = f"a hang was expected sometimes, {_seen(hangs)}: too few trials to say that it is gone"
    return [Finding("unknown", why)]


def _always(expectation: Expectation, hangs: Rate) -> list[Finding]:
    if hangs.n == 0:
        return [Finding("unknown", "no trial has a known outcome")]
    if hangs.k < hangs.n:
        return [Finding("fail", f"every trial was expected to hang, {_seen(hangs)}")]
    return [Finding("pass", f"every trial was expected to hang, {_seen(hangs)}")]


def _any(expectation: Expectation, hangs: Rate) -> list[Finding]:
    if hangs.n == 0:
        return [Finding("unknown", "no trial has a known outcome")]
    return [Finding("pass", f"observed, {_seen(hangs)}")]


_RULES: dict[str, Callable[[Expectation, Rate], list[Finding]]] = {
    "never": _never,
    "sometimes": _sometimes,
    "always": _always,
    "any": _any,
}


def _mechanism(expectation: Expectation, trials: Sequence[TrialResult]) -> list[Finding]:
    wanted = expectation.mechanism
    if wanted is None:
        return []
    seen = Counter(_observed_mechanism(trial) for trial in trials if trial.stopped)
    wrong = sorted(name for name in seen if name not in (wanted, "unknown"))
    if wrong:
        sides = listing([f"{name} in {seen[name]}" for name in wrong])
        return [Finding("fail", f"hangs were expected by {wanted}, the diagnosis says {sides}")]
    if seen["unknown"]:
        return [Finding("unknown", f"{count(seen['unknown'], 'hang')} of unknown mechanism, not {wanted}")]
    return []


def _observed_mechanism(trial: TrialResult) -> str:
    return "unknown" if trial.diagnosis is None else trial.diagnosis.mechanism


def _tokens(expectation: Expectation, trials: Sequence[TrialResult], pageable: Rate | None) -> list[Finding]:
    corrupt = corrupt_rate(trials)
    if expectation.tokens == "equal" and corrupt.k and not all(trial.tokens_exact for trial in trials):
        return [_beside_noise(corrupt, pageable)]
    if expectation.tokens == "equal" and corrupt.k:
        return [Finding("fail", f"tokens differ from the reference in {k_of_n(corrupt)} trials")]
    if expectation.tokens == "differ" and not corrupt.k:
        least = expectation.min_rate
        excluded = least is not None and corrupt.n > 0 and corrupt.high < least
        why = f"tokens were expected to differ, {k_of_n(corrupt)} did ({interval(corrupt)})"
        return [Finding("fail" if excluded else "unknown", why)]
    if expectation.tokens == "differ":
        return [Finding("pass", f"tokens were expected to differ, {k_of_n(corrupt)} did")]
    return []


def _beside_noise(corrupt: Rate, pageable: Rate | None) -> Finding:
    """Below float32 a healthy engine flips a token now and then: what counts is more often than with pageable
    copies (DESIGN.md), by Fisher's exact test, one-sided."""
    differ = f"tokens differ in {k_of_n(corrupt)} trials"
    if pageable is None:
        return Finding("unknown", f"{differ}, and no arm with pageable copies says how many do anyway")
    against = f"{differ}, in {k_of_n(pageable)} with pageable copies"
    p = more_often(corrupt.k, corrupt.n, pageable.k, pageable.n)
    if p <= _SURPRISE:
        return Finding("fail", f"{against}: more often (p = {p:.2g})")
    if more_often(corrupt.n, corrupt.n, pageable.k, pageable.n) > _SURPRISE and corrupt != pageable:
        return Finding("unknown", f"{against}: too few trials to tell")
    return Finding("pass", f"{against}, as a changed batch does below float32")


def _trial_verdicts(trials: Sequence[TrialResult]) -> list[Finding]:
    """What the checkers said of single trials, whatever the arm's counts say."""
    findings: list[Finding] = []
    for verdict in ("fail", "unknown"):
        found = [trial for trial in trials if trial.verdict == verdict]
        if found:
            findings.append(Finding(verdict, f"{count(len(found), 'trial')} {_reason(found[0], verdict)}"))
    return findings


def _reason(trial: TrialResult, verdict: Verdict) -> str:
    said = "failed" if verdict == "fail" else "unknown"
    for check in trial.checks:
        if check.verdict == verdict:
            return f"{said}: {check.name}: {check.reason}" if check.reason else f"{said}: {check.name}"
    return f"{said}: {trial.problems[0]}" if trial.problems else said
