"""``python -m bench [--quick] [--out DIRECTORY] [--corpus RUN]``: measures, prints tables, stores JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench import (
    capture_figures,
    engine_figures,
    first_hang_figures,
    harness_figures,
    latency_figures,
    report_figures,
    scale_figures,
)
from bench.arms import WORLD
from bench.errors import BenchError
from bench.figures import Figure
from bench.pair import started
from bench.results import show, store
from bench.settings import FULL, QUICK, Settings
from harness.machine import machine_facts, versions
from harness.store import StoreError

_SOFTWARE_ERROR = 70
_PIPED_WIDTH = 120


def measure(settings: Settings, corpus: Path | None) -> list[Figure]:
    """All figures but those that a machine without a corpus run, or a setting, leaves out. ``corpus``: its run.
    Raises BenchError."""
    return [*_of_ranks(settings), *_of_evidence(settings, corpus), *_of_hangs(settings)]


def _of_ranks(settings: Settings) -> list[Figure]:
    """On one pair of ranks, and for captures on more of them."""
    with started() as pair:
        figures = [engine_figures.decode_step(pair, settings), harness_figures.ledger_share(pair, settings)]
        step_us = figures[-1].arms["ledger-on"]["step_us"]
        with pair.held(harness_figures.TIMED_ARM) as held:
            figures.append(harness_figures.ledger_operations(held, settings, step_us))
            figures.append(capture_figures.capture_time(held, settings))
        figures += [
            figure(pair, settings)
            for figure in (
                engine_figures.symmetric_memory,
                engine_figures.pinned,
                engine_figures.graph,
                engine_figures.overlap,
            )
        ]
    return figures


def _of_evidence(settings: Settings, corpus: Path | None) -> list[Figure]:
    figures = [
        scale_figures.analysis(settings),
        scale_figures.reading(settings),
        report_figures.reports_of_trials(settings),
    ]
    return figures if corpus is None else [*figures, latency_figures.detection_latency(corpus)]


def _of_hangs(settings: Settings) -> list[Figure]:
    return [first_hang_figures.first_hang(settings)] if settings.hang_seeds else []


def run(settings: Settings, out: Path, console: Console, corpus: Path | None = None) -> Path:
    """Measures, prints and stores; returns the document's path. Raises BenchError or StoreError."""
    started_utc, began_s = datetime.now(UTC), time.monotonic()
    load_before = os.getloadavg()
    figures = measure(settings, corpus)
    left_out = {}
    if corpus is None:
        left_out["detection latency"] = f"no corpus was run; {latency_figures.HOW}"
    facts = {
        "started_utc": started_utc.isoformat(timespec="seconds"),
        "duration_s": time.monotonic() - began_s,
        "settings": settings.name,
        "world": WORLD,
        "versions": versions(),
        "machine": machine_facts(),
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
        "left_out": left_out,
    }
    show(console, figures)
    for name, why in left_out.items():
        console.print(f"{name}: left out, {why}", markup=False)
    return store(out, facts, figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Performance of the engine on two ranks and of the harness, as ratios within one run.",
        epilog="example: python -m bench --quick",
    )
    parser.add_argument("--quick", action="store_true", help="a fourth of the time, wider intervals")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where the JSON goes")
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="RUN",
        help="a run of hangrig corpus, of whose hangs the latency of detection is read; "
        "else runs/latest where that is one",
    )
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    try:
        corpus = latency_figures.corpus_run(options.corpus)
        path = run(QUICK if options.quick else FULL, options.out, console, corpus)
    except (BenchError, StoreError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return _SOFTWARE_ERROR
    load = os.getloadavg()[0]
    console.print(f"stored in {path}; load average {load:.1f}: on a busy machine intervals are wide")
    return 0


if __name__ == "__main__":
    sys.exit(main())
