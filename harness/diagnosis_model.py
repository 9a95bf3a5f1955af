"""What goes into a diagnosis and what comes out of it. Values only; how one becomes the other is
``diagnose.py``.

Paths in ``Fact.evidence`` are relative to the trial's directory, laid out as the store lays out a capture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from harness.error_codes import FoundCode
from harness.ledger_snapshot import Snapshot
from harness.offline.flight_recorder import FlightDump
from harness.seats import Seat
from harness.stacks import ProcessStacks

DIAGNOSIS_SCHEMA = 1

Kind: TypeAlias = Literal["hang", "slow", "dead", "stopped", "livelock", "none"]
Mechanism: TypeAlias = Literal[
    "collective-skipped",
    "collective-mismatch",
    "decision-divergence",
    "stream-order",
    "collective-order",
    "registration-stall",
    "rank-dead",
    "rank-stopped",
    "rank-slow",
    "host-blocked",
    "livelock",
    "unknown",
]
StreamName: TypeAlias = Literal["compute", "copy", "comm", "update", "host"]
_STREAMS: dict[str, StreamName] = {"compute": "compute", "copy": "copy", "comm": "comm", "update": "update"}
Confidence: TypeAlias = Literal["proven", "supported", "suspected"]
MismatchKind: TypeAlias = Literal["operation", "size", "dtype", "root", "group", "order"]


def stream_name(name: str) -> StreamName | None:
    """A ledger's stream as the diagnosis names it; None for a stream that the contract does not know."""
    return _STREAMS.get(name)


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What one sample holds of one rank. Everything may be missing.

    ``state`` is the letter of the process table (R S D T Z), a word of the watchdog's, or ``dead`` and
    ``missing``; None: not known. ``exit`` says how a process ended. ``task_done``: the driver has its answer
    or its exception.
    """

    snapshot: Snapshot | None = None
    stacks: ProcessStacks | None = None
    native: ProcessStacks | None = None
    state: str | None = None
    pid: int | None = None
    node: str = ""
    device: str | None = None
    exception: str | None = None
    exit: str | None = None
    task_done: bool = False
    role: str = "rank"


@dataclass(frozen=True, slots=True)
class EvidenceSample:
    """``index`` is the number in the folder's name; None: the sample's place in the evidence. ``others``: the
    engine's processes that are no ranks, by name."""

    taken_s: float
    ranks: Mapping[int, RankEvidence]
    index: int | None = None
    others: Mapping[str, RankEvidence] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the trial's start."""

    last_progress_s: float = 0.0
    suspected_s: float = 0.0
    confirmed_s: float = 0.0
    captured_s: float = 0.0
    went_on_s: float | None = None
    """Of what was slow: when it was seen to go on. Then ``confirmed_s`` is when the second sample was taken."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A piece of evidence that could not be had, and why."""

    what: str
    why: str
    impossible: bool = False
    """Nothing could have had it: its process was gone, or stopped, which no native dump can be taken of."""


@dataclass(frozen=True, slots=True)
class LoggedCode:
    """An error code in the log of a process; ``seat`` None: in a log of the node, of no process of ours."""

    seat: Seat | None
    found: FoundCode
    evidence: str

    def to_json(self) -> dict[str, Any]:
        meaning = self.found.meaning
        return {
            "of": self.seat,
            "code": self.found.code,
            "title": meaning.title,
            "role": meaning.role,
            "means": meaning.means,
            "source": meaning.source,
            "line": self.found.line,
            "count": self.found.count,
            "peer": self.found.peer,
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True)
class StatusWord:
    """The newest operation of one group, by HCCL's status file of a rank; all words are the library's."""

    rank: int
    operation: str
    sequence: str
    group: str
    status: str
    evidence: str


