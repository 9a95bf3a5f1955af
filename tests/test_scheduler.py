"""The scheduler against a model in which the next token is a function of the whole prefix.

The machine below keeps what a device would keep: for each slot the hash of the prefix whose last token's KV
it holds. A table that is wrong in one entry therefore shows at the step that reads it, and in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import faults
from harness.fault_model import arm, parse, registered
from serving.admission import AdmissionRatio
from serving.kv_cache import IntegrityError
from serving.requests import Batch, BatchMode, Request, State
from serving.scheduler import Scheduler, SchedulerConfig, SchedulerError

VOCAB = 7
EOS = 3
START = 17


def mix(prefix: int, token: int) -> int:
    return (prefix * 1_000_003 + token + 1) % (2**61 - 1)


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    hashes, last = [], START
    for token in tokens:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def sampled(prefix: int) -> int:
    return (prefix >> 7) % VOCAB


def grammar_ends(prefix: int) -> bool:
    """Whether a grammar accepts nothing after the token sampled behind this prefix."""
    return (prefix >> 13) % 9 == 0


def reference(request: Request) -> tuple[list[int], str]:
    """What one request generates when it is alone on an endless pool, and why it ends."""
    output: list[int] = []
    prefix = prefix_hashes(request.prompt)[-1]
    while True:
        token = sampled(prefix)
        output.append(token)
        if token in request.eos_ids:
            return output, "eos"
        if request.grammar is not None and grammar_ends(prefix):
            return output, "grammar"
        if len(output) == request.max_new_tokens:
            return output, "length"
        prefix = mix(prefix, token)


class Machine:
    """A device that runs steps in the order of their launch and keeps the last token of each request."""

    def __init__(self) -> None:
        self.kv: dict[int, int] = {}
        self.last_token: dict[str, int] = {}

    def run(self, batch: Batch) -> tuple[dict[str, int], set[str]]:
        written = [slot for row in batch.rows for slot in row.slots]
        assert len(written) == len(set(written)), "two tokens of one step share a slot"
        tokens: dict[str, int] = {}
        ended: set[str] = set()
        writes: dict[int, int] = {}
        for row in batch.rows:
            assert row.kv_len == len(row.table) == row.start + row.q_len
            assert list(row.positions) == list(range(row.start, row.kv_len))
            assert min(row.table) > 0 and len(set(row.table)) == row.kv_len
            assert not set(row.table[: row.start]) & set(written), "the step writes where a row reads"
            resolved = [self.last_token[row.request.id] if token is None else token for token in row.tokens]
            assert (row.future_of == row.request.id) is (None in row.tokens)
            prefix = self.kv[row.table[row.start - 1]] if row.start else START
            for slot, token in zip(row.slots, resolved, strict=True):
                prefix = mix(prefix, token)
                writes[slot] = prefix
            if row.samples:
                tokens[row.request.id] = sampled(prefix)
                if row.request.grammar is not None and grammar_ends(prefix):
                    ended.add(row.request.id)
        self.kv.update(writes)
        self.last_token.update(tokens)
        for row in batch.rows:
            output, _ = reference(replace(row.request, eos_ids=frozenset(), grammar=None, max_new_tokens=400))
            truth = prefix_hashes([*row.request.prompt, *output])[: row.kv_len]
            assert [self.kv[slot] for slot in row.table] == truth, f"wrong table of request {row.request.id}"
        return tokens, ended


@dataclass
class Outcome:
    ended: list[Request]
    scheduler: Scheduler
    batches: list[Batch]


def check_batch(batch: Batch, config: SchedulerConfig) -> None:
    ids = [row.request.id for row in batch.rows]
    assert len(ids) == len(set(ids)) <= config.max_running
    assert not set(ids) & (set(batch.retracted) | set(batch.aborted))
    assert (batch.mode is BatchMode.IDLE) is (not batch.rows)
    if batch.mode is BatchMode.DECODE:
        assert all(row.q_len == 1 and row.samples for row in batch.rows)
    if batch.mode is BatchMode.PREFILL:
        assert not batch.retracted
        assert batch.num_tokens <= config.max_prefill_tokens
        assert all(row.q_len <= config.chunk_tokens for row in batch.rows)
        assert sum(not row.samples for row in batch.rows) <= 1
        assert all(None not in row.tokens for row in batch.rows)
        assert all(row.request.in_flight == row.samples for row in batch.rows), "admitted before its token"


def drive(
    config: SchedulerConfig,
    arrivals: Sequence[tuple[int, Request]],
    ahead: Sequence[bool] = (True,),
    aborts: Sequence[tuple[int, str]] = (),
) -> Outcome:
    """Runs until all is done. ``ahead`` says, step by step and over again, whether the host schedules before
    it commits the step before; ``arrivals`` and ``aborts`` come with their step."""
    scheduler, machine = Scheduler(config), Machine()
    live = {request.id: request for _, request in arrivals}
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    uncommitted: list[tuple[Batch, dict[str, int], set[str]]] = []
    ended: list[Request] = []
    batches: list[Batch] = []
    budget = 100 + 4 * sum(len(r.prompt) + 4 * r.max_new_tokens for _, r in arrivals) + len(pending) * 20
    step = 0
    while pending or not scheduler.idle():
        step += 1
        assert step < budget, "no end in sight"
        while pending and pending[0][0] <= step:
            scheduler.add(pending.pop(0)[1])
        for _, name in [abort for abort in aborts if abort[0] == step]:
            scheduler.abort(name, "client left")
        if not ahead[step % len(ahead)] and uncommitted:
            ended += scheduler.commit(*uncommitted.pop(0))
        batch = scheduler.schedule()
        check_batch(batch, config)
        scheduler.check_integrity()
        assert len({r.id for r in scheduler.waiting}) == len(scheduler.waiting)
        batches.append(batch)
        ended += [live[name] for name in batch.aborted]
        tokens, by_grammar = machine.run(batch)
        if uncommitted:
            ended += scheduler.commit(*uncommitted.pop(0))
        scheduler.check_integrity()
        if batch.rows:
            uncommitted.append((batch, tokens, by_grammar))
    assert not uncommitted
    assert sorted(r.id for r in ended) == sorted(live), "a request was lost or ended twice"
    assert scheduler.pool.available() == scheduler.pool.size
    return Outcome(ended, scheduler, batches)


def check_ends(outcome: Outcome) -> None:
    for request in outcome.ended:
        output, reason = reference(request)
        assert request.state is State.FINISHED and not request.slots and request.in_flight >= 0
        assert request.finish_reason is not None
        if request.finish_reason.startswith("aborted: "):
            assert request.output == output[: len(request.output)]
        else:
            assert (request.output, request.finish_reason) == (output, reason)
    counters = outcome.scheduler.counters
    assert counters.finished + counters.aborted == len(outcome.ended)
    assert counters.retractions == sum(request.retractions for request in outcome.ended)
    assert counters.retractions == sum(len(batch.retracted) for batch in outcome.batches)


def make(name: str, prompt: Sequence[int], new: int, *, eos: bool = False, grammar: bool = False) -> Request:
    eos_ids = frozenset({EOS}) if eos else frozenset[int]()
    return Request(name, tuple(prompt), new, "digits" if grammar else None, eos_ids)


configs = st.builds(
    SchedulerConfig,
    kv_tokens=st.integers(8, 40),
    page_size=st.sampled_from([1, 1, 2, 4]),
    chunk_tokens=st.integers(1, 12),
    max_prefill_tokens=st.integers(1, 24),
    max_running=st.integers(1, 5),
    admission_ratio=st.sampled_from([0.0, 0.7, 1.0]),
    admission_decay_steps=st.sampled_from([1, 600]),
    retract_every=st.integers(0, 5),
    prefix_cache=st.booleans(),
)


@st.composite
def workloads(draw: Any, longest_prompt: int = 14, most_new: int = 12) -> list[tuple[int, Request]]:
    """Requests over few tokens, half of which continue another one's prompt."""
    arrivals: list[tuple[int, Request]] = []
    for index in range(draw(st.integers(1, 7))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=longest_prompt))
        if arrivals and draw(st.booleans()):
            prompt = [*draw(st.sampled_from(arrivals))[1].prompt, *prompt][:longest_prompt]
        request = make(
            f"r{index}",
            prompt,
            draw(st.integers(1, most_new)),
            eos=draw(st.booleans()),
            grammar=draw(st.booleans()),
        )
        arrivals.append((draw(st.integers(0, 12)), request))
    return arrivals


