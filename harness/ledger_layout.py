"""Where everything stands in a ledger file, written so that it can be read while it is being written.

Only the layout is here: the writer is in ``ledger.py``, the reader in ``ledger_reader.py``. Standard library
only. All numbers are little-endian on every host. Text is UTF-8, cut at its width, with a length byte before it; as
the last field of a payload it goes on to the end of it, without one. Of a text that is marked "up to", a payload is
only as long as the text; the others are padded.

File
====

======  ================================================================================================
offset  content
======  ================================================================================================
0       magic ``HANGRIG\\n`` (8 bytes)
8       version u32
12      crc32 u32 of the header
16      length u32 of the header
20      header: file size u64, rank i32, world i32, pid u32, start time u64 (field 22 of
        ``/proc/PID/stat``, clock ticks), node text 64, boot id text 40, device text 64, host thread u32
        (its number in ``/proc/PID/task``)
4096    the sections, one after the other, in the order of the table below
======  ================================================================================================

Sections
========

Each section is a ring with exactly one writer thread. A slot is ``{sequence u64, adler32 u32, length u32,
payload}``, its size rounded up to 8. The n-th record of a section (n from 1) lies in slot ``(n - 1) mod
slots`` and has sequence ``2n``; while it is being written, ``2n - 1``. What stands behind the payload is of an
earlier record. The checksum covers the payload and starts from the sequence modulo 65521, so a record of another
turn cannot pass for this one. Half of the hosts are aarch64, where stores become visible in any order: there the
checksum finds a torn record, not the sequence. (Adler-32 needs no tables, which would have to be read again between
the engine's own work for each record.)

=================  =====  ==========  ====================================================================
section            slots  written by  payload
=================  =====  ==========  ====================================================================
host.phase         4      host        changes u64, since ns u64, step i64, phase text up to 32
host.heartbeat     4      host        time ns u64
decisions          64     host        lines the decisions file did not take u64, JSON (at most 768 bytes)
STREAM.enqueue     256    host        time ns u64, step i64, label text up to 64, site text up to 96; n is
                                      the operation's sequence
STREAM.complete    256    completing  sequence u64 (all up to it are done), time ns u64
STREAM.stamp       4      completing  time ns u64
external.name E    2      host        name text 48
external.record E  4      update      records u64, overtaken u64, first overtaken u64 (0 = never)
external.waits     4      compute     one u64 per event, from event 0 to the highest used
group.register G   2      host        ranks u16 (how many), 256 of u16, name text 48
group.enqueue G    64     host        last sequence u64, how many u32 (with bit 31: it was entered at once,
                                      and has no start in the log), time ns u64, operation text up to 32,
                                      dtype text up to 16, up to 8 sizes i64
group.log G        128    executing   kind u8 (0 start, 1 complete), first u64, last u64, time ns u64,
                                      highest started u64, all completed up to u64
host.wait          4      host        time ns u64, sequence u64, stream u8 (its place in ``STREAMS``)
=================  =====  ==========  ====================================================================

A collective that nobody enqueues (a registration of the symmetric heap) has a group of its own, both of whose
sections the executing thread writes.

STREAM is each of compute, copy, comm, update; E runs over 128 events, G over 32 groups. Sections of one kind
lie together, first all names, then all records. Times are CLOCK_MONOTONIC nanoseconds of the rank's node.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

MAGIC = b"HANGRIG\n"
VERSION = 4
STREAMS = ("compute", "copy", "comm", "update")
EXTERNAL_EVENTS = 128
GROUPS = 32
GROUP_RANKS = 256
SHAPE_DIMENSIONS = 8
DECISION_BYTES = 768

LABEL_BYTES = 64
SITE_BYTES = 96
NAME_BYTES = 48
OPERATION_BYTES = 32
DTYPE_BYTES = 16
PHASE_BYTES = 32
NODE_BYTES = 64

PREFIX = struct.Struct("<8sIII")
HEADER = struct.Struct(f"<QiiIQ{NODE_BYTES + 1}p41p{NODE_BYTES + 1}pI")
SECTIONS_AT = 4096

SEQUENCE = struct.Struct("<Q")
SLOT_HEAD = struct.Struct("<QII")
BODY_HEAD = struct.Struct("<II")
"""What of it comes behind the sequence."""
CHECKSUM_BASE = 65521

TIME = struct.Struct("<Q")
PHASE = struct.Struct("<QQq")
LOST = struct.Struct("<Q")
ENQUEUE = struct.Struct("<Qq")
COMPLETE = struct.Struct("<QQ")
EXTERNAL_NAME = struct.Struct(f"<{NAME_BYTES + 1}p")
EXTERNAL_RECORD = struct.Struct("<QQQ")
REGISTER = struct.Struct(f"<H{GROUP_RANKS}H{NAME_BYTES + 1}p")
ENTERED = 1 << 31
"""In the count of a collective: it was entered when it was enqueued, so no start follows."""
COLLECTIVE = struct.Struct("<QIQ")
"""What the payloads with text of varying length begin with."""
HOST_WAIT = struct.Struct("<QQB")
GROUP_LOG = struct.Struct("<BQQQQQ")
STARTED, COMPLETED = 0, 1


class LedgerError(Exception):
    """A ledger cannot be made or read. The message names the file, what was expected, and what to do."""


@dataclass(frozen=True, slots=True)
class Section:
    """One ring: ``slots`` slots of ``stride`` bytes at ``offset``, each with room for ``payload_bytes``."""

    name: str
    offset: int
    slots: int
    payload_bytes: int
    stride: int
    sequences: struct.Struct = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return self.slots * self.stride


@dataclass(frozen=True, slots=True)
class Layout:
    """All sections and the size of the file that holds them."""

    host_phase: Section
    host_heartbeat: Section
    decisions: Section
    enqueue: dict[str, Section]
    complete: dict[str, Section]
    stamp: dict[str, Section]
    external_name: tuple[Section, ...]
    external_record: tuple[Section, ...]
    external_waits: Section
    register: tuple[Section, ...]
    collective: tuple[Section, ...]
    group_log: tuple[Section, ...]
    host_wait: Section
    file_bytes: int


def _make_layout() -> Layout:
    position = SECTIONS_AT

    def section(name: str, slots: int, payload_bytes: int) -> Section:
        nonlocal position
        stride = -(-(SLOT_HEAD.size + payload_bytes) // 8) * 8
        made = Section(
            name, position, slots, payload_bytes, stride, struct.Struct("<" + f"Q{stride - 8}x" * slots)
        )
        position += made.nbytes
        return made

    def many(name: str, count: int, slots: int, payload_bytes: int) -> tuple[Section, ...]:
        return tuple(section(f"{name} {index}", slots, payload_bytes) for index in range(count))

    host_phase = section("host.phase", 4, PHASE.size + PHASE_BYTES)
    host_heartbeat = section("host.heartbeat", 4, TIME.size)
    decisions = section("decisions", 64, LOST.size + DECISION_BYTES)
    texts_bytes = 1 + LABEL_BYTES + SITE_BYTES
    details_bytes = 1 + OPERATION_BYTES + 1 + DTYPE_BYTES + 8 * SHAPE_DIMENSIONS
    enqueue = {name: section(f"{name}.enqueue", 256, ENQUEUE.size + texts_bytes) for name in STREAMS}
    complete = {name: section(f"{name}.complete", 256, COMPLETE.size) for name in STREAMS}
    stamp = {name: section(f"{name}.stamp", 4, TIME.size) for name in STREAMS}
    return Layout(
        host_phase=host_phase,
        host_heartbeat=host_heartbeat,
        decisions=decisions,
        enqueue=enqueue,
        complete=complete,
        stamp=stamp,
        external_name=many("external.name", EXTERNAL_EVENTS, 2, EXTERNAL_NAME.size),
        external_record=many("external.record", EXTERNAL_EVENTS, 4, EXTERNAL_RECORD.size),
        external_waits=section("external.waits", 4, 8 * EXTERNAL_EVENTS),
        register=many("group.register", GROUPS, 2, REGISTER.size),
        collective=many("group.enqueue", GROUPS, 64, COLLECTIVE.size + details_bytes),
        group_log=many("group.log", GROUPS, 128, GROUP_LOG.size),
        host_wait=section("host.wait", 4, HOST_WAIT.size),
        file_bytes=position,
    )


LAYOUT = _make_layout()


def pack_text(text: str, width_bytes: int) -> bytes:
    """``text`` as UTF-8 of at most ``width_bytes``, cut between characters."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= width_bytes:
        return encoded
    return encoded[:width_bytes].decode("utf-8", "ignore").encode()


