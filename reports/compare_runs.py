"""Two runs side by side, arm by arm: is the later one worse than the earlier one, the baseline?

Compared are arms that both runs have and that are defined alike, on one kind of device. Worse is: more hangs or
more trials with other tokens than one rate explains (exact test), a slower step (sure, and by more than the
practical threshold), a hang that the baseline never showed and nobody expected. Tests over many arms are
corrected (Holm, Bonferroni for intervals), so that a night of fifty arms does not find a regression by chance.

Told beside it, and no regression: signatures that are gone or known, slower hot paths beside the step, weaker
evidence, and what else has changed (``run_changes.py``). Not here: which run is the baseline (``baseline.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.rates import CONFIDENCE, Rate, more_often
from harness.store import StoredRun, read_run
from reports import result, words
from reports.fields import Document
from reports.model import ArmResult, Result
from reports.run_changes import Change, changes, defined_otherwise
from reports.statistics import MIN_TRIALS, PRACTICAL_THRESHOLD, Ratio, percentiles, ratio_of_medians

SCHEMA = 1
_WEAKER = 1.5
"""The bound on the rate of hangs may be so many times as high before the evidence is called weaker."""
_EXPECTED_HANGS = ("sometimes", "always")


@dataclass(slots=True)
class _Pair:
    """One arm in both runs, and what was found."""

    before: ArmResult
    after: ArmResult
    reasons: list[str] = field(default_factory=list)
    """Why it is worse."""
    notes: list[str] = field(default_factory=list)
    latency: dict[str, Ratio] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.after.scenario} {self.after.name}"

    def to_json(self) -> dict[str, Any]:
        before, after = self.before, self.after
        step = self.latency.get("step") or Ratio(
            None, None, None, "too-few-samples", "no samples on one side"
        )
        return {
            "scenario": after.scenario,
            "arm": dict(after.arm),
            "trials": {"before": len(before.trials), "after": len(after.trials)},
            "hangs": {"before": before.hangs.to_json(), "after": after.hangs.to_json()},
            "corrupt": {"before": before.corrupt.to_json(), "after": after.corrupt.to_json()},
            "step": step.to_json(),
            "slower": {path: one.to_json() for path, one in self.latency.items() if one.verdict == "slower"},
            "regression": bool(self.reasons),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }


def compare_runs(before: str | Path, after: str | Path) -> dict[str, Any]:
    """See ``compare``. Raises StoreError when a path is no run."""
    old, new = read_run(before), read_run(after)
    return compare(old, new, result.build(new))


def compare(before: StoredRun, after: StoredRun, new: Result) -> dict[str, Any]:
    """``{"verdict": "no-regression"|"regression"|"not-comparable", "arms": [...], "sentence": str, ...}``.

    ``new``: what was built of ``after``.
    """
    old = result.build(before)
    changed = changes(before.run, after.run)
    pairs, apart = _pairs(old, new, before.run, after.run)
    _rates(pairs)
    if not any(change.latencies for change in changed):
        _latencies(pairs, new.seed)
    _evidence(pairs)
    signatures = _signatures(old, new, pairs)
    verdict = "not-comparable"
    if pairs:
        verdict = "regression" if any(pair.reasons for pair in pairs) else "no-regression"
    return {
        "schema": SCHEMA,
        "before": old.run,
        "after": new.run,
        "simulation": old.simulation or new.simulation,
        "verdict": verdict,
        "arms": [pair.to_json() for pair in pairs],
        "signatures": signatures,
        "changes": [change.to_json() for change in changed],
        "not_compared": apart,
        "sentence": _sentence(old, new, verdict, pairs, changed),
    }


def exit_status(document: Mapping[str, Any]) -> int:
    return {"no-regression": 0, "regression": 1}.get(document["verdict"], 3)


# --- which arms --------------------------------------------------------------------------------------------


def _pairs(
    old: Result, new: Result, before: Document, after: Document
) -> tuple[list[_Pair], list[dict[str, str]]]:
    """The arms that can be compared, and those that cannot, with the reason."""
    then = {(arm.scenario, arm.name): arm for arm in old.arms if arm.same_as is None}
    now = {(arm.scenario, arm.name): arm for arm in new.arms if arm.same_as is None}
    other = defined_otherwise(before, after)
    pairs, apart = [], []
    for key in {**now, **then}:
        why = ""
        if old.device != new.device:
            why = f"{old.device} against {new.device}"
        elif key not in then or key not in now:
            why = f"only in the {'later run' if key in now else 'baseline'}"
        elif key in other:
            why = "its requests, model or toggles are not those of the baseline"
        elif not then[key].hangs.n or not now[key].hangs.n:
            why = (
                f"no trial with a known outcome in the {'baseline' if not then[key].hangs.n else 'later run'}"
            )
        if why:
            apart.append({"scenario": key[0], "arm": key[1], "why": why})
        else:
            pairs.append(_Pair(then[key], now[key]))
    return pairs, apart


# --- rates and latencies -----------------------------------------------------------------------------------


def _rates(pairs: Sequence[_Pair]) -> None:
    for what, of in (("hangs", _hangs), ("trials with other tokens", _corrupt)):
        # Where nothing ever happened no test can find more of it.
        tested = [(pair, *sides) for pair in pairs if (sides := of(pair))[0].k + sides[1].k]
        p_values = [more_often(after.k, after.n, before.k, before.n) for _, before, after in tested]
        for place in significant(p_values):
            pair, before, after = tested[place]
            pair.reasons.append(f"{what} went from {words.k_of_n(before)} to {words.k_of_n(after)}")


def _hangs(pair: _Pair) -> tuple[Rate, Rate]:
    return pair.before.hangs, pair.after.hangs


def _corrupt(pair: _Pair) -> tuple[Rate, Rate]:
    return pair.before.corrupt, pair.after.corrupt


def significant(p_values: Sequence[float]) -> list[int]:
    """Places of the tests that are significant together, by Holm's step-down procedure (Scandinavian Journal of
    Statistics 6, 1979): any false one among them has a chance of 1 - CONFIDENCE, however many tests there are."""
    ordered = sorted(range(len(p_values)), key=lambda place: p_values[place])
    for rank, place in enumerate(ordered):
        if p_values[place] >= (1.0 - CONFIDENCE) / (len(ordered) - rank):
            return ordered[:rank]
    return ordered


def _latencies(pairs: Sequence[_Pair], seed: int) -> None:
    """The step decides; other hot paths are looked at where their medians differ by enough to matter."""
    able = [pair for pair in pairs if min(map(len, _steps(pair))) >= MIN_TRIALS]
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(1, len(able))
    for pair in pairs:
        for path in sorted(pair.after.samples_us.keys() & pair.before.samples_us.keys()):
            own, other = pair.after.samples_us[path], pair.before.samples_us[path]
            if path != "step" and not _slower_by_medians(own, other):
                continue
            found = ratio_of_medians(own, other, seed=seed, confidence=confidence)
            pair.latency[path] = found
            if found.verdict == "slower":
                told = f"the median {path} takes {found.ratio:.2f} times as long"
                (pair.reasons if path == "step" else pair.notes).append(told)


def _steps(pair: _Pair) -> tuple[Sequence[Any], Sequence[Any]]:
    return pair.before.samples_us.get("step", ()), pair.after.samples_us.get("step", ())


def _slower_by_medians(own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    now, then = (percentiles([v for trial in side for v in trial]) for side in (own, other))
    return now is not None and then is not None and now.p50 >= (1.0 + PRACTICAL_THRESHOLD) * then.p50


# --- evidence and signatures -------------------------------------------------------------------------------


def _evidence(pairs: Sequence[_Pair]) -> None:
    """Where the later run says less than the baseline did."""
    for pair in pairs:
        before, after = pair.before.hangs, pair.after.hangs
        if after.high > _WEAKER * before.high:
            told = (
                f"{after.n} trials against {before.n} leave a rate of up to {words.percent(after.high)} open"
            )
            pair.notes.append(f"weaker evidence: {told}, before {words.percent(before.high)}")
        for what, then, now in (
            ("trials of unknown outcome", _unknown(pair.before), _unknown(pair.after)),
            ("diagnoses that lack evidence", _lacking(pair.before), _lacking(pair.after)),
        ):
            if now > then:
                pair.notes.append(f"weaker evidence: {what} went from {then} to {now}")


def _unknown(arm: ArmResult) -> int:
    return sum(trial.outcome == "unknown" for trial in arm.trials)


def _lacking(arm: ArmResult) -> int:
    return sum(trial.diagnosis is not None and bool(trial.diagnosis.missing_evidence) for trial in arm.trials)


def _signatures(old: Result, new: Result, pairs: Sequence[_Pair]) -> list[dict[str, Any]]:
    """Every signature of either run. A new one of an arm that was compared is a regression, unless a known issue
    lists it or the scenario expects hangs of that mechanism there."""
    then = {row.signature: row for row in old.signatures}
    now = {row.signature: row for row in new.signatures}
    found = []
    for signature, row in {**then, **now}.items():
        status = "both" if signature in then and signature in now else "new" if signature in now else "gone"
        known = now[signature].known if signature in now else row.known
        found.append(
            {
                "signature": signature,
                "mechanism": row.mechanism,
                "status": status,
                "before": then[signature].count if signature in then else 0,
                "after": now[signature].count if signature in now else 0,
                "known": known.status == "known",
                "link": known.link or None,
            }
        )
        if status == "new" and known.status != "known":
            for pair in pairs:
                _new_hang(pair, signature)
    return found


def _new_hang(pair: _Pair, signature: str) -> None:
    trials = [
        trial
        for trial in pair.after.trials
        if trial.stopped and trial.diagnosis is not None and trial.diagnosis.signature == signature
    ]
    if not trials:
        return
    mechanism = trials[0].diagnosis.mechanism if trials[0].diagnosis is not None else "unknown"
    expected = pair.after.expectation
    told = f"a hang that the baseline has not: {signature} in {trials[0].name}"
    if expected.hang in _EXPECTED_HANGS and expected.mechanism in (None, mechanism):
        pair.notes.append(told)
    else:
        pair.reasons.append(told)


# --- words -------------------------------------------------------------------------------------------------


def _sentence(
    old: Result, new: Result, verdict: str, pairs: Sequence[_Pair], changed: Sequence[Change]
) -> str:
    start = "In simulation: " if old.simulation or new.simulation else ""
    if verdict == "not-comparable":
        why = (
            "no arm of both is defined alike and has trials"
            if old.device == new.device
            else f"{old.device} against {new.device}"
        )
        return f"{start}the runs cannot be compared: {why}."
    worse = [f"{pair.name}: {' and '.join(pair.reasons)}" for pair in pairs if pair.reasons]
    notes = [*_changed_words(changed)]
    if weaker := sum(any(note.startswith("weaker") for note in pair.notes) for pair in pairs):
        notes.append(f"the evidence is weaker in {words.count(weaker, 'arm')}")
    tail = f" ({'; '.join(notes)})" if notes else ""
    if worse:
        return f"{start}worse than the baseline in {words.listing(worse)}{tail}."
    return f"{start}no regression shown in {words.count(len(pairs), 'arm')} that both runs have{tail}."


def _changed_words(changed: Sequence[Change]) -> list[str]:
    if not changed:
        return []
    named = words.listing([f"{change.what} ({change.before} → {change.after})" for change in changed])
    apart = "; latencies are not compared" if any(change.latencies for change in changed) else ""
    return [f"changed since: {named}{apart}"]


def render(document: Mapping[str, Any]) -> str:
    """A line an arm, what else was found, and the sentence, for a terminal."""
    lines = []
    for arm in document["arms"]:
        before, after = arm["hangs"]["before"], arm["hangs"]["after"]
        ratio = arm["step"]["ratio"]
        step = "no step times" if ratio is None else f"step x{ratio:.2f} ({arm['step']['verdict']})"
        lines.append(
            f"{arm['scenario']} {words.arm_name(arm['arm'])}: hangs {before['k']} of {before['n']} -> "
            f"{after['k']} of {after['n']}, {step}"
        )
        lines += [f"  {note}" for note in (*arm["reasons"], *arm["notes"])]
    for row in document["signatures"]:
        known = ", a known issue" if row["known"] else ""
        if row["status"] != "both" or known:
            lines.append(
                f"signature {row['status']}{known}: {row['signature']}, {row['before']} -> {row['after']}"
            )
    lines += [
        f"not compared: {one['scenario']} {one['arm']}: {one['why']}" for one in document["not_compared"]
    ]
    return "\n".join([*lines, "", document["sentence"], ""])