aheads = st.lists(st.booleans(), min_size=1, max_size=5)
quick = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quick
@given(
    configs,
    workloads(),
    aheads,
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["r0", "r1", "r5"])), max_size=2),
)
def test_every_request_ends_once_and_no_page_is_lost(
    config: SchedulerConfig,
    arrivals: list[tuple[int, Request]],
    ahead: list[bool],
    aborts: list[tuple[int, str]],
) -> None:
    check_ends(drive(config, arrivals, ahead, aborts))


@quick
@given(configs, workloads(longest_prompt=14, most_new=10), aheads)
def test_tokens_do_not_depend_on_pressure_overlap_or_cache(
    config: SchedulerConfig, arrivals: list[tuple[int, Request]], ahead: list[bool]
) -> None:
    """With a pool that holds any one request alone, nothing is aborted, so all streams are whole."""
    outcome = drive(replace(config, kv_tokens=24 + config.kv_tokens % 8), arrivals, ahead)
    check_ends(outcome)
    assert outcome.scheduler.counters.aborted == 0


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 3]))
def test_a_tree_of_prompts_under_pressure(seed: int, cache: bool, retract_every: int) -> None:
    arrivals: list[tuple[int, Request]] = []
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    for index in range(24):
        seed = mix(seed, index)
        parent = arrivals[seed % len(arrivals)][1].prompt if arrivals else prompt
        grown = parent + tuple((seed >> 3 * shift) % 5 for shift in range(seed % 16))
        arrivals.append((0, make(f"r{index}", grown[:70], 1 + seed % 31)))
    config = SchedulerConfig(
        kv_tokens=160, page_size=4, chunk_tokens=16, max_prefill_tokens=32, admission_ratio=0.2,
        retract_every=retract_every, prefix_cache=cache,
    )  # fmt: skip
    outcome = drive(config, arrivals)
    check_ends(outcome)
    counters = outcome.scheduler.counters
    assert counters.aborted == 0 and counters.retractions > 0
    assert (counters.cached_tokens > 0) is cache
    assert (counters.forced_retractions > 0) is (retract_every > 0)
    assert (counters.evicted_pages > 0) is cache


