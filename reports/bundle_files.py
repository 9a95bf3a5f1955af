"""What goes into a bundle: the files of one trial and of its run, read leniently, before anything is redacted.

The layout is a run directory with one trial, so that ``hangrig report`` and ``hangrig rerun`` work on an unpacked
bundle. A ledger, which is binary, becomes the JSON of its snapshot. What cannot be had, is damaged, or is of no
kind that can be redacted is named, never passed over.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from harness.ledger_layout import LedgerError
from harness.ledger_reader import LedgerReader
from harness.ledger_snapshot import Snapshot
from reports import fields
from reports.fields import Document
from reports.model import Missing

TEXT_LIMIT_BYTES = 1 << 20
LINES_LIMIT_BYTES = 8 << 20
"""Of longer files the end goes in: a hang is at the end."""
_TEXT = frozenset((".txt", ".log", ".md", ".py", ".toml", ".out", ".err", ".info", ""))
_EXPECTED = ("trial.json", "history.json", "events.jsonl", "evidence/manifest.json", "evidence/merged.json")


@dataclass(slots=True)
class File:
    """``content``: a JSON document, a list of them (damaged lines as text), or a text."""

    name: str
    kind: Literal["json", "jsonl", "text"]
    content: Any

    def texts(self) -> Iterable[str]:
        """Everything in it that could give something away, the name too."""
        yield self.name
        yield from texts_of(self.content)

    def encoded(self) -> bytes:
        if self.kind == "text":
            return str(self.content).encode("utf-8", errors="replace")
        if self.kind == "json":
            return json.dumps(self.content, indent=1).encode() + b"\n"
        lines = (line if isinstance(line, str) else json.dumps(line) for line in self.content)
        return "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")


def texts_of(content: Any) -> Iterable[str]:
    if isinstance(content, int | float):
        return
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield str(key)
            yield from texts_of(value)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from texts_of(item)


@dataclass(slots=True)
class Gathered:
    """``left_out``: there, and not in the bundle; ``missing``: not there, or damaged; ``converted``: by name, what
    it was."""

    files: dict[str, File] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    left_out: list[Missing] = field(default_factory=list)
    converted: dict[str, str] = field(default_factory=dict)

    def add(self, file: File) -> None:
        self.files[file.name] = file

    def document(self, name: str) -> Document | None:
        file = self.files.get(name)
        return file.content if file is not None and isinstance(file.content, Mapping) else None


def read_documents(run: Path) -> tuple[Document, list[Document], list[str]]:
    """run.json (empty where it is damaged), every trial.json, and the ids of the planned and the found trials."""

    def read(path: Path) -> Document:
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, Mapping) else {}

    document = read(run / "run.json")
    folders = sorted(path for path in (run / "trials").iterdir() if path.is_dir())
    ids = [str(plan["id"]) for plan in fields.rows(document, "planned") if plan.get("id")]
    ids += [folder.name for folder in folders if folder.name not in ids]
    return document, [read(folder / "trial.json") for folder in folders], ids


def gather(run: Path, trial: str) -> Gathered:
    """Reads everything of ``trial`` below the run's directory. Nothing in it makes this raise."""
    found = Gathered()
    _read(found, run / "run.json", "run.json", required=True)
    document = found.document("run.json")
    if document is not None:
        found.files["run.json"].content = _narrowed(document, trial)
        _scenario(found, document, trial)
    _read(found, run / "summary.md", "summary.md", required=True)
    for path in sorted((run / "faults").glob("*.py")):
        _read(found, path, f"faults/{path.name}")
    folder = run / "trials" / trial
    if not folder.is_dir():
        found.missing.append(Missing(f"trials/{trial}", "planned, but it has no directory: it never ran"))
        return found
    for path in sorted(folder.rglob("*")):
        if path.is_file() or path.is_symlink():
            _read(found, path, f"trials/{trial}/{path.relative_to(folder)}")
    there = {name.removeprefix(f"trials/{trial}/") for name in found.files}
    found.missing += [Missing(name, "not in the trial's directory") for name in _wanted(found, trial) - there]
    if not any(name.startswith("evidence/sample-") for name in there):
        found.missing.append(Missing("evidence/sample-*", "no ledgers and stacks were captured"))
    found.missing.sort(key=lambda one: (one.what, one.why))
    return found


def _wanted(found: Gathered, trial: str) -> set[str]:
    outcome = fields.text(found.document(f"trials/{trial}/trial.json") or {}, "outcome")
    return {*_EXPECTED} | ({"diagnosis.json"} if outcome != "healthy" else set())


# --- one file ----------------------------------------------------------------------------------------------


def _read(found: Gathered, path: Path, name: str, *, required: bool = False) -> None:
    if path.is_symlink():
        found.left_out.append(Missing(name, "a link"))
        return
    if path.suffix == ".ledger":
        _ledger(found, path, name)
        return
    if path.suffix not in _TEXT | {".json", ".jsonl"}:
        found.left_out.append(Missing(name, f"of a kind that cannot be redacted ({path.suffix})"))
        return
    limit = TEXT_LIMIT_BYTES if path.suffix in _TEXT else LINES_LIMIT_BYTES
    try:
        content, cut = _tail(path, limit)
    except FileNotFoundError:
        if required:
            found.missing.append(Missing(name, "not there"))
        return
    except OSError as error:
        found.missing.append(Missing(name, f"cannot be read: {error.strerror}"))
        return
    if cut and path.suffix != ".json":
        found.left_out.append(Missing(name, f"all but its last {limit >> 20} MiB"))
    if b"\0" in content and path.suffix in _TEXT:
        found.left_out.append(Missing(name, "binary"))
        return
    text = content.decode("utf-8", errors="replace")
    if path.suffix == ".json":
        _json(found, text, name)
    elif path.suffix == ".jsonl":
        _lines(found, text, name)
    else:
        found.add(File(name, "text", text))


