"""Who was slow: ranks stood, were suspected and sampled twice, and went on to the end of the trial. Pure.

That they went on is known, so nothing here asks why they cannot. The samples show how things stood meanwhile:
the culprit is the rank that the others waited for, else the one that stood by itself.
"""

from __future__ import annotations

from dataclasses import replace

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, stream_name
from harness.diagnosis_roots import waited_for
from harness.seats import Seat, seats_words
from harness.waits import Wait

_MANIFEST = "evidence/manifest.json"


def slow(case: Case) -> Cause | None:
    """None for a trial that did not end."""
    suspects = case.evidence.went_on
    if suspects is None:
        return None
    stood = _as_it_stood(case)
    found = tuple(
        wait
        for wait in still_waits(stood)
        if not any(case.views[rank].moved for rank in wait.waiting if rank not in suspects)
    )
    views = waited_for(stood, found) or _by_themselves(case, stood, suspects, found)
    moving = [view for view in views if case.view(view.seat).host_moved]
    ranks = tuple(view.seat for view in views)
    decided = bool(views) and stood.only_left(view.rank for view in views)
    facts = [_how_long(case, suspects)]
    for view in views:
        facts += view.doing()
        if view in moving:
            facts.append(Fact(f"{view.name}: its host stack left its place meanwhile", view.stacks_path))
    for wait in found:
        facts += wait_facts(stood, wait)
    stream = None if moving else _stream(views)
    return Cause(
        kind="slow",
        mechanism="rank-slow",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence="supported" if decided else "suspected",
        stream=stream_name(stream) if stream else "host",
        operation=views[0].operation(stream) if stream else None,
        collective=collective(found[0]) if found else None,
        phase=views[0].snapshot.host.phase if views and views[0].snapshot is not None else "",
    )


def _as_it_stood(case: Case) -> Case:
    """In the first sample: while the second one was taken a suspect may have gone on."""
    first = case.evidence.samples[:1]
    # Twice the same sample: what was seen once did not move.
    return Case.of(replace(case.evidence, samples=(*first, *first)))


def _by_themselves(
    case: Case, stood: Case, suspects: tuple[Seat, ...], found: tuple[Wait, ...]
) -> list[View]:
    """The suspects that were in no collective; where all ranks stood so, those that did something of their own."""
    waiting = {rank for wait in found for rank in wait.waiting}
    alone = [view for view in stood.everyone if view.seat in suspects and view.seat not in waiting]
    if len(alone) < len(stood.views) or len(stood.views) == 1:
        return alone
    odd = [view for view in alone if case.view(view.seat).host_moved or view.condition == "stopped"]
    return odd if len(odd) < len(alone) else []


def _how_long(case: Case, suspects: tuple[Seat, ...]) -> Fact:
    times = case.evidence.times
    took = "" if times.went_on_s is None else f" for {times.went_on_s - times.last_progress_s:.1f} s"
    return Fact(f"{seats_words(suspects) or 'the ranks'} made no progress{took}, and then went on", _MANIFEST)


def _stream(views: list[View]) -> str | None:
    """The stream that the slow rank waited for, None where its host was at work."""
    return next(iter(views[0].unfinished()), None) if views else None
