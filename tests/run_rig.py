"""Starts ``hangrig`` as a process, waits for what it writes, and shows that nothing of it is left.

Everything that a run starts inherits a mark in its environment, so what outlives it is found however it was
orphaned. Each wait has a deadline and says what did not come.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from harness import process_control
from harness.agent_files import CONFIG, AgentConfig, read
from harness.judge import HISTORY, evidence_of
from harness.ledger import LedgerReader
from harness.ledger_layout import LedgerError
from harness.ledger_snapshot import Snapshot
from harness.process_control import ProcessId
from harness.pytest_plugin import HangOutcome, HangTrial
from harness.scenario import from_record
from harness.store import RunStore, read_trial
from harness.trial_spec import context

ROOT = Path(__file__).resolve().parents[1]
MARK = "HANGRIG_TEST_RUN"
COME_S = 120.0
"""For what a run is to bring about: cluster, ranks and reference come before it, on a machine that is busy."""
END_S = 90.0
"""For a run to end once nothing holds it up any more."""
GONE_S = 30.0
"""For agent, ranks and cluster to be gone after the driver."""
_POLL_S = 0.05

# Short silences are suspicious, so that tests are quick; long enough for a machine on which others work.
QUICK = ("watchdog.ceiling_s=6", "watchdog.startup_s=10", "watchdog.capture_s=15")

TWIN = """
name = "dp-pinned-twin"
summary = "the healthy twin of dp-pinned-hang: the same engine and requests, and no defect"

[engine]
kv_tokens = 2048
max_running = 16
graph_buckets = [1, 2, 4, 8, 16]

[workload]
kind = "alternating"
grammar_share = 0.5

[toggles]
graph = "on"
overlap = "on"