# One rule each


def commit(scheduler: Scheduler, batch: Batch, token: int = 1) -> list[Request]:
    return scheduler.commit(batch, dict.fromkeys(batch.sampling, token))


def step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    commit(scheduler, batch)
    scheduler.check_integrity()
    return batch


def names(batch: Batch) -> list[str]:
    return [row.request.id for row in batch.rows]


def start(config: SchedulerConfig, *requests: Request) -> Scheduler:
    scheduler = Scheduler(config)
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_a_prompt_larger_than_the_pool_is_aborted_when_it_is_added() -> None:
    request = make("big", [1] * 17, 2)
    scheduler = start(SchedulerConfig(kv_tokens=16), request)
    assert scheduler.has_work()
    assert scheduler.schedule().aborted == ("big",)
    assert scheduler.idle()
    reason = request.finish_reason or ""
    assert reason.startswith("aborted: request big alone needs 17 tokens") and "pool has 16" in reason
    assert "enlarge kv_tokens" in reason


@pytest.mark.parametrize("ahead", [True, False])
def test_the_last_request_is_aborted_when_it_outgrows_the_pool(ahead: bool) -> None:
    big, small = make("big", [1] * 8, 50), make("small", [2, 2], 3)
    outcome = drive(SchedulerConfig(kv_tokens=16), [(0, big), (0, small)], [ahead])
    assert {request.id for request in outcome.ended} == {"big", "small"}
    ended = {request.id: request for request in outcome.ended}
    reason = ended["big"].finish_reason or ""
    assert "needs 17 tokens of KV cache" in reason and "the pool has 16" in reason
    assert len(ended["big"].output) == 9, "every token that the pool had room for is kept"
    assert ended["small"].finish_reason == "length"


