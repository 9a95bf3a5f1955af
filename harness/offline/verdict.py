"""From gathered dumps to one diagnosis: each kind of evidence asked in turn, the nearest to the cause first. Pure.

A process that the table says is gone or stopped; ledgers and decision files, by the rules of a run; flight
recorders; stacks. Recorders say who never came, stacks where that one stands: together they say more than each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from harness.diagnose import diagnose
from harness.diagnosis_flight import FlightFinding, flight_finding
from harness.diagnosis_model import (
    Cause,
    Collective,
    Culprit,
    Diagnosis,
    Evidence,
    EvidenceSample,
    Fact,
    Missing,
    Operation,
    RankEvidence,
    Times,
)
from harness.diagnosis_stacks import Condition, SeatStacks, process_cause
from harness.ledger_snapshot import Snapshot
from harness.offline.gather import At, Gathered, Process, Sample
from harness.offline.opinion import LASTS, Opinion, by_stacks
from harness.offline.tables import TableRow
from harness.seats import Seat, seat_stem, seat_words
from harness.stack_places import HELD, WAITING
from harness.stacks import ProcessStacks

Verdict: TypeAlias = Literal["healthy", "not healthy", "cannot tell"]
EXITS: Mapping[Verdict, int] = {"healthy": 0, "not healthy": 1, "cannot tell": 3}

_LONG_S = 10.0
"""A collective that is open for so long, by the recorders' own times, is no moment of a healthy program."""
_STOOD_S = 2.0
"""A ledger in which nothing has changed for so long shows that its rank stands."""
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
    finding = flight_finding(flights, world) if flights else None
    stalled = finding is not None and (finding.pending_s >= _LONG_S or _same_wait(gathered, finding, world))
    cause, opinion = None, None
    ledgers = _by_ledgers(gathered)
    if ledgers is not None and _decided(ledgers[1]):
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


def _decided(diagnosis: Diagnosis) -> bool:
    return diagnosis.kind == "none" or bool(diagnosis.culprits) or diagnosis.mechanism != "unknown"


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


# Ledgers -------------------------------------------------------------------------------------------------


def _by_ledgers(gathered: Gathered) -> tuple[Verdict, Diagnosis] | None:
    """By the rules of a run; None where no rank has a ledger and no decision file differs."""
    snapshots = [
        sample for sample in gathered.samples if any(isinstance(seat, int) for seat in sample.ledgers)
    ]
    if not snapshots and not gathered.decisions:
        return None
    taken = _evidence(gathered)
    found = diagnose(taken)
    if not snapshots and found.mechanism == "unknown":
        return None
    names = _names(gathered)
    found = replace(
        found,
        proof=tuple(Fact(fact.fact, names.get(fact.evidence, fact.evidence)) for fact in found.proof),
        missing_evidence=_missing(gathered, None),
    )
    if found.kind == "none":
        return "healthy", found
    if _decided(found):
        return "not healthy", found
    last = {
        seat: at.content
        for sample in snapshots
        for seat, at in sample.ledgers.items()
        if isinstance(seat, int)
    }
    if all(_at_rest(snapshot) for snapshot in last.values()) and set(gathered.expected) <= set(last):
        facts = tuple(
            Fact(f"rank {rank}: nothing is under way", names.get(_name("ledger", rank), "")) for rank in last
        )
        return "healthy", replace(found, kind="none", proof=facts, signature="")
    standing = (one for one in last.values() if not _at_rest(one))
    stood = _stood(snapshots) or bool(gathered.reason) or any(_stood_s(one) >= _STOOD_S for one in standing)
    return ("not healthy" if stood else "cannot tell"), found


def _evidence(gathered: Gathered) -> Evidence:
    samples = []
    taken = gathered.samples
    once = [at.content for sample in taken for seat, at in sample.ledgers.items() if isinstance(seat, int)]
    holding = [sample for sample in taken if sample.ledgers]
    if len(holding) == 1 and all(_stood_s(one) >= _STOOD_S for one in once):
        # Each ledger says itself since when nothing has moved: it stands for an earlier one, too.
        taken = (*taken, *holding)
    for index, sample in enumerate(taken):
        pieces = {seat: _piece(sample, seat, process) for seat, process in gathered.processes.items()}
        samples.append(
            EvidenceSample(
                float(index),
                {seat: piece for seat, piece in pieces.items() if isinstance(seat, int)},
                index,
                {seat: piece for seat, piece in pieces.items() if isinstance(seat, str)},
            )
        )
    return Evidence(
        world=max([-1, *gathered.expected, *gathered.decisions]) + 1,
        samples=tuple(samples),
        times=_times(gathered),
        reason=gathered.reason,
        decisions={rank: at.content for rank, at in gathered.decisions.items()},
    )


def _piece(sample: Sample, seat: Seat, process: Process) -> RankEvidence:
    ledger, stacks, native, state = (
        table.get(seat) for table in (sample.ledgers, sample.stacks, sample.native, sample.states)
    )
    # A ledger's owner that nobody saw gone is taken for alive: else its peers could not be judged either.
    letter = state.content.state if isinstance(state, At) and isinstance(state.content, TableRow) else "S"
    return RankEvidence(
        snapshot=ledger.content if ledger is not None and isinstance(ledger.content, Snapshot) else None,
        stacks=stacks.content if stacks is not None and isinstance(stacks.content, ProcessStacks) else None,
        native=native.content if native is not None and isinstance(native.content, ProcessStacks) else None,
        state=letter if ledger is not None or stacks is not None or state is not None else None,
        pid=process.pid or None,
        node=process.node,
        device=process.device,
        exit=state.content.exit if isinstance(state, At) and isinstance(state.content, TableRow) else None,
        role=process.role,
    )


