"""What the memory models say of each program's watched outcome: forbidden, a control, or only told.

``forbidden``: engines rely on never seeing it, and the source says with what right. ``control``: the order is left
open on purpose; where it is never seen, the stress has no power and silence beside it says nothing.
``observed``: neither promised nor needed, but worth knowing.

The sources are public documents; what they say is put in our words. ``cuda`` is the model of CUDA, ``cann`` that of
CANN with torch_npu (PLATFORMS.md). Not here: the programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["forbidden", "control", "observed"]
MODELS = ("cuda", "cann")
MODEL_OF_DEVICE: Mapping[str, str] = {"cuda": "cuda", "npu": "cann"}


@dataclass(frozen=True, slots=True)
class Rule:
    """``source``: who promises it, or why nobody does."""

    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Rules:
    """``shown_by``: the controls of which one must be seen, or the program had no power. ``means``: what a hit
    means for an engine."""

    by_model: Mapping[str, Rule]
    shown_by: tuple[str, ...]
    means: str


def _both(kind: Kind, cuda: str, cann: str | None = None) -> Mapping[str, Rule]:
    return {"cuda": Rule(kind, cuda), "cann": Rule(kind, cuda if cann is None else cann)}


_ORDER_CUDA = "CUDA Programming Guide, streams: the operations of a stream run in the order of issue"
_ORDER_CANN = "CANN, stream management: the tasks of a stream run in the order of issue"
_EVENT_CUDA = (
    "CUDA Runtime API, cudaEventRecord: a wait takes the state captured by the newest record at its call; later "
    "records do not change it"
)
_EVENT_CANN = (
    "CANN, aclrtRecordEvent (8.0 and later): an event of aclrtCreateEventExWithFlag may be recorded again, a wait "
    "takes the newest record at its call and no later one; torch_npu makes its events so where CANN has the call "
    "(Ascend/pytorch, NPUEvent.cpp), else as events that must be reset first"
)
_PAGEABLE_CUDA = (
    "PyTorch relies on it: a pageable source may be gone right after a non_blocking copy, since only pinned blocks "
    "get an event (CachingHostAllocator). CUDA's own text (API synchronization behavior) says that pageable memory "
    "is staged and leaves open when; where the device reads host page tables (Grace) a hit is possible"
)
_PAGEABLE_CANN = (
    "CANN, aclrtMemcpyAsync: returns after the copy where host memory is not page-locked. torch_npu calls it on "
    "the thread of its task queue, so it has to wait for the stream itself, and does (PLATFORMS.md); older sources "
    "(Ascend/pytorch, CopyKernelOpApi.cpp) did not"
)
_READ_CUDA = (
    "CUDA Runtime API, API synchronization behavior: a copy to pageable memory returns when it is done (up to "
    "CUDA 11; later texts: may be synchronous). Programs rely on it"
)
_READ_CANN = _PAGEABLE_CANN
_ALLOCATOR = (
    "PyTorch, CachingHostAllocator (torch_npu has its own of that name): a block of a non_blocking copy comes back "
    "when the event recorded behind the copy is done"
)
_PINNED_CUDA = "CUDA Runtime API, API synchronization behavior: a copy of pinned memory is asynchronous"
_PINNED_CANN = "CANN, aclrtMemcpyAsync: asynchronous for page-locked memory; success means issued"

RULES: Mapping[str, Rules] = {
    "copy-race": Rules(
        _both("control", "nothing orders two streams without an event"),
        ("copy-race",),
        "a kernel that used what a side stream brings without waiting for it read old values",
    ),
    "copy-then-kernel": Rules(
        _both("forbidden", _ORDER_CUDA, _ORDER_CANN),
        ("copy-race",),
        "a pinned copy is not ordered against later kernels of its stream (HANGS.md, D3): every step may compute "
        "on old metadata",
    ),
    "copy-event-kernel": Rules(
        _both("forbidden", _EVENT_CUDA, _EVENT_CANN),
        ("copy-race",),
        "an event does not cover the copy before it: copies on a side stream cannot be used at all",
    ),
    "event-rerecorded": Rules(
        _both("forbidden", _EVENT_CUDA, _EVENT_CANN),
        ("copy-race", "event-moved"),
        "an event that is reused from step to step lets its waiter through on the record of an earlier step",
    ),
    "event-rerecorded-late": Rules(
        _both("forbidden", _EVENT_CUDA, _EVENT_CANN),
        ("copy-race", "event-moved"),
        "an event may not be reused before its waiters were let through: one event a step in flight is needed",
    ),
    "event-moved": Rules(
        _both("control", "a wait covers the newest record only, and that one is on an idle stream"),
        ("event-moved",),
        "recording an event again moves it: whoever waits later no longer waits for what it covered first",
    ),
    "barrier-pinned": Rules(
        _both("control", _PINNED_CUDA, _PINNED_CANN),
        ("barrier-pinned",),
        "the host runs ahead of the device after a pinned copy; where it never does, pinning takes no barrier away",
    ),
    "barrier-pageable": Rules(
        {
            "cuda": Rule("observed", "CUDA may wait for the stream before it stages pageable memory, or not"),
            "cann": Rule(
                "forbidden",
                "torch_npu: a non_blocking copy of pageable memory ends in a synchronisation of its stream "
                "(PLATFORMS.md)",
            ),
        },
        ("barrier-pinned",),
        "pageable copies are no barrier here: what relies on the accident (HANGS.md, D1) is broken without pinning "
        "too",
    ),
    "reuse-pinned": Rules(
        _both("control", _PINNED_CUDA, _PINNED_CANN),
        ("reuse-pinned",),
        "a pinned source that is written over before its copy ran brings the wrong values",
    ),
    "reuse-pageable": Rules(
        _both("forbidden", _PAGEABLE_CUDA, _PAGEABLE_CANN),
        ("reuse-pinned",),
        "not even a pageable source may be reused when the call has returned",
    ),
    "reuse-after-event": Rules(
        _both("forbidden", _EVENT_CUDA, _EVENT_CANN),
        ("reuse-pinned",),
        "an event that the host has seen does not mean that the copy before it is done: no source can be reused",
    ),
    "staging-reused": Rules(
        _both("forbidden", "harness.devices.base, host_staging: no pending copy reads what it hands out"),
        ("reuse-pinned",),
        "a persistent host array is filled for the next step while its copy is pending (HANGS.md, D2)",
    ),
    "block-freed": Rules(
        _both("forbidden", "harness.devices.base, host_free: handed out again when no copy uses it any more"),
        ("reuse-pinned",),
        "a freed pinned block is handed out while a copy reads it (HANGS.md, D4)",
    ),
    "tensor-freed": Rules(
        _both("forbidden", _ALLOCATOR),
        ("reuse-pinned",),
        "torch's pinned allocator hands a block out while a copy reads it (HANGS.md, D4): no engine can pin",
    ),
    "readback-early": Rules(
        _both("control", _PINNED_CUDA, _PINNED_CANN),
        ("readback-early",),
        "a pinned result that is read without a wait is that of an earlier step (HANGS.md, D5)",
    ),
    "readback-after-event": Rules(
        _both("forbidden", _EVENT_CUDA, _EVENT_CANN),
        ("readback-early",),
        "an event that the host has seen does not mean that the result is there: tokens cannot be read back",
    ),
    "readback-pageable": Rules(
        _both("forbidden", _READ_CUDA, _READ_CANN),
        ("readback-early",),
        "not even a pageable result is there when the call has returned",
    ),
    "graph-unfenced": Rules(
        _both(
            "control",
            "no order between an update and the replay before it: the replay may take the newer numbers",
            "torch_npu, NPUGraph.update records its event on an update stream that waits for no replay; a record "
            "on a flag that is set is lost (PLATFORMS.md)",
        ),
        ("graph-unfenced",),
        "replays run with the lengths of a later step; where a record is lost, the next one waits for ever",
    ),
    "graph-fenced": Rules(
        _both("forbidden", _EVENT_CUDA, _EVENT_CANN),
        ("graph-unfenced",),
        "the fence does not hold the update back (HANGS.md, D1): wrong lengths first, then a hang",
    ),
    "group-reversed": Rules(
        _both("control", "a communicator pairs collectives in the order in which each member starts them"),
        ("group-reversed",),
        "ranks that start the collectives of one group in different orders get wrong sums or stop",
    ),
    "group-ordered": Rules(
        _both(
            "forbidden",
            "NCCL, stream semantics: a collective is an operation of its stream; with " + _EVENT_CUDA,
            "HCCL: a collective is a task of its stream; with " + _EVENT_CANN,
        ),
        ("group-reversed",),
        "an event does not order the collectives of two streams (HANGS.md, D7)",
    ),
    "group-two-streams": Rules(
        _both(
            "observed",
            "NCCL pairs collectives by the order of the host's calls, but promises nothing for two streams",
            "HCCL promises nothing for one communicator on two streams",
        ),
        ("group-reversed",),
        "one communicator on two streams needs an event between them (HANGS.md, D7)",
    ),
}
