"""The agents as a controller needs them: begin, look, end. All of it belongs to one run.

Not here: what agents do (``agent.py``, ``trial_watch.py``) and how they are reached (``agents.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.agent_files import AgentTrial
from harness.agents import Agents, AgentStatus, watched
from harness.controller import WatchView
from harness.target import RankProcess, TrialSpec
from harness.watchdog import WatchdogSettings


class AgentWatch:
    """One trial as the agents watch it."""

    def __init__(self, agents: Agents, settings: WatchdogSettings, evidence: Path) -> None:
        self._agents = agents
        self._settings = settings
        self._evidence = evidence
        self._notes: tuple[str, ...] = ()

    def begin(self, trial: TrialSpec, ranks: Sequence[RankProcess]) -> None:
        placement: Mapping[int, str] = {entry.rank: entry.node for entry in ranks}
        self._agents.begin_trial(
            AgentTrial(
                id=trial.id,
                world=len(ranks),
                ranks=tuple(watched(entry, Path(trial.ledger_paths[entry.rank])) for entry in ranks),
                evidence=self._evidence,
                started_ns=time.monotonic_ns(),
                watchdog=self._settings,
            ),
            placement,
        )

    def mark_done(self, rank: int) -> None:
        self._agents.mark_done(rank)

    def capture_now(self, reason: str) -> None:
        self._agents.capture_now(reason)

    def look(self) -> WatchView:
        views = self._agents.poll()
        problems = [f"{view.node}: {view.problem}" for view in views if view.problem is not None]
        return WatchView(
            captured=self._agents.captured(views),
            suspect=next((text for view in views if (text := _suspicion(view)) is not None), None),
            problem="; ".join(problems) or None,
            notes=tuple(note for view in views if view.status is not None for note in view.status.notes),
        )

    def end(self) -> None:
        self._agents.end_trial()


def _suspicion(view: AgentStatus) -> str | None:
    status = view.status
    if status is None or status.state not in ("suspect", "capturing"):
        return None
    return f"{status.reason} (ranks {', '.join(map(str, status.ranks)) or '?'})"
