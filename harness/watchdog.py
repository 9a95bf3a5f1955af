"""Suspicion and confirmation: which ranks stopped, judged from samples of all ledgers. Pure: no clock here.

Two roads lead to a suspicion. *Proof*: a process is gone or stopped, or the ledgers show a collective that
cannot complete, or a replay whose record was lost while no host can make another (``lost_records.py``).
*Budget*: nothing moved for longer than this phase's own learned budget (``budgets.py``). A
suspicion is confirmed by a later sample in which still nothing moved and, where stacks were taken, no host
stack left its place. Being in a collective is not a hang, and a rank that others wait for keeps its own
budget while they wait. An observer that was starved itself widens all budgets for a while (``starvation.py``).

One watchdog judges what one observer sees: an agent its node, the driver the joined views of all agents. An
observer that does not see every rank waits at least for the ceiling, because the cause may lie where it
cannot look. Here is no capture and no cause: those are ``capture.py`` and ``diagnose.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from harness.blocked import blocked
from harness.budgets import WatchdogSettings
from harness.diagnosis_words import fold_texts
from harness.held import host_is_held
from harness.knots import registration, standing_in
from harness.ledger_snapshot import Snapshot
from harness.livelock import Futility
from harness.lost_records import Hosts, LostRecord, lost_record
from harness.seats import Seat, in_order, seat_words, seats_words
from harness.stacks import ProcessStacks
from harness.standing import (
    Confirmed,
    Healthy,
    RankView,
    Reason,
    Road,
    Sample,
    Standing,
    Suspect,
)
from harness.starvation import Starvation
from harness.stillness import left_place, streams_unknown, waits_for_process
from harness.track import Track
from harness.waits import GRAPH_PREFIX, Wait, cycle_in, waits

__all__ = [
    "Confirmed", "Healthy", "RankView", "Sample", "Standing", "Suspect", "Watchdog", "WatchdogSettings",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Finding:
    reason: Reason
    road: Road
    ranks: tuple[Seat, ...]
    proof: tuple[str, ...]


class Watchdog:
    """Feed it every sample, in order. ``world`` is the number of ranks of the trial, all nodes together."""

    def __init__(self, settings: WatchdogSettings, world: int) -> None:
        self._settings = settings
        self._world = world
        self._tracks: dict[Seat, Track] = {}
        self._futility = Futility(settings)
        self._starvation = Starvation(settings.sample_period_s)
        self._left: Counter[str] = Counter()
        """Phases, by how many processes have come through them."""
        self._sees_all = False
        self._widening = 1.0
        self._now_ns: int | None = None
        self._standing: Standing = Healthy(0)
        self._age_s = 0.0

    @property
    def standing(self) -> Standing:
        return self._standing

    def observe(self, sample: Sample) -> Standing:
        """Judges one sample. ``Healthy.note`` and ``slow`` are set only when this sample ends a suspicion."""
        gap_s, elapsed_s = self._elapsed_s(sample.taken_ns)
        self._starvation.observe(gap_s, sample.late_s)
        for view in sample.ranks:
            track = self._tracks.setdefault(view.rank, Track(self._settings, sample.taken_ns))
            track.update(view, sample.taken_ns, elapsed_s, gap_s - elapsed_s)
        self._left = Counter(phase for track in self._tracks.values() for phase in track.budgets.left)
        self._sees_all = sum(isinstance(seat, int) for seat in self._tracks) >= self._world
        self._widening = self._starvation.widening
        self._futility.observe(
            {
                view.rank: view.snapshot
                for view in sample.ranks
                if isinstance(view.rank, int) and view.snapshot is not None
            },
            sample.taken_ns,
            elapsed_s / self._starvation.widening,
        )
        self._standing = self._settle(self._find(), sample.taken_ns, elapsed_s)
        return self._standing

    def budget_s(self, rank: Seat) -> float:
        """How long this rank may stand still where it stands. Raises KeyError for a rank never observed."""
        track = self._tracks[rank]
        by_others = self._left[track.phase] - (track.phase in track.budgets.left)
        budget_s = track.budget_s(left_by_others=by_others > 0)
        if not self._sees_all:
            budget_s = max(budget_s, self._settings.ceiling_s)
        return budget_s * self._widening

    @property
    def starved_s(self) -> float:
        """By how much this observer's samples were late, all together."""
        return self._starvation.total_s

    def confirm(
        self,
        stacks_a: Mapping[Seat, ProcessStacks],
        stacks_b: Mapping[Seat, ProcessStacks],
        moved: Collection[Seat] = (),
        children_at_work: Collection[Seat] = (),
    ) -> Standing:
        """Holds a confirmation against both samples: their stacks (by seat; those without stacks say nothing),
        those whose ledgers ``moved`` between them, and those whose own processes got much of the processor.

        A suspect whose ledger moved went on while the sample was taken: the confirmation becomes a suspicion
        again, which the next sample ends. So does that of a suspect whose host stack left its place, because it
        computes, and that of one that waits for a process of its own which does (a compiler); the next samples may
        confirm it after all. Only up to the startup budget: what has not moved its
        ledger by then hangs.
        """
        standing = self._standing
        if not isinstance(standing, Confirmed) or standing.reason in ("dead", "livelock"):
            return standing
        went_on = [rank for rank in standing.ranks if rank in moved]
        if went_on:
            return self._doubt(
                standing, f"the ledger of {seat_words(went_on[0])} moved while the second sample was taken"
            )
        if standing.reason == "stopped":
            return standing
        moving = [
            rank
            for rank in standing.ranks
            if rank in stacks_a and rank in stacks_b and left_place(stacks_a[rank], stacks_b[rank])
        ]
        served = [
            rank
            for rank in standing.ranks
            if rank in children_at_work and rank in stacks_b and waits_for_process(stacks_b[rank])
        ]
        patience_s = max(self._settings.startup_s, self._settings.ceiling_s)
        if max(self._tracks[rank].still_s for rank in standing.ranks) >= patience_s:
            return standing
        if moving:
            return self._doubt(
                standing, f"the host stack of {seat_words(moving[0])} left its place between the samples"
            )
        if served:
            return self._doubt(
                standing, f"{seat_words(served[0])} waits for a process of its own that is at work"
            )
        return standing

    def _doubt(self, standing: Confirmed, why: str) -> Standing:
        self._age_s = 0.0
        self._standing = Suspect(
            standing.reason,
            standing.road,
            standing.ranks,
            standing.since_ns,
            (*standing.proof, why),
            standing.last_progress_ns,
        )
        return self._standing

    # Keeping track ---------------------------------------------------------------------------------------

    def _elapsed_s(self, taken_ns: int) -> tuple[float, float]:
        """Seconds since the sample before; and those that count, cut where the observer itself was starved or
        suspended."""
        before_ns, self._now_ns = self._now_ns, taken_ns
        if before_ns is None:
            return 0.0, 0.0
        gap_s = max(0.0, (taken_ns - before_ns) / 1e9)
        return gap_s, min(gap_s, self._settings.starved_multiple * self._settings.sample_period_s)

    # The two roads ---------------------------------------------------------------------------------------

    def _find(self) -> _Finding | None:
        return self._by_process() or self._by_ledgers() or self._by_budget() or self._by_livelock()

    def _by_process(self) -> _Finding | None:
        gone = tuple(rank for rank in in_order(self._tracks) if self._tracks[rank].gone)
        if gone:
            facts = tuple(
                f"{seat_words(rank)}: its process is {self._tracks[rank].state}, and it had not ended its task"
                for rank in gone
            )
            return _Finding("dead", "proof", gone, facts)
        # A stopped process does not compile either: its phase grants it no patience, its usual pauses do.
        stopped = tuple(
            rank
            for rank in in_order(self._tracks)
            if (track := self._tracks[rank]).stopped_s > 0.0
            and not track.done
            and track.stopped_s >= min(self.budget_s(rank), track.budgets.pause_s())
        )
        if stopped:
            facts = tuple(
                f"{seat_words(rank)}: stopped in every sample for {self._tracks[rank].stopped_s:.1f} s"
                for rank in stopped
            )
            return _Finding("stopped", "proof", stopped, facts)
        return None

    def _by_ledgers(self) -> _Finding | None:
        ranks = self._ranks()
        found = waits({r: t.snapshot for r, t in ranks.items() if t.snapshot is not None})
        for wait in found:
            finding = self._never_comes(wait) or self._mismatch(wait)
            if finding is not None:
                return finding
        return (
            self._registration(found)
            or self._blocked(found)
            or self._cycle(found)
            or self._side_streams(found)
            or self._lost_record(found)
            or next((finding for wait in found if (finding := self._left_queued(wait)) is not None), None)
        )

    def _never_comes(self, wait: Wait) -> _Finding | None:
        """A member that will not enter: its task is over, or it waits for the driver."""
        settings = self._settings
        still_s = min((self._tracks[rank].still_s for rank in wait.waiting), default=0.0)
        over = [rank for rank in wait.missing if self._tracks[rank].done]
        # The driver starts the ranks one after the other, so parked peers are normal for a moment; a longer one
        # where it starves as the observer does.
        patience_s = settings.floor_s * self._starvation.widening
        parked = [rank for rank in wait.missing if self._tracks[rank].parked_s >= patience_s]
        if over and still_s >= settings.proof_still_s:
            absent, why = over, "its task is over"
        elif parked and still_s >= patience_s:
            absent, why = parked, "its host is parked"
        else:
            return None
        facts = (
            f"{seats_words(wait.waiting)} in {wait.operation} {wait.sequence} of group {wait.group}",
            *(f"rank {rank} never entered it and {why}" for rank in absent),
        )
        return _Finding("collective", "proof", wait.waiting, facts)

    def _left_queued(self, wait: Wait) -> _Finding | None:
        """What a rank left queued when its task ended may still be carried out, but not once it stands as those do
        that wait there."""
        waiting = tuple(rank for rank in wait.waiting if not self._tracks[rank].done)
        left = [
            rank for rank in (*wait.late, *wait.waiting) if self._tracks[rank].done and self._stands(rank)
        ]
        if not waiting or not left:
            return None
        if min(self._tracks[rank].still_s for rank in waiting) < self._settings.proof_still_s:
            return None
        facts = (
            f"{seats_words(waiting)} in {wait.operation} {wait.sequence} of group {wait.group}",
            *(f"rank {rank} left it queued, its task is over and it does not move" for rank in left),
        )
        return _Finding("collective", "proof", waiting, facts)

    def _stands(self, rank: int) -> bool:
        """Its ledger has not moved for as long as a proof takes, whether or not it still owes anything."""
        unmoved_s = ((self._now_ns or 0) - self._tracks[rank].moved_ns) / 1e9
        return unmoved_s >= self._settings.proof_still_s * self._starvation.widening

    def _mismatch(self, wait: Wait) -> _Finding | None:
        if not wait.mismatched:
            return None
        if min(self._tracks[rank].still_s for rank in wait.waiting) < self._settings.proof_still_s:
            return None
        facts = (
            f"group {wait.group}, collective {wait.sequence}: the ranks brought a different "
            f"{wait.mismatch_kind()}",
            *(side.words() for side in wait.sides),
        )
        return _Finding("mismatch", "proof", wait.waiting, facts)

    def _cycle(self, found: tuple[Wait, ...]) -> _Finding | None:
        links = cycle_in(found)
        if not links:
            return None
        facts = []
        for link in links:
            wait, following = link.wait, link.following
            # A peer that has not even enqueued may still compute and come: it is owed its own budget.
            snapshot = self._tracks[following].snapshot
            may_come = following in wait.missing and not (
                snapshot is not None and host_is_held(following, snapshot, found)
            )
            needed_s = self.budget_s(following) if may_come else self._settings.proof_still_s
            if self._tracks[following].still_s < needed_s:
                return None
            facts.append(f"rank {link.rank} waits in {wait.group} {wait.sequence} for rank {following}")
        return _Finding("cycle", "proof", tuple(sorted(link.rank for link in links)), tuple(facts))

    def _blocked(self, found: tuple[Wait, ...]) -> _Finding | None:
        """Hosts inside synchronisations or collectives, behind streams that need each other's hosts."""
        if not any(wait.missing or wait.late for wait in found):
            return None
        still = self._standing_still()
        if not still:
            return None
        ended = [rank for rank, track in self._ranks().items() if track.done and self._stands(rank)]
        stuck = blocked(still, found, ended=ended)
        return None if stuck is None else _Finding("cycle", "proof", stuck.hosts, stuck.facts)

    def _standing_still(self) -> dict[int, Snapshot]:
        """Of ranks that owe something and have not moved for as long as a proof takes; those are out whose streams
        nobody has looked at, or whose processes do not run."""
        return {
            rank: track.snapshot
            for rank, track in sorted(self._ranks().items())
            if track.snapshot is not None
            and not track.excused
            and track.still_s >= self._settings.proof_still_s
            and track.state in ("running", "sleeping")
            and not streams_unknown(track.snapshot)
        }

    def _registration(self, found: tuple[Wait, ...]) -> _Finding | None:
        """Ranks register memory, and those that they wait for stand in a collective that needs the registering."""
        knot = registration(found)
        if knot is None:
            return None
        proof_s = self._settings.proof_still_s
        for held in knot.held:
            # Inside a replay a peer may still be on its way to the registration.
            needed_s = proof_s if held.certain else self.budget_s(held.rank)
            if self._tracks[held.rank].still_s < needed_s:
                return None
        if any(self._tracks[rank].still_s < proof_s for rank in knot.wait.waiting):
            return None
        facts = (
            f"{seats_words(knot.wait.waiting)} in {knot.wait.operation} {knot.wait.sequence} of group "
            f"{knot.wait.group}",
            *(
                f"rank {held.rank} is not: it waits in {held.behind.operation} {held.behind.sequence} of group "
                f"{held.behind.group} for rank {held.needed}"
                for held in knot.held
            ),
        )
        ranks = (*knot.wait.waiting, *(held.rank for held in knot.held))
        return _Finding("registration", "proof", tuple(sorted(ranks)), facts)

    def _side_streams(self, found: tuple[Wait, ...]) -> _Finding | None:
        """All members stand in the group, and a rank has its collectives on two streams."""
        for wait in found:
            if wait.missing or wait.late or wait.unknown:
                continue
            if any(self._tracks[rank].still_s < self._settings.proof_still_s for rank in wait.waiting):
                continue
            snapshots = {rank: self._tracks[rank].snapshot for rank in wait.waiting}
            beside = standing_in({r: s for r, s in snapshots.items() if s is not None}, wait.group)
            if beside:
                facts = tuple(
                    f"rank {rank}: unfinished collectives of group {wait.group} on {' and '.join(streams)}"
                    for rank, streams in beside.items()
                )
                return _Finding("side-streams", "proof", wait.waiting, facts)
        return None

    def _lost_record(self, found: tuple[Wait, ...]) -> _Finding | None:
        """A replay is short of a record, and every host of the trial waits for what only it can bring."""
        owing = {rank: track for rank, track in sorted(self._ranks().items()) if not track.excused}
        snapshots = {rank: track.snapshot for rank, track in owing.items() if track.snapshot is not None}
        if len(self._ranks()) < self._world or len(snapshots) < len(owing):
            return None
        if any(wait.operation.startswith(GRAPH_PREFIX) and wait.missing for wait in found):
            return None  # the replay may stand for want of that member
        if any(
            track.still_s < self._settings.proof_still_s or track.state not in ("running", "sleeping")
            for track in owing.values()
        ) or any(streams_unknown(snapshot) for snapshot in snapshots.values()):
            return None
        hosts = Hosts.of(snapshots)
        for rank, snapshot in snapshots.items():
            lost = lost_record(snapshot)
            if lost is not None and not lost.doubt and hosts.bring_no_update(rank, lost):
                facts = (*_lost_facts(rank, lost), *(_host_words(r, s) for r, s in snapshots.items()))
                return _Finding("lost-record", "proof", tuple(snapshots), facts)
        return None

    def _by_budget(self) -> _Finding | None:
        active = {
            rank: track
            for rank, track in self._tracks.items()
            if track.snapshot is not None and not track.excused
        }
        # No budget is below the floor; most ranks have moved, and theirs need not be worked out.
        over = {
            rank
            for rank, track in active.items()
            if track.still_s > self._settings.floor_s and track.still_s > self.budget_s(rank)
        }
        if over and over == active.keys():
            return self._stalled(tuple(in_order(over)))
        # While its peers move, a rank alone may lawfully have nothing to do for long.
        peers_move = any(track.still_s < self._settings.floor_s for track in active.values())
        ceiling_s = self._settings.ceiling_s * self._starvation.widening
        alone = tuple(r for r in in_order(over) if active[r].still_s > ceiling_s)
        return self._stalled(alone) if alone and peers_move else None

    def _stalled(self, ranks: tuple[Seat, ...]) -> _Finding:
        facts = tuple(
            f"{seat_words(rank)}: nothing moved for {self._tracks[rank].still_s:.1f} s in phase "
            f"{self._tracks[rank].phase!r}, whose budget is {self.budget_s(rank):.1f} s"
            for rank in ranks
        )
        return _Finding("stalled", "budget", ranks, facts)

    def _by_livelock(self) -> _Finding | None:
        fact = self._futility.finding()
        if fact is None:
            return None
        return _Finding("livelock", "budget", self._futility.ranks(), (fact,))

    # From finding to standing ----------------------------------------------------------------------------

    def _settle(self, finding: _Finding | None, now_ns: int, elapsed_s: float) -> Standing:
        before = self._standing
        if finding is None:
            return self._healthy(before)
        finding = replace(finding, proof=fold_texts(finding.proof))
        progress_ns = self._last_progress_ns(finding)
        if isinstance(before, Healthy) or progress_ns > before.since_ns:
            self._age_s = 0.0
            return Suspect(finding.reason, finding.road, finding.ranks, now_ns, finding.proof, progress_ns)
        self._age_s += elapsed_s
        if isinstance(before, Confirmed):
            return before
        if self._age_s >= self._settings.confirm_after_s:
            return Confirmed(
                finding.reason,
                finding.road,
                finding.ranks,
                before.since_ns,
                now_ns,
                finding.proof,
                progress_ns,
            )
        return Suspect(
            finding.reason, finding.road, finding.ranks, before.since_ns, finding.proof, progress_ns
        )

    def _healthy(self, before: Standing) -> Healthy:
        last_ns = max((track.moved_ns for track in self._tracks.values()), default=0)
        unknown = tuple(
            rank for rank, track in sorted(self._ranks().items()) if track.snapshot is None and not track.done
        )
        if isinstance(before, Healthy):
            return Healthy(last_ns, unknown=unknown)
        note = f"{seats_words(before.ranks)} went on after a suspicion ({before.reason}): slow, not hung"
        return Healthy(last_ns, note=note, slow=before.ranks, unknown=unknown)

    def _ranks(self) -> dict[int, Track]:
        """Without the engine's other processes, which are in no collective."""
        return {seat: track for seat, track in self._tracks.items() if isinstance(seat, int)}

    def _last_progress_ns(self, finding: _Finding) -> int:
        if finding.reason == "livelock":
            return self._futility.last_token_ns
        return max(self._tracks[rank].moved_ns for rank in finding.ranks)


def _lost_facts(rank: int, lost: LostRecord) -> tuple[str, ...]:
    event = lost.events[0]
    which = f", number {lost.number} of that graph" if lost.number else ""
    return (
        f"rank {rank}: compute stands in {lost.replay.label}{which}",
        f"rank {rank}: external event {event.name!r} has {event.records} records, {event.overtaken} of them "
        f"made before the one before was consumed (first: {event.first_overtaken}), and {event.waits} waits by "
        "completed replays; no update is queued",
    )


def _host_words(rank: int, snapshot: Snapshot) -> str:
    host = snapshot.host
    return (
        f"rank {rank}: the host waits in phase {host.phase!r} of step {host.step} and cannot queue an update"
    )
