"""Stacks: parsers and groupings, mostly on dumps of real engines (``captures/README.md``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.stacks import Frame, ProcessStacks, ThreadStack, is_wait, same_place, wait_frames
from harness.stacks_parse import (
    StackParseError,
    parse_faulthandler,
    parse_pyspy_json,
    parse_pyspy_text,
)
from harness.stacks_tree import groups, merge, tree_to_json

CAPTURES = Path(__file__).parent / "captures"
DUMPS = sorted(path.relative_to(CAPTURES).as_posix() for path in CAPTURES.glob("*/*.json"))


def load(name: str, rank: int | None = None) -> ProcessStacks:
    return parse_pyspy_json((CAPTURES / name).read_text(), pid=1, rank=rank, native=False)


def host(process: ProcessStacks) -> ThreadStack:
    thread = process.thread("host")
    assert thread is not None
    return thread


def stack(*frames: tuple[str, str], name: str = "MainThread") -> ThreadStack:
    """A thread from (function, file) pairs, innermost first."""
    return ThreadStack(1, name, False, False, tuple(Frame(function, file, 1) for function, file in frames))


# --- py-spy's JSON


def test_all_captures_are_here() -> None:
    assert len(DUMPS) == 18


@pytest.mark.parametrize("name", DUMPS)
def test_every_capture_parses_whole_and_survives_json(name: str) -> None:
    raw = json.loads((CAPTURES / name).read_text())
    process = load(name, rank=3)
    assert (process.rank, process.source, process.native) == (3, "py-spy", False)
    assert process.threads[0].role == "host"
    by_id = {thread.thread_id: thread for thread in process.threads}
    assert len(by_id) == len(raw)
    for row in raw:
        thread = by_id[row["os_thread_id"]]
        assert thread.name == row["thread_name"]
        assert (thread.active, thread.owns_gil) == (row["active"], row["owns_gil"])
        assert [(f.name, f.filename, f.line) for f in thread.frames] == [
            (f["name"], f["filename"], f["line"]) for f in row["frames"]
        ]
    assert ProcessStacks.from_json(json.loads(json.dumps(process.to_json()))) == process


def test_pyspy_json_is_read_leniently() -> None:
    text = json.dumps([{"thread_id": 7, "frames": [{"name": "f"}, 3, {"line": "x"}]}, 4, {"frames": None}])
    process = parse_pyspy_json(text, pid=5, rank=None, native=True)
    assert [thread.name for thread in process.threads] == ["thread 7", "thread 0"]
    assert process.threads[0].frames == (Frame("f", "?", 0), Frame("?", "?", 0))
    assert not process.threads[0].active and process.native and process.rank is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", "Error: no such process", '{"threads": []}'])
def test_no_stack_is_an_error_that_shows_the_text(text: str) -> None:
    with pytest.raises(StackParseError, match="expected the output of py-spy --json, found no thread in"):
        parse_pyspy_json(text, pid=1, rank=0, native=False)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["frames", "thread_id", "thread_name", "name", "line"]), inner)
        ),
    )
)
def test_no_json_breaks_the_parser(value: object) -> None:
    try:
        process = parse_pyspy_json(json.dumps([{"frames": value}, value]), pid=1, rank=0, native=False)
    except StackParseError:
        pytest.fail("the first row is a thread")
    assert process.threads


def test_stored_stacks_of_another_kind_are_refused() -> None:
    good = load(DUMPS[0]).to_json()
    for bad in ({}, {**good, "schema": 9}, {**good, "threads": None}):
        with pytest.raises(ValueError, match="expected schema 1 with a list of threads"):
            ProcessStacks.from_json(bad)


# --- text dumps

PYSPY_TEXT = """Process 11877: python /srv/engine.py --tp (2)
Python v3.11.7 (/usr/bin/python3.11)

Thread 11877 (active+gil): "MainThread"
    poll (libc.so.6)
    _PollLikeSelector.select (selectors.py:415)
    _run_code (<frozen runpy>:88)
    <module> (engine.py:10)
Thread 11878 (idle): "hangrig-compute (2)"
    Condition.wait (threading.py:327)
    Thread.run (threading.py:982)
Thread 0x7F0A (idle)
    0x7fb0898a3f16 (libc.so.6)
