"""What the ranks agree on before a step, and that both paddings bring the same to and from the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sim_rig import LONG_S, in_thread, joined

from serving.dp_attention import (
    AgreementError,
    LocalState,
    Mode,
    Padding,
    StepPlan,
    agree,
    gather,
    scatter,
    valid_rows,
)
from serving.symmetric import SymmetricHeap

IDLE, DECODE, PREFILL = Mode.IDLE, Mode.DECODE, Mode.PREFILL
MAX_LEN, SUM_LEN = Padding.MAX_LEN, Padding.SUM_LEN
BUCKETS = (1, 2, 4, 8)


def state(mode: Mode, tokens: int, *, step: int = 5, graph: bool = True, work: bool = True) -> LocalState:
    return LocalState(step=step, mode=mode, tokens=tokens, graph=graph, work=work)


@dataclass
class OtherRanks:
    """Stands in for the control group: this rank is the first, the others are given."""

    others: Sequence[LocalState]
    sent: list[list[int]] = field(default_factory=list)
    member: int = 0

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def all_gather_host(self, values: Sequence[int]) -> list[list[int]]:
        self.sent.append(list(values))
        return [list(values), *(other.row() for other in self.others)]


def plan_of(
    *states: LocalState, padding: Padding | None = None, buckets: Sequence[int] = BUCKETS
) -> StepPlan:
    group: Any = OtherRanks(states[1:])
    return agree(group, states[0], buckets=buckets, padding=padding)


@pytest.mark.parametrize(
    ("modes", "tokens", "padding", "chosen", "bucket"),
    [
        # decode, alone or beside idle ranks: the smallest graph that holds the longest batch
        ((DECODE, DECODE), (1, 1), None, MAX_LEN, 1),
        ((DECODE, DECODE), (3, 4), None, MAX_LEN, 4),
        ((DECODE, DECODE), (5, 1), None, MAX_LEN, 8),
        ((DECODE, IDLE), (2, 0), None, MAX_LEN, 2),
        ((IDLE, IDLE, DECODE), (0, 0, 7), None, MAX_LEN, 8),
        ((DECODE, DECODE), (3, 4), MAX_LEN, MAX_LEN, 4),
        # no graph is large enough, or the padding cannot be captured
        ((DECODE, DECODE), (9, 1), None, MAX_LEN, 0),
        ((DECODE, DECODE), (3, 4), SUM_LEN, SUM_LEN, 0),
        # any prefill means SUM_LEN, whatever was asked for; a single rank needs none
        ((PREFILL, DECODE), (30, 2), None, SUM_LEN, 0),
        ((DECODE, PREFILL), (2, 30), MAX_LEN, SUM_LEN, 0),
        ((IDLE, PREFILL), (0, 30), None, SUM_LEN, 0),
        ((PREFILL, PREFILL), (16, 16), None, SUM_LEN, 0),
        ((PREFILL,), (30,), None, MAX_LEN, 0),
        ((DECODE,), (3,), None, MAX_LEN, 4),
        # an eager decode step of unequal ranks: SUM_LEN where it moves fewer rows
        ((DECODE, IDLE), (9, 0), None, SUM_LEN, 0),
        ((DECODE, IDLE), (9, 0), MAX_LEN, MAX_LEN, 0),
        ((DECODE, DECODE, DECODE, IDLE), (9, 8, 1, 0), None, SUM_LEN, 0),
        ((DECODE, DECODE, DECODE, IDLE), (9, 8, 2, 0), None, MAX_LEN, 0),
        # nobody has anything
        ((IDLE, IDLE), (0, 0), None, SUM_LEN, 0),
    ],
)
def test_all_ranks_choose_the_same_from_what_all_said(
    modes: tuple[Mode, ...], tokens: tuple[int, ...], padding: Padding | None, chosen: Padding, bucket: int
) -> None:
    states = [state(mode, count) for mode, count in zip(modes, tokens, strict=True)]
    plan = plan_of(*states, padding=padding)
    assert (plan.modes, plan.tokens) == (modes, tokens)
    assert (plan.padding, plan.bucket, plan.graph) == (chosen, bucket, bucket > 0)
    assert plan.empty == (sum(tokens) == 0)
    # Seen from any other rank it is the same plan.
    for first in range(1, len(states)):
        turned = states[first:] + states[:first]
        other = plan_of(*turned, padding=padding)
        assert (other.padding, other.bucket) == (plan.padding, plan.bucket)


def test_one_rank_without_graphs_makes_all_run_eagerly() -> None:
    assert plan_of(state(DECODE, 2), state(DECODE, 2, graph=False)).bucket == 0
    assert plan_of(state(DECODE, 2, graph=False), state(DECODE, 2)).bucket == 0


def test_ranks_go_on_while_any_has_work() -> None:
    assert plan_of(state(IDLE, 0, work=False), state(IDLE, 0, work=True)).work
    assert not plan_of(state(IDLE, 0, work=False), state(IDLE, 0, work=False)).work


def test_ranks_at_different_steps_are_an_error_that_shows_them() -> None:
    with pytest.raises(AgreementError, match=r"different steps: \[5, 6\]"):
        plan_of(state(DECODE, 1, step=5), state(DECODE, 1, step=6))


@pytest.mark.parametrize(
    ("modes", "tokens", "padding", "chosen", "bucket"),
    [
        ((DECODE, DECODE), (3, 4), None, MAX_LEN, 4),
        ((DECODE, DECODE), (9, 1), None, SUM_LEN, 0),
        ((DECODE, DECODE), (9, 9), None, SUM_LEN, 0),
        ((DECODE, IDLE), (9, 0), MAX_LEN, MAX_LEN, 0),
        ((PREFILL, IDLE), (9, 0), MAX_LEN, SUM_LEN, 0),
        ((PREFILL,), (9,), MAX_LEN, SUM_LEN, 0),
    ],
)
def test_the_first_rank_of_an_attention_group_speaks_for_it(
    modes: tuple[Mode, ...], tokens: tuple[int, ...], padding: Padding | None, chosen: Padding, bucket: int
) -> None:
    """The other rank of each group says something else, which counts only for the step and for work left."""
    group: Any = OtherRanks([])
    states = []
    for mode, count in zip(modes, tokens, strict=True):
        states += [state(mode, count, work=False), state(PREFILL, 77, work=True)]
    group.others = states[1:]
    plan = agree(group, states[0], buckets=BUCKETS, padding=padding, attention_size=2)
    assert (plan.modes, plan.tokens, plan.padding, plan.bucket) == (modes, tokens, chosen, bucket)
    assert plan.summed and plan.work and plan.attention_size == 2
    states[1] = state(PREFILL, 77, step=6)
    group.others = states[1:]
    with pytest.raises(AgreementError):
        agree(group, states[0], buckets=BUCKETS, padding=padding, attention_size=2)


@pytest.mark.parametrize(("member", "tokens"), [(0, (3, 0)), (1, (3, 0)), (3, (0, 3))])
def test_a_rank_that_skips_the_agreement_takes_all_but_its_group_for_idle(
    member: int, tokens: tuple[int, ...]
) -> None:
    group: Any = OtherRanks([state(PREFILL, 9)] * 3, member=member)
    plan = agree(group, state(DECODE, 3), buckets=BUCKETS, padding=None, alone=True, attention_size=2)
    assert plan.tokens == tokens and group.sent == []


def test_a_rank_tells_all_it_decided() -> None:
    group = OtherRanks([])
    local = LocalState(step=9, mode=PREFILL, tokens=33, graph=True, work=False)
    agree(group, local, buckets=BUCKETS, padding=None)  # type: ignore[arg-type]
    assert group.sent == [[9, 2, 33, 1, 0]]


@pytest.mark.parametrize(
    ("plan", "rows", "local", "begins"),
    [
        (StepPlan(1, (DECODE, DECODE), (3, 1), MAX_LEN, 4, True), 8, (4, 4), (0, 4)),
        (StepPlan(1, (DECODE, DECODE), (3, 1), MAX_LEN, 0, True), 6, (3, 3), (0, 3)),
        (StepPlan(1, (PREFILL, IDLE, DECODE), (5, 0, 2), SUM_LEN, 0, True), 7, (5, 0, 2), (0, 5, 5)),
    ],
)
def test_where_each_ranks_rows_lie(
    plan: StepPlan, rows: int, local: tuple[int, ...], begins: tuple[int, ...]
) -> None:
    ranks = range(len(plan.tokens))
    assert plan.rows == rows
    assert tuple(plan.local_rows(rank) for rank in ranks) == local
    assert tuple(plan.begin(rank) for rank in ranks) == begins


@pytest.mark.parametrize(
    ("plan", "valid"),
    [
        (StepPlan(1, (DECODE, DECODE), (3, 1), MAX_LEN, 4, True), [1, 1, 1, 0, 1, 0, 0, 0]),
        (StepPlan(1, (DECODE, IDLE), (2, 0), MAX_LEN, 0, True), [1, 1, 0, 0]),
        (StepPlan(1, (PREFILL, DECODE), (2, 3), SUM_LEN, 0, True), [1, 1, 1, 1, 1]),
    ],
)
def test_valid_rows_follow_the_counts_on_the_device(plan: StepPlan, valid: list[int]) -> None:
    valid_G1 = valid_rows(torch.tensor(plan.tokens), plan)
    assert valid_G1.shape == (plan.rows, 1)
    assert valid_G1.flatten().tolist() == [float(one) for one in valid]
    assert valid_rows(torch.zeros(len(plan.tokens), dtype=torch.int64), plan).sum() == 0


def experts_of_all(directory: Path, plan: StepPlan, hidden: int) -> list[torch.Tensor]:
    """Each rank's tokens go to the experts, a matrix a rank, and come back: per rank (tokens, hidden)."""
    world = len(plan.tokens)
    found: dict[int, torch.Tensor] = {}

    def rank(index: int) -> None:
        heap: Any = SymmetricHeap(
            directory, name=plan.padding.name, member=index, size=world, timeout_s=LONG_S, stop=lambda: False
        )
        own, begin, local = own_tokens(index, plan, hidden), plan.begin(index), plan.local_rows(index)
        gathered = torch.zeros(plan.rows, hidden)
        padded = torch.full((local, hidden), torch.nan)  # what padding holds must not matter
        padded[: len(own)] = own
        if plan.padding is SUM_LEN:
            gathered[begin : begin + len(own)] = own
        gather(heap, plan, padded, gathered)
        partial = gathered.nan_to_num() @ expert(index, hidden) * valid_rows(torch.tensor(plan.tokens), plan)
        back = torch.empty(local, hidden)
        scatter(heap, plan, partial, back)
        found[index] = (back if plan.padding is MAX_LEN else partial[begin : begin + len(own)])[: len(own)]

    threads = [in_thread(lambda index=index: rank(index)) for index in range(world)]  # type: ignore[misc]
    for thread in threads:
        joined(thread)
    return [found[index] for index in range(world)]


def own_tokens(rank: int, plan: StepPlan, hidden: int) -> torch.Tensor:
    return torch.randn(plan.tokens[rank], hidden, generator=torch.Generator().manual_seed(rank))


def expert(rank: int, hidden: int) -> torch.Tensor:
    return torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(100 + rank))


@pytest.mark.parametrize("tokens", [(3, 5), (4, 0), (0, 1, 6), (2, 2, 2)])
def test_both_paddings_give_each_rank_the_sum_of_all_experts(tmp_path: Path, tokens: tuple[int, ...]) -> None:
    hidden = 16
    modes = tuple(DECODE if count else IDLE for count in tokens)
    plans = [StepPlan(1, modes, tokens, padding, 0, True) for padding in (MAX_LEN, SUM_LEN)]
    plans.append(StepPlan(1, modes, tokens, MAX_LEN, 8, True))
    for number, plan in enumerate(plans):
        directory = tmp_path / str(number)
        directory.mkdir()
        for rank, back in enumerate(experts_of_all(directory, plan, hidden)):
            own = own_tokens(rank, plan, hidden)
            together = sum(own @ expert(other, hidden) for other in range(len(tokens)))
            torch.testing.assert_close(back, together, rtol=1e-5, atol=1e-5)
