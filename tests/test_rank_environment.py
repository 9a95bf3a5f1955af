"""What is set in the environment of ranks on CUDA and NPU, what is left to the user, and what hides a hang."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import torch

from harness import rank_environment as room
from harness.rank_environment import (
    Patience,
    RankEnvironment,
    Written,
    environment_record,
    rank_environment,
    traps,
    written,
)
from harness.store import load_schema

PATIENCE = Patience(hang_s=80.5, trial_s=320.5)


def made(device: str, **own: str) -> RankEnvironment:
    return rank_environment(device, own, "/scratch/dumps", PATIENCE)


@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_devices_without_such_libraries_get_nothing(device: str) -> None:
    assert made(device, HCCL_EXEC_TIMEOUT="1") == RankEnvironment()


def test_every_timeout_ends_after_the_watchdog_and_the_trial() -> None:
    npu = made("npu").set
    execution, event = int(npu["HCCL_EXEC_TIMEOUT"]), int(npu["HCCL_EVENT_TIMEOUT"])
    assert PATIENCE.trial_s < execution < event < int(npu["TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC"])
    assert execution % 68 == 0, "Atlas training series round down to 68 s"
    cuda = made("cuda").set
    assert int(cuda["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > PATIENCE.trial_s
    held = rank_environment("cuda", {}, "/f", Patience(hang_s=7200, trial_s=7400)).set
    assert int(held["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 7400, "a hold for a debugger is waited for"


@pytest.mark.parametrize(("device", "library"), [("cuda", "NCCL"), ("npu", "HCCL")])
def test_recorders_are_on_and_write_into_the_folder(device: str, library: str) -> None:
    found = made(device).set
    assert int(found[f"TORCH_{library}_TRACE_BUFFER_SIZE"]) > 0
    assert found[f"TORCH_{library}_DUMP_ON_TIMEOUT"] == found[f"TORCH_{library}_ENABLE_MONITORING"] == "1"
    for kind in ("TEMP_FILE", "PIPE_FILE"):
        assert found[f"TORCH_{library}_DEBUG_INFO_{kind}"].startswith("/scratch/dumps/")
    assert made(device).traps == (), "what is set here is no trap itself"


def test_what_the_user_set_is_left_and_recorded() -> None:
    found = made("npu", HCCL_EXEC_TIMEOUT="600", ASCEND_WORK_PATH="/logs")
    assert found.left == {"HCCL_EXEC_TIMEOUT": "600", "ASCEND_WORK_PATH": "/logs"}
    assert not found.set.keys() & {"HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT", "ASCEND_PROCESS_LOG_PATH"}
    assert found.effective["HCCL_EXEC_TIMEOUT"] == "600"
    assert found.to_json()["left"] == dict(found.left)


@pytest.mark.parametrize("name", ["HCCL_ASYNC_ERROR_HANDLING", "TORCH_HCCL_ASYNC_ERROR_HANDLING"])
def test_one_of_two_names_decides_both(name: str) -> None:
    found = made("npu", **{name: "0"})
    assert found.left == {name: "0"}
    assert not [other for other in found.set if other.endswith("ASYNC_ERROR_HANDLING")]
    assert [trap.name for trap in found.traps] == [name]
    both = made("npu").set
    assert both["HCCL_ASYNC_ERROR_HANDLING"] == both["TORCH_HCCL_ASYNC_ERROR_HANDLING"] == "1", (
        "each branch of torch_npu reads one of them"
    )


@pytest.mark.parametrize(
    ("device", "own", "severity", "said"),
    [
        ("npu", {"HCCL_EXEC_TIMEOUT": "0"}, "warn", "never time out"),
        ("npu", {"HCCL_EXEC_TIMEOUT": "60"}, "fail", "before the watchdog is done"),
        ("npu", {"HCCL_EXEC_TIMEOUT": "17340"}, "warn", "after the trial"),
        ("npu", {"HCCL_EXEC_TIMEOUT": "soon"}, "fail", "no number"),
        ("npu", {"HCCL_EVENT_TIMEOUT": "900"}, "fail", "must exceed HCCL_EXEC_TIMEOUT (1836 s)"),
        ("npu", {"HCCL_CONNECT_TIMEOUT": "30"}, "warn", "from 120 to 7200"),
        ("npu", {"ACL_STREAM_TIMEOUT": "10"}, "fail", "synchronisation fails"),
        ("npu", {"TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC": "20"}, "fail", "ends a rank"),
        ("npu", {"ASCEND_LAUNCH_BLOCKING": "1"}, "fail", "races"),
        ("npu", {"TASK_QUEUE_ENABLE": "0"}, "warn", "launched by the thread"),
        ("npu", {"PER_STREAM_QUEUE": "1"}, "warn", "experimental"),
        ("npu", {"TORCH_HCCL_TRACE_BUFFER_SIZE": "0"}, "warn", "recorder is off"),
        ("npu", {"TORCH_HCCL_ENABLE_MONITORING": "0"}, "warn", "on request"),
        ("cuda", {"CUDA_LAUNCH_BLOCKING": "1"}, "fail", "races"),
        ("cuda", {"NCCL_BLOCKING_WAIT": "1"}, "warn", "wait inside each collective"),
        ("cuda", {"NCCL_ASYNC_ERROR_HANDLING": "0"}, "warn", "not ended and not dumped"),
        ("cuda", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}, "fail", "ends a rank"),
    ],
)
def test_traps(device: str, own: dict[str, str], severity: str, said: str) -> None:
    (trap,) = traps(device, own, PATIENCE.hang_s)
    assert (trap.severity, trap.value) == (severity, next(iter(own.values())))
    assert said in trap.words and trap.mend


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"HCCL_EXEC_TIMEOUT": "200"},  # sglang's NPU tests
        {"HCCL_EXEC_TIMEOUT": "1836", "HCCL_EVENT_TIMEOUT": "2000"},
        {"HCCL_EVENT_TIMEOUT": "0", "ASCEND_LAUNCH_BLOCKING": "0", "TASK_QUEUE_ENABLE": "2"},
        {"HCCL_EXEC_TIMEOUT": "0", "HCCL_OP_EXPANSION_MODE": "AIV"},
    ],
)
def test_no_traps(own: dict[str, str]) -> None:
    assert traps("npu", own, PATIENCE.hang_s) == ()


def test_aiv_cannot_wait_for_a_long_hold() -> None:
    (trap,) = traps("npu", {"HCCL_OP_EXPANSION_MODE": "AIV"}, 4000)
    assert trap.severity == "fail" and "1091" in trap.why


def test_the_names_for_cuda_exist_in_this_torch() -> None:
    """The CPU build has the headers of ProcessGroupNCCL, and the recorder in its library."""
    package = Path(torch.__file__).parent
    headers = "".join(
        path.read_text()
        for path in (package / "include/torch/csrc/distributed/c10d").glob("*.hpp")
        if path.name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp")
    )
    library = (package / "lib" / "libtorch_cpu.so").read_bytes()
    names = [name for name in made("cuda").set if name.startswith("TORCH_")]
    assert len(names) >= 10
    for name in names:
        known = re.search(rf"\b{name}\b", headers) is not None or name.encode() in library
        assert known, f"torch {torch.__version__} does not know {name}"


def test_seconds() -> None:
    assert [room.seconds(text) for text in ("1836", "0.05", "", "x", "-1", "inf")] == [
        1836.0,
        0.05,
        None,
        None,
        None,
        None,
    ]


def test_where_the_libraries_write() -> None:
    npu = written("npu", made("npu").effective)
    assert npu == Written(
        "npu",
        ("/scratch/dumps/hccl_trace_rank_",),
        "/scratch/dumps/hccl_pipe_rank_",
        "/scratch/dumps/status",
        ("/scratch/dumps/plog",),
    )
    assert written("npu", made("npu", ASCEND_WORK_PATH="/w").effective).logs == ("/w/log", "/w")
    assert written("cuda", made("cuda").effective).dumps == ("/scratch/dumps/nccl_trace_rank_",)
    own = made("cuda", TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/mine/")
    assert written("cuda", own.effective).dumps == ("/mine/",)


def test_processes_with_one_environment_are_recorded_together() -> None:
    found = {0: made("npu"), 1: made("npu", HCCL_EXEC_TIMEOUT="0"), 2: made("npu")}
    record = environment_record("npu", found)
    assert [one["processes"] for one in record["environments"]] == [[0, 2], [1]]
    assert "never time out" in record["environments"][1]["traps"][0]
    jsonschema.validate(record, load_schema("rank_environment"))