"""


def test_pyspy_text() -> None:
    process = parse_pyspy_text(PYSPY_TEXT, rank=1)
    assert (process.pid, process.rank, process.source) == (11877, 1, "py-spy")
    first, second, third = process.threads
    assert (first.name, first.thread_id, first.active, first.owns_gil) == ("MainThread", 11877, True, True)
    assert first.frames == (
        Frame("poll", "libc.so.6", 0),
        Frame("_PollLikeSelector.select", "selectors.py", 415),
        Frame("_run_code", "<frozen runpy>", 88),
        Frame("<module>", "engine.py", 10),
    )
    assert (second.name, second.active, second.owns_gil) == ("hangrig-compute (2)", False, False)
    assert third.thread_id == 0x7F0A and third.name == "thread 0x7f0a"


def test_the_recorded_refusal_of_a_blocking_dump_holds_no_stack() -> None:
    text = (CAPTURES / "vllm-tp2-worker1-stopped" / "worker-tp1-blocking-dump.stderr.txt").read_text()
    with pytest.raises(StackParseError, match="Failed to get stack traces"):
        parse_pyspy_text(text)


FAULT_311 = """Thread 0x00007fb083fff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/srv/a file.py", line 2 in stand
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007fb089fc6b80 (most recent call first):
  File "/srv/engine.py", line ??? in <lambda>
  File "/srv/engine.py", line 15 in <module>
"""

FAULT_314 = """Thread 0x00007fb083fff6c0 [hangrig-copy] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 369 in wait

Thread 0x00007fb083fff6c1 [Thread-1 (work)] (most recent call first):
  <no Python frame>

Current thread 0x00007fb089fc6b80 [python] (most recent call first):
  Garbage-collecting
  File "/srv/engine.py", line 15 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x48 [0x55d0]
  File "not/a/frame.py", line 1 in nobody

