"""What the built-in engine refuses before anything starts, asked as a user would: through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from harness.cli import app
from harness.target import EngineSpec
from harness.toggles import Facts
from serving.model_config import preset
from serving.targets import builtin_check
from serving.targets.builtin import BuiltinTarget
from serving.weights import random_weights


def run(tmp_path: Path, *settings: str) -> Result:
    """`hangrig run dp-idle-burst` with these settings; nothing may be left in the directory of runs."""
    command = ["run", "dp-idle-burst", "--out", str(tmp_path / "runs")]
    for setting in settings:
        command += ["--set", setting]
    done = CliRunner().invoke(app, command)
    assert not (tmp_path / "runs").exists()
    return done


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole model directory."""
    config = preset("tiny")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    save_file(dict(random_weights(config, 0)), folder / "model.safetensors")
    return folder


def test_a_directory_without_its_tensors_is_named(tmp_path: Path, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    done = run(tmp_path, f"model.directory={directory}")
    assert done.exit_code == 2
    assert str(directory) in done.stderr and "model.safetensors" in done.stderr


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path, directory: Path) -> None:
    weights = dict(random_weights(preset("tiny"), 0))
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].contiguous()
    save_file(weights, directory / "model.safetensors")
    done = run(tmp_path, f"model.directory={directory}")
    assert done.exit_code == 2
    assert "model.norm.weight" in done.stderr and "63" in done.stderr and "64" in done.stderr


def test_another_architecture_is_named(tmp_path: Path, directory: Path) -> None:
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    done = run(tmp_path, f"model.directory={directory}")
    assert done.exit_code == 2
    assert "llama" in done.stderr.lower() and "deepseek" in done.stderr.lower()


def test_heads_that_the_ranks_of_an_attention_group_cannot_share_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, "target.ranks=3", "target.dp=1")
    assert done.exit_code == 2
    assert "target.dp=1: 3 ranks of an attention group cannot share the model's 4 heads" in done.stderr


def test_a_grammar_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    done = run(tmp_path, "workload.grammar=verse")
    assert done.exit_code == 2
    assert "dp-idle-burst: workload: there is no grammar 'verse'; allowed: digits, list" in done.stderr


def test_a_model_that_this_machine_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    four_gib = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2**20}
    monkeypatch.setattr(builtin_check.os, "sysconf", four_gib.__getitem__)
    bursts = {"kind": "bursts"}
    said = builtin_check.problem({"preset": "lite"}, bursts, ())
    assert said is not None and "58.5 GiB" in said and "4.0 GiB free" in said
    assert builtin_check.problem({"preset": "tiny"}, bursts, ()) is None


def test_requests_that_the_model_cannot_hold_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, "workload.long_prompt_tokens=9000", "engine.kv_tokens=20000")
    assert done.exit_code == 2
    assert "max_position_embeddings 8192" in done.stderr


def test_more_ranks_than_npus_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU can be shared, an NPU belongs to one process."""
    monkeypatch.setattr(
        "harness.run.gather_facts",
        lambda device, world, target="": Facts(device, world, "2.13", device_count=1),
    )
    command = ["run", "dp-idle-burst", "--device", "npu", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and not (tmp_path / "runs").exists()
    assert "needs an NPU of its own" in done.stderr and "--set target.ranks=1" in done.stderr


def test_a_model_too_large_for_the_host_may_fit_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_check.os, "sysconf", lambda name: 1)
    workload = {
        "kind": "prefix_tree",
        "requests": 1,
        "root_tokens": 4,
        "child_tokens": (0, 1),
        "decode_tokens": (1, 2),
    }
    said = builtin_check.problem({"preset": "lite"}, workload, [0])
    assert said is not None and "GiB free" in said
    assert builtin_check.problem({"preset": "lite"}, workload, [0], on_host=False) is None


def test_ranks_that_share_a_device_reserve_parts_that_fit_into_one() -> None:
    target = BuiltinTarget()
    for ranks in (1, 2, 3, 7):
        spec = EngineSpec(ranks, "cuda", {}, {}, {}, {}, ranks_per_device=ranks)
        needs = target.needs(spec)
        assert needs.processes == ranks and needs.see_all
        assert 0.999 < ranks * needs.devices <= 1.0
