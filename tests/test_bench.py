"""The benchmark: its arithmetic, and one whole run at the smallest setting. No number of a run is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import __main__ as command
from bench.arms import Arm, Plan
from bench.errors import BenchError
from bench.pair import started
from bench.ratio import paired_ratio
from bench.settings import SMALLEST

FIGURES = {
    "decode step against its collectives": {"engine", "collectives", "collectives-bare"},
    "ledger": {"ledger-on", "ledger-off"},
    "capture": {"harness.capture", "py-spy together", "py-spy in turn"},
    "symm_mem": {"symm_mem-on", "symm_mem-off"},
    "pinned": {"pageable", "pinned", "pinned_sync", "pinned_snapshot"},
    "graph": {"graph-on", "graph-off"},
    "overlap": {"overlap-on", "overlap-off"},
}
IN_A_STEP = {"phase", "enqueue", "complete", "external_recorded", "external_consumed", "decision"}


def test_a_ratio_pairs_rounds_that_ran_in_opposite_order() -> None:
    drifting = [1.0, 2.0, 3.0, 4.0]  # in ABBA order, the arm that comes first sees 1, 4 and so on
    ratio = paired_ratio([2 * value for value in drifting], drifting)
    assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 2)


def test_one_disturbed_pair_does_not_move_a_ratio() -> None:
    calm = [1.0] * 20
    disturbed = [50.0, 1.0] + [1.1] * 18
    ratio = paired_ratio(disturbed, calm)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.low <= ratio.value <= ratio.high


@pytest.mark.parametrize(("over", "under"), [([1.0], [1.0]), ([1.0] * 3, [1.0] * 3), ([1.0] * 4, [1.0] * 2)])
def test_rounds_that_do_not_pair_are_refused(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratio(over, under)


def test_a_run_and_its_document(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    path = command.run(SMALLEST, tmp_path, console)
    assert list(tmp_path.iterdir()) == [path]
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["settings"] == "smallest"
    assert document["world"] == 2
    assert document["versions"]["torch"] and document["machine"]["cores"] >= 1
    assert len(document["load_average"]["before"]) == len(document["load_average"]["after"]) == 3
    figures: dict[str, Any] = {figure["name"]: figure for figure in document["figures"]}
    assert {name: set(figures[name]["arms"]) for name in FIGURES} == FIGURES
    for figure in figures.values():
        _check_figure(figure)
    operations = figures["ledger operations"]["arms"]
    assert all(set(operations[name]) == {"alone_ns", "in_step_ns", "calls_per_step"} for name in IN_A_STEP)
    assert operations["decision"]["calls_per_step"] == operations["external_consumed"]["calls_per_step"] == 1
    assert operations["snapshot read"].keys() == {"alone_ns"}
    shown = console.export_text()
    assert all(name in shown for name in FIGURES)


def _check_figure(figure: dict[str, Any]) -> None:
    """Ratios are between arms of this figure, of a quantity that both have, and lie in their interval."""
    assert figure["says"]
    for values in figure["arms"].values():
        assert values and all(math.isfinite(value) and value >= 0 for value in values.values())
    named = set()
    for ratio in figure["ratios"]:
        assert ratio["quantity"] in figure["arms"][ratio["over"]]
        assert ratio["quantity"] in figure["arms"][ratio["under"]]
        assert ratio["over"] != ratio["under"]
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
        assert ratio["pairs"] >= 1
        named |= {ratio["over"], ratio["under"]}
    if figure["ratios"]:
        assert named == set(figure["arms"])


def test_a_rank_that_fails_says_why_and_all_are_gone() -> None:
    plan = Plan([Arm("no/such/folder", ledger=True)], rounds=2, block_steps=1, warm_steps=0)
    with pytest.raises(BenchError, match=r"rank [01] failed:(.|\n)*cannot make a ledger"), started() as pair:
        pids = pair.pids
        pair.run(plan)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
