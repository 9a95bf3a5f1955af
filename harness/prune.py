"""Removes old runs, by age and by number, and nothing else.

A run stays that is the newest pass of its kind (device and scenarios: the baseline of the next night), that is in
progress, or that somebody renamed: only folders named as ``hangrig run`` names them are looked at, so a rename is
how a run is kept for good. Not here: what a run is (``run_list.py``).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.run_list import RunEntry, runs_in
from harness.store import LATEST, point_latest

_NAME = re.compile(r"\d{8}T\d{6}Z-.+")
"""A run's folder as the store names it."""
_TRASH = ".pruned-"
"""A run under this prefix is being removed: nobody takes half a run for a run. A later prune ends the work of one
that was killed."""
_QUIET = timedelta(hours=48)
"""A run without an end whose driver is not on this machine counts as going on for so long after its last write;
agents end a run after a day, or after its time budget."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """``kept``: the runs that would have gone by age or number, each with the reason why it did not. ``failed``:
    those that could not be removed, with the reason."""

    removed: tuple[Path, ...]
    kept: tuple[tuple[Path, str], ...]
    failed: tuple[tuple[Path, str], ...]
    left: int
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "removed": [str(path) for path in self.removed],
            "kept": [{"run": str(path), "why": why} for path, why in self.kept],
            "failed": [{"run": str(path), "why": why} for path, why in self.failed],
            "left": self.left,
            "dry_run": self.dry_run,
        }

    def text(self) -> str:
        verb = "would remove" if self.dry_run else "removed"
        lines = [f"{verb} {path}" for path in self.removed]
        lines += [f"kept {path}: {why}" for path, why in self.kept]
        lines += [f"could not remove {path}: {why}" for path, why in self.failed]
        return "\n".join([*lines, f"{verb} {len(self.removed)} of {len(self.removed) + self.left} runs"])


def prune(out: Path, *, keep_days: float | None, keep: int | None, dry_run: bool = False) -> Pruned:
    """Removes runs under ``out`` that are older than ``keep_days`` or have ``keep`` newer ones. None: no limit.

    ``out``/latest points at the newest run that is left when the one that it pointed at went. What cannot be
    removed is told, and does not keep the others. Raises StoreError when the link cannot be renewed.
    """
    now = datetime.now(UTC)
    runs = [run for run in runs_in(out) if _NAME.fullmatch(run.path.name)]
    due = [run for place, run in enumerate(runs) if _is_due(run, place, now, keep_days, keep)]
    spared = {run.path: why for run in due if (why := _why_kept(run, runs, now)) is not None}
    going = [run.path for run in due if run.path not in spared]
    failed: list[tuple[Path, str]] = []
    if not dry_run:
        for path in [*going, *_leftovers(out)]:
            try:
                _remove(path)
            except OSError as error:
                failed.append((path, error.strerror or str(error)))
        _renew_latest(out)
    gone = tuple(path for path in going if path not in dict(failed))
    return Pruned(gone, tuple(spared.items()), tuple(failed), len(runs) - len(gone), dry_run)


def _is_due(run: RunEntry, place: int, now: datetime, keep_days: float | None, keep: int | None) -> bool:
    old = keep_days is not None and now - run.started > timedelta(days=keep_days)
    return old or (keep is not None and place >= keep)


def _why_kept(run: RunEntry, runs: Sequence[RunEntry], now: datetime) -> str | None:
    if run.in_progress:
        return f"it is going on (pid {run.driver.pid if run.driver else '?'})"
    if not run.finished and now.timestamp() - _last_write_s(run.path) < _QUIET.total_seconds():
        return "it has no end yet and was written to in the last two days"
    newest = next((other for other in runs if other.kind == run.kind and other.passed), None)
    if newest is run:
        return f"the newest pass of {', '.join(run.scenarios)} on {run.device}"
    return None


def _last_write_s(run: Path) -> float:
    """The newest change of the run's own files and of its trials' folders, as a timestamp."""
    paths = [run, run / "run.json", run / "trials", *(run / "trials").iterdir()]
    return max((path.lstat().st_mtime for path in paths if path.exists()), default=time.time())


def _leftovers(out: Path) -> list[Path]:
    """Of a prune that was killed."""
    return [path for path in out.glob(f"{_TRASH}*") if path.is_dir() and not path.is_symlink()]


def _remove(path: Path) -> None:
    """Raises OSError. Links inside are removed, not followed; another prune that was faster is no error."""
    trash = path if path.name.startswith(_TRASH) else path.with_name(f"{_TRASH}{path.name}")
    try:
        if trash != path:
            path.rename(trash)
        shutil.rmtree(trash)
    except FileNotFoundError:
        if trash.exists():
            raise


def _renew_latest(out: Path) -> None:
    latest = out / LATEST
    if latest.is_symlink() and not latest.exists():
        left = runs_in(out)
        if left:
            point_latest(out, left[0].path.name)
        else:
            latest.unlink()
