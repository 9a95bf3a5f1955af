"""Litmus programs on a real GPU or NPU: ``pytest -m cuda tests/hardware``, or ``npu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app


@pytest.mark.parametrize(
    "kind", [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("npu", marks=pytest.mark.npu)]
)
def test_nothing_forbidden_is_seen_and_every_control_is(kind: str, tmp_path: Path) -> None:
    words = ["litmus", "--device", kind, "--iterations", "50", "--out", str(tmp_path), "--allow-skip"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "PASS" in done.output, "skipped: there is no such device, or it cannot be opened"
