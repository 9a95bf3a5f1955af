"""What the tests of ``hangrig diagnose`` share: the command's answer, and recorded dumps in py-spy's text form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from harness.offline.command import run_diagnose
from harness.store import load_schema

CAPTURES = Path(__file__).parent / "captures"
WATCHED = Path(__file__).parent / "watch_captures"
LEDGERS = Path(__file__).parent / "ledger_captures"


def ask(directory: Path) -> tuple[dict[str, Any], int]:
    """The document, held against its schema, and the status."""
    document, text, status = run_diagnose(directory, lambda said: None)
    json.dumps(document, allow_nan=False)
    jsonschema.validate({"schema": 1, **document}, load_schema("diagnosis"))
    assert text.startswith({0: "HEALTHY", 1: "NOT HEALTHY", 3: "CANNOT TELL"}[status])
    assert document["exit"] == status
    return document, status


def brief(document: dict[str, Any]) -> tuple[str, str, list[int | None], str]:
    return (
        document["kind"],
        document["mechanism"],
        [culprit["rank"] for culprit in document["culprits"]],
        document["confidence"],
    )


def facts(document: dict[str, Any]) -> str:
    return "\n".join(fact["fact"] for fact in document["proof"])


def lacks(document: dict[str, Any]) -> str:
    return "\n".join(f"{lack['what']}: {lack['why']}" for lack in document["missing_evidence"])


def as_text(dump: Path, *, short: bool, title: str = "python") -> str:
    """A ``py-spy dump --json`` as ``py-spy dump`` prints the same; ``short``: without --full-filenames."""
    threads = json.loads(dump.read_text())
    lines = [f"Process {threads[0]['pid']}: {title}", "Python v3.11.7 (/usr/bin/python3.11)", ""]
    for thread in threads:
        status = ("active" if thread["active"] else "idle") + ("+gil" if thread["owns_gil"] else "")
        lines.append(f'Thread {thread["os_thread_id"]} ({status}): "{thread["thread_name"]}"')
        key = "short_filename" if short else "filename"
        lines += [f"    {frame['name']} ({frame[key]}:{frame['line']})" for frame in thread["frames"]]
    return "\n".join(lines) + "\n"
