"""How one engine runs: what a trial's scenario asks of it, in the engine's own words.

Not here: the scenario's keys and limits (``harness.scenario_model``), which this follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serving.dp_attention import Padding
from serving.scheduler_config import SchedulerConfig
from serving.transfer import PinnedPolicy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs. ``wait_s`` is the deadline of each wait of the host, in seconds."""

    scheduler: SchedulerConfig
    max_context: int
    """Longest request, prompt and output, in tokens."""
    graph_buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Rows that decode graphs are captured for, ascending."""
    padding: Padding | None = None
    overlap: bool = True
    graph: bool = True
    pinned: PinnedPolicy = "pageable"
    check_steps: bool = True
    """The agreement makes sure that all ranks are at the same step."""
    sync_every: int = 0
    """Steps of a rank between two questions whether any rank has work left; 0 asks in every agreement."""
    cache_sync_every: int = 0
    """Prefills of an attention group between two agreements on the pages in the prefix cache; 0 never agrees."""
    control_broadcast: bool = False
    """Each step begins with a message of rank 0 to all."""
    expert_stats: bool = False
    """The ranks add up, step by step, how many tokens each expert got."""
    stats_group: Literal["stats", "experts"] = "stats"
    """Whose communicator carries that."""
    output_parallel: bool = False
    """The output projection is spread over all ranks, each of which is its own attention group."""
    exit_barrier: bool = False
    """All ranks meet once more when they are through."""
    allocate_room: bool = False
    """The host makes room in the symmetric heap before each launch that needs more."""
    check_copies: bool = False
    """Each copy of a hot path is held against what it was to bring; differences go into the decisions."""
    sample_ahead: bool = False
    """A step without a grammar is sampled before the host waits for the result of the step before, into one buffer
    that all steps share."""
    wait_s: float = 300.0
