"""Evidence in, diagnosis out. Pure: no file, no clock, and the same evidence always gives the same words.

The rules are asked in the order in which they lie near to the cause, and the first that has an answer gives
it. Ranks that were suspected and went on are none of these: ``diagnosis_slow.py`` says who was slow.

1. a process is gone or stopped, a device faulted, or a rank raised while others wait where it never came;
2. requests stand although no rank does (``diagnosis_service.py``); or there is no ledger, only stacks;
   everything moves: nothing hangs, unless it moves for nothing;
3. a replayed graph lacks a record that was overtaken (``diagnosis_streams.py``); a registration waits for ranks
   that wait for those that register (``diagnosis_registration.py``); one communicator is on two streams, or two
   groups were entered in two orders (``diagnosis_order.py``); a collective went to another group
   (``diagnosis_groups.py``);
4. at some step, however far back, ranks went apart (``diagnosis_decisions.py``); a host left a message out of its
   round (``diagnosis_control.py``); a rank left the sequence of its steps (``diagnosis_sequence.py``); the ranks
   brought different things, or wait in a circle (``diagnosis_collectives.py``);
5. a rank raised of itself; all are in one collective, and kernels stand beside it (``diagnosis_device.py``); a
   rank does something of its own while the others wait for it (``diagnosis_roots.py``);
6. nothing decides: the facts, and no culprit.

Where libraries of an accelerator left something, it is added then (``diagnosis_library.py``).

Only what hardware can show is used: ledgers, the process table, host stacks. Stacks of a simulated device's
stream threads add facts and decide nothing. Whatever is missing makes a diagnosis weaker, never wrong: who is
blamed by exclusion is blamed only when everyone else is known.
"""

from __future__ import annotations

from dataclasses import replace

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import (
    collective,
    mismatch,
    order,
    raised,
    still_waits,
    wait_facts,
    waits_of_the_living,
)
from harness.diagnosis_control import left_out
from harness.diagnosis_corruption import after_wrong_copies, copy_facts
from harness.diagnosis_decisions import divergence, first_departure
from harness.diagnosis_device import no_room, nobody_missing
from harness.diagnosis_events import lost_event
from harness.diagnosis_groups import wrong_group
from harness.diagnosis_hosts import hosts_alone
from harness.diagnosis_library import with_library
from harness.diagnosis_model import (
    Cause,
    Collective,
    Confidence,
    Culprit,
    Diagnosis,
    Evidence,
    EvidenceSample,
    Fact,
    Kind,
    Mechanism,
    Mismatch,
    Missing,
    Operation,
    RankEvidence,
    Times,
)
from harness.diagnosis_order import two_orders, two_streams
from harness.diagnosis_records import FOLLOWS_AGREEMENT
from harness.diagnosis_registration import registration_stall
from harness.diagnosis_roots import root_cause
from harness.diagnosis_sequence import left_its_sequence
from harness.diagnosis_service import by_stacks, held_up
from harness.diagnosis_slow import slow
from harness.diagnosis_streams import stream_order
from harness.diagnosis_words import fold
from harness.garbage import uncollected
from harness.livelock import is_futile, tokens_out

__all__ = [
    "Collective", "Culprit", "Diagnosis", "Evidence", "EvidenceSample", "Fact", "Mismatch", "Missing",
    "Operation", "RankEvidence", "Times", "diagnose",
]  # fmt: skip

_LIVELOCK_RECORDS = 32
"""Futile steps in one ledger that make a livelock even where the capture was made for another reason."""


