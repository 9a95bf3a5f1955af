"""Error codes of CANN, HCCL, torch_npu, NCCL, CUDA and NVIDIA's driver, and what each says of a hang. Pure.

Here: the table, with the source of each meaning, and the search in a log. Wording of the meanings is ours. A code
that says a rank *waited* is a symptom: its log is that of a rank that was hung upon. A *fault* is the rank's own
device or call, and no link, which has two ends; *setup* failed before any collective ran. Not here: whose log it is
(the caller knows) and whom a diagnosis blames.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["waited", "fault", "setup", "unknown"]

HCOMM = "CANN hcomm, error message table (errTitle, ErrMessage)"
RUNTIME = "torch_npu 2.14.0 wheel, include/acl/error_codes/rt_error_codes.h"
HCCL_TYPES = "torch_npu 2.14.0 wheel, include/hccl/hccl_types.h"
XID = "NVIDIA, Xid catalog of the GPU deployment documents"
NCCL = "NCCL user guide, types ncclResult_t"
CUDA = "CUDA runtime API, error types (cudaError)"
TORCH = "PyTorch, ProcessGroupNCCL watchdog; torch_npu words it alike"
CANN = "PLATFORMS.md, and CANN's logs in public reports"

_LINE = 400
_UNKNOWN_RANK = 0xFFFF
"""HCCL prints 4294967295, or ``unknown``, for a peer that it cannot name."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """``title`` is short, ``means`` a sentence on what it says of a hang."""

    title: str
    role: Role
    means: str
    source: str


@dataclass(frozen=True, slots=True)
class FoundCode:
    """One code of one text: its first line (cut), how many lines have it, and the peer that the first of them waits
    for, as a rank of its communicator; None: not named."""

    code: str
    meaning: Meaning
    line: str
    number: int
    count: int
    peer: int | None = None

    def words(self) -> str:
        peer = "" if self.peer is None else f", for rank {self.peer} of its communicator"
        often = "" if self.count == 1 else f", {self.count} times"
        return f"{self.code} ({self.meaning.title}{peer}{often}): {self.meaning.means}"


_Row = tuple[str, str, Role, str]


def _rows(source: str, *rows: _Row) -> dict[str, Meaning]:
    return {code: Meaning(title, role, means, source) for code, title, role, means in rows}


_CODES: Mapping[str, Meaning] = {
    **_rows(
        HCOMM,
        ("EI0001", "bad environment variable", "setup", "HCCL refuses a value of the environment"),
        ("EI0002", "notify wait timed out", "waited",
         "the rank stood in a collective for HCCL_EXEC_TIMEOUT and its peer never came: look at the peer"),
        ("EI0003", "bad argument of a collective", "fault", "the call itself is refused"),
        ("EI0004", "rank table cannot be read", "setup", "no communicator was made"),
        ("EI0005", "arguments differ between ranks", "unknown",
         "two ranks brought different things to one collective"),
        ("EI0006", "socket timed out", "waited",
         "no communicator within HCCL_CONNECT_TIMEOUT: a rank did not come, or the network is in the way"),
        ("EI0007", "resources exhausted", "fault", "HCCL could not allocate what the call needs"),
        ("EI0008", "versions of HCCL differ", "setup", "the ranks have different CANN packages"),
        ("EI0009", "transport was not made", "setup",
         "a link to a peer could not be set up: port, address or optics"),
        ("EI0010", "peer-to-peer failed", "setup", "devices of one node cannot reach each other directly"),
        ("EI0011", "device memory exhausted", "fault", "HCCL found no memory on the device"),
        ("EI0012", "SDMA copy failed", "unknown",
         "a copy between devices broke: the link, a peer that ended, or memory freed under the copy"),
        ("EI0013", "RoCE completion with an error", "unknown",
         "a message between nodes was lost: the link, or a peer that ended first"),
        ("EI0014", "rank table is wrong", "setup", "no communicator was made"),
        ("EI0015", "members were not collected", "waited",
         "a rank did not come to the making of a communicator"),
        ("EI0019", "port taken", "setup", "the host's port for HCCL is in use, often by a process left over"),
        ("EI0020", "port taken", "setup", "the device's port for HCCL is in use by another process"),
    ),
    **_rows(
        CANN,
        ("EI9999", "internal error of HCCL", "unknown",
         "an inner error; the lines after it name the task and its timeout"),
        ("EE9999", "internal error of the runtime", "unknown", "the lines after it say what failed"),
        ("EE1002", "stream synchronisation timed out", "waited",
         "a host waited for a stream that did not come to its end; the stream waits for something"),
        ("EH9999", "internal error of AscendCL", "unknown", "the lines after it name the runtime's result"),
        ("EZ9999", "internal error of an operator", "fault", "a kernel failed on the device"),
        ("HCCL stuck", "heartbeat saw a device stuck", "unknown",
         "HCCL's heartbeat names a device of the cluster that stands"),
    ),
    **_rows(
        RUNTIME,
        ("507001", "task scheduler error", "unknown", "follows a task that timed out or failed"),
        ("507010", "task scheduler lost its heartbeat", "fault", "the device's scheduler does not answer"),
        ("507011", "execution of a captured model failed", "unknown",
         "a graph's replay failed; the codes before it say why"),
        ("507012", "report timed out", "waited", "the host had no report from the device in time"),
        ("507013", "system DMA error", "fault", "a copy broke on the device"),
        ("507014", "AI core timed out", "fault", "a kernel did not end"),
        ("507015", "AI core exception", "fault", "a kernel failed"),
        ("507017", "AI CPU timed out", "fault", "a kernel of the device's processor did not end"),
        ("507018", "AI CPU exception", "fault", "a kernel of the device's processor failed"),
        ("507034", "vector core timed out", "fault", "a kernel did not end"),
        ("507035", "vector core exception", "fault", "a kernel failed"),
        ("507046", "stream synchronisation timed out", "waited",
         "a host waited for a stream that did not come to its end"),
        ("507047", "event synchronisation timed out", "waited",
         "a host waited for an event that was not reached"),
        ("507048", "task of a collective timed out (FFTS+)", "waited",
         "the device waited for a peer's notify in a collective; with EI0002 beside it, it is that wait"),
        ("507049", "task of a collective failed (FFTS+)", "fault", "a step of a collective broke"),
        ("507053", "device memory error", "fault", "the device's memory is damaged"),
        ("507054", "uncorrectable memory error (HBM)", "fault", "the device's memory is damaged"),
        ("507056", "link error", "unknown", "a link between devices broke"),
        ("507057", "a remote device is suspected", "unknown", "a peer's device failed: look at the peer"),
        ("507899", "driver error", "fault", "the driver failed inside"),
        ("507915", "communication unit timed out (CCU)", "waited", "as 507048, on devices with a CCU"),
    ),
    **_rows(
        HCCL_TYPES,
        ("HCCL 9", "HCCL_E_TIMEOUT", "waited", "a call into HCCL waited in vain"),
        ("HCCL 19", "HCCL_E_NETWORK", "unknown", "a call of the network failed"),
        ("HCCL 21", "HCCL_E_REMOTE", "unknown", "a completion came back with an error: link or peer"),
        ("HCCL 22", "HCCL_E_SUSPENDING", "unknown", "the communicator was suspended"),
    ),
    **_rows(
        TORCH,
        ("torch timeout", "torch's watchdog timed out", "waited",
         "a collective was open for longer than its group's timeout; the line names number and operation"),
    ),
    **_rows(
        NCCL,
        ("ncclSystemError", "system call failed", "unknown", "network, shared memory or a peer that ended"),
        ("ncclRemoteError", "a remote process failed", "waited", "a peer ended or lost its link"),
        ("ncclInternalError", "NCCL's own error", "unknown", "an inner check of NCCL failed"),
        ("ncclInvalidUsage", "NCCL used wrongly", "setup", "as two ranks on one GPU"),
        ("ncclUnhandledCudaError", "a call of CUDA failed in NCCL", "fault", "the device failed before"),
    ),
    **_rows(
        CUDA,
        ("CUDA illegal address", "cudaErrorIllegalAddress", "fault",
         "a kernel touched memory that is not its own"),
        ("CUDA launch timeout", "cudaErrorLaunchTimeout", "fault", "a kernel did not end"),
        ("CUDA launch failure", "cudaErrorLaunchFailure", "fault", "a kernel failed"),
        ("CUDA assert", "cudaErrorAssert", "fault", "an assertion of a kernel failed"),
        ("CUDA ECC", "cudaErrorECCUncorrectable", "fault", "the device's memory is damaged"),
        ("CUDA NVLink", "cudaErrorNvlinkUncorrectable", "unknown", "a link between GPUs broke"),
        ("CUDA out of memory", "cudaErrorMemoryAllocation", "fault", "the device's memory was full"),
    ),
    **_rows(
        XID,
        ("Xid 13", "graphics engine exception", "fault", "a kernel failed, mostly by its own address"),
        ("Xid 31", "memory page fault", "fault", "a kernel touched memory that is not its own"),
        ("Xid 43", "GPU stopped processing", "fault", "a program was stopped on the GPU"),
        ("Xid 45", "preemptive cleanup", "unknown", "channels were removed after an earlier error or a kill"),
        ("Xid 48", "double bit memory error", "fault", "the device's memory is damaged"),
        ("Xid 63", "row remapping recorded", "fault", "memory is worn; the GPU wants a reset"),
        ("Xid 64", "row remapping failed", "fault", "memory is damaged"),
        ("Xid 74", "NVLink error", "unknown", "a link between GPUs broke"),
        ("Xid 79", "GPU fell off the bus", "fault", "the GPU does not answer any more"),
        ("Xid 94", "contained memory error", "fault", "one program was hit"),
        ("Xid 95", "uncontained memory error", "fault", "every program of the GPU is hit"),
        ("Xid 119", "GSP did not answer", "fault", "the GPU's own processor hangs, and with it the driver"),
        ("Xid 120", "GSP error", "fault", "the GPU's own processor failed"),
    ),
}  # fmt: skip
_OTHER: tuple[tuple[str, Meaning], ...] = (
    (r"EI\d{4}", Meaning("error of HCCL", "unknown", "not in our table", HCOMM)),
    (r"Xid \d+", Meaning("event of NVIDIA's driver", "unknown", "not in our table", XID)),
    (r"507\d{3}", Meaning("error of Ascend's runtime", "unknown", "not in our table", RUNTIME)),
)

_CANN = re.compile(r"(?<![A-Za-z0-9])(E[EHIZ]\d{4})(?!\d)")
_RESULT = re.compile(
    r"(?:error code(?: is|:)?|error_code=|runtime result\s*=|result\s*=|ret(?:code)?\s*[=:])\s*\[?(50\d{4})\b",
    re.IGNORECASE,
)
_HCCL = re.compile(r"\b(?:Hccl\w+|hccl\w+\([^)]*\)|call hccl api)\b.{0,80}?error code is (\d{1,2})\b")
_STUCK = re.compile(r"Heartbeat\w* .{0,80}Stuck|Cluster Exception.{0,120}Stuck", re.IGNORECASE)
_XID = re.compile(r"\bXid \([^)]*\): (\d{1,4})\b")
_NCCL = re.compile(
    r"\b(ncclSystemError|ncclRemoteError|ncclInternalError|ncclInvalidUsage|ncclUnhandledCudaError)\b"
)
_CUDA: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("CUDA illegal address", re.compile(r"cudaErrorIllegalAddress|an illegal memory access was encountered")),
    ("CUDA launch timeout", re.compile(r"cudaErrorLaunchTimeout|the launch timed out and was terminated")),
    ("CUDA launch failure", re.compile(r"cudaErrorLaunchFailure|unspecified launch failure")),
    ("CUDA assert", re.compile(r"cudaErrorAssert\b|device-side assert triggered")),
    ("CUDA ECC", re.compile(r"cudaErrorECCUncorrectable|uncorrectable ECC error encountered")),
    ("CUDA NVLink", re.compile(r"cudaErrorNvlinkUncorrectable|uncorrectable NVLink error")),
    ("CUDA out of memory", re.compile(r"cudaErrorMemoryAllocation|CUDA(?: error:)? out of memory")),
)
_TORCH = re.compile(r"Watchdog caught collective operation timeout")
_PEER = re.compile(r"(?:remote rank|waiting peer (?:rank|end))\s*:?\s*\[?(\d{1,10})\b", re.IGNORECASE)
_TELLING = re.compile(
    r"E[EHIZ]\d{4}|50\d{4}|[Hh]ccl|Heartbeat|Cluster Exception|Xid|nccl|CUDA|cuda|Watchdog caught"
)


def find_codes(text: str) -> tuple[FoundCode, ...]:
    """Every code that the text holds, in the order of their first lines. Numbers that are no codes, as 507048 in an
    address, are left alone: a runtime's result is one only where the line says so."""
    first: dict[str, tuple[str, int, int | None]] = {}
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not _TELLING.search(line):
            continue
        for code in dict.fromkeys(_codes(line)):
            counts[code] = counts.get(code, 0) + 1
            peer = _peer(line)
            if code not in first:
                first[code] = (" ".join(line.split())[:_LINE], number, peer)
            elif first[code][2] is None and peer is not None:
                first[code] = (*first[code][:2], peer)
    return tuple(
        FoundCode(code, meaning_of(code), line, number, counts[code], peer)
        for code, (line, number, peer) in first.items()
    )


