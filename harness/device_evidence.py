"""What a capture takes of accelerators: the vendor's tools, the kernel's log, and what the ranks' libraries wrote.

Runs in the agent while the stacks are taken, under the capture's one deadline; raw output is kept, and a piece that
could not be had is recorded with its reason. Layout below the evidence directory:

    sample-<i>/device/<question>.txt     npu-smi and nvidia-smi, and kernel-log.txt since the trial's start
    flight/rank<r>.pickle                flight recorder of NCCL or HCCL, on request or as left at a timeout
    hccl-status/rank<r>/<file>.json      torch_npu's status files
    plog/rank<r>/debug-plog-<file>       the ends of CANN's logs of the rank's process

Not here: which question is asked (`device_tools.py`) and which file is whose (`device_files.py`).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.device_files import Pressed, log_files, newest_dump, press, status_files
from harness.device_tools import DeviceSnapshot, take_snapshot
from harness.dumps import Lack
from harness.file_tail import read_tail
from harness.rank_environment import Written
from harness.seats import Seat, seat_stem, seat_words
from harness.store import StoreError, write_bytes
from harness.tools import run_tools

PLOG_TAIL_BYTES = 256 << 10
PLOGS = 8
"""Files of one process, those last written."""
DUMP_LIMIT_BYTES = 64 << 20
_STATUS_LIMIT_BYTES = 1 << 20
_DUMP_S = 5.0
"""For the dump that was asked for: the monitor thread looks at its pipe about once a second."""
_POLL_S = 0.05
_GRACE_S = 3.0
"""Tools that the deadline cut off are killed and waited for."""
_DMESG = "dmesg"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """``pids``: of the processes of this node, by seat. ``since_ns``: the trial's start (CLOCK_MONOTONIC); what is
    older is another trial's. ``deadline_s``: a point of ``time.monotonic``."""

    written: Written
    pids: Mapping[Seat, int]
    out: Path
    sample: int
    since_ns: int
    deadline_s: float


