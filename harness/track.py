"""What a watchdog remembers of one rank from sample to sample. Pure: what follows from it is the watchdog's."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from harness.budgets import Budgets, WatchdogSettings
from harness.ledger_snapshot import Snapshot
from harness.standing import RankState, RankView, Work

_RECENT_DECISIONS = 2
"""The step at hand and the one before, whose result may still be waited for."""


_QUIET_SLACK_S = 0.1
"""Processor time that a process may get at once and still count as waiting: a dump of its stacks, a heartbeat."""
_AT_WORK = 0.2
"""Of a processor: from here on a host computes."""
_AT_WORK_WINDOW_S = 1.0


def announced(snapshot: Snapshot) -> int:
    """Tokens of the step at hand, all ranks together, as its decision or its collectives tell; 0: not known.

    A decision may come after the step's collectives: those carry its tokens as rows.
    """
    most = 0
    for record in snapshot.decisions[-_RECENT_DECISIONS:]:
        tokens = record.get("tokens")
        counts = tokens if isinstance(tokens, list | tuple) else record.get("own_tokens") or ()
        counts = counts if isinstance(counts, list | tuple) else (counts,)
        most = max(most, sum(count for count in counts if isinstance(count, int)))
    for group in snapshot.groups.values():
        for newest, collective in enumerate(reversed(group.recent)):
            if newest and collective.completed_ns is not None:
                break
            if len(collective.shape) > 1:
                most = max(most, collective.shape[0])
    return most


class Track:
    """Seconds are observed ones: those that a starved observer missed are out."""

    def __init__(self, settings: WatchdogSettings, now_ns: int) -> None:
        self.budgets = Budgets(settings)
        self.snapshot: Snapshot | None = None
        """The newest one that could be read."""
        self.state: RankState = "running"
        self.done = False
        """The driver has the rank's answer, or knows that none will come."""
        self.moved_ns = now_ns
        self.still_s = 0.0
        self.stopped_s = 0.0
        self.parked_s = 0.0
        self.quiet = Quiet(settings.idle_share)
        self.host_quiet = Quiet(settings.idle_share)
        """The same of the host thread alone: threads that want an interpreter's lock in vain use a processor."""
        self.labour = Labour()
        self._settings = settings
        self._first_step = 0
        self._marks: tuple[int, ...] = ()
        self._seen_alive = False
        self._outlived_task = False

    @property
    def phase(self) -> str:
        return self.snapshot.host.phase if self.snapshot is not None else ""

    @property
    def parked(self) -> bool:
        return self.phase == self._settings.parked_phase

    @property
    def excused(self) -> bool:
        """It owes nobody anything: its task is over, or it waits for the driver."""
        return self.done or self.parked

    @property
    def gone(self) -> bool:
        """Its process ended before its task did. The driver takes the task of a dead rank for done at once, so
        only a rank that outlived its task, or had left its last step, may end in peace."""
        ended = self.state == "dead" or (self.state == "missing" and self._seen_alive)
        return ended and not self._outlived_task and not (self.done and self.parked)

    @property
    def warm(self) -> bool:
        """It has made its first steps, in which compilers run."""
        return self.snapshot is not None and self._steps >= self._settings.warm_steps

    @property
    def _steps(self) -> int:
        return self.snapshot.host.step - self._first_step if self.snapshot is not None else 0

    def budget_s(self, *, left_by_others: bool) -> float:
        """How long the rank may stand still in its phase."""
        return self.budgets.budget_s(
            self.phase,
            warm=self.warm,
            settled=self._steps >= self._settings.settled_steps,
            left_by_others=left_by_others,
            work=announced(self.snapshot) if self.snapshot is not None else 0,
        )

    def update(self, view: RankView, now_ns: int, elapsed_s: float, unseen_s: float = 0.0) -> None:
        """Takes in one sample, ``elapsed_s`` after the one before; ``unseen_s`` more were not looked at."""
        self.state, self.done = view.state, view.task_done
        alive = view.state in ("running", "sleeping", "stopped")
        self._seen_alive = self._seen_alive or alive
        self._outlived_task = self._outlived_task or (view.task_done and alive)
        self.stopped_s = self.stopped_s + elapsed_s if view.state == "stopped" else 0.0
        if view.snapshot is None:
            self.still_s += elapsed_s
        else:
            self._read(view.snapshot, now_ns, elapsed_s, unseen_s)
        self.quiet.observe(None if self.still_s == 0.0 else view.work, elapsed_s, unseen_s)
        host = None if view.work is None else replace(view.work, tree_cpu_s=view.work.host_cpu_s)
        self.host_quiet.observe(None if self.still_s == 0.0 else host, elapsed_s, unseen_s)
        self.labour.observe(view.work, elapsed_s + unseen_s)

    def rest(self, now_ns: int) -> None:
        """What was seen so far says nothing about how long the rank stands: it begins now."""
        self.moved_ns = now_ns
        self.still_s = self.stopped_s = self.parked_s = 0.0
        self.quiet = Quiet(self._settings.idle_share)
        self.host_quiet = Quiet(self._settings.idle_share)
        self.labour = Labour()

    def _read(self, snapshot: Snapshot, now_ns: int, elapsed_s: float, unseen_s: float) -> None:
        before = self.snapshot
        marks = snapshot.watermark()
        if before is None or before.header.start_time_ticks != snapshot.header.start_time_ticks:
            self._first_step = snapshot.host.step
            self.still_s, self.moved_ns = 0.0, now_ns
        elif marks != self._marks:
            if not self.excused:
                pause_s = self.still_s + elapsed_s + unseen_s
                if unseen_s:
                    # How often it stood and went on is not known; its steps were as long as this at least.
                    pause_s /= max(1, snapshot.host.step - before.host.step)
                self.budgets.learn(before.host.phase, pause_s, announced(before))
            if (before.host.phase, before.host.step) != (snapshot.host.phase, snapshot.host.step):
                self.budgets.left.add(before.host.phase)
            self.still_s, self.moved_ns = 0.0, now_ns
        else:
            self.still_s += elapsed_s
        self.snapshot, self._marks = snapshot, marks
        self.parked_s = self.parked_s + elapsed_s if self.parked else 0.0
        if self.excused:
            self.still_s = 0.0


