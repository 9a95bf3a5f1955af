"""Is anything wrong at all, by stacks that somebody else took? Pure.

Being in a collective is no hang. In one sample a rank that is on a processor makes its peers' waiting well; where
none is, one that is not with its peers is suspected. Two samples show who left its place and who did not; how far
apart they were taken is not known. Where neither tells, the answer is that it cannot be told. Who is to blame is
``harness.diagnosis_stacks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from harness.diagnosis_model import Cause, Fact
from harness.diagnosis_stacks import SeatStacks, one_sample_cause, stack_cause, undecided
from harness.seats import seats_words
from harness.stack_places import HELD, WAITING, deciding_thread

Standing: TypeAlias = Literal["well", "suspected", "stalled", "unsure"]
_SERVICES = ("engine_core", "controller", "coordinator", "detokenizer")
_AT_WORK = ("compute", "unknown", "collective")


@dataclass(frozen=True, slots=True)
class Opinion:
    """``missing``: what would decide, in words."""

    standing: Standing
    cause: Cause
    missing: tuple[str, ...] = ()


def by_stacks(seats: Sequence[SeatStacks], expected: Sequence[int]) -> Opinion:
    """``seats``: none of them gone or stopped, as far as is known. ``expected``: the ranks that there are."""
    ranks = [seat for seat in seats if seat.is_rank and seat.condition == "alive"]
    seen = [rank for rank in ranks if rank.after is not None]
    facts = tuple(seat.fact() for seat in seats if seat.after is not None)
    lost = sorted({*expected} - {rank.seat for rank in seen if isinstance(rank.seat, int)})
    if not seen:
        return Opinion("unsure", undecided(seats), ("stacks of the ranks",))
    works = [rank for rank in seen if _works(rank)]
    odd = [rank for rank in seen if not _calm(rank, seen)]
    service = [
        seat
        for seat in seats
        if seat.role in _SERVICES and seat.after is not None
        and seat.doing.kind in (*HELD, "unknown") and not _on(seat)
    ]  # fmt: skip
    since = None if lost or any(_on(rank) for rank in seen) else _stopped_since(seats)
    if since is not None:
        return Opinion("suspected", since, (LASTS,))
    if not odd and not service and not lost:
        said = (
            "every rank waits for work"
            if not works
            else "every rank waits for work, works, or waits for one that works"
        )
        return Opinion("well", _none(said, facts))
    if works and all(_waits_well(rank) for rank in odd) and not service and not lost:
        names = seats_words(rank.seat for rank in works)
        return Opinion("well", _none(f"{names} at work; the others wait for it", facts))
    if works:
        return Opinion("unsure", undecided(seats), (LASTS,))
    if len(seen) == 1 and not lost:
        return Opinion(
            "unsure", undecided(seats), ("dumps of the ranks that it waits for, if there are any",)
        )
    if all(rank.before is None for rank in seen):
        cause = None if lost else one_sample_cause(seats)
        if cause is not None:
            return Opinion("suspected", cause, (LASTS,))
        return Opinion("unsure", undecided(seats), (LASTS,))
    if any(rank.burns for rank in odd if rank.doing.kind in WAITING):
        return Opinion(
            "unsure", undecided(seats), ("whether ranks spin in a hang, or were met in one place twice",)
        )
    if not odd and not any(seat.stands and seat.doing.kind in HELD for seat in service):
        return Opinion("unsure", undecided(seats), (LASTS,))
    stood = [rank for rank in seen if rank.stands]
    said = (
        f"{seats_words(rank.seat for rank in stood)} at one place in both samples, and no rank left its place"
    )
    stalled = (Fact(said, stood[0].stacks_path if stood else ""),)
    cause = stack_cause(seats, stalled=stalled, complete=not lost)
    if any(rank.burns and rank.seat in cause.ranks for rank in seen):
        # One that computes for long looks so, too: how far apart the samples are is not known.
        cause = replace(cause, confidence="suspected")
    if not cause.ranks and len(lost) == 1 and all(rank.doing.kind == "collective" for rank in seen):
        lack = Fact(f"no dump from rank {lost[0]}", "")
        cause = Cause(
            "hang", "unknown", (lost[0],), (*cause.facts, lack), "suspected", stream="host",
            collective=cause.collective, family=cause.family,
        )  # fmt: skip
    return Opinion("stalled", cause)


LASTS = "whether it lasts: a second sample some seconds later"


def _stopped_since(seats: Sequence[SeatStacks]) -> Cause | None:
    """By the last sample alone, whatever went on before it."""
    cause = one_sample_cause([replace(seat, before=None) for seat in seats])
    moved = cause is not None and any(seat.moves for seat in seats if seat.seat in cause.ranks)
    return cause if cause is not None and cause.kind == "stopped" and moved else None


def _none(said: str, facts: tuple[Fact, ...]) -> Cause:
    return Cause("none", "unknown", (), (Fact(said, ""), *facts), "suspected")


def _on(seat: SeatStacks) -> bool:
    thread = None if seat.after is None else deciding_thread(seat.after)
    return thread is not None and thread.active


def _works(rank: SeatStacks) -> bool:
    """It left its place, or is on a processor and not in a loop without work. Of two dumps at one place with the
    thread on a processor in both, its lines tell a loop that goes on from a spin."""
    if rank.doing.kind == "idle":
        return False
    if rank.before is None:
        return _on(rank) and rank.doing.kind in _AT_WORK
    return rank.moves or (rank.burns and rank.doing.kind in ("compute", "unknown") and _other_line(rank))


def _other_line(rank: SeatStacks) -> bool:
    threads = [deciding_thread(dump) for dump in (rank.before, rank.after) if dump is not None]
    lines = {tuple(frame.line for frame in thread.frames) for thread in threads if thread is not None}
    return len(lines) > 1


def _calm(rank: SeatStacks, ranks: Sequence[SeatStacks]) -> bool:
    """Idle, at work, or in its loop's collective while its peers pause in theirs."""
    others = [other for other in ranks if other is not rank]
    paused = rank.doing.between and all(_idle(other) for other in others)
    return rank.doing.kind == "idle" or _works(rank) or (paused and bool(others))


def _idle(rank: SeatStacks) -> bool:
    return rank.doing.kind == "idle" or rank.doing.between


def _waits_well(rank: SeatStacks) -> bool:
    """It may wait for one that works; in one sample also one that is between two turns on a processor."""
    return rank.doing.kind in WAITING or (rank.before is None and rank.doing.kind == "compute")
