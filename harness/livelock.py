"""Steps that move for nothing: no token is finished while requests are retracted or wait in vain. Pure.

A long prefill finishes no token either, and an idle engine may step for hours: only *futile* steps count,
those that retracted a request or ran nothing although requests waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.budgets import WatchdogSettings
from harness.ledger_snapshot import Snapshot


def whole(record: Mapping[str, Any], field: str) -> int | None:
    """An integer field of a decision record; None when it is absent or something else."""
    value = record.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def tokens_out(decisions: Sequence[Mapping[str, Any]]) -> int | None:
    """Finished tokens so far, as the newest record that counts them says."""
    counts = (whole(record, "tokens_out") for record in reversed(decisions))
    return next((count for count in counts if count is not None), None)


def is_futile(record: Mapping[str, Any]) -> bool:
    """The step retracted a request, or computed no token although requests waited."""
    if record.get("retracted"):
        return True
    tokens = record.get("tokens")
    computed = any(tokens) if isinstance(tokens, list | tuple) else bool(tokens)
    return not computed and (whole(record, "waiting") or 0) > 0


class Futility:
    """Follows all ranks together: one finished token anywhere is progress."""

    def __init__(self, settings: WatchdogSettings) -> None:
        self._settings = settings
        self._tokens: dict[int, int] = {}
        self._steps_at: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._futile: dict[int, set[int]] = {}
        self._read: dict[int, int] = {}
        """By rank, decisions that were looked at."""
        self._waited_s = 0.0
        self.last_token_ns = 0

    def observe(self, snapshots: Mapping[int, Snapshot], now_ns: int, elapsed_s: float) -> None:
        progress = not self._tokens
        for rank, snapshot in snapshots.items():
            count = tokens_out(snapshot.decisions)
            if count is not None and count != self._tokens.get(rank):
                self._tokens[rank] = count
                progress = True
            self._steps[rank] = snapshot.host.step
        if progress:
            self._waited_s, self.last_token_ns = 0.0, now_ns
            self._steps_at = dict(self._steps)
            self._futile.clear()
            return
        self._waited_s += elapsed_s
        for rank, snapshot in snapshots.items():
            since = self._steps_at.setdefault(rank, snapshot.host.step)
            for record in self._unread(rank, snapshot):
                step = whole(record, "step")
                if step is not None and step > since and is_futile(record):
                    self._futile.setdefault(rank, set()).add(step)

    def _unread(self, rank: int, snapshot: Snapshot) -> Sequence[Mapping[str, Any]]:
        """A decision that was looked at is of a step that was seen then; none is of a later one."""
        total, read = snapshot.decisions_total, self._read.get(rank, 0)
        self._read[rank] = total
        if total == read:
            return snapshot.decisions if total == 0 else ()
        return snapshot.decisions[-max(0, total - read) :]

    def ranks(self) -> tuple[int, ...]:
        """Ranks with futile steps since the last finished token."""
        return tuple(sorted(self._futile))

    def finding(self) -> str | None:
        """One sentence when this is a livelock, else None."""
        settings = self._settings
        made = max((step - self._steps_at.get(rank, step) for rank, step in self._steps.items()), default=0)
        futile = sum(len(steps) for steps in self._futile.values())
        if (
            self._waited_s < settings.livelock_s
            or made < settings.livelock_steps
            or futile < settings.livelock_futile
        ):
            return None
        return f"{made} steps in {self._waited_s:.1f} s finished no token; {futile} of those seen were futile"
