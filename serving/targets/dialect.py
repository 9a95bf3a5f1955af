"""What the common part of the targets for foreign engines must know of one engine: the seam to ``sglang.py`` and
``vllm.py``.

Here: the `Dialect` protocol and the records that pass through it. A dialect is knowledge: it starts nothing, sends
nothing, keeps nothing, and its constructor takes no argument; the driver has one, each node's launcher another.

Not here: starting and ending servers (``engine_process.py``), the client (``engine_client.py``), finding processes
(``engine_tree.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from harness.seats import Seat
from harness.target import EngineSpec
from serving.workload import Arrival, RequestSpec

Count: TypeAlias = Literal[
    "running", "waiting", "used_tokens", "retractions", "preemptions", "tokens_out", "steps"
]
"""Our words for what an engine's metrics count. ``running`` and ``waiting``: requests, now. ``used_tokens``: KV
pool in use and not merely cached, in any unit of which 0 means none. The others: since the server started."""


@dataclass(frozen=True, slots=True)
class Seating:
    """``role`` is one of rank, server, controller, detokenizer, engine_core."""

    seat: Seat
    role: str


@dataclass(frozen=True, slots=True)
class Place:
    """One node's share of a server."""

    node: int
    """Its number among the server's nodes; requests go to node 0."""
    nodes: int
    host: str
    """Address of node 0 for the other nodes; a loopback address where there is one node."""
    port: int | str
    """Free on this node, for HTTP on the loopback address; the client is on node 0. In a command that is only shown
    a word stands for it: ``$PORT``."""
    ports: tuple[int | str, ...]
    """As many further free ports of node 0 as the dialect asked for, the same on all nodes; they follow each
    other."""
    model: str
    """A directory on this node, or a name that the engine resolves."""
    dummy: bool
    """The directory has no weights: the engine makes random ones."""
    folder: Path
    """Of this node, for files of this server."""
    version: str | None
    """Of the engine; None in a command that is only shown."""


@dataclass(frozen=True, slots=True)
class Command:
    """``arguments`` begins with the interpreter. ``env`` is laid over the launcher's own environment; the launcher
    adds what ends and probes processes (``PYTHONPATH``, ``HANGRIG_...``, ``SPT_NOENV``)."""

    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. ``body`` is sent as JSON; None: no body."""

    method: Literal["GET", "POST"]
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a streamed answer says."""

    tokens: tuple[int, ...] = ()
    whole: bool = False
    """``tokens`` are all tokens so far; else those that are new."""
    finish: str | None = None
    """Why the output ended: ``length``, ``stop``, ``aborted: <why>``; None: it goes on."""
    error: str | None = None
    """Why the server gave this request up."""
    lost: bool = False
    """``error`` is the engine's end, not this request's alone: nothing more will come."""
    dp_rank: int | None = None
    retractions: int | None = None
    """Of this request so far. vLLM's preemptions count as both."""
    preemptions: int | None = None
    cached_tokens: int | None = None


class Dialect(Protocol):
    """One engine's ways. All methods are pure but for reading files that ``Place`` names."""

    @property
    def name(self) -> str:
        """As in the scenario: ``sglang``."""

    @property
    def distributions(self) -> Sequence[str]:
        """Names under which the engine may be installed (``importlib.metadata``); the first found gives its
        version."""

    @property
    def ports(self) -> int:
        """How many consecutive free ports it wants besides the one that serves HTTP."""

    @property
    def health(self) -> Call:
        """Answered 200 by a server that is well."""

    @property
    def metrics(self) -> Call | None:
        """Answered in Prometheus' text format; None where there is nothing of the kind."""

    @property
    def samples(self) -> Mapping[Count, Sequence[str]]:
        """Names of samples by our word; the first that the engine has counts, added up over its labels."""

    @property
    def rank_label(self) -> str:
        """The label of a sample that holds its data-parallel rank; empty where there is none."""

    @property
    def flush(self) -> Call | None:
        """Empties the prefix cache before a trial, so that trials on a warm server are alike."""

    @property
    def troubles(self) -> Sequence[str]:
        """Words of this engine's log that speak of trouble, in lower case, beyond those common to all
        (``engine_process.TROUBLES``)."""

    @property
    def harmless(self) -> Sequence[str]:
        """What a line contains, in lower case, that speaks of no trouble although its words say so."""

    def problem(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> str | None:
        """What the user got wrong and this engine can tell before anything starts, with what to do; None: nothing.
        ``arrivals`` are all requests of all seeds of one workload."""

    def data_parallel(self, spec: EngineSpec) -> int:
        """Number of data-parallel groups; ``ranks // groups`` consecutive ranks are one."""

    def command(self, spec: EngineSpec, place: Place) -> Command: ...

    def expected(self, spec: EngineSpec, node: int) -> Sequence[Seating]:
        """The seats that a server which is ready has filled on this node: ranks and others."""

    def seating(self, title: str, spec: EngineSpec) -> Seating | None:
        """Who a process is by its title (``/proc/PID/cmdline``, blanks for zeros). None: a helper, or unknown. The
        server itself is known without: it is the process that was started."""

    def call(self, request: RequestSpec, dp_rank: int | None, spec: EngineSpec) -> Call:
        """What sends one request: token ids in, a stream of events out, greedy, never ended by a stop token.
        ``dp_rank``: the group that must take it; None: the engine chooses."""

    def piece(self, event: Mapping[str, Any]) -> Piece:
        """Reads one ``data:`` line of the stream. The final ``[DONE]`` never gets here. Raises ValueError for an
        event that it cannot read."""

    def retracted(self, line: str) -> int:
        """How many requests this line of the log says lost their place; 0 for any other line."""
