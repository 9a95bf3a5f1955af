"""The built-in engine as a target: one ``RankActor`` a rank, driven trial by trial.

Not here: what a rank does (``builtin_rank.py``) and how rank processes start and end (the harness's pool).
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.target import (
    EngineSpec,
    LaunchSpec,
    Needs,
    OtherProcess,
    Progress,
    RankPool,
    RankProcess,
    TargetError,
    TrialSpec,
)

_RAY_UNITS = 10_000
"""Ray counts a resource in these parts of one."""
_RANK_CLASS = "serving.targets.builtin_rank:RankActor"


def _groups(spec: EngineSpec) -> int:
    """Attention groups; where nothing is said every rank is one."""
    return spec.target.get("dp") or spec.world


class BuiltinTarget:
    """See `harness.target.Target`. Ranks that share a machine also share the files under ``scratch``."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        self._processes: tuple[RankProcess, ...] = ()
        self._shared: Path | None = None

    def validate(self, spec: EngineSpec, workload: Mapping[str, Any], seeds: Sequence[int]) -> None:
        """Reads the model's config and the headers of its files, no tensor, and makes the requests."""
        from serving.targets.builtin_check import problem  # torch: only where there is something to check

        found = problem(
            spec.model,
            workload,
            seeds,
            world=spec.world,
            dp=_groups(spec),
            on_host=spec.device == "sim",
        )
        if found is not None:
            raise TargetError(found)

    def absent(self, spec: EngineSpec) -> str | None:
        """It is a part of hangrig."""
        return None

    def fixed(self, spec: EngineSpec) -> Mapping[str, Any]:
        """The weights, and which heads a rank has; toggles and the engine's settings are new with every trial."""
        return {**spec.model, "dp": _groups(spec)}

    def commands(self, spec: EngineSpec) -> Sequence[str]:
        return ()

    def needs(self, spec: EngineSpec) -> Needs:
        """Ranks that share a device reserve equal parts of it."""
        share = math.floor(_RAY_UNITS / spec.ranks_per_device) / _RAY_UNITS
        return Needs(processes=spec.world, devices=share, see_all=True)

    def launch(self, spec: LaunchSpec, pool: RankPool) -> Sequence[RankProcess]:
        """Starts all ranks."""
        shared = spec.scratch / f"group-{secrets.token_hex(4)}"
        shared.mkdir(parents=True)
        self._processes = tuple(
            pool.start(
                _RANK_CLASS,
                [
                    {
                        "rank": rank,
                        "world": spec.world,
                        "device": spec.start.device,
                        "model": dict(spec.start.model),
                        "rendezvous": f"file://{shared / 'rendezvous'}",
                        "shared": str(shared),
                        "timeout_s": spec.timeout_s,
                        "dp": _groups(spec.start),
                        "ranks_per_device": spec.start.ranks_per_device,
                    }
                    for rank in range(spec.world)
                ],
            )
        )
        self._pool = pool
        self._shared = shared
        return self._processes

    def drive(self, trial: TrialSpec) -> None:
        self._running_pool().call("run_trial", [[trial]] * len(self._processes))

    def progress(self) -> Progress:
        done, failed, died = self._running_pool().poll()
        return Progress(done=done, failed=failed, died=died)

    def processes(self) -> Sequence[RankProcess]:
        return self._processes

    def others(self) -> Sequence[OtherProcess]:
        return ()

    def testimony(self, deadline_s: float) -> Mapping[str, Any]:
        """None of its own: everything it says is in ledgers, decisions and tokens."""
        return {}

    def linger(self, deadline_s: float) -> bool:
        return True

    def stop(self, deadline_s: float) -> None:
        """The ranks have nothing to save: the pool ends them. Removes the files they shared."""
        if self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)
        self._pool = self._shared = None
        self._processes = ()

    def _running_pool(self) -> RankPool:
        if self._pool is None:
            raise TargetError("the built-in engine is not running; call launch first")
        return self._pool
