"""What a yes needs, each with its verdict: met, failed (a no) or missing, and what would supply it. Pure.

One pool counts (``Seen.main``). Others cannot meet a need, but what goes wrong in them fails it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.gate import commands
from harness.gate.counting import compared, counted, in_pools, token_comparison
from harness.gate.model import (
    PAGEABLE,
    PINNED,
    PINNING,
    SHARED,
    Document,
    Lack,
    LitmusTest,
    Need,
    Pool,
    Trial,
    Wish,
)
from harness.gate.platforms import Chosen, unrecorded
from harness.litmus.rules import MODEL_OF_DEVICE, RULES
from harness.rates import at_least, at_most, percent, trials_for

PATHS = ("next_token_copy", "bitmask_copy", "token_count_copy", "step")
"""What must have an interval: the paths of ``hangrig compare`` (CONTRACTS.md)."""
_TRIALS = 10
"""Enough for an interval of a ratio (`reports.statistics` wants 5 on a side)."""
_UNDECIDED = "too-few-samples"
_BOTH = 'arms.prefix_cache=["on","off"]'
"""Makes a second pageable arm, which a foreign engine's reference is not in."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that the needs look at: the chosen evidence, its trials, and what is asked."""

    chosen: Chosen
    wish: Wish
    trials: tuple[Trial, ...]

    @property
    def device(self) -> str:
        return self.chosen.device

    @property
    def trials_wanted(self) -> int:
        return trials_for(self.wish.bound, self.wish.confidence)

    def main(self) -> tuple[Pool | None, list[Trial]]:
        """The pool that counts, and its trials: the first that has enough of all, else the largest."""
        pools = list(in_pools(self.trials).values())
        members = next(filter(self._enough, pools), pools[0] if pools else [])
        if not counted(members, PINNED)[1]:
            return None, []
        return members[0].pool, members

    def _enough(self, members: Sequence[Trial]) -> bool:
        number = self.trials_wanted
        return counted(members, PINNED)[1] >= number <= len(compared(members, PINNED, PAGEABLE))

    def more(self, trials: int, settings: Sequence[str] = ()) -> str:
        """The command for ``trials`` more of each arm of the pool that counts, or the first of one."""
        pool, members = self.main()
        if pool is None:
            return commands.run(self.device, self.trials_wanted)
        return commands.run(self.device, trials, pool, members, settings=settings)


def needs(seen: Seen) -> tuple[Need, ...]:
    """All of them, in the order in which they are told."""
    return platform(seen), litmus(seen), hangs(seen), tokens(seen), latency(seen)


# --- the platform ------------------------------------------------------------------------------------------


def platform(seen: Seen) -> Need:
    """Whoever reads the answer later has to know what it was about."""
    device, evidence = seen.device, seen.chosen.counted
    wanted = "device, driver and versions recorded in each run and litmus result"
    if not evidence:
        return Need("platform", "missing", f"no evidence of {device}", wanted, {"unrecorded": {}})
    lacking = unrecorded(device, evidence)
    if lacking:
        told = "; ".join(f"{path} does not record {', '.join(names)}" for path, names in lacking.items())
        lack = Lack(f"the platform: {told}", commands.doctor(device))
        return Need("platform", "missing", told, wanted, {"unrecorded": lacking}, (lack,))
    return Need("platform", "met", seen.chosen.platform, wanted, {"unrecorded": {}})


# --- litmus ------------------------------------------------------------------------------------------------


def litmus(seen: Seen) -> Need:
    """Every forbidden outcome Never, and in a test that could have shown it."""
    wanted = "every forbidden litmus outcome Never, with power shown"
    tests = merged([test for one in seen.chosen.counted for test in one.tests])
    absent = sorted(forbidden_on(seen.device) - tests.keys()) if tests else []
    seen_bad = [test for test in tests.values() if test.verdict == "fail" or (test.forbidden and test.k)]
    forbidden = [test for test in tests.values() if test.forbidden]
    weak = [test for test in forbidden if not (test.power and test.n and test.verdict == "pass")]
    figures = {"tests": [_test_json(test) for test in tests.values()], "not_run": absent}
    if seen_bad:
        told = ", ".join(f"{test.name} {test.k} of {test.n}" for test in seen_bad)
        return Need("litmus", "failed", f"seen though forbidden: {told}", wanted, figures)
    if not forbidden:
        lack = Lack("a litmus result of this platform", commands.litmus(seen.device))
        return Need("litmus", "missing", "no litmus result", wanted, figures, (lack,))
    if weak or absent:
        told = "; ".join(f"{test.name}: {_weakness(test)}" for test in weak)
        told = "; ".join([*([told] if told else []), *(f"{name}: not run" for name in absent)])
        shots = max((test.n for test in weak), default=0)
        again = commands.litmus(seen.device, 10 * shots if shots else None)
        return Need("litmus", "missing", told, wanted, figures, (Lack(f"litmus tests: {told}", again),))
    worst = max(at_most(0, test.n, seen.wish.confidence) for test in forbidden)
    told = f"{len(forbidden)} of {len(forbidden)} Never with power, each below {share(worst)} of shots"
    return Need("litmus", "met", told, wanted, figures)


