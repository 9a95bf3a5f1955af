"""The probe measuring its own cost: every other window is recorded, and the figure made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from probe_rig import ledger, seated, status

from bench.engines import probe_cost
from bench.pair import BenchError
from serving.probe.hangrig_probe.measure import VARIABLE


def stepped(tmp_path: Path, steps: int) -> dict[str, Any]:
    probe = seated(tmp_path, 0)
    for _ in range(steps):
        probe.recorder.new_step()
        probe.recorder.decision({"mode": "decode"})
    probe.status.write()
    document: dict[str, Any] = status(tmp_path, "rank0")
    return document


def test_windows_are_recorded_on_off_off_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    found = stepped(tmp_path, 45)
    recorded = [record["step"] for record in ledger(tmp_path, "rank0").decisions]
    windows = sorted({step // 5 for step in recorded})
    assert windows == [0, 3, 4, 7, 8]
    assert recorded == [step for step in range(1, 46) if (step // 5) % 4 in (0, 3)]
    assert len(found["measure"]["on"]) == 4 and len(found["measure"]["off"]) == 4
    assert found["errors"] == []


def test_without_the_variable_every_step_is_recorded(tmp_path: Path) -> None:
    found = stepped(tmp_path, 30)
    assert [record["step"] for record in ledger(tmp_path, "rank0").decisions] == list(range(1, 31))
    assert "measure" not in found


def test_a_variable_that_is_no_number_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "often")
    assert any(f"{VARIABLE}=often" in text for text in stepped(tmp_path, 3)["errors"])


def test_the_figure_is_the_ratio_of_the_windows() -> None:
    windows = {"steps": 20, "on": [1010.0] * 60, "off": [1000.0] * 60}
    figure = probe_cost([{"measure": windows}])
    assert figure.arms["probe-on"]["step_us"] == 50.5 and figure.arms["probe-off"]["step_us"] == 50.0
    assert figure.ratios[0].ratio.value == pytest.approx(1.01)


def test_too_few_windows_are_no_figure() -> None:
    with pytest.raises(BenchError, match="too short"):
        probe_cost([{"measure": {"steps": 20, "on": [1.0] * 6, "off": [1.0] * 6}}, {}])
