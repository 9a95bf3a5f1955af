"""The live table: a row a rank and stream, drawn from ledgers."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from run_fixture import SECOND_NS, SITE, snapshot

from harness.ledger_snapshot import OpRecord, Snapshot
from harness.live import LiveView, table

NOW_NS = 106 * SECOND_NS
"""Ten seconds after the fixture's ranks last moved."""


def drawn(*snapshots: Snapshot, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table("a title", snapshots, NOW_NS))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def rows(*snapshots: Snapshot) -> list[list[str]]:
    columns = [[str(cell) for cell in column.cells] for column in table("", snapshots, NOW_NS).columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_each_rank_has_a_row_for_its_host_and_one_for_each_stream() -> None:
    assert drawn(snapshot(0, 1))[0].startswith("a title")
    found = rows(snapshot(0, 1), snapshot(1, 1))
    assert [row[1] for row in found] == ["host", "compute", "copy", "comm", "update"] * 2
    assert [row[0] for row in found if row[1] == "host"] == ["0", "1"]


def test_a_row_tells_what_is_unfinished_since_when_and_from_where() -> None:
    host, compute, copy, *_ = rows(snapshot(1, 1))
    assert host[1:6] == ["host", "step 62", "", "wait_result", "10.0 s"]
    assert compute[1:] == ["compute", "411", "4", "graph.replay decode[8]", "10.0 s", SITE]
    assert copy[1:] == ["copy", "500", "0", "", "", ""]


def test_a_hundred_columns_hold_the_file_and_the_line_of_a_site() -> None:
    one = snapshot(0, 1)
    site = "serving/dp_attention.py:118"
    longest = OpRecord(412, "reduce_scatter experts", site, 61, 96 * SECOND_NS, None)
    one.streams["compute"] = replace(one.streams["compute"], oldest=longest)
    assert any(site in line and longest.label in line for line in drawn(one, width=100))


def test_a_trial_that_breaks_off_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    view = LiveView(total=1)
    view.begin("a trial", {})
    view.close()
    hidden, shown = terminal.getvalue().rfind("\x1b[?25l"), terminal.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < shown


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


def test_a_trial_that_never_began_is_not_told_under_the_name_of_the_last_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = LiveView(total=3)
    view.begin("a", {})
    view.end("healthy")
    view.never_began("b")
    view.end("unknown")
    view.begin("c", {})
    view.never_began("c")
    view.end("unknown")
    said = capsys.readouterr().err.splitlines()
    assert said == ["[1/3] a: healthy", "[2/3] b: unknown", "[3/3] c: unknown"]
