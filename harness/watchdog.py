"""Suspicion and confirmation: which ranks stopped, judged from samples of all ledgers. Pure: no clock here.

Two roads lead to a suspicion. *Proof*: a process is gone or stopped, or the ledgers show a collective that
cannot complete, or a replay whose record was lost while no host can make another (``lost_records.py``).
*Budget*: nothing moved for longer than this phase's own learned budget (``budgets.py``), or all wait for a
rank that does nothing. A suspicion is confirmed by a later sample in which still nothing moved and, where stacks
were taken, no host stack left its place. Being in a collective is not a hang, and a rank that others wait for
keeps its own budget while they wait. An observer that was starved itself widens all budgets for a while
(``starvation.py``); after the machine itself was suspended everything begins anew.

One watchdog judges what one observer sees: an agent its node, the driver the joined views of all agents. An
observer that does not see every rank waits at least for the ceiling, because the cause may lie where it
cannot look. Here is no capture and no cause: those are ``capture.py`` and ``diagnose.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from harness.budgets import WatchdogSettings
from harness.diagnosis_words import fold_texts
from harness.livelock import Futility
from harness.proofs import Finding, Scene, by_idleness, by_ledgers, has_work
from harness.seats import Seat, in_order, seat_words, seats_words
from harness.stacks import ProcessStacks
from harness.standing import (
    Confirmed,
    Healthy,
    RankView,
    Sample,
    Standing,
    Suspect,
)
from harness.starvation import Starvation
from harness.stillness import host_waits, left_place, waits_for_process
from harness.track import Track
from harness.waits import entered

__all__ = [
    "Confirmed", "Healthy", "RankView", "Sample", "Standing", "Suspect", "Watchdog", "WatchdogSettings",
]  # fmt: skip


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
        self.suspended_s = 0.0
        """How long the machine slept, all together."""

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
            if sample.suspended_s:
                track.rest(sample.taken_ns)
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
        if sample.suspended_s:
            self.suspended_s += sample.suspended_s
            self._futility = Futility(self._settings)
            self._standing = self._woken(self._standing, sample)
        else:
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
    def wants_processor_times(self) -> bool:
        """A rank that owes something has stood still for so long that it matters whether its processes work."""
        return any(
            not track.excused and track.still_s >= self._settings.proof_still_s
            for track in self._ranks().values()
        )

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
        computes, that of one whose host computes in one place (a native call) and by its ledger waits for nothing,
        and that of one that waits for a process of its own which does (a compiler); the next samples may confirm it
        after all. Only up to the startup budget, and in one place of a warm rank up to the ceiling: what has not
        moved its ledger by then hangs.
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
        working = [rank for rank in standing.ranks if self._computes(rank, stacks_b.get(rank))]
        patience_s = max(self._settings.startup_s, self._settings.ceiling_s)
        if max(self._tracks[rank].still_s for rank in standing.ranks) >= patience_s:
            return standing
        if moving:
            return self._doubt(
                standing, f"the host stack of {seat_words(moving[0])} left its place between the samples"
            )
        if working:
            labour = self._tracks[working[0]].labour
            return self._doubt(
                standing,
                f"the host of {seat_words(working[0])} computes: it had {labour.cpu_s:.1f} s of a processor in "
                f"{labour.seconds:.1f} s",
            )
        if served:
            return self._doubt(
                standing, f"{seat_words(served[0])} waits for a process of its own that is at work"
            )
        return standing

    def _computes(self, rank: Seat, stacks: ProcessStacks | None) -> bool:
        """Its host has the processor, not to spin in a wait; and its patience is not over."""
        track = self._tracks[rank]
        if not track.labour.at_work or self._waits_for_something(rank):
            return False
        if track.warm and track.still_s >= self._settings.ceiling_s * self._starvation.widening:
            return False
        return stacks is None or not host_waits(stacks)

    def _waits_for_something(self, rank: Seat) -> bool:
        """By its ledger: a synchronisation, a collective, or its streams, which have work left."""
        snapshot = self._tracks[rank].snapshot
        if snapshot is None:
            return False
        return has_work(snapshot) or any(entered(snapshot, state) for state in snapshot.groups.values())

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

    def _find(self) -> Finding | None:
        scene = Scene(
            tracks=self._ranks(),
            settings=self._settings,
            world=self._world,
            now_ns=self._now_ns or 0,
            widening=self._starvation.widening,
            budget_s=self.budget_s,
        )
        return (
            self._by_process()
            or by_ledgers(scene)
            or self._by_budget()
            or by_idleness(scene)
            or self._by_livelock()
        )

    def _by_process(self) -> Finding | None:
        gone = tuple(rank for rank in in_order(self._tracks) if self._tracks[rank].gone)
        if gone:
            facts = tuple(
                f"{seat_words(rank)}: its process is {self._tracks[rank].state}, and it had not ended its task"
                for rank in gone
            )
            return Finding("dead", "proof", gone, facts)
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
            return Finding("stopped", "proof", stopped, facts)
        return None

    def _by_budget(self) -> Finding | None:
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

    def _stalled(self, ranks: tuple[Seat, ...]) -> Finding:
        facts = tuple(
            f"{seat_words(rank)}: nothing moved for {self._tracks[rank].still_s:.1f} s in phase "
            f"{self._tracks[rank].phase!r}, whose budget is {self.budget_s(rank):.1f} s"
            for rank in ranks
        )
        return Finding("stalled", "budget", ranks, facts)

    def _by_livelock(self) -> Finding | None:
        fact = self._futility.finding()
        if fact is None:
            return None
        return Finding("livelock", "budget", self._futility.ranks(), (fact,))

    # From finding to standing ----------------------------------------------------------------------------

    def _settle(self, finding: Finding | None, now_ns: int, elapsed_s: float) -> Standing:
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

    def _woken(self, before: Standing, sample: Sample) -> Standing:
        """After the machine slept: nobody stood still meanwhile, and what was suspected must show once more."""
        if isinstance(before, Confirmed):
            return before
        self._age_s = 0.0
        healthy = self._healthy(Healthy(0))
        if isinstance(before, Healthy):
            return healthy
        note = (
            f"the machine was suspended for {sample.suspended_s:.1f} s while {seats_words(before.ranks)} "
            f"{'was' if len(before.ranks) == 1 else 'were'} suspected ({before.reason}): the watch begins anew"
        )
        return replace(healthy, note=note)

    def _ranks(self) -> dict[int, Track]:
        """Without the engine's other processes, which are in no collective."""
        return {seat: track for seat, track in self._tracks.items() if isinstance(seat, int)}

    def _last_progress_ns(self, finding: Finding) -> int:
        if finding.reason == "livelock":
            return self._futility.last_token_ns
        return max(self._tracks[rank].moved_ns for rank in finding.ranks)
