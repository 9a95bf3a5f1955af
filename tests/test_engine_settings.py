"""What a scenario may ask of the engine beyond serving: more collectives, other rules, and the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_ranks import Trial, Trials

from harness.ledger import LedgerReader
from harness.ledger_snapshot import Snapshot
from serving.model_config import TINY

if TYPE_CHECKING:
    from local_ranks import LocalRanks

MIX = {
    "kind": "prefix_tree",
    "requests": 8,
    "root_tokens": 12,
    "child_tokens": (0, 24),
    "decode_tokens": (3, 10),
    "grammar_share": 0.4,
}


def decisions(trial: Trial, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.spec.decisions_paths[rank]).read_text().splitlines()]


def snapshot(trial: Trial, rank: int) -> Snapshot:
    reader = LedgerReader.open(Path(trial.spec.ledger_paths[rank]))
    try:
        return reader.snapshot()
    finally:
        reader.close()


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("settings"), MIX)


@pytest.fixture(scope="module")
def reference(ranks: LocalRanks, trials: Trials) -> Trial:
    """One rank with nothing switched on."""
    return ranks.trial(1, trials.of(1).spec(toggles={"overlap": "off", "graph": "off"}))


def served(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int, engine: dict[str, Any], **toggles: str
) -> Trial:
    trial = ranks.trial(world, trials.of(world).spec(engine=engine, toggles={"pinned": "pinned"} | toggles))
    assert trial.tokens == reference.tokens
    assert trial.finish == reference.finish
    assert [list(result.leaks) for result in trial.results] == [[]] * world
    for rank in range(world):
        for group in snapshot(trial, rank).groups.values():
            assert group.enqueued == group.completed
    return trial


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_ask_for_work_left_now_and_then(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int
) -> None:
    trial = served(ranks, trials, reference, world, {"sync_every": 8})
    steps = {result.steps for result in trial.results}
    assert len(steps) == 1 and steps.pop() % 8 == 0, "they end at the same question"
    sync = snapshot(trial, 0).groups["sync"]
    assert sync.enqueued == trial.results[0].steps // 8
    assert {(record.operation, record.shape) for record in sync.recent} == {("all_reduce", (1,))}


def test_the_guard_of_the_agreement_may_be_off(ranks: LocalRanks, trials: Trials, reference: Trial) -> None:
    served(ranks, trials, reference, 2, {"check_steps": False, "sync_every": 4})


def test_the_ranks_may_meet_at_the_end(ranks: LocalRanks, trials: Trials, reference: Trial) -> None:
    trial = served(ranks, trials, reference, 2, {"exit_barrier": True})
    for rank in range(2):
        world = snapshot(trial, rank).groups["world"]
        assert [record.operation for record in world.recent] == ["barrier"]


@pytest.mark.parametrize(
    ("engine", "group", "steps"),
    [({"sync_every": 8}, "sync", {8}), ({"exit_barrier": True}, "world", None)],
)
def test_a_communicator_is_made_when_it_is_first_used(
    ranks: LocalRanks,
    trials: Trials,
    reference: Trial,
    engine: dict[str, Any],
    group: str,
    steps: set[int] | None,
    tmp_path: Path,
) -> None:
    """A fault that hardly delays tells the step in which it acted; at the end is the last one."""
    watch = {"name": "delay", "site": "comm.create", "where": {"group": group}, "seconds": 0.001, "times": 0}
    logs = {rank: str(tmp_path / f"rank{rank}.jsonl") for rank in range(2)}
    trial = ranks.trial(
        2,
        trials.of(2).spec(
            engine=engine, toggles={"pinned": "pinned"}, faults=(watch,), fault_files=(), fault_logs=logs
        ),
    )
    assert trial.tokens == reference.tokens
    passed = {
        json.loads(line)["step"] for path in logs.values() for line in Path(path).read_text().splitlines()
    }
    assert passed == (steps or {result.steps for result in trial.results})


def test_what_is_off_has_no_group(ranks: LocalRanks, trials: Trials, reference: Trial) -> None:
    trial = served(ranks, trials, reference, 2, {})
    assert set(snapshot(trial, 0).groups) == {"agree", "experts"}


def test_an_attention_group_agrees_on_its_cached_pages_in_every_second_prefill(
    ranks: LocalRanks, trials: Trials, reference: Trial
) -> None:
    trial = served(ranks, trials, reference, 2, {"cache_sync_every": 2})
    for rank in range(2):
        prefills = [step for step in decisions(trial, rank) if step["mode"] == "prefill"]
        assert ["written_back" in step for step in prefills] == [n % 2 == 1 for n in range(len(prefills))]
        pages = [step["written_back"] for step in prefills if "written_back" in step]
        assert pages == sorted(pages) and pages[-1] >= MIX["root_tokens"]
        host = snapshot(trial, rank).groups["attention_host"]
        assert (host.ranks, host.enqueued) == ((rank,), len(pages))


@pytest.mark.parametrize(("world", "graph"), [(1, "on"), (2, "on"), (2, "off"), (4, "on")])
def test_the_ranks_add_up_what_each_expert_got(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int, graph: str
) -> None:
    """Each computed token goes to so many experts in each layer that has any, padding to none."""
    trial = served(ranks, trials, reference, world, {"expert_stats": True}, graph=graph)
    steps = [step for step in decisions(trial) if any(step["tokens"])]
    assert any(step["graph"] for step in steps) == (graph == "on")
    layers = sum(TINY.is_moe(layer) for layer in range(TINY.num_hidden_layers))
    expected = sum(sum(step["tokens"]) for step in steps) * TINY.num_experts_per_tok * layers
    assert [result.counters["routed_tokens"] for result in trial.results] == [expected] * world
    stats = snapshot(trial, 0).groups["stats"]
    assert stats.enqueued == len(steps)
    assert {(r.operation, r.shape) for r in stats.recent} == {("all_reduce", (TINY.n_routed_experts,))}


@pytest.mark.parametrize("graph", ["on", "off"])
def test_the_experts_communicator_may_carry_the_sum_of_their_load(
    ranks: LocalRanks, trials: Trials, reference: Trial, graph: str
) -> None:
    engine = {"expert_stats": True, "stats_group": "experts"}
    trial = served(ranks, trials, reference, 2, engine, graph=graph)
    own = served(ranks, trials, reference, 2, {"expert_stats": True}, graph=graph)
    assert trial.results[0].counters["routed_tokens"] == own.results[0].counters["routed_tokens"] > 0
    assert "stats" not in snapshot(trial, 0).groups


@pytest.mark.parametrize(
    ("world", "padding", "toggles"),
    [
        (1, "auto", {}),
        (2, "auto", {}),
        (2, "auto", {"graph": "off"}),
        (2, "max_len", {"graph": "off"}),
        (2, "sum_len", {"graph": "off", "overlap": "off"}),
        (2, "auto", {"symm_mem": "on"}),
        (4, "auto", {}),
    ],
)
def test_the_output_projection_may_be_spread_over_the_ranks(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int, padding: str, toggles: dict[str, str]
) -> None:
    """Each rank has a share of every value, and an idle one takes part: all enter the same collectives."""
    engine = {"output_parallel": True, "padding": padding}
    trial = served(ranks, trials, reference, world, engine, **toggles)
    steps = [step for step in decisions(trial) if any(step["tokens"])]
    assert world == 1 or any(0 in step["tokens"] for step in steps), "a rank is idle in some step"
    for rank in range(world):
        output = snapshot(trial, rank).groups["output"]
        assert output.enqueued == 2 * TINY.num_hidden_layers * len(steps)


def test_retraction_with_a_spread_output_projection(
    ranks: LocalRanks, trials: Trials, reference: Trial
) -> None:
    engine = {"output_parallel": True, "kv_tokens": 120, "retract_every": 3}
    trial = served(ranks, trials, reference, 2, engine)
    assert trial.count("retractions") >= 3


@pytest.mark.parametrize("pinned", ["pageable", "pinned"])
def test_copies_may_be_watched_and_bring_what_they_should(
    ranks: LocalRanks, trials: Trials, reference: Trial, pinned: str
) -> None:
    trial = served(ranks, trials, reference, 2, {"check_copies": True}, pinned=pinned)
    assert not any("copies" in step for rank in range(2) for step in decisions(trial, rank))
    labels = {record.label for record in snapshot(trial, 0).streams["compute"].recent}
    assert {"copy_witness next_token_copy", "copy_witness metadata_copy"} <= labels


@pytest.mark.parametrize("graph", ["on", "off"])
def test_steps_may_be_sampled_ahead_into_one_buffer_behind_a_fence(
    ranks: LocalRanks, trials: Trials, reference: Trial, graph: str
) -> None:
    trial = served(ranks, trials, reference, 2, {"sample_ahead": True}, graph=graph)
    compute = [record.label for record in snapshot(trial, 0).streams["compute"].recent]
    samples = [number for number, label in enumerate(compute) if label == "sample" and number]
    assert samples and all(compute[number - 1] == "event.wait next_token_copy.done" for number in samples)


@pytest.mark.parametrize("graph", ["on", "off"])
def test_room_in_the_symmetric_heap_is_made_before_a_launch_that_needs_more(
    ranks: LocalRanks, trials: Trials, reference: Trial, graph: str
) -> None:
    engine = {"symm_growth_bytes": 256, "chunk_tokens": 32}
    trial = served(ranks, trials, reference, 2, engine, graph=graph, symm_mem="on")
    row_bytes = TINY.hidden_size * 4
    largest = max(sum(step["tokens"]) for step in decisions(trial)) * row_bytes
    for rank in range(2):
        found = snapshot(trial, rank).groups["symm"]
        sizes = [record.shape[0] // 2 for record in found.recent]
        assert found.enqueued == len(sizes) > 0 and sizes == sorted(set(sizes)), "it only grows"
        assert sizes[-1] >= largest and all(size % 256 == 0 for size in sizes)
        reserved = [
            r for r in snapshot(trial, rank).streams["compute"].recent if r.label == "reserve experts"
        ]
        assert len(reserved) <= len(sizes)
