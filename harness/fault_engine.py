"""Faults that break a decision of the built-in engine: its batch, its plan of a step, its victims, its heap.

They see the engine's own objects through the values of a site and import nothing of it. Not here: what may be
broken at any site (``fault_library.py``).
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, ClassVar, Literal

from harness.fault_model import Fault, register
from harness.faults import Passing


@register
class ChangePlan(Fault):
    """The rank runs the agreed step otherwise: eagerly, in the graph of another bucket, or padded otherwise."""

    name: Literal["change_plan"]
    sites: ClassVar[tuple[str, ...]] = ("rank.plan",)
    run: Literal["eager", "own_bucket", "unpadded"]
    """``own_bucket``: the smallest one that holds this rank's own rows, instead of every rank's. ``unpadded``: an
    eager step that pads each rank to the longest is described by this rank's own count, one token where it has
    none."""

    def finds(self, passing: Passing) -> bool:
        plan, own = passing["plan"], max(1, passing["tokens"])
        if self.run == "unpadded":
            return (
                not plan.bucket
                and not plan.empty
                and plan.padding.name == "MAX_LEN"
                and own < max(plan.tokens)
            )
        if self.run == "own_bucket":
            return bool(plan.bucket) and self._own(passing) != plan.bucket
        return bool(plan.bucket)

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        plan = passing["plan"]
        if self.run == "eager":
            changed = plan.eagerly()
        elif self.run == "own_bucket":
            changed = dataclasses.replace(plan, bucket=self._own(passing))
        else:
            changed = dataclasses.replace(plan, tokens=(max(1, passing["tokens"]),) * len(plan.tokens))
        passing.change("plan", changed)

    def _own(self, passing: Passing) -> int:
        found: int = next(one for one in passing["buckets"] if one >= max(1, passing["tokens"]))
        return found


@register
class FailGrammar(Fault):
    """The grammar refuses a token that was sampled: the rank drops the request and makes the step that is under way
    once more without it, while its peers go on to the next one."""

    name: Literal["fail_grammar"]
    sites: ClassVar[tuple[str, ...]] = ("rank.token",)

    def finds(self, passing: Passing) -> bool:
        return bool(passing["grammar"])

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing["engine"].run_again(passing["request"], f"its grammar refused token {passing['token']}")


@register
class AbortByClock(Fault):
    """The rank finds, by its own clock, that a running request has had its time, and drops it."""

    name: Literal["abort_by_clock"]
    sites: ClassVar[tuple[str, ...]] = ("rank.step",)

    def finds(self, passing: Passing) -> bool:
        return bool(passing["engine"].scheduler.running)

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        scheduler = passing["engine"].scheduler
        scheduler.abort(next(iter(scheduler.running)), "its time was over by this rank's clock")


@register
class ReorderVictims(Fault):
    """The rank retracts in another order: what a set whose order is not fixed does."""

    name: Literal["reorder_victims"]
    sites: ClassVar[tuple[str, ...]] = ("scheduler.victims",)
    order: Literal["reverse", "shuffle"] = "reverse"

    def finds(self, passing: Passing) -> bool:
        return len(passing["victims"]) > 1 and bool(passing["needed"])

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        victims = list(passing["victims"])
        if self.order == "reverse":
            victims.reverse()
        else:
            memory.setdefault("source", random.Random(self.seed or 0)).shuffle(victims)
        passing.change("victims", victims)


@register
class GrowHeap(Fault):
    """The symmetric heap grows on this rank alone."""

    name: Literal["grow_heap"]
    sites: ClassVar[tuple[str, ...]] = ("comm.before",)
    nbytes: int = 64 << 20

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        heap = passing.values.get("heap")
        if heap is not None:
            heap.reserve(self.nbytes)


@register
class RegisterEarly(Fault):
    """The rank makes room in the symmetric heap where it builds its batch, by its own tokens, and not where all
    ranks do: before the agreement of the step instead of behind it."""

    name: Literal["register_early"]
    sites: ClassVar[tuple[str, ...]] = ("rank.batch",)

    def finds(self, passing: Passing) -> bool:
        return not passing["engine"].has_room(passing["tokens"])

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing["engine"].make_room(passing["tokens"], "agree")
