"""A night on real hardware, as ``make stress-npu`` and ``make stress-cuda`` start it: ``python -m harness.night
npu``.

In this order: an environment over the image's own Python (``image_environment.py``), ``hangrig doctor``, the
scenarios of the built-in engine, those of SGLang where its Python is named, ``hangrig prune``. What is not
ready ends the night with the doctor's status; a device that is not there lets the run go on to its ``skipped``
report. The exit status is the first of 70, 2, 1, 3, 4, 0 that a run ended with. Standard library only: it is
what makes the environment. Not here: anything that a run does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from harness.durations import parse_duration_s
from harness.image_environment import ImageError, NoTorchError, make

PROJECT = Path(__file__).resolve().parents[1]
BUILTIN = (
    "dp-retract", "dp-pinned-hang", "dp-pinned-latency", "dp-pinned-corruption", "dp-pinned-gate", "dp-idle-burst",
)  # fmt: skip
SGLANG = {"npu": ("sglang-dp-npu", "sglang-dp-npu-retract"), "cuda": ("sglang-dp-cuda",)}
SGLANG_PYTHON = "HANGRIG_SGLANG_PYTHON"
SGLANG_MODEL = "HANGRIG_SGLANG_MODEL"
NODES = {"npu": ("/dev/davinci[0-9]*",), "cuda": ("/dev/nvidia[0-9]*", "/dev/kfd")}
"""Device files of the drivers: whether there is hardware, asked without torch."""
_STATUSES = (70, 2, 1, 3, 4, 0)
_MEANS = {
    0: "as expected", 1: "a hang or a regression that was not expected", 2: "bad usage", 3: "unknown",
    4: "skipped, no such device", 70: "an error of hangrig's own",
}  # fmt: skip
_USAGE = 2
_SKIPPED = 4


@dataclass(frozen=True, slots=True)
class Night:
    """What is asked of one night. ``sglang_python`` None: SGLang is left out."""

    device: str
    budget_s: float
    trials: int
    seed: int
    out: str
    keep_days: float
    keep: int
    allow_skip: bool
    sglang_python: str | None
    sglang_model: str | None
    more: tuple[str, ...] = ()
    """Further options of ``hangrig run``."""
    prepare: bool = False
    """Only the environment is made."""


def runs(night: Night) -> list[list[str]]:
    """The arguments of each ``hangrig run``; they share the time budget equally."""
    sets: list[tuple[Sequence[str], list[str]]] = [(BUILTIN, [])]
    if night.sglang_python is not None:
        settings = ["--set", f"target.python={night.sglang_python}"]
        if night.sglang_model is not None:
            settings += ["--set", f"model.directory={night.sglang_model}"]
        sets.append((SGLANG[night.device], settings))
    each_s = night.budget_s / len(sets)
    common = ["--device", night.device, "--trials", str(night.trials), "--seed", str(night.seed)]
    common += ["--time-budget", f"{each_s:.0f}s", "--baseline", "last-pass", "--out", night.out]
    common += ["--allow-skip"] if night.allow_skip else []
    return [["run", *names, *common, *settings, *night.more] for names, settings in sets]


def prune(night: Night) -> list[str]:
    return ["prune", night.out, "--keep-days", f"{night.keep_days:g}", "--keep", str(night.keep)]


def worst(statuses: Sequence[int]) -> int:
    """One that hangrig never ends with (a signal's) comes first of all."""
    foreign = [status for status in statuses if status not in _STATUSES]
    return foreign[0] if foreign else next(status for status in _STATUSES if status in statuses)


def has_device(device: str, root: Path = Path("/")) -> bool:
    """The driver's device files are there."""
    return any(any(root.glob(pattern.lstrip("/"))) for pattern in NODES[device])


def environment(night: Night, python: str, venv: Path) -> Path:
    """The interpreter to run with. Where there is neither a device nor torch nothing could be spoilt and nothing
    can be tested: then it is the CPU environment of ``make setup``, for the skipped report. Raises ImageError."""
    try:
        return make(python, venv, PROJECT, "cuda" if night.device == "cuda" else None)
    except NoTorchError as error:
        if has_device(night.device):
            raise
        say(
            f"{error}\nNo {night.device} device either: by the environment of make setup the report says skipped."
        )
        if call(["make", "--no-print-directory", "-C", str(PROJECT), "setup", f"PYTHON={python}"]) != 0:
            raise ImageError("make setup failed; its own words are above") from error
        return PROJECT / ".venv" / "bin" / "python"


def spend(night: Night, interpreter: Path) -> int:
    """Doctor, runs, prune. Returns the night's exit status."""
    hangrig = [str(interpreter), "-m", "harness.cli"]
    ready = call([*hangrig, "doctor", "--device", night.device])
    if ready not in (0, _SKIPPED):
        say(f"the doctor found something to mend (status {ready}); nothing was run")
        return ready
    if night.sglang_python is None:
        say(f"SGLang is left out: {SGLANG_PYTHON} does not name the Python that it is installed in")
    statuses = [call([*hangrig, *arguments]) for arguments in runs(night)]
    if Path(night.out).is_dir() and (status := call([*hangrig, *prune(night)])) != 0:
        say(f"old runs were not all removed (status {status})")
    status = worst(statuses)
    say(f"the night on {night.device}: status {status}, {_MEANS.get(status, 'ended by a signal')}")
    return status


def call(command: Sequence[str]) -> int:
    """Runs one step to its end; it gets the signals that this process gets, and ends itself. Returns its
    status."""
    say(f"$ {' '.join(command)}")
    with (
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": _python_path()}) as child,
        _handed_on(child),
    ):
        status = child.wait()
    return status if status >= 0 else 128 - status


def _python_path() -> str:
    """This checkout before whatever CANN's set_env.sh has put there."""
    return os.pathsep.join(dict.fromkeys([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]))


@contextlib.contextmanager
def _handed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C reaches the child by itself, which still writes its reports; SIGTERM does not."""

    def came(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            child.send_signal(number)

    before = {number: signal.signal(number, came) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> Night:
    """Raises SystemExit with status 2 for what cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.night", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("device", choices=sorted(SGLANG))
    parser.add_argument("--budget", default="8h", help="for all runs together, as 8h or 90m")
    parser.add_argument("--trials", type=int, default=100, help="per arm, as far as the budget allows")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--out", default="runs", help="where runs are stored")
    parser.add_argument("--keep-days", type=float, default=30.0)
    parser.add_argument("--keep", type=int, default=60, help="runs")
    parser.add_argument("--allow-skip", action="store_true", help="status 0 where the device is not there")
    parser.add_argument("--run-options", default="", help="further options of hangrig run, in one string")
    parser.add_argument(
        "--prepare", action="store_true", help="only makes the environment, for an image's build"
    )
    found = parser.parse_args(arguments)
    try:
        budget_s = parse_duration_s(found.budget)
    except ValueError as error:
        parser.error(f"--budget: {error}")
    return Night(
        device=found.device,
        budget_s=budget_s,
        trials=found.trials,
        seed=found.seed,
        out=found.out,
        keep_days=found.keep_days,
        keep=found.keep,
        allow_skip=found.allow_skip,
        sglang_python=os.environ.get(SGLANG_PYTHON) or None,
        sglang_model=os.environ.get(SGLANG_MODEL) or None,
        more=tuple(found.run_options.split()),
        prepare=found.prepare,
    )


def main(arguments: Sequence[str]) -> int:
    night = parse(arguments)
    try:
        interpreter = environment(night, sys.executable, PROJECT / f".venv-{night.device}")
    except ImageError as error:
        say(str(error))
        return _USAGE
    return 0 if night.prepare else spend(night, interpreter)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
