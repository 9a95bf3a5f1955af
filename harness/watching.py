"""The agents as a controller needs them: begin, look, end. All of it belongs to one run.

Not here: what agents do (``agent.py``, ``trial_watch.py``) and how they are reached (``agents.py``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.agent_files import AgentTrial
from harness.agents import Agents, AgentStatus, watched, watched_other
from harness.controller import WatchView
from harness.rank_environment import Written
from harness.seats import Seat, seats_words
from harness.target import OtherProcess, RankProcess, TrialSpec
from harness.watchdog import WatchdogSettings


class AgentWatch:
    """One trial as the agents watch it."""

    def __init__(
        self, agents: Agents, settings: WatchdogSettings, evidence: Path, device: Written | None = None
    ) -> None:
        self._agents = agents
        self._settings = settings
        self._evidence = evidence
        self._device = device
        self._notes: tuple[str, ...] = ()

    def begin(self, trial: TrialSpec, ranks: Sequence[RankProcess], others: Sequence[OtherProcess]) -> None:
        placement: dict[Seat, str] = {entry.rank: entry.node for entry in ranks}
        placement |= {entry.name: entry.node for entry in others}
        self._agents.begin_trial(
            AgentTrial(
                id=trial.id,
                world=len(ranks),
                ranks=(
                    *(watched(entry, _ledger(trial, entry)) for entry in ranks),
                    *(watched_other(entry) for entry in others),
                ),
                evidence=self._evidence,
                started_ns=time.monotonic_ns(),
                watchdog=self._settings,
                device=self._device,
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
    return f"{status.reason} ({seats_words(status.ranks) or 'ranks ?'})"


def _ledger(trial: TrialSpec, process: RankProcess) -> Path | None:
    """A rank's ledger of this trial; of an engine without one, none."""
    path = trial.ledger_paths.get(process.rank)
    return None if path is None else Path(path)
