"""``hangrig gate pinned`` on directories: stored runs and litmus results, the commands' documents and statuses."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gate_fixture import DRIVERS, NPU, TEXT, Arms, stored_litmus, stored_run
from typer.testing import CliRunner

from harness.cli import app
from harness.gate.evidence import read_evidence
from harness.gate.model import Evidence, GateError
from harness.pytest_plugin import HangOutcome
from harness.run import _engine_versions
from harness.scenario import find_scenario, load
from harness.store import load_schema

NINE = ("--bound", "0.3")  # 9 trials


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["gate", "pinned", *map(str, arguments)])


def answer(*arguments: object) -> dict[str, Any]:
    """The document of the command, which keeps its schema and its status."""
    done = call(*arguments, "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("gate"))
    assert done.exit_code == {"yes": 0, "no": 1, "not yet": 3}[document["answer"]]
    return document


def read(path: Path) -> Evidence:
    (one,) = read_evidence([path])
    return one


def test_stored_evidence_of_a_healthy_platform_opens_the_gate(tmp_path: Path) -> None:
    first = stored_run(tmp_path, Arms(6))
    second = stored_run(tmp_path, Arms(3), first_seed=6)
    found = answer(first, second, stored_litmus(tmp_path), *NINE)
    assert (found["answer"], found["missing"], found["blame"]) == ("yes", [], None)
    assert found["for"] == ("npu (Ascend910, driver 25.2.0, CANN 8.2.RC1, torch 2.7.1+cpu, torch_npu 2.7.1)")
    latency = next(need for need in found["needs"] if need["name"] == "latency")
    ratio = latency["figures"]["ratios"]["next_token_copy"]
    assert ratio["low"] < 0.7 < ratio["high"]  # what the fixture builds in
    assert latency["figures"]["run"] == str(first)  # three trials have no interval
    done = call(first, second, stored_litmus(tmp_path, "again"), *NINE)
    assert done.exit_code == 0
    assert done.stdout.startswith("YES  may pinned memory be enabled? npu (Ascend910")


def test_too_few_trials_and_no_litmus_result_are_listed_with_their_commands(tmp_path: Path) -> None:
    found = answer(stored_run(tmp_path, Arms(6)))
    assert found["answer"] == "not yet"
    commands = [lack["command"] for lack in found["missing"]]
    assert commands == [
        "hangrig litmus --device npu",
        "hangrig run dp-pinned-hang --device npu --trials 293 --seed 6",
        "hangrig run dp-pinned-hang --device npu --trials 293 --seed 6",
    ]
    text = call(tmp_path / "latest").stdout
    assert text.count(commands[1]) == 1
    assert "0 of 6 hung: a rate below 39.3 %" in text


def test_hangs_of_two_arms_are_a_no_that_blames_the_barrier(tmp_path: Path) -> None:
    hung = stored_run(tmp_path, Arms(6, 0, 6, 0, 6))
    found = answer(hung, stored_litmus(tmp_path), *NINE)
    assert (found["answer"], found["blame"], found["blame_simulation"]) == ("no", "barrier", False)
    (hangs,) = [need for need in found["needs"] if need["name"] == "hangs"]
    assert {one["signature"] for one in hangs["figures"]["hung"]} == {
        "stream-order/compute/graph.replay/serving.engine"
    }
    assert "At fault is the lost barrier" in found["sentence"]


def test_a_simulation_is_not_yet_whatever_it_shows(tmp_path: Path) -> None:
    hung = stored_run(tmp_path, Arms(6, 0, 6, 0, 6), device="sim")
    found = answer(hung, *NINE)
    assert (found["answer"], found["simulation"]) == ("not yet", True)
    assert (found["blame"], found["blame_simulation"]) == ("barrier", True)
    asked = answer(hung, "--device", "npu", *NINE)
    assert (asked["answer"], asked["simulation"], asked["blame_simulation"]) == ("not yet", False, True)
    assert [one["counts"] for one in asked["evidence"]] == [False]


# --- bad usage ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/none"], "does not exist"),
        (["/"], "is no run directory"),
        (["RUN", "--bound", "0"], "bound must lie between 0 and 1"),
        (["RUN", "--confidence", "2"], "confidence must lie between 0 and 1"),
        (["RUN", "--device", "tpu"], "allowed: sim, cpu, cuda, npu"),
        (["RUN", "--device", "cpu"], "allowed: npu, cuda, sim"),
        (["RUN", "--for", "cann=9"], "no evidence is for cann=9"),
        ([], "RUN"),
    ],
)
def test_bad_usage_is_told_and_exits_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    made = str(stored_run(tmp_path, Arms(1)))
    done = call(*[made if word == "RUN" else word for word in arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_only_pinned_has_a_gate(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["gate", "symm_mem", str(tmp_path)])
    assert done.exit_code == 2
    assert "allowed: pinned" in done.stderr


def test_different_platforms_are_refused_and_can_be_chosen_from(tmp_path: Path) -> None:
    old = stored_run(tmp_path, Arms(9))
    new = stored_run(tmp_path, Arms(9), drivers={**DRIVERS, "cann": "8.3.RC1"})
    litmus = stored_litmus(tmp_path)
    done = call(old, new, litmus, *NINE)
    assert done.exit_code == 2
    assert f"cann 8.2.RC1 ({old}) and 8.3.RC1 ({new})" in done.stderr
    assert answer(old, new, litmus, "--for", "cann=8.2.RC1", *NINE)["answer"] == "yes"
    assert answer(old, new, litmus, "--for", "CANN 8.3", *NINE)["answer"] == "not yet"


def test_a_run_counts_once_however_often_it_is_named_and_its_copy_is_refused(tmp_path: Path) -> None:
    made = stored_run(tmp_path, Arms(5))
    found = answer(made, made, tmp_path / "latest", *NINE)
    assert {one["hangs"]["n"] for one in found["arms"]} == {5}
    shutil.copytree(made, tmp_path / "copy")
    done = call(made, tmp_path / "copy")
    assert done.exit_code == 2
    assert "are copies of one run" in done.stderr


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"'])
def test_a_damaged_litmus_result_is_told(tmp_path: Path, content: str) -> None:
    folder = stored_litmus(tmp_path)
    (folder / "litmus.json").write_text(content)
    with pytest.raises(GateError, match=r"litmus\.json: .*run hangrig litmus again"):
        read(folder)


@pytest.mark.parametrize(
    "changes",
    [{"tests": None}, {"tests": [3, {}]}, {"platform": []}, {"device": 4}, {"tests": [{"observed": 3}]}],
)
def test_a_litmus_result_with_strange_fields_opens_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = stored_run(tmp_path, Arms(9))
    strange = stored_litmus(tmp_path, **changes)
    if changes == {"platform": []}:
        assert answer(made, strange, *NINE)["missing"][0]["command"] == "hangrig doctor --device npu"
    else:
        assert answer(made, strange, "--device", "npu", *NINE)["answer"] == "not yet"


# --- what is read ---


def test_a_platform_is_read_from_drivers_versions_and_the_litmus_result(tmp_path: Path) -> None:
    assert read(stored_run(tmp_path, Arms(1))).facts == {
        "device_name": "Ascend910", "driver": "25.2.0", "cann": "8.2.RC1", "torch": "2.7.1+cpu",
        "torch_npu": "2.7.1",
    }  # fmt: skip
    assert read(stored_litmus(tmp_path)).facts == NPU


def test_an_engine_with_an_environment_of_its_own_has_its_own_torch(tmp_path: Path) -> None:
    text = {**TEXT, "target": {"name": "sglang", "python": "/env/bin/python"}}
    assert "torch" not in read(stored_run(tmp_path, Arms(1), text=text)).facts
    known = read(stored_run(tmp_path, Arms(1), text=text, engine_versions={"torch": "2.8.0"}))
    assert known.facts["torch"] == "2.8.0"


def test_a_run_records_the_torch_of_that_environment() -> None:
    own = load(find_scenario("dp-retract"))
    assert _engine_versions([own]) is None
    other = own.model_copy(update={"target": own.target.model_copy(update={"python": sys.executable})})
    found = _engine_versions([other])
    assert found is not None and found["torch"] == version("torch")
    assert _engine_versions([own, other]) is None


@pytest.mark.parametrize(
    ("change", "same_pool"),
    [
        ({"summary": "another", "trials": {"count": 3}, "expect": []}, True),
        ({"model": {"preset": "tiny"}}, False),
        ({"engine": {"retract_every": 0}}, False),
        ({"sim": {"memory_model": "cuda"}}, True),  # ignored on a real device
    ],
)
def test_trials_of_another_model_or_engine_are_another_pool(
    tmp_path: Path, change: dict[str, Any], same_pool: bool
) -> None:
    first = read(stored_run(tmp_path, Arms(1))).trials[0].pool
    second = read(stored_run(tmp_path, Arms(1), text={**TEXT, **change})).trials[0].pool
    assert (first.key == second.key) is same_pool


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"text": {**TEXT, "require": {"retractions": 0}}}, {"too few retractions, or none required": 9}),
        ({"text": {**TEXT, "faults": [{"name": "skip"}]}}, {"its scenario breaks the engine on purpose": 9}),
        ({"argv": ["rerun", "runs/x"]}, {"a rerun: it was chosen by what it had done before": 9}),
    ],
)
def test_what_does_not_count_says_why(
    tmp_path: Path, changes: dict[str, Any], left_out: dict[str, int]
) -> None:
    found = answer(stored_run(tmp_path, Arms(9), **changes), *NINE)
    assert {one["pinned"]: one["left_out"] for one in found["arms"]}["pinned"] == left_out


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("second", "counts"), [("npu:0", False), ("npu:1", True), ("npu", True)])
def test_ranks_that_share_a_device_tell_nothing_of_its_collectives(
    tmp_path: Path, second: str, counts: bool
) -> None:
    made = stored_run(tmp_path, Arms(1))
    for path in made.glob("trials/*/trial.json"):
        edit(
            path, ranks=[{"rank": at, "node": "a", "device": one} for at, one in enumerate(("npu:0", second))]
        )
    assert [trial.counts for trial in read(made).trials] == [counts, counts]


def test_two_litmus_ranks_on_one_device_had_no_power_over_its_collectives(tmp_path: Path) -> None:
    folder = stored_litmus(tmp_path, platform={**NPU, "shared": True})
    document = json.loads((folder / "litmus.json").read_text())
    families = {"group-ordered": "groups"}
    edit(
        folder / "litmus.json",
        tests=[{**row, "family": families.get(row["name"], "copies")} for row in document["tests"]],
    )
    found = answer(stored_run(tmp_path, Arms(9)), folder, *NINE)
    assert found["answer"] == "not yet"
    assert found["missing"][0]["what"] == (
        "litmus tests: group-ordered: two ranks shared a device, and gloo is not its collectives"
    )


def test_trials_without_a_document_are_told(tmp_path: Path) -> None:
    made = stored_run(tmp_path, Arms(3))
    next(iter(sorted(made.glob("trials/*/trial.json")))).write_text("{")
    found = read(made)
    assert len(found.trials) == 5
    assert "1 trials without a readable trial.json do not count" in found.notes


def test_the_reference_itself_is_compared_with_nobody(tmp_path: Path) -> None:
    made = stored_run(tmp_path, Arms(2))
    first = min(made.glob("trials/*/trial.json"))
    edit(first, checks=[{"name": "tokens", "verdict": "skipped", "reason": "the first of its seed"}])
    assert sorted(one.tokens_compared for one in read(made).trials) == [0, 480, 480, 480]


@pytest.mark.hang
def test_a_real_simulated_run_is_judged_and_opens_nothing(pinned_run: HangOutcome) -> None:
    found = answer(pinned_run.path)
    assert (found["answer"], found["simulation"]) == ("not yet", True)
    assert found["for"] == "the simulated device (memory model cann)"
    hangs = {
        (arm["scenario"], arm["pinned"]): (arm["hangs"]["k"], sum(arm["left_out"].values()))
        for arm in found["arms"]
    }
    assert hangs[("dp-pinned-hang", "pinned")] == (1, 0)
    assert hangs[("dp-pinned-hang", "pageable")] == (0, 1)  # no retraction is required there
    assert found["blame"] is None  # one trial of each tells nothing
