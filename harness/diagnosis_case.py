"""The evidence of a capture arranged by rank, and how facts about a rank are worded. Pure.

Places in code are worded in ``diagnosis_places.py``.

Nothing is concluded here beyond one rank's own condition: that it moved, stands still, is stopped or gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from harness.diagnosis_model import Evidence, EvidenceSample, Fact, Missing, Operation, RankEvidence
from harness.diagnosis_places import host_place, raising_place, stream_places
from harness.diagnosis_words import fold_missing
from harness.ledger_snapshot import OpRecord, Snapshot, StreamState
from harness.lost_records import graph_of, replay_number
from harness.nemesis_frames import engine_stacks
from harness.seats import Seat, seat_stem, seat_words
from harness.stacks import Frame, ProcessStacks
from harness.stillness import host_thread, left_place, streams_unknown
from harness.waits import Wait, waits

T = TypeVar("T")
Condition: TypeAlias = Literal["alive", "stopped", "dead", "unknown"]

PARKED = "parked"
_DEAD = frozenset({"dead", "missing", "z", "x"})
_STOPPED = frozenset({"stopped", "t"})
_DEATH_NOTICE = re.compile(r"ActorDiedError|WorkerCrashedError|worker process has died", re.IGNORECASE)
"""What a driver is told instead of a rank's answer when the process ended: no exception of the rank's."""
_SYMPTOM = re.compile(
    r"time[d ]?\s?-?out|deadline|connection|reset by peer|broken pipe|closed|refused|enforcenotmet|gloo|"
    r"nccl|hccl|backenderror|commerror|agreementerror|ei0002|different steps",
    re.IGNORECASE,
)

_DEVICE_FAULT = re.compile(
    r"DeviceError|(?:CUDA|HIP|NPU|XPU)(?: function)? error|(?:cuda|hip|aclrt)Error|CUBLAS_STATUS|CUDNN_STATUS|"
    r"AcceleratorError|device-side assert|illegal (?:memory|instruction|address)|misaligned address|"
    r"uncorrectable ECC|aicore|aicpu|vector core exception|ACL_ERROR_RT|507\d{3}",
    re.IGNORECASE,
)
"""What the device or its runtime says of an operation that failed: torch on CUDA, HIP and Ascend, and ours."""


@dataclass(frozen=True, slots=True)
class View:
    """One process over all samples; ``rank`` is -1 where it is no rank. ``moved`` None: not known, for want of two
    readable ledgers. A driver that was told of the rank's death counts as no exception, and the rank's task as not
    done. ``died_s``: when it was seen to end, None where nobody looked."""

    seat: Seat
    rank: int
    role: str
    snapshot: Snapshot | None
    earlier: Snapshot | None
    ledger_path: str
    stacks: ProcessStacks | None
    earlier_stacks: ProcessStacks | None
    native: ProcessStacks | None
    stacks_path: str
    condition: Condition
    condition_path: str
    first_dead: int
    stopped_twice: bool
    exit: str | None
    exception: str | None
    done: bool
    pid: int
    node: str
    device: str | None
    died_s: float | None
    moved: bool | None

    @property
    def name(self) -> str:
        """``rank 1`` or ``controller``."""
        return seat_words(self.seat)

    @property
    def still(self) -> bool:
        return self.moved is False

    @property
    def parked(self) -> bool:
        return self.snapshot is not None and self.snapshot.host.phase == PARKED

    @property
    def known(self) -> bool:
        """Enough of this rank is there to say what it does: two ledgers and a live process."""
        return self.condition == "alive" and self.moved is not None

    @property
    def symptom(self) -> bool:
        """It raised or ended with an error that a rank gets when *another* one fails."""
        # Only what the error says: a traceback has names such as ``timeout_s`` in its lines of code.
        said = (self.exception or "").strip().splitlines()[-1:]
        return bool(_SYMPTOM.search(" ".join([*said, self.exit or ""])))

    @property
    def host_moved(self) -> bool:
        if self.stacks is None or self.earlier_stacks is None:
            return False
        return left_place(self.earlier_stacks, self.stacks)

    @property
    def device_fault(self) -> bool:
        """It raised what its device reported, not what its host did wrong."""
        said = (self.exception or "").strip().splitlines()[-1:]
        return not self.symptom and bool(_DEVICE_FAULT.search(" ".join(said)))

    def stream(self, name: str) -> StreamState | None:
        return None if self.snapshot is None else self.snapshot.streams.get(name)

    def oldest(self, name: str) -> OpRecord | None:
        stream = self.stream(name)
        return None if stream is None else stream.oldest

    def operation(self, name: str) -> Operation | None:
        """The oldest unfinished operation of a stream, with how long it has been that."""
        stream = self.stream(name)
        if stream is None or stream.oldest is None or self.snapshot is None:
            return None
        pending_s = max(0.0, (self.snapshot.taken_ns - stream.oldest_since_ns) / 1e9)
        oldest = stream.oldest
        return Operation(oldest.label, oldest.sequence, oldest.site, round(pending_s, 3))

    def unfinished(self) -> tuple[str, ...]:
        """Streams with unfinished work; those that only wait for another stream's event come last."""
        if self.snapshot is None:
            return ()
        names = [name for name, stream in self.snapshot.streams.items() if stream.oldest is not None]
        return tuple(sorted(names, key=lambda name: (self._waits_for_event(name), name)))

    def _waits_for_event(self, name: str) -> bool:
        oldest = self.oldest(name)
        return oldest is not None and oldest.label.startswith("event.")

    def streams_unknown(self) -> bool:
        """No completing side has looked for a while: the monitor cannot run, so the host is the suspect."""
        return self.snapshot is not None and streams_unknown(self.snapshot)

    # Words -----------------------------------------------------------------------------------------------

    def host_fact(self) -> Fact:
        """What the host does, from the ledger and, where there is one, its stack."""
        if self.snapshot is None:
            return Fact(f"{self.name}: no readable ledger", self.condition_path)
        host = self.snapshot.host
        since_s = max(0.0, (self.snapshot.taken_ns - host.since_ns) / 1e9)
        place = host_place(self.stacks) if self.stacks is not None else ""
        fact = (
            f"{self.name}: the host stands in phase {host.phase!r} of step {host.step} "
            f"since {since_s:.2f} s{', in ' if place else ''}{place}"
        )
        return Fact(fact, self.stacks_path if place else self.ledger_path)

    def last_words(self) -> tuple[Fact, ...]:
        """How the ledger of a rank ends whose task or process has."""
        if self.snapshot is None:
            return ()
        host = self.snapshot.host
        fact = f"{self.name}: its ledger ends in phase {host.phase!r} of step {host.step}"
        return (Fact(fact, self.ledger_path),)

    def host_frame(self) -> Frame | None:
        """The innermost frame of the host thread."""
        thread = None if self.stacks is None else host_thread(self.stacks)
        return thread.frames[0] if thread is not None and thread.frames else None

    def stream_fact(self, name: str) -> Fact | None:
        operation = self.operation(name)
        if operation is None:
            return None
        fact = (
            f"{self.name}: {name} has not finished {operation.label}{self._which_replay(name)} since "
            f"{operation.pending_s:.2f} s (operation {operation.sequence} of the stream, enqueued at "
            f"{operation.site or 'an unknown place'})"
        )
        return Fact(fact, self.ledger_path)

    def _which_replay(self, stream: str) -> str:
        oldest = self.oldest(stream)
        graph = graph_of(oldest) if oldest is not None and stream == "compute" else ""
        number = replay_number(self.snapshot, graph) if self.snapshot is not None else 0
        return f", replay {number} of that graph," if number else ""

    def doing(self) -> tuple[Fact, ...]:
        """Host first, then the stream that matters most."""
        names = self.unfinished()
        fact = self.stream_fact(names[0]) if names else None
        return (self.host_fact(),) if fact is None else (self.host_fact(), fact)

    def raised_fact(self) -> Fact:
        text = (self.exception or "").strip().splitlines()
        place = raising_place(self.exception or "")
        fact = f"{self.name} raised {text[-1] if text else 'an exception'}"
        return Fact(f"{fact}{f', in {place}' if place else ''}", "history.json")

    def stack_facts(self) -> tuple[Fact, ...]:
        """Where the stream threads of a simulated device stand. They decide nothing: hardware has none."""
        places = stream_places(self.stacks) if self.stacks is not None else ""
        return (Fact(f"{self.name}: its simulated streams: {places}", self.stacks_path),) if places else ()


