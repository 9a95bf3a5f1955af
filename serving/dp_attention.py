"""DP attention: what the ranks agree on before a step, and how tokens reach the experts and come back.

Every attention group attends to its own requests; the experts are spread over all ranks. So before every step
all ranks, idle ones too, tell each other what they are about to run, and all run the same collectives. Tokens are
padded in one of two ways, as SGLang does it (PLATFORMS.md): MAX_LEN pads every group to the longest one and uses
all-gather and reduce-scatter; SUM_LEN packs them one after the other and uses two all-reduces. Any prefill with
more than one rank means SUM_LEN; only MAX_LEN can be captured into a graph. Where neither decides and nothing is
asked for, an eager step takes the padding that moves fewer rows, by SGLang's rule.

An attention group is mostly one rank. Where it has more, they hold the same tokens: its first rank speaks for it in
the agreement and alone brings its rows to the experts, and both paddings use all-reduces.

Not here: the collectives themselves (``collectives.py``), the choice of the local batch (``scheduler.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from serving.comm import Group


class Mode(IntEnum):
    IDLE = 0
    DECODE = 1
    PREFILL = 2


class Padding(IntEnum):
    MAX_LEN = 0
    SUM_LEN = 1


class AgreementError(RuntimeError):
    """The ranks described a step that cannot be: they are not at the same step."""


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one rank tells the others. ``tokens``: computed in this step. ``work``: it is not finished yet."""

    step: int
    mode: Mode
    tokens: int
    graph: bool
    work: bool

    def row(self) -> list[int]:
        return [self.step, int(self.mode), self.tokens, int(self.graph), int(self.work)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all ranks do in this step, equal on all of them."""

    step: int
    modes: tuple[Mode, ...]
    """By attention group, as ``tokens``."""
    tokens: tuple[int, ...]
    padding: Padding
    bucket: int
    """Rows every group is padded to in a graph; 0 when the step runs eagerly."""
    work: bool
    attention_size: int = 1
    """Ranks of one attention group."""

    @property
    def graph(self) -> bool:
        return self.bucket > 0

    @property
    def empty(self) -> bool:
        return not any(self.tokens)

    def eagerly(self) -> StepPlan:
        """The step as a rank runs it that cannot use the graph, and pads as an eager step is padded."""
        return replace(self, bucket=0, padding=_fewer_rows(self.tokens, self.attention_size))

    @property
    def rows(self) -> int:
        """Rows of the gathered batch."""
        if self.graph:
            return self.bucket * len(self.tokens)
        return max(self.tokens) * len(self.tokens) if self.padding is Padding.MAX_LEN else sum(self.tokens)

    @property
    def summed(self) -> bool:
        """The gathered batch is the sum of what the ranks bring, each in its own rows of it."""
        return self.padding is Padding.SUM_LEN or self.attention_size > 1

    def local_rows(self, dp_rank: int) -> int:
        """Rows of the attention group's own batch, padding included."""
        if self.graph:
            return self.bucket
        return max(self.tokens) if self.padding is Padding.MAX_LEN else self.tokens[dp_rank]

    def begin(self, dp_rank: int) -> int:
        """First row of the attention group in the gathered batch."""
        if self.padding is Padding.MAX_LEN:
            return dp_rank * self.local_rows(dp_rank)
        return sum(self.tokens[:dp_rank])


def agree(
    group: Group,
    local: LocalState,
    *,
    buckets: Sequence[int],
    padding: Padding | None,
    check_steps: bool = True,
    alone: bool = False,
    attention_size: int = 1,
) -> StepPlan:
    """The per-step agreement of all ranks. ``padding`` None chooses as SGLang does; buckets ascending. Of each
    ``attention_size`` ranks in a row the first one's mode and tokens count.

    Raises AgreementError when a rank is at another step; without ``check_steps`` nobody notices, as in engines
    whose agreement says nothing of the step. ``alone``: a rank that skips it takes all others for idle,
    and those of its own attention group for its like.
    """
    nobody = LocalState(local.step, Mode.IDLE, 0, local.graph, local.work)
    if alone:
        own = group.member // attention_size
        rows = [(local if rank // attention_size == own else nobody).row() for rank in range(group.size)]
    else:
        rows = group.all_gather_host(local.row())
    steps, numbers, tokens, graphs, works = zip(*rows, strict=True)
    if check_steps and set(steps) != {local.step}:
        raise AgreementError(f"the ranks are at different steps: {list(steps)}")
    modes, tokens = tuple(map(Mode, numbers[::attention_size])), tokens[::attention_size]
    wanted = (
        all(graphs) and Mode.PREFILL not in modes and Mode.DECODE in modes and padding is not Padding.SUM_LEN
    )
    bucket = next((b for b in buckets if b >= max(tokens)), 0) if wanted else 0
    if bucket:
        chosen = Padding.MAX_LEN
    elif Mode.PREFILL in modes and len(rows) > 1:
        chosen = Padding.SUM_LEN
    elif padding is None:
        chosen = _fewer_rows(tokens, attention_size)
    else:
        chosen = padding
    return StepPlan(local.step, modes, tokens, chosen, bucket, any(works), attention_size)


def _fewer_rows(tokens: Sequence[int], attention_size: int) -> Padding:
    """An all-reduce moves each row twice; an attention group of several ranks has all-reduces in any case."""
    longest = attention_size == 1 and 2 * sum(tokens) > max(tokens) * len(tokens)
    return Padding.MAX_LEN if longest else Padding.SUM_LEN


def valid_rows(counts_W: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """Which gathered rows hold a token, from the token counts on the device: (rows, 1) of 0.0 and 1.0."""
    index = torch.arange(plan.rows, device=counts_W.device)
    if plan.padding is Padding.SUM_LEN:
        return (index < counts_W.sum()).to(torch.float32).unsqueeze(1)
    width = plan.rows // len(plan.tokens)
    counts_G = counts_W.unsqueeze(1).expand(-1, width).flatten()
    return (index % width < counts_G).to(torch.float32).unsqueeze(1)


def gather(group: Group, plan: StepPlan, local_TD: torch.Tensor, gathered_GD: torch.Tensor) -> None:
    """Enqueues: ``gathered_GD`` gets the tokens of all ranks. Where it is summed it must come with this rank's own
    rows in place and zeros elsewhere."""
    if plan.summed:
        group.all_reduce(gathered_GD)
    else:
        group.all_gather(gathered_GD, local_TD)


def scatter(group: Group, plan: StepPlan, partial_GD: torch.Tensor, local_TD: torch.Tensor) -> None:
    """Enqueues: the partial sums of all ranks, added up. Where the plan is summed ``partial_GD`` is reduced in
    place and this rank's rows are a slice of it; otherwise ``local_TD`` gets them."""
    if plan.summed:
        group.all_reduce(partial_GD)
    else:
        group.reduce_scatter(local_TD, partial_GD)
