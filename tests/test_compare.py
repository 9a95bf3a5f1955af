"""Arms and runs side by side: figures that were built in come out, and no word is stronger than they are."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_fixture import ARMS, MEDIANS_US, RunBuilder, d1_run

from harness.store import StoreError
from reports.compare import CompareError, compare_run, exit_status, render, write
from reports.compare_runs import compare_runs
from reports.compare_runs import exit_status as runs_exit_status
from reports.compare_runs import render as render_runs


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten trials an arm that all ran to their end; pinned copies take 0.7 of the time, steps the same."""
    builder = RunBuilder(tmp_path_factory.mktemp("runs"))
    for seed in range(10):
        for arm in ARMS:
            builder.trial(arm, seed)
    return builder.finish()


def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {path["path"]: path for path in document["paths"]}


def test_the_document_keeps_its_contract(healthy: Path) -> None:
    document = compare_run(healthy)
    schema = json.loads((resources.files("harness") / "schemas" / "compare.json").read_text())
    jsonschema.validate(document, schema)
    assert list(rows(document)) == ["next_token_copy", "bitmask_copy", "token_count_copy", "step"]
    assert (document["by"], document["simulation"]) == ("pinned", True)
    assert {path["against"] for path in document["paths"]} == {"pageable"}
    for path, row in rows(document).items():
        assert row["values"]["pageable"]["p50_us"] == pytest.approx(MEDIANS_US[path], rel=0.03)
        assert row["values"]["pinned"]["count"] == 800


def test_ratios_are_those_that_were_built_in(healthy: Path) -> None:
    document = compare_run(healthy)
    for path in ("next_token_copy", "bitmask_copy", "token_count_copy"):
        ratio = rows(document)[path]["ratios"]["pinned"]
        assert ratio["verdict"] == "faster"
        assert ratio["low"] < 0.7 < ratio["high"]
    assert rows(document)["step"]["ratios"]["pinned"]["verdict"] == "same"
    assert exit_status(document) == 0


def test_the_sentence_says_simulation_and_the_intervals(healthy: Path) -> None:
    sentence = compare_run(healthy)["sentence"]
    assert sentence.startswith(
        "In simulation, which is no evidence about hardware, compared with pinned=pageable"
    )
    assert re.search(
        r"a (29|30|31) % shorter median next_token_copy \(95 % interval of the ratio 0\.\d\d to", sentence
    )
    assert "the same median step within 5 %" in sentence
    assert sentence.count(".") - len(re.findall(r"\d\.\d", sentence)) == 1, "one sentence"


def test_too_few_trials_is_the_answer_and_no_difference_is_claimed(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    for seed in range(3):
        for arm in ARMS:
            builder.trial(arm, seed)
    document = compare_run(builder.finish())
    for row in document["paths"]:
        ratio = row["ratios"]["pinned"]
        assert ratio["verdict"] == "too-few-samples"
        assert ratio["low"] is ratio["high"] is None
    assert exit_status(document) == 3
    assert not re.search(r"shorter|longer|same median", document["sentence"])
    assert "too few samples to tell for next_token_copy" in document["sentence"]


def test_trials_that_hung_count_on_neither_side(tmp_path: Path) -> None:
    """Pinned hangs on the slow seeds; unmatched, the survivors would make pinned look faster."""
    builder = RunBuilder(tmp_path)
    for seed in range(12):
        step = {"step": [100.0 + seed % 3 if seed < 6 else 300.0] * 20}
        builder.trial(ARMS[0], seed, latency=step)
        builder.trial(ARMS[1], seed, "healthy" if seed < 6 else "hang", expected="any", latency=step)
    document = compare_run(builder.finish())
    assert document["trials"] == {"pageable": 12, "pinned": 6}
    ratio = rows(document)["step"]["ratios"]["pinned"]
    assert (ratio["ratio"], ratio["verdict"]) == (1.0, "same")


def test_other_toggles_and_a_baseline_that_is_off(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    for seed in range(6):
        for overlap, step in (("on", 60.0), ("off", 100.0)):
            arm = {"overlap": overlap, "pinned": "pageable"}
            builder.trial(arm, seed, latency={"step": [step + seed] * 10})
    document = compare_run(builder.finish(), by="overlap")
    row = rows(document)["step"]
    assert (row["against"], row["ratios"]["on"]["verdict"]) == ("off", "faster")


def test_an_arm_that_was_not_run_is_named(tmp_path: Path) -> None:
    plan: list[dict[str, Any]] = [
        {"arm": dict(ARMS[0])},
        {"arm": {"pinned": "pinned_sync"}, "same_as": "pinned=pageable"},
    ]
    builder = RunBuilder(tmp_path, plan=plan)
    builder.trial(ARMS[0], 0)
    document = compare_run(builder.finish())
    assert document["same_as"] == {"pinned_sync": "pinned=pageable"}
    assert "nothing to compare" in document["sentence"]
    assert "pinned_sync was not run: it resolves to pinned=pageable" in render(document)
    assert exit_status(document) == 3


def test_an_unknown_toggle_is_refused_with_those_that_there_are(healthy: Path) -> None:
    with pytest.raises(CompareError, match="a toggle 'graph'; this run varies pinned"):
        compare_run(healthy, by="graph")
    with pytest.raises(StoreError):
        compare_run(healthy / "trials")


def test_files_beside_the_run(healthy: Path) -> None:
    document = compare_run(healthy)
    write(healthy, document)
    assert json.loads((healthy / "compare-pinned.json").read_text()) == document
    page = (healthy / "compare-pinned.html").read_text()
    assert "<svg" in page
    assert not re.search(r"https?:|<script", page)
    text = (healthy / "compare-pinned.md").read_text()
    for words in ("Simulation", "shorter median next"):
        assert words in page
        assert words in text


def test_the_same_run_gives_the_same_document(healthy: Path) -> None:
    assert compare_run(healthy) == compare_run(healthy)


# --- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "verdict", "status"),
    [
        (0, 6, "regression", 1),
        (0, 0, "no-regression", 0),
        (3, 4, "no-regression", 0),
        (6, 0, "no-regression", 0),
    ],
)
def test_runs_side_by_side(tmp_path: Path, before: int, after: int, verdict: str, status: int) -> None:
    document = compare_runs(
        d1_run(tmp_path / "a", healthy=6, hung=before), d1_run(tmp_path / "b", healthy=6, hung=after)
    )
    assert (document["verdict"], runs_exit_status(document)) == (verdict, status)
    assert ("worse than the baseline" in render_runs(document)) == (verdict == "regression")


def test_slower_steps_are_a_regression(tmp_path: Path) -> None:
    paths = []
    for name, factor in (("a", 1.0), ("b", 1.3)):
        builder = RunBuilder(tmp_path / name)
        for seed in range(6):
            builder.trial(ARMS[0], seed, latency={"step": [factor * (100.0 + seed)] * 10})
        paths.append(builder.finish())
    document = compare_runs(*paths)
    assert document["verdict"] == "regression"
    assert "the median step takes 1.30 times as long" in document["sentence"]


def test_runs_of_other_devices_cannot_be_compared(tmp_path: Path) -> None:
    paths = []
    for device in ("sim", "npu"):
        builder = RunBuilder(tmp_path / device, device=device)
        builder.trial(ARMS[0], 0, device=device)
        paths.append(builder.finish())
    document = compare_runs(*paths)
    assert (document["verdict"], runs_exit_status(document)) == ("not-comparable", 3)
    assert "sim against npu" in document["sentence"]
