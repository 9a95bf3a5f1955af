"""Attention groups of several ranks: heads shared, the same batch on each, and the same tokens as on one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from local_ranks import Trial, Trials

from harness.ledger import LedgerReader
from harness.ledger_snapshot import GroupState
from serving.deepseek_v2 import DeepseekV2
from serving.groups import Topology
from serving.model_config import PRESETS, TINY, ModelError
from serving.weights import head_range, random_weights

if TYPE_CHECKING:
    from local_ranks import LocalRanks

MIX = {
    "kind": "prefix_tree",
    "requests": 10,
    "root_tokens": 12,
    "child_tokens": (0, 24),
    "decode_tokens": (4, 14),
    "grammar_share": 0.4,
}
MOE_LAYERS = sum(TINY.is_moe(layer) for layer in range(TINY.num_hidden_layers))


def toggles(**values: str) -> dict[str, Any]:
    return {"toggles": values}


def decisions(trial: Trial, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.spec.decisions_paths[rank]).read_text().splitlines()]


def groups(trial: Trial, rank: int) -> dict[str, GroupState]:
    reader = LedgerReader.open(Path(trial.spec.ledger_paths[rank]))
    try:
        return dict(reader.snapshot().groups)
    finally:
        reader.close()


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("attention"), MIX)


@pytest.fixture(scope="module")
def reference(ranks: LocalRanks, trials: Trials) -> Trial:
    return ranks.trial(1, trials.of(1).spec(toggles={"overlap": "off", "graph": "off"}))


SAME: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 ranks, 1 group": (2, 1, toggles(pinned="pinned")),
    "4 ranks, 2 groups": (4, 2, toggles(pinned="pinned")),
    "4 ranks, 1 group": (4, 1, {}),
    "eager": (4, 2, toggles(graph="off", pinned="pinned")),
    "eager, max_len": (4, 2, toggles(graph="off") | {"engine": {"padding": "max_len"}}),
    "no overlap": (2, 1, toggles(overlap="off", pinned="pinned")),
    "no overlap, no graph": (4, 2, toggles(overlap="off", graph="off")),
    "no prefix cache": (2, 1, toggles(prefix_cache="off", pinned="pinned")),
    "pages of 4 tokens": (4, 2, toggles(pinned="pinned") | {"engine": {"page_size": 4}}),
    "symmetric memory": (4, 2, toggles(symm_mem="on", pinned="pinned")),
    "retraction": (4, 2, toggles(pinned="pinned") | {"engine": {"kv_tokens": 120, "retract_every": 3}}),
    "retraction, eager": (2, 1, toggles(graph="off") | {"engine": {"kv_tokens": 120, "retract_every": 3}}),
    "statistics, cached pages": (4, 2, toggles(pinned="pinned") | {
        "engine": {"expert_stats": True, "cache_sync_every": 2, "exit_barrier": True, "sync_every": 4}}),
}  # fmt: skip


@pytest.mark.parametrize(("world", "dp", "tables"), SAME.values(), ids=SAME)
def test_tokens_do_not_depend_on_the_attention_groups(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int, dp: int, tables: dict[str, Any]
) -> None:
    trial = ranks.trial(world, trials.of(world).spec(**tables), dp=dp)
    assert trial.tokens == reference.tokens
    assert trial.finish == reference.finish
    assert [list(result.leaks) for result in trial.results] == [[]] * world
    assert trial.count("tokens_out") == sum(map(len, trial.tokens.values()))
    if "retract_every" in tables.get("engine", {}):
        assert trial.count("retractions") >= 3

    wanted, engine = tables.get("toggles", {}), tables.get("engine", {})
    told = {rank: decisions(trial, rank) for rank in range(world)}
    assert any(step["graph"] for step in told[0]) == (wanted.get("graph") != "off")
    for rank, records in told.items():
        place = Topology(rank, world, dp)
        assert {step["dp"] for step in records} == {place.dp_rank}
        for step in records:
            assert len(step["tokens"]) == len(step["modes"]) == dp
            assert step["own_tokens"] == step["tokens"][place.dp_rank]
            assert step["mode"] == step["modes"][place.dp_rank]
            if any(step["tokens"]) and not step["graph"]:
                asked = engine.get("padding") == "max_len" and "prefill" not in step["modes"]
                assert step["padding"] == ("max_len" if asked else "sum_len")
        # The ranks of a group decide alike, all of it.
        assert records == told[rank - place.member]
        result = trial.results[rank]
        assert bool(result.tokens) == (place.member == 0), "one rank of a group brings the tokens home"
        assert Path(trial.spec.journal_paths[rank]).exists() == (place.member == 0)


def test_each_layer_adds_up_the_heads_of_the_group_and_brings_its_rows_once(
    ranks: LocalRanks, trials: Trials
) -> None:
    """Collectives of each rank, eager, by the steps in which its group had tokens."""
    trial = ranks.trial(4, trials.of(4).spec(toggles={"graph": "off"}), dp=2)
    layers = TINY.num_hidden_layers
    for rank in range(4):
        found, place = groups(trial, rank), Topology(rank, 4, 2)
        steps = decisions(trial, rank)
        busy = sum(any(step["tokens"]) for step in steps)
        own = sum(step["own_tokens"] > 0 for step in steps)
        assert found["attention"].ranks == place.members("attention")
        assert (found["attention"].enqueued, found["attention"].completed) == (layers * own, layers * own)
        assert {(r.operation, r.shape[1]) for r in found["attention"].recent} == {
            ("all_reduce", TINY.hidden_size)
        }
        assert found["experts"].enqueued == 2 * MOE_LAYERS * busy
        assert {record.operation for record in found["experts"].recent} == {"all_reduce"}


def test_a_captured_graph_has_the_collectives_of_the_attention_group(
    ranks: LocalRanks, trials: Trials
) -> None:
    trial = ranks.trial(2, trials.spec(toggles={"pinned": "pinned"}), dp=1)
    for rank in range(2):
        recent = groups(trial, rank)["attention"].recent
        replays = [record for record in recent if record.operation.startswith("graph decode")]
        assert replays and {record.shape for record in replays} == {(TINY.num_hidden_layers,)}


def test_records_of_ranks_that_are_their_own_group_name_none(ranks: LocalRanks, trials: Trials) -> None:
    trial = ranks.trial(2, trials.spec())
    for step in decisions(trial, 0):
        assert step.keys().isdisjoint({"dp", "own_tokens", "requests", "aborted"})


@pytest.mark.parametrize("low_rank", [None, 24])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_all_heads_add_up_to_the_whole_attention(size: int, low_rank: int | None) -> None:
    config = replace(TINY, q_lora_rank=low_rank)
    weights = random_weights(config, 0)
    whole = DeepseekV2(config, weights, range(config.n_routed_experts))
    x_TD = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    positions_T, table_BM = torch.arange(5), torch.arange(8).unsqueeze(0)

    def attended(model: DeepseekV2) -> tuple[torch.Tensor, torch.Tensor]:
        query_THE, latent_TC = model.project(0, x_TD, positions_T)
        pool_SC = torch.zeros(8, latent_TC.shape[1])
        pool_SC[:5] = latent_TC
        return model.attend(query_THE, pool_SC, table_BM, (5,), (5,)), latent_TC

    latent_THR, latents = attended(whole)
    expected = whole.output(0, latent_THR, x_TD)
    total = x_TD.clone()
    for member in range(size):
        heads = head_range(config, member, size)
        part = DeepseekV2(config, weights, range(0), heads)
        part_THR, part_latents = attended(part)
        assert part_THR.shape[1] == config.num_attention_heads // size
        assert torch.equal(part_latents, latents), "the cache is the same on all ranks"
        total += part.output_part(0, part_THR)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ModelError, match="num_attention_heads 4 cannot be shared by 3 ranks"):
        head_range(PRESETS["tiny"], 0, 3)
