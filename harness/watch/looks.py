"""What is seen of a running engine from outside, look by look, and what is remembered of each process. Pure.

Values and one process's own condition; what they mean together is ``rules.py``, where they come from
``watch.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from harness.diagnosis_stacks import BUSY_SHARE, TURNS_PER_S
from harness.seats import Seat
from harness.stack_places import Doing, doing
from harness.stacks import ProcessStacks
from harness.watch.activity import Activity, busy_share, wakes_per_s
from harness.watch.metrics import HealthState, Traffic

Standing: TypeAlias = Literal["well", "unsure", "suspect", "stalled"]
SeatState: TypeAlias = Literal["alive", "stopped", "dead"]


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Seconds. ``stall_s``: how long nothing may happen; ``starting_s``: the same while the engine loads or
    compiles; ``slow_s``: requests without a token for so long are a finding even where ranks work; ``stopped_s``:
    for how long a process must be stopped; ``quiet_s``: after so long without progress stacks are looked at.
    ``engine``: its processes' waits are known by name; else being held up is no sign by itself."""

    stall_s: float = 10.0
    starting_s: float = 180.0
    slow_s: float = 60.0
    stopped_s: float = 2.0
    quiet_s: float = 4.0
    engine: bool = True


@dataclass(frozen=True, slots=True)
class SeatLook:
    """One process at one moment. ``stacks`` None: they were not taken in this look, or could not be."""

    seat: Seat
    role: str
    state: SeatState
    activity: Activity | None = None
    stacks: ProcessStacks | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """``taken_s``: of one monotonic clock. ``traffic`` None: no metrics. ``generates``: a good health answer means
    that the engine generates. ``asked_s``: how long the question is out; ``well_s``: when the last good answer was
    asked for. ``missing_ranks``: those that should have a process and have none."""

    taken_s: float
    seats: tuple[SeatLook, ...]
    traffic: Traffic | None = None
    health: HealthState = "unknown"
    generates: bool = False
    asked_s: float = 0.0
    well_s: float | None = None
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Opinion:
    """``reason`` of a suspicion or stall: dead, stopped, missing, tokens, health, frozen, held or slow. ``facts``
    are for people; ``missing``: what could not be told. ``want_stacks``: in the next look."""

    standing: Standing
    reason: str = ""
    facts: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    want_stacks: bool = False


@dataclass(slots=True)
class Track:
    """What is remembered of one process."""

    look: SeatLook
    since_s: float
    """Since when it is in its state."""
    doing: Doing | None = None
    busy: float | None = None
    turns: float | None = None
    _stacks: ProcessStacks | None = None
    _seen_s: float = 0.0
    _stood_since_s: float = 0.0

    @property
    def is_rank(self) -> bool:
        return self.look.role == "rank"

    @property
    def moves(self) -> bool:
        """It left its place before the last dump, or goes round in a loop."""
        return self._goes_round or self.doing is None or self.doing.left is True

    @property
    def _goes_round(self) -> bool:
        return self.turns is not None and self.turns > TURNS_PER_S

    @property
    def burns(self) -> bool:
        return self.busy is not None and self.busy > BUSY_SHARE

    @property
    def idle(self) -> bool:
        """It waits for work, or goes through what its loop does without any."""
        return self.doing is not None and (self.doing.kind == "idle" or (self.doing.between and self.moves))

    @property
    def works(self) -> bool:
        """It is on its way with something: it moves, or computes."""
        if self.doing is None or self.idle:
            return False
        return self.moves or (self.doing.kind in ("compute", "unknown") and self.burns)

    @property
    def stood_s(self) -> float:
        """For how long it has been seen at one place, from the first dump there to the last."""
        return 0.0 if self.moves else self._seen_s - self._stood_since_s

    def update(self, seat: SeatLook, now_s: float) -> None:
        if self.look.state != seat.state:
            self.since_s = now_s
        before, after = self.look.activity, seat.activity
        if before is not None and after is not None and before.taken_ns != after.taken_ns:
            share, turns = busy_share(before, after), wakes_per_s(before, after)
            self.busy = self.busy if share is None else share
            self.turns = self.turns if turns is None else turns
        if seat.stacks is not None:
            kernel = None if after is None or self._goes_round else after.call
            self.doing = doing(seat.stacks, self._stacks, kernel=kernel)
            if self.doing.left is not False:
                self._stood_since_s = now_s
            self._stacks, self._seen_s = seat.stacks, now_s
        self.look = seat
