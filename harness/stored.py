"""A run directory read again, for checkers and reports.

Here: readers that survive damage. A file that is missing, half-written or foreign becomes a line in
``problems``; only a directory that is no run raises. Not here: the layout's description and the writers
(`harness.store`, through which others import these names), and what the documents mean.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.seats import Seat, in_order, seat_of

SCHEMA = 1
_SEAT_NAME = re.compile(r"[A-Za-z0-9_-]+")

Document = dict[str, Any]


class StoreError(Exception):
    """A run directory cannot be written or read. ``path`` is the file, ``reason`` says what is wrong."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoredSample:
    """What one sample of a capture left on disk, by seat; what is missing is absent from the tables."""

    index: int
    ledgers: Mapping[Seat, Document]  # Snapshot.to_json()
    stacks: Mapping[Seat, Document]
    native: Mapping[Seat, Document]
    processes: Document | None
    children: Mapping[str, Document] = field(default_factory=dict)
    """Stacks of processes that ranks started, by file name without suffix."""


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """One trial as its directory tells it. A document that is missing or unreadable is None."""

    id: str
    path: Path
    trial: Document | None
    diagnosis: Document | None
    manifest: Document | None  # evidence/manifest.json
    samples: tuple[StoredSample, ...]
    merged: Document | None  # evidence/merged.json
    waits: Document | None  # evidence/waits.json: harness.wait_graph
    engine: Document | None  # evidence/engine.json: what a foreign engine said of the trial
    latency: Mapping[str, Sequence[float]]  # microseconds by hot path
    tokens: Mapping[str, Sequence[int]]  # output token ids by request
    problems: tuple[str, ...]

    def decision_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._decision_files()))

    def decisions(self, rank: int) -> tuple[tuple[Document, ...], tuple[str, ...]]:
        """All decisions of ``rank`` in order, and what was wrong with the file. Read anew at each call.

        An engine that outlives its trials keeps them elsewhere; then the capture has their end.
        """
        return _read_lines(self._decision_files().get(rank, self.path / "decisions" / f"rank{rank}.jsonl"))

    def all_decisions(self) -> dict[int, tuple[Document, ...]]:
        """Of every rank that has a file, by rank; the folders are listed once, however many there are."""
        return {rank: _read_lines(path)[0] for rank, path in sorted(self._decision_files().items())}

    def _decision_files(self) -> dict[int, Path]:
        folders = (self.path / "evidence" / "decisions", self.path / "decisions")
        found = {seat: path for folder in folders for seat, path in _seats_in(folder, ".jsonl").items()}
        return {seat: path for seat, path in found.items() if isinstance(seat, int)}

    def fault_acts(self) -> dict[int, tuple[Document, ...]]:
        """What the faults of a trial did, by rank, as told by the rank; empty where none were asked for."""
        found = _seats_in(self.path / "faults", ".jsonl")
        return {seat: _read_lines(path)[0] for seat, path in found.items() if isinstance(seat, int)}

    def events(self) -> tuple[tuple[Document, ...], tuple[str, ...]]:
        """The trial's events in order, and what was wrong with the file. Read anew at each call."""
        return _read_lines(self.path / "events.jsonl")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run read from disk. ``problems`` are the run's own; each trial has its own too."""

    path: Path
    run: Document
    trials: tuple[StoredTrial, ...]
    problems: tuple[str, ...]

    @property
    def finished(self) -> bool:
        return self.run.get("finished_utc") is not None


@dataclass(slots=True)
class _Reader:
    """Reads JSON below ``root`` and collects what is wrong instead of raising."""

    root: Path
    problems: list[str] = field(default_factory=list)

    def object(self, path: Path, *, required: bool = False) -> Document | None:
        name = path.relative_to(self.root)
        try:
            loaded = json.loads(path.read_bytes())
        except FileNotFoundError:
            if required:
                self.problems.append(f"{name}: missing")
            return None
        except OSError as error:
            self.problems.append(f"{name}: cannot read: {error.strerror or error}")
            return None
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{name}: damaged or half-written: {error}")
            return None
        if not isinstance(loaded, dict):
            self.problems.append(f"{name}: holds a {type(loaded).__name__}, not an object")
            return None
        return loaded

    def table(self, path: Path, key: str, kinds: tuple[type, ...]) -> dict[str, list[Any]]:
        """``{name: [numbers]}`` under ``key`` of the document at ``path``; damaged rows are left out."""
        document = self.object(path)
        if document is None:
            return {}
        rows = document.get(key)
        if not isinstance(rows, dict):
            self.problems.append(f"{path.relative_to(self.root)}: has no table {key!r}")
            return {}
        good: dict[str, list[Any]] = {}
        for name, row in rows.items():
            if isinstance(row, list) and all(type(item) in kinds for item in row):
                good[name] = row
            else:
                self.problems.append(f"{path.relative_to(self.root)}: {key}.{name} is no list of numbers")
        return good

    def seats(self, folder: Path, suffix: str) -> dict[Seat, Document]:
        paths = _seats_in(folder, suffix)
        found = {seat: self.object(paths[seat]) for seat in in_order(paths)}
        return {seat: document for seat, document in found.items() if document is not None}


