"""The ``[[faults]]`` of a scenario for a foreign engine: what is broken, in which process, and when.

Here: names, parameters and their limits. Not here: how a fault is carried out. ``stop`` and ``kill`` come from
outside and work in any engine; the others are made by the probe inside the process (``serving/probe``) and need
the toggle ``probe`` on.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.scenario_table import Table

Mode = Literal["idle", "decode", "prefill", "any"]
Role = Literal["rank", "server", "controller", "detokenizer", "engine_core"]


class FaultTable(Table):
    """What every fault has, also those of the built-in engine (``fault_model.py``)."""

    name: str
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()


class ForeignTable(FaultTable):
    """What the faults of a foreign engine have in common."""

    role: Role = "rank"
    """Which kind of process."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Which ranks, where ``role`` is rank; none named means all."""
    after_tokens: Annotated[int, Field(ge=0)] = 100
    """It becomes due when the client has received so many tokens of the trial; it happens once, at the first place
    that fits from then on."""


class Stop(ForeignTable):
    """SIGSTOP, from outside."""

    name: Literal["stop"]


class Kill(ForeignTable):
    """SIGKILL, from outside."""

    name: Literal["kill"]


class Block(ForeignTable):
    """The process's main thread blocks where it takes up its next piece of work."""

    name: Literal["block"]
    seconds: Annotated[float, Field(gt=0)] = 3600.0


class SkipCollective(ForeignTable):
    """One collective is left out: the call returns at once, its buffers untouched."""

    name: Literal["skip_collective"]
    operation: str | None = None
    """Such as all_reduce; any where nothing is said."""
    group: str | None = None
    """The engine's name of the group, such as tp; any where nothing is said."""
    mode: Mode = "any"
    """Only in a step of this kind, as the rank sees it."""


class Raise(ForeignTable):
    """A step raises before its forward pass."""

    name: Literal["raise"]
    mode: Mode = "any"
    """Only in a step of this kind; *idle* is the batch of a rank that has no token while others have."""


class AbortByClock(ForeignTable):
    """The rank finds, by its own clock, that a running request has had its time, and drops it from its batch."""

    name: Literal["abort_by_clock"]


ForeignFault = Annotated[
    Stop | Kill | Block | SkipCollective | Raise | AbortByClock, Field(discriminator="name")
]
OUTSIDE = ("stop", "kill")
"""Faults that need no probe."""
