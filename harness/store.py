"""The run directory: written while a run goes on, read again by checkers and reports.

Here: the names of files and folders and atomic, synced writes; the readers of `harness.stored` are handed
on. Not here: what a document means (the checkers, the diagnosis and the reports know) and where evidence
comes from.

    runs/latest -> <UTC time>-<name>
    runs/<UTC time>-<name>/
        run.json  trials.jsonl  report.* and the other files that reports write
        faults/ (files of the user's own faults)
        trials/<id>/  trial.json  events.jsonl  diagnosis.json  latency.json  tokens.json
            decisions/rank<r>.jsonl  faults/rank<r>.jsonl  ledger/rank<r>.ledger  evidence/ (see `read_samples`)

A JSON document is replaced as a whole, through a synced temporary file, so a reader sees the old or the new
one. A `.jsonl` file only grows; a line cut short by a crash is a problem of that line alone. In trials.jsonl
the last line of an id counts: checking a run again appends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from harness.stored import (
    SCHEMA,
    Document,
    StoredRun,
    StoredSample,
    StoredTrial,
    StoreError,
    load_run_json,
    load_schema,
    read_run,
    read_samples,
    read_trial,
    resolve_run,
)

__all__ = [
    "SCHEMA", "Document", "RunStore", "StoreError", "StoredRun", "StoredSample", "StoredTrial", "TrialStore",
    "load_schema", "point_latest", "read_run", "read_samples", "read_trial", "resolve_run", "safe_name",
    "write_bytes", "write_json",
]  # fmt: skip

LATEST = "latest"
MANIFEST_KEYS = (
    "command", "argv", "seed", "versions", "machine", "device", "simulation", "simulation_note", "scenarios",
)  # fmt: skip
SUMMARY_KEYS = (
    "id", "scenario", "arm", "seed", "device", "target", "expected", "outcome", "verdict", "steps", "tokens",
    "retractions", "duration_s", "rerun",
)  # fmt: skip


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(path, f"cannot write: {error.strerror or error}; free the disk or choose another --out")


def _sync_folder(folder: Path) -> None:
    """Makes a new or renamed entry of ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces ``path`` atomically; the content is on disk when this returns. Raises StoreError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the half-written temporary file must not hide the first error
            temporary.unlink(missing_ok=True)
        raise _refused(path, error) from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replaces ``path`` with one JSON document; adds ``schema`` where it is missing. Raises StoreError."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=1, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def _append_line(path: Path, document: Mapping[str, Any]) -> None:
    line = json.dumps(document, allow_nan=False).encode() + b"\n"
    try:
        with path.open("ab") as file:
            _end_cut_line(path, file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _refused(path, error) from error


def _end_cut_line(path: Path, file: IO[bytes]) -> None:
    """Ends a line that a crash cut short, so that it does not swallow the next one."""
    if file.tell() == 0:
        return
    with path.open("rb") as reader:
        reader.seek(-1, os.SEEK_END)
        if reader.read(1) != b"\n":
            file.write(b"\n")


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error
    return path


@dataclass(frozen=True, slots=True)
class TrialStore:
    """One trial's directory, for writing. Every method raises StoreError when the disk refuses."""

    id: str
    path: Path
    trials_file: Path

    def ledger_path(self, rank: int) -> Path:
        return self.path / "ledger" / f"rank{rank}.ledger"

    def decisions_path(self, rank: int) -> Path:
        return self.path / "decisions" / f"rank{rank}.jsonl"

    def fault_log_path(self, rank: int) -> Path:
        """What a rank's faults did, a line each; written by the rank."""
        folder = _make_folder(self.path / "faults")
        return folder / f"rank{rank}.jsonl"

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"

    def event(self, kind: str, **fields: object) -> None:
        """Appends what happened to events.jsonl, with the host's monotonic and wall clock."""
        stamp: Document = {"kind": kind, "monotonic_ns": _monotonic_ns(), "utc": _utc_now()}
        _append_line(self.path / "events.jsonl", stamp | fields)

    def write_trial(self, document: Mapping[str, Any]) -> None:
        """Writes trial.json, then the trial's line in trials.jsonl (evidence must be stored before)."""
        write_json(self.path / "trial.json", document)
        _append_line(self.trials_file, {key: document[key] for key in SUMMARY_KEYS if key in document})

    def write_diagnosis(self, document: Mapping[str, Any]) -> None:
        write_json(self.path / "diagnosis.json", document)

    def forget_diagnosis(self) -> None:
        try:
            (self.path / "diagnosis.json").unlink(missing_ok=True)
        except OSError as error:
            raise _refused(self.path / "diagnosis.json", error) from error

    def write_latency(self, samples_us: Mapping[str, Sequence[float]]) -> None:
        """``samples_us``: per hot path (``next_token_copy``, ``step``, ...) its latencies in microseconds."""
        write_json(self.path / "latency.json", {"paths": {k: list(v) for k, v in samples_us.items()}})

    def write_tokens(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """``tokens``: per request its output token ids, in order."""
        write_json(self.path / "tokens.json", {"requests": {k: list(v) for k, v in tokens.items()}})


@dataclass(slots=True)
class RunStore:
    """A run's directory, for writing. One process writes it."""

    path: Path
    document: Document

    @classmethod
    def create(cls, out: Path, name: str, manifest: Mapping[str, Any]) -> RunStore:
        """Makes ``out/<UTC time>-<name>/`` and points ``out/latest`` at it.

        ``manifest`` holds at least MANIFEST_KEYS; ValueError names those missing. Raises StoreError.
        """
        missing = [key for key in MANIFEST_KEYS if key not in manifest]
        if missing:
            raise ValueError(f"a run's manifest needs {', '.join(missing)}")
        path = new_folder(out, name)
        store = cls(path, {"name": name, "started_utc": _utc_now(), "finished_utc": None, **manifest})
        _make_folder(path / "trials")
        write_json(path / "run.json", store.document)
        point_latest(out, path.name)
        return store

    @classmethod
    def open(cls, path: Path) -> RunStore:
        """An existing run, to be checked or reported again. Raises StoreError."""
        path = resolve_run(path)
        return cls(path, load_run_json(path))

    def trial(self, trial_id: str) -> TrialStore:
        """The trial's directory, made where it is missing. ``trial_id`` is a plain file name."""
        if safe_name(trial_id) != trial_id:
            raise ValueError(f"a trial's id must be a plain file name, not {trial_id!r}")
        path = self.path / "trials" / trial_id
        for name in ("decisions", "ledger", "evidence"):
            _make_folder(path / name)
        return TrialStore(trial_id, path, self.path / "trials.jsonl")

    def keep_fault_file(self, path: Path) -> None:
        """Keeps a copy of a file that registers faults. Raises StoreError."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(path, f"cannot be read: {error.strerror}") from error
        write_bytes(_make_folder(self.path / "faults") / path.name, content)

    def fault_files(self) -> tuple[Path, ...]:
        """The copies, in the order in which they were given."""
        return tuple(self.path / "faults" / name for name in self.document.get("fault_files", ()))

    def remember(self, **fields: object) -> None:
        """Writes run.json again with ``fields``; nothing is written without any."""
        if fields:
            self.document = {**self.document, **fields}
            write_json(self.path / "run.json", self.document)

    def finish(self, **fields: object) -> None:
        """Writes run.json for the last time, with the end time and ``fields``."""
        self.document = {**self.document, **fields, "finished_utc": _utc_now()}
        write_json(self.path / "run.json", self.document)


def new_folder(out: Path, name: str) -> Path:
    """Makes ``out/<UTC time>-<name>/``, which nobody else has. Raises StoreError."""
    out = _make_folder(out.absolute())
    return _make_unique(out, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{safe_name(name)}")


def safe_name(text: str) -> str:
    """``text`` as one path component: letters, digits and ``=,.+_-`` stay, all else becomes ``_``."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "=,.+_-") else "_" for c in text)
    return kept.lstrip(".")[:200] or "_"


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _monotonic_ns() -> int:
    # The ledger's clock, so that events and ledgers of one node can be laid side by side.
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _make_unique(out: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = out / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _refused(path, error) from error
        return path
    raise StoreError(out / name, "a thousand runs of this second exist; choose another --out")


def point_latest(out: Path, name: str) -> None:
    """``out/latest`` → the run ``name``, replaced atomically. Raises StoreError."""
    temporary = out / f".{LATEST}.{name}"
    latest = out / LATEST
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        temporary.replace(latest)
        _sync_folder(out)
    except OSError as error:
        raise _refused(latest, error) from error
