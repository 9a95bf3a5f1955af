"""What stacks and process states alone show of a stall: of engines without ledgers. Pure.

The rules, nearest to the cause first: a process is gone, or stopped; a process is held up in its own doing while
others wait; one rank is not where its peers wait for it; the ranks wait in different places; nothing decides. Two
dumps show where a process stands and whether it stayed there, never what it did before: a skipped collective is
supported at most, and who skipped it is a guess unless one rank is plainly elsewhere.

Ledgers, where there are any, are read by ``diagnose.py``; what a stack means is ``stack_places.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from harness.diagnosis_model import Cause, Collective, Confidence, Fact
from harness.seats import Seat, seat_words, seats_words
from harness.stack_places import HELD, WAITING, Doing, deciding_thread, doing
from harness.stacks import ProcessStacks

Condition: TypeAlias = Literal["alive", "stopped", "dead", "unknown"]

BUSY_SHARE = 0.5
"""A thread that uses more of a core than this between two samples computes or spins; less is polling."""
TURNS_PER_S = 20.0
"""A thread that blocks and wakes more often goes round in a loop. One that hangs in a collective of gloo never
wakes; being traced wakes a thread two or three times (seen on a serving SGLang and vLLM)."""
_NEAREST = ("rank", "engine_core", "controller", "coordinator", "detokenizer", "server")
"""Of several that are held up, whom the others wait for first."""


@dataclass(frozen=True)  # without slots: what a process does is worked out once
class SeatStacks:
    """One process over two samples. ``before`` and ``after`` are plain stacks, ``native`` those of the second.
    ``kernel``: the system call of its host thread in the second. ``busy_share``: of one core, by the host thread;
    ``turns_per_s``: how often it blocked and woke; both between the samples. ``died_s``: when it was seen to end,
    since the watch began. None anywhere: not known. ``state_known``: somebody looked whether it is stopped; a dump
    alone does not say."""

    seat: Seat
    role: str
    condition: Condition
    pid: int
    before: ProcessStacks | None = None
    after: ProcessStacks | None = None
    native: ProcessStacks | None = None
    kernel: str | None = None
    busy_share: float | None = None
    turns_per_s: float | None = None
    stopped_twice: bool = False
    died_s: float | None = None
    exit: str | None = None
    stacks_path: str = ""
    processes_path: str = ""
    state_known: bool = True

    @property
    def name(self) -> str:
        return seat_words(self.seat)

    @property
    def is_rank(self) -> bool:
        return self.role == "rank"

    @cached_property
    def doing(self) -> Doing:
        """By the plain stacks; by the native ones where those cannot tell."""
        if self.after is None:
            return Doing("unknown")
        kernel = None if self._turns else self.kernel
        plain = doing(self.after, self.before, kernel=kernel)
        if self.native is None or plain.kind not in ("unknown", "compute"):
            return plain
        closer = doing(self.native, self.before, kernel=kernel)
        return plain if closer.kind == "unknown" else closer

    @property
    def moves(self) -> bool:
        """It left its place, or goes round in a loop that two dumps happened to meet at one place."""
        return self.condition == "alive" and (self._turns or self.doing.left is True)

    @property
    def _turns(self) -> bool:
        return self.turns_per_s is not None and self.turns_per_s > TURNS_PER_S

    @property
    def stands(self) -> bool:
        """It is seen in both samples, at one place."""
        return self.condition == "alive" and self.doing.left is False and not self.moves

    @property
    def burns(self) -> bool:
        if self.busy_share is None and not self.state_known:
            return self.before is not None and self.on_processor is True
        return self.busy_share is not None and self.busy_share > BUSY_SHARE

    @property
    def on_processor(self) -> bool | None:
        """Its host thread ran in every dump (True), in none (False); None: in some, or none can tell."""
        dumps = [dump for dump in (self.before, self.after) if dump is not None]
        threads = [deciding_thread(dump) for dump in dumps if dump.source == "py-spy"]
        ran = {thread.active for thread in threads if thread is not None}
        return next(iter(ran)) if len(ran) == 1 and len(threads) == len(dumps) else None

    def fact(self) -> Fact:
        """Where it stands and whether it stayed there."""
        if self.after is None:
            return Fact(f"{self.name}: no stacks", self.processes_path)
        found = self.doing
        how = (
            ", in both samples"
            if found.left is False
            else ", at another place than before"
            if found.left
            else ""
        )
        used = f", using {self.busy_share:.2f} of a core" if self.busy_share is not None else ""
        return Fact(f"{self.name} (pid {self.pid}): {found.words()}{how}{used}", self.stacks_path)


@dataclass(frozen=True)  # without slots: several rules ask for the same of thousands of processes
class _Scene:
    seats: tuple[SeatStacks, ...]

    @cached_property
    def alive(self) -> tuple[SeatStacks, ...]:
        return tuple(seat for seat in self.seats if seat.condition == "alive")

    @cached_property
    def ranks(self) -> tuple[SeatStacks, ...]:
        return tuple(seat for seat in self.alive if seat.is_rank)

    @cached_property
    def in_collective(self) -> tuple[SeatStacks, ...]:
        return tuple(rank for rank in self.ranks if rank.doing.kind == "collective" and not rank.moves)

    @cached_property
    def elsewhere(self) -> tuple[SeatStacks, ...]:
        inside = {rank.seat for rank in self.in_collective}
        return tuple(rank for rank in self.ranks if rank.seat not in inside)

    def explained(self, but: Sequence[SeatStacks]) -> bool:
        """Every other process that takes part in steps is seen, and waits."""
        left_out = {seat.seat for seat in but}
        others = [
            one for one in self.seats if one.seat not in left_out and one.role in ("rank", "engine_core")
        ]
        return all(seat.condition == "alive" and seat.doing.kind in (*WAITING, "idle") for seat in others)

    def collective(self, operation: str = "") -> Collective | None:
        """The group and its sequence number are not in a stack."""
        waiting = self.in_collective
        if not waiting:
            return None
        inside = {rank.seat for rank in waiting}
        missing = [rank for rank in self.seats if rank.is_rank and rank.seat not in inside]
        return Collective(
            group="",
            sequence=0,
            operation=operation or waiting[0].doing.operation,
            waiting=tuple(rank.seat for rank in waiting if isinstance(rank.seat, int)),
            missing=tuple(rank.seat for rank in missing if isinstance(rank.seat, int)),
        )

    def facts(self, first: Sequence[SeatStacks] = ()) -> tuple[Fact, ...]:
        """Of those, then of everybody."""
        told = {seat.seat for seat in first}
        ordered = [*first, *(seat for seat in self.seats if seat.seat not in told)]
        return tuple(seat.fact() for seat in ordered if seat.condition in ("alive", "stopped"))


def stack_cause(
    seats: Sequence[SeatStacks], *, stalled: tuple[Fact, ...] | None, complete: bool = True
) -> Cause:
    """What a stall comes from. ``stalled``: the facts that show that there is one (metrics that stand, a watchdog's
    reason); None: nothing does, and then only a process that is gone or stopped is held against the engine.
    ``complete``: all ranks of the engine are among ``seats``; else the cause may lie where nobody looked."""
    scene = _Scene(tuple(seats))
    cause = _dead(scene) or _stopped(scene)
    if cause is None and stalled is None:
        return Cause("none", "unknown", (), scene.facts(), "suspected")
    if cause is None:
        cause = (
            _stopped_by_look(scene)
            or _held_up(scene)
            or _one_elsewhere(scene)
            or _different_collectives(scene)
            or _service(scene)
            or _undecided(scene)
        )
        cause = cause if complete else replace(cause, confidence="suspected")
    return replace(cause, facts=(*(stalled or ()), *cause.facts))


def process_cause(seats: Sequence[SeatStacks]) -> Cause | None:
    """A process that is gone, or stopped, by the process table."""
    scene = _Scene(tuple(seats))
    return _dead(scene) or _stopped(scene)


def one_sample_cause(seats: Sequence[SeatStacks]) -> Cause | None:
    """What one dump of each process lets suspect: all but one rank wait in a collective, none is on a processor,
    and that one is not on its way to them. Whether it lasts cannot be seen."""
    scene = _Scene(tuple(seats))
    waiting, elsewhere = scene.in_collective, scene.elsewhere
    if not waiting or len(elsewhere) != 1:
        return None
    odd = elsewhere[0]
    if odd.after is None or odd.doing.kind in ("idle", "device") or odd.on_processor is True:
        return None
    cause = _stopped_by_look(scene)
    if cause is not None:
        return cause
    if odd.on_processor is None and odd.doing.kind == "compute":
        return replace(_blocked(scene, (odd,), "suspected"), mechanism="unknown")
    return _blocked(scene, (odd,), "suspected")


def undecided(seats: Sequence[SeatStacks]) -> Cause:
    """Where everybody stands; nobody is blamed."""
    return _undecided(_Scene(tuple(seats)))


# Processes ------------------------------------------------------------------------------------------------


def _dead(scene: _Scene) -> Cause | None:
    never_s = float("inf")
    dead = sorted(
        (seat for seat in scene.seats if seat.condition == "dead"),
        key=lambda seat: never_s if seat.died_s is None else seat.died_s,
    )
    if not dead:
        return None
    facts = []
    for seat in dead:
        when = f", seen {seat.died_s:.1f} s after the watch began" if seat.died_s is not None else ""
        how = f": {seat.exit}" if seat.exit else ""
        who = f" (pid {seat.pid})" if seat.pid else ""
        facts.append(Fact(f"{seat.name}: its process{who} is gone{how}{when}", seat.processes_path))
    # Those that go in one look go for one reason, mostly the first one's.
    first = [seat for seat in dead if seat.died_s == dead[0].died_s]
    decided = len(first) == 1
    return Cause(
        kind="dead",
        mechanism="rank-dead",
        ranks=tuple(seat.seat for seat in first),
        facts=(*facts, *scene.facts()),
        confidence="proven" if len(dead) == 1 else "supported" if decided else "suspected",
        stream="host",
        collective=scene.collective(),
        family="" if first[0].is_rank else first[0].role,
    )


def _stopped(scene: _Scene) -> Cause | None:
    stopped = [seat for seat in scene.seats if seat.condition == "stopped"]
    if not stopped:
        return None
    facts: list[Fact] = []
    for seat in stopped:
        often = "in both samples" if seat.stopped_twice else "in one sample"
        facts.append(
            Fact(f"{seat.name}: its process (pid {seat.pid}) is stopped {often}", seat.processes_path)
        )
        if seat.after is not None:
            facts.append(Fact(f"{seat.name}: last seen {seat.doing.words()}", seat.stacks_path))
    return Cause(
        kind="stopped",
        mechanism="rank-stopped",
        ranks=tuple(seat.seat for seat in stopped),
        facts=(*facts, *(seat.fact() for seat in scene.alive)),
        confidence="proven" if all(seat.stopped_twice for seat in stopped) else "supported",
        stream="host",
        collective=scene.collective(),
        family="" if stopped[0].is_rank else stopped[0].role,
    )


def _stopped_by_look(scene: _Scene) -> Cause | None:
    """Nobody asked the kernel, and one rank stands in the middle of its work, not on a processor, in code that does
    not wait: a process that is stopped looks so (tests/captures). Peers wait for it in a collective."""
    waiting, elsewhere = scene.in_collective, scene.elsewhere
    if not waiting or len(elsewhere) != 1:
        return None
    odd = elsewhere[0]
    if odd.state_known or odd.moves or odd.on_processor is not False or odd.doing.kind != "compute":
        return None
    held = ", with Python's lock in its hands" if _holds_python(odd) else ""
    fact = (
        f"{odd.name}: in the middle of its work, in code that does not wait, and not on a processor{held}: "
        "stopped, or held up in a native call"
    )
    return Cause(
        kind="stopped",
        mechanism="rank-stopped",
        ranks=(odd.seat,),
        facts=(Fact(fact, odd.stacks_path), *scene.facts((odd,))),
        confidence="supported" if odd.before is not None else "suspected",
        stream="host",
        collective=scene.collective(),
    )


def _holds_python(seat: SeatStacks) -> bool:
    thread = None if seat.after is None else deciding_thread(seat.after)
    return thread is not None and thread.owns_gil


# Places ---------------------------------------------------------------------------------------------------


def _held_up(scene: _Scene) -> Cause | None:
    """A lock, a sleep or an output that does not come to an end, in a process's own doing."""
    held = [seat for seat in scene.alive if seat.stands and seat.doing.kind in HELD]
    nearest = next((role for role in _NEAREST if any(seat.role == role for seat in held)), None)
    blamed = [seat for seat in held if nearest is None or seat.role == nearest]
    if not blamed:
        return None
    return _blocked(scene, blamed, "supported" if scene.explained(blamed) else "suspected")