def _tail(path: Path, limit: int) -> tuple[bytes, bool]:
    """The whole file or its end, from a line's beginning; and whether it was cut."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - limit))
        content = file.read(limit)
    if size > limit:
        return content[content.find(b"\n") + 1 :], True
    return content, False


def _json(found: Gathered, text: str, name: str) -> None:
    try:
        found.add(File(name, "json", json.loads(text)))
    except (ValueError, RecursionError) as error:
        # Another name: a reader of the unpacked bundle is to see that there is no such document.
        found.missing.append(
            Missing(name, f"damaged or half-written ({error}); what there is of it is beside it")
        )
        found.add(File(f"{name}.damaged.txt", "text", text[-TEXT_LIMIT_BYTES:]))


def _lines(found: Gathered, text: str, name: str) -> None:
    lines: list[Any] = []
    damaged = 0
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            damaged += bool(line.strip())
            lines.append(line)
    if damaged:
        found.missing.append(Missing(name, f"{damaged} damaged or half-written lines, kept as they are"))
    found.add(File(name, "jsonl", lines))


def _ledger(found: Gathered, path: Path, name: str) -> None:
    target = f"{name.removesuffix('.ledger')}.json"
    try:
        reader = LedgerReader.open(path)
        try:
            snapshot = reader.snapshot()
        finally:
            reader.close()
    except (LedgerError, OSError) as error:
        found.missing.append(Missing(name, f"cannot be read as a ledger: {error}"))
        return
    # The clock of a reading long after says nothing; ages count from the last thing that the rank wrote.
    last_ns = _last_ns(snapshot)
    found.add(File(target, "json", replace(snapshot, taken_ns=last_ns, boottime_ns=last_ns).to_json()))
    found.converted[target] = (
        f"{name}, a binary file whose names could not be replaced; taken_ns is its last entry"
    )


def _last_ns(snapshot: Snapshot) -> int:
    """The newest time in a ledger, of its node's monotonic clock."""
    times = [snapshot.host.since_ns, snapshot.host.heartbeat_ns]
    for stream in snapshot.streams.values():
        times.append(stream.stamp_ns)
        times += [time for one in stream.recent for time in (one.enqueued_ns, one.completed_ns or 0)]
    for group in snapshot.groups.values():
        times += [one.completed_ns or one.started_ns or one.enqueued_ns for one in group.recent]
    return max(times)


# --- the run's documents -----------------------------------------------------------------------------------


def _narrowed(run: Document, trial: str) -> dict[str, Any]:
    """run.json for this trial alone: its plan, its scenario, its arm. One trial is held against no baseline."""
    run = {key: value for key, value in run.items() if key not in ("baseline", "left_out")}
    planned = [plan for plan in fields.rows(run, "planned") if plan.get("id") == trial]
    if not planned:
        return {**run, "planned": []}
    name, arm = planned[0].get("scenario"), planned[0].get("arm")
    scenarios = [
        {**row, "arms": [one for one in fields.rows(row, "arms") if one.get("arm") == arm]}
        for row in fields.rows(run, "scenarios")
        if row.get("name") == name
    ]
    return {**run, "planned": planned, "scenarios": scenarios}


def _scenario(found: Gathered, run: Document, trial: str) -> None:
    """The scenario as a file that ``hangrig run`` takes."""
    name = next(
        (plan.get("scenario") for plan in fields.rows(run, "planned") if plan.get("id") == trial), None
    )
    for row in fields.rows(run, "scenarios"):
        if row.get("name") == name:
            try:
                document = json.loads(fields.text(row, "text"))
                found.add(File("scenario.toml", "text", to_toml(document)))
            except (ValueError, TypeError, RecursionError) as error:
                found.missing.append(Missing("scenario.toml", f"run.json has no whole scenario ({error})"))
            return
    found.missing.append(Missing("scenario.toml", "run.json does not name the trial's scenario"))


def to_toml(document: Mapping[str, Any]) -> str:
    """A document of tables, lists and plain values as TOML. Raises ValueError for what TOML cannot hold."""
    scalars, tables = [], []
    for key, value in document.items():
        if value is None:
            continue
        name = key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _toml(key)
        if isinstance(value, Mapping):
            lines = [f"{_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None]
            tables.append("\n".join([f"[{name}]", *lines]))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                lines = [f"{_key(k)} = {_toml(v)}" for k, v in item.items() if v is not None]
                tables.append("\n".join([f"[[{name}]]", *lines]))
        else:
            scalars.append(f"{name} = {_toml(value)}")
    text = "\n\n".join(["\n".join(scalars), *tables]) + "\n"
    tomllib.loads(text)
    return text


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(str(k))} = {_toml(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
