"""A run held against its baseline, as ``hangrig run --baseline`` asked for it.

run.json remembers the baseline (``{"asked": "last-pass" | path, "run": path | null}``), so that reports written
again compare again. The comparison is kept beside the reports (baseline.json): it outlives a baseline that is
pruned. A regression turns the run's verdict into fail, what cannot be compared into unknown; a first night, and a
night that was skipped, are compared with nothing and change nothing. Not here: the comparison
itself (``compare_runs.py``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from harness.store import StoredRun, StoreError, read_run
from reports import compare_runs, fields, verdicts
from reports.model import Baseline, Result, Verdict
from reports.words import arm_name

FILE = "baseline.json"
_MEANS: Mapping[str, Verdict] = {"regression": "fail", "not-comparable": "unknown"}


def against_baseline(built: Result, stored: StoredRun) -> Result:
    """``built`` with its baseline, where the run has one."""
    asked = fields.table(stored.run, "baseline")
    if not asked:
        return built
    found = _compared(built, stored, fields.text(asked, "asked"), fields.optional_text(asked, "run"))
    verdict = verdicts.worst([built.verdict, _MEANS.get(found.verdict, built.verdict)])
    if verdict == built.verdict:
        return dataclasses.replace(built, baseline=found)
    return dataclasses.replace(
        built,
        baseline=found,
        verdict=verdict,
        headline=f"{found.sentence[0].upper()}{found.sentence[1:]}",
        exit=built.exit
        if built.exit == verdicts.INTERNAL_ERROR_EXIT
        else verdicts.exit_status(verdict, allow_skip=False, internal_error=False),
    )


def _compared(built: Result, stored: StoredRun, asked: str, run: str | None) -> Baseline:
    if run is None:
        told = "there is no earlier run to hold it against: no pass with the same device, scenarios and arms."
        return Baseline(asked, None, "none", told)
    if built.verdict == "skipped":
        return Baseline(asked, run, "none", "nothing was run, so nothing is held against the baseline.")
    try:
        document = compare_runs.compare(read_run(run), stored, built)
    except StoreError as error:
        kept = _kept(stored)
        if kept is None:
            return Baseline(asked, run, "not-comparable", f"the baseline cannot be read: {error}.")
        document = kept
    return Baseline(asked, run, document["verdict"], document["sentence"], document)


def _kept(stored: StoredRun) -> dict[str, Any] | None:
    """The comparison of an earlier report of this run."""
    try:
        document = json.loads((stored.path / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(document, dict) and all(
        isinstance(document.get(key), str) for key in ("verdict", "sentence")
    )
    return document if whole else None


def lines(baseline: Baseline) -> list[str]:
    """The baseline in plain text: what it is, and what was found, a line each."""
    name = "" if baseline.run is None else f" {baseline.run}"
    found = [f"baseline ({baseline.asked}){name}: {baseline.verdict}: {baseline.sentence}"]
    document = baseline.comparison or {}
    for arm in fields.rows(document, "arms"):
        where = f"{fields.text(arm, 'scenario')} {arm_name(fields.table(arm, 'arm'))}"
        found += [f"worse: {where}: {why}" for why in fields.texts(arm, "reasons")]
        found += [f"note: {where}: {note}" for note in fields.texts(arm, "notes")]
    for row in fields.rows(document, "signatures"):
        status, known = fields.text(row, "status"), fields.flag(row, "known")
        if status != "both" or known:
            tail = ", a known issue" if known else ""
            counts = f"{fields.integer(row, 'before')} before, {fields.integer(row, 'after')} now"
            found.append(f"signature {status}{tail}: {fields.text(row, 'signature')} ({counts})")
    found += [
        f"not compared: {fields.text(one, 'scenario')} {fields.text(one, 'arm')}: {fields.text(one, 'why')}"
        for one in fields.rows(document, "not_compared")
    ]
    return found