def _blocked(scene: _Scene, blamed: Sequence[SeatStacks], confidence: Confidence) -> Cause:
    return Cause(
        kind="hang",
        mechanism="host-blocked",
        ranks=tuple(seat.seat for seat in blamed),
        facts=scene.facts(blamed),
        confidence=confidence if len(blamed) == 1 else "suspected",
        stream="host",
        collective=scene.collective(),
        family=_place(blamed[0].doing),
        phase="" if blamed[0].is_rank else blamed[0].role,
    )


def _one_elsewhere(scene: _Scene) -> Cause | None:
    """The peers wait in a collective, and this rank is not in any."""
    waiting, elsewhere = scene.in_collective, scene.elsewhere
    if not waiting or len(elsewhere) != 1:
        return None
    odd = elsewhere[0]
    found = odd.doing
    if odd.after is None or (odd.before is None and not odd.moves):
        return None
    fact = (
        f"{seats_words(rank.seat for rank in waiting)} in {waiting[0].doing.operation}; {odd.name} is in none"
    )
    facts = (Fact(fact, odd.stacks_path), *scene.facts((odd,)))
    cause = Cause(
        "hang", "unknown", (odd.seat,), facts, "supported", stream="host", collective=scene.collective()
    )
    operation = waiting[0].doing.operation
    if found.kind == "idle":
        return replace(cause, mechanism="collective-skipped", family=operation)
    if odd.moves:
        return replace(cause, kind="slow", mechanism="rank-slow")
    if found.kind == "device":
        return replace(cause, confidence="suspected", stream="compute")
    if odd.burns:
        return replace(cause, family=_place(found))
    return _blocked(scene, (odd,), "supported" if scene.explained((odd,)) else "suspected")


