"""Stacks of processes as values: what each thread does, whether it waits, whether it moved between dumps.

Pure: no file, process or clock is touched. Dumps of tools are read by ``stacks_parse.py``, stacks of many
ranks are merged by ``stacks_tree.py``, taken by ``capture.py``. A *place* is a function and its file without
a line number: a thread that polls moves between lines, and even between small helpers, without leaving its
place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from harness.seats import Seat

STACKS_SCHEMA = 1

Place: TypeAlias = tuple[str, str]

# A wait may be seen in a helper that it calls: vLLM's SpinCondition.wait in sched_yield, pyzmq's recv_pyobj
# three frames deep in the making of an exception (both in the recorded dumps).
_HELPER_FRAMES = 4

_WAIT_NAMES = re.compile(
    r"""_*(?:
        wait(?:_\w+)? | \w+_wait | timedwait | join | acquire(?:_\w+)? | enter_wait | park
      | select | poll | accept | sleep | sched_yield | pause
      | recv(?:_\w+)? | sock_recv | communicate | get_response
      | synchronize | device_synchronize | stream_synchronize
      | barrier | monitored_barrier | all_reduce\w* | all_gather\w* | reduce_scatter\w* | all_to_all\w*
      | broadcast\w* | gather\w* | destroy_process_group | new_group
      | agree\w*
    )$""",
    re.VERBOSE,
)

# Names that mean a wait only where they stand.
_WAITS_BY_FILE: tuple[tuple[str, frozenset[str]], ...] = (
    ("queue.py", frozenset({"get", "put"})),
    ("concurrent/futures/_base.py", frozenset({"result", "exception"})),
    ("concurrent/futures/thread.py", frozenset({"_worker"})),
    ("asyncio/runners.py", frozenset({"run"})),
    ("asyncio/base_events.py", frozenset({"run_forever", "_run_once"})),
    ("threading.py", frozenset({"__enter__"})),
    ("torch/distributed/distributed_c10d.py", frozenset({"send", "scatter", "reduce", "batch_isend_irecv"})),
    ("torch/distributed/c10d_logger.py", frozenset({"wrapper"})),
    ("shm_broadcast.py", frozenset({"dequeue", "enqueue"})),
)

_NATIVE_WAITS = re.compile(
    r"""(?:
        _*(?:futex|pthread_cond|sem|lll_lock|abstimed)\w*wait\w* | _*(?:GI_+)?_*\w*futex_abstimed_wait\w*
      | pthread_mutex_lock | pthread_(?:timed)?join\w* | PyThread_acquire_lock\w* | \w*acquire_lock\w* |
      acquire_timed | take_gil | p?poll | p?select | epoll_p?wait\w* | \w*nanosleep | time_sleep | pysleep |
      sched_yield | usleep | recv(?:from|msg)? | accept4? | wait4 | waitpid | waitid | read |
      _*libc_(?:recv|read|poll) | (?:nccl|pnccl|Hccl|hccl)\w* | (?:cuda|cu|aclrt|npu)\w*[Ss]ynchronize\w* |
      aclrt\w*[Ww]ait\w*
    )$""",
    re.VERBOSE,
)
_NATIVE_NAMESPACES = (
    "gloo::",
    "c10d::",
    "hccl::",
    "std::condition_variable::wait",
    "std::this_thread::sleep",
)
_NATIVE_FILE = re.compile(r"\.so(?:\.[\d.]+)?$|\.(?:c|cc|cpp|cxx|h|hpp)$|^\[|^$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+$")
_PLACES_KEPT = 4096
"""What is known of so many places is not worked out again: thousands of ranks stand in a few dozen."""
_LIBRARY_ROOT = re.compile(r"^(?:.*/)?(?:site-packages|dist-packages|lib/python3\.\d+)/")


@dataclass(frozen=True, slots=True)
class Frame:
    """``line`` 0: not known."""

    name: str
    filename: str
    line: int

    @property
    def place(self) -> Place:
        return (self.name, self.filename)

    @property
    def native(self) -> bool:
        return _is_native(self.filename)

    def short_file(self) -> str:
        """The file without the directories above its package; of other paths the last three parts."""
        shortened = _LIBRARY_ROOT.sub("", self.filename)
        return shortened if shortened != self.filename else "/".join(self.filename.split("/")[-3:])

    def words(self) -> str:
        """``name (file:line)``, for people."""
        line = f":{self.line}" if self.line else ""
        return f"{self.name} ({self.short_file()}{line})"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread; ``frames`` innermost first. ``active``: it was on a processor, if the tool could tell."""

    thread_id: int
    name: str
    active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]

    @property
    def role(self) -> str:
        """``host`` for the main thread or ``hangrig-host``, ``X`` for ``hangrig-X``, else the name."""
        if self.name == "MainThread":
            return "host"
        return self.name.removeprefix("hangrig-")

    def place(self) -> tuple[Place, ...]:
        """Where the thread stands, outermost first. Native frames count only where there are no others."""
        python = tuple(frame.place for frame in reversed(self.frames) if not frame.native)
        return python or tuple(frame.place for frame in reversed(self.frames))


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """All threads of one process, the host thread first. ``rank`` is its seat; None: a process of no engine."""

    pid: int
    rank: Seat | None
    source: str
    native: bool
    threads: tuple[ThreadStack, ...]

    def thread(self, role: str) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.role == role), None)

    def to_json(self) -> dict[str, Any]:
        """The document ``stacks/rank<r>.json`` of an evidence directory."""
        return {"schema": STACKS_SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessStacks:
        """Reads ``to_json``'s document. What is missing is left out; raises ValueError for something else."""
        if document.get("schema") != STACKS_SCHEMA or not isinstance(document.get("threads"), list):
            raise ValueError(
                f"stacks: expected schema {STACKS_SCHEMA} with a list of threads, found schema "
                f"{document.get('schema')!r}; take a stacks/rank<r>.json of an evidence directory"
            )
        return cls(
            pid=_integer(document.get("pid")),
            rank=_seat(document.get("rank")),
            source=str(document.get("source", "")),
            native=bool(document.get("native", False)),
            threads=host_first(
                read_thread(thread) for thread in document["threads"] if isinstance(thread, dict)
            ),
        )


def read_thread(data: Mapping[str, Any]) -> ThreadStack:
    """A thread as py-spy's JSON or ours writes it; what is missing gets the most harmless value."""
    thread_id = _integer(data.get("os_thread_id") or data.get("thread_id"))
    name = data.get("name") or data.get("thread_name")
    frames = data.get("frames")
    return ThreadStack(
        thread_id=thread_id,
        name=str(name) if name else f"thread {thread_id}",
        active=bool(data.get("active", False)),
        owns_gil=bool(data.get("owns_gil", False)),
        frames=tuple(
            Frame(str(frame.get("name", "?")), str(frame.get("filename", "?")), _integer(frame.get("line")))
            for frame in (frames if isinstance(frames, list) else [])
            if isinstance(frame, dict)
        ),
    )


def host_first(threads: Any) -> tuple[ThreadStack, ...]:
    """``hangrig-host``, then the main thread (a Ray actor may have both), then hangrig's, then the others."""

    def order(thread: ThreadStack) -> int:
        if thread.name == "hangrig-host":
            return 0
        if thread.name == "MainThread":
            return 1
        return 2 if thread.name.startswith("hangrig-") else 3

    return tuple(sorted(threads, key=order))


def is_wait(frame: Frame) -> bool:
    """The function is known to wait: for a lock, an event, a socket, a stream, or other ranks."""
    return _is_wait(frame.name, frame.filename)


@lru_cache(_PLACES_KEPT)
def _is_wait(name: str, filename: str) -> bool:
    if _is_native(filename):
        return name.startswith(_NATIVE_NAMESPACES) or _NATIVE_WAITS.match(name) is not None
    last = name.rsplit(".", 1)[-1]
    return _WAIT_NAMES.match(last) is not None or any(
        filename.endswith(file) and last in names for file, names in _WAITS_BY_FILE
    )


@lru_cache(_PLACES_KEPT)
def _is_native(filename: str) -> bool:
    return _NATIVE_FILE.search(filename) is not None


def wait_frames(stack: ThreadStack) -> tuple[Frame, ...]:
    """The innermost frames, up to the outermost one of the wait that the thread is in; empty without a wait.

    A wait may be seen inside a helper that it calls, at most four frames deep. Native frames below a Python
    wait belong to it. A wait that runs on a processor (``active``) is a wait all the same: some spin.
    """
    end = 0
    helpers = 0
    for index, frame in enumerate(stack.frames):
        if is_wait(frame):
            end = index + 1
        elif end == 0 and frame.native:
            continue
        elif end == 0 and helpers < _HELPER_FRAMES:
            helpers += 1
        elif not _passes_through(frame):
            break
    return stack.frames[:end]


def same_place(first: ThreadStack, second: ThreadStack) -> bool:
    """The thread did not leave its place between two dumps: same functions, or inside the same wait."""
    one, other = first.place(), second.place()
    if one == other:
        return True
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    if common == 0 or max(len(one), len(other)) - common > _HELPER_FRAMES:
        return False
    name, filename = one[common - 1]
    return is_wait(Frame(name, filename, 0))


def _passes_through(frame: Frame) -> bool:
    """Between two waits of one call: native glue, and decorators."""
    return frame.native or _ADDRESS.match(frame.name) is not None or frame.name.endswith(".wrapper")


def _seat(value: object) -> Seat | None:
    return value if value is None or isinstance(value, str) else _integer(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0
    try:
        return int(value)
    except (ValueError, OverflowError):
        return 0