def test_the_last_token_of_a_request_needs_no_slot() -> None:
    outcome = drive(SchedulerConfig(kv_tokens=16), [(0, make("fits", [1] * 8, 9))])
    assert [request.finish_reason for request in outcome.ended] == ["length"]


def test_two_requests_that_never_fit_together_both_end() -> None:
    """The livelock of HANGS.md, H2: each retracts the other, and still the token count grows."""
    for every in (0, 1, 2):
        config = SchedulerConfig(kv_tokens=24, admission_ratio=0.0, retract_every=every)
        outcome = drive(config, [(0, make("a", [1] * 5, 10)), (0, make("b", [2] * 5, 10))])
        assert [request.finish_reason for request in outcome.ended] == ["length", "length"]
        assert outcome.scheduler.counters.retractions > 0


def test_among_equal_outputs_the_longest_prompt_is_retracted() -> None:
    config = SchedulerConfig(kv_tokens=24, admission_ratio=0.0, prefix_cache=False)
    requests = [make("mid", [3] * 4, 9), make("long", [1] * 6, 9), make("short", [2] * 3, 9)]
    scheduler = start(config, *requests)
    assert names(step(scheduler)) == ["mid", "long", "short"]
    for _ in range(3):
        assert step(scheduler).retracted == ()
    last = step(scheduler)
    assert (last.mode, last.retracted, names(last)) == (BatchMode.DECODE, ("long",), ["mid", "short"])
    assert requests[1].retractions == 1 and not last.forced


def test_the_fewest_output_tokens_come_before_the_longest_prompt() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=24, admission_ratio=0.0), make("old", [1] * 6, 18))
    for _ in range(4):
        step(scheduler)
    scheduler.add(make("new", [2] * 2, 9))
    retracted: tuple[str, ...] = ()
    while not retracted:
        retracted = step(scheduler).retracted
    assert retracted == ("new",)


def test_retraction_goes_on_until_the_step_fits() -> None:
    shared = [5] * 8
    scheduler = start(SchedulerConfig(kv_tokens=20, admission_ratio=0.0), make("warm", shared, 1))
    step(scheduler)
    for index in range(6):
        scheduler.add(make(f"r{index}", [*shared, index], 6))
    assert len(step(scheduler).rows) == 6 and len(step(scheduler).rows) == 6
    assert scheduler.pool.available() == 0
    batch = step(scheduler)
    assert batch.retracted == ("r5", "r4") and len(batch.rows) == 4


@pytest.mark.parametrize("every", [1, 2, 3])
def test_forced_retraction_comes_with_every_kth_step_and_keeps_one(every: int) -> None:
    config = SchedulerConfig(kv_tokens=400, retract_every=every)
    outcome = drive(config, [(0, make(f"r{index}", [index] * 4, 12)) for index in range(4)])
    for batch in outcome.batches:
        due = batch.mode is BatchMode.DECODE and batch.forward_count % every == 0
        assert not batch.retracted or due
        assert len(batch.retracted) <= 1 and batch.forced is bool(batch.retracted)
        assert batch.retracted or not due or len(batch.rows) <= 1
    assert outcome.scheduler.counters.forced_retractions == outcome.scheduler.counters.retractions > 0


def test_the_only_request_is_never_retracted_by_force() -> None:
    outcome = drive(SchedulerConfig(kv_tokens=64, retract_every=1), [(0, make("only", [1] * 4, 12))])
    assert outcome.ended[0].retractions == 0
    assert [batch.mode for batch in outcome.batches[:12]] == [BatchMode.PREFILL, *[BatchMode.DECODE] * 11]


