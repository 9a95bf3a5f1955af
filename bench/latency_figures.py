"""How long the hangs of a stored corpus took to be confirmed: read from its run, nothing is run.

Only trials of rows count, those in which something was broken: twins and controls have nothing to detect. Not here:
whether the diagnoses are right (``hangrig corpus`` says that).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import BenchError
from bench.figures import Figure
from harness.store import StoreError, resolve_run
from harness.stored import load_run_json
from reports.corpus import Score, score

LATEST = Path("runs") / "latest"
HOW = "hangrig corpus (or make corpus) makes one; then python -m bench --corpus RUN"
_ROADS: Mapping[str, str] = {
    "proof": "proof by ledgers or processes",
    "budget": "budget of the phase",
}
"""How the watchdog came to its suspicion, as the manifest of the evidence has it."""


def corpus_run(named: Path | None) -> Path | None:
    """The run to read: the one that is named, else the newest where that is a corpus. Raises BenchError for a named
    one that is none."""
    path = named or LATEST
    try:
        run = resolve_run(path)
        is_corpus = "corpus" in load_run_json(run)
    except StoreError as error:
        if named is None:
            return None
        raise BenchError(f"--corpus {error}; {HOW}") from error
    if named is not None and not is_corpus:
        raise BenchError(f"--corpus {named}: is a run, but of no corpus; {HOW}")
    return run if is_corpus else None


def detection_latency(run: Path) -> Figure:
    """``run``: of a corpus, whole or not. Raises BenchError where no hang of it was confirmed."""
    chosen: Mapping[str, Any] = load_run_json(run)["corpus"]
    found = [
        (one, _road(trial))
        for trial in sorted((run / "trials").iterdir())
        if (one := score(trial, chosen)) is not None
    ]
    return latency_figure(run.name, found)


def latency_figure(run: str, found: Iterable[tuple[Score, str]]) -> Figure:
    """``found``: scored trials, each with the road of its suspicion."""
    seconds: dict[str, list[float]] = defaultdict(list)
    rows = undetected = 0
    for one, road in found:
        if one.part != "row":
            continue
        rows += 1
        undetected += not one.detected
        if not one.detected or one.confirm_s is None:
            continue
        seconds["all"].append(one.confirm_s)
        seconds[_ROADS.get(road, "nothing stood for good: slow")].append(one.confirm_s)
    if not seconds:
        raise BenchError(f"{run} holds no confirmed hang; {HOW}")
    arms = {name: _spread(seconds[name]) for name in sorted(seconds)}
    arms["all"] |= {"undetected": float(undetected)}
    return Figure(
        "detection latency",
        f"Seconds from the last progress to the confirmed diagnosis, over {rows} trials of the rows of {run}, by "
        "how the suspicion arose. The others were not detected, or have no such moment (wrong tokens).",
        arms,
        [],
    )


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "trials": float(len(seconds)),
        "p50_s": float(np.percentile(seconds, 50)),
        "p90_s": float(np.percentile(seconds, 90)),
        "longest_s": max(seconds),
    }


def _road(trial: Path) -> str:
    try:
        manifest = json.loads((trial / "evidence" / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return str(manifest.get("road", "")) if isinstance(manifest, dict) else ""
