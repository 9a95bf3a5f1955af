"""What a run of the hang corpus is worth: found, explained, blamed on the right rank; and false alarms.

A row's trial is *detected* when its outcome says that something is wrong; kind, mechanism and culprits are right
when the diagnosis names exactly those that the row's scenario expects. A twin's or control's trial is a *false
alarm* when it is called a hang, or its tokens are called corrupt: slow is none. What could not be judged is counted
apart and never as right.

Not here: which trials are run (``harness.corpus``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.checkers import HANGS
from harness.rates import Rate, rate
from harness.store import StoredRun, read_run, write_bytes, write_json
from reports.words import interval, k_of_n, listing

_FOUND = (*HANGS, "slow", "corrupt")
_ALARMS = (*HANGS, "corrupt")
_COLUMNS = ("detected", "kind", "mechanism", "culprit", "evidence")
_HEAD = ("row", "scenario", "ranks", *_COLUMNS, "confirmed (median)", "false alarms")


@dataclass(frozen=True, slots=True)
class Score:
    """One trial. ``unknown``: why it says nothing; empty where it does."""

    trial: str
    scenario: str
    part: str
    """row, twin or control."""
    outcome: str
    unknown: str = ""
    detected: bool = False
    kind: bool = False
    mechanism: bool = False
    culprit: bool = False
    evidence: bool = False
    confirm_s: float | None = None
    """From the last progress to the confirmed diagnosis."""
    said: str = ""
    """What the diagnosis named, where that was not what the row expects."""


@dataclass(slots=True)
class Line:
    """The trials of one scenario with one number of ranks, a row and its twin, or a control."""

    entry: Mapping[str, Any]
    scenario: str
    rows: list[Score] = field(default_factory=list)
    healthy: list[Score] = field(default_factory=list)

    @property
    def alarms(self) -> list[Score]:
        return [one for one in self.healthy if one.outcome in _ALARMS]

    def count(self, what: str) -> int:
        return sum(bool(getattr(one, what)) for one in self.rows)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A scored run. ``never_run``: planned trials that left nothing."""

    run: str
    lines: tuple[Line, ...]
    never_run: tuple[str, ...]
    error: str | None = None

    @property
    def scores(self) -> list[Score]:
        return [one for line in self.lines for one in (*line.rows, *line.healthy)]

    @property
    def exit(self) -> int:
        """0 all right, 1 a miss, a wrong culprit or a false alarm, 3 something unknown, 70 an error of our own."""
        if self.error is not None:
            return 70
        rows = [one for line in self.lines for one in line.rows if not one.unknown]
        missed = any(not (one.detected and one.kind and one.culprit and one.mechanism) for one in rows)
        if missed or any(line.alarms for line in self.lines):
            return 1
        return 3 if self.never_run or any(one.unknown for one in self.scores) else 0

    def totals(self) -> dict[str, Rate]:
        """Over all trials of rows, and of twins and controls together. What is unknown counts as not right."""
        rows = [one for line in self.lines for one in line.rows]
        healthy = [one for line in self.lines for one in line.healthy]
        names = {"detected": "detected", "kind_right": "kind", "mechanism_right": "mechanism"}
        names["culprit_right"] = "culprit"
        found = {key: rate(sum(getattr(one, name) for one in rows), len(rows)) for key, name in names.items()}
        alarms = sum(one.outcome in _ALARMS for one in healthy)
        return {**found, "false_alarms": rate(alarms, len(healthy))}

    def to_json(self) -> dict[str, Any]:
        """As CONTRACTS.md has it, with what else a program may want."""
        rows, twins, controls = [], [], []
        for line in self.lines:
            entry = line.entry
            who = {"id": entry["id"], "name": entry["name"], "dp": entry["dp"], "ranks": entry["ranks"]}
            healthy = {
                "trials": len(line.healthy),
                "false_alarms": len(line.alarms),
                "slow": sum(one.outcome == "slow" for one in line.healthy),
                "unknown": sum(bool(one.unknown) for one in line.healthy),
            }
            if entry["id"] is None:
                controls.append({**who, **healthy})
                continue
            if line.healthy:
                twins.append({**who, **healthy})
            if not line.rows:
                continue
            rows.append(
                {
                    **who,
                    "seeds": len(line.rows),
                    "detected": line.count("detected"),
                    "kind_right": line.count("kind"),
                    "mechanism_right": line.count("mechanism"),
                    "culprit_right": line.count("culprit"),
                    "evidence_complete": line.count("evidence"),
                    "unknown": line.count("unknown"),
                    "confirm_s": _tail(one.confirm_s for one in line.rows),
                    "wrong": sorted({one.said for one in line.rows if one.said}),
                }
            )
        return {
            "run": self.run,
            "exit": self.exit,
            "simulation": True,
            "rows": rows,
            "twins": twins,
            "controls": controls,
            "totals": {name: one.to_json() for name, one in self.totals().items()},
            "confirm_s": _tail(one.confirm_s for one in self.scores),
            "never_run": list(self.never_run),
            "error": self.error,
        }