def forbidden_on(device: str) -> frozenset[str]:
    """Tests that no litmus result of a real device may leave out; none of a simulated one, which opens no gate."""
    model = MODEL_OF_DEVICE.get(device)
    return frozenset(
        name for name, rules in RULES.items() if model and rules.by_model[model].kind == "forbidden"
    )


def merged(tests: Sequence[LitmusTest]) -> dict[str, LitmusTest]:
    """Results of one test added up: seen once is seen, and one with power is enough."""
    found: dict[str, LitmusTest] = {}
    order = ("fail", "pass", "unknown", "skipped")
    for test in tests:
        if (other := found.get(test.name)) is None:
            found[test.name] = test
            continue
        # Shots without power say nothing, and are not counted beside shots with power.
        both = [one for one in (other, test) if one.power or not (other.power or test.power)]
        better = min((other, test), key=lambda one: (*order, one.verdict).index(one.verdict))
        found[test.name] = replace(
            better,
            forbidden=other.forbidden or test.forbidden,
            k=other.k + test.k,
            n=max(sum(one.n for one in both), other.k + test.k),
            power=other.power or test.power,
        )
    return found


def _weakness(test: LitmusTest) -> str:
    if test.why:
        return test.why
    if not test.n:
        return "no shot"
    return "no power shown" if not test.power else f"its verdict is {test.verdict}"


def _test_json(test: LitmusTest) -> dict[str, Any]:
    return {name: getattr(test, name) for name in ("name", "forbidden", "k", "n", "power", "verdict")}


# --- hangs -------------------------------------------------------------------------------------------------


def hangs(seen: Seen) -> Need:
    """No hang with pinned copies in enough trials under retraction.

    Failed: the lower bound lies above the wanted one, or an arm that pins hung and no pageable trial of its pool
    did.
    """
    wish, number = seen.wish, seen.trials_wanted
    wanted = (
        f"no hang in {number} trials with pinned copies under retraction: a rate below {percent(wish.bound)} at "
        f"{percent(wish.confidence)}, one-sided"
    )
    pool, members = seen.main()
    k, n = counted(members, PINNED)
    upper = at_most(k, n, wish.confidence)
    figures = {
        "k": k, "n": n, "at_most": upper, "wanted_trials": number, "hung": _hung(seen.trials),
        "scenario": None if pool is None else pool.scenario, "model": None if pool is None else pool.model,
    }  # fmt: skip
    found = f"{k} of {n} hung" + (f": a rate below {share(upper)}" if n else "")
    failures: list[tuple[str, list[Trial]]] = []
    doubts: list[tuple[str, list[Trial]]] = []
    for trials in in_pools(seen.trials).values():
        for value in PINNING:
            hung, of = counted(trials, value)
            if hung:
                against, pageable = counted(trials, PAGEABLE)
                told = (
                    f"{hung} of {of} hung with {value}, {against} of {pageable} pageable "
                    f"({trials[0].pool.scenario})"
                )
                alone = pageable > 0 and against == 0
                failed = alone or at_least(hung, of, wish.confidence) > wish.bound
                (failures if failed else doubts).append((told, trials))
    if failures:
        return Need("hangs", "failed", "; ".join(told for told, _ in failures), wanted, figures)
    if doubts:
        return Need(
            "hangs", "missing", "; ".join(told for told, _ in doubts), wanted, figures, _doubts(doubts)
        )
    if n < number:
        what = f"{number - n} more trials of {PINNED} without a hang, under retraction"
        return Need("hangs", "missing", found, wanted, figures, (Lack(what, seen.more(number - n)),))
    return Need("hangs", "met", found, wanted, figures)


def _hung(trials: Sequence[Trial]) -> list[dict[str, str]]:
    names = ("run", "id", "pinned", "outcome", "signature")
    return [{name: getattr(trial, name) for name in names} for trial in trials if trial.hung and trial.known]


def _doubts(doubts: Sequence[tuple[str, Sequence[Trial]]]) -> tuple[Lack, ...]:
    lacks = []
    for told, trials in doubts:
        first = next(trial for trial in trials if trial.hung and trial.known and trial.pinned in PINNING)
        what = f"the cause of hangs that may not be pinning's own: {told}; then trials without them"
        lacks.append(Lack(what, commands.report(first.run)))
    return tuple(lacks)


# --- tokens ------------------------------------------------------------------------------------------------


