"""Scenario files: what is accepted, how mistakes are told, and which trials a scenario becomes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from harness import faults, scenario_model
from harness.arms import TrialPlan, matching
from harness.scenario import (
    Scenario,
    ScenarioError,
    expand,
    find_scenario,
    from_record,
    list_scenarios,
    load,
    plan_arms,
    record,
    scenario_files,
    validate,
)
from harness.store import safe_name
from harness.toggles import DEVICES, Facts
from serving import model_config, workload

SMALL: Mapping[str, Any] = {
    "name": "small",
    "summary": "a small one",
    "workload": {"kind": "alternating"},
    "engine": {"max_running": 16},
}
PINNED = ["pageable", "pinned", "pinned_sync", "pinned_snapshot"]


def facts(device: str = "sim", world: int = 2) -> Facts:
    return Facts(device, world, "2.13.0", device_count=world)


def small(**tables: Any) -> Scenario:
    return validate({**SMALL, **tables}, "small.toml")


def problem(document: Mapping[str, Any], *settings: str, device: str = "sim") -> str:
    """The one problem of a scenario, as its user reads it."""
    with pytest.raises(ScenarioError) as caught:
        validate(document, "small.toml", settings, device)
    (only,) = caught.value.problems
    return str(only)


def trials(scenario: Scenario, device: str = "sim", **options: Any) -> tuple[TrialPlan, ...]:
    return expand(scenario, device, facts=facts(device, scenario.target.ranks), **options)


# --- the files that come with hangrig ---


def test_the_catalogue_is_complete() -> None:
    names = {scenario.name for scenario in list_scenarios()}
    assert names == set(scenario_files())
    assert {
        "dp-retract", "dp-pinned-hang", "dp-pinned-latency", "dp-pinned-corruption", "dp-idle-burst",
    } <= names  # fmt: skip
    readme = (scenario_files()["dp-retract"].parent / "README.md").read_text()
    for scenario in list_scenarios():
        line = next(line for line in readme.splitlines() if line.startswith(f"| [{scenario.name}]"))
        assert scenario.reports or scenario.name == "vllm-tp-cpu"  # the healthy counterpart of sglang-dp-cpu
        assert all(report.rpartition("/")[2] in line for report in scenario.reports[:1])


def expected(name: str, device: str) -> dict[str, tuple[str, str]]:
    plans = plan_arms(load(find_scenario(name)), device, facts(device))
    return {plan.arm_string: (plan.expectation.hang, plan.expectation.tokens) for plan in plans}


def test_the_hang_is_expected_where_the_barrier_is_lost() -> None:
    scenario = load(find_scenario("dp-pinned-hang"))
    assert [(d.name, d.ranks) for d in scenario.sim.defects] == [("D1", (1,))]
    for plan in plan_arms(scenario, "sim", facts()):
        lost = plan.arm["pinned"] in ("pinned", "pinned_snapshot")
        expectation = plan.expectation
        assert expectation.hang == ("sometimes" if lost else "never")
        assert (expectation.min_rate, expectation.mechanism) == (
            (0.5, "stream-order") if lost else (None, None)
        )
        assert expectation.tokens == ("any" if lost else "equal")
        assert plan.defects == (("D1", (1,)),)
        assert plan.resolutions["graph"].resolved == plan.resolutions["overlap"].resolved == "on"
    assert len(plan_arms(scenario, "sim", facts())) == 8


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_hardware_is_observed_where_it_pins(device: str) -> None:
    for name in ("dp-pinned-hang", "dp-pinned-latency", "dp-pinned-corruption"):
        for arm, (hang, tokens) in expected(name, device).items():
            assert (hang, tokens) == (("never", "equal") if "pinned=pageable" in arm else ("any", "any"))
    for name in ("dp-retract", "dp-idle-burst"):
        assert set(expected(name, device).values()) == {("never", "equal")}
    plans = plan_arms(load(find_scenario("dp-pinned-hang")), device, facts(device))
    assert all(plan.defects == () for plan in plans)


def test_corruption_tells_the_defects_apart() -> None:
    snapshot = {"D2": "equal", "D3": "differ", "D4": "any"}
    found = expected("dp-pinned-corruption", "sim")
    assert len(found) == 12
    for defect, tokens in snapshot.items():
        arms = {value: found[f"defect={defect},pinned={value}"] for value in PINNED}
        assert arms == {
            "pageable": ("any", "equal"),
            "pinned": ("any", "differ"),
            "pinned_sync": ("any", "equal"),
            "pinned_snapshot": ("any", tokens),
        }


def test_the_control_has_pressure() -> None:
    scenario = load(find_scenario("dp-retract"), ["workload.requests=401"])
    assert scenario.workload.kind == "prefix_tree"
    assert (scenario.workload.requests, scenario.workload.root_tokens) == (401, 117)
    assert (scenario.engine.kv_tokens, scenario.engine.chunk_tokens) == (4500, 256)
    assert (scenario.engine.max_running, scenario.engine.retract_every) == (128, 3)
    assert scenario.require.retractions > 0
    assert load(find_scenario("dp-retract")).workload.requests == 64  # type: ignore[union-attr]


# --- the model agrees with what it mirrors ---


def test_workload_tables_have_the_parameters_of_the_engine() -> None:
    for model in (scenario_model.PrefixTree, scenario_model.Bursts, scenario_model.Alternating):
        (kind,) = get_args(model.model_fields["kind"].annotation)
        real = workload.KINDS[kind]
        assert set(model.model_fields) - {"kind"} == {field.name for field in dataclasses.fields(real)}
        defaults = model(kind=kind).model_dump(exclude={"kind"})
        assert workload.workload({"kind": kind, **defaults}) == real()


def test_presets_and_sites_are_those_of_the_engine() -> None:
    preset = scenario_model.Model.model_fields["preset"].annotation
    names = {name for argument in get_args(preset) for name in get_args(argument)}
    assert names == set(model_config.PRESETS)
    assert set(get_args(scenario_model.Site)) <= set(faults.SITES)


# --- mistakes ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["workload.request=3"], "--set workload.request=3: unknown key; did you mean workload.requests?"),
        (["engine.kv_token=3"], "unknown key; did you mean engine.kv_tokens? allowed: kv_tokens, page_size,"),
        (["watchdog.nonsense=3"], "watchdog.nonsense=3: unknown key; allowed: sample_period_s"),
        (["requests=3"], "--set requests=3: unknown key; did you mean workload.requests?"),
        (["engine.padding=sumlen"], "--set engine.padding=sumlen: is not allowed; did you mean sum_len?"),
        (["workload.kind=alternate"], "did you mean alternating? allowed: prefix_tree, bursts, alternating"),
        (["toggles.pinned=pined"], "did you mean pinned? allowed: pageable, pinned, pinned_sync"),
        (["toggles.pinned=yes"], "allowed: pageable, pinned, pinned_sync, pinned_snapshot"),
        (["engine.kv_tokens=0"], "engine.kv_tokens=0: should be greater than or equal to 1"),
        (["engine.kv_tokens.x=1"], "engine.kv_tokens is no table"),
        (["nonsense"], "--set nonsense: is no KEY=VALUE; write a dotted key"),
        (["workload.decode_tokens=[5, 2]"], "[5, 2] is no range"),
        (["workload.prompt_tokens=[0, 2]"], "begins below 1"),
        (["engine.graph_buckets=[16, 4]"], "must ascend"),
        (["jitter.sites=['copy.h2x']"], "did you mean copy.h2d?"),
        (["unheard.of=1"], '--set unheard={"of": 1}: unknown key; allowed: name, summary'),
    ],
)
def test_mistakes_in_one_key(settings: list[str], message: str) -> None:
    document = {**SMALL, "engine": {"max_running": 16, "kv_tokens": 4500}}
    assert message in problem(document, *settings)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"workload": {}}, "small.toml: workload.kind: is missing; allowed: prefix_tree"),
        ({"engine": {"kv_tokens": 100}}, "engine.chunk_tokens=256: does not fit into engine.kv_tokens = 100"),
        ({"engine": {"kv_tokens": 1000, "page_size": 16}}, "engine.kv_tokens=1000: is no multiple"),
        ({"engine": {"max_running": 1, "retract_every": 3}}, "can retract nothing"),
        ({"engine": {"step_timeout_s": 50}}, "engine.step_timeout_s=50.0: ends a wait before the watchdog"),
        ({"watchdog": {"floor_s": 40}}, "lies above watchdog.ceiling_s"),
        ({"toggles": {"graph": "on"}, "engine": {"max_running": 64}}, "has no bucket for"),
        (
            {"target": {"dp": 1}, "engine": {"output_parallel": True}},
            "engine.output_parallel=true: needs every rank to be its own attention group, and target.dp is 1 of 2",
        ),
        (
            {"toggles": {"graph": "on"}, "engine": {"max_running": 16, "padding": "sum_len"}},
            "needs eager steps, and graph is on",
        ),
        ({"sim": {"defects": [{"name": "D1"}]}}, "no arm has graph on"),
        ({"arms": {"defect": ["none", "D1"]}}, "arms.defect=D1: can do nothing"),
        ({"toggles": {"defect": "D1"}}, "toggles.defect=D1: can do nothing"),
        ({"sim": {"defects": [{"name": "D2", "ranks": [2]}]}}, "names ranks [2], and target.ranks is 2"),
        ({"expect": [{"hang": "always", "culprits": [1, 9]}]}, "names ranks [9], and target.ranks is 2"),
        ({"faults": [{"name": "my_own"}]}, "one of your own: --faults FILE"),
        ({"sim": {"defect_ranks": [1]}}, "applies to no arm"),
        (
            {"sim": {"defects": [{"name": "D2"}]}, "arms": {"defect": ["none", "D2"]}},
            "is there twice",
        ),
        ({"target": {"ranks": 1}, "arms": {"symm_mem": ["off", "on"]}}, "needs peers"),
        (
            {"toggles": {"pinned": "pinned"}, "arms": {"pinned": PINNED}},
            "is fixed here and varied in arms.pinned",
        ),
        ({"arms": {"pinned": ["pinned", "pinned"]}}, "names a value twice"),
        (
            {"arms": {"pinned": PINNED, "exclude": [{"graph": "on"}]}},
            "names graph, which [arms] does not vary",
        ),
        ({"arms": {"graph": ["off"], "exclude": [{"graph": "off"}]}}, "leaves no arm"),
        ({"expect": [{"hang": "sometimes"}]}, "expect.0.min_rate: is missing"),
        ({"expect": [{"hang": "never", "min_rate": 0.5}]}, "means nothing while hang is never"),
        ({"expect": [{"hang": "never", "mechanism": "stream-order"}]}, "must never be"),
        ({"expect": [{"arm": {"pinned": "pinned"}}]}, "pinned=pinned: matches no arm"),
        ({"expect": [{"hang": "never"}, {"hang": "any", "device": "npu"}]}, "is as specific as expect.0"),
        ({"jitter": {"low_us": 10, "high_us": 2}}, "swap them"),
        ({"model": {"preset": "tiny", "directory": "m"}}, "keep one of them"),
    ],
)
def test_combinations_that_cannot_work(tables: Mapping[str, Any], message: str) -> None:
    told = problem({**SMALL, **tables})
    assert message in told
    assert told.startswith("small.toml: ")
    assert "; " in told  # what to do


def test_a_model_directory_is_kept_as_a_whole_path() -> None:
    """A rerun may start elsewhere."""
    scenario = validate({**SMALL, "model": {"directory": "models/mine"}}, "small.toml")
    assert scenario.model.directory == str(Path("models/mine").absolute())


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ScenarioError) as caught:
        validate({"name": "x", "workload": {"kind": "bursts", "gap": 3}}, "x.toml", ["engine.kv_token=5"])
    keys = [(found.where, found.key) for found in caught.value.problems]
    assert keys == [("x.toml", "summary"), ("--set", "engine.kv_token"), ("x.toml", "workload.gap")]


def test_simulation_settings_are_refused_on_a_device() -> None:
    told = problem(SMALL, "sim.memory_model=cuda", device="npu")
    assert told.startswith("--set sim.memory_model=cuda") and "the device is npu" in told
    assert validate(SMALL, "x", ["sim.memory_model=cuda"]).sim.memory_model == "cuda"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"name = ", "is no TOML"), (b"\xff", "is no UTF-8"), (None, "cannot be read")],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ScenarioError, match=message):
        load(path)


def test_scenarios_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nsummary = "s"\n[workload]\nkind = "bursts"\n')
    assert find_scenario(str(path)) == path
    assert load(path).name == "mine"
    assert find_scenario("dp-retract").name == "dp-retract.toml"
    with pytest.raises(ScenarioError, match="did you mean dp-retract"):
        find_scenario("dp-retrakt")
    with pytest.raises(ScenarioError, match="is no file"):
        find_scenario(str(tmp_path / "none.toml"))


# --- settings ---


def test_settings_are_toml_or_bare_strings() -> None:
    scenario = validate(
        SMALL,
        "x",
        ["arms.pinned=pinned", 'toggles.graph="on"', "workload.prompt_tokens = [1, 2]", "trials.count=9"],
    )
    assert scenario.arms.pinned == ("pinned",)
    assert scenario.toggles.graph == "on"
    assert scenario.workload.prompt_tokens == (1, 2)  # type: ignore[union-attr]
    assert scenario.trials.count == 9


def test_settings_may_narrow_the_arms_of_a_scenario() -> None:
    scenario = load(find_scenario("dp-pinned-hang"), ["arms.pinned=pinned", "arms.symm_mem=off"])
    assert [plan.arm_string for plan in plan_arms(scenario, "sim", facts())] == ["pinned=pinned,symm_mem=off"]


def test_settings_reach_into_lists() -> None:
    scenario = load(find_scenario("dp-pinned-hang"), ["sim.defects.0.ranks=[0]"])
    assert scenario.sim.defects[0].ranks == (0,)


# --- arms and trials ---


def test_trials_are_interleaved_and_share_their_seeds() -> None:
    scenario = small(arms={"pinned": PINNED[:2]})
    plans = trials(scenario, trials=2, seed=5)
    assert [(plan.arm["pinned"], plan.seed) for plan in plans] == [
        ("pageable", 5), ("pinned", 5), ("pageable", 6), ("pinned", 6),
    ]  # fmt: skip
    blocks = trials(small(arms={"pinned": PINNED[:2]}, trials={"interleaved": False}), trials=2)
    assert [(plan.arm["pinned"], plan.seed) for plan in blocks] == [
        ("pageable", 0), ("pageable", 1), ("pinned", 0), ("pinned", 1),
    ]  # fmt: skip


def test_trial_ids_are_unique_file_names() -> None:
    for scenario in list_scenarios():
        ids = [plan.id for plan in trials(scenario)]
        assert len(set(ids)) == len(ids) == scenario.trials.count * len(plan_arms(scenario, "sim", facts()))
        assert all(safe_name(name) == name for name in ids)
    assert trials(small(arms={"symm_mem": "on", "pinned": "pinned"}))[0].id == (
        "small.pinned=pinned,symm_mem=on.seed-0"
    )


def test_arms_that_are_the_same_run_once() -> None:
    scenario = small(arms={"pinned": PINNED[:2], "symm_mem": ["off", "on"]})
    plans = plan_arms(scenario, "npu", facts("npu"))
    assert [plan.same_as for plan in plans] == [
        None, "pinned=pageable,symm_mem=off", None, "pinned=pinned,symm_mem=off",
    ]  # fmt: skip
    assert len(trials(scenario, "npu", trials=3)) == 6
    assert len(trials(scenario, "sim", trials=3)) == 12


def test_excluded_combinations_are_left_out() -> None:
    scenario = small(
        arms={"pinned": PINNED[:2], "graph": ["off", "on"], "exclude": [{"pinned": "pinned", "graph": "off"}]}
    )
    assert [plan.arm_string for plan in plan_arms(scenario, "sim", facts())] == [
        "graph=off,pinned=pageable", "graph=on,pinned=pageable", "graph=on,pinned=pinned",
    ]  # fmt: skip


def test_the_most_specific_expectation_wins() -> None:
    scenario = small(
        toggles={"graph": "on"},
        arms={"pinned": PINNED[:2]},
        expect=[
            {"hang": "never"},
            {"arm": {"pinned": "pinned"}, "hang": "any"},
            {"arm": {"pinned": "pinned", "graph": "on"}, "hang": "always", "device": "sim"},
        ],
    )
    found = {
        (device, plan.arm["pinned"]): plan.expectation.hang
        for device in DEVICES
        for plan in plan_arms(scenario, device, facts(device))
    }
    assert found == {
        ("sim", "pageable"): "never", ("sim", "pinned"): "always",
        ("cpu", "pageable"): "never", ("cpu", "pinned"): "any",
        ("cuda", "pageable"): "never", ("cuda", "pinned"): "any",
        ("npu", "pageable"): "never", ("npu", "pinned"): "any",
    }  # fmt: skip
    assert len(matching(scenario, "sim", {"pinned": "pinned"})) == 3


def test_an_arm_of_which_nothing_is_said_must_be_healthy() -> None:
    (plan,) = plan_arms(small(), "sim", facts())
    assert (plan.arm_string, plan.expectation.hang, plan.expectation.tokens) == ("default", "never", "equal")


def test_a_defect_arm_names_its_ranks() -> None:
    scenario = small(
        arms={"defect": ["none", "D2"]},
        sim={"defect_ranks": [1], "defects": [{"name": "D3"}]},
    )
    assert [plan.defects for plan in plan_arms(scenario, "sim", facts())] == [
        (("D3", (0, 1)),),
        (("D3", (0, 1)), ("D2", (1,))),
    ]


def test_a_stored_scenario_runs_without_its_file() -> None:
    for scenario in list_scenarios():
        plans = plan_arms(scenario, "sim", facts())
        stored = json.loads(json.dumps(record(scenario, plans, "sim")))
        again = from_record(stored)
        assert again == scenario
        assert trials(again) == trials(scenario)
        assert stored["ignored"] == {}
        assert "memory_model" in record(scenario, plans, "npu")["ignored"]["sim"]
    with pytest.raises(ScenarioError, match="damaged"):
        from_record({"name": "x", "text": "{"})


def test_plans_travel_between_processes() -> None:
    (plan, *_) = trials(load(find_scenario("dp-pinned-hang")))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert json.loads(json.dumps(plan.to_json()))["arm"] == dict(plan.arm)


def test_files_say_only_what_they_mean() -> None:
    for path in scenario_files().values():
        assert tomllib.loads(path.read_text())["name"] == path.stem


def foreign(**tables: Any) -> Scenario:
    document = {
        "name": "engine", "summary": "s", "workload": {"kind": "prefix_tree"},
        "target": {"name": "sglang", "device": "cpu"},
    }  # fmt: skip
    for name, table in tables.items():
        document[name] = document.get(name, {}) | table if isinstance(table, dict) else table  # type: ignore[operator]
    return validate(document, "engine.toml")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"target": {"device": "sim"}}, "engine.toml: target.device=sim: cannot be"),
        ({"target": {"ranks": 4, "dp": 3}}, "target.dp=3: does not divide target.ranks = 4"),
        ({"target": {"ranks": 3, "nodes": 2}}, "target.nodes=2: does not divide"),
        ({"toggles": {"defect": "D2"}}, "toggles.defect: means nothing for target sglang"),
        ({"engine": {"sync_every": 8}}, "engine.sync_every=8: is the built-in engine's, and the target is sglang"),
        ({"engine": {"check_steps": False}}, "engine.check_steps=false: is the built-in engine's"),
        ({"client": {"deadline_s": 5}}, "client.deadline_s=5.0: gives a request up before the watchdog"),
        ({"faults": [{"name": "block"}], "toggles": {"probe": "off"}}, "faults.0.name=block: is made by the probe"),
        ({"faults": [{"name": "stop", "ranks": [2]}]}, "faults.0.ranks=[2]: names ranks [2]"),
        ({"faults": [{"name": "stop", "role": "server", "ranks": [0]}]}, "faults.0.ranks=[0]: names ranks, and"),
        ({"faults": [{"name": "stopp"}]}, "faults.0.name=stopp: is not allowed; did you mean stop?"),
        ({"faults": [{"ranks": [0]}]}, "faults.0.name: is missing"),
        ({"faults": [{"name": "kill", "rank": 0}]}, "faults.0.rank=0: unknown key; did you mean faults.ranks?"),
        ({"target": {"name": "builtin", "device": "cpu"}}, "target.device=cpu: cannot be"),
        ({"target": {"name": "builtin", "device": "sim"}, "faults": [{"name": "stpo"}]}, "faults.0.name=stpo: is"),
        ({"target": {"name": "builtin", "device": "sim"}, "toggles": {"probe": "on"}}, "toggles.probe: means"),
    ],
)  # fmt: skip
def test_what_cannot_be_with_a_foreign_engine_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        foreign(**tables)
    assert said in str(caught.value)


def test_the_words_of_a_foreign_engine() -> None:
    scenario = foreign(
        engine={"kv_tokens": 4500, "page_size": 128},  # the engines round down
        model={"directory": "vllm-ascend/DeepSeek-V2-Lite-W8A8"},  # a name that the engine resolves
        faults=[{"name": "skip_collective", "ranks": [1], "operation": "all_reduce"}],
    )
    assert scenario.model.directory == "vllm-ascend/DeepSeek-V2-Lite-W8A8"
    assert scenario.faults[0].name == "skip_collective"
    assert Path(foreign(model={"directory": "./here"}).model.directory or "").is_absolute()