@uncollected()
def diagnose(evidence: Evidence) -> Diagnosis:
    """Never raises for incomplete evidence; ``missing_evidence`` says what it had to do without."""
    case = Case.of(evidence)
    cause = (
        slow(case)
        or _dead(case)
        or _stopped(case)
        or _faulted(case, of_device=True)
        or _raised(case)
        or by_stacks(case)
        or held_up(case)
        or _moving(case)
        or stream_order(case)
        or lost_event(case)
        or registration_stall(case)
        or two_streams(case)
        or wrong_group(case)
        or two_orders(case)
        or first_departure(case)
        or left_out(case)
        or left_its_sequence(case)
        or mismatch(case)
        or order(case)
        or _faulted(case)
        or no_room(case)
        or root_cause(case)
        or divergence(case, FOLLOWS_AGREEMENT)
        or _raised_alone(case)
        or hosts_alone(case)
        or _undecided(case)
    )
    tables = {id(table): tuple(table.values()) for rank in case.views if (table := case.decisions(rank))}
    recorded = {rank: tables.get(id(case.decisions(rank)), ()) for rank in case.views}
    if any(view.exception is not None for view in case.views.values()):
        cause = after_wrong_copies(cause, recorded)
    if evidence.library is not None:
        cause = with_library(cause, evidence.library, evidence.world)
    told = set(cause.facts)
    copies = tuple(fact for fact in copy_facts(recorded) if fact not in told)
    extra = (*copies, *(fact for view in case.everyone for fact in view.stack_facts()))
    return Diagnosis(
        kind=cause.kind,
        mechanism=cause.mechanism,
        culprits=tuple(_culprit(case.view(seat)) for seat in cause.ranks),
        stream=cause.stream,
        operation=cause.operation,
        collective=cause.collective,
        proof=fold((*cause.facts, *extra)),
        confidence=cause.confidence,
        signature=cause.signature,
        times=evidence.times,
        missing_evidence=(*case.missing(), *cause.missing),
        simulation=evidence.device_is_simulation,
        error_codes=evidence.library.codes if evidence.library is not None else (),
    )


def _culprit(view: View) -> Culprit:
    return Culprit(view.rank if view.rank >= 0 else None, view.role, view.node, view.pid, view.device)


# Processes -----------------------------------------------------------------------------------------------


def _dead(case: Case) -> Cause | None:
    # A rank that raised has answered; where its process ended of it, that is the same story.
    dead = _in_order_of_death(
        [v for v in case.everyone if v.condition == "dead" and (not v.done or v.exception is not None)]
    )
    if not dead:
        return None
    # A ledger outlives its process: what it says last is what the process did last.
    before = case.with_views(replace(view, condition="alive") for view in dead)
    # Where gloo ends a process for a collective that did not match, and an engine ends itself for a rank that
    # raised, the process is the symptom.
    symptoms = all(view.symptom for view in dead)
    behind = first_departure(before) or mismatch(before) or raised(before)
    if behind is None and symptoms:
        behind = order(before)
    if behind is not None and behind.ranks:
        return _renamed(behind, tuple(_dead_fact(view) for view in dead))
    first = next((view for view in dead if not view.symptom), dead[0])
    # A rank that died of another's doing is named only when no other can have done it.
    decided = not symptoms or before.only_left(())
    facts = [_dead_fact(first)]
    facts += first.last_words()
    facts += [_dead_fact(view) for view in dead if view is not first]
    found = [wait for wait in waits_of_the_living(case) if first.rank in wait.members]
    for wait in found:
        facts += wait_facts(case, wait)
    alone = len(dead) == 1 or first.died_s is not None
    return Cause(
        kind="dead",
        mechanism="rank-dead",
        ranks=(first.seat,) if decided else (),
        facts=tuple(facts),
        confidence=("proven" if alone and not symptoms else "supported") if decided else "suspected",
        stream="host",
        collective=collective(found[0]) if found else None,
        family="" if first.rank >= 0 else first.role,
    )


def _in_order_of_death(dead: list[View]) -> list[View]:
    """The first one first: as it was seen, else a first-hand error before a symptom, else by the ledgers' ends,
    which are comparable only between ranks of one boot of one machine."""
    never_s = float("inf")
    boots = {view.snapshot.header.boot_id if view.snapshot is not None else None for view in dead}
    comparable = len(boots) == 1

    def order(view: View) -> tuple[object, ...]:
        return (
            never_s if view.died_s is None else view.died_s,
            view.first_dead,
            view.symptom,
            view.snapshot.host.heartbeat_ns if comparable and view.snapshot is not None else 0,
            view.rank < 0,
            view.rank,
        )

    return sorted(dead, key=order)


