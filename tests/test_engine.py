"""The engine from end to end: whatever is switched on, and on however many ranks, the tokens are the same.

The tokens of ``transformers`` and of one rank without overlap and graphs are what all others must equal. Every
trial here checks after each step that all pages are accounted for, and at its end that nothing is left behind.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from local_ranks import Seat, Trial, Trials, run_trial

from harness import faults
from harness.devices.sim import SimDevice
from harness.target import RankResult, TrialSpec
from serving.deepseek_v2 import DeepseekV2
from serving.engine import Engine
from serving.forward import Forward, Workspace
from serving.groups import Topology
from serving.model_config import TINY, ModelConfig, YarnScaling
from serving.scheduler import Scheduler
from serving.targets import builtin_device, builtin_rank
from serving.weights import random_weights
from serving.workload import generate, workload

if TYPE_CHECKING:
    from local_ranks import LocalRanks

MIX = {
    "kind": "prefix_tree",
    "requests": 14,
    "root_tokens": 12,
    "child_tokens": (0, 24),
    "decode_tokens": (4, 14),
    "grammar_share": 0.4,
}
PLAIN: dict[str, Any] = {"toggles": {"overlap": "off", "graph": "off"}, "sim": {"memory_model": "cuda"}}


def toggles(**values: str) -> dict[str, Any]:
    return {"toggles": values}


def decisions(trial: Trial, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.spec.decisions_paths[rank]).read_text().splitlines()]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("trials"), MIX)


@pytest.fixture(scope="module")
def reference(ranks: LocalRanks, trials: Trials) -> Trial:
    """One rank, no overlap, no graph, pageable copies."""
    trial = ranks.trial(1, trials.of(1).spec(**PLAIN))
    assert len(trial.tokens) == MIX["requests"]
    assert len({reason.split(":")[0] for reason in trial.finish.values()}) > 1, "length and grammar"
    return trial


def check(trial: Trial, reference: Trial) -> None:
    assert trial.tokens == reference.tokens
    assert trial.finish == reference.finish
    assert [list(result.leaks) for result in trial.results] == [[]] * len(trial.outcomes)
    assert trial.count("tokens_out") == sum(map(len, trial.tokens.values())), "dropped tokens do not count"
    told = [step["finished"] for rank in range(len(trial.outcomes)) for step in decisions(trial, rank)]
    assert sorted(name for names in told for name in names) == sorted(trial.tokens)


# Against transformers ------------------------------------------------------------------------------------------


def in_transformers(config: ModelConfig, directory: Path) -> Any:
    """Their model with our weights of seed 0."""
    from safetensors.torch import save_file
    from transformers import DeepseekV2ForCausalLM

    save_file(random_weights(config, 0), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    return DeepseekV2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def check_against(theirs: Any, trial: Trial) -> None:
    arrivals = generate(workload(MIX), seed=1, vocab_size=TINY.vocab_size)
    free = [arrival.request for arrival in arrivals if arrival.request.grammar is None]
    assert len(free) >= 6
    for request in free:
        made = trial.tokens[request.id]
        with torch.no_grad():  # greedy, so each token follows from those before: one pass shows all
            logits_TV = theirs(torch.tensor([[*request.prompt, *made]]), use_cache=False).logits[0]
        assert made == logits_TV[len(request.prompt) - 1 : -1].argmax(-1).tolist()
        assert len(made) == request.max_new_tokens


def test_tokens_equal_those_of_transformers(tmp_path: Path, reference: Trial) -> None:
    check_against(in_transformers(TINY, tmp_path), reference)


def with_model(seat: Seat, spec: TrialSpec, directory: str) -> RankResult:
    """The trial on a model of a directory, in place of the one that is kept warm."""
    model = builtin_rank.load_model({"directory": directory}, Topology(seat.rank, seat.world, seat.place.dp))
    with patch.object(seat.actor, "_model", model):
        return run_trial(seat, spec)


@pytest.mark.parametrize("world", [1, 2])
def test_a_directory_with_yarn_and_grouped_routing_gives_the_tokens_of_transformers(
    ranks: LocalRanks, trials: Trials, tmp_path: Path, world: int
) -> None:
    config = replace(
        TINY,
        rope_scaling=YarnScaling(8.0, 32, mscale=0.707, mscale_all_dim=1.0),
        topk_method="group_limited_greedy", n_group=4, topk_group=2, num_experts_per_tok=3,
        routed_scaling_factor=2.5, n_shared_experts=2, q_lora_rank=24,
    )  # fmt: skip
    theirs = in_transformers(config, tmp_path)
    saved = tmp_path / "saved"
    theirs.save_pretrained(saved, max_shard_size="400KB")
    spec = trials.of(world).spec(toggles={"pinned": "pinned"})
    trial = ranks.trial(world, spec, functools.partial(with_model, directory=str(saved)))
    check_against(theirs, trial)
    assert any(step["graph"] for step in decisions(trial))


# Whatever is switched on ---------------------------------------------------------------------------------------

SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, toggles(pinned="pinned")),
    "four ranks": (4, toggles(pinned="pinned")),
    "no overlap, no graph": (2, toggles(overlap="off", graph="off")),
    "no overlap": (2, toggles(overlap="off")),
    "no graph": (2, toggles(graph="off", pinned="pinned")),
    "no prefix cache": (2, toggles(prefix_cache="off", pinned="pinned")),
    "symmetric memory": (2, toggles(symm_mem="on", pinned="pinned")),
    "symmetric memory, four ranks": (4, toggles(symm_mem="on")),
    "symmetric memory, sum_len": (2, toggles(symm_mem="on") | {"engine": {"padding": "sum_len"}}),
    "sum_len": (2, {"engine": {"padding": "sum_len"}}),
    "max_len, eager": (2, toggles(graph="off") | {"engine": {"padding": "max_len"}}),
    "pages of 4 tokens": (2, toggles(pinned="pinned") | {"engine": {"page_size": 4}}),
    "no graph is large enough": (2, {"engine": {"graph_buckets": (1,)}}),
    **{f"{model}, {pinned}": (2, toggles(pinned=pinned) | {"sim": {"memory_model": model}})
       for model in ("cuda", "cann") for pinned in ("pageable", "pinned", "pinned_sync", "pinned_snapshot")},
}  # fmt: skip


@pytest.mark.parametrize(("world", "tables"), SAME.values(), ids=SAME)
def test_tokens_do_not_depend_on(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int, tables: dict[str, Any]
) -> None:
    trial = ranks.trial(world, trials.of(world).spec(**tables))
    check(trial, reference)
    wanted = tables.get("toggles", {})
    steps = decisions(trial)
    graphs = wanted.get("graph") != "off" and tables.get("engine", {}).get("padding") != "sum_len"
    assert any(step["graph"] for step in steps) == graphs
    assert (trial.count("cached_tokens") > 0) == (wanted.get("prefix_cache") != "off")
    assert all(set(result.latency_us) >= {"next_token_copy", "token_count_copy"} for result in trial.results)


@pytest.mark.parametrize("padding", ["max_len", "sum_len"])
def test_eager_decode_steps_use_the_padding_that_was_asked_for(
    ranks: LocalRanks, trials: Trials, reference: Trial, padding: str
) -> None:
    trial = ranks.trial(2, trials.spec(engine={"padding": padding}, toggles={"graph": "off"}))
    check(trial, reference)
    for step in decisions(trial):
        if any(step["tokens"]):
            assert step["padding"] == ("sum_len" if "prefill" in step["modes"] else padding)


@pytest.mark.parametrize(
    ("world", "tables"),
    [
        (1, toggles(pinned="pinned")),
        (2, {}),
        (2, toggles(pinned="pinned")),
        (2, toggles(overlap="off", graph="off")),
        (2, toggles(pinned="pinned", prefix_cache="off")),
    ],
    ids=["one rank", "pageable", "pinned", "no overlap", "no prefix cache"],
)
def test_tokens_survive_retraction(
    ranks: LocalRanks, trials: Trials, reference: Trial, world: int, tables: dict[str, Any]
) -> None:
    """A pool in which not all fit, and a forced retraction at every third step."""
    spec = trials.of(world).spec(engine={"kv_tokens": 120, "retract_every": 3}, **tables)
    trial = ranks.trial(world, spec)
    check(trial, reference)
    assert trial.count("retractions") >= 3 and trial.count("forced_retractions") >= 1
    assert any(step["retracted"] for rank in range(world) for step in decisions(trial, rank))


def jittered(seat: Seat, spec: TrialSpec) -> tuple[RankResult, int]:
    visitors: list[Any] = []
    activate = faults.activate

    def noting(*active: Any, rank: int = 0) -> None:
        visitors.extend(active)
        activate(*active, rank=rank)

    with patch.object(faults, "activate", noting):
        result = run_trial(seat, spec)
    return result, sum(visitor.delayed for visitor in visitors)


@pytest.mark.parametrize("pinned", ["pageable", "pinned"])
def test_jitter_changes_no_token(ranks: LocalRanks, trials: Trials, reference: Trial, pinned: str) -> None:
    jitter = {"probability": 0.3, "low_us": 10.0, "high_us": 5000.0, "sites": tuple(faults.SITES)}
    spec = trials.spec(toggles={"pinned": pinned}, jitter=jitter)
    trial = ranks.stressed(2, spec, jittered)
    assert [outcome.error for outcome in trial.outcomes] == [None, None]
    tokens = {name: found for outcome in trial.outcomes for name, found in outcome.value[0].tokens.items()}
    assert tokens == reference.tokens
    assert all(outcome.value[1] > 10 for outcome in trial.outcomes)


# Ranks without work, and requests without room -----------------------------------------------------------------


def test_a_rank_that_never_gets_a_request_takes_part_in_every_step(ranks: LocalRanks, trials: Trials) -> None:
    one = {"requests": 1, "decode_tokens": (12, 12)}
    alone = ranks.trial(1, trials.of(1).spec(workload=one, **PLAIN))
    trial = ranks.trial(2, trials.spec(workload=one, toggles={"pinned": "pinned"}))
    check(trial, alone)
    busy, idle = trial.results
    assert not idle.tokens and len(busy.tokens) == 1
    assert idle.steps == busy.steps
    assert {step["mode"] for step in decisions(trial, 1)} == {"idle"}
    assert any(step["graph"] and step["tokens"] == [1, 0] for step in decisions(trial, 1))


def test_bursts_with_idle_gaps_and_one_long_prompt(ranks: LocalRanks, trials: Trials) -> None:
    table = {
        "kind": "bursts", "bursts": 2, "requests_per_burst": 3, "gap_steps": 8, "prompt_tokens": (4, 20),
        "decode_tokens": (3, 8), "long_prompt_tokens": 90, "grammar_share": 0.3,
    }  # fmt: skip
    bursts = Trials(trials.directory / "bursts", table)
    alone = ranks.trial(1, bursts.of(1).spec(**PLAIN))
    trial = ranks.trial(2, bursts.spec(toggles={"pinned": "pinned"}))
    check(trial, alone)
    assert len(alone.tokens) == 7
    for rank in range(2):
        modes = [step["mode"] for step in decisions(trial, rank)]
        assert {"prefill", "decode", "idle"} <= set(modes)
        assert "prefill" in modes[modes.index("idle") :], "the rank came back from being idle"


def integrity_checks(seat: Seat, spec: TrialSpec) -> list[bool]:
    """Whether the scheduler was idle, at each check that the engine made."""
    checks = []
    check_integrity = Scheduler.check_integrity

    def noted(scheduler: Scheduler) -> None:
        checks.append(scheduler.idle())
        check_integrity(scheduler)

    with patch.object(Scheduler, "check_integrity", noted):
        seat.actor.run_trial(spec)
    return checks


def test_pages_are_checked_when_a_rank_becomes_idle_and_at_the_end(ranks: LocalRanks, trials: Trials) -> None:
    """Not in every idle step: a peer that is busy would wait for it."""
    table = {"kind": "bursts", "bursts": 2, "requests_per_burst": 3, "prompt_tokens": (4, 20)}
    spec = Trials(trials.directory / "checks", table).spec(toggles={"pinned": "pinned"})
    checks = [outcome.value for outcome in ranks.stressed(2, spec, integrity_checks).outcomes]
    assert checks == [[True, True, True]] * 2


def test_a_prompt_that_can_never_fit_is_aborted_with_the_reason_and_the_others_go_on(
    ranks: LocalRanks, trials: Trials
) -> None:
    table = {
        "kind": "bursts", "bursts": 2, "requests_per_burst": 4, "gap_steps": 1, "prompt_tokens": (4, 20),
        "decode_tokens": (3, 8), "long_prompt_tokens": 150, "grammar_share": 0.3,
    }  # fmt: skip
    bursts = Trials(trials.directory / "never-fits", table)
    roomy = ranks.trial(1, bursts.of(1).spec(**PLAIN))
    trial = ranks.trial(2, bursts.spec(engine={"kv_tokens": 100}, toggles={"pinned": "pinned"}))
    (aborted,) = [name for name, reason in trial.finish.items() if reason.startswith("aborted")]
    assert re.fullmatch(
        rf"aborted: request {aborted} alone needs 150 tokens of KV cache \(prompt 150, output 0 of \d+\), "
        "the pool has 100; enlarge kv_tokens or shorten the request",
        trial.finish[aborted],
    )
    assert trial.tokens == roomy.tokens | {aborted: []}
    assert trial.count("aborted") == 1


def test_a_request_that_outgrows_the_pool_is_aborted_and_keeps_what_it_had(
    ranks: LocalRanks, trials: Trials
) -> None:
    long = {
        "requests": 3,
        "root_tokens": 20,
        "child_tokens": (0, 4),
        "decode_tokens": (30, 60),
        "grammar_share": 0.0,
    }
    roomy = ranks.trial(1, trials.of(1).spec(workload=long, **PLAIN))
    trial = ranks.trial(2, trials.spec(workload=long, engine={"kv_tokens": 64}, toggles={"pinned": "pinned"}))
    assert set(trial.tokens) == set(roomy.tokens)
    assert any(reason.startswith("aborted") for reason in trial.finish.values())
    for name, reason in trial.finish.items():
        made = trial.tokens[name]
        assert made == roomy.tokens[name][: len(made)]
        assert len(made) > 30 or reason == "length"


# Graphs and memory ---------------------------------------------------------------------------------------------

HOST_ARGUMENT = "attend"
"""The one operation of the model with a host argument: a capture keeps it whole, as a fused kernel."""
LONG_DECODE = {"requests": 4, "child_tokens": (1, 3), "decode_tokens": (24, 24), "grammar_share": 0.0}
PREFILLED_AT = 8
"""A step by which all prompts of ``LONG_DECODE`` are computed."""


def only_captured(seat: Seat, spec: TrialSpec) -> RankResult:
    """From ``PREFILLED_AT`` on the Python of the model and of the forward pass raises."""
    step = Engine.step
    with ExitStack() as broken:

        def broken_step(engine: Engine) -> bool:
            if engine.steps == PREFILLED_AT:
                for stream in (engine._device.compute, engine._device.comm):
                    stream.synchronize(spec.timeout_s)  # eager work before is Python and still has to end
                for owner in (DeepseekV2, Forward):
                    for name, value in list(vars(owner).items()):
                        if (
                            callable(value)
                            and not name.startswith("__")
                            and name not in (HOST_ARGUMENT, "host_args")
                        ):
                            broken.enter_context(
                                patch.object(owner, name, _raise(f"{owner.__name__}.{name}"))
                            )
                broken.enter_context(patch.object(Workspace, "make", _raise("Workspace.make")))
            return step(engine)

        broken.enter_context(patch.object(Engine, "step", functools.wraps(step)(broken_step)))
        return run_trial(seat, spec)


def _raise(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{name} was called")

    return call


def test_a_replay_runs_captured_operations_only(ranks: LocalRanks, trials: Trials) -> None:
    reference = ranks.trial(1, trials.of(1).spec(workload=LONG_DECODE, **PLAIN))
    trial = ranks.trial(2, trials.spec(workload=LONG_DECODE, toggles={"pinned": "pinned"}), only_captured)
    check(trial, reference)
    later = [step for step in decisions(trial) if step["step"] > PREFILLED_AT and any(step["tokens"])]
    assert len(later) > 10 and all(step["graph"] for step in later)


def test_an_eager_step_does_run_the_models_python(ranks: LocalRanks, trials: Trials) -> None:
    """The test above could fail."""
    spec = trials.of(1).spec(workload=LONG_DECODE, toggles={"graph": "off"})
    (outcome,) = ranks.stressed(1, spec, only_captured).outcomes
    assert outcome.error is not None and "Workspace.make was called" in outcome.error


def device_bytes_left(seat: Seat, spec: TrialSpec) -> int:
    made: list[SimDevice] = []

    def making(*args: Any) -> SimDevice:
        made.append(SimDevice(*args))
        return made[-1]

    with patch.object(builtin_device, "SimDevice", making):
        run_trial(seat, spec)
    gc.collect()
    return made[0].memory().device_bytes


def test_no_device_memory_is_left(ranks: LocalRanks, trials: Trials) -> None:
    spec = trials.spec(toggles={"pinned": "pinned", "symm_mem": "on"})
    assert [outcome.value for outcome in ranks.stressed(2, spec, device_bytes_left).outcomes] == [0, 0]


def after_a_failure(seat: Seat, spec: TrialSpec) -> tuple[str, bool, list[str]]:
    """The error, whether faults are off, and the threads of the device that live."""
    with patch.object(Engine, "run", _raise("run")):
        try:
            seat.actor.run_trial(spec)
            error = ""
        except AssertionError as raised:
            error = str(raised)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hangrig-")]
    return error, faults.ACTIVE is None, threads


def test_a_trial_that_failed_leaves_no_thread_and_no_fault(ranks: LocalRanks, trials: Trials) -> None:
    spec = trials.of(1).spec(jitter={"probability": 0.5})
    (outcome,) = ranks.stressed(1, spec, after_a_failure).outcomes
    assert outcome.value == ("run was called", True, [])
