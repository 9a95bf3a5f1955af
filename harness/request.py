"""What a command asks of a run, and what comes back: the seam between `harness.cli` and `harness.run`.

Here: two records without behaviour. Not here: parsing of options and running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from harness.scenario_model import Scenario

OnHang = Literal["end", "hold"]
LAST_PASS = "last-pass"


class BadRequest(ValueError):
    """A request that cannot be run, found before anything starts: a model directory that lacks a file, a rerun
    of a trial that the run never planned. The message says what to do; the exit status is 2."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One `hangrig run`. Scenarios are valid and have their settings applied."""

    scenarios: tuple[Scenario, ...]
    device: str = "sim"
    seed: int = 0
    """Of each arm's first trial; trial i has ``seed + i``."""
    trials: int | None = None
    """Per arm; None takes each scenario's own count."""
    out: Path = Path("runs")
    settings: tuple[str, ...] = ()
    """The ``--set`` options as they were given, for the record."""
    on_hang: OnHang = "end"
    hold_s: float | None = None
    """How long ranks are kept for a debugger after a capture; None is until they are ended by hand."""
    ray_address: str | None = None
    allow_skip: bool = False
    json: bool = False
    """Nothing but the report may go to standard output."""
    time_budget_s: float | None = None
    stop: str | None = None
    """``sprt`` or ``sprt:TOGGLE`` (`harness.sequential`): ends the run when its questions are settled."""
    fault_files: tuple[Path, ...] = ()
    """Python files that register faults; they have been loaded here, and every rank loads them too."""
    known_issues: Mapping[str, Any] | None = None
    """The record of the file of known issues (`harness.known_issues`)."""
    baseline: str | None = None
    """A run's directory, or LAST_PASS: the newest run under ``out`` that this one can be held against."""
    argv: tuple[str, ...] = ()
    """The command line without the program's name."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run, or of a report or check of a stored one. ``report`` is report.json."""

    exit: int
    path: Path
    report: dict[str, Any] = field(default_factory=dict)
    show: Callable[[IO[str]], None] | None = None
    """Writes the result for a person to a stream."""
