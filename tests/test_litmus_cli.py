"""`hangrig litmus`: options and their mistakes, exit statuses, one document on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from harness.cli import app
from harness.store import load_schema

RUNNER = CliRunner()


def hangrig(*words: str) -> Result:
    return RUNNER.invoke(app, ["litmus", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "cpu"), "litmus runs on sim, cuda, npu"),
        (("--model", "vulkan"), "allowed: cuda, cann"),
        (("--device", "npu", "--model", "cuda"), "device npu has the model cann"),
        (("--device", "cuda", "--defect", "D3"), "switched on in sim alone"),
        (("--defect", "D9"), "allowed: D1, D2, D3, D4"),
        (("--only", "copy-race,nonsense"), "--only nonsense: no such program"),
        (("--only", " ,"), "--only: names no program"),
        (("--only", "tensor-freed"), "--only tensor-freed: no such program here"),
        (("--iterations", "0"), "--iterations"),
    ],
)
def test_a_wrong_option_is_told_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = hangrig(*words, "--out", str(tmp_path / "runs"))
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_not_there_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.doctor_device.package_version", lambda name: None)  # of torch_npu
    done = hangrig("--device", "npu", "--json", "--out", str(tmp_path / "runs"))
    assert done.exit_code == 4
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("litmus"))
    assert document["verdict"] == "skipped" and "torch_npu is not installed" in document["why"]
    assert (document["model"], document["simulation"], document["tests"]) == ("cann", False, [])
    allowed = hangrig("--device", "npu", "--allow-skip", "--out", str(tmp_path / "runs"))
    assert allowed.exit_code == 0 and "use an Ascend machine" in allowed.stdout
    assert not (tmp_path / "runs").exists()


def test_a_forbidden_outcome_is_status_1_and_one_document(tmp_path: Path) -> None:
    words = ("--only", "copy-then-kernel", "--iterations", "5", "--seed", "1", "--out", str(tmp_path))
    done = hangrig(*words, "--defect", "D3", "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("litmus"))
    assert (document["seed"], document["iterations"], document["model"]) == (1, 5, "cann")
    assert "1 of 1 forbidden outcomes seen: copy-then-kernel" in done.stderr
    assert "HANGS.md, D3" in done.stderr and "Simulation." in done.stderr
    sound = hangrig(*words, "--model", "cuda")
    assert sound.exit_code == 0
    assert "PASS  none of 1 forbidden outcomes seen" in sound.stdout and "Simulation." in sound.stdout
