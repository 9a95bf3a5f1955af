"""The runs under a folder, newest first: what each one is in a few words, and which may serve as a baseline.

Read from run.json and report.json alone, so that years of nights are listed quickly. A folder that is no run is
not in the list, whatever its name. Not here: a run's contents (``stored.py``), removing runs (``prune.py``),
holding one against another (``reports.baseline``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.process_control import ProcessId, alive
from harness.stored import SCHEMA

COMPARED_TABLES = (
    "target", "model", "engine", "workload", "client", "sim", "jitter", "toggles", "faults",
)  # fmt: skip
"""Tables of a scenario that make its trials what they are. Another expectation, number of trials or watchdog
leaves trials comparable."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One stored run. ``verdict`` None: it has no report, or a damaged one."""

    path: Path
    started: datetime
    device: str
    arms: Mapping[tuple[str, str], str]
    """Definition (see ``definitions``) of each arm that it planned to run, by scenario and arm string."""
    verdict: str | None
    finished: bool
    driver: ProcessId | None
    whole: bool
    """Made by ``hangrig run``: a rerun has one trial of an arm, and a corpus is scored otherwise."""

    @property
    def scenarios(self) -> tuple[str, ...]:
        return tuple(sorted({scenario for scenario, _ in self.arms}))

    @property
    def kind(self) -> tuple[str, tuple[str, ...]]:
        """Device and scenarios by name: runs of one kind are nights of the same job."""
        return self.device, self.scenarios

    @property
    def passed(self) -> bool:
        """It may be the baseline of a later run of its kind."""
        return self.verdict == "pass" and self.finished and self.whole

    @property
    def in_progress(self) -> bool:
        """Its driver lives. One on another machine that shares the folder cannot be seen from here."""
        return not self.finished and self.driver is not None and alive(self.driver)


def runs_in(out: Path) -> tuple[RunEntry, ...]:
    """Newest first. Links, files and folders that are no run are left out; so is a folder that does not exist."""
    if not out.is_dir():
        return ()
    found = [entry for path in out.iterdir() if (entry := read_entry(path)) is not None]
    return tuple(sorted(found, key=lambda entry: (entry.started, entry.path.name), reverse=True))


def read_entry(path: Path) -> RunEntry | None:
    """None for what is no run directory: a link, or a folder whose run.json is not hangrig's."""
    if path.is_symlink() or not (path / "trials").is_dir():
        return None
    document = _object(path / "run.json")
    if document is None or document.get("schema") != SCHEMA or "argv" not in document:
        return None
    report = _object(path / "report.json") or {}
    try:
        return RunEntry(
            path=path,
            started=datetime.fromisoformat(document["started_utc"]),
            device=str(document["device"]),
            arms=definitions(document),
            verdict=report.get("verdict"),
            finished=document.get("finished_utc") is not None,
            driver=None if document.get("driver") is None else ProcessId(**document["driver"]),
            whole="corpus" not in document and document["argv"][:1] != ["rerun"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def definitions(document: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """What each arm of a run.json is, as canonical JSON text, by scenario name and arm string.

    Two arms with equal text are trials of the same thing: the same requests on the same model, with the toggles
    resolved alike. Arms that were not run because they resolve to another one are left out. Raises KeyError,
    TypeError or ValueError for a damaged document.
    """
    found = {}
    for scenario in document["scenarios"]:
        table = json.loads(scenario["text"])
        own = {name: table.get(name) for name in COMPARED_TABLES}
        if own["target"] is not None:  # the same engine may lie elsewhere; its version is compared as such
            own["target"] = {key: value for key, value in own["target"].items() if key != "python"}
        for arm in scenario["arms"]:
            if arm.get("same_as") is None:
                toggles = {name: one["resolved"] for name, one in arm["resolved"].items()}
                text = json.dumps({**own, "resolved": toggles}, sort_keys=True)
                found[scenario["name"], arm["arm_string"]] = text
    return found


def last_pass(runs: Sequence[RunEntry], device: str, arms: Mapping[tuple[str, str], str]) -> RunEntry | None:
    """The newest run that passed, on the same device, with the same scenarios by name and at least one arm that is
    still the same. ``runs`` are newest first; ``arms`` as ``definitions`` gives them."""
    scenarios = tuple(sorted({scenario for scenario, _ in arms}))
    return next(
        (
            entry
            for entry in runs
            if entry.passed and entry.kind == (device, scenarios) and entry.arms.items() & arms.items()
        ),
        None,
    )


def _object(path: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None
