"""The live table: a row a rank and stream, drawn from ledgers."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from run_fixture import SECOND_NS, SITE, snapshot

from harness.ledger_snapshot import OpRecord
from harness.live import LiveView, table

NOW_NS = 106 * SECOND_NS
"""Ten seconds after the fixture's ranks last moved."""


def drawn(*snapshots: object) -> list[str]:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(table("a title", snapshots, NOW_NS))  # type: ignore[arg-type]
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_each_rank_has_a_row_for_its_host_and_one_for_each_stream() -> None:
    lines = drawn(snapshot(0, 1), snapshot(1, 1))
    assert lines[0].startswith("a title")
    streams = [line.split("│")[2].strip() for line in lines if line.startswith("│")]
    assert streams == ["host", "compute", "copy", "comm", "update"] * 2
    assert [line.split("│")[1].strip() for line in lines if "host" in line] == ["0", "1"]


def test_a_row_tells_what_is_unfinished_since_when_and_from_where() -> None:
    lines = drawn(snapshot(1, 1))
    (host,) = [line for line in lines if "host" in line]
    assert [cell.strip() for cell in host.split("│")[3:7]] == ["step 62", "", "wait_result", "10.0 s"]
    (compute,) = [line for line in lines if "compute" in line]
    cells = [cell.strip() for cell in compute.split("│")[2:8]]
    assert cells == ["compute", "411", "4", "graph.replay decode[8]", "10.0 s", SITE]
    (copy,) = [line for line in lines if "copy" in line]
    assert [cell.strip() for cell in copy.split("│")[3:8]] == ["500", "0", "", "", ""]


def test_labels_are_text_and_never_markup() -> None:
    one = snapshot(0, 1)
    compute = one.streams["compute"]
    odd = OpRecord(412, "[red]copy[/red]", SITE, 61, 96 * SECOND_NS, None)
    one.streams["compute"] = replace(compute, oldest=odd)
    assert any("[red]copy[/red]" in line for line in drawn(one))


def test_without_a_terminal_each_trial_and_each_suspicion_is_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = LiveView(total=2)
    view.begin("reference", {}, counts=False)
    view.end("done")
    view.begin("pinned seed 1", {})
    view.update(None)
    view.update("stalled (ranks 0)")
    view.update("stalled (ranks 0)")
    view.end("hang in 3.0 s, pass")
    view.begin("pinned seed 2", {})
    view.end("healthy")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "reference: done",
        "[1/2] pinned seed 1: suspicion: stalled (ranks 0)",
        "[1/2] pinned seed 1: hang in 3.0 s, pass",
        "[2/2] pinned seed 2: healthy",
    ]
