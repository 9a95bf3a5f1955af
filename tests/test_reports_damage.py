"""Runs that died half-way: the reports still come out, say what is lost, and never say pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_fixture import ARMS, RunBuilder, d1_run

import reports
from harness.store import StoreError


def first_hang(run: Path) -> Path:
    return run / "trials" / "pinned=pinned-s0"


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no trial.json": (lambda run: (first_hang(run) / "trial.json").unlink(), "trial.json: missing"),
    "half a trial.json": (lambda run: cut(first_hang(run) / "trial.json"), "damaged or half-written"),
    "no diagnosis": (lambda run: (first_hang(run) / "diagnosis.json").unlink(), "without a diagnosis"),
    "half a ledger": (
        lambda run: cut(first_hang(run) / "evidence/sample-1/ledger/rank0.json"),
        "sample-1/ledger/rank0.json: damaged",
    ),
    "a lost directory": (lambda run: (first_hang(run)).rename(run / "elsewhere"), "its directory is gone"),
    "fields of other types": (
        lambda run: edit(
            first_hang(run) / "trial.json",
            checks="none",
            resolved=[1],
            arm={"pinned": ["x"]},
            seed="seven",
            tokens_differ=None,
            ranks=7,
            duration_s=float("nan"),
            verdict="splendid",
            expected=3,
        ),
        "unknown",
    ),
    "a diagnosis of other types": (
        lambda run: edit(
            first_hang(run) / "diagnosis.json",
            culprits=[7, {"rank": "one"}],
            operation="replay",
            proof={"fact": "x"},
            mechanism=None,
            stream=4,
            collective={"waiting": "all", "mismatch": {"sides": 3}},
            missing_evidence=[None],
        ),
        "unknown mechanism",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_reported_and_does_not_pass(tmp_path: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    run = d1_run(tmp_path, healthy=3, hung=2)
    damage(run)
    result = reports.write_all(run)
    text = (run / "report.html").read_text() + (run / "summary.md").read_text()
    assert words in text
    if name != "half a ledger":  # evidence of one rank more or less changes no count
        assert result.verdict in ("unknown", "fail")
        assert result.exit in (1, 3)


def test_a_ledger_of_other_types_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    run = d1_run(tmp_path, healthy=2, hung=1)
    ledger = first_hang(run) / "evidence/sample-1/ledger/rank1.json"
    edit(
        ledger,
        taken_ns="late",
        host=[],
        streams={"compute": {"oldest": {"label": 3}}, "x": 1},
        groups={"g": 0},
    )
    reports.write_all(run)
    assert "<td>compute</td>" in (run / "report.html").read_text()


def test_a_run_that_never_finished_says_so(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[0], 0)
    result = reports.write_all(builder.path)
    assert "run.json: the run never finished" in result.problems
    assert (result.verdict, result.exit) == ("unknown", 3)


def test_a_run_without_trials_is_unknown(tmp_path: Path) -> None:
    result = reports.write_all(RunBuilder(tmp_path).finish())
    assert (result.verdict, result.exit) == ("unknown", 3)
    assert "No trial is in this run." in (tmp_path / "latest" / "summary.md").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no run directory"):
        reports.write_all(tmp_path)
