"""Evidence of trials with thousands of ranks, made up: as many records as real ledgers, dumps and files hold.

The groups: ``agree`` and ``experts`` of all ranks, ``attention`` of eight each. In each capture the ledgers have
full rings, every rank has two dumps of its stacks and 200 records in its decision file; nothing is shared between
ranks but the lists of members. A record does not hold what each attention group does (an engine of this size would
not write that down): it holds their sum.

Not here: what is measured on it (``scale_figures.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from harness.diagnosis_model import Evidence, EvidenceSample, RankEvidence, Times
from harness.ledger_snapshot import (
    CollectiveRecord,
    GroupState,
    Header,
    HostState,
    OpRecord,
    Snapshot,
    StreamState,
)
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.standing import RankView, Sample

Case: TypeAlias = Literal["skipped", "mismatch", "divergence", "order", "stuck", "healthy", "stacks"]
CASES: tuple[Case, ...] = ("skipped", "mismatch", "divergence", "order", "stuck", "healthy", "stacks")
"""``skipped``: one rank left out a collective of all ranks and is a step further. ``mismatch``: it brought another
size. ``divergence``: a mismatch whose cause is a decision of that rank 1,000 steps before. ``order``: each half of
the ranks waits in a collective of all ranks for the other half. ``stuck``: all are inside, and it does not end.
``healthy``: all move. ``stacks``: no ledgers and no decisions; all are in a collective by their stacks, but for one
that waits for a lock."""

ATTENTION = 8
STEP = 5000
"""In which the ranks stand."""
DIVERGED = STEP - 990
_FILE_STEPS = 1000
"""That a decision file reaches back."""
_NOW_NS = 10**13
_OPERATIONS = {
    "compute": ("token_count_copy", "metadata_copy", "graph.replay decode.8", "sample"),
    "copy": ("event.wait", "next_token_copy"),
    "comm": ("all_gather", "reduce_scatter"),
    "update": ("event.wait", "graph.update decode.8"),
}
_ROUND = ("all_gather", "reduce_scatter")
_HOST = ("wait", "synchronize", "_finish", "_pass", "step", "run", "_run", "run_trial", "_main", "main")
_THREADING = "/usr/lib/python3.11/threading.py"
_TORCH = "/usr/lib/python3.11/site-packages/torch/distributed"
_REDUCING = (("all_reduce", f"{_TORCH}/distributed_c10d.py"), ("wrapper", f"{_TORCH}/c10d_logger.py"))
_LOCKED = (("wait", _THREADING), ("get_block", "/srv/engine/memory/pool.py"))
_SERVING = tuple(
    (name, f"/srv/engine/model/{name}.py") for name in ("gather", "forward", "step", "loop", "main")
)
_STREAM = ("wait", "block", "_main", "run", "_bootstrap_inner", "_bootstrap")


@dataclass(frozen=True, slots=True)
class Detail:
    """How much each rank's evidence holds."""

    operations: int = 64
    """Of each stream in a snapshot."""
    collectives: int = 32
    """Of each group in a snapshot."""
    decisions: int = 64
    """In a snapshot."""
    every: int = 5
    """Steps between two records of a decision file."""


FULL = Detail()
"""As much as a reader takes from a ledger, and 200 records in a decision file."""
SPARSE = Detail(operations=2, collectives=2, decisions=1, every=100)


def culprit(world: int) -> int:
    """Somewhere in the middle, not first in its attention group."""
    return world // 2 + 1


@dataclass(frozen=True, slots=True)
class _Standing:
    """Where one rank stands."""

    step: int
    phase: str
    experts_entered: int
    """Of the rounds of ``experts``; those before the last one it has completed."""
    agreed: int
    agreeing: bool
    """It is inside the last agreement."""
    shape: tuple[int, ...]
    """Of its last collective of ``experts``."""


