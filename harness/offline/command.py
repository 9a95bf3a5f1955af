"""The command ``hangrig diagnose``: a directory in, a document, a text and an exit status out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.offline.by_ledgers import Verdict
from harness.offline.files import MOST_FILES, find_dumps
from harness.offline.gather import gather
from harness.offline.recognise import LOOKED_FOR, DumpsError, Recognised
from harness.offline.text import Answer, document, text, used_files
from harness.offline.trial import diagnose_trial, trial_folder
from harness.offline.verdict import conclude

_EVIDENCE = frozenset(
    {
        "stacks", "flight recorder", "torch log", "ledger", "decisions", "process table", "refused dump", "pickle",
        "damaged",
    }
)  # fmt: skip


def run_diagnose(directory: Path, tell: Callable[[str], None]) -> tuple[dict[str, Any], str, int]:
    """The document, the text for people and the exit status. ``tell`` gets a line about what is not read.

    Raises DumpsError: no such directory, or nothing in it that hangrig knows.
    """
    found = find_dumps(directory)
    pickles = [file for file in found.files if file.kind == "pickle"]
    if pickles:
        tell(f"{', '.join(file.path for file in pickles)}: {pickles[0].problem}")
    if found.left_out:
        tell(f"{directory}: read are the first {MOST_FILES} files, {found.left_out} or more are not")
    folder = trial_folder(directory, found.files)
    answer = None if folder is None else _of_trial(directory, folder, found.files)
    if answer is None:
        answer = _of_dumps(directory, found.files)
    return document(answer), text(answer), answer.exit


def _of_trial(directory: Path, folder: Path, files: tuple[Recognised, ...]) -> Answer | None:
    diagnosis = diagnose_trial(folder)
    if diagnosis is None:
        return None
    # A trial may finish with wrong tokens: nothing stands, and it is not well.
    well = diagnosis.kind == "none" and diagnosis.mechanism == "unknown"
    verdict: Verdict = "healthy" if well else "not healthy"
    if diagnosis.kind != "none" and not diagnosis.culprits and diagnosis.mechanism == "unknown":
        verdict = "cannot tell"
    kinds = used_files([(file.path, file.kind) for file in files])
    unknown = tuple(file.path for file in files if file.kind == "unknown")
    return Answer(str(directory), verdict, diagnosis, (), "", kinds, unknown, ())


def _of_dumps(directory: Path, files: tuple[Recognised, ...]) -> Answer:
    if not any(file.kind in _EVIDENCE for file in files):
        seen = f"; there are {len(files)} files of other kinds" if files else "; it is empty"
        raise DumpsError(f"{directory}: holds nothing that hangrig knows{seen}. Looked for: {LOOKED_FOR}")
    gathered = gather(files)
    conclusion = conclude(gathered)
    return Answer(
        directory=str(directory),
        verdict=conclusion.verdict,
        diagnosis=conclusion.diagnosis,
        seats=conclusion.seats,
        engine=gathered.engine,
        used=used_files([(file.path, file.kind) for file in files]),
        ignored=gathered.ignored,
        samples=tuple(sample.name for sample in gathered.samples),
    )


__all__ = ["DumpsError", "run_diagnose"]
