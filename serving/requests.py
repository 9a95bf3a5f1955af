"""What the scheduler works on: requests, and the batches it hands to the engine.

Here: the records and what follows from their fields alone. Not here: any decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from serving.kv_cache import Prefix

FUTURE: Final = None
"""In ``Row.tokens``: the token that the step before sampled for request ``Row.future_of``. It is, or will be,
on the device; the host does not know it yet."""


class BatchMode(Enum):
    """What one step of one rank does. A step never mixes prefill and decode."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class State(Enum):
    """Where a request is. Only PREFILLING and RUNNING hold KV slots."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One request, compared by identity. No two requests of a scheduler that have not ended share an id.

    The first group is set by the client, the second by the scheduler alone.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    grammar: str | None = None
    eos_ids: frozenset[int] = frozenset()

    output: list[int] = field(default_factory=list)
    """Tokens committed; an end-of-sequence token is the last one."""
    state: State = State.WAITING
    finish_reason: str | None = None
    """None while it lives; then "length", "eos", "grammar" or "aborted: " and why."""
    retractions: int = 0
    in_flight: int = 0
    """Tokens sampled by steps that are not committed yet."""
    computed: int = 0
    """Tokens whose KV is computed, counting the steps in flight."""
    slots: list[int] = field(default_factory=list)
    """KV slots by position, whole pages; the first ``len(prefix)`` are shared, the others its own."""
    prefix: Prefix | None = None
    arrival: int = 0
    """Order in which the scheduler got it."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"request {self.id}: max_new_tokens is {self.max_new_tokens}, at least 1 is needed"
            )

    @property
    def known(self) -> list[int]:
        """Prompt and committed output."""
        return [*self.prompt, *self.output]

    @property
    def length(self) -> int:
        """Number of tokens known."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled, those in flight not counted."""
        return self.max_new_tokens - len(self.output) - self.in_flight

    @property
    def owned_slots(self) -> list[int]:
        return self.slots[len(self.prefix) :] if self.prefix is not None else list(self.slots)


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: ``q_len`` tokens to compute; those before ``start`` are in the KV cache.

    The slot of a position never changes while the request holds its pages, so a table kept on the device
    needs only this step's ``slots``; after a retraction the request begins a new table.
    """

    request: Request
    tokens: tuple[int | None, ...]
    """Tokens to compute; FUTURE where the host does not know it yet (decode rows only)."""
    start: int
    """Position of the first of them."""
    table: tuple[int, ...]
    """Slots of positions 0 to ``kv_len - 1``, those of this step included."""
    samples: bool
    """Whether the last token's logits give a new token: a decode row, or the last chunk of a prefill."""

    @property
    def future_of(self) -> str | None:
        """Id of the request whose token of the step before is computed here, if that token is in flight."""
        return self.request.id if self.tokens[-1] is FUTURE else None

    @property
    def q_len(self) -> int:
        return len(self.tokens)

    @property
    def kv_len(self) -> int:
        return len(self.table)

    @property
    def positions(self) -> range:
        return range(self.start, len(self.table))

    @property
    def slots(self) -> tuple[int, ...]:
        """Where this step writes the KV of ``tokens``."""
        return self.table[self.start :]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of one rank, as decided. Compared by identity."""

    forward_count: int
    """Number of this step, 1-based; idle steps count."""
    mode: BatchMode
    rows: tuple[Row, ...]
    retracted: tuple[str, ...]
    """Ids of the requests that lost their pages before this step, in that order."""
    forced: bool
    """Whether the first of them was retracted only because ``retract_every`` says so."""
    aborted: tuple[str, ...]
    """Ids of the requests that were aborted since the batch before; each is reported once."""
    victims: tuple[tuple[str, int, int, int], ...] = ()
    """Where one was retracted: all requests that might have been, in the order in which they were considered, each
    with what that goes by, least first."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed."""
        return sum(row.q_len for row in self.rows)

    @property
    def sampling(self) -> tuple[str, ...]:
        """Ids of the requests that get a token from this step, in row order."""
        return tuple(row.request.id for row in self.rows if row.samples)
