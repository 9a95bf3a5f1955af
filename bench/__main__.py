"""``python -m bench [--quick] [--out DIRECTORY]``: measures, prints a table, stores one JSON document."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench import engine_figures, harness_figures
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


def measure(settings: Settings) -> list[Figure]:
    """All figures, on one pair of ranks. Raises BenchError."""
    with started() as pair:
        figures = [engine_figures.decode_step(pair, settings), harness_figures.ledger_share(pair, settings)]
        step_us = figures[-1].arms["ledger-on"]["step_us"]
        with pair.held(harness_figures.TIMED_ARM) as held:
            figures.append(harness_figures.ledger_operations(held, settings, step_us))
            figures.append(harness_figures.capture_time(held, settings))
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


def run(settings: Settings, out: Path, console: Console) -> Path:
    """Measures, prints and stores; returns the document's path. Raises BenchError or StoreError."""
    started_utc, began_s = datetime.now(UTC), time.monotonic()
    load_before = os.getloadavg()
    figures = measure(settings)
    facts = {
        "started_utc": started_utc.isoformat(timespec="seconds"),
        "duration_s": time.monotonic() - began_s,
        "settings": settings.name,
        "world": WORLD,
        "versions": versions(),
        "machine": machine_facts(),
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
    }
    show(console, figures)
    return store(out, facts, figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Performance of two ranks on the simulated device, as ratios within one run.",
        epilog="example: python -m bench --quick",
    )
    parser.add_argument("--quick", action="store_true", help="a fourth of the time, wider intervals")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where the JSON goes")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    try:
        path = run(QUICK if options.quick else FULL, options.out, console)
    except (BenchError, StoreError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return _SOFTWARE_ERROR
    load = os.getloadavg()[0]
    console.print(f"stored in {path}; load average {load:.1f}: on a busy machine intervals are wide")
    return 0


if __name__ == "__main__":
    sys.exit(main())
