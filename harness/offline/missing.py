"""What the dumps lack, and the command that gets it. Pure."""

from __future__ import annotations

from harness.diagnosis_model import Missing, Times
from harness.offline.gather import Gathered
from harness.offline.opinion import LASTS, Opinion
from harness.seats import seat_words, seats_words

_MANY = 16
"""More ranks than these are told at once."""


def missing(gathered: Gathered, opinion: Opinion | None) -> tuple[Missing, ...]:
    """What was there and could not be used, and what was not there; with how to get it."""
    found: list[Missing] = []
    samples = gathered.samples
    stacks = {seat for sample in samples for seat in (*sample.stacks, *sample.native)}
    flights = {seat for sample in samples for seat in sample.flights}
    ledgers = {seat for sample in samples for seat in sample.ledgers}
    for what, there in (("stacks", stacks), ("the flight recorder", flights), ("the ledger", ledgers)):
        lost = [rank for rank in gathered.expected if there and rank not in there]
        if len(lost) > _MANY:
            who = seats_words(lost)
            found.append(Missing(f"{what} of {len(lost)} ranks", f"no dump from {who}"))
            continue
        for rank in lost:
            pid = gathered.processes[rank].pid if rank in gathered.processes else 0
            how = f": {_dump(rank, pid)}" if what == "stacks" else ""
            found.append(Missing(f"{what} of rank {rank}", f"no dump from rank {rank}{how}"))
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


def times_of(gathered: Gathered) -> Times:
    return Times(**{key: gathered.times[key] for key in Times.__dataclass_fields__ if key in gathered.times})
