"""Toggles are requests: what each platform answers, and that every answer has a reason."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch

from harness import scenario_model
from harness.device_facts import npu_shmem
from harness.toggles import DEFAULT, DEVICES, VALUES, Facts, gather_facts, resolve, torch_release


def facts(device: str = "sim", world: int = 2, version: str = "2.13.0+cpu", **more: object) -> Facts:
    return Facts(device, world, version, **more)  # type: ignore[arg-type]


def answer(toggle: str, value: str, where: Facts, **others: str) -> tuple[str, str]:
    found = resolve({toggle: value, **others}, where)[toggle]
    assert found.requested == value
    return found.resolved, found.why


@pytest.mark.parametrize("target", ["builtin", "sglang"])
def test_every_answer_is_allowed_and_has_a_reason(target: str) -> None:
    for device, world, version in product(DEVICES, (1, 2), ("2.7.1", "2.13.0")):
        for toggle, values in VALUES.items():
            for value in values:
                there = facts(device, world, version, target=target)
                for name, found in resolve({toggle: value}, there).items():
                    allowed = VALUES[name] if target == "builtin" else (*VALUES[name], DEFAULT)
                    assert found.resolved in allowed
                    assert found.why
                    assert found.requested in (*VALUES[name], DEFAULT)


@pytest.mark.parametrize(
    ("where", "resolved", "reason"),
    [
        (facts("sim"), "on", "simulated"),
        (facts("cuda", device_count=2), "on", "as requested"),
        (facts("cuda", version="2.7.1"), "off", "torch ≥ 2.8"),
        (facts("cuda", device_count=1), "off", "one device a rank"),
        (facts("npu"), "off", "CUDA or HIP"),
        (facts("sim", world=1), "off", "2 ranks"),
        (facts("cuda", device_count=2, peer_access=True), "on", "as requested"),
        (facts("cuda", device_count=2, peer_access=False), "off", "peer access"),
        (facts("npu", shmem="libshmem is on no library path"), "off", "NPUSHMEM: libshmem is on no"),
    ],
)
def test_symmetric_memory(where: Facts, resolved: str, reason: str) -> None:
    got, why = answer("symm_mem", "on", where)
    assert got == resolved and reason in why


@pytest.mark.parametrize(
    ("device", "resolved"), [("sim", "pageable"), ("npu", "pageable"), ("cuda", "pinned")]
)
def test_pinning_that_nobody_asked_for(device: str, resolved: str) -> None:
    found = resolve({}, facts(device))["pinned"]
    assert (found.requested, found.resolved) == (DEFAULT, resolved)


@pytest.mark.parametrize("value", VALUES["pinned"])
@pytest.mark.parametrize("device", DEVICES)
def test_pinning_is_given_as_asked(device: str, value: str) -> None:
    got, why = answer("pinned", value, facts(device))
    assert got == value
    assert ("observed" in why) == (device == "npu" and value != "pageable")


def test_defects_are_modelled_on_sim_only() -> None:
    assert answer("defect", "D2", facts("sim"))[0] == "D2"
    for device in ("cuda", "npu"):
        got, why = answer("defect", "D2", facts(device))
        assert got == "none" and device in why


def test_the_missing_fence_needs_a_graph() -> None:
    assert answer("defect", "D1", facts(), graph="on")[0] == "D1"
    got, why = answer("defect", "D1", facts(), graph="off")
    assert got == "none" and "graph is off" in why


def test_graphs_on_hip_are_refused() -> None:
    assert answer("graph", "on", facts("cuda", hip=True))[0] == "off"
    assert answer("graph", "on", facts("cuda"))[0] == "on"


@pytest.mark.parametrize(
    ("where", "ranks", "resolved", "reason"),
    [
        (facts("cuda", device_count=2), 1, "on", "as requested"),
        (facts("cuda", device_count=1), 2, "off", "2 ranks share a device: gloo"),
        (facts("cuda", world=4, device_count=2), 2, "off", "cannot hold that"),
        (facts("cuda", world=3, device_count=2), 2, "off", "2 ranks share"),
        (facts("cuda", world=1, device_count=1), 1, "on", "as requested"),
        (facts("cuda", device_count=1, target="sglang"), 1, "on", "as requested"),
        (facts("npu", device_count=1), 1, "on", "as requested"),
        (facts("npu", device_count=2, graphs=False), 1, "off", "no captured graphs for npu"),
        (facts("cuda", device_count=0), 1, "on", "as requested"),
    ],
)
def test_graphs_need_collectives_that_can_be_captured(
    where: Facts, ranks: int, resolved: str, reason: str
) -> None:
    assert where.ranks_per_device == ranks
    got, why = answer("graph", "on", where)
    assert got == resolved and reason in why


def test_the_missing_fence_follows_the_graph_that_was_refused() -> None:
    found = resolve({"graph": "on", "defect": "D1"}, facts("cuda", device_count=1))
    assert (found["graph"].resolved, found["defect"].resolved) == ("off", "none")


def test_unknown_toggles_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="'pin' does not exist; allowed: probe, pinned"):
        resolve({"pin": "on"}, facts())
    with pytest.raises(ValueError, match="pageable"):
        resolve({"pinned": "on"}, facts())


def test_facts_of_this_machine() -> None:
    found = gather_facts("sim", 2)
    assert (found.device, found.world) == ("sim", 2) and torch_release(found.torch_version) >= (2, 7)
    with pytest.raises(ValueError, match="allowed: sim"):
        gather_facts("tpu", 2)


class Module:
    """What ``torch.cuda`` or ``torch.npu`` is asked, with the figures of a machine that is not here."""

    CUDAGraph = NPUGraph = object

    def __init__(self, count: int, peers: set[tuple[int, int]] | None = None) -> None:
        self.count, self.peers = count, peers

    def device_count(self) -> int:
        return self.count

    def can_device_access_peer(self, one: int, other: int) -> bool:
        if self.peers is None:
            raise RuntimeError("no driver")
        return (one, other) in self.peers


BOTH = {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("module", "world", "peer_access"),
    [
        (Module(2, BOTH), 2, True),
        (Module(3, BOTH), 3, False),
        (Module(2, {(0, 1)}), 2, False),
        (Module(1, BOTH), 2, None),
        (Module(2, BOTH), 1, None),
        (Module(2, None), 2, None),
    ],
)
def test_peer_access_is_asked_for_the_devices_that_ranks_get(
    monkeypatch: pytest.MonkeyPatch, module: Module, world: int, peer_access: bool | None
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    found = gather_facts("cuda", world)
    assert (found.device_count, found.peer_access, found.graphs) == (module.count, peer_access, True)


def test_what_npu_shared_memory_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part in turn: torch_npu, its allocator, the library, its size."""
    monkeypatch.delenv("NPU_SHMEM_SYMMETRIC_SIZE", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module(2))
    assert gather_facts("npu", 2).shmem == "torch_npu is not installed"
    package = tmp_path / "torch_npu"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lib" / "libtorch_npu.so").write_bytes(b"\x7fELF no such thing")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no such allocator" in npu_shmem()
    (package / "lib" / "libtorch_npu.so").write_bytes(b"..N4c10d16NPUSHMEMSymmetricMemoryE..")
    assert "libshmem is on no library path" in npu_shmem()
    (tmp_path / "libshmem.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert npu_shmem() == "NPU_SHMEM_SYMMETRIC_SIZE is not set"
    monkeypatch.setenv("NPU_SHMEM_SYMMETRIC_SIZE", "1G")
    assert "not supported" in npu_shmem()
    assert "torch_npu" not in sys.modules, "it is looked at, never imported"


def test_facts_of_a_device_that_is_not_here() -> None:
    assert gather_facts("npu", 2).device_count == 0


def test_scenario_files_know_the_same_values() -> None:
    model = {
        "pinned": scenario_model.Pinned,
        "defect": scenario_model.Defect,
        "fault": scenario_model.FaultSwitch,
    }
    for name, values in VALUES.items():
        assert get_args(model.get(name, scenario_model.Switch)) == values
    assert tuple(scenario_model.Toggles.model_fields) == tuple(VALUES)
    assert get_args(scenario_model.Device) == DEVICES


@pytest.mark.parametrize(
    ("text", "release"), [("2.8.0a0+git1f", (2, 8)), ("2.13.0+cpu", (2, 13)), ("x", (0, 0))]
)
def test_torch_release(text: str, release: tuple[int, int]) -> None:
    assert torch_release(text) == release


def test_each_target_has_its_own_toggles() -> None:
    assert "probe" not in resolve({}, facts()) and "defect" in resolve({}, facts())
    foreign = resolve({}, facts("cpu", target="vllm"))
    assert "defect" not in foreign
    assert {name: found.resolved for name, found in foreign.items()} == {
        "probe": "on", "pinned": DEFAULT, "symm_mem": DEFAULT, "graph": DEFAULT, "overlap": DEFAULT,
        "prefix_cache": DEFAULT,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("toggle", "value", "where", "others", "resolved", "reason"),
    [
        ("pinned", "pinned", facts("cpu", target="sglang"), {}, "pageable", "cpu"),
        ("pinned", "pinned", facts("cuda", target="sglang"), {"probe": "off"}, DEFAULT, "probe is off"),
        ("pinned", "pinned_sync", facts("cuda", target="sglang"), {}, "pinned_sync", "as requested"),
        ("pinned", "pinned", facts("npu", target="sglang"), {}, "pinned", "observed"),
        ("graph", "on", facts("cpu", target="sglang"), {}, "off", "cpu"),
        ("graph", "on", facts("npu", target="sglang"), {}, "on", "as requested"),
        ("symm_mem", "on", facts("cpu", target="sglang"), {}, "off", "cpu"),
        ("symm_mem", "on", facts("npu", target="sglang"), {}, "off", "CUDA or HIP"),
        ("overlap", "off", facts("cpu", target="sglang"), {}, "off", "as requested"),
    ],
)
def test_toggles_of_a_foreign_engine(
    toggle: str, value: str, where: Facts, others: dict[str, str], resolved: str, reason: str
) -> None:
    got, why = answer(toggle, value, where, **others)
    assert got == resolved and reason in why
