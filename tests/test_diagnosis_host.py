"""What holds a host up: locks, writes, native calls, communicators; and a fault of the device against one of the
host. Each beside what looks like it and must not be said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ledger_builder import Group, Rank
from test_diagnose import blamed, evidence, facts, set_rank, two

from harness.diagnose import Diagnosis, Evidence, diagnose
from harness.stacks import Frame, ProcessStacks, ThreadStack

C = "libpython3.11.so.1.0"
LIBC = "libc.so.6"
ENGINE = "/x/serving/engine.py"
THREADING = "/usr/lib/python3.11/threading.py"
STEP = (("Engine.step", ENGINE), ("Engine.run", ENGINE))
LOCK = (("PyThread_acquire_lock_timed", C), ("lock_PyThread_acquire_lock", C))


def thread(name: str, *frames: tuple[str, str], number: int = 1, owns_gil: bool = False) -> ThreadStack:
    return ThreadStack(number, name, False, owns_gil, tuple(Frame(n, file, 10) for n, file in frames))


def blocked(
    *inner: tuple[str, str], others: tuple[ThreadStack, ...] = (), owns_gil: bool = False, **rank: Any
) -> Diagnosis:
    """Rank 1's host stands in ``inner`` of its step, as native stacks have it; rank 0 waits in the agreement."""
    ranks = two()
    ranks[0].groups["agree"].enter("all_gather")
    ranks[1] = replace(ranks[1], phase="process", **rank)
    host = thread("MainThread", *inner, *STEP, owns_gil=owns_gil)
    native = ProcessStacks(1001, 1, "py-spy", True, (host, *others))
    plain = tuple(
        replace(one, frames=tuple(frame for frame in one.frames if not frame.native))
        for one in native.threads
    )
    found = set_rank(evidence(ranks), 1, stacks=replace(native, native=False, threads=plain))
    diagnosis = diagnose(set_rank(found, 1, (1,), native=native))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("hang", "host-blocked", [1])
    return diagnosis


def test_a_lock_that_nobody_can_release() -> None:
    idle = thread("hangrig-compute", *LOCK, ("Worker._main", "/x/harness/devices/sim_streams.py"), number=2)
    said = facts(blocked(*LOCK, ("Engine._token", ENGINE), others=(idle,)))
    assert "rank 1: its host held up, waits for a lock in Engine._token (serving/engine.py:10)" in said
    assert (
        "no other of its 2 threads is in that code: whoever took the lock went without releasing it" in said
    )


def test_a_lock_that_a_thread_in_the_same_code_may_have() -> None:
    holder = thread("writer", ("write", LIBC), ("Engine._token", ENGINE), number=2)
    said = facts(blocked(*LOCK, ("Engine._token", ENGINE), others=(holder,)))
    assert "threads in the same code, which may have the lock: writer" in said
    assert "whoever took the lock" not in said


def test_an_event_is_not_a_lock_that_somebody_took() -> None:
    event = (*LOCK, ("Condition.wait", THREADING), ("Event.wait", THREADING))
    said = facts(blocked(*event, ("Engine._token", ENGINE)))
    assert "waits for a lock or an event in Engine._token" in said
    assert "whoever took the lock" not in said and "same code" not in said


def test_a_write_that_blocks() -> None:
    said = facts(blocked(("write", LIBC), ("os_write", C), ("Journal.append", "/x/serving/journal.py")))
    assert (
        "rank 1: its host held up, waits for room to write in Journal.append (serving/journal.py:10)" in said
    )


def test_a_native_call_that_keeps_the_interpreter() -> None:
    call = (("clock_nanosleep", LIBC), ("ffi_call", "libffi.so.8"), ("PyCFuncPtr_call", "_ctypes.c"))
    said = facts(blocked(*call, ("Engine._launch", ENGINE), owns_gil=True, stamp_age_s=2.5))
    assert "its host is in native code (clock_nanosleep) and keeps the interpreter's lock" in said
    assert "nobody has looked at its streams for a while" in said


def test_a_native_call_that_lets_the_interpreter_go_is_no_such_thing() -> None:
    said = facts(blocked(("clock_nanosleep", LIBC), ("pysleep", C), ("Engine._launch", ENGINE)))
    assert "keeps the interpreter's lock" not in said
    assert "rank 1: its host held up, sleeps in Engine._launch" in said


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Comm._create_communicator", "/x/serving/comm.py"),
        ("new_group", "/y/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"),
        ("ncclCommInitRankConfig", "libnccl.so.2"),
        ("HcclCommInitRootInfo", "libhccl.so"),
    ],
)
def test_a_communicator_in_the_making(name: str, file: str) -> None:
    said = facts(blocked((name, file), ("Control.work_left", "/x/serving/control.py")))
    assert f"rank 1: its host makes a communicator, in {name} (" in said


# A fault of the device ------------------------------------------------------------------------------------


def raising(text: str, *, enqueued: bool) -> Evidence:
    """Rank 1 raised and its task is over; rank 0 waits in a collective that rank 1 had enqueued, or not."""
    ranks = two()
    ranks[0].groups["experts"].enter("all_reduce")
    if enqueued:
        ranks[1].groups["experts"].add("all_reduce")
    return set_rank(set_rank(evidence(ranks), 1, exception=text), 1, task_done=True)


DEVICE = [
    "serving.x.DeviceError: 'experts.1' on compute failed on the device: RuntimeError: broken",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "RuntimeError: NPU function error: aclrtSynchronizeStream, error code is 507015",
]


@pytest.mark.parametrize("enqueued", [False, True])
@pytest.mark.parametrize("text", DEVICE)
def test_a_device_that_faulted_is_a_dead_rank_wherever_the_others_wait(text: str, enqueued: bool) -> None:
    diagnosis = diagnose(raising(text, enqueued=enqueued))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("hang", "rank-dead", [1])
    assert diagnosis.collective is not None and diagnosis.collective.group == "experts"
    assert diagnosis.proof[0].fact == f"rank 1 raised {text}"


@pytest.mark.parametrize("enqueued", [False, True])
def test_a_host_that_raised_left_the_collective_out_also_where_it_had_enqueued_it(enqueued: bool) -> None:
    diagnosis = diagnose(raising("OSError: [Errno 28] No space left on device", enqueued=enqueued))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [1])


def test_a_device_that_failed_for_want_of_a_peer_is_not_to_blame() -> None:
    """Both raised; the words of one say that it lost the other."""
    ranks = two()
    ranks[0].groups["experts"].enter("all_reduce")
    symptom = "DeviceError: 'all_reduce experts' on comm failed on the device: CommError: peer 1 timed out"
    found = set_rank(evidence(ranks), 0, exception=symptom)
    found = set_rank(found, 1, exception=DEVICE[1], task_done=True)
    assert blamed(diagnose(found)) == [1]


def test_a_device_error_of_nobody_else_waiting_ends_the_trial_dead() -> None:
    ranks = [Rank(0, 1)]
    ranks[0].groups["agree"] = Group((0,)).round("all_gather")
    found = set_rank(evidence(ranks), 0, exception=DEVICE[1], task_done=True)
    diagnosis = diagnose(found)
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("dead", "rank-dead", [0])
