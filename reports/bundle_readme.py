"""README.md of a bundle: what happened, in a page, from documents that are redacted already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.environment import Reading
from harness.redact_rules import KINDS, Kind
from harness.stored import StoredTrial
from reports import fields, words
from reports.fields import Document
from reports.hang_text import diagnosis_lines
from reports.known import read_known
from reports.markdown import block, code, escape, table
from reports.model import Missing
from reports.result import read_trial

_PROOF = re.compile(r"proof: |and \d+ more facts? in the report")
"""Lines of the short account; the whole proof has its own section."""
_MEANINGS: Mapping[Kind, str] = {
    "secret": "values of variables and options whose names look secret, credentials in addresses, tokens, keys",
    "prompt": "what users asked and were answered, and its token ids, in logs",
    "email": "mail addresses",
    "machine": "hardware addresses, device UUIDs, boot ids",
    "ip": "IP addresses (loopback ones stay)",
    "user": "user names",
    "host": "host names",
    "path": "folders that belong to no known package; file names stay",
}


def render(
    trial_id: str,
    documents: Mapping[str, Document | None],
    folder: str,
    readings: Sequence[Reading],
    missing: Iterable[Missing],
    left_out: Iterable[Missing],
    converted: Mapping[str, str],
    redactions: Mapping[str, Any],
) -> str:
    """``documents``: run, trial, diagnosis and engine, where they are there. ``folder``: the bundle's, unpacked."""
    run = documents.get("run") or {}
    stored = StoredTrial(
        id=trial_id,
        path=Path(folder),
        trial=_dict(documents.get("trial")),
        diagnosis=_dict(documents.get("diagnosis")),
        manifest=None,
        samples=(),
        merged=None,
        waits=None,
        engine=_dict(documents.get("engine")),
        latency={},
        tokens={},
        problems=(),
    )
    trial = read_trial(stored, folder, known=read_known(run))
    title = f"{trial.scenario}, {trial.name}: {trial.outcome}"
    lines = [f"# {escape(title)}", ""]
    if fields.flag(run, "simulation"):
        note = fields.text(run, "simulation_note", "Simulated device: no evidence about hardware.")
        lines += [f"> **Simulation.** {escape(note)}", ""]
    lines += ["## What happened", ""]
    if trial.outcome in ("healthy", "skipped"):
        lines.append(f"- {escape(trial.outcome)}")
    else:
        lines += [f"- {escape(line)}" for line in diagnosis_lines(trial) if not _PROOF.match(line)]
    lines += [
        f"- check {escape(check.name)}: {escape(check.verdict)}"
        + (f", {escape(check.reason)}" if check.reason else "")
        for check in trial.checks
        if check.verdict in ("fail", "unknown")
    ]
    if trial.diagnosis is not None and trial.diagnosis.proof:
        lines += ["", "## Proof", ""]
        lines += [
            f"{number}. {escape(fact.fact)}" + (f" ({code(fact.evidence)})" if fact.evidence else "")
            for number, fact in enumerate(trial.diagnosis.proof, 1)
        ]
    lines += ["", "## Again", "", "Unpack the archive; beside its folder:", "", block(trial.rerun)]
    lines += [block(f"hangrig report {folder}"), ""]
    lines += ["or, from the scenario alone:", "", block(_command(run, trial_id, folder)), ""]
    lines += ["As it was run:", "", block(fields.text(run, "command", "unknown")), ""]
    lines += ["## Environment", ""]
    rows = [(escape(one.name), escape(one.value or "unknown"), escape(one.why)) for one in readings]
    lines += [*table(("what", "value", "from"), rows), ""]
    lines += _redacted(redactions)
    lines += _listed("Missing", missing)
    lines += _listed("Left out", left_out)
    if converted:
        lines += ["## Converted", ""]
        lines += [f"- {code(name)} was {escape(was)}" for name, was in sorted(converted.items())] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _dict(document: Document | None) -> dict[str, Any] | None:
    return None if document is None else dict(document)


def _command(run: Document, trial_id: str, folder: str) -> str:
    """``hangrig run`` with the arm and the seed of the trial."""
    plan = next((one for one in fields.rows(run, "planned") if one.get("id") == trial_id), {})
    arm = " ".join(
        f"--set arms.{toggle}='[\"{value}\"]'" for toggle, value in sorted(fields.table(plan, "arm").items())
    )
    parts = ["hangrig run", f"{folder}/scenario.toml", f"--device {fields.text(run, 'device', 'sim')}", arm]
    return " ".join(filter(None, [*parts, f"--trials 1 --seed {fields.integer(plan, 'seed')}"]))


def _redacted(redactions: Mapping[str, Any]) -> list[str]:
    placeholders = redactions["placeholders"]
    rows = [
        (kind, str(redactions["totals"].get(kind, 0)), _range(placeholders.get(kind, [])), _MEANINGS[kind])
        for kind in KINDS
        if redactions["totals"].get(kind)
    ]
    lines = ["## Redacted", "", "A placeholder stands for the same value everywhere in this bundle;"]
    lines += ["`redactions.json` counts them by file.", ""]
    lines += table(("kind", "replaced", "placeholders", "what"), rows) if rows else ["Nothing was found."]
    if redactions["kept"]:
        lines += ["", f"Kept, as asked for: {escape(', '.join(redactions['kept']))}."]
    return [*lines, ""]


def _range(names: Sequence[str]) -> str:
    return (
        code(names[0])
        if len(names) == 1
        else words.listing([code(name) for name in names], most=2)
        if names
        else ""
    )


def _listed(title: str, items: Iterable[Missing]) -> list[str]:
    lines = [f"- {code(item.what)}: {escape(item.why)}" for item in items]
    return [f"## {title}", "", *lines, ""] if lines else []
