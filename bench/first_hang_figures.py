"""How soon a hang that is a matter of luck shows itself: with jitter, and without.

The scenario beside this file (``first-hang.toml``) breaks one rule and leaves the rest to the schedule of threads;
whether a trial hangs is a race. The same seeds run with its table ``[jitter]`` and without. Not here: the jitter
(``harness.jitter``).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.figures import Figure
from bench.settings import Settings
from harness.store import StoreError, read_run

SCENARIO = Path(__file__).parent / "first-hang.toml"
WITH, WITHOUT = "with jitter", "without"
_RUN_S = 420.0
_EXPECTED = (0, 1)
"""Statuses of a run that was carried out: whether a race hangs is no matter of right and wrong here."""
_JITTER = re.compile(r"^\[jitter\]\n(?:(?!\[).*\n)*", re.MULTILINE)
_NAME = re.compile(r'^name = "([^"]+)"', re.MULTILINE)


def first_hang(settings: Settings) -> Figure:
    """Raises BenchError where the run could not be carried out."""
    with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
        text = SCENARIO.read_text()
        plain = Path(folder) / "first-hang-plain.toml"
        plain.write_text(without_jitter(text))
        runs = Path(folder) / "runs"
        _run([SCENARIO, plain], settings.hang_seeds, runs)
        try:
            trials = [one.trial for one in read_run(runs / "latest").trials if one.trial is not None]
        except StoreError as error:
            raise BenchError(f"the run in search of a hang left nothing to read: {error}") from error
        name = name_of(text)
        return first_hang_figure(
            {
                WITH: [one for one in trials if one["scenario"] == name],
                WITHOUT: [one for one in trials if one["scenario"] != name],
            }
        )


def first_hang_figure(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """``found``: by arm, the trial.json of each trial that told. Raises BenchError where an arm has none."""
    arms: dict[str, dict[str, float]] = {}
    for arm, trials in found.items():
        ordered = sorted(
            (one for one in trials if one["outcome"] != "unknown"), key=lambda one: int(one["seed"])
        )
        if not ordered:
            raise BenchError(f"no trial {arm} had an outcome")
        hung = [place for place, one in enumerate(ordered) if one["outcome"] == "hang"]
        lengths_s = [float(one["duration_s"]) for one in ordered]
        arms[arm] = {"trials": float(len(ordered)), "hangs": float(len(hung)), "all_s": sum(lengths_s)}
        if hung:
            arms[arm] |= {
                "first_hang_trial": hung[0] + 1.0,
                "first_hang_s": sum(lengths_s[: hung[0] + 1]),
                "trials_per_hang": len(ordered) / len(hung),
                "s_per_hang": sum(lengths_s) / len(hung),
            }
    return Figure(
        "first hang",
        "Trials, and seconds in trials, until a hang that is a race first shows itself, simulated device, the same "
        "seeds in both arms. An arm without a first hang had none.",
        arms,
        [],
    )


def without_jitter(text: str) -> str:
    """The scenario under another name, without its table of jitter."""
    plain, tables = _JITTER.subn("", text)
    if tables != 1:
        raise ValueError(f"{SCENARIO.name} has {tables} tables [jitter], not one")
    return _NAME.sub(r'name = "\1-plain"', plain, count=1)


def name_of(text: str) -> str:
    found = _NAME.search(text)
    if found is None:
        raise ValueError(f"{SCENARIO.name} has no name")
    return found[1]


def _run(scenarios: Sequence[Path], seeds: int, out: Path) -> None:
    command = [sys.executable, "-m", "harness.cli", "run", *map(str, scenarios), "--trials", str(seeds)]
    try:
        done = subprocess.run(
            [*command, "--device", "sim", "--out", str(out)],
            timeout=_RUN_S,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the run in search of a hang did not end within {_RUN_S:g} s") from error
    if done.returncode not in _EXPECTED:
        said = done.stdout.decode(errors="replace").strip().splitlines()[-8:]
        raise BenchError(
            f"the run in search of a hang ended with status {done.returncode}:\n" + "\n".join(said)
        )
