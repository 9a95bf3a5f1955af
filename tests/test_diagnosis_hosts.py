"""Hosts that hold up everybody though no collective shows who is missing, each beside what resembles it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_diagnose import blamed, evidence, facts, set_rank, two

from harness.diagnose import Diagnosis, Evidence, diagnose
from harness.stacks import Frame, ProcessStacks, ThreadStack

ENGINE = "/x/serving/engine.py"
WORKING = (("Engine._token", ENGINE), ("Engine.step", ENGINE))
WAITING = (
    ("Condition.wait", "/usr/lib/python3.11/threading.py"),
    ("SimStream.synchronize", "/x/harness/devices/sim_streams.py"),
    ("Engine.step", ENGINE),
)


def stacks(
    rank: int, frames: tuple[tuple[str, str], ...], *, gil: bool = False, line: int = 10
) -> ProcessStacks:
    thread = ThreadStack(1, "MainThread", gil, gil, tuple(Frame(name, file, line) for name, file in frames))
    return ProcessStacks(1000 + rank, rank, "py-spy", False, (thread,))


def with_host(found: Evidence, rank: int, frames: tuple[tuple[str, str], ...], **more: Any) -> Evidence:
    return set_rank(found, rank, stacks=stacks(rank, frames, **more))


def all_inside() -> Evidence:
    """Both ranks are in one collective of their devices."""
    ranks = two()
    for rank in ranks:
        rank.groups["experts"].enter("all_reduce")
    return evidence(ranks)


def brief(found: Diagnosis) -> tuple[str, str, list[int | None]]:
    return found.kind, found.mechanism, blamed(found)


def test_a_host_that_keeps_the_interpreter_while_all_are_inside() -> None:
    found = with_host(with_host(all_inside(), 0, WAITING), 1, WORKING, gil=True)
    diagnosis = diagnose(found)
    assert (*brief(diagnosis), diagnosis.confidence) == ("hang", "host-blocked", [1], "supported")
    assert (
        "rank 1: its host is at this place in every sample, at work and with the interpreter's lock"
        in facts(diagnosis)
    )
    assert diagnosis.collective is not None and diagnosis.collective.group == "experts"


def test_it_is_not_blamed_where_it_waits_moves_or_is_like_the_others() -> None:
    waits = with_host(with_host(all_inside(), 0, WAITING), 1, WAITING, gil=True)
    assert brief(diagnose(waits)) == ("hang", "unknown", [])
    once = set_rank(with_host(all_inside(), 0, WAITING), 1, (0,), stacks=stacks(1, WORKING))
    once = set_rank(once, 1, (1,), stacks=stacks(1, WORKING, gil=True))
    assert brief(diagnose(once)) == ("hang", "unknown", [])
    both = with_host(with_host(all_inside(), 0, WORKING, gil=True), 1, WORKING, gil=True)
    assert brief(diagnose(both)) == ("hang", "unknown", [])
    assert "nobody is missing in" in facts(diagnose(both)) and "Needed: what the device" in facts(
        diagnose(both)
    )


def outside() -> Evidence:
    """No rank is in a collective, and no stream has work."""
    found = evidence(two())
    for rank in (0, 1):
        found = with_host(found, rank, WORKING)
    return found


def test_hosts_that_all_stand_outside_are_all_named() -> None:
    diagnosis = diagnose(outside())
    assert (*brief(diagnosis), diagnosis.confidence) == ("hang", "host-blocked", [0, 1], "supported")
    assert "by a way that no ledger knows (a socket, a file, a lock)" in facts(diagnosis)
    assert "rank 0: the host stands in phase" in facts(diagnosis)


def test_without_stacks_or_with_a_rank_that_is_not_known_nobody_is_named() -> None:
    assert brief(diagnose(set_rank(outside(), 1, stacks=None))) == ("hang", "unknown", [])
    assert blamed(diagnose(set_rank(outside(), 1, snapshot=None))) == []
    parked = two()
    parked[1] = replace(parked[1], phase="parked")
    found = evidence(parked)
    for rank in (0, 1):
        found = with_host(found, rank, WORKING)
    assert blamed(diagnose(found)) == [0]
