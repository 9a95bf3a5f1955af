"""Two runs side by side, arm by arm: did more trials hang, did steps become slower?

Only arms that both runs have are compared, and only between runs on the same kind of device. The baseline
is the first run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.rates import CONFIDENCE, more_often
from harness.store import read_run
from reports import result, words
from reports.model import ArmResult, Result
from reports.statistics import ratio_of_medians

SCHEMA = 1


def compare_runs(before: str | Path, after: str | Path) -> dict[str, Any]:
    """``{"verdict": "no-regression"|"regression"|"not-comparable", "arms": [...], "sentence": str}``.

    Raises StoreError when a path is no run.
    """
    old, new = (result.build(read_run(path)) for path in (before, after))
    known = {(arm.scenario, arm.name): arm for arm in old.arms if arm.same_as is None}
    pairs = [
        (known[arm.scenario, arm.name], arm)
        for arm in new.arms
        if arm.same_as is None and (arm.scenario, arm.name) in known and old.device == new.device
    ]
    arms = [_arm(first, second, new.seed) for first, second in pairs if first.trials and second.trials]
    verdict = "not-comparable"
    if arms:
        verdict = "regression" if any(arm["regression"] for arm in arms) else "no-regression"
    return {
        "schema": SCHEMA,
        "before": old.run,
        "after": new.run,
        "simulation": old.simulation or new.simulation,
        "verdict": verdict,
        "arms": arms,
        "sentence": _sentence(old, new, verdict, arms),
    }


def exit_status(document: Mapping[str, Any]) -> int:
    return {"no-regression": 0, "regression": 1}.get(document["verdict"], 3)


def _arm(before: ArmResult, after: ArmResult, seed: int) -> dict[str, Any]:
    step = ratio_of_medians(after.samples_us.get("step", ()), before.samples_us.get("step", ()), seed=seed)
    more = _hangs_more(before, after)
    reasons = [
        *([f"hangs went from {words.k_of_n(before.hangs)} to {words.k_of_n(after.hangs)}"] if more else []),
        *([f"the median step takes {step.ratio:.2f} times as long"] if step.verdict == "slower" else []),
    ]
    return {
        "scenario": after.scenario,
        "arm": dict(after.arm),
        "hangs": {"before": before.hangs.to_json(), "after": after.hangs.to_json()},
        "step": step.to_json(),
        "regression": bool(reasons),
        "reasons": reasons,
    }


def _hangs_more(before: ArmResult, after: ArmResult) -> bool:
    """Fisher's exact test, one-sided: do more trials hang than the baseline's rate explains?"""
    p_value = more_often(after.hangs.k, after.hangs.n, before.hangs.k, before.hangs.n)
    return p_value < 1.0 - CONFIDENCE


def _sentence(old: Result, new: Result, verdict: str, arms: list[dict[str, Any]]) -> str:
    start = "In simulation: " if old.simulation or new.simulation else ""
    if verdict == "not-comparable":
        why = "no arm is in both" if old.device == new.device else f"{old.device} against {new.device}"
        return f"{start}the runs cannot be compared: {why}."
    worse = [
        f"{arm['scenario']} {words.arm_name(arm['arm'])}: {' and '.join(arm['reasons'])}"
        for arm in arms
        if arm["regression"]
    ]
    if worse:
        return f"{start}worse than the baseline in {words.listing(worse)}."
    return f"{start}no regression shown in {words.count(len(arms), 'arm')} that both runs have."


def render(document: Mapping[str, Any]) -> str:
    """One line an arm and the sentence, for a terminal."""
    lines = []
    for arm in document["arms"]:
        before, after = arm["hangs"]["before"], arm["hangs"]["after"]
        ratio = arm["step"]["ratio"]
        step = "no step times" if ratio is None else f"step x{ratio:.2f} ({arm['step']['verdict']})"
        lines.append(
            f"{arm['scenario']} {words.arm_name(arm['arm'])}: hangs {before['k']} of {before['n']} -> "
            f"{after['k']} of {after['n']}, {step}"
        )
    return "\n".join([*lines, "", document["sentence"], ""])