def _tail(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return {"p50": None, "p95": None}
    return {
        "p50": round(float(np.percentile(known, 50)), 3),
        "p95": round(float(np.percentile(known, 95)), 3),
    }


# Scoring ---------------------------------------------------------------------------------------------------


def score(trial: Path, chosen: Mapping[str, Any]) -> Score | None:
    """A judged trial's directory. None for one that belongs to no scenario of the corpus, or was not judged."""
    document = _read(trial / "trial.json")
    if document is None or document["scenario"] not in chosen:
        return None
    return _score(document, _read(trial / "diagnosis.json"), chosen[document["scenario"]])


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        document: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document


def _score(trial: Mapping[str, Any], diagnosis: Mapping[str, Any] | None, entry: Mapping[str, Any]) -> Score:
    outcome, scenario, name = trial["outcome"], trial["scenario"], trial["id"]
    why = _unknown(trial)
    part = part_of(trial["arm"], entry)
    if part != "row" or why:
        return Score(name, scenario, part, outcome, why)
    expected = trial["diagnosis_expected"]
    said = diagnosis or {}
    culprits = sorted(one["rank"] for one in said.get("culprits", ()) if one["rank"] is not None)
    times = said.get("confirmed_s") or 0.0
    kind = said.get("kind") == expected.get("kind")
    mechanism = said.get("mechanism") == expected.get("mechanism")
    culprit = culprits == expected.get("culprits")
    detected = outcome in _FOUND and diagnosis is not None
    told = f"{outcome}: {said.get('kind')}, {said.get('mechanism')}, ranks {culprits}"
    missing = [one for one in said.get("missing_evidence", ()) if not one.get("impossible")]
    return Score(
        name,
        scenario,
        part,
        outcome,
        detected=detected,
        kind=detected and kind,
        mechanism=detected and mechanism,
        culprit=detected and culprit,
        evidence=detected and not missing,
        confirm_s=times - said["last_progress_s"] if times else None,
        said="" if detected and kind and mechanism and culprit else told,
    )


def part_of(arm: Mapping[str, str], entry: Mapping[str, Any]) -> str:
    """Which part of a corpus an arm plays: ``row``, its healthy ``twin``, or a ``control``."""
    if entry["id"] is None:
        return "control"
    wanted = entry["row"]
    return "row" if all(arm.get(name) == value for name, value in wanted.items()) else "twin"


def _unknown(trial: Mapping[str, Any]) -> str:
    """Why a trial says nothing: it was not finished and not explained, or what should break it never acted."""
    if trial["outcome"] in ("unknown", "skipped"):
        return next((one["reason"] for one in trial["checks"] if one["verdict"] == "unknown"), "unknown")
    fault = [
        one["reason"] for one in trial["checks"] if one["name"] == "fault" and one["verdict"] == "unknown"
    ]
    return fault[0] if fault else ""


def build(stored: StoredRun) -> Corpus:
    """Scores a stored run of the corpus. Raises KeyError for a run of something else."""
    chosen = stored.run["corpus"]
    lines = {name: Line(entry, name) for name, entry in chosen.items()}
    for trial in stored.trials:
        if trial.trial is None or trial.trial["scenario"] not in lines:
            continue
        line = lines[trial.trial["scenario"]]
        found = _score(trial.trial, trial.diagnosis, line.entry)
        (line.rows if found.part == "row" else line.healthy).append(found)
    there = {trial.id for trial in stored.trials if trial.trial is not None}
    never = tuple(plan["id"] for plan in stored.run.get("planned", ()) if plan["id"] not in there)
    return Corpus(str(stored.path), tuple(lines.values()), never, stored.run.get("error"))


@dataclass(frozen=True, slots=True)
class Page:
    """What report.html shows of a corpus: texts, and which of them say that something is wrong."""

    head: tuple[str, ...]
    rows: tuple[tuple[tuple[str, bool], ...], ...]
    totals: tuple[str, ...]


def page(stored: StoredRun) -> Page | None:
    """None for a run of something else."""
    if "corpus" not in stored.run:
        return None
    corpus = build(stored)
    rows = [tuple((text, "red" in style) for text, style in _cells(line)) for line in corpus.lines]
    return Page(_HEAD, tuple(rows), tuple(_total_lines(corpus)))


def write(path: Path) -> Corpus:
    """Writes corpus.json and corpus.md into a run's directory; returns what they show."""
    corpus = build(read_run(path))
    write_json(path / "corpus.json", corpus.to_json())
    write_bytes(path / "corpus.md", markdown(corpus).encode())
    return corpus


# Sinks -----------------------------------------------------------------------------------------------------


def table(chosen: Mapping[str, Any], scores: Sequence[Score]) -> Table:
    """The lines so far, for a terminal."""
    lines = {name: Line(entry, name) for name, entry in chosen.items()}
    for one in scores:
        (lines[one.scenario].rows if one.part == "row" else lines[one.scenario].healthy).append(one)
    return _table(list(lines.values()))


def _table(lines: Sequence[Line]) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left", caption_justify="left")
    for name in ("", "scenario", "ranks", *_COLUMNS, "confirmed", "false alarms"):
        drawn.add_column(
            name, no_wrap=name != "scenario", justify="left" if name in ("", "scenario") else "right"
        )
    for line in lines:
        drawn.add_row(*(Text(text, style) for text, style in _cells(line)))
    return drawn


def _cells(line: Line) -> list[tuple[str, str]]:
    entry = line.entry
    n = len(line.rows)
    cells = [(entry["id"] or "", "bold"), (entry["name"], ""), (str(entry["ranks"]), "")]
    for name in _COLUMNS:
        k = line.count(name)
        cells.append(
            (f"{k}/{n}" if n else "", "" if k == n else "bold red" if name != "evidence" else "yellow")
        )
    tail = _tail(one.confirm_s for one in line.rows)["p50"]
    cells.append((f"{tail:.1f} s" if tail is not None else "", ""))
    k, m = len(line.alarms), len(line.healthy)
    cells.append((f"{k}/{m}" if m else "", "bold red" if k else ""))
    return cells


def _plain_cells(line: Line) -> list[str]:
    return [text for text, _ in _cells(line)]


def markdown(corpus: Corpus) -> str:
    """One table and the totals, for a job's summary."""
    rows = [_HEAD, ["---"] * len(_HEAD), *(_plain_cells(line) for line in corpus.lines)]
    body = "\n".join("| " + " | ".join(text.replace("|", "/") for text in row) + " |" for row in rows)
    return "\n".join(["# Hang corpus (simulation)", "", body, "", *_total_lines(corpus), ""])


def show(corpus: Corpus, stream: IO[str]) -> None:
    """The final table and the totals."""
    interactive = stream.isatty()
    console = Console(
        file=stream, highlight=False, width=None if interactive else 140, no_color=not interactive
    )
    console.print(_table(corpus.lines))
    for line in _total_lines(corpus):
        console.print(Text(line), soft_wrap=True)


def _total_lines(corpus: Corpus) -> list[str]:
    lines = []
    for name, total in corpus.totals().items():
        lines.append(f"{name.replace('_', ' ')}: {k_of_n(total)} (95 %: {interval(total)})")
    tail = _tail(one.confirm_s for one in corpus.scores)
    if tail["p50"] is not None:
        lines.append(f"last progress to confirmed: median {tail['p50']:.2f} s, 95 % {tail['p95']:.2f} s")
    for one in corpus.scores:
        if one.said:
            lines.append(f"wrong: {one.trial}: {one.said}")
        elif one.part != "row" and one.outcome in _ALARMS:
            lines.append(f"false alarm: {one.trial}: {one.outcome}")
        elif one.unknown:
            lines.append(f"unknown: {one.trial}: {one.unknown}")
    if corpus.never_run:
        lines.append(f"{len(corpus.never_run)} never run: {listing(list(corpus.never_run), 8)}")
    if corpus.error is not None:
        lines.append(f"an error of hangrig's own: {corpus.error}")
    lines.append("A simulation: it says nothing about hardware.")
    return lines
