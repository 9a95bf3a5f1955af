"""Toggles are requests: what each platform answers, and that every answer has a reason."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from harness import scenario_model
from harness.toggles import DEFAULT, DEVICES, VALUES, Facts, gather_facts, resolve, torch_release


def facts(device: str = "sim", world: int = 2, torch: str = "2.13.0+cpu", **more: object) -> Facts:
    return Facts(device, world, torch, **more)  # type: ignore[arg-type]


def answer(toggle: str, value: str, where: Facts, **others: str) -> tuple[str, str]:
    found = resolve({toggle: value, **others}, where)[toggle]
    assert found.requested == value
    return found.resolved, found.why


@pytest.mark.parametrize("target", ["builtin", "sglang"])
def test_every_answer_is_allowed_and_has_a_reason(target: str) -> None:
    for device, world, torch in product(DEVICES, (1, 2), ("2.7.1", "2.13.0")):
        for toggle, values in VALUES.items():
            for value in values:
                there = facts(device, world, torch, target=target)
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
        (facts("cuda", torch="2.7.1"), "off", "torch ≥ 2.8"),
        (facts("cuda", device_count=1), "off", "one device a rank"),
        (facts("npu"), "off", "CUDA or HIP"),
        (facts("sim", world=1), "off", "2 ranks"),
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