def _different_collectives(scene: _Scene) -> Cause | None:
    """All ranks wait in collectives, and not all in one. Who is a collective ahead cannot be seen."""
    if scene.elsewhere or len(scene.ranks) < 2:
        return None
    places: dict[tuple[str, str], list[SeatStacks]] = {}
    for rank in scene.ranks:
        places.setdefault((rank.doing.operation, _place(rank.doing)), []).append(rank)
    if len(places) < 2:
        return None
    alone = [ranks[0] for ranks in places.values() if len(ranks) == 1]
    odd = alone if len(alone) == 1 and len(scene.ranks) > 2 else []
    said = "; ".join(
        f"{seats_words(rank.seat for rank in ranks)} in {operation} by {site or 'an unknown place'}"
        for (operation, site), ranks in places.items()
    )
    return Cause(
        kind="hang",
        mechanism="collective-skipped",
        ranks=tuple(rank.seat for rank in odd),
        facts=(Fact(f"different collectives: {said}", scene.ranks[0].stacks_path), *scene.facts(odd)),
        confidence="suspected",
        stream="host",
        collective=scene.collective(),
        family=scene.ranks[0].doing.operation,
    )  # fmt: skip


def _place(found: Doing) -> str:
    return "" if found.site is None else found.site.name.rsplit(".", 1)[-1]


def _service(scene: _Scene) -> Cause | None:
    """No rank has anything to do, and one of the processes that bring them work is not in its loop."""
    if not scene.ranks or not all(rank.doing.kind == "idle" or rank.doing.between for rank in scene.ranks):
        return None
    out = [
        seat
        for seat in scene.alive
        if not seat.is_rank and seat.role in _NEAREST and seat.stands and seat.doing.kind in ("unknown", "compute")
    ]  # fmt: skip
    return _blocked(scene, out, "suspected") if len(out) == 1 else None


def _undecided(scene: _Scene) -> Cause:
    """Where everybody stands; nobody is blamed."""
    moving = [rank for rank in scene.ranks if rank.moves]
    slow = bool(scene.ranks) and len(moving) == len(scene.ranks)
    waiting = scene.in_collective
    return Cause(
        kind="slow" if slow else "hang",
        mechanism="unknown",
        ranks=(),
        facts=scene.facts(),
        confidence="suspected",
        collective=scene.collective(),
        family=waiting[0].doing.operation if waiting else "",
    )