def tokens(seen: Seen) -> Need:
    """Pinned trials differ from the reference no more often than pageable trials of the same seeds do.

    Where no pageable trial differs at all there is no noise to explain a difference: then pairs in which pinned
    differs are counted as hangs are, against the same bound.
    """
    wish, number = seen.wish, seen.trials_wanted
    alpha = 1.0 - wish.confidence
    wanted = f"in {number} pairs of seeds, differences no more often than between pageable trials"
    pool, members = seen.main()
    found = token_comparison(members, PINNED, PAGEABLE, alpha)
    noise = any(b.tokens_differ for _, b in compared(members, PINNED, PAGEABLE))
    figures = {
        "pairs": found.n, "more": found.k, "fewer": found.against_k, "p": found.p, "wanted_pairs": number,
        "pageable_differ": noise,
    }  # fmt: skip
    told = f"{found.n} pairs: {found.k} with more, {found.against_k} with fewer (p = {found.p:.2g})"
    every = [token_comparison(trials, PINNED, PAGEABLE, alpha) for trials in in_pools(seen.trials).values()]
    if failed := [one for one in every if one.shown]:
        worst = min(failed, key=lambda one: one.p)
        bad = f"more often in {worst.k} of {worst.n} pairs, less in {worst.against_k} (p = {worst.p:.2g})"
        return Need("tokens", "failed", bad, wanted, figures)
    fewest = number if noise or not found.k else trials_for(wish.bound, wish.confidence, found.k)
    if found.n < fewest:
        what = f"{fewest - found.n} more pairs of a pinned and a pageable trial with compared tokens"
        if fewest > number:
            what += f": {found.k} differ, and no pageable trial shows that this is noise"
        settings: tuple[str, ...] = ()
        if pool is not None and pool.foreign and not found.n:
            what += ", neither of them the reference: under another toggle than the first arm of a seed"
            settings = (_BOTH,)
        lack = Lack(what, seen.more(fewest - found.n, settings))
        return Need("tokens", "missing", told, wanted, figures, (lack,))
    return Need("tokens", "met", told, wanted, figures)


# --- latency -----------------------------------------------------------------------------------------------


def latency(seen: Seen) -> Need:
    """The gain is measured: a ratio with its interval for each path. How large it is decides nothing."""
    wanted = f"median of {PINNED} over {PAGEABLE} with its interval: {', '.join(PATHS)}"
    pool, members = seen.main()
    runs = {trial.run for trial in seen.trials if pool is not None and trial.pool.key == pool.key}
    best: dict[str, Document] = {}
    source = None
    usable = [one for one in seen.chosen.counted if not any(trial.weak == SHARED for trial in one.trials)]
    for one in sorted(usable, key=lambda one: (one.path not in runs, one.path)):
        rows = ratios(one.latency or {})
        if len(rows) > len(best):
            best, source = rows, one.path
    of = {f"{trial.pool.scenario} (model {trial.pool.model})" for trial in seen.trials if trial.run == source}
    figures = {"run": source, "of": sorted(of), "ratios": {path: dict(row) for path, row in best.items()}}
    told = ", ".join(
        f"{path} {row['ratio']:.3g} ({row['low']:.3g} to {row['high']:.3g})" for path, row in best.items()
    )
    lacking = [path for path in PATHS if path not in best]
    if lacking:
        told = f"{told}; nothing for {', '.join(lacking)}" if told else "not measured"
        what = f"the ratio of {PINNED} and {PAGEABLE} for {', '.join(lacking)}"
        if pool is not None and pool.foreign:  # it does not time each path; the built-in engine does
            command = commands.run(seen.device, _TRIALS, scenario=commands.LATENCY_SCENARIO)
        else:  # where trials are missing anyway, these bring it along
            command = seen.more(max(seen.trials_wanted - counted(members, PINNED)[1], _TRIALS))
        return Need("latency", "missing", told, wanted, figures, (Lack(what, command),))
    return Need("latency", "met", told, wanted, figures)


def ratios(document: Mapping[str, Any]) -> dict[str, Document]:
    """Of the document of ``hangrig compare --by pinned``: the paths whose ratio has an interval."""
    found = {}
    rows = document.get("paths")
    for row in rows if isinstance(rows, list) else []:
        ratio = row.get("ratios", {}).get(PINNED)
        if row.get("path") in PATHS and row.get("against") == PAGEABLE and ratio and ratio["low"] is not None:
            found[str(row["path"])] = ratio
    return found


def share(bound: float) -> str:
    """A bound with three digits: ``0.997 %`` is below 1 %, and 1 % is not."""
    return f"{100.0 * bound:.3g} %"


def decided(ratio: Document) -> bool:
    return ratio.get("verdict") != _UNDECIDED
