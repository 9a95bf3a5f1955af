"""What a litmus run found, as a document for programs and as tables for people.

Text from a process is shown as text: rich never reads it as markup. Not here: how verdicts come about
(``judge.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.litmus.judge import Judged
from harness.litmus.request import LitmusRequest
from harness.litmus.session import Findings
from harness.machine import machine_facts, versions
from harness.rates import Rate

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow", "skipped": "dim"}
_VERDICT_OF_EXIT = {0: "pass", 1: "fail", 3: "unknown", 4: "skipped"}
_PLAIN_WIDTH = 150


def document(findings: Findings) -> dict[str, Any]:
    """As CONTRACTS.md and schemas/litmus.json have it, without ``run``."""
    request = findings.request
    return {
        **_head(request),
        "verdict": _VERDICT_OF_EXIT[findings.exit],
        "exit": findings.exit,
        "stress": {family: tuned.to_json() for family, tuned in findings.tuned.items()},
        "platform": dict(findings.platform),
        "tests": [line.to_json() for line in findings.lines],
        "why": "",
    }


def skipped_document(request: LitmusRequest, why: str) -> dict[str, Any]:
    """Where there is no such device."""
    return {
        **_head(request),
        "verdict": "skipped",
        "exit": 4,
        "stress": {},
        "platform": {},
        "tests": [],
        "why": why,
    }


def _head(request: LitmusRequest) -> dict[str, Any]:
    simulation = request.device == "sim"
    return {
        "schema": 1,
        "device": request.device,
        "model": request.memory_model,
        "simulation": simulation,
        "simulation_note": _cannot_show() if simulation else "",
        "seed": request.seed,
        "iterations": request.iterations,
        "defects": sorted(request.defects),
        "versions": versions(),
        "machine": machine_facts(),
    }


def _cannot_show() -> str:
    from harness.devices.sim import CANNOT_SHOW  # torch

    return CANNOT_SHOW


# --- for people --------------------------------------------------------------------------------------------

_HEAD = ("program", "outcome", "allowed", "seen", "k of n", "95 % interval", "power", "verdict")


def show(findings: Findings, stream: IO[str]) -> None:
    """The table, what it was run under, and what is wrong. Raises BrokenPipeError when nobody reads it."""
    interactive = stream.isatty()
    console = _Console(
        file=stream, highlight=False, no_color=not interactive, width=None if interactive else _PLAIN_WIDTH
    )
    table = Table(title=Text(_title(findings)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _HEAD:
        table.add_column(name, overflow="fold", justify="right" if name == "k of n" else "left")
    for line in findings.lines:
        *cells, verdict = _cells(line)
        table.add_row(*map(Text, cells), Text(verdict, style=_STYLES[verdict]))
    console.print(table)
    for said in _remarks(findings):
        console.print(Text(said), soft_wrap=True)
    if findings.request.device == "sim":
        console.print(Text(f"Simulation. {_cannot_show()}", style="yellow"))
    verdict = _VERDICT_OF_EXIT[findings.exit]
    console.print(Text(verdict.upper(), style=_STYLES[verdict]).append(f"  {_summary(findings)}", "default"))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process with status 1, which says that something is forbidden."""
        raise BrokenPipeError


def markdown(findings: Findings) -> str:
    """litmus.md."""
    rows = [_HEAD, ("---",) * len(_HEAD), *(_cells(line) for line in findings.lines)]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines = [
        f"# {_title(findings)}",
        "",
        f"**{_VERDICT_OF_EXIT[findings.exit].upper()}** {_summary(findings)}",
    ]
    if findings.request.device == "sim":
        lines += ["", f"> Simulation. {_cannot_show()}"]
    lines += ["", *table, "", *(f"- {said}" for said in _remarks(findings))]
    return "\n".join(lines) + "\n"


def _title(findings: Findings) -> str:
    request = findings.request
    defects = f", defects {', '.join(sorted(request.defects))}" if request.defects else ""
    return f"litmus on {request.device}, memory model {request.memory_model}{defects}, seed {request.seed}"


def _cells(line: Judged) -> tuple[str, ...]:
    allowed = {"forbidden": "no", "control": "yes, a control", "observed": "either way"}
    return (
        line.name,
        ", ".join(line.program.watched),
        allowed[line.rule.kind],
        line.observation if line.observed.n else "-",
        f"{line.observed.k} of {line.observed.n}",
        _interval(line.observed),
        "yes" if line.power else "no",
        line.verdict,
    )


def _interval(observed: Rate) -> str:
    return f"{observed.low * 100:.3g} to {observed.high * 100:.3g} %"


def _remarks(findings: Findings) -> Sequence[str]:
    """The stress that was chosen, and a sentence on each line that did not simply pass."""
    said = [tuned.words for tuned in findings.tuned.values()]
    if findings.platform.get("shared"):
        said.append("both ranks shared one device over gloo: their programs say nothing about NCCL")
    for line in findings.lines:
        if line.verdict == "fail":
            means = line.to_json()["means"]
            said.append(f"{line.name}: {line.why}. It means: {means}. Promised by: {line.rule.source}")
        elif line.why and line.rule.kind != "observed":
            said.append(f"{line.name}: {line.why}")
    return said


def _summary(findings: Findings) -> str:
    forbidden = [line for line in findings.lines if line.rule.kind == "forbidden"]
    seen = [line.name for line in forbidden if line.verdict == "fail"]
    blind = [line.name for line in findings.lines if line.verdict == "unknown"]
    if seen:
        return f"{len(seen)} of {len(forbidden)} forbidden outcomes seen: {', '.join(seen)}"
    if failed := [line.name for line in findings.lines if line.verdict == "fail"]:
        return f"came to a stop or held what nobody wrote: {', '.join(failed)}"
    if blind:
        return f"no forbidden outcome seen, but nothing is known of: {', '.join(blind)}"
    return f"none of {len(forbidden)} forbidden outcomes seen, and each could have been"
