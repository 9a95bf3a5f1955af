"""Which device a rank has, in which type its weights lie there, whether there is room, what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.devices.base import DeviceTimeout, MemoryFigures
from harness.devices.opening import DeviceUnavailable
from harness.held_devices import held, local_index, write_held
from serving.model_config import LITE, TINY, ModelError
from serving.targets import builtin_device
from serving.targets.builtin_device import Leftovers, RankDevice, rank_device

MIB = 2**20


@pytest.mark.parametrize(
    ("kind", "given", "visible", "index"),
    [
        ("cuda", [], None, 0),
        ("cuda", ["3"], None, 3),
        ("cuda", ["3"], "3", 0),
        ("cuda", ["5"], "4, 5,6", 1),
        ("npu", ["10"], "2,10", 1),
        ("cuda", ["GPU-ab12"], "GPU-ff00,GPU-ab12", 1),
    ],
)
def test_torch_numbers_what_a_process_sees(
    kind: str, given: list[str], visible: str | None, index: int
) -> None:
    environ: dict[str, str] = {}
    write_held(given, environ)
    name = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}[kind]
    if visible is not None:
        environ[name] = visible
    assert local_index(kind, environ) == index
    assert list(held(environ)) == given


def test_a_device_that_the_process_does_not_see_is_named() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    write_held(["7"], environ)
    with pytest.raises(ValueError, match="given cuda device 7, but CUDA_VISIBLE_DEVICES is '0,1'"):
        local_index("cuda", environ)


def test_a_rank_without_its_device_says_what_to_do() -> None:
    with pytest.raises(DeviceUnavailable, match="--device sim"):
        rank_device("cuda", 0)


class Module:
    """``torch.cuda`` as a rank asks it outside trials. ``looks``: how often an event is not done yet."""

    def __init__(self, free: int = 0, looks: float = 0) -> None:
        self.free, self.looks = free, looks
        self.selected: list[int] = []

    def set_device(self, index: int) -> None:
        self.selected.append(index)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.free, 80 * 2**30

    def current_stream(self) -> object:
        return self

    def Event(self) -> Module:
        return self

    def record(self, stream: object) -> None:
        assert stream is self

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module()
    monkeypatch.setattr(builtin_device, "device_module", lambda kind: module)
    return module


def test_a_rank_selects_its_device_and_is_named_by_the_machines_number(
    monkeypatch: pytest.MonkeyPatch, module: Module
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setenv("HANGRIG_HELD_DEVICES", "7")
    found = rank_device("cuda", 3)
    assert (found.label, found.index) == ("cuda:7", 1)
    assert module.selected == [1]


def test_weights_that_do_not_fit_are_refused_before_they_are_made(module: Module) -> None:
    device = RankDevice("cuda", "cuda:0", 0, torch.device("cuda", 0))
    module.free = 20 * 2**30
    experts = range(LITE.n_routed_experts)
    with pytest.raises(
        ModelError, match=r"29\.\d GiB in bfloat16, cuda:0 has 20\.0 GiB free; use more ranks"
    ):
        device.check_room(LITE, experts, torch.bfloat16)
    device.check_room(LITE, range(8), torch.bfloat16)
    device.check_room(TINY, range(8), torch.float32)


def test_loading_is_waited_for_with_a_deadline(module: Module) -> None:
    device = RankDevice("cuda", "cuda:0", 0, torch.device("cuda", 0))
    module.looks = 3
    device.settle(10.0)
    module.looks = float("inf")
    with pytest.raises(DeviceTimeout, match="cuda:0 did not finish loading"):
        device.settle(0.01)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({}, torch.bfloat16),
        ({"dtype": "float8_e4m3fn"}, None),
    ],
)
def test_the_type_of_a_directorys_weights(
    tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    real = RankDevice("npu", "npu:0", 0, torch.device("cpu"))
    model = {"directory": str(tmp_path)}
    if dtype is None:
        with pytest.raises(ModelError, match=r"float8_e4m3fn.*allowed: bfloat16"):
            real.dtype(model)
    else:
        assert real.dtype(model) == dtype
    assert rank_device("sim", 0).dtype(model) == torch.float32
    assert real.dtype({"preset": "lite"}) == torch.bfloat16
    assert real.dtype({"preset": "tiny"}) == real.dtype({}) == torch.float32


class Closed:
    """A device after its trial, with these figures in turn."""

    def __init__(self, *device_bytes: int) -> None:
        self._bytes = [*device_bytes]

    def memory(self) -> MemoryFigures:
        return MemoryFigures(self._bytes[0] if len(self._bytes) == 1 else self._bytes.pop(0), 0, 0)


def test_device_memory_that_a_later_trial_does_not_give_back_is_a_leak() -> None:
    leftovers = Leftovers()
    first, same, more = Closed(700 * MIB), Closed(800 * MIB), Closed(1000 * MIB)
    assert leftovers.of(first, simulated=False) == []  # type: ignore[arg-type]
    assert leftovers.of(same, simulated=False) == [], "libraries keep workspaces"  # type: ignore[arg-type]
    (said,) = leftovers.of(more, simulated=False)  # type: ignore[arg-type]
    assert "device memory" in said and str(700 * MIB) in said
    assert leftovers.of(more, simulated=True) == [], "a simulation's tensors go when they go"  # type: ignore[arg-type]
