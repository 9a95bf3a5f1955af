"""Figures of the reports of a large run: seconds, the size of the page, and how both grow with the trials.

A made-up run: arms of a scenario of ours, every tenth trial hung, with evidence of two ranks in kinds of trouble
that ``synthetic.py`` makes. Reports are written from disk, all of them, in a process of their own, with what that
takes to load counted too: it is what ``hangrig report`` costs. Not here: judging trials (``scale_figures.py``).
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import synthetic, synthetic_files
from bench.apart import apart, highest_bytes
from bench.figures import Figure
from bench.scale_figures import growth_exponent
from bench.settings import Settings
from harness.arms import TrialPlan, expand, plan_arms
from harness.judge import HISTORY, judge
from harness.scenario import find_scenario, load, record
from harness.store import RunStore, write_json
from harness.toggles import gather_facts
from harness.trial_spec import context, reference_path

_LONGEST_S = 600.0
_MIB = 1 << 20
_SCENARIO = "dp-pinned-hang"
_DEVICE = "sim"
_EVERY = 10
"""One trial of so many hung."""
_STEPS = 200
_TROUBLES: tuple[synthetic.Case, ...] = ("skipped", "mismatch", "order", "stuck", "stacks")


@dataclass(frozen=True, slots=True)
class Reported:
    """``report_s``: from nothing loaded to everything written."""

    report_s: float
    page_bytes: int
    peak_bytes: int
    verdict: str


def reports_of_trials(settings: Settings) -> Figure:
    """All reports of runs of so many trials."""
    found = {}
    for trials in settings.reported:
        with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
            path = apart(_made, Path(folder), trials, timeout_s=_LONGEST_S)
            found[trials] = apart(_report, path, timeout_s=_LONGEST_S)
    arms: dict[str, dict[str, float]] = {
        f"{trials:,} trials": {
            "report_s": one.report_s,
            "page_mib": one.page_bytes / _MIB,
            "peak_mib": one.peak_bytes / _MIB,
        }
        for trials, one in found.items()
    }
    if len(found) > 1:
        arms["growth"] = {"exponent": growth_exponent(list(found), [one.report_s for one in found.values()])}
    return Figure(
        "reports",
        f"All reports of a made-up run, written anew as hangrig report does, a tenth of its trials hung in "
        f"{len(_TROUBLES)} ways on two ranks each; loading the libraries is counted. exponent: the slope of log "
        "seconds over log trials.",
        arms,
        [],
    )


# In processes of their own ----------------------------------------------------------------------------------


def _made(folder: Path, trials: int) -> Path:
    """A run of about so many trials: as many seeds of each arm as come nearest."""
    scenario = load(find_scenario(_SCENARIO))
    facts = gather_facts(_DEVICE, scenario.target.ranks)
    arms = plan_arms(scenario, _DEVICE, facts)
    plans = expand(scenario, _DEVICE, max(1, round(trials / len(arms))), 0, facts)
    manifest = {
        "command": "hangrig run dp-pinned-hang",
        "argv": ["hangrig", "run", _SCENARIO],
        "seed": 0,
        "versions": {},
        "machine": {},
        "device": _DEVICE,
        "simulation": True,
        "simulation_note": "made up",
        "scenarios": [record(scenario, arms, _DEVICE)],
        "planned": [plan.to_json() for plan in plans],
    }
    store = RunStore.create(folder, "bench", manifest)
    generator = np.random.default_rng(0)
    for number, plan in enumerate(plans):
        trial = store.trial(plan.id)
        if number % _EVERY == 0:
            _hang(trial.path, _TROUBLES[number // _EVERY % len(_TROUBLES)])
        else:
            write_json(trial.path / HISTORY, _finished(plan))
            trial.write_tokens({"0": [1, 2, 3]})
            paths = ("step", "next_token_copy", "bitmask_copy", "token_count_copy")
            trial.write_latency({path: generator.lognormal(4.0, 0.2, _STEPS).tolist() for path in paths})
        judge(
            trial,
            context(plan.to_json(), scenario, store.path, True),
            reference_path(store.path, plan.scenario, plan.seed),
        )
    store.finish()
    return store.path


def _hang(trial: Path, case: synthetic.Case) -> None:
    for name in ("decisions", "ledger", "evidence"):  # it wants to make the folder itself
        (trial / name).rmdir()
    trial.rmdir()
    synthetic_files.write_trial(trial, synthetic.evidence(case, 2, synthetic.SPARSE))


def _finished(plan: TrialPlan) -> dict[str, object]:
    ranks = [{"rank": rank, "role": "rank", "node": "made-up", "pid": 4000 + rank} for rank in range(2)]
    return {
        "finished": True,
        "ranks": ranks,
        "steps": _STEPS,
        "retractions": 99,
        "duration_s": 2.0,
        "seed": plan.seed,
    }


def _report(path: Path) -> Reported:
    began_s = time.perf_counter()
    from reports import write_all  # loading is part of it

    result = write_all(path)
    report_s = time.perf_counter() - began_s
    return Reported(report_s, (path / "report.html").stat().st_size, highest_bytes(), result.verdict)
