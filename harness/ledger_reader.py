"""The reading side of a ledger: from outside, while the rank writes, is stopped, or is gone.

Reads with ``pread``, not through a mapping: a file that is cut short under a mapping ends the reader with
SIGBUS. A torn record is read again, a bounded number of times; a record that stays wrong while nothing moves
is damage and raises LedgerError. Nothing is written here and nothing waits. Standard library only.
"""

from __future__ import annotations

import json
import os
import struct
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any
from zlib import adler32, crc32

from harness import ledger_layout as layout
from harness.ledger_layout import LAYOUT, STREAMS, LedgerError, Section, unpack_text
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

RECENT_OPERATIONS = 64
RECENT_COLLECTIVES = 32

# A writer that laps a whole ring within one read needs luck to do it once; this often is out of reach.
_READ_TRIES = 64
# Equal bytes so many times in a row, and still wrong: nobody is writing there, it is damage.
_DAMAGED_AFTER_EQUAL_READS = 5

_NO_EXTERNAL = ExternalState("", 0, 0, 0, 0)


class _TornError(Exception):
    """A section does not make sense as read; the text says where."""


class _Records:
    """The newest records of one section, by number, as far as they were asked for and whole."""

    __slots__ = ("newest", "payloads")

    def __init__(self, newest: int, payloads: dict[int, bytes]) -> None:
        self.newest = newest
        self.payloads = payloads

    def last(self) -> bytes | None:
        return self.payloads.get(self.newest)


