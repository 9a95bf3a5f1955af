"""The courier: a small actor on a node of its own that carries files between the driver and that node's
agent.

Nodes share no file system. The courier launches the agent, hands commands on, returns status and, at the
end, the evidence as one archive. It judges nothing; when it dies the agent notices the driver's silence and
ends its node.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from harness import agent_files, agent_launch, process_control
from harness.agent_files import AgentConfig, Command, Status
from harness.process_control import ProcessId
from harness.seats import in_order
from harness.store import write_bytes, write_json

_PER_NODE = ("manifest.json", "processes.json", agent_files.LOG)
"""Files that each node has its own of; all others are a rank's, and ranks differ."""


class Courier:
    """Lives in a Ray worker on the agent's node. Everything it takes and gives is JSON text or bytes."""

    def launch(self, config: str, timeout_s: float) -> tuple[str, int, int, int]:
        """Starts the agent. Returns its spool, its pid and start time, and the courier's own pid."""
        self._spool = agent_launch.make_spool()
        self._agent = agent_launch.launch(self._spool, AgentConfig.model_validate_json(config), timeout_s)
        own = process_control.myself()
        return str(self._spool), self._agent.pid, self._agent.start_time_ticks, own.pid

    def exchange(self, command: str, stale_s: float) -> tuple[str | None, str | None]:
        """Hands a command on. Returns the newest status, and what is wrong with the agent."""
        parsed = Command.model_validate_json(command)
        own = process_control.myself()
        parsed = parsed.model_copy(update={"owned": (*parsed.owned, own)})
        agent_files.write(self._spool, agent_files.COMMAND, parsed)
        status = agent_files.read(self._spool, agent_files.STATUS, Status)
        text = None if status is None else status.model_dump_json(by_alias=True)
        return text, agent_launch.problem(self._agent, status, stale_s)

    def evidence(self) -> bytes:
        """The trial's evidence as an uncompressed tar archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(self._spool / agent_files.EVIDENCE, arcname=".")
        return buffer.getvalue()

    def forget_evidence(self) -> None:
        """Between trials."""
        shutil.rmtree(self._spool / agent_files.EVIDENCE, ignore_errors=True)

    def retire(self, deadline_s: float) -> list[tuple[int, int]]:
        """After the agent was told to stop. Returns what would not die."""
        left = agent_launch.retire(self._spool, self._agent, deadline_s)
        return [(process.pid, process.start_time_ticks) for process in left]


def unpack(archive: bytes, evidence: Path, node: str) -> None:
    """Lays another node's evidence into the trial's. Raises OSError, StoreError or tarfile.TarError.

    Ranks' files go where they belong. Of the files that each node has its own of, samples' process tables
    and the manifests' samples and missing pieces are joined; the manifest of each other node is kept under
    ``nodes``.
    """
    with tempfile.TemporaryDirectory(prefix="hg-unpack-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            opened.extractall(folder, filter="data")
        root = Path(folder)
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            target = evidence / relative
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif path.name == "processes.json" and target.exists():
                _join_processes(target, _load(path))
            elif path.name == "manifest.json" and len(relative.parts) == 1:
                continue  # last, when all that it speaks of is there
            elif path.name in _PER_NODE and path.name != "processes.json":
                write_bytes(target.with_name(f"{path.stem}.{node}{path.suffix}"), path.read_bytes())
            else:
                write_bytes(target, path.read_bytes())
        if (root / "manifest.json").exists():
            _join_manifest(evidence / "manifest.json", _load(root / "manifest.json"), node)


def _join_processes(target: Path, other: dict[str, Any]) -> None:
    own = _load(target)
    rows = {
        entry["name"] if entry["rank"] is None else entry["rank"]: entry
        for entry in (*own["ranks"], *other["ranks"])
    }
    children = [*own.get("children", ()), *other.get("children", ())]
    write_json(target, {**own, "ranks": [rows[seat] for seat in in_order(rows)], "children": children})


def _join_manifest(target: Path, other: dict[str, Any], node: str) -> None:
    """The manifest that was first stays the trial's; its clock is that of its own node."""
    own = _load(target) if target.exists() else dict(other)
    nodes = {**own.get("nodes", {}), node: other}
    known = [(lack["what"], lack["why"]) for lack in own["missing"]]
    missing = own["missing"] + [x for x in other["missing"] if (x["what"], x["why"]) not in known]
    samples = {sample["index"]: sample for sample in (*other["samples"], *own["samples"])}
    joined = {
        **own,
        "samples": [samples[index] for index in sorted(samples)],
        "missing": missing,
        "nodes": nodes,
    }
    write_json(target, joined)


def _load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def agent_of(answer: tuple[str, int, int, int]) -> ProcessId:
    """The agent in what ``launch`` returned."""
    return ProcessId(answer[1], answer[2])