def test_a_retracted_request_goes_to_the_front_of_the_queue() -> None:
    config = SchedulerConfig(kv_tokens=64, retract_every=2, max_running=2)
    scheduler = start(config, *[make(f"r{index}", [index + 1], 9) for index in range(4)])
    step(scheduler)
    assert step(scheduler).retracted == ("r1",)
    assert [request.id for request in scheduler.waiting] == ["r1", "r2", "r3"]
    assert names(step(scheduler)) == ["r1"]


def test_a_retracted_request_that_outgrew_the_pool_on_shared_pages_is_aborted_in_its_turn() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=8, admission_ratio=0.0), make("kept", [1] * 4, 3))
    step(scheduler)
    grown = make("grown", [1] * 8, 3)
    scheduler.add(grown)
    assert names(step(scheduler)) == ["grown"] and scheduler.pool.available() == 0
    batch = step(scheduler)
    assert (batch.retracted, names(batch)) == (("grown",), ["kept"])
    batch = step(scheduler)
    assert (batch.aborted, names(batch)) == (("grown",), ["kept"])
    assert "grown alone needs 9 tokens" in (grown.finish_reason or "")
    assert grown.output == [1]


def test_a_request_whose_last_token_is_in_flight_is_not_scheduled() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=16), make("a", [1, 2], 2))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.rows[0].tokens == (None,) and second.rows[0].future_of == "a"
    assert commit(scheduler, first) == []
    assert scheduler.schedule().mode is BatchMode.IDLE and scheduler.has_work()
    assert [request.output for request in commit(scheduler, second)] == [[1, 1]]
    assert scheduler.idle()


def test_the_token_of_a_step_launched_before_the_end_was_known_is_dropped() -> None:
    request = make("a", [1, 2], 9, eos=True)
    scheduler = start(SchedulerConfig(kv_tokens=16), request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert commit(scheduler, first, EOS) == [request]
    scheduler.check_integrity()
    assert not scheduler.has_work() and not scheduler.idle()
    assert scheduler.commit(second, {}) == []
    assert request.output == [EOS] and request.finish_reason == "eos" and scheduler.idle()


def test_a_retracted_request_waits_for_its_token_and_may_end_with_it() -> None:
    config = SchedulerConfig(kv_tokens=64, retract_every=2)
    kept, victim = make("kept", [1], 9), make("victim", [2, 2], 9, grammar=True)
    scheduler = start(config, kept, victim)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.retracted == ("victim",) and victim.in_flight == 1 and not victim.slots
    finished = scheduler.commit(first, {"kept": 1, "victim": 4}, {"victim"})
    assert finished == [victim] and victim.output == [4] and victim.finish_reason == "grammar"
    assert not scheduler.waiting
    scheduler.check_integrity()


def test_a_retracted_request_is_not_admitted_before_its_token_is_known() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=64, retract_every=2), make("a", [1], 9), make("b", [2, 2], 9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.retracted == ("b",)
    commit(scheduler, first, 6)
    third = scheduler.schedule()
    assert (third.mode, names(third), third.rows[0].tokens[-1]) == (BatchMode.PREFILL, ["b"], 6)


def test_equal_prompts_share_pages_from_the_next_step_on() -> None:
    scheduler = start(
        SchedulerConfig(kv_tokens=64, page_size=4), make("a", range(10), 5), make("b", range(10), 5)
    )
    assert [row.q_len for row in step(scheduler).rows] == [10, 10]  # its pages are not there in its own step
    scheduler.add(make("c", range(10), 5))
    (row,) = step(scheduler).rows
    assert (row.start, row.q_len) == (8, 2) and row.table[:8] == scheduler.running["a"].prefix.slots  # type: ignore[union-attr]
    assert scheduler.counters.cached_tokens == 8


def test_a_finished_request_leaves_its_output_in_the_cache_even_beside_a_twin() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=64), make("a", [5, 6], 4), make("twin", [5, 6], 6))
    while scheduler.has_work():
        step(scheduler)
    # Both computed the same tokens side by side; the twin, whose prompt was cached by the other, went further.
    scheduler.add(make("next", [5, 6, 1, 1, 1, 1, 1, 1, 1], 1))
    (row,) = step(scheduler).rows
    assert row.start == 2 + 5, "all of the twin but its last token, whose KV nobody computed"


