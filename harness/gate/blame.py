"""Is the pinning at fault, or the barrier that it removes? By the four arms, or *cannot tell*. Pure.

A pageable copy also synchronises its stream on CANN (PLATFORMS.md), so an engine that pins loses a barrier too. The
four values of ``pinned`` take the two apart (DESIGN.md): ``pinned_sync`` pins and puts the barrier back,
``pinned_snapshot`` pins a copy of the source, so that nobody writes over it.

Each arm is held against another over the seeds that both have. Two symptoms are looked at, hangs by Fisher's exact
test and tokens by the sign test, so each test has half of 1 - confidence to itself. The blame *barrier* takes two
tests that both show something, which makes no error likelier than one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.gate.counting import hang_comparison, in_pools, token_comparison
from harness.gate.model import PAGEABLE, PINNED, SNAPSHOT, SYNC, Blame, Comparison, Trial

_WORDS = {"hang": "hang", "tokens": "have wrong tokens"}


def blame(trials: Sequence[Trial], confidence: float) -> Blame:
    """Over all pools: each is judged by itself, and what they say has to agree."""
    single = [blame_of_pool(members, confidence) for members in in_pools(trials).values()]
    found = [one for one in single if one.at_fault is not None]
    tests = tuple(test for one in single for test in one.tests)
    if not found:
        return replace(single[0], tests=tests) if single else Blame(None, "no trials to tell by")
    if len({one.at_fault for one in found}) > 1:
        told = "; ".join(f"{one.at_fault}: {one.why}" for one in found)
        return Blame(None, f"scenarios disagree: {told}", tests)
    return replace(found[0], tests=tests)


def blame_of_pool(trials: Sequence[Trial], confidence: float) -> Blame:
    alpha = (1.0 - confidence) / 2.0

    def worse(arm: str, against: str) -> dict[str, Comparison]:
        both = (hang_comparison(trials, arm, against, alpha), token_comparison(trials, arm, against, alpha))
        return {one.symptom: one for one in both}

    pinned, sync, snapshot = (worse(arm, PAGEABLE) for arm in (PINNED, SYNC, SNAPSHOT))
    cured, copied = worse(PINNED, SYNC), worse(PINNED, SNAPSHOT)
    tests = tuple(one for side in (pinned, sync, snapshot, cured, copied) for one in side.values() if one.n)
    if bad := [one for one in sync.values() if one.shown]:
        why = f"{SYNC} has the barrier back and trials still {_told(bad)}"
        return Blame("pinning", why, tests)
    symptoms = [one for one in pinned.values() if one.shown]
    if not symptoms:
        return Blame(None, _nothing_shown(pinned["hang"]), tests)
    what = f"trials with {PINNED} {_told(symptoms)}"
    uncured = [one.symptom for one in symptoms if not _gone(cured, sync, one.symptom)]
    if uncured:
        return Blame(None, f"{what}; {_undecided(cured[uncured[0]], SYNC)}", tests)
    what = f"{what}, with {SYNC} they do not ({_counts(cured[symptoms[0].symptom])})"
    if all(_gone(copied, snapshot, one.symptom) for one in symptoms):
        why = f"{what}, nor when the source was copied first: the source is reused while its copy is pending"
        return Blame("pinning", why, tests, reuse=True)
    if any(one.shown for one in snapshot.values()):
        return Blame("barrier", f"{what}, and a copied source does not cure it", tests)
    if not any(trial.pinned == SNAPSHOT for trial in trials):
        why = f"{what}: the lost barrier, or a source that is reused behind it, which only {SNAPSHOT} would tell"
        return Blame("barrier", why, tests)
    return Blame(None, f"{what}; {_undecided(copied[symptoms[0].symptom], SNAPSHOT)}", tests)


def _gone(cured: Mapping[str, Comparison], arm: Mapping[str, Comparison], symptom: str) -> bool:
    """Shown to be rarer than with ``pinned``, and no more often there than with pageable copies."""
    return cured[symptom].shown and arm[symptom].k <= arm[symptom].against_k


def _told(shown: Sequence[Comparison]) -> str:
    return " and ".join(f"{_WORDS[one.symptom]} ({_counts(one)})" for one in shown)


def _counts(one: Comparison) -> str:
    if one.symptom == "hang":
        return f"{one.k} of {one.n} against {one.against_k} of {one.n}, p = {one.p:.2g}"
    return f"more in {one.k} of {one.n} pairs, fewer in {one.against_k}, p = {one.p:.2g}"


def _nothing_shown(hang: Comparison) -> str:
    if not hang.n:
        return f"no seed has both a {PINNED} and a {PAGEABLE} trial"
    return f"trials with {PINNED} are not shown to be worse than pageable ones: hangs {_counts(hang)}"


def _undecided(one: Comparison, arm: str) -> str:
    if not one.n:
        return f"no seed has both a {PINNED} and a {arm} trial, so nobody can tell what it is"
    return f"whether {arm} cures it is not decided ({_counts(one)})"
