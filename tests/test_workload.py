"""Generated requests: seeded, the same for every world size, and of the shape that their kind promises."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest

from serving.requests import State
from serving.workload import (
    KINDS,
    Alternating,
    Arrival,
    Bursts,
    PrefixTree,
    RequestSpec,
    WorkloadError,
    for_rank,
    generate,
    longest_context,
    workload,
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_seed_fixes_every_request(kind: str) -> None:
    one, again = (generate(workload({"kind": kind}), seed=3, vocab_size=100) for _ in range(2))
    other = generate(workload({"kind": kind}), seed=4, vocab_size=100)
    assert one == again != other
    ids = [arrival.request.id for arrival in one]
    assert len(set(ids)) == len(ids)
    assert [arrival.step for arrival in one] == sorted(arrival.step for arrival in one)
    tokens = {token for arrival in one for token in arrival.request.prompt}
    assert min(tokens) == 1 and max(tokens) == 99
    assert all(arrival.request.max_new_tokens >= 1 for arrival in one)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_share_all_requests_in_order(kind: str, world: int) -> None:
    arrivals = generate(workload({"kind": kind}), seed=3, vocab_size=100)
    shares = [for_rank(arrivals, rank, world) for rank in range(world)]
    assert sorted(a.request.id for share in shares for a in share) == sorted(a.request.id for a in arrivals)
    for share in shares:
        assert list(share) == [arrival for arrival in arrivals if arrival in share]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_pinned_request_goes_to_its_rank_and_shifts_no_other() -> None:
    specs = [RequestSpec(f"r{index}", (1,), 1) for index in range(6)]
    specs[2] = RequestSpec("r2", (1,), 1, rank=5)
    arrivals = [Arrival(0, spec) for spec in specs]
    assert [a.request.id for a in for_rank(arrivals, 1, 2)] == ["r1", "r2", "r3", "r5"]
    assert [a.request.id for a in for_rank(arrivals, 2, 3)] == ["r2", "r5"]
    with pytest.raises(WorkloadError, match="rank 2 is not one of 2"):
        for_rank(arrivals, 2, 2)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_all_requests_may_go_to_one_rank_and_stay_the_same(kind: str) -> None:
    dealt = generate(workload({"kind": kind}), seed=3, vocab_size=100)
    pinned = generate(workload({"kind": kind, "rank": 1}), seed=3, vocab_size=100)
    assert [a.request.prompt for a in pinned] == [a.request.prompt for a in dealt]
    assert for_rank(pinned, 1, 2) == pinned and for_rank(pinned, 0, 2) == ()
    with pytest.raises(WorkloadError, match="rank is -1"):
        workload({"kind": kind, "rank": -1})


def test_prompts_of_the_tree_grow_from_earlier_ones() -> None:
    kind = PrefixTree(requests=401)
    prompts = [arrival.request.prompt for arrival in generate(kind, seed=1, vocab_size=512)]
    assert len(prompts) == 401 and len(prompts[0]) == 117
    for index, prompt in enumerate(prompts[1:], 1):
        parents = [p for p in prompts[:index] if prompt[: len(p)] == p and 0 <= len(prompt) - len(p) <= 256]
        assert parents, f"prompt {index} continues no earlier one"
    assert len({len(prompt) for prompt in prompts}) > 100


def test_decode_lengths_stay_in_their_span_and_nought_counts_as_one() -> None:
    arrivals = generate(PrefixTree(requests=300, decode_tokens=(0, 3)), seed=1, vocab_size=9)
    assert {arrival.request.max_new_tokens for arrival in arrivals} == {1, 2, 3}


def test_the_grammar_share_changes_no_prompt() -> None:
    plain, half = (
        generate(PrefixTree(requests=300, grammar_share=share), seed=1, vocab_size=9) for share in (0.0, 0.5)
    )
    assert [a.request.prompt for a in plain] == [a.request.prompt for a in half]
    assert [a.request.max_new_tokens for a in plain] == [a.request.max_new_tokens for a in half]
    assert not any(arrival.request.grammar for arrival in plain)
    named = [arrival.request.grammar for arrival in half if arrival.request.grammar]
    assert set(named) == {"digits"} and 120 <= len(named) <= 180


def test_bursts_are_apart_by_more_than_they_take() -> None:
    kind = Bursts(bursts=3, requests_per_burst=4, gap_steps=30, long_prompt_tokens=700)
    arrivals = generate(kind, seed=1, vocab_size=50)
    steps = sorted({arrival.step for arrival in arrivals})
    assert [sum(arrival.step == step for arrival in arrivals) for step in steps] == [4, 5, 4]
    for step, after in pairwise(steps):
        longest = max(a.request.max_new_tokens for a in arrivals if a.step == step)
        assert after - step >= longest + 30
    (long,) = [a for a in arrivals if len(a.request.prompt) == 700]
    assert long.step == steps[1] and long.request.rank == 0


def test_alternating_prefills_meet_decodes_that_outlast_them() -> None:
    kind = Alternating(requests=12, every_steps=5, long_decodes=4, grammar_share=1.0)
    arrivals = generate(kind, seed=1, vocab_size=50)
    long, short = arrivals[:4], arrivals[4:]
    assert all(a.step == 0 and a.request.grammar is None for a in long)
    assert [a.step for a in short] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert all(a.request.max_new_tokens > short[-1].step for a in long)
    assert all(a.request.grammar == "digits" and a.request.max_new_tokens <= 24 for a in short)
    targets = [rank for a in short for rank in (0, 1) if a in for_rank(arrivals, rank, 2)]
    assert targets == [0, 1] * 4
    assert longest_context(arrivals) == max(len(a.request.prompt) + a.request.max_new_tokens for a in long)
    assert longest_context([]) == 0


def test_a_spec_makes_a_new_request_each_time() -> None:
    spec = RequestSpec("r1", (1, 2), 3, "digits")
    one, two = spec.request(), spec.request()
    assert one is not two
    assert (one.id, one.prompt, one.max_new_tokens, one.grammar) == ("r1", (1, 2), 3, "digits")
    assert one.state is State.WAITING and not one.eos_ids


def test_a_table_may_give_spans_as_lists() -> None:
    made = workload({"kind": "bursts", "bursts": 2, "prompt_tokens": [3, 4]})
    assert made == Bursts(bursts=2, prompt_tokens=(3, 4))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "workload.kind is None; allowed: prefix_tree, bursts, alternating"),
        ({"kind": "poisson"}, "workload.kind is 'poisson'"),
        ({"kind": "bursts", "gap": 3}, "bursts has no parameter gap; allowed: bursts, requests_per_burst"),
        ({"kind": "bursts", "gap_steps": -1}, "gap_steps is -1, the least is 0"),
        (
            {"kind": "prefix_tree", "child_tokens": [5, 3]},
            r"child_tokens is \(5, 3\), give \(lowest, highest\)",
        ),
        ({"kind": "alternating", "every_steps": 0}, "every_steps is 0, the least is 1"),
        ({"kind": "prefix_tree", "grammar_share": 1.5}, "grammar_share is 1.5, it must be from 0 to 1"),
    ],
)
def test_a_wrong_table_is_refused_by_name(table: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload(table)


def test_a_vocabulary_without_a_token_is_refused() -> None:
    with pytest.raises(WorkloadError, match="vocab_size is 1"):
        generate(PrefixTree(), seed=0, vocab_size=1)


def test_every_parameter_is_named_by_kind() -> None:
    for name, kind in KINDS.items():
        assert kind.kind == name and kind.__doc__
        assert {"grammar_share", "decode_tokens"} <= {field.name for field in fields(kind)}
