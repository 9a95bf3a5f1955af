"""From gathered dumps to one diagnosis: each kind of evidence asked in turn, the nearest to the cause first. Pure.

A process that the table says is gone or stopped; ledgers and decision files, by the rules of a run; flight
recorders; stacks. Recorders say who never came, stacks where that one stands: together they say more than each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.diagnosis_flight import FlightFinding, flight_finding
from harness.diagnosis_model import (
    Cause,
    Collective,
    Culprit,
    Diagnosis,
    Fact,
    Operation,
)
from harness.diagnosis_stacks import Condition, SeatStacks, process_cause
from harness.offline.by_ledgers import Verdict, by_ledgers, decided
from harness.offline.gather import At, Gathered, Process
from harness.offline.missing import missing, times_of
from harness.offline.opinion import Opinion, by_stacks
from harness.stack_places import HELD, WAITING
from harness.stacks import ProcessStacks

EXITS: Mapping[Verdict, int] = {"healthy": 0, "not healthy": 1, "cannot tell": 3}

_LONG_S = 10.0
"""A collective that is open for so long, by the recorders' own times, is no moment of a healthy program."""
_GONE = frozenset({"dead", "missing", "z", "x"})


@dataclass(frozen=True, slots=True)
class Conclusion:
    """``seats``: what each process was seen to do, where a dump shows it."""

    verdict: Verdict
    diagnosis: Diagnosis
    seats: tuple[SeatStacks, ...]


def conclude(gathered: Gathered) -> Conclusion:
    """Never raises for incomplete evidence."""
    seats = seat_stacks(gathered)
    flights = _flights(gathered, last=True)
    world = max([-1, *gathered.expected]) + 1
    finding = flight_finding(flights, world, gathered.unreadable) if flights else None
    stalled = finding is not None and (finding.pending_s >= _LONG_S or _same_wait(gathered, finding, world))
    cause, opinion = None, None
    ledgers = by_ledgers(gathered)
    if ledgers is not None and decided(ledgers[1]):
        return Conclusion(*ledgers, seats)
    cause = process_cause(seats)
    if cause is not None:
        cause = _with_collective(cause, finding)
    else:
        opinion = (
            by_stacks(seats, gathered.expected) if any(seat.after is not None for seat in seats) else None
        )
        cause, stalled = _together(finding, opinion, seats, stalled)
    if cause is None and ledgers is not None:
        return Conclusion(*ledgers, seats)
    if cause is None:
        facts = tuple(
            Fact(f"rank {rank}: {len(at.content)} decisions", at.path)
            for rank, at in gathered.decisions.items()
        )
        cause = Cause("hang", "unknown", (), facts, "suspected")
    verdict = _verdict(cause, stalled)
    return Conclusion(verdict, _diagnosis(gathered, cause, seats, opinion), seats)


def _verdict(cause: Cause, stalled: bool) -> Verdict:
    if cause.kind == "none":
        return "healthy"
    decided = bool(cause.ranks) or cause.mechanism != "unknown" or cause.confidence != "suspected"
    return "not healthy" if decided or stalled else "cannot tell"


# Stacks and recorders ------------------------------------------------------------------------------------


def _together(
    finding: FlightFinding | None, opinion: Opinion | None, seats: Sequence[SeatStacks], stalled: bool
) -> tuple[Cause | None, bool]:
    """What recorders and stacks say together, and whether a stall is shown."""
    by_look = None if opinion is None else opinion.cause
    looks_stalled = opinion is not None and opinion.standing in ("stalled", "suspected")
    if finding is None:
        return by_look, opinion is not None and opinion.standing == "stalled"
    if finding.cause is None:
        if opinion is not None and looks_stalled:
            return replace(opinion.cause, facts=(*opinion.cause.facts, *finding.facts)), True
        facts = (*finding.facts, *(seat.fact() for seat in seats if seat.after is not None))
        waits = any(seat.is_rank and seat.doing.kind in (*WAITING, *HELD) for seat in seats)
        if by_look is not None and opinion is not None and opinion.standing == "unsure" and waits:
            # gloo's recorder holds no point-to-point calls, and no recorder what is called outside of torch.
            return replace(by_look, facts=facts), False
        return Cause("none", "unknown", (), facts, "suspected"), False
    found = finding.cause
    seen = {seat.seat: seat for seat in seats if seat.after is not None}
    if found.mechanism == "unknown" and by_look is not None and looks_stalled and by_look.ranks:
        return _with_collective(by_look, finding), True
    if found.mechanism == "collective-skipped" and len(found.ranks) == 1 and found.ranks[0] in seen:
        found = _where_it_stands(found, seen[found.ranks[0]], by_look)
    places = tuple(seen[rank].fact() for rank in found.ranks if rank in seen)
    rest = tuple(seat.fact() for seat in seats if seat.after is not None and seat.seat not in found.ranks)
    return replace(found, facts=(*found.facts, *places, *rest)), stalled or looks_stalled


def _where_it_stands(found: Cause, seat: SeatStacks, by_look: Cause | None) -> Cause:
    """The rank that never came: what its stack says of why."""
    doing = seat.doing
    if seat.moves:
        return replace(found, kind="slow", mechanism="rank-slow", confidence="suspected", stream="host")
    if by_look is not None and by_look.ranks == found.ranks and by_look.mechanism != "unknown":
        facts = (*found.facts, *by_look.facts[:1])
        kind, confidence = by_look.kind, found.confidence if by_look.kind == "hang" else by_look.confidence
        return replace(
            found,
            kind=kind,
            mechanism=by_look.mechanism,
            stream=by_look.stream,
            facts=facts,
            confidence=confidence,
        )
    if doing.kind in ("idle", "collective"):
        return found
    if doing.kind == "device":
        return replace(found, mechanism="unknown", stream="compute")
    if seat.on_processor is not False:
        return replace(found, mechanism="unknown", stream="host")
    return replace(found, mechanism="host-blocked", stream="host")