def _seats_in(folder: Path, suffix: str) -> dict[Seat, Path]:
    """Files ``<seat><suffix>`` of ``folder`` by seat; other files are not ours."""
    if not folder.is_dir():
        return {}
    names = {path.name.removesuffix(suffix): path for path in folder.glob(f"*{suffix}")}
    return {
        seat_of(name): path
        for name, path in names.items()
        if _SEAT_NAME.fullmatch(name) and (isinstance(seat_of(name), int) or not name.startswith("rank"))
    }


def _read_lines(path: Path) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return (), (f"{path.name}: missing",)
    except OSError as error:
        return (), (f"{path.name}: cannot read: {error.strerror or error}",)
    records: list[Document] = []
    problems: list[str] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            loaded = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path.name}:{number}: damaged or half-written: {error}")
            continue
        if isinstance(loaded, dict):
            records.append(loaded)
        else:
            problems.append(f"{path.name}:{number}: holds a {type(loaded).__name__}, not an object")
    return tuple(records), tuple(problems)


def read_samples(evidence: Path, reader: _Reader | None = None) -> tuple[StoredSample, ...]:
    """The samples below an evidence folder, by index.

    sample-<i>/ledger/rank<r>.json, sample-<i>/stacks/rank<r>.json and rank<r>.native.json (of a process that is
    no rank its name), sample-<i>/processes.json. Missing pieces are absent; damaged ones are the reader's problems.
    """
    reader = reader or _Reader(evidence)
    numbers = [path.name.removeprefix("sample-") for path in evidence.glob("sample-*") if path.is_dir()]
    samples = []
    for index in sorted(int(number) for number in numbers if number.isdecimal()):
        folder = evidence / f"sample-{index}"
        samples.append(
            StoredSample(
                index=index,
                ledgers=reader.seats(folder / "ledger", ".json"),
                stacks=reader.seats(folder / "stacks", ".json"),
                native=reader.seats(folder / "stacks", ".native.json"),
                processes=reader.object(folder / "processes.json"),
                children={
                    path.name.removesuffix(".json"): document
                    for path in sorted((folder / "children").glob("*.json"))
                    if not path.name.endswith(".native.json")
                    and (document := reader.object(path)) is not None
                },
            )
        )
    return tuple(samples)


def read_trial(path: Path) -> StoredTrial:
    """One trial's directory; nothing in it makes this raise."""
    reader = _Reader(path)
    evidence = path / "evidence"
    return StoredTrial(
        id=path.name,
        path=path,
        trial=reader.object(path / "trial.json", required=True),
        diagnosis=reader.object(path / "diagnosis.json"),
        manifest=reader.object(evidence / "manifest.json"),
        samples=read_samples(evidence, reader),
        merged=reader.object(evidence / "merged.json"),
        waits=reader.object(evidence / "waits.json"),
        engine=reader.object(evidence / "engine.json"),
        latency=reader.table(path / "latency.json", "paths", (int, float)),
        tokens=reader.table(path / "tokens.json", "requests", (int,)),
        problems=tuple(reader.problems),
    )


def resolve_run(run: str | Path) -> Path:
    """The real directory behind a path such as ``runs/latest``. Raises StoreError when it is no run."""
    path = Path(run)
    if not path.exists():
        hint = "is a link to a run that is gone" if path.is_symlink() else "does not exist"
        raise StoreError(path, f"{hint}; give a directory made by hangrig run")
    path = path.resolve()
    if not path.is_dir():
        raise StoreError(path, "is a file; give the run's directory")
    missing = [name for name in ("run.json", "trials") if not (path / name).exists()]
    if missing:
        raise StoreError(path, f"is no run directory: {' and '.join(missing)} missing")
    return path


def load_schema(name: str) -> Document:
    """The JSON Schema of one kind of document: ``run``, ``trial``, ``diagnosis``, ``report`` and others."""
    text = (
        importlib.resources.files("harness").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    )
    document: Document = json.loads(text)
    return document


def load_run_json(path: Path) -> Document:
    reader = _Reader(path)
    document = reader.object(path / "run.json", required=True)
    if document is None:
        raise StoreError(path / "run.json", reader.problems[0].split(": ", 1)[1])
    if document.get("schema") != SCHEMA:
        raise StoreError(
            path / "run.json", f"has schema {document.get('schema')!r}, this hangrig reads {SCHEMA}"
        )
    return document


def read_run(run: str | Path) -> StoredRun:
    """A whole run, trials in the order they ended, those without a line in trials.jsonl last.

    Raises StoreError only when ``run`` is no run directory or its run.json cannot be read.
    """
    path = resolve_run(run)
    document = load_run_json(path)
    problems: list[str] = []
    lines: tuple[Document, ...] = ()
    if (path / "trials.jsonl").exists():
        lines, found = _read_lines(path / "trials.jsonl")
        problems += found
    order = {str(line.get("id")): position for position, line in enumerate(lines)}
    folders = [folder for folder in (path / "trials").iterdir() if folder.is_dir()]
    folders.sort(key=lambda folder: (order.get(folder.name, len(order) + len(lines)), folder.name))
    lost = order.keys() - {folder.name for folder in folders}
    problems += [
        f"trials/{trial_id}: in trials.jsonl, but its directory is gone" for trial_id in sorted(lost)
    ]
    return StoredRun(path, document, tuple(read_trial(folder) for folder in folders), tuple(problems))
