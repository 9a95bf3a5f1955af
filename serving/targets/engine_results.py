"""What a trial on a foreign engine brought home: one result a rank, of the client's outcomes, the engine's metrics
and the ranks' ledgers.

Requests belong to data-parallel groups; a group's results are those of its first rank, and its other ranks have
none of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.ledger import LedgerError, LedgerReader
from harness.target import RankResult
from serving.targets.engine_client import Outcome
from serving.targets.engine_metrics import Metrics

_LATENCIES = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a rank's ledger stood at one moment: steps so far, and bytes of its decisions file."""

    steps: int = 0
    decisions_bytes: int = 0


def mark(ledger: Path, decisions: Path) -> Mark:
    """Zeros for a rank without a ledger."""
    try:
        reader = LedgerReader.open(ledger)
    except (LedgerError, OSError):
        return Mark()
    try:
        steps = reader.snapshot().host.step
    except LedgerError:
        steps = 0
    finally:
        reader.close()
    return Mark(steps, decisions.stat().st_size if decisions.exists() else 0)


def decode_steps(decisions: Path, before: Mark) -> int:
    """Batches since ``before`` that only decoded."""
    try:
        with decisions.open("rb") as file:
            file.seek(before.decisions_bytes)
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    return sum(_mode(line) == "decode" for line in lines)


def _mode(line: bytes) -> object:
    try:
        record = json.loads(line)
    except ValueError:  # cut by a crash or a full disk
        return None
    return record.get("mode") if isinstance(record, dict) else None


@dataclass(frozen=True, slots=True)
class Trial:
    """``steps`` and ``decode_steps``: by rank. ``logged``: requests that lost their place, by the log's count."""

    world: int
    groups: int
    outcomes: Sequence[Outcome]
    before: Metrics
    after: Metrics
    logged: int
    duration_s: float
    steps: Mapping[int, int]
    decode_steps: Mapping[int, int]

    def retractions(self) -> int:
        """Of the whole engine, also where requests never ended: the highest of three counts, since each can miss
        some."""
        answers = sum(outcome.retractions or 0 for outcome in self.outcomes)
        return max(answers, self.after.since(self.before, "retractions"), self.logged)

    def preemptions(self) -> int:
        answers = sum(outcome.preemptions or 0 for outcome in self.outcomes)
        return max(answers, self.after.since(self.before, "preemptions"))

    def results(self) -> list[RankResult]:
        """One a rank, in order."""
        share = self.world // self.groups
        found = []
        for rank in range(self.world):
            group, leads = rank // share, rank % share == 0
            outcomes = [o for o in self.outcomes if o.rank == group] if leads else []
            found.append(
                RankResult(
                    rank=rank,
                    steps=self.steps.get(rank, 0),
                    decode_steps=self.decode_steps.get(rank, 0),
                    duration_s=self.duration_s,
                    tokens={outcome.id: list(outcome.tokens) for outcome in outcomes},
                    finish={outcome.id: outcome.finish or "" for outcome in outcomes},
                    counters=self._counters(group, outcomes) if leads else {},
                    latency_us={
                        name: [value for o in outcomes for value in o.latency_us().get(name, ())]
                        for name in _LATENCIES
                        if leads
                    },
                    nbytes={},
                    leaks=self._leaks(group) if leads else [],
                )
            )
        return found

    def _counters(self, group: int, outcomes: Sequence[Outcome]) -> dict[str, int]:
        counters = {
            "retractions": self._of_group(group, "retractions", self.retractions(), outcomes),
            "tokens_out": sum(len(outcome.tokens) for outcome in outcomes),
            "cached_tokens": sum(outcome.cached_tokens for outcome in outcomes),
            "aborted": sum((outcome.finish or "").startswith("aborted") for outcome in outcomes),
        }
        if self.preemptions() or "preemptions" in self.after.values:
            counters["preemptions"] = self._of_group(group, "preemptions", self.preemptions(), outcomes)
        return counters

    def _of_group(self, group: int, word: Any, total: int, outcomes: Sequence[Outcome]) -> int:
        """A count's share of one group: by the answers where they tell, then by the metrics' labels; what neither
        places is the first group's."""
        answered = [getattr(outcome, word) for outcome in self.outcomes]
        if any(value is not None for value in answered):
            mine = sum(getattr(outcome, word) or 0 for outcome in outcomes)
            placed = sum(value or 0 for value in answered)
        else:
            by_rank, earlier = self.after.by_rank.get(word, {}), self.before.by_rank.get(word, {})
            shares = {rank: max(0, round(value - earlier.get(rank, 0.0))) for rank, value in by_rank.items()}
            mine, placed = shares.get(group, 0), sum(shares.values())
        return mine + (max(0, total - placed) if group == 0 else 0)

    def _leaks(self, group: int) -> list[str]:
        """What the engine still holds although no request is in flight."""
        found = []
        for word, what in (("running", "requests still run"), ("waiting", "requests still wait")):
            count = self._left(word, group)
            if count:
                found.append(f"{count:g} {what} after the trial, by the engine's metrics")
        used = self._left("used_tokens", group)
        if used:
            found.append(f"KV pool: {used:g} in use after the trial, by the engine's metrics")
        return found

    def _left(self, word: Any, group: int) -> float:
        by_rank = self.after.by_rank.get(word, {})
        if set(by_rank) == set(range(self.groups)):
            return by_rank[group]
        return self.after.values.get(word, 0.0) if group == 0 else 0.0


def is_idle(metrics: Metrics) -> bool:
    """Nothing runs, waits or holds memory, as far as the engine tells."""
    return not any(metrics.values.get(word) for word in ("running", "waiting", "used_tokens"))
