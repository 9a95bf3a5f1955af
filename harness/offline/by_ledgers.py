"""Ledgers and decision files that were brought, by the rules of a run. Pure.

They are arranged as a capture of our own, diagnosed by ``harness.diagnose``, and what that says of files is put
back into the files' own names. One ledger of each rank can stand for two where it says since when nothing moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from harness.diagnose import diagnose
from harness.diagnosis_model import (
    Cause,
    Collective,
    Culprit,
    Diagnosis,
    Evidence,
    EvidenceSample,
    Fact,
    RankEvidence,
)
from harness.ledger_snapshot import Snapshot
from harness.offline.gather import At, Gathered, Process, Sample
from harness.offline.missing import missing, times_of
from harness.offline.tables import TableRow
from harness.seats import Seat, seat_stem
from harness.stacks import ProcessStacks
from harness.waits import waits

Verdict: TypeAlias = Literal["healthy", "not healthy", "cannot tell"]

_STOOD_S = 2.0
"""A ledger in which nothing has changed for so long shows that its rank stands."""


def decided(diagnosis: Diagnosis) -> bool:
    return diagnosis.kind == "none" or bool(diagnosis.culprits) or diagnosis.mechanism != "unknown"


def by_ledgers(gathered: Gathered) -> tuple[Verdict, Diagnosis] | None:
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
        missing_evidence=missing(gathered, None),
    )
    if found.kind == "none":
        return "healthy", found
    if decided(found):
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
    looked = _by_one_look(found, last) if len(snapshots) == 1 else None
    if looked is not None:
        return "not healthy", looked
    stood = _stood(snapshots) or bool(gathered.reason) or any(_stood_s(one) >= _STOOD_S for one in standing)
    return ("not healthy" if stood else "cannot tell"), found


def _by_one_look(found: Diagnosis, ledgers: Mapping[int, Snapshot]) -> Diagnosis | None:
    """At the one moment that there is, ranks wait in a collective for others that wait for nobody."""
    waiting = waits(ledgers)
    held = {rank for wait in waiting if wait.missing for rank in wait.waiting}
    for wait in waiting:
        roots = tuple(rank for rank in wait.missing if rank not in held)
        if roots and not wait.unknown:
            cause = Cause(
                "hang", "collective-skipped", roots, found.proof, "suspected", stream="host",
                collective=Collective(wait.group, wait.sequence, wait.operation, wait.waiting, wait.missing),
                family=wait.operation, group=wait.group,
            )  # fmt: skip
            headers = [ledgers[rank].header for rank in roots]
            return replace(
                found,
                mechanism=cause.mechanism,
                culprits=tuple(Culprit(one.rank, "rank", one.node, one.pid, one.device) for one in headers),
                stream=cause.stream,
                collective=cause.collective,
                signature=cause.signature,
            )
    return None


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
        times=times_of(gathered),
        reason=gathered.reason,
        went_on=gathered.went_on,
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
