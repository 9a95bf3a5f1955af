"""Litmus programs on the devices of CUDA and Ascend, over fakes of torch's modules for them: they run, the controls
are seen and nothing forbidden is. What the hardware does is not in the fakes."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_rig import opened_fake

from harness.device_facts import Accelerators
from harness.litmus.bench import Bench, Stress
from harness.litmus.catalogue import PROGRAMS
from harness.litmus.judge import Counted, judge
from harness.litmus.program import Program
from harness.litmus.request import ChildRequest, LitmusRequest
from harness.litmus.rules import MODEL_OF_DEVICE
from harness.litmus.session import place, programs_for

LONG_S = 30.0
SHOTS = 6
HERE = [
    program
    for program in PROGRAMS.values()
    if program.ranks == 1 and program.name != "tensor-freed"  # torch without a GPU pins nothing
]


def shots(kind: str, program: type[Program]) -> Counter[str]:
    with opened_fake(kind) as (device, _):
        bench = Bench(device, Stress(3000.0, 4096), seed=1, space="test", deadline_s=LONG_S)
        ready = program(bench)
        return Counter(ready.shoot(number) for number in range(SHOTS))


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_programs_tell_controls_from_what_is_forbidden(kind: str) -> None:
    counted = {program.name: Counted(dict(shots(kind, program))) for program in HERE}
    lines = judge(PROGRAMS, counted, MODEL_OF_DEVICE[kind])
    assert {line.name: line.verdict for line in lines} == {program.name: "pass" for program in HERE}
    for line in lines:
        assert line.rule.kind != "control" or line.observed.k > 0, line.name


def test_an_unfenced_update_loses_its_record_on_ascend_and_none_on_cuda() -> None:
    found = {kind: shots(kind, PROGRAMS["graph-unfenced"]) for kind in ("cuda", "npu")}
    assert found["npu"]["lost-record"] > 0
    assert found["cuda"]["newer-argument"] > 0 and found["cuda"]["lost-record"] == 0


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("cuda", 2, ("nccl", False)),
        ("cuda", 1, ("gloo", True)),
        ("npu", 16, ("hccl", False)),
        ("npu", 1, None),
    ],
)
def test_two_ranks_get_a_device_each_or_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int, expected: tuple[str, bool] | None
) -> None:
    monkeypatch.setattr("harness.litmus.session.accelerators", lambda device, world: Accelerators(count))
    placed = place(LitmusRequest(device=kind), 2, LONG_S)
    if expected is None:
        assert isinstance(placed, str) and "need a device each" in placed
    else:
        assert isinstance(placed, ChildRequest)
        assert (placed.backend, placed.shared) == expected


def test_the_allocator_of_torch_is_tried_where_there_is_one() -> None:
    names = {
        kind: {program.name for program in programs_for(LitmusRequest(device=kind))}
        for kind in ("sim", "npu")
    }
    assert names["npu"] - names["sim"] == {"tensor-freed"}
