"""Made-up evidence written as the directory of a trial that hung, as agents and a driver leave it.

Nothing is synced: what is measured is the reading. Not here: the evidence (``synthetic.py``) and what is measured
on it (``scale_figures.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from harness.capture import PROCESSES_SCHEMA
from harness.diagnosis_model import Evidence, RankEvidence
from harness.judge import HISTORY, TrialContext
from harness.ledger_snapshot import SNAPSHOT_SCHEMA
from harness.stacks import STACKS_SCHEMA


def write_trial(trial: Path, evidence: Evidence) -> None:
    """``trial``: a directory that is not there yet. Raises OSError."""
    decisions = trial / "decisions"
    decisions.mkdir(parents=True)
    for rank, records in evidence.decisions.items():
        lines = (json.dumps(record) + "\n" for record in records)
        (decisions / f"rank{rank}.jsonl").write_text("".join(lines))
    for sample in evidence.samples:
        folder = trial / "evidence" / f"sample-{sample.index}"
        for name in ("ledger", "stacks"):
            (folder / name).mkdir(parents=True)
        for rank, found in sample.ranks.items():
            if found.snapshot is not None:
                _write(folder / "ledger" / f"rank{rank}.json", SNAPSHOT_SCHEMA, _plain(found.snapshot))
            if found.stacks is not None:
                _write(folder / "stacks" / f"rank{rank}.json", STACKS_SCHEMA, _plain(found.stacks))
        table = [_process(rank, found) for rank, found in sample.ranks.items()]
        _write(folder / "processes.json", PROCESSES_SCHEMA, {"ranks": table, "children": []})
    manifest = {
        "reason": evidence.reason,
        "road": "budget",
        "times": asdict(evidence.times),
        "samples": [{"index": sample.index, "taken_s": sample.taken_s} for sample in evidence.samples],
        "missing": [],
    }
    _write(trial / "evidence" / "manifest.json", 1, manifest)
    known = [
        {"rank": rank, "role": "rank", "node": found.node, "pid": found.pid, "device": found.device}
        for rank, found in evidence.samples[0].ranks.items()
    ]
    _write(trial / HISTORY, 1, {"finished": False, "captured": True, "ranks": known})


def context(world: int) -> TrialContext:
    """What a run would know of such a trial."""
    return TrialContext({}, "builtin", world, True, 0, "")


def _process(rank: int, found: RankEvidence) -> dict[str, Any]:
    return {"rank": rank, "name": f"rank{rank}", "pid": found.pid, "state": found.state, "exit": found.exit}


def _write(path: Path, schema: int, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"schema": schema, **document}, default=_plain))


def _plain(value: object) -> dict[str, Any]:
    """As ``to_json`` of a snapshot or of stacks, which copies all of it first: that takes ten times as long."""
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is no part of evidence")
    return {field.name: getattr(value, field.name) for field in fields(value)}
