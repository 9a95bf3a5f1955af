"""Requests and batches, as far as they are looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace


class ForwardMode(IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4


class FINISH_LENGTH:
    pass


class FINISH_ABORT:
    pass


@dataclass(eq=False)
class Req:
    rid: str
    finished_reason: object = None
    to_finish: object = None
    output_ids: list[int] = field(default_factory=list)
    sampling_params: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_new_tokens=100))
    time_stats: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(forward_entry_time=1.0))
    retraction_count: int = 0

    def reset_for_retract(self) -> None:
        self.retraction_count += 1


@dataclass
class ScheduleBatch:
    forward_mode: ForwardMode
    reqs: list[Req]
    extend_num_tokens: int | None = None
    global_num_tokens: list[int] | None = None