def meaning_of(code: str) -> Meaning:
    """Of a code as `find_codes` writes it; of its family where the table does not have it."""
    known = _CODES.get(code)
    if known is not None:
        return known
    for pattern, meaning in _OTHER:
        if re.fullmatch(pattern, code):
            return meaning
    return Meaning("not known", "unknown", "not in our table", "")


def _codes(line: str) -> Iterator[str]:
    yield from (found for found in _CANN.findall(line) if found in _CODES or found.startswith("EI"))
    yield from _RESULT.findall(line)
    yield from (f"HCCL {number}" for number in _HCCL.findall(line) if f"HCCL {number}" in _CODES)
    if _STUCK.search(line):
        yield "HCCL stuck"
    yield from (f"Xid {number}" for number in _XID.findall(line))
    yield from _NCCL.findall(line)
    yield from (code for code, pattern in _CUDA if pattern.search(line))
    if _TORCH.search(line):
        yield "torch timeout"


def _peer(line: str) -> int | None:
    found = _PEER.search(line)
    if found is None or int(found[1]) > _UNKNOWN_RANK:
        return None
    return int(found[1])


def first_hand(found: Iterable[FoundCode]) -> tuple[FoundCode, ...]:
    """Those that say a rank's own device or call failed."""
    return tuple(one for one in found if one.meaning.role == "fault")


def known_codes() -> Mapping[str, Meaning]:
    """The table."""
    return _CODES
