"""The command ``hangrig litmus``: a request in; documents, files and an exit status out.

``<out>/<UTC time>-litmus/`` holds ``litmus.json``, ``litmus.md`` and what the processes printed (``rank<r>.log``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.doctor import check_device
from harness.litmus.crew import COMMAND
from harness.litmus.report import document, markdown, show, skipped_document
from harness.litmus.request import LitmusError, LitmusRequest
from harness.litmus.session import Findings, programs_for, run_session
from harness.litmus.tuning import DeviceTable
from harness.store import new_folder, write_bytes, write_json

__all__ = ["LitmusDone", "LitmusError", "LitmusRequest", "run_litmus"]


@dataclass(frozen=True, slots=True)
class LitmusDone:
    """``findings`` None: there is no such device."""

    document: dict[str, Any]
    findings: Findings | None
    exit: int

    def show(self, stream: IO[str]) -> None:
        if self.findings is None:
            stream.write(f"skipped: {self.document['why']}\n")
            return
        show(self.findings, stream)
        stream.write(f"{self.document['run']}/litmus.md\n")


def run_litmus(
    request: LitmusRequest,
    tell: Callable[[str], None],
    *,
    allow_skip: bool = False,
    command: Sequence[str] = COMMAND,
    table: DeviceTable | None = None,
) -> LitmusDone:
    """Runs, judges and stores. Raises LitmusError for a wrong request, before anything starts, and StoreError."""
    programs_for(request)
    found = check_device(request.device)
    if found.status == "missing":
        skipped = skipped_document(request, f"{found.name}: {found.detail}; {found.mend}")
        return LitmusDone(skipped, None, 0 if allow_skip else 4)
    folder = new_folder(request.out, "litmus")
    findings = run_session(request, folder, tell, command=command, table=table)
    _drop_empty(folder)
    stored = {**document(findings), "run": str(folder)}
    write_bytes(folder / "litmus.md", markdown(findings).encode())
    write_json(folder / "litmus.json", stored)
    status = 0 if findings.exit == 4 and allow_skip else findings.exit
    return LitmusDone(stored, findings, status)


def _drop_empty(folder: Path) -> None:
    for log in folder.glob("rank*.log"):
        if log.stat().st_size == 0:
            log.unlink()