@dataclass(frozen=True, slots=True)
class Case:
    """All ranks of the trial, those without any evidence too, and the engine's other processes by name."""

    evidence: Evidence
    views: Mapping[int, View]
    others: Mapping[str, View] = field(default_factory=dict)
    _decisions: dict[int, dict[int, Mapping[str, Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _first: dict[object, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By attention group, whose decisions were read first."""
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, evidence: Evidence) -> Case:
        ranks = set(range(evidence.world)) | {rank for sample in evidence.samples for rank in sample.ranks}
        names = {name for sample in evidence.samples for name in sample.others}
        return cls(
            evidence,
            {rank: _view(evidence, rank) for rank in sorted(ranks)},
            {name: _view(evidence, name) for name in sorted(names)},
        )

    @property
    def everyone(self) -> tuple[View, ...]:
        """Ranks first."""
        return (*self.views.values(), *self.others.values())

    def with_views(self, changed: Iterable[View]) -> Case:
        """The same case with these views in the place of those of their seats."""
        by_seat = {view.seat: view for view in changed}
        return Case(
            self.evidence,
            {rank: by_seat.get(rank, view) for rank, view in self.views.items()},
            {name: by_seat.get(name, view) for name, view in self.others.items()},
        )

    def view(self, seat: Seat) -> View:
        return self.views[seat] if isinstance(seat, int) else self.others[seat]

    def snapshots(self) -> dict[int, Snapshot]:
        return {rank: view.snapshot for rank, view in self.views.items() if view.snapshot is not None}

    def waits(self) -> tuple[Wait, ...]:
        """Who waits in collectives, by the newest ledgers."""
        return self.once("waits", lambda: waits(self.snapshots()))

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, worked out once although several rules ask."""
        if name not in self._known:
            self._known[name] = make()
        known: T = self._known[name]
        return known

    def others_known(self, ranks: Iterable[int]) -> bool:
        """What is concluded about ``ranks`` by exclusion needs to know what every other rank does."""
        chosen = set(ranks)
        return all(
            view.known or (view.done and view.snapshot is not None)
            for rank, view in self.views.items()
            if rank not in chosen
        )

    def only_left(self, ranks: Iterable[int]) -> bool:
        """And no rank lacks decisions that its peers have, which could hide a cause."""
        recorded = {bool(self.decisions(rank)) for rank, view in self.views.items() if not view.done}
        return len(recorded) < 2 and self.others_known(ranks)

    def decisions(self, rank: int) -> dict[int, Mapping[str, Any]]:
        """Decision records by step: the file's where there is one, and the ring's. What came later of a step adds
        to it. Ranks of one attention group that wrote the same share one table: what is the same object need not be
        looked at again, and of thousands of ranks that is most."""
        if rank in self._decisions:
            return self._decisions[rank]
        written = self._written(rank)
        group = next((record["dp"] for part in written for record in part[:1] if "dp" in record), None)
        first = self._first.setdefault(group if isinstance(group, int) else None, rank)
        if first != rank and self._written(first) == written:
            found = self._decisions[rank] = self._decisions[first]
            return found
        found = self._decisions[rank] = {}
        for record in (*written[0], *written[1]):
            step = record.get("step")
            if isinstance(step, int):
                found[step] = {**found[step], **record} if step in found else record
        return found

    def _written(self, rank: int) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """The records of its file, and of its ring."""
        snapshot = self.views[rank].snapshot
        return self.evidence.decisions.get(rank, ()), snapshot.decisions if snapshot is not None else ()

    def decisions_path(self, rank: int) -> str:
        from_file = rank in self.evidence.decisions
        return f"decisions/rank{rank}.jsonl" if from_file else self.views[rank].ledger_path

    def missing(self) -> tuple[Missing, ...]:
        """What the capture said was missing, and what it did not say."""
        pieces = list(self.evidence.missing)
        if len(self.evidence.samples) < 2:
            pieces.append(Missing("a second sample", f"the capture has {len(self.evidence.samples)}"))
        for position, sample in enumerate(self.evidence.samples):
            folder = _folder(self.evidence, position)
            for rank in self.views:
                found = sample.ranks.get(rank, RankEvidence())
                for name, piece in (("ledger", found.snapshot), ("stacks", found.stacks)):
                    if piece is None:
                        gone = _condition(found.state) == "dead"
                        why = "the process is gone" if gone else "not in the capture"
                        pieces.append(Missing(f"{folder}/{name}/rank{rank}.json", why, gone))
                if found.state is None:
                    pieces.append(Missing(f"{folder}/processes.json: rank {rank}", "not in the capture"))
        return fold_missing(pieces)


def _folder(evidence: Evidence, position: int) -> str:
    index = evidence.samples[position].index
    return f"evidence/sample-{position if index is None else index}"


def _condition(state: str | None) -> Condition:
    if not state:
        return "unknown"
    word = state.strip().lower()
    if word in _DEAD:
        return "dead"
    return "stopped" if word in _STOPPED else "alive"


def _view(evidence: Evidence, seat: Seat) -> View:
    found = [
        (position, one)
        for position, sample in enumerate(evidence.samples)
        if (one := _evidence_of(sample, seat)) is not None
    ]
    ledgers = [(position, one.snapshot) for position, one in found if one.snapshot is not None]
    stacks = [(position, one.stacks) for position, one in found if one.stacks is not None]
    states = [(position, _condition(one.state)) for position, one in found if one.state]
    exception = evidence.exceptions.get(seat) or next(
        (one.exception for _, one in reversed(found) if one.exception), None
    )
    death_told = exception is not None and _DEATH_NOTICE.search(exception) is not None
    last = len(evidence.samples) - 1
    snapshot = ledgers[-1][1] if ledgers else None
    earlier = ledgers[0][1] if len(ledgers) > 1 else None
    condition = states[-1][1] if states else "dead" if death_told else "unknown"
    at = states[-1][0] if states else max(last, 0)
    folder = _folder(evidence, at) if evidence.samples else "evidence"
    pid = next((one.pid for _, one in reversed(found) if one.pid is not None), None)
    header = snapshot.header if snapshot is not None else None
    stem = seat_stem(seat)
    return View(
        seat=seat,
        rank=seat if isinstance(seat, int) else -1,
        role=next((one.role for _, one in reversed(found)), "rank" if isinstance(seat, int) else seat),
        snapshot=snapshot,
        earlier=earlier,
        ledger_path=f"{_folder(evidence, ledgers[-1][0])}/ledger/{stem}.json" if ledgers else folder,
        stacks=engine_stacks(stacks[-1][1] if stacks else None),
        native=engine_stacks(
            next((one.native for _, one in reversed(found) if one.native is not None), None)
        ),
        earlier_stacks=engine_stacks(stacks[0][1] if len(stacks) > 1 else None),
        stacks_path=f"{_folder(evidence, stacks[-1][0])}/stacks/{stem}.json" if stacks else folder,
        condition=condition,
        condition_path=f"{folder}/processes.json",
        first_dead=next((position for position, state in states if state == "dead"), last + 1),
        stopped_twice=sum(state == "stopped" for _, state in states) > 1,
        exit=next((one.exit for _, one in reversed(found) if one.exit), None),
        exception=None if death_told else exception,
        done=any(one.task_done for _, one in found) and not death_told,
        pid=pid if pid is not None else (header.pid if header is not None else 0),
        node=next((one.node for _, one in found if one.node), header.node if header is not None else ""),
        device=header.device if header is not None else next((o.device for _, o in found if o.device), None),
        died_s=evidence.deaths.get(seat),
        moved=snapshot.watermark() != earlier.watermark() if snapshot and earlier else None,
    )


def _evidence_of(sample: EvidenceSample, seat: Seat) -> RankEvidence | None:
    return sample.ranks.get(seat) if isinstance(seat, int) else sample.others.get(seat)