def _with_collective(cause: Cause, finding: FlightFinding | None) -> Cause:
    if finding is None or finding.cause is None:
        return cause
    found = finding.cause
    collective: Collective | None = found.collective or cause.collective
    return replace(
        cause, collective=collective, operation=cause.operation or found.operation, group=found.group,
        facts=(*cause.facts, *found.facts),
    )  # fmt: skip


def _same_wait(gathered: Gathered, finding: FlightFinding, world: int) -> bool:
    """Both samples of the recorders are in the same collective."""
    if len(gathered.samples) < 2 or finding.cause is None or finding.cause.collective is None:
        return False
    flights = _flights(gathered, last=False)
    if not flights or _flights(gathered, last=True).keys() != flights.keys():
        return False
    if all(flights[rank] is one for rank, one in _flights(gathered, last=True).items()):
        return False
    before = flight_finding(flights, world).cause
    if before is None or before.collective is None:
        return False
    one, other = before.collective, finding.cause.collective
    return (one.group, one.sequence, one.waiting) == (other.group, other.sequence, other.waiting)


def _flights(gathered: Gathered, *, last: bool) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for sample in gathered.samples if last else reversed(gathered.samples):
        found |= {rank: at.content for rank, at in sample.flights.items() if isinstance(rank, int)}
    return found


# Putting it down -----------------------------------------------------------------------------------------


def seat_stacks(gathered: Gathered) -> tuple[SeatStacks, ...]:
    """Each process over the samples: its first and last dump, its last state."""
    found = []
    for seat, process in gathered.processes.items():
        plain = [sample.stacks[seat] for sample in gathered.samples if seat in sample.stacks]
        native = [sample.native[seat] for sample in gathered.samples if seat in sample.native]
        states = [sample.states[seat] for sample in gathered.samples if seat in sample.states]
        dumps = _alike(plain or native)
        conditions = [_condition(state.content.state) for state in states]
        condition: Condition = (
            conditions[-1] if conditions else "stopped" if seat in gathered.refused else "alive"
        )
        # One table beside two samples is one look.
        looks = {(state.path, condition) for state, condition in zip(states, conditions, strict=True)}
        found.append(
            SeatStacks(
                seat=seat,
                role=process.role,
                condition=condition,
                pid=process.pid,
                before=dumps[0].content if len(dumps) > 1 else None,
                after=dumps[-1].content if dumps else None,
                native=native[-1].content if native and plain else None,
                stopped_twice=sum(one == "stopped" for _, one in looks) > 1,
                exit=states[-1].content.exit if states else None,
                stacks_path=dumps[-1].path if dumps else "",
                processes_path=states[-1].path if states else gathered.refused.get(seat, ""),
                state_known=bool(states) or seat in gathered.refused,
            )
        )
    return tuple(found)


def _alike(dumps: Sequence[At[ProcessStacks]]) -> list[At[ProcessStacks]]:
    """py-spy's text has shorter paths than its JSON: where dumps of one process mix them, all get the longer ones,
    or every thread would seem to have left its place."""
    files: dict[str, set[str]] = {}
    for one in dumps:
        for thread in one.content.threads:
            for frame in thread.frames:
                files.setdefault(frame.name, set()).add(frame.filename)
    return [replace(one, content=_with_files(one.content, files)) for one in dumps]


def _with_files(stacks: ProcessStacks, files: Mapping[str, set[str]]) -> ProcessStacks:
    return replace(
        stacks,
        threads=tuple(
            replace(
                thread,
                frames=tuple(
                    replace(frame, filename=_longest(frame.filename, files[frame.name]))
                    for frame in thread.frames
                ),
            )
            for thread in stacks.threads
        ),
    )


def _longest(file: str, files: set[str]) -> str:
    longer = [other for other in files if other.endswith(f"/{file}")]
    return longer[0] if len(longer) == 1 else file


def _condition(state: str) -> Condition:
    if state.lower() in _GONE:
        return "dead"
    return "stopped" if state in ("T", "t") else "alive"


def _diagnosis(
    gathered: Gathered, cause: Cause, seats: Sequence[SeatStacks], opinion: Opinion | None
) -> Diagnosis:
    culprits = []
    for seat in cause.ranks:
        process = gathered.processes.get(seat, Process(seat, "rank", 0, ""))
        rank = seat if isinstance(seat, int) else None
        culprits.append(Culprit(rank, process.role, process.node, process.pid, process.device))
    return Diagnosis(
        kind=cause.kind,
        mechanism=cause.mechanism,
        culprits=tuple(culprits),
        stream=cause.stream,
        operation=_operation(cause, seats),
        collective=cause.collective,
        proof=cause.facts,
        confidence=cause.confidence,
        signature=cause.signature if cause.kind != "none" else "",
        times=times_of(gathered),
        missing_evidence=missing(gathered, opinion),
        simulation=False,
    )


def _operation(cause: Cause, seats: Sequence[SeatStacks]) -> Operation | None:
    """Where the culprit stands, if a stack shows it: what it does instead of what the others wait in."""
    stood = next((seat for seat in seats if seat.seat in cause.ranks and seat.after is not None), None)
    site = None if stood is None else stood.doing.site or stood.doing.frame
    if site is None or len(cause.ranks) != 1:
        return cause.operation
    place = f"{site.short_file()}:{site.line}"
    if cause.operation is not None:
        return replace(cause.operation, site=place)
    return Operation(site.name, 0, place, 0.0)
