"""Is an engine without ledgers stalled? Judged from looks at its processes, stacks, metrics and health. Pure.

Four signs, the surest first: a process is gone or stopped; requests are in the engine (by its metrics) or a
question after its health is out, and nothing comes back while no rank works on a batch; processes that wait for
others stand at one place, use no processor, and none of those they can wait for works; a process is held up in its
own doing. A rank in a collective is no sign, an idle engine is well, and one that loads or compiles has longer.

What cannot be told is said (`Opinion.missing`). Who is to blame is ``diagnosis_stacks.py``.
"""

from __future__ import annotations

from dataclasses import replace

from harness.seats import Seat, seat_words, seats_words
from harness.stack_places import HELD, WAITING, Doing
from harness.watch.looks import Look, Opinion, SeatLook, Standing, Track, WatchSettings
from harness.watch.metrics import Traffic

__all__ = ["Judge", "Look", "Opinion", "SeatLook", "WatchSettings", "judge_once"]

_SERVICES = ("engine_core", "controller", "coordinator", "detokenizer")
_FIRST_PAUSE_S = 1.0
_GROWTH = 1.6
_LONGEST_PAUSE_S = 10.0
_SLACK_S = 0.5


class Judge:
    """Feed it every look, in order; looks with stacks where it wishes them."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._tracks: dict[Seat, Track] = {}
        self._traffic: Traffic | None = None
        self._progress_s: float | None = None
        self._moved_s: float | None = None
        """When metrics moved or a good health answer was asked for: progress, and not only nothing owed."""
        self._missing_since_s: float | None = None
        self._marks_moved = False
        self._told = False
        """Some source has said whether the engine has anything to do."""
        self._pause_s = _FIRST_PAUSE_S
        self._looked_s: float | None = None

    def observe(self, look: Look) -> Opinion:
        now_s = look.taken_s
        self._progress_s = now_s if self._progress_s is None else self._progress_s
        for seat in look.seats:
            track = self._tracks.setdefault(seat.seat, Track(seat, now_s))
            track.update(seat, now_s)
        self._note_progress(look)
        opinion = (
            self._processes(look)
            or self._waited_for(look)
            or (None if self._moved_lately(now_s) else self._frozen() or self._held())
            or self._otherwise(now_s)
        )
        return replace(opinion, want_stacks=self._wants(opinion, look))

    def conclude(self, look: Look, opinion: Opinion) -> Opinion:
        """When the time is up: a long wait is a finding, a short one is not known to be one."""
        if opinion.standing != "suspect":
            return opinion
        quiet_s = self._quiet_s(look.taken_s)
        if opinion.reason == "slow" and quiet_s >= self._settings.slow_s:
            return replace(opinion, standing="stalled")
        lack = (
            f"a longer look: this has lasted {quiet_s:.1f} s, and {self._patience_s():g} s would be a finding"
        )
        return replace(opinion, standing="unsure", missing=(*opinion.missing, lack))

    def momentary(self, look: Look) -> Opinion:
        """What the last two looks, a moment apart, can say. Standing still for a moment proves nothing."""
        ranks = [track for track in self._tracks.values() if track.is_rank] or list(self._tracks.values())
        services = [track for track in self._tracks.values() if track.look.role in _SERVICES]
        odd = {
            seat: track.doing
            for seat, track in self._tracks.items()
            if track.doing is not None and not self._calm(track)
            and (track in ranks or (track in services and track.doing.kind not in WAITING))
        }  # fmt: skip
        unseen = [seat for seat, track in self._tracks.items() if track.doing is None and track in ranks]
        going = self._marks_moved or any(track.works for track in ranks)
        if not unseen and (not odd or (going and all(found.kind in WAITING for found in odd.values()))):
            return Opinion("well", facts=("every rank is idle, works, or waits for one that works",))
        missing = [f"stacks of {seats_words(unseen)}"] if unseen else []
        if odd:
            missing.append(
                "whether it lasts: two samples half a second apart cannot tell; watch with --timeout"
            )
        facts = tuple(f"{seat_words(seat)}: {found.words()}" for seat, found in odd.items())
        return Opinion("unsure", facts=facts, missing=tuple(missing))

    def stood_s(self, seat: Seat) -> float:
        """For how long this process was seen at one place; 0 where it moves or was not looked at."""
        track = self._tracks.get(seat)
        return 0.0 if track is None else track.stood_s

    @property
    def progress_s(self) -> float:
        """When the engine last gave a sign of progress, or the first look; 0 before that."""
        return self._progress_s or 0.0

    def _note_progress(self, look: Look) -> None:
        traffic, before = look.traffic, self._traffic
        self._marks_moved = False
        if traffic is not None:
            self._told = self._told or traffic.owed is not None
            self._marks_moved = before is not None and traffic.marks != before.marks
            if self._marks_moved:
                self._moved_s = look.taken_s
            if self._marks_moved or traffic.owed is False:
                self._progress_s = look.taken_s
            self._traffic = traffic
        if look.generates and look.well_s is not None and self._progress_s is not None:
            self._told = True
            self._progress_s = max(self._progress_s, look.well_s)
            self._moved_s = max(self._moved_s or 0.0, look.well_s)

    def _quiet_s(self, now_s: float) -> float:
        return 0.0 if self._progress_s is None else now_s - self._progress_s

    def _moved_lately(self, now_s: float) -> bool:
        return self._moved_s is not None and now_s - self._moved_s < self._settings.stall_s

    def _calm(self, track: Track) -> bool:
        """Idle, at work, or in its loop's collective while its peers pause in theirs."""
        others = [other for other in self._tracks.values() if other.is_rank and other is not track]
        between = track.doing is not None and track.doing.between and bool(others)
        return track.idle or track.works or (between and all(other.idle for other in others))

    def _patience_s(self) -> float:
        starting = any(track.doing is not None and track.doing.starting for track in self._tracks.values())
        return self._settings.starting_s if starting else self._settings.stall_s

    def _wants(self, opinion: Opinion, look: Look) -> bool:
        """Stacks, when nothing else says that the engine moves; less often while they show that it does."""
        now_s = look.taken_s
        if any(seat.stacks is not None for seat in look.seats):
            calm = opinion.standing in ("well", "unsure")
            self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_PAUSE_S) if calm else _FIRST_PAUSE_S
            self._looked_s = now_s
        if opinion.standing == "stalled":
            return False
        pause_s = self._pause_s
        if self._told and self._quiet_s(now_s) < self._settings.quiet_s:
            # What waits in front of the engine is not in its metrics: even an idle one is looked at now and then.
            if self._marks_moved:
                return False
            pause_s = _LONGEST_PAUSE_S
        return self._looked_s is None or now_s - self._looked_s >= pause_s - _SLACK_S

    # The signs -------------------------------------------------------------------------------------------

    def _processes(self, look: Look) -> Opinion | None:
        now_s = look.taken_s
        dead = [seat for seat, track in self._tracks.items() if track.look.state == "dead"]
        if dead:
            return Opinion("stalled", "dead", (f"{seats_words(dead)}: gone",))
        stopped = {seat: track for seat, track in self._tracks.items() if track.look.state == "stopped"}
        if stopped:
            longest_s = max(now_s - track.since_s for track in stopped.values())
            fact = f"{seats_words(stopped)}: stopped for {longest_s:.1f} s"
            return Opinion(self._after(longest_s, self._settings.stopped_s), "stopped", (fact,))
        if not look.missing_ranks:
            self._missing_since_s = None
            return None
        self._missing_since_s = now_s if self._missing_since_s is None else self._missing_since_s
        gone_s = now_s - self._missing_since_s
        fact = f"{seats_words(look.missing_ranks)}: no such process, although the server was asked for it"
        return Opinion(self._after(gone_s, self._patience_s()), "missing", (fact,))

    def _waited_for(self, look: Look) -> Opinion | None:
        """Somebody waits for an answer of the engine, and none comes."""
        now_s, settings = look.taken_s, self._settings
        quiet_s = self._quiet_s(now_s)
        facts = self._waiting_facts(look, quiet_s)
        if not facts or quiet_s < settings.quiet_s:
            return None
        works = [seat for seat, track in self._tracks.items() if track.works and track.is_rank]
        if works:
            return Opinion("suspect", "slow", (*facts, f"{seats_words(works)} at work"))
        stands = any(
            not track.idle and track.stood_s >= settings.quiet_s / 2 for track in self._tracks.values()
        )
        reason = "tokens" if look.traffic is not None and look.traffic.owed else "health"
        patience_s = self._patience_s() if stands else max(settings.slow_s, self._patience_s())
        return Opinion(self._after(quiet_s, patience_s), reason, facts)

    def _waiting_facts(self, look: Look, quiet_s: float) -> tuple[str, ...]:
        facts = []
        if look.traffic is not None and look.traffic.owed:
            facts.append(f"{look.traffic.words()}, and nothing moved in the metrics for {quiet_s:.1f} s")
        if look.generates and look.asked_s >= self._settings.quiet_s:
            facts.append(f"the question after the server's health is out for {look.asked_s:.1f} s")
        elif look.generates and look.health == "unwell":
            facts.append("the server says that it is not well")
        return tuple(facts)

    def _frozen(self) -> Opinion | None:
        """Whether anybody waits is not known; the processes do: all that could work wait for each other."""
        ranks = {seat: track for seat, track in self._tracks.items() if track.is_rank}
        waiting: dict[Seat, Doing] = {}
        for seat, track in ranks.items():
            if track.doing is None or track.doing.kind not in WAITING or track.moves or self._calm(track):
                continue
            waiting[seat] = track.doing
        if not waiting or any(track.works for track in ranks.values()):
            return None
        stood_s = min(ranks[seat].stood_s for seat in waiting)
        if stood_s == 0.0:
            return None  # seen there once
        facts = (
            f"{seats_words(waiting)} at one place for {stood_s:.1f} s, and no rank works",
            *(f"{seat_words(seat)}: {found.words()}" for seat, found in waiting.items()),
        )
        if any(ranks[seat].burns for seat in waiting):
            lack = "whether ranks spin in a hang or were met at one place by chance; metrics would tell"
            return Opinion("unsure", "frozen", facts, (lack,))
        if len(ranks) == 1:
            return Opinion("unsure", "frozen", facts, ("the peers for which the only rank here waits",))
        return Opinion(self._after(stood_s, self._patience_s()), "frozen", facts)

    def _held(self) -> Opinion | None:
        held = {
            seat: (track, track.doing)
            for seat, track in self._tracks.items()
            if (track.is_rank or track.look.role in _SERVICES)
            and track.doing is not None and track.doing.kind in HELD and not (track.moves or track.burns)
        }  # fmt: skip
        if not held:
            return None
        stood_s = max(track.stood_s for track, _ in held.values())
        if stood_s == 0.0:
            return None
        facts = tuple(
            f"{seat_words(seat)}: {found.words()}, for {track.stood_s:.1f} s"
            for seat, (track, found) in held.items()
        )
        if not self._settings.engine:
            return Opinion("unsure", "held", facts, ("whether anybody waits for it",))
        return Opinion(self._after(stood_s, self._patience_s()), "held", facts)

    def _otherwise(self, now_s: float) -> Opinion:
        """Nothing is wrong as far as can be seen; how far that is."""
        if self._told and self._quiet_s(now_s) < self._settings.stall_s:
            return Opinion("well")
        ranks = [track for track in self._tracks.values() if track.is_rank] or list(self._tracks.values())
        if ranks and all(self._calm(track) for track in ranks):
            return Opinion("well", facts=("every rank is idle or works",))
        unseen = [seat for seat, track in self._tracks.items() if track.doing is None]
        missing = [f"stacks of {seats_words(unseen)}"] if unseen else []
        if not self._told:
            missing.append("metrics, or a health answer, that say whether requests are in the engine")
        return Opinion("unsure", missing=tuple(missing))

    def _after(self, lasted_s: float, patience_s: float) -> Standing:
        return "stalled" if lasted_s >= patience_s else "suspect"


def judge_once(before: Look, after: Look, settings: WatchSettings) -> Opinion:
    """What two looks with stacks, a moment apart, say of an engine."""
    judge = Judge(replace(settings, stopped_s=0.0, stall_s=0.0) if _gone(before, after) else settings)
    judge.observe(before)
    opinion = judge.observe(after)
    sure = opinion.reason in ("dead", "stopped", "missing") and opinion.standing == "stalled"
    return opinion if sure else judge.momentary(after)


def _gone(before: Look, after: Look) -> bool:
    """A process is gone, stopped in both looks, or was never there: no time has to pass to know that."""
    earlier = {seat.seat: seat.state for seat in before.seats}
    dead = any(seat.state == "dead" for seat in after.seats)
    stopped = any(seat.state == earlier.get(seat.seat) == "stopped" for seat in after.seats)
    return dead or stopped or bool(before.missing_ranks and after.missing_ranks)
