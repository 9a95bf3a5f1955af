"""A trial's directory, diagnosed by the same rules and from the same evidence as when it was judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.diagnosis_model import Culprit, Diagnosis, Fact, Missing, nothing_stopped
from harness.judge import TrialContext, diagnose_stored, read_history
from harness.offline.recognise import DumpsError, Recognised
from harness.store import read_trial

_TRIAL_FILES = ("trial.json", "history.json")


def trial_folder(directory: Path, files: tuple[Recognised, ...]) -> Path | None:
    """The trial that ``directory`` is or holds; None where it holds none. Raises DumpsError for several."""
    paths = [PurePosixPath(file.path) for file in files]
    folders = sorted({path.parent for path in paths if path.name in _TRIAL_FILES})
    if len(folders) > 1:
        named = ", ".join(str(folder) for folder in folders[:4])
        raise DumpsError(f"{directory}: {len(folders)} trials; give the directory of one of them: {named}")
    if not folders:
        return None
    folder = directory / folders[0]
    return folder if (folder / "evidence").is_dir() or (folder / "history.json").exists() else None


def diagnose_trial(path: Path) -> Diagnosis | None:
    """None where the trial left no capture, and did not finish: then only its parts can tell."""
    stored = read_trial(path)
    history = read_history(path)
    trial = stored.trial or {}
    simulation = trial.get("device") == "sim"
    ranks = trial.get("ranks") or history.get("ranks") or ()
    held = [
        seat
        for sample in stored.samples
        for seat in (*sample.ledgers, *sample.stacks)
        if isinstance(seat, int)
    ]
    world = max([len(ranks), *(rank + 1 for rank in held)])
    context = TrialContext(
        planned=trial, target=str(trial.get("target", "")), world=world, simulation=simulation,
        retractions_required=0, rerun="",
    )  # fmt: skip
    if trial.get("outcome") == "corrupt" and stored.diagnosis is not None:
        # It finished, with wrong tokens: its reference, which says so, lies outside of the trial.
        return _as_stored(stored.diagnosis, simulation=simulation)
    found = diagnose_stored(stored, history, context)
    if found is None and history.get("finished"):
        fact = Fact("the trial finished", "history.json")
        return nothing_stopped((fact,), (), simulation=simulation)
    return found


def _as_stored(document: Mapping[str, Any], *, simulation: bool) -> Diagnosis:
    """What the judge wrote down. Nothing hung, so there is no more in it than who, and why."""
    facts = tuple(
        Fact(str(one.get("fact", "")), str(one.get("evidence", ""))) for one in _rows(document, "proof")
    )
    lacks = tuple(
        Missing(str(one.get("what", "")), str(one.get("why", "")), bool(one.get("impossible")))
        for one in _rows(document, "missing_evidence")
    )
    culprits = tuple(
        Culprit(
            one.get("rank"),
            str(one.get("role", "")),
            str(one.get("node", "")),
            int(one.get("pid") or 0),
            one.get("device"),
        )
        for one in _rows(document, "culprits")
    )
    return replace(
        nothing_stopped(facts, lacks, simulation=simulation),
        mechanism=document.get("mechanism", "unknown"),
        culprits=culprits,
        confidence=document.get("confidence", "suspected"),
        signature=str(document.get("signature", "")),
    )


def _rows(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = document.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
