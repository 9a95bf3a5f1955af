"""What driver and agent tell each other, as files in the agent's spool directory on its own node.

    config.json    written once before the agent starts
    command.json   written by the driver (or its courier): the whole wish each time, never a difference
    status.json    written by the agent: the whole state each time
    agent.log      what the agent met
    evidence/      the evidence, when the run directory is on another node

Files, because they outlive every process and need nobody's help. Each is replaced as a whole, so a reader
sees the old or the new one. A wish that is read twice, or late, does no harm: the agent compares it with what
it does. Times are CLOCK_MONOTONIC nanoseconds of the agent's node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from harness.guarded import GuardedCluster
from harness.process_control import ProcessId
from harness.rank_environment import Written
from harness.seats import Seat
from harness.watchdog import WatchdogSettings

CONFIG = "config.json"
COMMAND = "command.json"
STATUS = "status.json"
LOG = "agent.log"
EVIDENCE = "evidence"

AgentState = Literal["starting", "idle", "watching", "suspect", "capturing", "captured", "ending", "ended"]

_Settings = Annotated[
    WatchdogSettings,
    # A set has no order; a file should not differ from run to run.
    PlainSerializer(lambda s: {n: sorted(v) if isinstance(v := getattr(s, n), frozenset) else v
                               for n in s.__dataclass_fields__}),
]  # fmt: skip


class SpoolError(RuntimeError):
    """A spool file that is damaged or cannot be written."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")


class AgentConfig(_Document):
    driver: ProcessId | None
    """None on another node than the driver's: then a silent command file means that the driver is gone."""
    driver_silence_s: float = Field(default=30.0, gt=0)
    """How long ``command.json`` may stay as it is before a remote driver counts as gone."""
    cluster: GuardedCluster | None = None
    lifetime_s: float = Field(gt=0)
    """The agent ends everything and itself when it is this old, whatever else happens."""
    capture_s: float = Field(default=30.0, gt=0)
    """Deadline of one capture of all ranks."""
    end_s: float = Field(default=10.0, gt=0)
    """Deadline for ending ranks and cluster."""
    run: Path | None = None
    """The run's directory, whose reports the driver's own agent writes where the driver no longer can."""
    report_s: float = Field(default=120.0, gt=0)
    """Deadline for writing them."""


class WatchedRank(BaseModel):
    """One process of this node in one trial; ``rank`` is its seat. Files that it does not have are None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: Seat
    process: ProcessId
    ledger: Path | None
    faulthandler: Path | None = None
    log: Path | None = None
    decisions: Path | None = None
    """Where they are not in the trial's own directory."""


class AgentTrial(BaseModel):
    """What one agent is to watch. ``attempt`` tells two trials of the same id apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    attempt: int = 0
    world: int
    """Ranks of the trial on all nodes together."""
    ranks: tuple[WatchedRank, ...]
    """And the engine's other processes."""
    evidence: Path
    started_ns: int | None = None
    """Start of the trial; None: when the agent first hears of it (a remote node's clock is another one)."""
    watchdog: _Settings = WatchdogSettings()
    device: Written | None = None
    """Where the libraries of an accelerator write, on every node; None on devices without such."""


class Command(_Document):
    counter: int
    """Grows with every command, also with one that only says that the driver lives."""
    stop: bool = False
    owned: tuple[ProcessId, ...] = ()
    """Processes of this node to be ended when the driver is gone: ranks and couriers."""
    trial: AgentTrial | None = None
    done: tuple[int, ...] = ()
    """Ranks whose answer for this trial the driver has."""
    capture: str | None = None
    """Reason of a capture that the driver asks for, once a trial."""


class Times(BaseModel):
    """Seconds since the trial's start; None where it has not come to that."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    last_progress_s: float | None = None
    suspected_s: float | None = None
    confirmed_s: float | None = None
    captured_s: float | None = None
    went_on_s: float | None = None
    """Of a suspicion that fell."""


class Status(_Document):
    process: ProcessId
    state: AgentState
    counter: int
    """The newest command that was handled."""
    heartbeat_ns: int
    busy_until_ns: int = 0
    """During a capture no heartbeat comes before this time."""
    trial: str | None = None
    attempt: int = 0
    reason: str | None = None
    ranks: tuple[Seat, ...] = ()
    proof: tuple[str, ...] = ()
    times: Times = Times()
    samples: int = 0
    """Samples whose evidence is on disk."""
    evidence: Path | None = None
    """Set once a capture is complete and synced; None when captured and the disk refused (see ``error``)."""
    slow: tuple[Seat, ...] = ()
    """Ranks that were suspected in this trial and went on."""
    notes: tuple[str, ...] = ()
    error: str | None = None
    """The last thing that went wrong inside the agent; it goes on."""


_D = TypeVar("_D", bound=_Document)


def write(folder: Path, name: str, document: _Document) -> None:
    """Replaces the file at once. Raises SpoolError when the disk refuses."""
    path = folder / name
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        temporary.write_text(document.model_dump_json(by_alias=True))
        temporary.replace(path)
    except OSError as error:
        raise SpoolError(
            f"{path}: cannot write ({error.strerror}); free space or set TMPDIR elsewhere"
        ) from error


def read(folder: Path, name: str, kind: type[_D]) -> _D | None:
    """None when the file is not there (yet). Raises SpoolError when it is not what was written."""
    path = folder / name
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpoolError(f"{path}: cannot read ({error.strerror})") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise SpoolError(f"{path}: not a {kind.__name__} of this version: {error}") from error