def _dead_fact(view: View) -> Fact:
    how = f": {view.exit}" if view.exit else ""
    raised_lines = (view.exception or "").strip().splitlines()
    also = f", after {raised_lines[-1]}" if raised_lines else ""
    when = f" since {view.died_s:.2f} s" if view.died_s is not None else ""
    return Fact(f"{view.name}: its process (pid {view.pid}) is gone{when}{how}{also}", view.condition_path)


def _renamed(cause: Cause, before: tuple[Fact, ...]) -> Cause:
    return Cause(
        kind="dead",
        mechanism=cause.mechanism,
        ranks=cause.ranks,
        facts=(*before, *cause.facts),
        confidence="supported",
        stream=cause.stream,
        operation=cause.operation,
        collective=cause.collective,
        family=cause.family,
        group=cause.group,
        phase=cause.phase,
    )


def _stopped(case: Case) -> Cause | None:
    stopped = [view for view in case.everyone if view.condition == "stopped" and not view.done]
    if not stopped:
        return None
    facts: list[Fact] = []
    for view in stopped:
        often = "in every sample" if view.stopped_twice else "in one sample"
        facts.append(
            Fact(f"{view.name}: its process (pid {view.pid}) is stopped {often}", view.condition_path)
        )
        facts += view.doing()
    found = waits_of_the_living(case)
    for wait in found:
        facts += wait_facts(case, wait)
    return Cause(
        kind="stopped",
        mechanism="rank-stopped",
        ranks=tuple(view.seat for view in stopped),
        facts=tuple(facts),
        confidence="proven" if all(view.stopped_twice for view in stopped) else "supported",
        stream="host",
        collective=collective(found[0]) if found else None,
    )


def _raised(case: Case) -> Cause | None:
    """A rank that raised is the cause, unless ranks went apart before that: then it choked on what that led to."""
    found = raised(case)
    before = first_departure(case) if found is not None else None
    if found is None or before is None or not before.ranks:
        return found
    return replace(before, facts=(*before.facts, *found.facts), confidence="supported")


def _faulted(case: Case, *, of_device: bool = False) -> Cause | None:
    """A rank raised of itself, in no collective that others miss it in; or its device did (HANGS.md, G3), wherever
    the others wait for it then.

    Its own words are evidence at first hand, so nothing has to be known of the others.
    """
    failed = [view for view in case.views.values() if view.exception is not None]
    first_hand = [view for view in failed if not view.symptom and (view.device_fault or not of_device)]
    if not first_hand:
        return None
    waiting = [view for view in case.views.values() if not view.done]
    facts = [view.raised_fact() for view in first_hand]
    facts += [view.raised_fact() for view in failed if view not in first_hand]
    facts += [view.host_fact() for view in waiting]
    ranks = {view.rank for view in first_hand}
    missed = [wait for wait in still_waits(case) if ranks & {*wait.missing, *wait.late}]
    for wait in missed:
        facts += wait_facts(case, wait)
    return Cause(
        kind="hang" if waiting else "dead",
        mechanism="rank-dead",
        ranks=tuple(view.rank for view in first_hand),
        facts=tuple(facts),
        confidence="proven" if len(first_hand) == 1 else "supported",
        stream="host",
        collective=collective(missed[0]) if missed else None,
        family=_error_name(first_hand[0].exception or ""),
    )


def _error_name(exception: str) -> str:
    """``package.module.Error: text`` as its class, without the module."""
    lines = exception.strip().splitlines()
    return lines[-1].partition(":")[0].rpartition(".")[2] if lines else ""


