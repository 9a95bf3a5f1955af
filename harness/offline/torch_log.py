"""What torch's own watchdog wrote into a log when a collective took too long, as recorders' values. Pure.

Where no flight recorder was on, these lines are all that is left of a hang on CUDA or Ascend: which collective
timed out, by number, operation and size, and how far each rank was in a process group. Their wording is that of
torch 2.1 to 2.13 by logs in public reports (pytorch #118369, sglang #1693, OpenRLHF #1126, accelerate #3861), and
the same with HCCL for NCCL; neither library was tried here. A log names no members of a group, and a rank that
stands outside of torch's reach writes nothing at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.offline.flight_recorder import FlightDump, FlightEntry, FlightGroup
from harness.offline.well_formed import rank_well_formed

UNNAMED = "(the log does not say which)"
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\(SeqNum=(\d{1,18}), OpType=(\w+)"
    r"(?:, NumelIn=(\d+))?.{0,120}?\) ran for (\d{1,15}) milliseconds"
)
_STATUS = re.compile(
    r"last enqueued (?:NCCL |HCCL )?work: (\d{1,18}), last completed (?:NCCL |HCCL )?work: (\d{1,18})",
    re.IGNORECASE,
)
_FAILED_AT = re.compile(
    r"(?:at work(?: sequence id)?|Timeout at (?:NCCL|HCCL) work): (\d{1,18})", re.IGNORECASE
)
_SIGNAL = re.compile(r"dump signal due to a collective timeout from\s+(?:rank (\d{1,6})|this local rank)")
_GROUP = re.compile(
    r"\[PG (?:ID )?(\d{1,9})(?: PG GUID ([^ (\]]{1,80}))? ?(?:\(([^)]{0,80})\))? ?Rank (\d{1,6})\]"
)
_RANK = re.compile(r"\[rank(\d{1,6})\]")
_GROUP_RANK = re.compile(r"Rank (\d{1,6})\]")
_TELLING = ("Watchdog caught", "last enqueued", "Last enqueued", "collective timeout from")
_NO_SIZE = 1 << 62
"""A batch of calls says -1, as an unsigned number."""
_WORDS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all", "SEND": "send or recv", "RECV": "send or recv", "SENDRECV": "send or recv",
}  # fmt: skip


@dataclass(slots=True)
class _Group:
    description: str = ""
    enqueued: int = 0
    completed: int = 0
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Rank:
    groups: dict[str, _Group] = field(default_factory=dict)
    timed_out: dict[int, tuple[FlightEntry, str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def group(self, name: str, description: str) -> _Group:
        group = self.groups.setdefault(name, _Group())
        group.description = group.description or description
        return group


def parse_torch_log(text: str, path: str, rank: int | None) -> dict[int, FlightDump]:
    """What the log says, by rank; empty where torch's watchdog wrote nothing. ``rank``: whose log it is, by its
    name, for lines that do not say."""
    ranks: dict[int, _Rank] = {}
    for line in text.splitlines():
        if not any(word in line for word in _TELLING):
            continue
        whose = _whose(line, rank)
        if whose is not None:
            _read(ranks.setdefault(whose, _Rank()), line, whose)
    return {number: _dump(one, path) for number, one in sorted(ranks.items()) if one.groups or one.timed_out}


def _whose(line: str, rank: int | None) -> int | None:
    """The number before the line is the rank; the one in it, its number in the group."""
    said = _RANK.search(line)
    inside = _GROUP_RANK.search(line)
    number = int(said[1]) if said else rank if rank is not None else int(inside[1]) if inside else None
    return number if rank_well_formed(number) else None


def _read(one: _Rank, line: str, whose: int) -> None:
    group = _group_of(line, whose)
    timed_out = _TIMED_OUT.search(line)
    if timed_out is not None:
        sequence, elements = int(timed_out[1]), int(timed_out[3] or _NO_SIZE)
        entry = FlightEntry(
            sequence=sequence,
            operation=_WORDS.get(timed_out[2], timed_out[2].lower()),
            shapes=((elements,),) if elements < _NO_SIZE else (),
            dtype="",
            completed=False,
            started=None,
            created_ns=0,
            site="",
            lasted_s=int(timed_out[4]) / 1e3,
        )
        before = one.timed_out.get(sequence)
        name = group[0] if group is not None else before[1] if before is not None else ""
        one.timed_out[sequence] = (entry, name)
    status = _STATUS.search(line)
    if status is not None and group is not None:
        known = one.group(*group)
        known.enqueued = max(known.enqueued, int(status[1]))
        known.completed = max(known.completed, int(status[2]))
        failed = _FAILED_AT.search(line)
        if failed is not None:
            known.failed.add(int(failed[1]))
    signal = _SIGNAL.search(line)
    if signal is not None:
        who = f"rank {signal[1]}" if signal[1] else f"rank {whose}"
        one.said.append(f"torch's watchdog saw a collective time out on {who}, says rank {whose}")


def _group_of(line: str, whose: int) -> tuple[str, str] | None:
    """Name and description. Without a unique name the number is the process's own: where the rank has another
    number in the group than in the world, there are several groups of that number."""
    found = _GROUP.search(line)
    if found is None:
        return None
    number, unique, description, inside = found.groups()
    if unique:
        return unique, description or ""
    return (number if int(inside) == whose else f"{number} of rank {whose}"), description or ""


def _dump(one: _Rank, path: str) -> FlightDump:
    entries: dict[str, list[FlightEntry]] = {}
    for sequence, (entry, named) in sorted(one.timed_out.items()):
        # The timeout's own line has no group; the status of the group that failed at that number has.
        failed = [name for name, group in one.groups.items() if sequence in group.failed]
        name = named or (failed[0] if len(failed) == 1 else UNNAMED)
        one.group(name, "")
        entries.setdefault(name, []).append(entry)
    groups = {name: _recorded(name, group, entries.get(name, ())) for name, group in one.groups.items()}
    return FlightDump("", path, groups, {}, (), 0, 0, tuple(dict.fromkeys(one.said)), by_log=True)


def _recorded(name: str, group: _Group, entries: Iterable[FlightEntry]) -> FlightGroup:
    found = tuple(entries)
    first = min((entry.sequence for entry in found), default=None)
    # A status written later may count what was given up as done.
    completed = group.completed if first is None else min(group.completed, first - 1)
    return FlightGroup(
        name=name,
        description=group.description,
        members=(),
        entries=found,
        p2p=(),
        enqueued=max([group.enqueued, *(entry.sequence for entry in found)]),
        completed=completed,
        by_number={entry.sequence: entry for entry in found},
    )