def _at_rest(snapshot: Snapshot) -> bool:
    """Nothing is unfinished, and the host waits for something to do."""
    streams = all(stream.oldest is None for stream in snapshot.streams.values())
    groups = all(group.completed >= group.enqueued for group in snapshot.groups.values())
    return streams and groups and snapshot.host.phase in ("parked", "idle")


def _stood_s(snapshot: Snapshot) -> float:
    """For how long nothing in the ledger had changed when it was read."""
    moments = [snapshot.host.since_ns]
    for stream in snapshot.streams.values():
        moments += [record.enqueued_ns for record in stream.recent]
        moments += [record.completed_ns for record in stream.recent if record.completed_ns is not None]
    for group in snapshot.groups.values():
        for record in group.recent:
            times = (record.enqueued_ns, record.started_ns, record.completed_ns)
            moments += [moment for moment in times if moment is not None]
    return (snapshot.taken_ns - max(moments)) / 1e9


def _stood(samples: Sequence[Sample]) -> bool:
    """A rank with something under way did not move between the first ledger and the last."""
    first: dict[Seat, Snapshot] = {}
    last: dict[Seat, Snapshot] = {}
    for sample in samples:
        for seat, at in sample.ledgers.items():
            first.setdefault(seat, at.content)
            last[seat] = at.content
    return any(
        first[seat] is not now and first[seat].watermark() == now.watermark() and not _at_rest(now)
        for seat, now in last.items()
    )


def _names(gathered: Gathered) -> dict[str, str]:
    """Files by the names that a capture of our own would give them, which the rules use."""
    found: dict[str, str] = {}
    # A sample that stands for two is the last one again.
    for index, sample in enumerate((*gathered.samples, *gathered.samples[-1:])):
        for kind, table in (
            ("ledger", sample.ledgers),
            ("stacks", sample.stacks),
            ("processes", sample.states),
        ):
            for seat, at in table.items():
                found[_name(kind, seat, index)] = at.path
                if kind == "ledger":
                    found[_name(kind, seat)] = at.path
    for rank, decisions in gathered.decisions.items():
        found[f"decisions/rank{rank}.jsonl"] = decisions.path
    return found


def _name(kind: str, seat: Seat, index: int | None = None) -> str:
    folder = "" if index is None else f"evidence/sample-{index}/"
    return f"{folder}processes.json" if kind == "processes" else f"{folder}{kind}/{seat_stem(seat)}.json"


# Putting it down -----------------------------------------------------------------------------------------


def seat_stacks(gathered: Gathered) -> tuple[SeatStacks, ...]:
    """Each process over the samples: its first and last dump, its last state."""
    found = []
    for seat, process in gathered.processes.items():
        plain = [sample.stacks[seat] for sample in gathered.samples if seat in sample.stacks]
        native = [sample.native[seat] for sample in gathered.samples if seat in sample.native]
        states = [sample.states[seat] for sample in gathered.samples if seat in sample.states]
        dumps = plain or native
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
        times=_times(gathered),
        missing_evidence=_missing(gathered, opinion),
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


def _times(gathered: Gathered) -> Times:
    return Times(**{key: gathered.times.get(key, 0.0) for key in Times.__dataclass_fields__})


def _missing(gathered: Gathered, opinion: Opinion | None) -> tuple[Missing, ...]:
    """What was there and could not be used, and what was not there; with how to get it."""
    found: list[Missing] = []
    samples = gathered.samples
    stacks = {seat for sample in samples for seat in (*sample.stacks, *sample.native)}
    flights = {seat for sample in samples for seat in sample.flights}
    ledgers = {seat for sample in samples for seat in sample.ledgers}
    for rank in gathered.expected:
        pid = gathered.processes[rank].pid if rank in gathered.processes else 0
        if stacks and rank not in stacks:
            found.append(Missing(f"stacks of rank {rank}", f"no dump from rank {rank}: {_dump(rank, pid)}"))
        if flights and rank not in flights:
            found.append(Missing(f"the flight recorder of rank {rank}", f"no dump from rank {rank}"))
        if ledgers and rank not in ledgers:
            found.append(Missing(f"the ledger of rank {rank}", f"no file of rank {rank}"))
    if not stacks:
        found.append(Missing("stacks", f"none here: {_dump(0, 0)}, for each rank"))
    if opinion is not None and opinion.standing in ("unsure", "suspected"):
        found += [Missing(what, "not in these dumps") for what in opinion.missing if what != LASTS]
    twice = max((sum(seat in sample.stacks for sample in samples) for seat in stacks), default=0)
    if stacks and twice < 2 and not any(len(sample.ledgers) for sample in samples[1:]):
        why = "one shows where processes stand, not whether they stay: dump all of them again some seconds later"
        found.append(Missing("a second sample", f"{why}, into a folder of its own"))
    if stacks and not gathered.refused and not any(sample.states for sample in samples):
        why = "no dump says whether a process is stopped or gone: ps -eo pid,stat,args > ps.txt"
        found.append(Missing("a process table", why))
    found += [Missing(path, why) for path, why in gathered.problems]
    said: dict[tuple[str, str], Missing] = {(one.what, one.why): one for one in found}
    return tuple(said.values())


def _dump(rank: int, pid: int) -> str:
    who = str(pid) if pid else f"<pid of {seat_words(rank)}>"
    return f"py-spy dump --json --pid {who} > rank{rank}.json (with --nonblocking where it is stopped)"