class Quiet:
    """For how long a rank has stood still without doing anything: its host slept whenever it was looked at, and its
    processes together got next to no processor time."""

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        """Up to the last look at the processor times."""
        self.cpu_s = 0.0
        """What its processes got meanwhile."""
        self._share = share
        self._began_cpu_s: float | None = None
        self._passed_s = 0.0
        self._since_look_s = 0.0

    def observe(self, work: Work | None, elapsed_s: float, unseen_s: float) -> None:
        """``work`` None: it moved, or nobody could see."""
        if work is None or not work.host_sleeps:
            self._begin(None)
            return
        self._passed_s += elapsed_s + unseen_s
        self._since_look_s += elapsed_s
        if work.tree_cpu_s is None:
            return
        if self._began_cpu_s is None:
            self._begin(work.tree_cpu_s)
            return
        self.cpu_s = work.tree_cpu_s - self._began_cpu_s
        self.seconds, self._since_look_s = self.seconds + self._since_look_s, 0.0
        if self.cpu_s > _QUIET_SLACK_S + self._share * self._passed_s:
            self._begin(work.tree_cpu_s)

    def _begin(self, tree_cpu_s: float | None) -> None:
        self._began_cpu_s = tree_cpu_s
        self.seconds = self.cpu_s = self._passed_s = self._since_look_s = 0.0


class Labour:
    """Whether a host thread computed in the last second: it got processor time, or wanted some most of the time."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, bool]] = deque()
        """Of each sample the seconds since the one before, the thread's processor time, whether it was awake."""

    def observe(self, work: Work | None, passed_s: float) -> None:
        if work is None:
            self._recent.clear()
            return
        self._recent.append((passed_s, work.host_cpu_s, not work.host_sleeps))
        while self.seconds > _AT_WORK_WINDOW_S and len(self._recent) > 2:
            self._recent.popleft()

    @property
    def seconds(self) -> float:
        """How far back it was seen."""
        return sum(seconds for seconds, _, _ in list(self._recent)[1:])

    @property
    def cpu_s(self) -> float:
        """Processor time of the thread in those seconds."""
        return self._recent[-1][1] - self._recent[0][1] if self._recent else 0.0

    @property
    def at_work(self) -> bool:
        if len(self._recent) < 2:
            return False
        awake = sum(one for _, _, one in self._recent)
        return self.cpu_s > _AT_WORK * self.seconds or 2 * awake > len(self._recent)
