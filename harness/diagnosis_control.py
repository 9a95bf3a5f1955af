"""A control message between hosts that a rank left out of its round. Pure.

Hosts exchange their messages in rounds: a broadcast, an agreement, a broadcast. A host carries each out itself, so
the order in which it entered them is known, and what it did before tells what comes after what. A rank that its
peers miss in one message, and that stands in another which never followed directly in its rounds before, left the
one between out. Its peers, which keep to their rounds, are not to blame, be it one against one.

A message that belongs to some rounds only comes in a beat: every fourth round, or every second prefill. Ranks that
come to it in its beat are right, and whoever stands in another message by then left it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import (
    AGREEMENT_GROUPS,
    collective,
    is_registration,
    still_waits,
    wait_facts,
)
from harness.diagnosis_model import Cause, Fact
from harness.livelock import whole
from harness.waits import Wait, by_host, record_at

_TIMES_BEFORE = 2
"""Rounds in which the missing message followed, and in which the one that it is in instead was entered."""


def left_out(case: Case) -> Cause | None:
    """Hosts wait in a message for ranks that went past it."""
    found = still_waits(case)
    for wait in found:
        skipped = {
            rank: fact for rank in wait.missing if (fact := _went_past(case.views[rank], wait)) is not None
        }
        skipped = skipped or _off_the_beat(case, wait, found)
        if not skipped:
            continue
        ranks = tuple(sorted(skipped))
        decided = case.others_known(ranks)
        facts = [skipped[rank] for rank in ranks] + wait_facts(case, wait)
        facts += [case.views[rank].host_fact() for rank in ranks]
        return Cause(
            kind="hang",
            mechanism="collective-skipped",
            ranks=ranks if decided else (),
            facts=tuple(facts),
            confidence="supported" if decided else "suspected",
            stream="host",
            collective=collective(wait),
            family=wait.operation,
            group=wait.group,
        )
    return None


def _went_past(view: View, wait: Wait) -> Fact | None:
    entered = _entered(view)
    if view.moved or view.snapshot is None or len(entered) < 2 or entered[-1] == wait.group:
        return None
    last = view.snapshot.groups[entered[-1]]
    if last.completed >= last.enqueued:
        return None  # it is through with that one, and may be on its way
    followed = list(pairwise(entered))
    usual, now = followed.count((entered[-2], wait.group)), followed.count(followed[-1])
    known = entered[:-1].count(entered[-1])
    if usual < _TIMES_BEFORE or now > 1 or known < _TIMES_BEFORE:
        return None
    return Fact(
        f"rank {view.rank} went from its {entered[-2]} to {entered[-1]}, which it never did before; {usual} times "
        f"before it entered {wait.group} next, where it is missed",
        view.ledger_path,
    )


def _entered(view: View) -> list[str]:
    """The groups of its host's messages in the order in which it entered them, as far back as all rings reach; none
    where their times tell no order."""
    groups = view.snapshot.groups if view.snapshot is not None else {}
    hosts = {
        name: state for name, state in groups.items() if state.recent and all(map(by_host, state.recent))
    }
    since_ns = max(
        (state.recent[0].enqueued_ns for state in hosts.values() if state.enqueued > len(state.recent)),
        default=0,
    )
    times = [
        (record.enqueued_ns, name)
        for name, state in hosts.items()
        for record in state.recent
        if record.enqueued_ns >= since_ns
    ]
    times.sort()
    told = all(at < next_at or name == other for (at, name), (next_at, other) in pairwise(times))
    return [name for _, name in times] if told else []


# Beats ---------------------------------------------------------------------------------------------------


def _off_the_beat(case: Case, wait: Wait, found: tuple[Wait, ...]) -> dict[int, Fact]:
    """The missing ranks that stand in another message, where all that came did so in the beat of this one."""
    held = {
        rank
        for other in found
        if other.group != wait.group
        for rank in other.waiting
        if _host_is_in(case, rank, other)
    }
    absent = [rank for rank in wait.missing if rank in held and case.views[rank].still]
    if wait.unknown or len(absent) < len(wait.missing) or is_registration(case, wait):
        return {}
    if not absent or not all(_host_is_in(case, rank, wait) for rank in wait.waiting):
        return {}
    beats = {_beat(case, rank, wait.group) for rank in wait.waiting}
    if len(beats) != 1 or None in beats:
        return {}
    beat = beats.pop()
    entered = {_times_entered(case.views[rank], wait.group) for rank in absent}
    if entered != {wait.sequence - 1}:
        return {}
    return {
        rank: Fact(
            f"rank {rank} stands in {_entered(case.views[rank])[-1]} without having entered {wait.group}, to which "
            f"all ranks came in every {beat} before, and to which its peers came in that beat now",
            case.views[rank].ledger_path,
        )
        for rank in absent
    }


def _host_is_in(case: Case, rank: int, wait: Wait) -> bool:
    snapshot = case.views[rank].snapshot
    record = record_at(snapshot.groups[wait.group], wait.sequence) if snapshot is not None else None
    return record is not None and by_host(record)


def _times_entered(view: View, group: str) -> int:
    state = view.snapshot.groups.get(group) if view.snapshot is not None else None
    return state.enqueued if state is not None else 0


def _beat(case: Case, rank: int, group: str) -> str | None:
    """In words, the beat in which the rank has come to the group each time, this one included. The agreement, which
    is the measure, has none."""
    if group in AGREEMENT_GROUPS:
        return None
    view = case.views[rank]
    entered = _entered(view)
    for other in AGREEMENT_GROUPS:
        since_the_start = all(_times_entered(view, name) == entered.count(name) for name in (group, other))
        gaps = _gaps(entered, group, other)[0 if since_the_start else 1 :]
        if _regular(gaps):
            return _every(gaps[0], "round")
    return _beat_of_modes(case.decisions(rank), group, _times_entered(view, group))


def _gaps(entered: list[str], group: str, other: str) -> list[int]:
    """Of each entry into ``group``: how often ``other`` was entered since the one before."""
    gaps, since = [], 0
    for name in entered:
        if name == other:
            since += 1
        elif name == group:
            gaps.append(since)
            since = 0
    return gaps


def _beat_of_modes(records: Mapping[int, Mapping[str, Any]], group: str, now: int) -> str | None:
    """The same counted in steps of one mode, where the rank came there in no others. A record counts what was
    entered before it, in its own step too."""
    gaps: list[int] = []
    count, seen = 0, 0
    steps = sorted(records)
    told = [
        (records[step].get("mode"), counts)
        for step in steps
        if isinstance(counts := records[step].get("collectives"), Mapping)
    ]
    entries = [whole(counts, group) or 0 for _, counts in told]
    came = [
        mode for (mode, _), before, after in zip(told, [0, *entries], entries, strict=False) if after > before
    ]
    modes = {mode for mode in came if isinstance(mode, str)}
    if len(modes) != 1 or not entries or entries[-1] != now - 1:
        return None
    mode = modes.pop()
    for (own, _), entered in zip(told, entries, strict=True):
        seen += own == mode
        if entered > count:
            gaps.append(seen)
            count, seen = entered, 0
    gaps.append(seen + 1)
    return _every(gaps[0], mode) if _regular(gaps) else None


def _regular(gaps: list[int]) -> bool:
    """All are equal, and enough: two of several rounds, or three of one."""
    return len(set(gaps)) == 1 and gaps[0] > 0 and len(gaps) > (1 if gaps[0] > 1 else _TIMES_BEFORE)


def _every(number: int, what: str) -> str:
    return what if number == 1 else f"{number} {what}s"
