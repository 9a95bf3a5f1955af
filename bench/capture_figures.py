"""How fast the stacks of several processes are had, together and one after the other.

The processes are ranks of the benchmark, which stand still between two steps as in a hang; more than two are more
pairs. Not here: the ledger (``harness_figures.py``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from bench.arms import Arm
from bench.errors import BenchError
from bench.figures import Between, Figure
from bench.pair import HeldPair, started
from bench.ratio import paired_ratio
from bench.settings import Settings
from harness.capture import CaptureRank, CaptureRequest, capture, find_py_spy
from harness.tools import run_tools

_CAPTURE_S = 30.0
_HELD_ARM = Arm("held", ledger=True)
_TOGETHER, _IN_TURN = "py-spy together", "py-spy in turn"


def capture_time(held: HeldPair, settings: Settings) -> Figure:
    """Of each number of ranks: everything the harness captures, against one py-spy after another."""
    py_spy = find_py_spy()
    if py_spy is None:
        raise BenchError("py-spy is not installed; install it with: pip install py-spy")
    arms: dict[str, dict[str, float]] = {}
    ratios = []
    with _standing(held, max(settings.captured)) as ranks:
        for count in settings.captured:
            for native in (False, True):
                seconds = _seconds(py_spy, ranks[:count], native, settings.captures)
                what = f"{count} ranks, {'plain and native' if native else 'plain'}"
                arms |= {f"{what}: {way}": {"s": median(values)} for way, values in seconds.items()}
                ratios += [
                    Between(
                        f"{what}: {way}", f"{what}: {_IN_TURN}", "s", paired_ratio(values, seconds[_IN_TURN])
                    )
                    for way, values in seconds.items()
                    if way != _IN_TURN
                ]
    return Figure(
        "capture",
        "Stacks of ranks that stand still, plain and, after that, native ones; harness.capture also takes ledgers "
        "and the process table, and syncs everything to disk.",
        arms,
        ratios,
    )


@contextmanager
def _standing(held: HeldPair, count: int) -> Iterator[tuple[CaptureRank, ...]]:
    """``count`` ranks that stand still: those of ``held``, and of as many pairs more as it takes."""
    with ExitStack() as stack:
        ranks = list(held.ranks)
        while len(ranks) < count:
            pair = stack.enter_context(started())
            other = stack.enter_context(pair.held(_HELD_ARM))
            ranks += [replace(rank, rank=len(ranks) + at) for at, rank in enumerate(other.ranks)]
        yield tuple(ranks)


def _seconds(py_spy: Path, ranks: Sequence[CaptureRank], native: bool, pairs: int) -> dict[str, list[float]]:
    """By way, of rounds that take the ways in opposite order by turns."""
    seconds: dict[str, list[float]] = {"harness.capture": [], _TOGETHER: [], _IN_TURN: []}
    with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
        for turn in range(2 * pairs):
            request = CaptureRequest(
                tuple(ranks), Path(folder) / f"{turn}", sample=0, native=native, deadline_s=_CAPTURE_S
            )
            ways: dict[str, Callable[[], None]] = {
                "harness.capture": partial(_captured, request),
                _TOGETHER: partial(_dumped, py_spy, [ranks], native),
                _IN_TURN: partial(_dumped, py_spy, [(rank,) for rank in ranks], native),
            }
            for name in ways if turn % 2 == 0 else reversed(ways):
                began_s = time.monotonic()
                ways[name]()
                seconds[name].append(time.monotonic() - began_s)
    return seconds


def _captured(request: CaptureRequest) -> None:
    report = capture(request)
    if report.missing:
        raise BenchError(f"the capture lacks {'; '.join(f'{m.what}: {m.why}' for m in report.missing)}")


def _dumped(py_spy: Path, turns: Sequence[Sequence[CaptureRank]], native: bool) -> None:
    """Plain, then native dumps; the ranks of one turn at once, one turn after the other."""
    for options in ([], ["--native"]) if native else ([],):
        for ranks in turns:
            commands = {
                rank.rank: [str(py_spy), "dump", "--pid", str(rank.pid), "--json", *options] for rank in ranks
            }
            results = run_tools(commands, deadline_s=time.monotonic() + _CAPTURE_S)
            problems = [
                f"rank {rank}: {result.problem}" for rank, result in results.items() if result.problem
            ]
            if problems:
                raise BenchError(f"py-spy: {'; '.join(problems)}")