[sim]
memory_model = "cann"
"""

T = TypeVar("T")


def options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def until(found: Callable[[], T | None], what: str, deadline_s: float = COME_S) -> T:
    """Waits for a truthy answer; raises TimeoutError when ``deadline_s`` have passed."""
    deadline = time.monotonic() + deadline_s
    pause = Event()
    while not (answer := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {deadline_s:g} s")
        pause.wait(_POLL_S)
    return answer


def run_pinned(hang_trial: HangTrial, folder: Path) -> HangOutcome:
    """The pageable and the pinned arm of dp-pinned-hang and of its twin, seed 1. Only the last trial hangs, so
    all have the same warm ranks."""
    twin = folder / "dp-pinned-twin.toml"
    twin.write_text(TWIN)
    arms = ('arms.symm_mem=["off"]', 'arms.pinned=["pageable","pinned"]')
    return hang_trial(twin, "dp-pinned-hang", settings=[*QUICK, *arms, "workload.requests=10"])


@dataclass(slots=True)
class Command:
    """One ``hangrig`` command in its own folder: ``runs`` below it, spools and scratch files in ``tmp``."""

    folder: Path
    driver: subprocess.Popen[bytes]
    mark: str
    cluster: tuple[str, str] | None = None
    """The mark of the run's own cluster, once it was seen."""
    cluster_folder: Path | None = None
    ranks: set[ProcessId] = field(default_factory=set)
    """All that ever stood in a ledger of a trial."""
    _known: set[Path] = field(default_factory=set)
    """Trials of which all ranks are known: no ledger is read for nothing beside ranks that want the processor."""

    @classmethod
    def start(cls, folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Command:
        """``hangrig ARGUMENTS --out FOLDER/runs`` for ``run`` and ``rerun``; the others as they are."""
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        out = ["--out", str(folder / "runs")] if arguments[0] in ("run", "rerun") else []
        mark = secrets.token_hex(8)
        with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as said:
            driver = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", *arguments, *out],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": str(folder / "tmp"),
                    MARK: mark,
                    **(env or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=said,
                cwd=ROOT,
                start_new_session=True,
            )
        return cls(folder, driver, mark)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that failed must not leave its run to the next one."""
        process_control.end(self.left(), GONE_S, grace_s=0.0)
        self.driver.wait(END_S)
        if self.cluster_folder is not None:
            shutil.rmtree(self.cluster_folder, ignore_errors=True)

    # What it says -----------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The run's directory."""
        return (self.folder / "runs" / "latest").resolve(strict=True)

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait(self) -> int:
        """The exit status. Notes meanwhile which processes there were."""
        until(lambda: self._look() or self.driver.poll() is not None, "the end of the run", COME_S + END_S)
        return self.driver.returncode

    def send(self, number: signal.Signals) -> None:
        self.driver.send_signal(number)

    # What there is of it ----------------------------------------------------------------------------------

    def trial(self, number: int = 0) -> Path:
        """Directory of the planned trial of that number; waits until it has begun."""

        def begun() -> Path | None:
            try:
                folder = self.trial_folder(number)
            except OSError:  # the run is not made yet
                return None
            return folder if any(event["kind"] == "started" for event in events(folder)) else None

        return self._come(begun, f"the beginning of trial {number}")

    def trial_folder(self, number: int) -> Path:
        """Where the planned trial of that number is, or will be."""
        planned = load(self.path / "run.json")["planned"]
        return self.path / "trials" / str(planned[number]["id"])

    def stepped(self, trial: Path, step: int) -> dict[int, Snapshot]:
        """Waits until all ranks have come to ``step``; returns their ledgers by rank."""

        def far() -> dict[int, Snapshot] | None:
            found = snapshots(trial)
            enough = len(found) == 2 and all(one.host.step >= step for one in found.values())
            return found if enough else None

        return self._come(far, f"step {step}")

    def hung(self, trial: Path, still_s: float = 1.0) -> None:
        """Waits until rank 1 has lost a record and no ledger has moved for ``still_s``."""
        seen: dict[str, Any] = {"marks": None, "since": 0.0}

        def still() -> bool:
            found = snapshots(trial)
            marks = {rank: one.watermark() for rank, one in found.items()}
            now = time.monotonic()
            if len(found) < 2 or marks != seen["marks"]:
                seen.update(marks=marks, since=now)
            lost = any(event.overtaken for event in found[1].external) if 1 in found else False
            return lost and now - seen["since"] > still_s

        self._come(still, "the hang")

    def wait_for_words(self, pattern: str) -> re.Match[str]:
        """Waits until standard error holds ``pattern``."""
        return self._come(lambda: re.search(pattern, self.stderr), f"the words {pattern!r}")

    def _come(self, found: Callable[[], T | None], what: str) -> T:
        """As ``until``, and gives up at once when the driver has ended."""

        def look() -> tuple[T] | None:
            self._look()
            answer = found()
            if not answer and self.driver.poll() is not None:
                raise RuntimeError(f"the run ended ({self.driver.returncode}) before {what}:\n{self.stderr}")
            return (answer,) if answer else None

        try:
            return until(look, what)[0]
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the run said:\n{self.stderr}") from error

    # What is left of it -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Notes the cluster and the ranks while they are there."""
        if self.cluster is None:
            for spool in (self.folder / "tmp").glob("hg-agent-*"):
                config = read(spool, CONFIG, AgentConfig)
                if config is not None and config.cluster is not None:
                    self.cluster, self.cluster_folder = config.cluster.mark, config.cluster.folder
        for trial in (self.folder / "runs").glob("*/trials/*"):
            if trial in self._known:
                continue
            found = [one.header for one in snapshots(trial).values()]
            self.ranks |= {ProcessId(header.pid, header.start_time_ticks) for header in found}
            if found and len(found) == found[0].world:
                self._known.add(trial)

    def left(self) -> list[ProcessId]:
        """Living processes: by the test's mark, by the cluster's, and the ranks by number and start time."""
        found = set(process_control.marked_with(MARK, self.mark))
        if self.cluster is not None:
            found.update(process_control.marked_with(*self.cluster))
        found.update(rank for rank in self.ranks if process_control.alive(rank))
        return sorted(found)

    def assert_nothing_left(self) -> None:
        """No process, no folder of the cluster, no spool. The agent may need a moment after its driver."""
        assert self.cluster is not None, "the run was never seen to have a cluster"
        assert self.ranks, "the run was never seen to have ranks"
        process_control.wait_gone(self.left(), GONE_S)
        assert [Path(f"/proc/{one.pid}/cmdline").read_text() for one in self.left()] == []
        assert self.cluster_folder is not None and not self.cluster_folder.exists()
        assert list((self.folder / "tmp").glob("hg-*")) == []


# A stored run ---------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def events(trial: Path) -> list[dict[str, Any]]:
    """Whole lines of events.jsonl; none before there is one."""
    path = trial / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def snapshots(trial: Path) -> dict[int, Snapshot]:
    """Ledgers by rank, as far as they can be read now."""
    found = {}
    for path in sorted((trial / "ledger").glob("rank*.ledger")):
        try:
            reader = LedgerReader.open(path)
        except LedgerError:  # being made
            continue
        try:
            found[int(path.stem.removeprefix("rank"))] = reader.snapshot()
        finally:
            reader.close()
    return found


def stored_evidence(run: Path, trial_id: str) -> Any:
    """The evidence of a stored trial, as the diagnosis takes it."""
    document = RunStore.open(run).document
    plan = next(plan for plan in document["planned"] if plan["id"] == trial_id)
    entry = next(entry for entry in document["scenarios"] if entry["name"] == plan["scenario"])
    known = context(plan, from_record(entry, device=document["device"]), run, document["simulation"])
    trial = run / "trials" / trial_id
    return evidence_of(read_trial(trial), load(trial / HISTORY), known)


def threads(trial: Path, sample: int, rank: int, *, native: bool = False) -> set[str]:
    """Thread names in a stored stack."""
    suffix = ".native.json" if native else ".json"
    stacks = load(trial / "evidence" / f"sample-{sample}" / "stacks" / f"rank{rank}{suffix}")
    return {thread["name"] for thread in stacks["threads"]}
