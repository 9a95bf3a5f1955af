"""Many nights side by side: each arm's hangs and latencies over time, steps in them, signatures from first to last.

A *line* is one arm of one scenario on one device, as long as it is defined alike
(``harness.run_list.definitions``): an arm that was changed goes on as another line. A *step* is a night from which
on a line's figures are others: of all nights that have enough others on both sides the one with the smallest p is
looked at, by Fisher's exact test for hangs and the Mann-Whitney test for medians of latencies (exact, of few
nights), multiplied by the number of nights, lines and figures looked at (Bonferroni), so that at most 5 % of pages
have any step by chance. A latency must also have changed by the practical threshold. Read are run.json and
report.json. Pure but for the reading; the page is ``history_page.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

from scipy import stats

from harness.rates import CONFIDENCE, Rate, more_often, rate
from harness.run_list import RunEntry, runs_in
from reports import fields
from reports.fields import Document
from reports.run_changes import changes
from reports.statistics import PRACTICAL_THRESHOLD
from reports.words import microseconds

SCHEMA = 1
LATENCIES = ("step", "next_token_copy", "bitmask_copy", "token_count_copy")
LEAST_NIGHTS = 4
"""On each side of a step."""
Figure: TypeAlias = str
StepAnswer: TypeAlias = Literal["step", "none", "too few nights"]


class HistoryError(ValueError):
    """There is nothing to show. The message says where was looked."""


@dataclass(frozen=True, slots=True)
class Night:
    """One run. ``why``: of one that shows nothing (skipped, broken, going on), what it is."""

    name: str
    started: str
    device: str
    simulation: bool
    verdict: str
    why: str
    changed: tuple[str, ...]
    """Versions, drivers and machine that are others than in the run before on the same device."""


@dataclass(frozen=True, slots=True)
class Point:
    """One arm in one night. ``latency_us``: medians by path."""

    night: str
    hangs: Rate
    corrupt: Rate
    latency_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """``night`` is the first one after the step. ``p`` is corrected for all that was looked at."""

    figure: Figure
    answer: StepAnswer
    night: str | None = None
    before: float | None = None
    after: float | None = None
    p: float | None = None

    def words(self) -> str:
        if self.answer != "step" or self.before is None or self.after is None:
            return f"{self.figure}: {'no step' if self.answer == 'none' else self.answer}"
        if self.figure == "hangs":
            change = f"from {self.before * 100:.3g} % to {self.after * 100:.3g} %"
        else:
            change = f"from {microseconds(self.before)} to {microseconds(self.after)}"
            change += f" ({self.after / self.before:.2f} times)"
        return f"{self.figure}: {change} with {self.night} (p = {self.p:.2g}, corrected)"


@dataclass(frozen=True, slots=True)
class Line:
    device: str
    scenario: str
    arm: str
    definition: int
    """Which one of the arm's definitions, from 1."""
    points: tuple[Point, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """One signature over all nights on one device."""

    device: str
    signature: str
    mechanism: str
    first: str
    last: str
    nights: int
    trials: int
    status: str


@dataclass(frozen=True, slots=True)
class History:
    """Oldest first everywhere."""

    folder: str
    nights: tuple[Night, ...]
    lines: tuple[Line, ...]
    signatures: tuple[Seen, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "folder": self.folder,
            "nights": [
                {
                    "run": night.name, "started": night.started, "device": night.device,
                    "simulation": night.simulation, "verdict": night.verdict, "why": night.why,
                    "changed": list(night.changed),
                }
                for night in self.nights
            ],
            "lines": [
                {
                    "device": line.device, "scenario": line.scenario, "arm": line.arm,
                    "definition": line.definition,
                    "points": [
                        {
                            "run": point.night, "hangs": point.hangs.to_json(), "corrupt": point.corrupt.to_json(),
                            "latency_us": dict(point.latency_us),
                        }
                        for point in line.points
                    ],
                    "steps": [
                        {
                            "figure": step.figure, "answer": step.answer, "run": step.night, "before": step.before,
                            "after": step.after, "p": step.p,
                        }
                        for step in line.steps
                    ],
                }
                for line in self.lines
            ],
            "signatures": [
                {
                    "device": one.device, "signature": one.signature, "mechanism": one.mechanism,
                    "first": one.first, "last": one.last, "nights": one.nights, "trials": one.trials,
                    "status": one.status,
                }
                for one in self.signatures
            ],
        }  # fmt: skip


def read(folder: Path) -> History:
    """All runs under ``folder``. Raises HistoryError when there is none."""
    entries = list(reversed([entry for entry in runs_in(folder) if entry.whole]))
    if not entries:
        raise HistoryError(
            f"{folder}: holds no run; give the folder that hangrig run writes into (--out, ./runs)"
        )
    reports = [_object(entry.path / "report.json") for entry in entries]
    return History(
        folder=str(folder),
        nights=tuple(_nights(entries, reports)),
        lines=_lines(entries, reports),
        signatures=_signatures(entries, reports),
    )


def _object(path: Path) -> Document:
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


# Nights -----------------------------------------------------------------------------------------------------


def _nights(entries: Sequence[RunEntry], reports: Sequence[Document]) -> Iterator[Night]:
    before: dict[str, Document] = {}
    for entry, report in zip(entries, reports, strict=True):
        run = _object(entry.path / "run.json")
        earlier = before.get(entry.device)
        told = () if earlier is None else tuple(
            f"{one.what}: {one.before} then, {one.after} now" for one in changes(earlier, run)
        )  # fmt: skip
        before[entry.device] = run
        yield Night(
            name=entry.path.name,
            started=entry.started.isoformat(timespec="minutes"),
            device=entry.device,
            simulation=fields.flag(run, "simulation"),
            verdict=entry.verdict or "unknown",
            why=_why(entry, report),
            changed=told,
        )


def _why(entry: RunEntry, report: Document) -> str:
    if entry.in_progress:
        return "it is going on"
    if not report:
        return "it has no readable report.json (hangrig report writes it)"
    return "" if entry.verdict == "pass" else fields.text(report, "headline")


# Lines ------------------------------------------------------------------------------------------------------


def _lines(entries: Sequence[RunEntry], reports: Sequence[Document]) -> tuple[Line, ...]:
    points: dict[tuple[str, str, str], dict[str, list[Point]]] = {}
    for entry, report in zip(entries, reports, strict=True):
        for scenario in fields.rows(report, "scenarios"):
            for arm in fields.rows(scenario, "arms"):
                name = (
                    ",".join(f"{key}={value}" for key, value in sorted(fields.table(arm, "arm").items()))
                    or "default"
                )
                definition = entry.arms.get((fields.text(scenario, "name"), name))
                hangs = _rate(arm, "hangs")
                if definition is None or hangs is None or not hangs.n:
                    continue
                key = (entry.device, fields.text(scenario, "name"), name)
                points.setdefault(key, {}).setdefault(definition, []).append(
                    Point(entry.path.name, hangs, _rate(arm, "corrupt") or rate(0, 0), _medians(arm))
                )
    looked = sum(
        _places(len(series)) * (1 + len(_paths(series)))
        for definitions in points.values()
        for series in definitions.values()
    )
    return tuple(
        Line(*key, number, tuple(series), _steps(series, max(looked, 1)))
        for key, definitions in sorted(points.items())
        for number, series in enumerate(definitions.values(), start=1)
    )


def _rate(arm: Document, key: str) -> Rate | None:
    table = fields.table(arm, key)
    k, n = fields.optional_integer(table, "k"), fields.optional_integer(table, "n")
    return None if k is None or n is None or not 0 <= k <= n else rate(k, n)


def _medians(arm: Document) -> dict[str, float]:
    table = fields.table(arm, "latency_us")
    found = {path: fields.number(fields.table(table, path), "p50") for path in LATENCIES if path in table}
    return {path: value for path, value in found.items() if value is not None and value > 0.0}


def _paths(series: Sequence[Point]) -> list[str]:
    return [
        path for path in LATENCIES if sum(path in point.latency_us for point in series) >= 2 * LEAST_NIGHTS
    ]


def _places(nights: int) -> int:
    return max(0, nights - 2 * LEAST_NIGHTS + 1)


def _steps(series: Sequence[Point], looked: int) -> tuple[Step, ...]:
    """``looked``: at how many places of all lines and figures."""
    found = [_hang_step(series, looked)]
    for path in LATENCIES:
        with_path = [point for point in series if path in point.latency_us]
        if with_path:
            found.append(_latency_step(path, with_path, looked))
    return tuple(found)


def _hang_step(series: Sequence[Point], looked: int) -> Step:
    best: tuple[float, int] | None = None
    for place in range(LEAST_NIGHTS, len(series) - LEAST_NIGHTS + 1):
        before, after = _sum(series[:place]), _sum(series[place:])
        p = min(1.0, 2.0 * min(more_often(*after, *before), more_often(*before, *after)))
        best = min(best or (2.0, 0), (p, place))
    if best is None:
        return Step("hangs", "too few nights")
    p, place = best[0] * looked, best[1]
    if p > 1.0 - CONFIDENCE:
        return Step("hangs", "none")
    before, after = _sum(series[:place]), _sum(series[place:])
    return Step("hangs", "step", series[place].night, before[0] / before[1], after[0] / after[1], p)


def _sum(series: Sequence[Point]) -> tuple[int, int]:
    return sum(point.hangs.k for point in series), sum(point.hangs.n for point in series)


def _latency_step(path: str, series: Sequence[Point], looked: int) -> Step:
    values = [point.latency_us[path] for point in series]
    best: tuple[float, int] | None = None
    for place in range(LEAST_NIGHTS, len(values) - LEAST_NIGHTS + 1):
        p = float(stats.mannwhitneyu(values[:place], values[place:]).pvalue)
        best = min(best or (2.0, 0), (p, place))
    if best is None:
        return Step(path, "too few nights")
    p, place = best[0] * looked, best[1]
    before, after = median(values[:place]), median(values[place:])
    changed = max(before, after) / min(before, after) - 1.0
    if p > 1.0 - CONFIDENCE or changed < PRACTICAL_THRESHOLD:
        return Step(path, "none")
    return Step(path, "step", series[place].night, before, after, p)


# Signatures -------------------------------------------------------------------------------------------------


def _signatures(entries: Sequence[RunEntry], reports: Sequence[Document]) -> tuple[Seen, ...]:
    found: dict[tuple[str, str], Seen] = {}
    for entry, report in zip(entries, reports, strict=True):
        for row in fields.rows(report, "signatures"):
            key = (entry.device, fields.text(row, "signature", "?"))
            before = found.get(key)
            found[key] = Seen(
                device=entry.device,
                signature=key[1],
                mechanism=fields.text(row, "mechanism", "unknown"),
                first=entry.path.name if before is None else before.first,
                last=entry.path.name,
                nights=1 + (0 if before is None else before.nights),
                trials=fields.integer(row, "count") + (0 if before is None else before.trials),
                status=fields.text(row, "status", "new"),
            )
    return tuple(sorted(found.values(), key=lambda one: (one.last, one.trials), reverse=True))
