"""Flight-recorder dumps as torch writes them for NCCL (version 2.10), made by hand: a call a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECOND_NS = 1_000_000_000
BEGAN_NS = 1_796_000_000 * SECOND_NS


class Recorder:
    """One rank's. ``call`` makes an entry of the next number of its group."""

    def __init__(self, world: int = 2, groups: dict[str, tuple[str, Sequence[int]]] | None = None) -> None:
        self.groups = groups or {"0": ("default_pg", range(world))}
        self.entries: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def call(
        self,
        operation: str = "all_reduce",
        size: Sequence[int] = (4, 8),
        *,
        group: str = "0",
        state: str = "completed",
        dtype: str = "Float",
        at_s: float = 0.0,
    ) -> Recorder:
        self.counts[group] = self.counts.get(group, 0) + 1
        return self._entry(operation, size, group, state, dtype, at_s, self.counts[group], p2p=False)

    def p2p(self, operation: str, *, group: str = "0", state: str = "completed", number: int = 1) -> Recorder:
        """``operation`` as ``send 0->1``."""
        return self._entry(operation, (4,), group, state, "Float", 0.0, number, p2p=True)

    def many(self, count: int, **more: Any) -> Recorder:
        for _ in range(count):
            self.call(**more)
        return self

    def document(self, *, keep: int | None = None) -> dict[str, Any]:
        """``keep``: how many entries the ring holds."""
        numbers = {name: index for index, name in enumerate(self.groups)}
        done = {
            name: max((e["collective_seq_id"] for e in self.entries if e["state"] == "completed" and not e["is_p2p"]
                       and e["process_group"][0] == name), default=0)
            for name in self.groups
        }  # fmt: skip
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "entries": self.entries[-keep:] if keep else self.entries,
            "nccl_comm_state": {},
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
                for name, (desc, ranks) in self.groups.items()
            },
            "pg_status": {
                str(numbers[name]): {
                    "last_enqueued_collective": str(self.counts.get(name, 0) or -1),
                    "last_started_collective": str(self.counts.get(name, 0) or -1),
                    "last_completed_collective": str(done[name] or -1),
                }
                for name in self.groups
            },
        }

    def write(self, path: Path, *, keep: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(keep=keep)))

    def _entry(
        self, operation: str, size: Sequence[int], group: str, state: str, dtype: str, at_s: float, number: int,
        *, p2p: bool,
    ) -> Recorder:  # fmt: skip
        created_ns = BEGAN_NS + int(at_s * SECOND_NS) + len(self.entries) * 1000
        self.calls[group] = self.calls.get(group, 0) + 1
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": [group, self.groups[group][0]],
                "collective_seq_id": self.counts.get(group, 0) if p2p else number,
                "p2p_seq_id": number if p2p else 0,
                "op_id": self.calls[group],
                "profiling_name": f"nccl:{operation}",
                "time_created_ns": created_ns,
                "time_discovered_started_ns": 0 if state == "scheduled" else created_ns + 10,
                "time_discovered_completed_ns": created_ns + 20 if state == "completed" else 0,
                "input_sizes": [list(size)],
                "output_sizes": [list(size)],
                "input_dtypes": [dtype],
                "output_dtypes": [dtype],
                "state": state,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": p2p,
            }
        )
        return self


def write_all(folder: Path, recorders: Sequence[Recorder], *, keep: int | None = None) -> None:
    for rank, recorder in enumerate(recorders):
        recorder.write(folder / f"nccl_trace_rank_{rank}.json", keep=keep)
