"""What is stored of a trial that finished with wrong tokens, brought to ``diagnosis_corruption``.

Not here: which tokens are wrong (``checkers.py``) and what that means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.diagnosis_corruption import Differing, corruption
from harness.diagnosis_model import Culprit, Diagnosis, Missing, nothing_stopped
from harness.store import StoredTrial

_UNSEEN = Missing(
    "a copy witness", "no rank recorded a copy that brought something else (engine.check_copies)"
)


def explained(
    stored: StoredTrial, history: Mapping[str, Any], places: Mapping[str, int], *, simulation: bool
) -> Diagnosis:
    """``places``: by wrong request, the position in its output of the first difference."""
    served = _served(stored.path)
    wrong = [_differing(request, place, served.get(request, {})) for request, place in places.items()]
    cause = corruption(stored.all_decisions(), wrong, {rank for ranks in served.values() for rank in ranks})
    known = {entry["rank"]: entry for entry in history.get("ranks", [])}
    missing = () if cause.stream is not None else (_UNSEEN,)
    return replace(
        nothing_stopped(cause.facts, missing, simulation=simulation),
        mechanism=cause.mechanism,
        culprits=tuple(_culprit(known.get(rank, {}), rank) for rank in cause.ranks if isinstance(rank, int)),
        stream=cause.stream,
        confidence=cause.confidence,
        signature="" if cause.mechanism == "unknown" else cause.signature,
    )


def _differing(request: str, place: int, served: Mapping[int, list[int]]) -> Differing:
    steps = [at[place] for at in served.values() if place < len(at)]
    return Differing(request, place, tuple(sorted(served)), min(steps, default=None))


def _culprit(known: Mapping[str, Any], rank: int) -> Culprit:
    return Culprit(
        rank, known.get("role", "rank"), known.get("node", ""), known.get("pid", 0), known.get("device")
    )


def _served(trial: Path) -> dict[str, dict[int, list[int]]]:
    """By request and rank: the steps in which the rank put out the request's tokens, one after the other."""
    served: dict[str, dict[int, list[int]]] = {}
    for path in sorted((trial / "tokens").glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = json.loads(line)
            for request in record["tokens"]:
                served.setdefault(request, {}).setdefault(rank, []).append(int(record["step"]))
    return served