def _raised_alone(case: Case) -> Cause | None:
    """Ranks raised, and nobody is left waiting for them."""
    failed = [view for view in case.views.values() if view.exception is not None]
    if not failed:
        return None
    first_hand = tuple(view.rank for view in failed if not view.symptom)
    decided = bool(first_hand) and case.others_known(view.rank for view in failed)
    return Cause(
        kind="dead",
        mechanism="unknown",
        ranks=first_hand if decided else (),
        facts=tuple(view.raised_fact() for view in failed),
        confidence="supported" if decided else "suspected",
        stream="host",
    )


# Movement ------------------------------------------------------------------------------------------------


def _moving(case: Case) -> Cause | None:
    """Every rank that owes anything moved between the samples."""
    busy = [view for view in case.views.values() if not (view.done or view.parked)]
    if any(view.exception is not None for view in case.views.values()):
        return None
    if not busy or not all(view.moved for view in busy):
        return None
    futile = {view.rank: _futile(case, view) for view in busy}
    most = max(futile.values())
    named = "livelock" in case.evidence.reason.lower()
    if _no_token_finished(busy) and (most >= _LIVELOCK_RECORDS or (named and most > 0)):
        ranks = tuple(rank for rank, count in futile.items() if count > 0)
        return Cause(
            kind="livelock",
            mechanism="livelock",
            ranks=ranks,
            facts=tuple(fact for view in busy if futile[view.rank] > 0 for fact in _futile_facts(case, view)),
            confidence="proven" if named and most >= _LIVELOCK_RECORDS else "supported",
            stream="host",
        )
    facts = tuple(
        Fact(f"rank {view.rank}: its ledger moved between the samples", view.ledger_path) for view in busy
    )
    return Cause("none", "unknown", (), facts, "proven")


def _futile(case: Case, view: View) -> int:
    """Futile steps at the end of the rank's records, since its count of finished tokens last grew."""
    records = [record for _, record in sorted(case.decisions(view.rank).items())]
    newest = tokens_out(records)
    if newest is None:
        return 0
    return sum(is_futile(record) for record in records if record.get("tokens_out") == newest)


def _no_token_finished(busy: list[View]) -> bool:
    return all(
        view.snapshot is not None
        and view.earlier is not None
        and tokens_out(view.snapshot.decisions) == tokens_out(view.earlier.decisions)
        for view in busy
    )


def _futile_facts(case: Case, view: View) -> list[Fact]:
    records = [record for _, record in sorted(case.decisions(view.rank).items())]
    retracted = {str(one) for record in records for one in (record.get("retracted") or ())}
    facts = [
        Fact(
            f"rank {view.rank}: {_futile(case, view)} recorded steps retracted requests or ran nothing "
            f"although requests waited, and finished no token (tokens_out stays {tokens_out(records)})",
            case.decisions_path(view.rank),
        )
    ]
    if retracted:
        facts.append(
            Fact(
                f"rank {view.rank}: retracted again and again: {', '.join(sorted(retracted)[:8])}",
                case.decisions_path(view.rank),
            )
        )
    return facts


# Nothing decides -----------------------------------------------------------------------------------------


def _undecided(case: Case) -> Cause:
    """The facts of every rank, and the capture's own reason; no culprit."""
    facts: list[Fact] = []
    if case.evidence.reason:
        facts.append(Fact(f"captured because: {case.evidence.reason}", "evidence/manifest.json"))
    facts += nobody_missing(case)
    found = still_waits(case)
    for wait in found:
        facts += wait_facts(case, wait)
    for view in case.views.values():
        if view.exception is not None:
            facts.append(view.raised_fact())
        facts += view.doing()
    kind: Kind = "hang"
    mechanism: Mechanism = "unknown"
    confidence: Confidence = "suspected"
    stuck = next((v for v in case.views.values() if v.still and v.unfinished()), None)
    name = stuck.unfinished()[0] if stuck is not None else ""
    return Cause(
        kind,
        mechanism,
        (),
        tuple(facts),
        confidence,
        collective=collective(found[0]) if found else None,
        family=(stuck.operation(name) or Operation("", 0, "", 0.0)).label if stuck is not None else "",
        group=found[0].group if found else "",
    )