def test_a_long_prompt_comes_in_chunks_that_leave_room_for_others() -> None:
    config = SchedulerConfig(kv_tokens=200, chunk_tokens=8, max_prefill_tokens=12, prefix_cache=False)
    requests = [
        make("long", [1] * 20, 3),
        make("a", [2] * 3, 9),
        make("also-long", [3] * 9, 3),
        make("b", [4], 3),
    ]
    scheduler = start(config, *requests)
    batches = [step(scheduler) for _ in range(5)]
    # "also-long" would have to be cut as well, so it and those behind it wait for the long one's last chunk.
    assert [(names(batch), batch.num_tokens) for batch in batches] == [
        (["long", "a"], 11),
        (["long"], 8),
        (["long", "also-long"], 12),
        (["also-long", "b"], 2),
        (["a", "long", "also-long", "b"], 4),
    ]
    assert [row.samples for batch in batches[:4] for row in batch.rows] == [
        False,
        True,
        False,
        True,
        False,
        True,
        True,
    ]


def test_prefill_and_decode_rows_never_mix_and_max_running_holds() -> None:
    config = SchedulerConfig(kv_tokens=100, max_running=2)
    scheduler = start(config, *[make(f"r{index}", [index + 1], 3) for index in range(3)])
    assert names(step(scheduler)) == ["r0", "r1"]
    assert [names(step(scheduler)) for _ in range(2)] == [["r0", "r1"]] * 2
    assert names(step(scheduler)) == ["r2"]


def test_the_admission_ratio_falls_rises_on_a_retraction_and_starts_again_when_idle() -> None:
    config = SchedulerConfig(kv_tokens=64, retract_every=5, admission_decay_steps=10)
    scheduler = start(config, make("a", [1], 9), make("b", [2], 9))
    ratios = []
    while scheduler.has_work():
        ratios.append((step(scheduler), scheduler.new_token_ratio))
    assert ratios[0][1] == 0.7
    for (_, before), (batch, after) in pairwise(ratios):
        if batch.retracted:
            assert after > before
        elif batch.mode is BatchMode.DECODE:
            assert after < before
    scheduler.schedule()
    assert scheduler.new_token_ratio == 0.7


def test_a_retraction_never_lowers_the_admission_ratio() -> None:
    ratio = AdmissionRatio(0.7, 0.14, 600)
    ratio.step([make("a", [1], 1000)], decoded=True, retracted=True)
    assert ratio.value == 0.7
    ratio.step([make("a", [1], 25)], decoded=True, retracted=True)
    assert ratio.value == 0.8
    ratio.step([make("a", [1], 5)], decoded=True, retracted=True)
    assert ratio.value == 1.0
    for _ in range(1000):
        ratio.step([make("a", [1], 5)], decoded=True, retracted=False)
    assert ratio.value == ratio.floor == pytest.approx(0.098)


def test_the_share_set_aside_keeps_a_request_out() -> None:
    for ratio, together in ((0.0, True), (1.0, False)):
        scheduler = start(
            SchedulerConfig(kv_tokens=24, admission_ratio=ratio),
            make("a", [1] * 4, 12),
            make("b", [2] * 4, 12),
        )
        assert (names(step(scheduler)) == ["a", "b"]) is together