def evidence(case: Case, world: int, detail: Detail = FULL) -> Evidence:
    """Two samples of every rank. In a capture of a hang nothing moved between them."""
    everyone = tuple(range(world))
    samples = []
    for index in range(2):
        moved = index if case == "healthy" else 0
        ranks = {
            rank: RankEvidence(
                snapshot=None
                if case == "stacks"
                else _snapshot(rank, _standing(case, rank, world, moved), everyone, detail),
                stacks=_stacks(rank) if case != "stacks" else _engine_stacks(rank, world),
                state="S",
                pid=1000 + rank,
                node=f"node{rank // ATTENTION}",
                device=f"npu:{rank % ATTENTION}",
            )
            for rank in everyone
        }
        samples.append(EvidenceSample(100.0 + index, ranks, index))
    return Evidence(
        world=world,
        samples=tuple(samples),
        times=Times(98.0, 99.5, 100.0, 101.0),
        reason="stalled",
        decisions={}
        if case == "stacks"
        else {rank: _decision_file(case, rank, world, detail) for rank in everyone},
    )


def samples(found: Evidence, moving: int, standing: int) -> list[Sample]:
    """What a watchdog sees of it: some samples in which all move, then some as in the capture, 0.1 s apart."""
    stood = {rank: one.snapshot for rank, one in found.samples[0].ranks.items()}
    made = []
    for number in range(moving + standing):
        back = max(0, moving - number)
        views = tuple(
            RankView(
                rank, None if snapshot is None else _earlier(snapshot, back), "sleeping", task_done=False
            )
            for rank, snapshot in stood.items()
        )
        made.append(Sample(number * 100_000_000, views))
    return made


def _earlier(snapshot: Snapshot, steps: int) -> Snapshot:
    host = snapshot.host
    before = replace(host, step=host.step - steps, phase_changes=host.phase_changes - 4 * steps)
    return replace(snapshot, host=before) if steps else snapshot


# What a rank holds -----------------------------------------------------------------------------------------


def _standing(case: Case, rank: int, world: int, moved: int) -> _Standing:
    rounds, size = 2 * STEP + 2 * moved, (64, 512)
    inside = _Standing(STEP + moved, "wait-result", rounds, STEP + moved, False, size)
    if case == "order" and rank >= world // 2:
        return replace(inside, phase="agree", experts_entered=rounds - 1, agreed=STEP + 1, agreeing=True)
    if rank != culprit(world):
        return inside
    if case == "skipped":
        return replace(inside, step=STEP + 1, phase="schedule", experts_entered=rounds - 1)
    return replace(inside, shape=(56, 512)) if case in ("mismatch", "divergence") else inside


def _snapshot(rank: int, standing: _Standing, everyone: tuple[int, ...], detail: Detail) -> Snapshot:
    first = rank // ATTENTION * ATTENTION
    waits = standing.phase == "wait-result"
    peers = everyone[first : first + ATTENTION]
    kept = detail.collectives
    groups = (
        _group("agree", everyone, ("all_gather",), standing.agreed, (6,), standing.agreeing, kept),
        _group("attention", peers, ("all_reduce",), 3 * STEP, (64, 512), False, kept),
        _group("experts", everyone, _ROUND, standing.experts_entered, standing.shape, waits, kept),
    )
    records = tuple(_record(rank, STEP - back, len(everyone)) for back in reversed(range(detail.decisions)))
    return Snapshot(
        header=Header(
            2, rank, len(everyone), 1000 + rank, 77, f"node{rank // ATTENTION}", "boot", f"npu:{rank % 8}"
        ),
        taken_ns=_NOW_NS,
        boottime_ns=_NOW_NS,
        host=HostState(standing.phase, standing.step, _NOW_NS - 10**9 - rank, _NOW_NS, 4 * standing.step),
        streams={
            name: _stream(name, standing.step, rank, detail.operations, stuck=waits) for name in _OPERATIONS
        },
        external=(),
        groups={group.name: group for group in groups},
        decisions=records,
        decisions_total=standing.step,
    )


