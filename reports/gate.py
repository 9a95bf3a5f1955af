"""The gate for people: what was found against what is wanted, what is missing, and a sentence for a pull request.

Here: words, and the measured gain that the gate asks `reports.compare` for. Not here: the rule (`harness.gate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.gate.counting import ArmCount
from harness.gate.decision import Gate
from harness.gate.model import PAGEABLE, PINNED, Evidence, Need
from harness.gate.needs import decided, share
from reports import words
from reports.compare import CompareError, compare_run

_ANSWERS = {"yes": "YES", "no": "NO", "not yet": "NOT YET"}
_SIMULATION = "A simulation opens no gate and shuts none: what is below says nothing about hardware."


def with_latency(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """The same with what ``hangrig compare --by pinned`` says of each run; None where it cannot compare."""
    return tuple(replace(one, latency=_latency(one)) if one.kind == "run" else one for one in evidence)


def _latency(one: Evidence) -> dict[str, Any] | None:
    try:
        return compare_run(Path(one.path), by="pinned")
    except CompareError:
        return None


def document(gate: Gate) -> dict[str, Any]:
    """``hangrig gate pinned --json``."""
    return {**gate.to_json(), "sentence": sentence(gate)}


def render(gate: Gate) -> str:
    """For a terminal."""
    lines = [f"{_ANSWERS[gate.answer]}  may pinned memory be enabled? {gate.chosen.platform}"]
    lines += [_SIMULATION] if gate.simulation else []
    lines += ["", *_table(gate.needs), "", *_arms(gate.arms)]
    blamed = gate.blame
    label = " (simulation)" if blamed.simulation else ""
    wrong = any(need.verdict == "failed" for need in gate.needs)
    told = blamed.at_fault or ("cannot tell" if wrong else "nothing shown")
    lines += ["", f"at fault{label}: {told}: {blamed.why}"]
    if gate.missing:
        lines += ["", "missing:"]
        for command in dict.fromkeys(lack.command for lack in gate.missing):
            lines += [f"  {lack.what}" for lack in gate.missing if lack.command == command]
            lines.append(f"    {command}")
    notes = [f"{one.path}: {note}" for one in gate.chosen.counted for note in one.notes]
    notes += [f"{one.path}: does not count: {why}" for one, why in gate.chosen.others]
    lines += ["", *notes] if notes else []
    return "\n".join([*lines, "", sentence(gate)])


def _table(needs: Sequence[Need]) -> list[str]:
    name_width, verdict_width = (
        max(len(getattr(need, key)) for need in needs) for key in ("name", "verdict")
    )
    lines = []
    for need in needs:
        lines.append(f"{need.name:{name_width}}  {need.verdict:{verdict_width}}  found   {need.found}")
        lines.append(f"{'':{name_width}}  {'':{verdict_width}}  wanted  {need.wanted}")
    return lines


def _arms(arms: Sequence[ArmCount]) -> list[str]:
    """Under a line for each pool and setting of the other toggles, a line for each pinned value."""
    lines = []
    heads = dict.fromkeys((arm.pool, arm.others) for arm in arms)
    for pool, others in heads:
        settings = f", set {' '.join(pool.settings)}" if pool.settings else ""
        lines.append(f"{pool.scenario}, model {pool.model}, {others}{settings}:")
        for arm in arms:
            if (arm.pool, arm.others) == (pool, others):
                left_out = "".join(f"; {number} left out: {why}" for why, number in arm.left_out.items())
                lines.append(f"  {arm.pinned:15}  {arm.hangs} of {arm.counted} hung{left_out}")
    return lines


# --- the sentence ------------------------------------------------------------------------------------------


def sentence(gate: Gate) -> str:
    """One or two sentences to paste into a discussion; they claim what the figures carry and nothing more."""
    found = {need.name: need for need in gate.needs}
    failed = "; ".join(f"{need.name}: {need.found}" for need in gate.needs if need.verdict == "failed")
    start = "In simulation, which says nothing about hardware: " if gate.simulation else ""
    about = f"pinned host memory on {gate.chosen.platform}"
    if gate.answer == "yes":
        told = [_hangs(gate, found["hangs"]), _litmus(found["litmus"])]
        told += [_tokens(found["tokens"]), _gain(found["latency"])]
        return f"The evidence allows {about}: {'; '.join(told)}."
    if failed:
        return f"{start}the evidence speaks against {about}: {failed}. {_fault(gate)}"
    lacking = [need.name for need in gate.needs if need.verdict != "met"]
    rest = f"; still open: {words.listing(lacking, most=len(found))}" if lacking else ""
    shown = _hangs(gate, found["hangs"]) if found["hangs"].figures["n"] else "no trial counts"
    return f"{start}it is not known whether {about} is safe: {shown}{rest}."


def _hangs(gate: Gate, need: Need) -> str:
    figures = need.figures
    told = f"{figures['k']} of {figures['n']} trials of {figures['scenario']} (model {figures['model']}) hung"
    sure = words.percent(gate.wish.confidence)
    return f"under retraction {told}, a rate below {share(figures['at_most'])} at {sure}, one-sided"


def _litmus(need: Need) -> str:
    number = sum(test["forbidden"] for test in need.figures["tests"])
    return f"none of {number} forbidden litmus outcomes was seen, in tests that had the power to show them"


def _tokens(need: Need) -> str:
    figures = need.figures
    return (
        f"tokens differed more in {figures['more']} and less in {figures['fewer']} of {figures['pairs']} pairs "
        f"with a pageable trial (p = {figures['p']:.2g}), so no excess is shown"
    )


def _gain(need: Need) -> str:
    told = []
    for path, row in need.figures["ratios"].items():
        interval = f"{row['ratio']:.3g} times as long, 95 %: {row['low']:.3g} to {row['high']:.3g}"
        told.append(f"{path} takes {interval}{'' if decided(row) else ', undecided'}")
    of = words.listing(need.figures["of"])
    return f"{PINNED} against {PAGEABLE} in {of}, {words.listing(told, most=len(told))}"


def _fault(gate: Gate) -> str:
    blamed = gate.blame
    if blamed.at_fault is None:
        return f"What is at fault cannot be told: {blamed.why}."
    named = "the lost barrier" if blamed.at_fault == "barrier" else "the pinning itself"
    return f"At fault is {named}: {blamed.why}."
