"""A trial's directory, diagnosed by the same rules and from the same evidence as when it was judged."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from harness.diagnose import diagnose
from harness.diagnosis_model import Diagnosis, Fact, nothing_stopped
from harness.judge import TrialContext, evidence_of, read_history
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
    if history.get("finished"):
        fact = Fact("the trial finished", "history.json")
        return nothing_stopped((fact,), (), simulation=simulation)
    if not (stored.samples or history.get("failed")):
        return None
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
    return diagnose(evidence_of(stored, history, context))
