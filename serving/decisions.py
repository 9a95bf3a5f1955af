"""What a rank writes down of each step: what the ranks agreed on, and what it decided by itself.

Not here: the ring and the file that take it (``harness.ledger``), and the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.ledger import LedgerWriter
from serving.dp_attention import Mode, Padding, StepPlan
from serving.groups import Topology
from serving.requests import Batch, BatchMode, Request

EMPTY_STEPS_A_DECISION = 16
"""Of steps in which no rank has anything, this many make one record: an idle gap would fill the ring."""
REQUESTS_NAMED = 16
"""Most requests of a batch that a record names."""
VICTIMS_NAMED = 8
"""Most requests that a record names of those that might have been retracted."""
MODES = {BatchMode.IDLE: Mode.IDLE, BatchMode.DECODE: Mode.DECODE, BatchMode.PREFILL: Mode.PREFILL}
_MODE_WORDS = {mode: mode.name.lower() for mode in Mode}
_PADDING_WORDS = {padding: padding.name.lower() for padding in Padding}


class Decisions:
    """The records of one rank, a dictionary a step."""

    def __init__(self, ledger: LedgerWriter | None, topology: Topology) -> None:
        self._ledger = ledger
        self._topology = topology
        self._ended_told = 0
        self._ahead = 0
        self._newest: dict[str, Any] = {}

    def record(
        self,
        step: int,
        batch: Batch,
        agreed: StepPlan,
        plan: StepPlan,
        counts: Mapping[str, int],
        ended: Sequence[Request],
        further: Mapping[str, Any],
    ) -> None:
        """Of a step that is about to be launched. ``plan``: what this rank is about to run, equal to ``agreed`` in
        good health. ``counts``: collectives of this rank so far, by group. ``ended``: all requests that ended so
        far, those of the step before among them. ``further``: what else is to be in the record."""
        if self._ledger is None:
            return
        finished = [request.id for request in ended[self._ended_told :]]
        # A rank that left an agreement out has something to tell even of a step in which nobody has anything.
        ahead = step - counts.get("agree", step)
        nothing = agreed.empty and not batch.retracted and not finished and ahead == self._ahead
        if nothing and step % EMPTY_STEPS_A_DECISION:
            return
        self._ended_told, self._ahead = len(ended), ahead
        before = self._newest if self._newest.get("step") == step else {}
        self._newest = {
            "step": step,
            "mode": _MODE_WORDS[MODES[batch.mode]],
            "modes": [_MODE_WORDS[mode] for mode in agreed.modes],
            "tokens": list(agreed.tokens),
            **_how(agreed),
            "update": plan.graph,
            **({} if plan is agreed else {"ran": {"tokens": list(plan.tokens), **_how(plan)}}),
            "retracted": list(batch.retracted),
            "finished": finished,
            "collectives": dict(counts),
            **self._of_peers(batch),
            **further,
            **{name: before[name] for name in ("passes", "failed") if name in before},
        }
        self._ledger.decision(self._newest)

    def again(self, request_id: str, reason: str) -> None:
        """The rank makes the step of its newest record once more, without that request."""
        if self._ledger is None:
            return
        passes = self._newest.get("passes", 1) + 1
        failed = [*self._newest.get("failed", ()), {"request": request_id, "reason": reason}]
        self._newest = {**self._newest, "passes": passes, "failed": failed}
        self._ledger.decision(self._newest)

    def add(self, step: int, further: Mapping[str, Any]) -> None:
        """What was found after the record of ``step``; nothing where it is empty."""
        if self._ledger is not None and further:
            self._ledger.decision({"step": step, **further})

    def _of_peers(self, batch: Batch) -> dict[str, Any]:
        """What the ranks of one attention group must decide alike. Nothing where every rank is its own group."""
        if self._topology.attention_size == 1:
            return {}
        return {
            "dp": self._topology.dp_rank,
            "own_tokens": batch.num_tokens,
            "requests": [row.request.id for row in batch.rows[:REQUESTS_NAMED]],
            "aborted": list(batch.aborted),
            **({"victims": [list(one) for one in batch.victims[:VICTIMS_NAMED]]} if batch.victims else {}),
        }


def _how(plan: StepPlan) -> dict[str, Any]:
    return {"padding": _PADDING_WORDS[plan.padding], "bucket": plan.bucket, "graph": plan.graph}
