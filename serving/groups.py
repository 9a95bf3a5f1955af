"""Which groups of ranks there are, who is in them, and their ``torch.distributed`` side.

Names and members are the same for a whole launch; they follow from how many ranks and how many attention groups
there are. What a trial does not use costs it nothing: boards and ledger groups are made at first use
(``comm.py``). The process groups are all made at the start, because torch makes each of them together on all
ranks, members or not; on two cores each takes about 10 ms.

A group carries either device collectives or control messages of the hosts, never both: gloo breaks the
connection when two threads share a group (HANGS.md). That is why an attention group has two names here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

Span = Literal["all", "attention"]
Plane = Literal["device", "host"]

GROUPS: dict[str, tuple[Span, Plane]] = {
    "agree": ("all", "host"),  # the agreement of each step
    "experts": ("all", "device"),  # tokens to the experts and back
    "attention": ("attention", "device"),  # the partial sums of the output projection
    "attention_host": ("attention", "host"),  # what the schedulers of one attention group agree on
    "world": ("all", "host"),  # control of all ranks: caches, the barrier at the end
    "output": ("all", "device"),  # an output projection that is spread over all ranks
    "stats": ("all", "device"),  # how many tokens each expert got
    "sync": ("all", "host"),  # whether there is work left anywhere
}
"""Members and kind of each group, in the order in which the process groups are made."""

REGISTRATION = "symm"
"""Ledger group of the symmetric heap's registrations. No process group: the heap has boards of its own."""


def of_the_device(name: str) -> bool:
    """The group carries data of the device; False: messages of the hosts."""
    return name in GROUPS and GROUPS[name][1] == "device"


class GroupError(ValueError):
    """Ranks that cannot be split as asked, or a group that does not exist."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Where a rank is. Rank r belongs to attention group ``r // attention_size``, as in SGLang."""

    rank: int
    world: int
    dp: int
    """Attention groups. The ranks of one compute the same batch, each with its share of the heads."""

    def __post_init__(self) -> None:
        if not 1 <= self.dp <= self.world or self.world % self.dp:
            raise GroupError(f"{self.world} ranks cannot be {self.dp} attention groups of equal size")
        if not 0 <= self.rank < self.world:
            raise GroupError(f"rank {self.rank} is not one of {self.world} ranks")

    @property
    def attention_size(self) -> int:
        """Ranks of one attention group."""
        return self.world // self.dp

    @property
    def dp_rank(self) -> int:
        """The attention group of this rank."""
        return self.rank // self.attention_size

    @property
    def member(self) -> int:
        """This rank's place in its attention group; 0 speaks for the group."""
        return self.rank % self.attention_size

    def members(self, name: str) -> tuple[int, ...]:
        """The ranks of this rank's group of that name, ascending. Raises GroupError."""
        if name != REGISTRATION and name not in GROUPS:
            raise GroupError(f"there is no group {name!r}; there are {', '.join(GROUPS)}")
        if name == REGISTRATION or GROUPS[name][0] == "all":
            return tuple(range(self.world))
        first = self.rank - self.member
        return tuple(range(first, first + self.attention_size))


class ProcessGroups:
    """The ``torch.distributed`` groups of this process. They outlive trials: ranks stay warm.

    ``dp``: attention groups; None: one a rank. A group of one rank needs none. ``backend`` carries the device
    collectives; the hosts' go over gloo. nccl and hccl make their communicator at a group's first collective.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        init_method: str,
        backend: str,
        timeout_s: float,
        dp: int | None = None,
    ) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._connected: set[str] = set()
        if world == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=timeout)
        size = world // (dp or world)
        spans = {
            "all": [list(range(world))],
            "attention": [list(range(first, first + size)) for first in range(0, world, size)],
        }
        for name, (span, plane) in GROUPS.items():
            for ranks in spans[span]:
                if len(ranks) == 1:
                    continue
                made = dist.new_group(ranks, timeout=timeout, backend="gloo" if plane == "host" else backend)
                if rank in ranks:
                    self._groups[name] = made

    def get(self, name: str) -> dist.ProcessGroup | None:
        """None: this rank is alone in it."""
        return self._groups.get(name)

    def first_use(self, name: str) -> bool:
        """Whether this process asks for the first time: then the group has no communicator yet."""
        first = name not in self._connected
        self._connected.add(name)
        return first
