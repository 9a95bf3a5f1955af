"""Figures of the analysis of many ranks, on made-up evidence: seconds, memory, and how both grow with the ranks.

Every size is measured in a process of its own. Evidence in memory is what a diagnosis costs; evidence on disk is
what judging a stored trial costs, which is mostly the reading of JSON. Not here: the evidence (``synthetic.py``,
``synthetic_files.py``).
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench import synthetic, synthetic_files
from bench.apart import apart, forget_highest, highest_bytes, resident_bytes
from bench.figures import Between, Figure
from bench.ratio import paired_ratio
from bench.settings import Settings
from harness.diagnose import diagnose
from harness.garbage import uncollected
from harness.judge import evidence_of, read_history
from harness.store import read_trial

_LONGEST_S = 300.0
"""Of one size: its evidence made, and gone through as often as the settings say."""
_MIB = 1 << 20
DISK_CASE: synthetic.Case = "skipped"


@dataclass(frozen=True, slots=True)
class Analysis:
    """Of one case and one number of ranks; a value a repetition. ``evidence_bytes``: of the evidence in memory;
    ``growth_bytes``: what the first diagnosis took beside it at its highest."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    evidence_bytes: int
    growth_bytes: int
    said: str
    """Kind and mechanism."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A stored trial of one number of ranks, read and diagnosed once. ``peak_bytes``: of the whole process."""

    read_s: float
    diagnose_s: float
    cpu_s: float
    """Of both."""
    stored_bytes: int
    peak_bytes: int
    said: str
    """Kind and mechanism."""


def analysis(settings: Settings) -> Figure:
    """Evidence in memory in, diagnosis out."""
    found = {
        case: {
            world: apart(analysed, case, world, settings.scale_repeats, timeout_s=_LONGEST_S)
            for world in settings.worlds
        }
        for case in settings.cases
    }
    return analysis_figure(found)


def analysis_figure(found: Mapping[synthetic.Case, Mapping[int, Analysis]]) -> Figure:
    """By case, by number of ranks in ascending order, two numbers at least."""
    arms: dict[str, dict[str, float]] = {}
    ratios = []
    for case, sizes in found.items():
        for world, one in sizes.items():
            arms[_arm(case, world)] = {
                "s": median(one.wall_s),
                "longest_s": max(one.wall_s),
                "cpu_s": median(one.cpu_s),
                "cpu_us_per_rank": median(one.cpu_s) / world * 1e6,
                "growth_mib": one.growth_bytes / _MIB,
                "evidence_mib": one.evidence_bytes / _MIB,
            }
        worlds = list(sizes)
        seconds = [median(one.cpu_s) for one in sizes.values()]
        arms[f"{case}, growth"] = {
            "exponent": growth_exponent(worlds, seconds),
            "last_exponent": growth_exponent(worlds[-2:], seconds[-2:]),
        }
        ratios.append(
            Between(
                _arm(case, worlds[-1]),
                _arm(case, worlds[-2]),
                "cpu_us_per_rank",
                paired_ratio(
                    *([value / world for value in sizes[world].cpu_s] for world in (worlds[-1], worlds[-2]))
                ),
            )
        )
    return Figure(
        "analysis",
        "A diagnosis of made-up evidence in memory: full rings of a ledger, 200 decisions, two dumps a rank. Each "
        "size in its own process. exponent: the slope of log processor time over log ranks, of all sizes and of "
        "the two largest; 1 is as the ranks.",
        arms,
        ratios,
    )


def reading(settings: Settings) -> Figure:
    """A stored trial, as ``hangrig recheck`` reads it."""
    found = {}
    for world in settings.disk_worlds:
        with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
            trial = Path(folder) / "trial"
            apart(_written, trial, world, timeout_s=_LONGEST_S)
            found[world] = apart(read, trial, world, timeout_s=_LONGEST_S)
    return reading_figure(found)


def reading_figure(found: Mapping[int, Reading]) -> Figure:
    """By number of ranks in ascending order."""
    arms: dict[str, dict[str, float]] = {
        _arm(DISK_CASE, world): {
            "read_s": one.read_s,
            "diagnose_s": one.diagnose_s,
            "cpu_us_per_rank": one.cpu_s / world * 1e6,
            "stored_mib": one.stored_bytes / _MIB,
            "mib_per_s": one.stored_bytes / _MIB / one.read_s,
            "peak_mib": one.peak_bytes / _MIB,
        }
        for world, one in found.items()
    }
    seconds = [one.cpu_s for one in found.values()]
    arms[f"{DISK_CASE}, growth"] = {
        "exponent": growth_exponent(list(found), seconds),
        "last_exponent": growth_exponent(list(found)[-2:], seconds[-2:]),
    }
    return Figure(
        "analysis from disk",
        "The same evidence as the files of a trial that hung, in the page cache: read and made into evidence, then "
        "diagnosed. peak: of the whole process.",
        arms,
        [],
    )


def growth_exponent(worlds: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log cost over log ranks by least squares: 1 where cost grows as the ranks, 2 as their pairs."""
    slope, _ = np.polyfit(np.log(worlds), np.log(costs), 1)
    return float(slope)


def _arm(case: str, world: int) -> str:
    return f"{case}, {world:,} ranks"


# In processes of their own --------------------------------------------------------------------------------


def analysed(case: synthetic.Case, world: int, repeats: int) -> Analysis:
    """The collector is off while evidence is made, as it is while a stored trial is read."""
    before_bytes = resident_bytes()
    with uncollected():
        evidence = synthetic.evidence(case, world)
    gc.collect()
    gc.freeze()
    evidence_bytes = resident_bytes()
    forget_highest()
    growth_bytes, wall_s, cpu_s, said = 0, [], [], ""
    for number in range(repeats):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        diagnosis = diagnose(evidence)
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
        if number == 0:
            growth_bytes = max(0, highest_bytes() - evidence_bytes)
        said = f"{diagnosis.kind} {diagnosis.mechanism}"
    return Analysis(tuple(wall_s), tuple(cpu_s), evidence_bytes - before_bytes, growth_bytes, said)


def _written(trial: Path, world: int) -> None:
    with uncollected():
        synthetic_files.write_trial(trial, synthetic.evidence(DISK_CASE, world))


def read(trial: Path, world: int) -> Reading:
    """As the judge does: files in, evidence out, diagnosis."""
    context = synthetic_files.context(world)
    with uncollected():
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        stored = read_trial(trial)
        history = read_history(trial)
        evidence = evidence_of(stored, history, context)
        read_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        diagnosis = diagnose(evidence)
        diagnose_s = time.perf_counter() - began_s
        cpu_s = time.process_time() - began_cpu_s
    nbytes = sum(path.stat().st_size for path in trial.rglob("*") if path.is_file())
    return Reading(
        read_s, diagnose_s, cpu_s, nbytes, highest_bytes(), f"{diagnosis.kind} {diagnosis.mechanism}"
    )