def _group(
    name: str,
    ranks: tuple[int, ...],
    round_: tuple[str, ...],
    entered: int,
    shape: tuple[int, ...],
    inside: bool,
    kept: int,
) -> GroupState:
    records = []
    for sequence in range(entered - kept + 1, entered + 1):
        at_ns = _NOW_NS - (entered - sequence) * 10**6
        unfinished = inside and sequence == entered
        own = shape if sequence == entered else (64, 512) if len(shape) > 1 else shape
        operation = round_[sequence % len(round_)]
        records.append(
            CollectiveRecord(sequence, operation, own, "float32", at_ns, at_ns, None if unfinished else at_ns)
        )
    return GroupState(name, ranks, entered, entered, entered - inside, tuple(records))


def _stream(name: str, step: int, rank: int, kept: int, *, stuck: bool) -> StreamState:
    """Of a rank that stands in a collective on ``comm``, compute and copy wait behind it."""
    labels = _OPERATIONS[name]
    enqueued = step * len(labels)
    completed = enqueued - (stuck and name != "update")
    records = []
    for sequence in range(enqueued - kept + 1, enqueued + 1):
        at_ns = _NOW_NS - (enqueued - sequence) * 10**6 - 10**9 - rank
        done_ns = at_ns if sequence <= completed else None
        label = labels[sequence % len(labels)]
        records.append(
            OpRecord(sequence, label, "serving/engine.py:205", sequence // len(labels), at_ns, done_ns)
        )
    oldest = records[-1] if completed < enqueued else None
    return StreamState(enqueued, completed, oldest, _NOW_NS - 10**9 - rank, _NOW_NS, tuple(records))


def _record(rank: int, step: int, world: int, *, odd: bool = False) -> dict[str, Any]:
    return {
        "step": step,
        "mode": "decode",
        "mode_agreed": "decode",
        "tokens": [8 * world // ATTENTION - odd, 64],
        "padding": "max_len",
        "bucket": 8,
        "graph": True,
        "update": True,
        "retracted": [],
        "finished": [],
        "dp": rank // ATTENTION,
        "own_tokens": 8,
        "requests": [f"r{rank // ATTENTION}-{slot}" for slot in range(8)],
        "aborted": [],
        "collectives": {"agree": step, "attention": 3 * step, "experts": 2 * step - 2},
        "waiting": 0,
        "tokens_out": 8 * step,
    }


def _decision_file(case: Case, rank: int, world: int, detail: Detail) -> tuple[dict[str, Any], ...]:
    odd = case == "divergence" and rank == culprit(world)
    steps = sorted({*range(STEP - _FILE_STEPS, STEP, detail.every), DIVERGED})
    return tuple(_record(rank, step, world, odd=odd and step == DIVERGED) for step in steps)


def _stacks(rank: int) -> ProcessStacks:
    def thread(name: str, names: tuple[str, ...]) -> ThreadStack:
        frames = tuple(Frame(one, f"/srv/engine/serving/{one}.py", 10 + len(one)) for one in names)
        return ThreadStack(rank, name, active=False, owns_gil=False, frames=frames)

    threads = (thread("hangrig-host", _HOST), *(thread(f"hangrig-{name}", _STREAM) for name in _OPERATIONS))
    return ProcessStacks(1000 + rank, rank, "py-spy", False, threads)


def _engine_stacks(rank: int, world: int) -> ProcessStacks:
    """Of an engine that is not ours, whose stacks are all there is."""
    inner = _LOCKED if rank == culprit(world) else _REDUCING
    frames = tuple(Frame(name, file, 100 + len(name)) for name, file in (*inner, *_SERVING))
    waiting = (Frame("wait", _THREADING, 324), Frame("_recv_loop", "/srv/engine/io/channel.py", 61))
    threads = (
        ThreadStack(rank, "MainThread", active=False, owns_gil=False, frames=frames),
        *(ThreadStack(rank, f"io-{n}", active=False, owns_gil=False, frames=waiting) for n in range(4)),
    )
    return ProcessStacks(1000 + rank, rank, "py-spy", False, threads)