class LedgerReader:
    """Reads one ledger file. Not for several threads at once."""

    @classmethod
    def open(cls, path: Path) -> LedgerReader:
        """Raises LedgerError when ``path`` is missing, short, damaged, of another version, or no ledger."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LedgerError(
                f"{path}: expected a ledger, cannot open it ({error.strerror}); "
                "the rank makes it when it starts: check that it did, and the path"
            ) from error
        try:
            return cls(path, descriptor, _read_header(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    def __init__(self, path: Path, descriptor: int, header: Header) -> None:
        """Use ``open``."""
        self.path = path
        self.header = header
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def snapshot(self) -> Snapshot:
        """What the ledger says now. Raises LedgerError when the file is damaged or was cut short."""
        host = self._host()
        streams = {name: self._stream(name) for name in STREAMS}
        external = self._external()
        groups: dict[str, GroupState] = {}
        for index in range(layout.GROUPS):
            registered = self._records(LAYOUT.register[index], 1).last()
            if registered is None:
                break
            group = self._group(index, registered)
            groups[group.name] = group
        decisions, total, lost = self._decisions()
        return Snapshot(
            header=self.header,
            taken_ns=time.monotonic_ns(),
            boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            host=host,
            streams=streams,
            external=external,
            groups=groups,
            decisions=decisions,
            decisions_total=total,
            decisions_lost=lost,
        )

    # --- one part each

    def _host(self) -> HostState:
        phase = self._records(LAYOUT.host_phase, 1).last()
        heartbeat_ns = self._time_ns(LAYOUT.host_heartbeat)
        if phase is None:
            return HostState("", 0, 0, heartbeat_ns)
        changes, since_ns, step, name = layout.unpack_phase(phase)
        return HostState(name, step, since_ns, max(heartbeat_ns, since_ns), changes, self._wait())

    def _wait(self) -> HostWait | None:
        payload = self._records(LAYOUT.host_wait, 1).last()
        if payload is None:
            return None
        since_ns, sequence, stream = layout.HOST_WAIT.unpack(payload)
        return HostWait(STREAMS[stream], sequence, since_ns)

    def _stream(self, name: str) -> StreamState:
        # Completions first: then what was enqueued is never less than what was completed.
        for _ in range(_READ_TRIES):
            completions = self._records(LAYOUT.complete[name], RECENT_OPERATIONS + 1)
            done = [layout.COMPLETE.unpack(payload) for _, payload in sorted(completions.payloads.items())]
            completed = done[-1][0] if done else 0
            enqueues = self._records(LAYOUT.enqueue[name], RECENT_OPERATIONS, also=completed + 1)
            # The oldest one was overwritten: either so many are outstanding, or it ended while we read.
            if completed >= enqueues.newest or completed + 1 in enqueues.payloads:
                break
            if self._records(LAYOUT.complete[name], 1).newest == completions.newest:
                break
        done_up_to = [sequence for sequence, _ in done]

        def operation(sequence: int) -> OpRecord:
            enqueued_ns, step, label, site = layout.unpack_operation(enqueues.payloads[sequence])
            place = bisect_left(done_up_to, sequence)
            return OpRecord(
                sequence=sequence,
                label=label,
                site=site,
                step=step,
                enqueued_ns=enqueued_ns,
                completed_ns=done[place][1] if place < len(done) else None,
            )

        recent = tuple(
            operation(sequence)
            for sequence in sorted(enqueues.payloads)
            if sequence > enqueues.newest - RECENT_OPERATIONS
        )
        oldest = None
        oldest_since_ns = 0
        if completed < enqueues.newest:
            if completed + 1 in enqueues.payloads:
                oldest = operation(completed + 1)
            else:
                # It was enqueued no later than the oldest one that is still known.
                bound_ns = min((record.enqueued_ns for record in recent), default=0)
                oldest = OpRecord(completed + 1, "?", "?", -1, bound_ns, None)
            oldest_since_ns = max(oldest.enqueued_ns, done[-1][1] if done else 0)
        stamp_ns = max(self._time_ns(LAYOUT.stamp[name]), done[-1][1] if done else 0)
        return StreamState(enqueues.newest, completed, oldest, oldest_since_ns, stamp_ns, recent)

    def _external(self) -> tuple[ExternalState, ...]:
        # Waits first: then there are never more waits than records.
        packed = self._records(LAYOUT.external_waits, 1).last() or b""
        waits = struct.unpack(f"<{len(packed) // 8}Q", packed)
        names = self._used(LAYOUT.external_name)
        records = self._used(LAYOUT.external_record)
        states = []
        for event in range(max(names, records, len(waits))):
            name = self._records(LAYOUT.external_name[event], 1).last()
            record = self._records(LAYOUT.external_record[event], 1).last()
            count, overtaken, first = layout.EXTERNAL_RECORD.unpack(record) if record else (0, 0, 0)
            states.append(
                ExternalState(
                    name=unpack_text(layout.EXTERNAL_NAME.unpack(name)[0]) if name else "",
                    records=count,
                    waits=waits[event] if event < len(waits) else 0,
                    overtaken=overtaken,
                    first_overtaken=first,
                )
            )
        while states and states[-1] == _NO_EXTERNAL:
            states.pop()
        return tuple(states)

    def _used(self, sections: tuple[Section, ...]) -> int:
        """How many of the sections, from the first to the last used one, hold anything."""
        stride = sections[0].nbytes
        data = self._read(sections[0].offset, stride * len(sections), sections[0].name)
        first = struct.Struct("<" + f"Q{stride - 8}x" * len(sections)).unpack(data)
        return max((index + 1 for index, sequence in enumerate(first) if sequence), default=0)

    def _group(self, index: int, registered: bytes) -> GroupState:
        size, *rest = layout.REGISTER.unpack(registered)
        log = self._records(LAYOUT.group_log[index], LAYOUT.group_log[index].slots)
        enqueues = self._records(LAYOUT.collective[index], RECENT_COLLECTIVES)
        newest = enqueues.last()
        oldest = layout.COLLECTIVE.unpack_from(newest)[0] - RECENT_COLLECTIVES + 1 if newest else 0
        started_ns: dict[int, int] = {}
        completed_ns: dict[int, int] = {}
        started = all_completed = 0
        for _, payload in sorted(log.payloads.items()):
            kind, first, last, at_ns, started, all_completed = layout.GROUP_LOG.unpack(payload)
            if kind == layout.STARTED:
                started_ns[first] = at_ns
            else:
                for sequence in range(max(first, oldest), last + 1):
                    completed_ns.setdefault(sequence, at_ns)  # the log is in order: the earliest counts
        enqueued = entered = 0
        recent: list[CollectiveRecord] = []
        for _, payload in sorted(enqueues.payloads.items()):
            enqueued, count, at_ns, operation, dtype, shape = layout.unpack_collective(payload)
            if count & layout.ENTERED:
                count &= ~layout.ENTERED
                entered = enqueued
                started_ns.setdefault(enqueued, at_ns)
            for sequence in range(max(enqueued - count, enqueued - RECENT_COLLECTIVES) + 1, enqueued + 1):
                recent.append(
                    CollectiveRecord(
                        sequence=sequence,
                        operation=operation,
                        shape=shape,
                        dtype=dtype,
                        enqueued_ns=at_ns,
                        started_ns=started_ns.get(sequence),
                        completed_ns=completed_ns.get(sequence),
                    )
                )
        return GroupState(
            name=unpack_text(rest[-1]),
            ranks=tuple(rest[:size]),
            enqueued=enqueued,
            started=max(started, entered),
            completed=all_completed,
            recent=tuple(recent[-RECENT_COLLECTIVES:]),
        )

    def _decisions(self) -> tuple[tuple[dict[str, Any], ...], int, int]:
        records = self._records(LAYOUT.decisions, LAYOUT.decisions.slots)
        head = layout.LOST.size
        decisions = tuple(json.loads(payload[head:]) for _, payload in sorted(records.payloads.items()))
        newest = records.last()
        return decisions, records.newest, layout.LOST.unpack_from(newest)[0] if newest else 0

    def _time_ns(self, section: Section) -> int:
        payload = self._records(section, 1).last()
        return 0 if payload is None else int(layout.TIME.unpack(payload)[0])

    # --- records of one section

    def _records(self, section: Section, want: int, also: int = 0) -> _Records:
        """The newest ``want`` records, and record ``also`` if it is still there."""
        before = b""
        equal = 0
        torn = ""
        for _ in range(_READ_TRIES):
            data = self._read(section.offset, section.nbytes, section.name)
            try:
                return _parse(section, data, want, also, lenient=False)
            except _TornError as error:
                torn = str(error)
            equal = equal + 1 if data == before else 0
            before = data
            if equal == _DAMAGED_AFTER_EQUAL_READS:
                raise LedgerError(
                    f"{self.path}: damaged: section {section.name}, {torn}; "
                    "nothing in it is used: take the rank's stacks and its decisions file instead"
                )
        return _parse(section, before, want, also, lenient=True)

    def _read(self, offset: int, nbytes: int, name: str) -> bytes:
        data = os.pread(self._descriptor, nbytes, offset)
        if len(data) != nbytes:
            raise LedgerError(
                f"{self.path}: cut short: section {name} should have {nbytes} bytes at {offset}, {len(data)} "
                "are there; somebody truncated it or copied a part: copy it again whole"
            )
        return data


def _parse(section: Section, data: bytes, want: int, also: int, *, lenient: bool) -> _Records:
    """The records of a section as read. Raises _TornError for a bad one; ``lenient`` leaves it out."""
    sequences = section.sequences.unpack(data)
    top = max(sequences)
    newest = top // 2
    if top & 1 and _payload(section, data, newest + 1) is not None:
        newest += 1  # Whole, and only its last store is missing: the writer was stopped right there.
    following = sequences[newest % section.slots]
    # The slot after the newest holds the record of the turn before, nothing yet, or one being written.
    if not lenient and following != 2 * newest + 1 and following != max(0, 2 * (newest + 1 - section.slots)):
        raise _TornError(f"slot {newest % section.slots} has sequence {following} after record {newest}")
    if not lenient and following == 0 and any(_slot_head(section, data, newest + 1)):
        raise _TornError(f"slot {newest % section.slots} has content but no sequence")
    oldest = max(1, newest - section.slots + 1 + (following & 1))
    numbers = list(range(max(oldest, newest - want + 1), newest + 1))
    if oldest <= also < newest - want + 1:
        numbers.append(also)
    payloads: dict[int, bytes] = {}
    for number in numbers:
        payload = _payload(section, data, number)
        if payload is not None:
            payloads[number] = payload
        elif not lenient:
            raise _TornError(f"record {number} in slot {(number - 1) % section.slots} fails its checksum")
    return _Records(newest, payloads)


def _slot_head(section: Section, data: bytes, number: int) -> tuple[int, int, int]:
    sequence, checksum, nbytes = layout.SLOT_HEAD.unpack_from(
        data, (number - 1) % section.slots * section.stride
    )
    return sequence, checksum, nbytes


def _payload(section: Section, data: bytes, number: int) -> bytes | None:
    """The payload of record ``number``, or None when it is not there whole."""
    sequence, checksum, nbytes = _slot_head(section, data, number)
    start = (number - 1) % section.slots * section.stride + layout.SLOT_HEAD.size
    payload = data[start : start + nbytes]
    whole = (
        sequence in (2 * number - 1, 2 * number)
        and nbytes <= section.payload_bytes
        and adler32(payload, 2 * number % layout.CHECKSUM_BASE) == checksum
    )
    return payload if whole else None


def _read_header(path: Path, descriptor: int) -> Header:
    start = os.pread(descriptor, layout.SECTIONS_AT, 0)
    size_bytes = os.fstat(descriptor).st_size
    if len(start) < layout.PREFIX.size:
        raise LedgerError(
            f"{path}: expected a ledger of {LAYOUT.file_bytes} bytes, it has {size_bytes}; "
            "it was cut short or is still being copied: copy it again whole"
        )
    magic, version, checksum, nbytes = layout.PREFIX.unpack_from(start)
    if magic != layout.MAGIC:
        raise LedgerError(
            f"{path}: not a ledger: expected {layout.MAGIC!r} at its start, found {magic!r}; check the path"
        )
    if version != layout.VERSION:
        raise LedgerError(
            f"{path}: expected ledger version {layout.VERSION}, found {version}; "
            "read it with the version of hangrig that wrote it"
        )
    payload = start[layout.PREFIX.size : layout.PREFIX.size + nbytes]
    if len(payload) != layout.HEADER.size or crc32(payload) != checksum:
        raise LedgerError(f"{path}: damaged: the header fails its checksum; take another copy of the file")
    file_bytes, rank, world, pid, start_time_ticks, node, boot_id, device, thread = layout.HEADER.unpack(
        payload
    )
    if file_bytes != LAYOUT.file_bytes or size_bytes != file_bytes:
        raise LedgerError(
            f"{path}: expected a ledger of {LAYOUT.file_bytes} bytes, it has {size_bytes}; "
            "it was cut short or is still being copied: copy it again whole"
        )
    return Header(
        version=version,
        rank=rank,
        world=world,
        pid=pid,
        start_time_ticks=start_time_ticks,
        node=unpack_text(node),
        boot_id=unpack_text(boot_id),
        device=unpack_text(device),
        thread=thread,
    )
