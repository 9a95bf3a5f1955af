"""Rows of the device's tables: which request has which, and the one metadata copy that describes a batch.

Not here: what the device does with it (``forward.py``), which requests run (``scheduler.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serving.forward import Workspace
from serving.requests import FUTURE, Batch

Cached = Sequence[tuple[int, int, int]]
"""(row, position, slot) of tokens whose slots are new to the device."""


class Rows:
    """One row for each request that runs; row 0 is where padding goes."""

    def __init__(self, most_running: int) -> None:
        # A request that ended may still be in the step under way while its successor gets a row.
        self._free = list(range(2 * most_running + 2, 0, -1))
        self._of: dict[str, int] = {}
        self.count = len(self._free) + 1
        """Rows that the tables need."""

    def assign(self, batch: Batch) -> Cached:
        """Gives new requests a row; returns where their cached tokens lie."""
        prefix: list[tuple[int, int, int]] = []
        for row in batch.rows:
            if row.request.id in self._of:
                continue
            index = self._of[row.request.id] = self._free.pop()
            prefix.extend((index, position, slot) for position, slot in enumerate(row.table[: row.start]))
        return prefix

    def release(self, request_id: str) -> None:
        """No-op for a request without a row."""
        row = self._of.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def pack(self, host: torch.Tensor, batch: Batch, ws: Workspace, prefix: Cached) -> None:
        """Fills the source of the metadata copy, laid out as ``Workspace.packed``; padding is zeros."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        sample_at: list[int] = []
        sample_rows: list[int] = []
        for row in batch.rows:
            index = self._of[row.request.id]
            ids.extend(-index if token is FUTURE else token for token in row.tokens)
            positions.extend(row.positions)
            slots.extend(row.slots)
            rows.extend([index] * row.q_len)
            if row.samples:
                sample_at.append(len(ids) - 1)
                sample_rows.append(index)
        sequences = [self._of[row.request.id] for row in batch.rows]
        columns = [list(column) for column in zip(*prefix, strict=True)] or [[], [], []]
        sized: Sequence[tuple[list[int], int]] = (
            (ids, len(ws.ids_T)),
            (positions, len(ws.ids_T)),
            (slots, len(ws.ids_T)),
            (rows, len(ws.ids_T)),
            (sequences, len(ws.rows_B)),
            (sample_at, len(ws.sample_S)),
            (sample_rows, len(ws.sample_S)),
            *((column, len(prefix)) for column in columns),
        )
        flat: list[int] = []
        for values, size in sized:
            flat.extend(values)
            flat.extend([0] * (size - len(values)))
        host.copy_(torch.tensor(flat, dtype=torch.int64))