Extension modules: numpy._core (total: 1)
"""


def test_faulthandler_of_python_311() -> None:
    process = parse_faulthandler(FAULT_311, pid=9, rank=2)
    assert (process.pid, process.rank, process.source, process.native) == (9, 2, "faulthandler", False)
    main, other = process.threads
    assert main.name == "MainThread" and main.role == "host"
    assert main.frames == (Frame("<lambda>", "/srv/engine.py", 0), Frame("<module>", "/srv/engine.py", 15))
    assert other.name == "thread 0x7fb083fff6c0"
    assert other.frames[1] == Frame("stand", "/srv/a file.py", 2)


def test_faulthandler_of_python_314_names_threads() -> None:
    process = parse_faulthandler(FAULT_314, pid=9, rank=0)
    assert {thread.name: len(thread.frames) for thread in process.threads} == {
        "hangrig-copy": 1,
        "Thread-1 (work)": 0,
        "MainThread": 1,
    }


def test_of_several_faulthandler_dumps_the_last_counts() -> None:
    later = FAULT_311.replace("line 2 in stand", "line 3 in go")
    process = parse_faulthandler(FAULT_311 + later, pid=9, rank=0)
    assert len(process.threads) == 2
    assert process.threads[1].frames[1] == Frame("go", "/srv/a file.py", 3)


PIECES = st.sampled_from([*PYSPY_TEXT.splitlines(), *FAULT_311.splitlines(), *FAULT_314.splitlines()])


@given(st.lists(PIECES | st.text(max_size=20), max_size=12).map("\n".join))
def test_no_text_breaks_a_text_parser(text: str) -> None:
    try:
        assert parse_pyspy_text(text).threads
    except StackParseError as error:
        assert "found no thread" in str(error)
    try:
        assert parse_faulthandler(text, pid=1, rank=0).threads
    except StackParseError as error:
        assert "found no thread" in str(error)


# --- roles


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("MainThread", "host"),
        ("hangrig-host", "host"),
        ("hangrig-compute", "compute"),
        ("hangrig-monitor", "monitor"),
        ("Thread-1 (_watchdog_thread)", "Thread-1 (_watchdog_thread)"),
    ],
)
def test_roles(name: str, role: str) -> None:
    assert stack(name=name).role == role


def test_in_a_ray_actor_the_named_host_thread_comes_before_the_main_thread() -> None:
    rows = [
        {"thread_name": name, "thread_id": 1}
        for name in ("zmq", "hangrig-copy", "MainThread", "hangrig-host")
    ]
    process = parse_pyspy_json(json.dumps(rows), pid=1, rank=0, native=False)
    assert [thread.name for thread in process.threads] == [
        "hangrig-host",
        "MainThread",
        "hangrig-copy",
        "zmq",
    ]
    assert host(process).name == "hangrig-host"


# --- waits


@pytest.mark.parametrize(
    ("name", "waits_in"),
    [
        # A collective, seen in torch or in a decorator around it.
        ("sglang-dp2-healthy/scheduler_DP0_TP0.json", "all_reduce"),
        ("sglang-dp2-scheduler1-stopped/scheduler_DP0_TP0.json", "all_reduce"),
        ("vllm-tp2-healthy/worker-tp0.json", "CpuCommunicator.all_gather"),
        ("vllm-tp2-worker1-stopped/worker-tp0.json", "all_reduce"),
        # A poll, seen in itself, in a helper, and in the making of its own exception.
        ("sglang-dp2-healthy/data_parallel_controller.json", "Socket.recv_pyobj"),
        ("sglang-dp2-scheduler1-stopped/data_parallel_controller.json", "Socket.recv_pyobj"),
        ("vllm-tp2-healthy/engine-core.json", "SpinCondition.wait"),
        ("vllm-tp2-worker1-stopped/engine-core.json", "SpinCondition.wait"),
        ("vllm-tp2-healthy/api-server.json", "Runner.run"),
        # At work when they were stopped.
        ("sglang-dp2-scheduler1-stopped/scheduler_DP1_TP1.json", None),
        ("vllm-tp2-worker1-stopped/worker-tp1.json", None),
    ],
)
def test_host_threads_of_real_dumps(name: str, waits_in: str | None) -> None:
    found = [frame.name for frame in wait_frames(host(load(name)))]
    assert found == [] if waits_in is None else waits_in in found


def test_every_helper_thread_of_the_real_dumps_waits_but_one_that_sleeps_in_its_own_code() -> None:
    for name in DUMPS:
        for thread in load(name).threads[1:]:
            sleeps = (
                thread.frames[0].name == "WatchdogRaw._watchdog_once"
            )  # In time.sleep, which has no frame.
            assert bool(wait_frames(thread)) is not sleeps, (name, thread.name)


def test_a_wait_ends_where_work_begins() -> None:
    waiting = stack(
        ("Condition.wait", "lib/python3.11/threading.py"),
        ("Event.wait", "lib/python3.11/threading.py"),
        ("step", "engine.py"),
        ("Thread.join", "lib/python3.11/threading.py"),
    )
    assert [frame.name for frame in wait_frames(waiting)] == ["Condition.wait", "Event.wait"]


def test_native_frames_belong_to_the_wait_above_them() -> None:
    waiting = stack(
        ("0x7fb0898a3f16", "/usr/lib/libc.so.6"),
        ("PyThread_acquire_lock_timed", "/usr/lib/libpython3.11.so.1.0"),
        ("lock_PyThread_acquire_lock", "/usr/lib/libpython3.11.so.1.0"),
        ("Condition.wait", "/usr/lib/python3.11/threading.py"),
        ("work", "engine.py"),
        ("thread_run", "/usr/lib/libpython3.11.so.1.0"),
    )
    assert len(wait_frames(waiting)) == 4
    sleeping = stack(
        ("clock_nanosleep", "libc.so.6"), ("time_sleep", "libpython3.11.so"), ("loop", "engine.py")
    )
    assert [frame.name for frame in wait_frames(sleeping)] == ["clock_nanosleep", "time_sleep"]
    computing = stack(("at::native::add", "libtorch_cpu.so"), ("work", "engine.py"))
    assert wait_frames(computing) == ()


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("gloo::transport::uv::UnboundBuffer::waitRecv", "libtorch_cpu.so", True),
        ("futex_wait", "libc.so.6", True),
        ("__futex_abstimed_wait_common64", "libc.so.6", True),
        ("pthread_cond_timedwait", "libc.so.6", True),
        ("cudaStreamSynchronize", "libcudart.so.12", True),
        ("aclrtSynchronizeStreamWithTimeout", "libascendcl.so", True),
        ("aclrtSynchronizeStream", "libascendcl.so", True),
        ("HcclAllReduce", "libhccl.so", True),
        ("memcpy", "libc.so.6", False),
        ("Queue.get", "lib/python3.11/queue.py", True),
        ("Settings.get", "settings.py", False),
        ("Stream.synchronize", "torch/cuda/streams.py", True),
        ("Board.gather", "serving/board.py", True),
        ("DeepseekV2.forward", "serving/deepseek_v2.py", False),
        ("waiter_report", "x.py", False),
    ],
)
def test_which_functions_wait(name: str, file: str, expected: bool) -> None:
    assert is_wait(Frame(name, file, 1)) is expected


# --- places


def test_polling_moves_lines_not_places() -> None:
    one = stack(("Condition.wait", "threading.py"), ("run", "engine.py"))
    other = ThreadStack(
        1, "MainThread", True, False, tuple(Frame(f.name, f.filename, f.line + 4) for f in one.frames)
    )
    assert one != other and same_place(one, other)


def test_a_poll_seen_in_different_helpers_stays_in_its_place() -> None:
    for healthy, stopped in (
        (
            "sglang-dp2-healthy/data_parallel_controller.json",
            "sglang-dp2-scheduler1-stopped/data_parallel_controller.json",
        ),
        ("vllm-tp2-healthy/engine-core.json", "vllm-tp2-worker1-stopped/engine-core.json"),
    ):
        one, other = host(load(healthy)), host(load(stopped))
        assert one.place() != other.place()
        assert same_place(one, other) and same_place(other, one)


def test_ranks_at_work_leave_their_places() -> None:
    for first, second in (
        ("sglang-dp2-healthy/scheduler_DP1_TP1.json", "sglang-dp2-scheduler1-stopped/scheduler_DP1_TP1.json"),
        ("sglang-dp2-healthy/scheduler_DP0_TP0.json", "sglang-dp2-scheduler1-stopped/scheduler_DP0_TP0.json"),
        ("vllm-tp2-healthy/worker-tp0.json", "vllm-tp2-worker1-stopped/worker-tp0.json"),
    ):
        assert not same_place(host(load(first)), host(load(second)))


def test_another_wait_of_the_same_function_is_another_place() -> None:
    first = stack(("Event.wait", "threading.py"), ("step", "engine.py"))
    second = stack(("all_reduce", "distributed_c10d.py"), ("step", "engine.py"))
    assert not same_place(first, second)
    assert not same_place(first, stack(("step", "engine.py")))
    assert not same_place(first, stack())


def test_native_frames_do_not_make_a_place() -> None:
    plain = stack(("Condition.wait", "threading.py"), ("step", "engine.py"))
    native = stack(("futex_wait", "libc.so.6"), ("Condition.wait", "threading.py"), ("step", "engine.py"))
    assert same_place(plain, native)
    assert not same_place(stack(("futex_wait", "libc.so.6")), stack(("memcpy", "libc.so.6")))


# --- the merged tree and the groups


def schedulers(directory: str) -> list[ProcessStacks]:
    return [load(f"{directory}/scheduler_DP{rank}_TP{rank}.json", rank) for rank in (0, 1)]


def test_the_odd_rank_is_a_branch_of_its_own() -> None:
    roots = merge(schedulers("sglang-dp2-scheduler1-stopped"))
    (root,) = (root for root in roots if any(member.role == "host" for member in root.members))
    assert [member.words() for member in sorted(root.members)] == ["rank 0 host", "rank 1 host"]
    # Both came through the model's forward; there they part.
    assert root.frames[-1].name == "EagerRunner.execute" and root.frames[-1].lines == (222, 226)
    ends = {next(iter(child.members)).rank: child.frames[-1].name for child in root.children}
    assert ends == {0: "all_reduce", 1: "DeepseekMLAForwardMixin.forward_absorb_core"}


def test_threads_with_one_stack_are_printed_once() -> None:
    roots = merge(schedulers("sglang-dp2-healthy"))
    monitors = [
        node
        for root in roots
        for node in root.children
        if {member.words() for member in node.members} == {"rank 0 tqdm_monitor", "rank 1 tqdm_monitor"}
    ]
    assert len(monitors) == 1 and monitors[0].children == ()
    assert [frame.name for frame in monitors[0].frames] == ["TMonitor.run", "Event.wait", "Condition.wait"]


def test_merging_samples_keeps_members_and_lists_lines() -> None:
    def sample(line: int) -> ProcessStacks:
        frames = (Frame("poll", "engine.py", line), Frame("<module>", "engine.py", 1))
        return ProcessStacks(1, 0, "py-spy", False, (ThreadStack(1, "hangrig-copy", False, False, frames),))

    assert tree_to_json(merge([sample(30)], [sample(10)], [sample(20)])) == {
        "schema": 1,
        "roots": [
            {
                "frame": "<module> (engine.py:1)",
                "members": ["rank 0 copy"],
                "children": [
                    {"frame": "poll (engine.py:10,20,30)", "members": ["rank 0 copy"], "children": []}
                ],
            }
        ],
    }


def test_a_thread_that_ends_on_the_way_is_not_lost_in_a_chain() -> None:
    inner, outer = ("inner", "x.py"), ("outer", "x.py")
    processes = [
        ProcessStacks(1, rank, "py-spy", False, (stack(*frames),))
        for rank, frames in ((0, (outer,)), (1, (inner, outer)))
    ]
    (root,) = merge(processes)
    assert [frame.name for frame in root.frames] == ["outer"] and len(root.members) == 2
    assert [child.frames[0].name for child in root.children] == ["inner"]
    assert {member.rank for member in root.children[0].members} == {1}


def test_a_thread_that_moved_is_on_two_branches_that_say_when() -> None:
    def sample(moving: str) -> list[ProcessStacks]:
        frames = {0: ("wait", "x.py"), 1: (moving, "x.py")}
        return [
            ProcessStacks(1, rank, "py-spy", False, (stack(frame, ("step", "x.py")),))
            for rank, frame in frames.items()
        ]

    (root,) = merge(sample("lower"), sample("compile"))
    assert [member.rank for member in sorted(root.members)] == [0, 1] and root.only_in == {}
    seen = {
        child.frames[0].name: {member.rank: numbers for member, numbers in child.only_in.items()}
        for child in root.children
    }
    assert seen == {"wait": {}, "lower": {1: (0,)}, "compile": {1: (1,)}}
    branches = tree_to_json([root])["roots"][0]["children"]
    assert {b["frame"].split()[0]: b.get("only_in") for b in branches} == {
        "wait": None, "lower": {"rank 1 host": [0]}, "compile": {"rank 1 host": [1]},
    }  # fmt: skip
    still = merge(sample("lower"), sample("lower"))
    assert all(not child.only_in for child in still[0].children)


def test_every_stack_can_be_read_back_from_the_tree() -> None:
    processes = [load(name, rank) for rank, name in enumerate(DUMPS)]

    def paths(node: dict[str, object], above: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        here = (*above, str(node["frame"]).split(" (")[0])
        children = node["children"]
        assert isinstance(children, list) and isinstance(node["members"], list)
        below = [found for child in children for found in paths(child, here)]
        deeper = {member for child in children for member in child["members"]}
        return below + [(member, here) for member in node["members"] if member not in deeper]

    found = sorted(path for root in tree_to_json(merge(processes))["roots"] for path in paths(root, ()))
    expected = sorted(
        (
            f"rank {process.rank} {thread.role}",
            tuple(frame.name.split(" (")[0] for frame in reversed(thread.frames)),
        )
        for process in processes
        for thread in process.threads
    )
    assert found == expected


def test_processes_that_are_no_ranks_appear_by_pid() -> None:
    (root,) = merge([ProcessStacks(77, None, "py-spy", False, (stack(("f", "x.py")),))])
    assert [member.words() for member in root.members] == ["pid 77 host"]


def test_groups_name_who_differs() -> None:
    processes = [
        ProcessStacks(
            rank, rank, "py-spy", False, (stack(("all_reduce" if rank != 2 else "sample", "x.py")),)
        )
        for rank in range(4)
    ]
    found = groups(processes)
    assert [(group.role, group.ranks, group.frames[0].name) for group in found] == [
        ("host", (0, 1, 3), "all_reduce"),
        ("host", (2,), "sample"),
    ]
    real = groups(schedulers("sglang-dp2-scheduler1-stopped"))
    assert [(group.role, group.ranks) for group in real] == [
        ("host", (0,)),
        ("host", (1,)),
        ("Thread-1 (_watchdog_thread)", (0, 1)),
        ("tqdm_monitor", (0, 1)),
    ]


def test_files_are_shown_from_their_package_on() -> None:
    for filename, shown in (
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("lib/python3.11/threading.py", "threading.py"),
        ("/opt/venv/lib/python3.11/site-packages/torch/cuda/streams.py", "torch/cuda/streams.py"),
        ("/home/me/work/serving/engine.py", "work/serving/engine.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ):
        assert Frame("f", filename, 3).short_file() == shown
    assert Frame("f", "x.so", 0).words() == "f (x.so)"