@dataclass(frozen=True, slots=True)
class LibraryEvidence:
    """What the libraries of an accelerator left of a trial. ``flights``: recorders by rank, or what torch's
    watchdog wrote into a log where there is none. ``unreadable``: ranks whose recorder is there and damaged."""

    flights: Mapping[int, FlightDump] = field(default_factory=dict)
    unreadable: frozenset[int] = frozenset()
    codes: tuple[LoggedCode, ...] = ()
    status: tuple[StatusWord, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """One capture. ``reason`` is why it was made (the watchdog's); ``exceptions`` by seat, beside those in
    samples; ``deaths``: seconds since the trial's start at which processes were seen to end, by seat;
    ``decisions`` are whole decision files by rank, where the caller has them: a first divergence may lie far
    back.
    """

    world: int
    samples: tuple[EvidenceSample, ...]
    times: Times = Times()
    missing: tuple[Missing, ...] = ()
    reason: str = ""
    exceptions: Mapping[Seat, str] = field(default_factory=dict)
    deaths: Mapping[Seat, float] = field(default_factory=dict)
    decisions: Mapping[int, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    device_is_simulation: bool = False
    went_on: tuple[Seat, ...] | None = None
    """Processes that were suspected, sampled twice, and went on to the end of the trial; None: it did not end."""
    library: LibraryEvidence | None = None
    """None on devices without such libraries."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """``pid`` 0: not known."""

    rank: int | None
    role: str
    node: str
    pid: int
    device: str | None


@dataclass(frozen=True, slots=True)
class Operation:
    """``site``: where it was enqueued. ``pending_s``: since it became the oldest unfinished one."""

    label: str
    sequence: int
    site: str
    pending_s: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    what: MismatchKind
    sides: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """``waiting`` entered it, ``missing`` did not."""

    group: str
    sequence: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    mismatch: Mismatch | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    fact: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """CONTRACTS.md, diagnosis.json. ``proof`` is in the order of the argument."""

    kind: Kind
    mechanism: Mechanism
    culprits: tuple[Culprit, ...]
    stream: StreamName | None
    operation: Operation | None
    collective: Collective | None
    proof: tuple[Fact, ...]
    confidence: Confidence
    signature: str
    times: Times
    missing_evidence: tuple[Missing, ...]
    simulation: bool
    error_codes: tuple[LoggedCode, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document, without tuples: what a JSON reader would give back."""
        return {
            "schema": DIAGNOSIS_SCHEMA,
            "kind": self.kind,
            "mechanism": self.mechanism,
            "culprits": [asdict(culprit) for culprit in self.culprits],
            "stream": self.stream,
            "operation": None if self.operation is None else asdict(self.operation),
            "collective": None if self.collective is None else _collective(self.collective),
            "proof": [asdict(fact) for fact in self.proof],
            "confidence": self.confidence,
            "signature": self.signature,
            **asdict(self.times),
            "missing_evidence": [asdict(piece) for piece in self.missing_evidence],
            "simulation": self.simulation,
            "error_codes": [one.to_json() for one in self.error_codes],
        }


def nothing_stopped(facts: tuple[Fact, ...], missing: tuple[Missing, ...], *, simulation: bool) -> Diagnosis:
    """Of a trial that was not healthy and yet shows no rank that stopped: its tokens are wrong, or nothing was
    captured."""
    return Diagnosis(
        kind="none",
        mechanism="unknown",
        culprits=(),
        stream=None,
        operation=None,
        collective=None,
        proof=facts,
        confidence="suspected",
        signature="",
        times=Times(),
        missing_evidence=missing,
        simulation=simulation,
    )


def _collective(collective: Collective) -> dict[str, Any]:
    mismatch = collective.mismatch
    return {
        "group": collective.group,
        "sequence": collective.sequence,
        "operation": collective.operation,
        "waiting": list(collective.waiting),
        "missing": list(collective.missing),
        "mismatch": None
        if mismatch is None
        else {"what": mismatch.what, "sides": [dict(side) for side in mismatch.sides]},
    }


@dataclass(frozen=True, slots=True)
class Cause:
    """What one rule concluded. ``family``, ``group`` and ``phase`` go into the signature, their digits left
    out.

    ``ranks`` are the culprits, by seat; the facts are in the order of the argument. ``missing``: what would have
    decided, where several ranks are named because nothing did.
    """

    kind: Kind
    mechanism: Mechanism
    ranks: tuple[Seat, ...]
    facts: tuple[Fact, ...]
    confidence: Confidence
    stream: StreamName | None = None
    operation: Operation | None = None
    collective: Collective | None = None
    family: str = ""
    group: str = ""
    phase: str = ""
    missing: tuple[Missing, ...] = ()

    @property
    def signature(self) -> str:
        """Equal for the same defect under other seeds, pids, steps and ranks."""
        family = self.family.split()[0] if self.family.split() else ""
        parts = (self.kind, self.mechanism, self.stream or "", family, self.group, self.phase)
        return "/".join(re.sub(r"[\d]+", "", part).strip(" .-_") or "-" for part in parts)
