"""What one rank's scheduler may use, and what it counts.

Here: the fields, their units and their bounds. Not here: what follows from them (``scheduler.py``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one rank may use."""

    kv_tokens: int
    """Size of the KV pool, tokens."""
    page_size: int = 1
    """Tokens a page."""
    chunk_tokens: int = 256
    """Most tokens of one request's prompt computed in one step; longer prompts take several steps."""
    max_prefill_tokens: int = 1024
    """Most tokens of one prefill step, all requests together. With the value of ``chunk_tokens`` it is what
    SGLang's ``--chunked-prefill-size`` does."""
    max_running: int = 128
    """Most requests that hold KV slots at a time."""
    admission_ratio: float = 0.7
    """Share of each request's remaining tokens for which admission sets slots aside, at first."""
    admission_floor_factor: float = 0.14
    """The share falls to this part of its first value (SGLang's default)."""
    admission_decay_steps: int = 600
    """Decode steps without a retraction that the fall takes."""
    retract_every: int = 0
    """Forced retraction: each decode step whose forward count is a multiple of this retracts at least one
    request, if there are two. 0 = off."""
    prefix_cache: bool = True
    """Whether requests share the pages of equal prefixes."""

    def __post_init__(self) -> None:
        least = {"kv_tokens": self.page_size, "page_size": 1, "chunk_tokens": 1, "max_prefill_tokens": 1}
        least |= {"max_running": 1, "admission_decay_steps": 1, "retract_every": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"scheduler: {name} is {getattr(self, name)}, it must be at least {bound}")
        for name in ("admission_ratio", "admission_floor_factor"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"scheduler: {name} is {getattr(self, name)}, it must lie between 0 and 1")


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made."""

    retractions: int = 0
    forced_retractions: int = 0
    """Of these: where the step would have fitted anyway."""
    finished: int = 0
    """Ended by length, eos or grammar."""
    aborted: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache instead of being computed."""
    evicted_pages: int = 0
