"""The mapped progress record of one rank: the writing side, and the names that the others use.

A rank writes what it enqueues, completes and decides into a mapped file; agents read it from outside, without
the rank's help, even when it is stopped or gone. ``ledger_layout.py`` has the table of the file,
``ledger_reader.py`` the reading side, ``ledger_snapshot.py`` what it gives. After creation nothing here
raises for a full disk. Standard library only: it is loaded inside foreign engines too.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

from harness import ledger_layout as layout
from harness.ledger_decisions import DecisionFile, compact, shortened
from harness.ledger_layout import LAYOUT, STREAMS, LedgerError, pack_text
from harness.ledger_reader import LedgerReader
from harness.ledger_rings import Group, Ring, sequences_of
from harness.ledger_snapshot import (
    CollectiveRecord,
    ExternalState,
    GroupState,
    Header,
    HostState,
    HostWait,
    OpRecord,
    Snapshot,
    StreamState,
)

__all__ = [
    "STREAMS",
    "CollectiveRecord",
    "ExternalState",
    "GroupState",
    "Header",
    "HostState",
    "HostWait",
    "LedgerError",
    "LedgerReader",
    "LedgerWriter",
    "OpRecord",
    "Snapshot",
    "StreamState",
    "process_start_time_ticks",
]

_now_ns = time.monotonic_ns

# What differs from record to record; texts are the same again and again, and packed once.
_pack_phase = layout.PHASE.pack
_pack_enqueue = layout.ENQUEUE.pack
_pack_collective = layout.COLLECTIVE.pack
_pack_complete = layout.COMPLETE.pack
_pack_time = layout.TIME.pack
_pack_wait = layout.HOST_WAIT.pack
_STREAM_NUMBERS = {name: number for number, name in enumerate(STREAMS)}
_pack_log = layout.GROUP_LOG.pack
_TEXTS_KEPT = 1024


def process_start_time_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat`` (clock ticks since boot), or None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, field 2, may hold blanks and brackets; everything after the last bracket is regular.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class LedgerWriter:
    """The writing side. Each method says which thread calls it: a section has one writer thread.

    A process that forks must not write from the child: both would write the same file.
    """

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        rank: int,
        world: int,
        node: str,
        device: str,
        decisions_path: Path | None = None,
    ) -> LedgerWriter:
        """Makes the file at its full size, allocated, and puts it at ``path`` in one step.

        Call it on the host thread: the header says which one that is.
        Decisions are also appended to ``decisions_path`` when given. Raises LedgerError when there is no room
        or a directory is missing.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                _allocate(descriptor, LAYOUT.file_bytes)
                mapping = mmap.mmap(descriptor, LAYOUT.file_bytes)
                _write_header(mapping, rank=rank, world=world, node=node, device=device)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LedgerError(
                f"{path}: cannot make a ledger of {LAYOUT.file_bytes} bytes ({error.strerror}); "
                "free space on that file system or choose another run directory with --out"
            ) from error
        return cls(path, mapping, decisions_path)

    def __init__(self, path: Path, mapping: mmap.mmap, decisions_path: Path | None) -> None:
        """Use ``create``."""
        ring = partial(Ring, mapping, sequences_of(mapping))
        self.path = path
        self.decisions_path = decisions_path
        self._ring = ring
        self._phase_ring = ring(LAYOUT.host_phase)
        self._heartbeat_ring = ring(LAYOUT.host_heartbeat)
        self._wait_ring = ring(LAYOUT.host_wait)
        self._decision_ring = ring(LAYOUT.decisions)
        self._enqueue_rings = {name: ring(LAYOUT.enqueue[name]) for name in STREAMS}
        self._complete_rings = {name: ring(LAYOUT.complete[name]) for name in STREAMS}
        self._stamp_rings = {name: ring(LAYOUT.stamp[name]) for name in STREAMS}
        self._name_rings = tuple(map(ring, LAYOUT.external_name))
        self._record_rings = tuple(map(ring, LAYOUT.external_record))
        self._waits_ring = ring(LAYOUT.external_waits)
        self._register_rings = tuple(map(ring, LAYOUT.register))
        self._groups: list[Group] = []
        self._texts: dict[tuple[str, str], bytes] = {}
        self._details: dict[tuple[object, ...], bytes] = {}
        self._phases: dict[str, bytes] = {}
        self._phase_changes = 0
        self._phase = ""
        self._step = 0
        self._completed = dict.fromkeys(STREAMS, 0)
        self._records = [0] * layout.EXTERNAL_EVENTS
        self._overtaken = [0] * layout.EXTERNAL_EVENTS
        self._first_overtaken = [0] * layout.EXTERNAL_EVENTS
        self._waits = [0] * layout.EXTERNAL_EVENTS
        self._waits_used = 0
        self._pack_waits = struct.Struct("<").pack
        self._decisions = None if decisions_path is None else DecisionFile(decisions_path)
        self.phase("start", 0)

    # --- host thread

    def phase(self, name: str, step: int) -> None:
        """The host entered phase ``name`` of ``step``; saying the same again is a heartbeat. Host thread."""
        now = _now_ns()
        if name != self._phase or step != self._step:
            self._phase = name
            self._step = step
            self._phase_changes += 1
            text = self._phases.get(name)
            if text is None:
                text = self._keep_phase(name)
            self._phase_ring.write(_pack_phase(self._phase_changes, now, step) + text)
        else:
            self._heartbeat_ring.write(_pack_time(now))

    def _keep_phase(self, name: str) -> bytes:
        if len(self._phases) >= _TEXTS_KEPT:
            self._phases.clear()
        text = self._phases[name] = pack_text(name, layout.PHASE_BYTES)
        return text

    def heartbeat(self) -> None:
        """The host is alive. Host thread."""
        self._heartbeat_ring.write(_pack_time(_now_ns()))
        self._flush()

    def host_waits(self, stream: str, sequence: int) -> None:
        """The host is about to wait until operation ``sequence`` of ``stream`` is done; it enqueues nothing before.
        The end needs no word: the completion is in the ledger. Host thread."""
        self._wait_ring.write(_pack_wait(_now_ns(), sequence, _STREAM_NUMBERS[stream]))

    def decision(self, record: Mapping[str, object]) -> None:
        """Keeps ``record`` in the ring and appends it to the decisions file as one line of JSON. Host thread.

        A line may reach the file a moment later; until then the ring has it whole (``ledger_decisions.py``).
        What JSON does not know is written as text. In the ring a record of more than 768 bytes keeps the
        entries that fit and says ``"truncated": true``; the file has it whole. What the file cannot take is
        counted.
        """
        line = compact(record)
        lost = 0 if self._decisions is None else self._decisions.append(line)
        if len(line) > layout.DECISION_BYTES:
            line = shortened(record)
        self._decision_ring.write(layout.LOST.pack(lost) + line)

    def name_external(self, event: int, name: str) -> None:
        """Names external event ``event`` (0 to 127) before its first use. Host thread."""
        self._name_rings[event].write(layout.EXTERNAL_NAME.pack(pack_text(name, layout.NAME_BYTES)))

    # --- enqueuing thread (the host)

    def enqueue(self, stream: str, label: str, site: str) -> int:
        """An operation was put on ``stream`` at ``site`` ("file:line"). Returns its sequence, from 1."""
        texts = self._texts.get((label, site)) or self._keep_texts(label, site)
        return self._enqueue_rings[stream].write(_pack_enqueue(_now_ns(), self._step) + texts)

    def _keep_texts(self, label: str, site: str) -> bytes:
        if len(self._texts) >= _TEXTS_KEPT:
            self._texts.clear()
        texts = self._texts[label, site] = layout.pack_operation(label, site)
        return texts

    # --- the thread that sees a stream's completions

    def complete(self, stream: str, sequence: int) -> None:
        """``sequence`` and all before it on ``stream`` are done; a sequence already done changes nothing."""
        if sequence > self._completed[stream]:
            self._completed[stream] = sequence
            self._complete_rings[stream].write(_pack_complete(sequence, _now_ns()))

    def stamp(self, stream: str) -> None:
        """The completing side of ``stream`` is alive and has looked."""
        self._stamp_rings[stream].write(_pack_time(_now_ns()))
        self._flush()

    # --- external events

    def external_recorded(self, event: int) -> None:
        """The update stream recorded ``event``. Update thread.

        A record is *overtaken* when, by the replays completed so far, the flag was still set: it writes a 1
        over a 1 and is lost. A completion that is seen late makes this count too high.
        """
        set_by = self._records[event] - self._overtaken[event]
        self._records[event] += 1
        if set_by > self._waits[event]:
            self._overtaken[event] += 1
            self._first_overtaken[event] = self._first_overtaken[event] or self._records[event]
        self._record_rings[event].write(
            layout.EXTERNAL_RECORD.pack(
                self._records[event], self._overtaken[event], self._first_overtaken[event]
            )
        )

    def external_consumed(self, events: Sequence[int]) -> None:
        """A replay completed that waits once for each of ``events``. Compute's completing thread.

        Call it before anything that lets the next update go.
        """
        for event in events:
            self._waits[event] += 1
            if event >= self._waits_used:
                self._waits_used = event + 1
                self._pack_waits = struct.Struct(f"<{self._waits_used}Q").pack
        self._waits_ring.write(self._pack_waits(*self._waits[: self._waits_used]))

    # --- collectives

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Registers a group and returns its handle; the same name and ranks give it again. Host thread."""
        members = tuple(ranks)
        for handle, group in enumerate(self._groups):
            if group.name == name:
                if group.ranks != members:
                    raise LedgerError(
                        f"{self.path}: group {name!r} has ranks {group.ranks}, not {members}; "
                        "give each group a name of its own"
                    )
                return handle
        if len(self._groups) == layout.GROUPS or len(members) > layout.GROUP_RANKS:
            raise LedgerError(
                f"{self.path}: no room for group {name!r} of {len(members)} ranks: a ledger holds "
                f"{layout.GROUPS} groups of at most {layout.GROUP_RANKS} ranks; register only the groups "
                "that the engine uses in a step"
            )
        handle = len(self._groups)
        self._register_rings[handle].write(
            layout.REGISTER.pack(
                len(members),
                *members,
                *(0,) * (layout.GROUP_RANKS - len(members)),
                pack_text(name, layout.NAME_BYTES),
            )
        )
        self._groups.append(
            Group(
                name,
                members,
                self._ring(LAYOUT.collective[handle]),
                self._ring(LAYOUT.group_log[handle]),
            )
        )
        return handle

    def collective_enqueue(
        self, group: int, operation: str, shape: Sequence[int], dtype: str, count: int = 1
    ) -> int:
        """``count`` collectives were enqueued (more than one: what a replayed graph captured). Host thread.

        Returns the last one's sequence in its group, from 1. Of ``shape`` the first 8 sizes are kept.
        """
        state = self._groups[group]
        last = state.enqueued + count
        if count > 1:
            with state.lock:
                state.add_batch(state.enqueued + 1, last)
        state.enqueued = last
        what = (operation, dtype, *shape)
        details = self._details.get(what)
        if details is None:
            details = self._keep_details(what, operation, shape, dtype)
        state.enqueue.write(_pack_collective(last, count, _now_ns()) + details)
        return last

    def _keep_details(
        self, what: tuple[object, ...], operation: str, shape: Sequence[int], dtype: str
    ) -> bytes:
        if len(self._details) >= _TEXTS_KEPT:
            self._details.clear()
        details = self._details[what] = layout.pack_details(operation, dtype, shape)
        return details

    def collective_enter(self, group: int, operation: str, shape: Sequence[int], dtype: str) -> int:
        """One collective was enqueued and entered in the same moment, by the thread that carries it out: as
        ``collective_enqueue`` and ``collective_start`` after it, in one write. Host thread, or the one thread that
        carries out all collectives of this group."""
        state = self._groups[group]
        last = state.enqueued + 1
        state.enqueued = state.started = last
        what = (operation, dtype, *shape)
        details = self._details.get(what)
        if details is None:
            details = self._keep_details(what, operation, shape, dtype)
        state.enqueue.write(_pack_collective(last, layout.ENTERED | 1, _now_ns()) + details)
        return last

    def collective_start(self, group: int, sequence: int) -> None:
        """The executing thread entered collective ``sequence``."""
        state = self._groups[group]
        with state.lock:
            state.started = max(state.started, sequence)
            self._log(state, layout.STARTED, sequence, sequence)

    def collective_complete(self, group: int, sequence: int) -> None:
        """Collective ``sequence`` is done, and those before it in the same replay. Executing thread."""
        state = self._groups[group]
        with state.lock:
            state.started = max(state.started, sequence)
            first = state.complete(sequence)
            self._log(state, layout.COMPLETED, first, sequence)

    @staticmethod
    def _log(state: Group, kind: int, first: int, last: int) -> None:
        state.log.write(_pack_log(kind, first, last, _now_ns(), state.started, state.completed))

    def _flush(self) -> None:
        if self._decisions is not None and self._decisions.pending:
            self._decisions.flush()

    def close(self) -> None:
        """Ends the decisions file. The mapping goes with its last user: a late stamp still lands."""
        if self._decisions is not None:
            self._decisions.close()


def _allocate(descriptor: int, nbytes: int) -> None:
    """Reserves the blocks now: a mapped file that meets a full disk later ends the process with SIGBUS."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, nbytes)
        for offset in range(0, nbytes, 4096):
            os.pwrite(descriptor, bytes(min(4096, nbytes - offset)), offset)


def _write_header(mapping: mmap.mmap, *, rank: int, world: int, node: str, device: str) -> None:
    payload = layout.HEADER.pack(
        LAYOUT.file_bytes,
        rank,
        world,
        os.getpid(),
        process_start_time_ticks(os.getpid()) or 0,
        pack_text(node, layout.NODE_BYTES),
        _boot_id(),
        pack_text(device, layout.NODE_BYTES),
        threading.get_native_id(),
    )
    start = layout.PREFIX.pack(layout.MAGIC, layout.VERSION, crc32(payload), len(payload))
    mapping[: len(start) + len(payload)] = start + payload


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:40]
    except FileNotFoundError:
        return b""