def pack_text_tail(text: str, width_bytes: int) -> bytes:
    """As ``pack_text``, but the end is kept: of ``file:line`` the line matters most."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= width_bytes:
        return encoded
    return encoded[-width_bytes:].decode("utf-8", "ignore").encode()


def unpack_text(encoded: bytes) -> str:
    return encoded.decode("utf-8", "replace")


def pack_operation(label: str, site: str) -> bytes:
    """What follows ``ENQUEUE``."""
    packed = pack_text(label, LABEL_BYTES)
    return bytes((len(packed),)) + packed + pack_text_tail(site, SITE_BYTES)


def unpack_operation(payload: bytes) -> tuple[int, int, str, str]:
    """Time, step, label and site of a whole payload."""
    time_ns, step = ENQUEUE.unpack_from(payload)
    label, at = _text_at(payload, ENQUEUE.size)
    return time_ns, step, label, unpack_text(payload[at:])


def pack_details(operation: str, dtype: str, shape: Sequence[int]) -> bytes:
    """What follows ``COLLECTIVE``; of ``shape`` the first 8 sizes."""
    texts = (pack_text(operation, OPERATION_BYTES), pack_text(dtype, DTYPE_BYTES))
    sizes = tuple(shape[:SHAPE_DIMENSIONS])
    return b"".join(bytes((len(text),)) + text for text in texts) + struct.pack(f"<{len(sizes)}q", *sizes)


def unpack_collective(payload: bytes) -> tuple[int, int, int, str, str, tuple[int, ...]]:
    """Last sequence, how many, time, operation, dtype and shape of a whole payload."""
    last, count, time_ns = COLLECTIVE.unpack_from(payload)
    operation, at = _text_at(payload, COLLECTIVE.size)
    dtype, at = _text_at(payload, at)
    shape = struct.unpack(f"<{(len(payload) - at) // 8}q", payload[at:])
    return last, count, time_ns, operation, dtype, shape


def unpack_phase(payload: bytes) -> tuple[int, int, int, str]:
    """Changes, since when, step and name of a whole payload."""
    changes, since_ns, step = PHASE.unpack_from(payload)
    return changes, since_ns, step, unpack_text(payload[PHASE.size :])


def _text_at(payload: bytes, at: int) -> tuple[str, int]:
    """The text whose length byte is at ``at``, and where it ends."""
    end = at + 1 + payload[at]
    return unpack_text(payload[at + 1 : end]), end