def test_abort_gives_everything_back_once() -> None:
    request = make("a", [1, 2, 3], 9)
    scheduler = start(SchedulerConfig(kv_tokens=16), request, make("waits", [1] * 12, 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.abort("a", "client left") and scheduler.abort("waits", "client left")
    assert not scheduler.abort("a", "again") and not scheduler.abort("nobody", "unknown")
    scheduler.check_integrity()
    assert commit(scheduler, first) == commit(scheduler, second) == []
    assert request.output == [] and request.finish_reason == "aborted: client left"
    assert scheduler.schedule().aborted == ("a", "waits") and scheduler.idle()


def test_calls_out_of_order_are_refused() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=16), make("a", [1], 5))
    with pytest.raises(SchedulerError, match="already known"):
        scheduler.add(make("a", [1], 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(SchedulerError, match="one step ahead"):
        scheduler.schedule()
    with pytest.raises(SchedulerError, match="not the oldest"):
        commit(scheduler, second)
    with pytest.raises(SchedulerError, match=r"no token for the requests \['a'\]"):
        scheduler.commit(first, {})
    assert commit(scheduler, first) == [] and commit(scheduler, second) == []
    with pytest.raises(SchedulerError, match="not the oldest"):
        commit(scheduler, second)
    with pytest.raises(SchedulerError, match="add a new one"):
        scheduler.add(scheduler.running["a"])


def test_the_check_names_a_leaked_page() -> None:
    scheduler = start(SchedulerConfig(kv_tokens=16, prefix_cache=False), make("a", [1, 2], 5))
    step(scheduler)
    lost = scheduler.running["a"].slots.pop()
    with pytest.raises(IntegrityError, match=f"page {lost} is lost") as caught:
        scheduler.check_integrity()
    assert caught.value.pages == (lost,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_tokens": 3, "page_size": 4}, "kv_tokens is 3, it must be at least 4"),
        ({"kv_tokens": 8, "retract_every": -1}, "retract_every is -1"),
        ({"kv_tokens": 8, "admission_ratio": 1.5}, "admission_ratio is 1.5"),
    ],
)
def test_a_config_out_of_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**values)


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        make("a", [], 1)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        make("a", [1], 0)


# What faults break -----------------------------------------------------------------------------------------


@pytest.fixture
def nemesis() -> Iterator[Callable[..., None]]:
    """Arms one fault on this process until the test is over."""

    registered()

    def start(**table: Any) -> None:
        faults.activate(*arm([parse(table)], 0, seed=1))

    yield start
    faults.activate()


def prefills(scheduler: Scheduler, steps: int) -> list[Batch]:
    """So many steps, each committed before the next."""
    batches = []
    machine = Machine()
    for _ in range(steps):
        batch = scheduler.schedule()
        scheduler.check_integrity()
        scheduler.commit(batch, *machine.run(batch))
        batches.append(batch)
    return batches


def test_two_prefills_that_give_way_to_each_other_never_sample(nemesis: Callable[..., None]) -> None:
    nemesis(name="skip", site="scheduler.prefill", times=0)
    scheduler = Scheduler(SchedulerConfig(kv_tokens=64, chunk_tokens=8, max_prefill_tokens=8))
    for name in ("a", "b"):
        scheduler.add(Request(name, tuple(range(1, 25)), 4))
    batches = prefills(scheduler, 40)
    assert all(batch.mode is BatchMode.PREFILL for batch in batches)
    assert [batch.retracted for batch in batches[1:5]] == [("a",), ("b",), ("a",), ("b",)]
    assert not any(row.samples for batch in batches for row in batch.rows)


def test_a_prefill_alone_gives_way_to_nobody(nemesis: Callable[..., None]) -> None:
    nemesis(name="skip", site="scheduler.prefill", times=0)
    scheduler = Scheduler(SchedulerConfig(kv_tokens=64, chunk_tokens=8, max_prefill_tokens=8))
    scheduler.add(Request("a", tuple(range(1, 25)), 4))
    batches = prefills(scheduler, 3)
    assert not any(batch.retracted for batch in batches) and batches[-1].rows[0].samples


def test_a_request_that_is_never_given_up_waits_for_ever(nemesis: Callable[..., None]) -> None:
    nemesis(name="skip", site="scheduler.abort", times=0)
    scheduler = Scheduler(SchedulerConfig(kv_tokens=16))
    scheduler.add(Request("large", tuple(range(1, 40)), 4))
    batches = prefills(scheduler, 5)
    assert all(batch.mode is BatchMode.IDLE and not batch.aborted for batch in batches)
    assert scheduler.has_work() and [request.id for request in scheduler.waiting] == ["large"]
