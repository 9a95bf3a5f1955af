"""What the hosts of the ranks tell each other beyond the agreement of each step, as engines do now and then.

Each is off unless the scenario asks for it. When a rank joins in depends on its own counters alone, as in the
engines: a rank whose counters drifted meets its peers at the wrong time, or never.

Not here: the agreement itself (``dp_attention.py``), the collectives (``collectives.py``).
"""

from __future__ import annotations

from serving.comm import Comm
from serving.requests import Batch, BatchMode


class Control:
    """``sync_every`` steps of this rank, as in vLLM's data-parallel loop, and ``cache_sync_every`` prefills of its
    attention group, as in SGLang's hierarchical cache; 0 switches either off. Their groups are made when they are
    first used, as NCCL and HCCL make communicators."""

    def __init__(self, comm: Comm, *, sync_every: int, cache_sync_every: int) -> None:
        self._sync_every = sync_every
        self._cache_sync_every = cache_sync_every
        self._comm = comm
        self._prefills = 0
        self._left = True

    def syncs_in(self, step: int) -> bool:
        return self._sync_every > 0 and step % self._sync_every == 0

    def work_left(self, step: int, work: bool, agreed: bool) -> bool:
        """Whether any rank has work, as far as this one knows. ``work``: whether it has itself; ``agreed``: what
        the agreement of this step said. Between two questions the last answer stands."""
        if not self._sync_every:
            return agreed
        if self.syncs_in(step):
            self._left = self._comm.group("sync").all_reduce_host([int(work)], "max") != [0]
        return self._left

    def written_back(self, batch: Batch, pages: int) -> int | None:
        """In every n-th prefill: the pages that all ranks of the attention group have put into the prefix cache.
        ``pages``: those of this rank."""
        if not self._cache_sync_every or batch.mode is not BatchMode.PREFILL:
            return None
        self._prefills += 1
        if self._prefills % self._cache_sync_every:
            return None
        return self._comm.group("attention_host").all_reduce_host([pages], "min")[0]

    def heed(self, step: int) -> None:
        """Rank 0 tells all others what came in, here the number of its step, as SGLang's scheduler hands on
        requests: nobody schedules before."""
        self._comm.group("world").broadcast_host([step], 0)

    def meet(self) -> None:
        """Returns when all ranks came here."""
        self._comm.group("world").barrier_host()
