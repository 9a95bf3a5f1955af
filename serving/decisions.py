"""What a rank writes down of each step: what the ranks agreed on, and what it decided by itself.

Not here: the ring and the file that take it (``harness.ledger``), and the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.ledger import LedgerWriter
from serving.dp_attention import Mode, StepPlan
from serving.groups import Topology
from serving.requests import Batch, BatchMode, Request

EMPTY_STEPS_A_DECISION = 16
"""Of steps in which no rank has anything, this many make one record: an idle gap would fill the ring."""
REQUESTS_NAMED = 16
"""Most requests of a batch that a record names."""
MODES = {BatchMode.IDLE: Mode.IDLE, BatchMode.DECODE: Mode.DECODE, BatchMode.PREFILL: Mode.PREFILL}


class Decisions:
    """The records of one rank, a dictionary a step."""

    def __init__(self, ledger: LedgerWriter | None, topology: Topology) -> None:
        self._ledger = ledger
        self._topology = topology
        self._ended_told = 0

    def record(
        self,
        step: int,
        batch: Batch,
        plan: StepPlan,
        ended: Sequence[Request],
        further: Mapping[str, Any],
    ) -> None:
        """``ended``: all requests that ended so far. ``further``: what else is to be in the record."""
        finished = [request.id for request in ended[self._ended_told :]]
        nothing = plan.empty and not batch.retracted and not finished
        if self._ledger is None or (nothing and step % EMPTY_STEPS_A_DECISION):
            return
        self._ended_told = len(ended)
        self._ledger.decision(
            {
                "step": step,
                "mode": MODES[batch.mode].name.lower(),
                "modes": [mode.name.lower() for mode in plan.modes],
                "tokens": list(plan.tokens),
                "padding": plan.padding.name.lower(),
                "bucket": plan.bucket,
                "graph": plan.graph,
                "update": plan.graph,
                "retracted": list(batch.retracted),
                "finished": finished,
                **self._of_peers(batch),
                **further,
            }
        )

    def _of_peers(self, batch: Batch) -> dict[str, Any]:
        """What the ranks of one attention group must decide alike. Nothing where every rank is its own group."""
        if self._topology.attention_size == 1:
            return {}
        return {
            "dp": self._topology.dp_rank,
            "own_tokens": batch.num_tokens,
            "requests": [row.request.id for row in batch.rows[:REQUESTS_NAMED]],
            "aborted": list(batch.aborted),
        }
