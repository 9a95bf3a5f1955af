"""A cluster of ours as what has to be ended with it: its processes, found by their mark, and its folder.

Used by the driver at an orderly stop and by the agent when the driver is gone; so nothing here needs Ray.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness import process_control
from harness.process_control import ProcessId


class GuardedCluster(BaseModel):
    """``mark``: name and value of the environment variable that all its processes carry."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mark: tuple[str, str]
    folder: Path
    """Its temporary directory, removed with it."""

    def processes(self) -> list[ProcessId]:
        """Every living process of the cluster, by mark and by descent; never this one."""
        found = set(process_control.marked_with(*self.mark))
        found.update(process_control.children_of(*(process.pid for process in found)))
        return sorted(found - {process_control.myself()})

    def end(self, deadline_s: float) -> list[ProcessId]:
        """Kills all processes of the cluster and removes its folder. Returns what lives at the deadline.

        At once and without asking: Ray's daemons have nothing to save, and ranks may be hung. Repeated
        until a look finds none, because a raylet may start a worker while it is being ended.
        """
        deadline = time.monotonic() + deadline_s
        left = self.processes()
        while left:
            remaining_s = max(0.0, deadline - time.monotonic())
            process_control.end(left, remaining_s, grace_s=0.0)
            left = self.processes()
            if remaining_s <= 0:
                break
        shutil.rmtree(self.folder, ignore_errors=True)
        return left