@dataclass(slots=True)
class DeviceCapture:
    """``begin`` once, then ``end`` once; between them the caller takes stacks."""

    request: DeviceRequest
    lack: Lack
    _pressed: list[Pressed] = field(default_factory=list)
    _pressed_at: float = 0.0
    _snapshot: DeviceSnapshot | None = None
    _kernel: tuple[str, str] = ("", "")
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        """Asks the ranks for their recorders' dumps and the tools for their answers, and returns."""
        written = self.request.written
        self._pressed_at = time.time()
        if written.dumps:
            self._pressed = [press(written.pipe, seat) for seat in self.request.pids if isinstance(seat, int)]
        self._thread = threading.Thread(target=self._ask, name="hangrig-device-tools", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Writes what is there. Returns at the deadline and little more."""
        self._dumps()
        self._status()
        self._logs()
        self._tools()

    # The tools -------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._kernel = self._kernel_log()
        self._snapshot = take_snapshot(self.request.written.device, self.request.deadline_s)

    def _kernel_log(self) -> tuple[str, str]:
        """Its lines since the trial's start, and why there are none to be had."""
        path = shutil.which(_DMESG)
        if path is None:
            return "", f"{_DMESG} is not on PATH"
        result = run_tools({_DMESG: (path,)}, deadline_s=self.request.deadline_s)[_DMESG]
        if result.problem is not None:
            return "", result.problem
        lines = result.stdout.decode(errors="replace").splitlines()
        since_s = self.request.since_ns / 1e9
        return "\n".join(line for line in lines if _kernel_time_s(line) >= since_s), ""

    def _tools(self) -> None:
        assert self._thread is not None
        self._thread.join(max(0.0, self.request.deadline_s - time.monotonic()) + _GRACE_S)
        text, why = self._kernel
        if text:
            self._write(self._sample("kernel-log"), text.encode())
        elif why:
            self.lack("kernel log", why)
        snapshot = self._snapshot
        if snapshot is None:
            self.lack(
                f"state of {self.request.written.device} devices", "the tools did not end at the deadline"
            )
            return
        for question, answer in snapshot.outputs.items():
            self._write(self._sample(question), answer.encode())
        for question, problem in snapshot.problems.items():
            self.lack(question, problem)

    def _sample(self, name: str) -> str:
        return f"sample-{self.request.sample}/device/{name}.txt"

    # What the libraries wrote ----------------------------------------------------------------------------

    def _dumps(self) -> None:
        """Those that were asked for, else those that a timeout left in this trial."""
        request = self.request
        prefixes = request.written.dumps
        waiting = [one.rank for one in self._pressed if not one.why]
        until = min(time.monotonic() + _DUMP_S, request.deadline_s)
        sizes: dict[int, int] = {}
        while waiting and time.monotonic() < until:
            for rank in tuple(waiting):
                found = newest_dump(prefixes, rank, self._pressed_at)
                size = 0 if found is None else found[0].stat().st_size
                if size and sizes.get(rank) == size:  # it has stopped growing
                    waiting.remove(rank)
                sizes[rank] = size
            if waiting:
                time.sleep(_POLL_S)  # bounded by the deadline above
        since = time.time() - (time.monotonic_ns() - request.since_ns) / 1e9
        for one in self._pressed:
            found = newest_dump(prefixes, one.rank, since)
            name = f"flight recorder of {seat_words(one.rank)}"
            if found is None:
                self.lack(name, one.why or f"it was asked, and wrote none within {_DUMP_S:g} s")
                continue
            self._copy(found[0], f"flight/{seat_stem(one.rank)}.pickle", DUMP_LIMIT_BYTES)
            if found[1] < self._pressed_at - 1.0:
                age_s = self._pressed_at - found[1]
                self.lack(f"{name} of this moment", f"the one that is kept was written {age_s:.0f} s before")

    def _status(self) -> None:
        seats = {pid: seat for seat, pid in self.request.pids.items()}
        for pid, paths in status_files(self.request.written.status, seats).items():
            for path in paths:
                name = f"hccl-status/{seat_stem(seats[pid])}/{path.stem}.json"
                self._copy(path, name, _STATUS_LIMIT_BYTES)

    def _logs(self) -> None:
        folders = self.request.written.logs
        if not folders:
            return
        seats = {pid: seat for seat, pid in self.request.pids.items()}
        found = log_files(folders, seats)
        for pid, seat in seats.items():
            paths = found.get(pid, [])
            if not paths and isinstance(seat, int):
                self.lack(
                    f"plog of {seat_words(seat)}", f"no log of process {pid} under {', '.join(folders)}"
                )
            for path in paths[:PLOGS]:
                name = f"plog/{seat_stem(seat)}/{'-'.join(path.parts[-3:])}"
                self._copy(path, name, PLOG_TAIL_BYTES, tail=True)

    # Writing ---------------------------------------------------------------------------------------------

    def _copy(self, path: Path, name: str, limit_bytes: int, *, tail: bool = False) -> None:
        try:
            size = path.stat().st_size
            if size > limit_bytes and not tail:
                self.lack(name, f"{path} has {size} bytes; kept are at most {limit_bytes}")
                return
            content = read_tail(path, limit_bytes)
        except OSError as error:
            self.lack(name, f"{path}: {error.strerror}")
            return
        self._write(name, content)

    def _write(self, name: str, content: bytes) -> None:
        path = self.request.out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        except (OSError, StoreError) as error:
            self.lack(f"{name} on disk", str(error))


def _kernel_time_s(line: str) -> float:
    """``[ 1234.567890] text``: seconds of CLOCK_MONOTONIC, nearly. Never, for a line without them."""
    stamp = line[1:].partition("]")[0] if line.startswith("[") else ""
    try:
        return float(stamp)
    except ValueError:
        return float("-inf")
