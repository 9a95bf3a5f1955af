"""What a watchdog sees and what it says: one sample of all ranks, and how things stand. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from harness.ledger_snapshot import Snapshot
from harness.seats import Seat

RankState: TypeAlias = Literal["running", "sleeping", "stopped", "dead", "missing"]
Road: TypeAlias = Literal["proof", "budget"]
Reason: TypeAlias = Literal[
    "dead", "stopped", "collective", "mismatch", "registration", "cycle", "side-streams", "lost-record",
    "stalled", "livelock",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """What the kernel says of a process: whether its host thread sleeps (and waits for no disk), and the processor
    time in seconds that this thread has had, and the process with all its descendants (None: nobody looked)."""

    host_sleeps: bool
    host_cpu_s: float
    tree_cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank, or another process of the engine, at one moment. ``snapshot`` None: it has no ledger, or none that
    could be read.

    ``missing`` means that no such process is found; before a rank was ever seen alive that is no finding.
    ``task_done``: the driver has the rank's answer (or its exception) for this trial.
    """

    rank: Seat
    snapshot: Snapshot | None
    state: RankState
    task_done: bool
    work: Work | None = None
    """None where it cannot be seen, as on another node."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``taken_ns`` is the observer's monotonic clock. ``late_s``: how much later it was taken than the observer
    meant, work of its own left out; None: the observer does not say, and every gap beyond a period counts.
    ``suspended_s``: how long the whole machine slept since the sample before."""

    taken_ns: int
    ranks: tuple[RankView, ...]
    late_s: float | None = None
    suspended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Healthy:
    """``slow``: ranks that were suspected until now and went on; ``note`` says which suspicion fell.
    ``unknown``: ranks whose ledger cannot be read, about which nothing is claimed."""

    last_progress_ns: int
    note: str = ""
    slow: tuple[Seat, ...] = ()
    unknown: tuple[Seat, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """``ranks`` do not move (in a livelock: for nothing), which is no blame. ``proof``: facts in order."""

    reason: Reason
    road: Road
    ranks: tuple[Seat, ...]
    since_ns: int
    proof: tuple[str, ...]
    last_progress_ns: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A suspicion that a second sample upheld. Fields as in Suspect."""

    reason: Reason
    road: Road
    ranks: tuple[Seat, ...]
    since_ns: int
    confirmed_ns: int
    proof: tuple[str, ...]
    last_progress_ns: int


Standing: TypeAlias = Healthy | Suspect | Confirmed
