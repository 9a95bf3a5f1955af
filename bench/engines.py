"""``python -m bench.engines --python PATH``: what the probe costs a real SGLang, as a ratio within one server.

The server decodes, and the probe inside records every other window of steps (``HANGRIG_PROBE_MEASURE``), in the
order on, off, off, on; the figure is the ratio of the windows' times. Not here: the built-in engine's figures
(``python -m bench``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.errors import BenchError
from bench.figures import Between, Figure
from bench.ratio import paired_ratio
from bench.results import show, store
from harness.machine import machine_facts, versions

SCENARIO = Path(__file__).parent / "sglang-probe-cost.toml"
_RUN_S = 1800.0
_LEAST_PAIRS = 8


def probe_cost(statuses: Sequence[Mapping[str, Any]]) -> Figure:
    """From the probe's statuses of one rank, one a server. Raises BenchError where there are too few windows."""
    on_us: list[float] = []
    off_us: list[float] = []
    steps = 1
    for status in statuses:
        found = status.get("measure") or {"steps": 1, "on": [], "off": []}
        steps = found["steps"]
        # The windows went off, off, on, on, off, off, ...: without the first one they are rounds of off, on, on,
        # off. The first round holds prefills, the last ones fewer and fewer requests.
        off = found["off"][1:]
        rounds = min(len(found["on"]), len(off)) // 2
        on_us += found["on"][2 : 2 * (rounds - 1)]
        off_us += off[2 : 2 * (rounds - 1)]
    if len(on_us) < 2 * _LEAST_PAIRS:
        raise BenchError(f"only {len(on_us)} windows were recorded; the trials were too short")
    ratio = paired_ratio(on_us, off_us)
    return Figure(
        name="probe",
        says="a decode step of SGLang on two CPU ranks, recorded by the probe and not",
        arms={
            "probe-on": {"step_us": median(on_us) / steps},
            "probe-off": {"step_us": median(off_us) / steps},
        },
        ratios=[Between("probe-on", "probe-off", "step_us", ratio)],
    )


def statuses(run: Path) -> list[Mapping[str, Any]]:
    """Of rank 0, the last of each server: a warm one goes on counting from trial to trial."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in sorted(run.glob("trials/*/evidence/engine.json")):
        processes = json.loads(path.read_text())["probe"]["processes"]
        found |= {status["pid"]: status for status in processes if status["seat"] == 0}
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--python", required=True, help="the interpreter of SGLang's environment")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    runs = options.out / "runs"
    command = [sys.executable, "-m", "harness.cli", "run", str(SCENARIO), "--out", str(runs)]
    done = subprocess.run(
        [*command, "--set", f"target.python={options.python}"], timeout=_RUN_S, check=False, stdout=sys.stderr
    )
    if done.returncode:
        print(f"the run ended with status {done.returncode}; its report says why", file=sys.stderr)
        return done.returncode
    try:
        figure = probe_cost(statuses(runs / "latest"))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 70
    facts = {"versions": versions(), "machine": machine_facts(), "run": str((runs / "latest").resolve())}
    path = store(options.out, facts, [figure])
    show(Console(), [figure])
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
