"""What the ledger's tests share: making, filling and reading a ledger, and child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.ledger import STREAMS, LedgerReader, LedgerWriter, Snapshot

CHILD_DEADLINE_S = 60.0


def make(directory: Path, **more: Path) -> LedgerWriter:
    return LedgerWriter.create(
        directory / "rank0.ledger", rank=0, world=2, node="node-a", device="sim", **more
    )


def read(writer_or_path: LedgerWriter | Path) -> Snapshot:
    path = writer_or_path if isinstance(writer_or_path, Path) else writer_or_path.path
    reader = LedgerReader.open(path)
    try:
        return reader.snapshot()
    finally:
        reader.close()


def fill(writer: LedgerWriter) -> None:
    """Something in every section."""
    group = writer.group("tp", (0, 1))
    for step in range(1, 6):
        writer.phase("decode", step)
        for stream in STREAMS:
            writer.complete(stream, writer.enqueue(stream, f"op {step}", f"engine.py:{step}"))
            writer.stamp(stream)
        last = writer.collective_enqueue(group, "all_reduce", (step, 8), "float32", count=2)
        writer.collective_start(group, last - 1)
        writer.collective_complete(group, last)
        writer.external_recorded(3)
        writer.external_consumed([3])
        writer.decision({"step": step, "mode": "decode"})
    writer.name_external(3, "layer 3")
    writer.enqueue("compute", "replay decode-4", "engine.py:77")


def content(snapshot: Snapshot) -> dict[str, object]:
    return {**snapshot.to_json(), "taken_ns": 0, "boottime_ns": 0}


def run_child(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_DEADLINE_S,
        check=False,
    )
