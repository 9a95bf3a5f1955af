"""The benchmark: its arithmetic, and one whole run at the smallest setting. No number of a run is judged."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import __main__ as command
from bench import first_hang_figures, latency_figures, scale_figures, synthetic, synthetic_files
from bench.apart import apart, highest_bytes, resident_bytes
from bench.arms import Arm, Plan
from bench.errors import BenchError
from bench.pair import started
from bench.ratio import paired_ratio
from bench.settings import SMALLEST
from harness.diagnose import diagnose
from harness.judge import evidence_of, read_history
from harness.scenario import load
from harness.store import MANIFEST_KEYS, RunStore, read_trial, write_json
from reports.corpus import Score

FIGURES = {
    "decode step against its collectives": {"engine", "collectives", "collectives-bare"},
    "ledger": {"ledger-on", "ledger-off"},
    "capture": {
        f"2 ranks, {what}: {way}"
        for what in ("plain", "plain and native")
        for way in ("harness.capture", "py-spy together", "py-spy in turn")
    },
    "analysis": {f"{case}, {size}" for case in SMALLEST.cases for size in ("8 ranks", "16 ranks", "growth")},
    "analysis from disk": {"skipped, 8 ranks", "skipped, 16 ranks", "skipped, growth"},
    "symm_mem": {"symm_mem-on", "symm_mem-off"},
    "pinned": {"pageable", "pinned", "pinned_sync", "pinned_snapshot"},
    "graph": {"graph-on", "graph-off"},
    "overlap": {"overlap-on", "overlap-off"},
}
IN_A_STEP = {"phase", "enqueue", "complete", "external_recorded", "external_consumed", "decision"}


def test_a_ratio_pairs_rounds_that_ran_in_opposite_order() -> None:
    drifting = [1.0, 2.0, 3.0, 4.0]  # in ABBA order, the arm that comes first sees 1, 4 and so on
    ratio = paired_ratio([2 * value for value in drifting], drifting)
    assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 2)


def test_one_disturbed_pair_does_not_move_a_ratio() -> None:
    calm = [1.0] * 20
    disturbed = [50.0, 1.0] + [1.1] * 18
    ratio = paired_ratio(disturbed, calm)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.low <= ratio.value <= ratio.high


@pytest.mark.parametrize(("over", "under"), [([1.0], [1.0]), ([1.0] * 3, [1.0] * 3), ([1.0] * 4, [1.0] * 2)])
def test_rounds_that_do_not_pair_are_refused(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratio(over, under)


def test_a_run_and_its_document(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    path = command.run(SMALLEST, tmp_path, console)
    assert list(tmp_path.iterdir()) == [path]
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["settings"] == "smallest"
    assert document["world"] == 2
    assert document["versions"]["torch"] and document["machine"]["cores"] >= 1
    assert len(document["load_average"]["before"]) == len(document["load_average"]["after"]) == 3
    figures: dict[str, Any] = {figure["name"]: figure for figure in document["figures"]}
    assert {name: set(figures[name]["arms"]) for name in FIGURES} == FIGURES
    assert document["left_out"].keys() == {"detection latency"}
    for figure in figures.values():
        _check_figure(figure)
    operations = figures["ledger operations"]["arms"]
    assert all(set(operations[name]) == {"alone_ns", "in_step_ns", "calls_per_step"} for name in IN_A_STEP)
    assert operations["decision"]["calls_per_step"] == operations["external_consumed"]["calls_per_step"] == 1
    assert operations["snapshot read"].keys() == {"alone_ns"}
    shown = console.export_text()
    assert all(name in shown for name in FIGURES)


def _check_figure(figure: dict[str, Any]) -> None:
    """Ratios are between arms of this figure, of a quantity that both have, and lie in their interval."""
    assert figure["says"]
    for values in figure["arms"].values():
        # What a few ranks cost is noise, and so may an exponent be.
        assert values and all(
            math.isfinite(value) and (value >= 0 or "exponent" in name) for name, value in values.items()
        )
    named = set()
    for ratio in figure["ratios"]:
        assert ratio["quantity"] in figure["arms"][ratio["over"]]
        assert ratio["quantity"] in figure["arms"][ratio["under"]]
        assert ratio["over"] != ratio["under"]
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
        assert ratio["pairs"] >= 1
        named |= {ratio["over"], ratio["under"]}
    if figure["ratios"] and figure["name"] != "analysis":  # of the two largest sizes only
        assert named == set(figure["arms"])


def test_a_rank_that_fails_says_why_and_all_are_gone() -> None:
    plan = Plan([Arm("no/such/folder", ledger=True)], rounds=2, block_steps=1, warm_steps=0)
    with pytest.raises(BenchError, match=r"rank [01] failed:(.|\n)*cannot make a ledger"), started() as pair:
        pids = pair.pids
        pair.run(plan)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# Analysis of many ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_the_power_by_which_cost_grows(power: float) -> None:
    worlds = [16, 256, 1024, 4096]
    found = scale_figures.growth_exponent(worlds, [3e-5 * world**power for world in worlds])
    assert found == pytest.approx(power)


def test_a_figure_of_the_analysis_has_the_growth_and_the_ratio_of_its_largest_sizes() -> None:
    def one(world: int) -> scale_figures.Analysis:
        each_s = world * 1e-3 * (2 if world == 64 else 1)
        return scale_figures.Analysis((each_s, each_s), (each_s, each_s), world << 20, world << 10, "hang x")

    figure = scale_figures.analysis_figure({"order": {world: one(world) for world in (4, 16, 64)}})
    assert set(figure.arms) == {"order, 4 ranks", "order, 16 ranks", "order, 64 ranks", "order, growth"}
    assert figure.arms["order, 64 ranks"]["cpu_us_per_rank"] == pytest.approx(2000)
    assert figure.arms["order, 16 ranks"]["evidence_mib"] == 16
    assert figure.arms["order, growth"]["last_exponent"] == pytest.approx(1.5)
    [ratio] = figure.ratios
    assert (ratio.over, ratio.under) == ("order, 64 ranks", "order, 16 ranks")
    assert ratio.ratio.value == pytest.approx(2)


@pytest.mark.parametrize("case", synthetic.CASES)
def test_made_up_evidence_says_the_same_read_from_disk(case: synthetic.Case, tmp_path: Path) -> None:
    evidence = synthetic.evidence(case, 16, synthetic.SPARSE)
    synthetic_files.write_trial(tmp_path / "t", evidence)
    stored, context = read_trial(tmp_path / "t"), synthetic_files.context(16)
    found = diagnose(evidence_of(stored, read_history(tmp_path / "t"), context)).to_json()
    straight = diagnose(evidence).to_json()
    assert not stored.problems[1:]  # trial.json is the judge's to make
    assert found | {"simulation": None} == straight | {"simulation": None}


def _fails(why: str) -> None:
    raise LookupError(why)


def test_what_is_measured_apart_comes_back_and_what_fails_there_says_why() -> None:
    assert apart(math.sqrt, 4.0, timeout_s=60) == 2.0
    with pytest.raises(BenchError, match=r"(?s)_fails.*LookupError: no luck"):
        apart(_fails, "no luck", timeout_s=60)
    with pytest.raises(BenchError, match="ended without an answer"):
        apart(os._exit, 3, timeout_s=60)


def test_memory_taken_apart_is_seen() -> None:
    before = resident_bytes()
    block = bytearray(64 << 20)
    assert resident_bytes() - before >= 60 << 20
    del block
    assert highest_bytes() - before >= 60 << 20


# A corpus that was run ------------------------------------------------------------------------------------


def scored(seconds: float | None, road: str, **changes: Any) -> tuple[Score, str]:
    fields = {"part": "row", "outcome": "hang", "detected": True, "confirm_s": seconds, **changes}
    return Score("t", "s", **fields), road


def test_the_latency_of_detection_is_told_by_road() -> None:
    found = [scored(float(at), "proof") for at in range(1, 12)]
    found += [scored(4.0, "budget"), scored(None, "", detected=False), scored(None, "", outcome="corrupt")]
    found += [scored(99.0, "proof", part="twin")]
    figure = latency_figures.latency_figure("a-run", found)
    assert figure.arms["proof by ledgers or processes"] == {
        "trials": 11, "p50_s": 6, "p90_s": 10, "longest_s": 11,
    }  # fmt: skip
    assert figure.arms["budget of the phase"]["longest_s"] == 4
    assert (figure.arms["all"]["trials"], figure.arms["all"]["undetected"]) == (12, 1)
    assert "over 14 trials" in figure.says


def test_a_corpus_without_a_hang_says_how_to_get_one() -> None:
    with pytest.raises(BenchError, match=r"no confirmed hang; hangrig corpus"):
        latency_figures.latency_figure("a-run", [scored(None, "", detected=False)])


def test_only_a_run_of_a_corpus_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert latency_figures.corpus_run(None) is None
    with pytest.raises(BenchError, match=r"--corpus nowhere: does not exist"):
        latency_figures.corpus_run(Path("nowhere"))
    keys = dict.fromkeys(MANIFEST_KEYS)
    plain = RunStore.create(tmp_path / "runs", "plain", keys).path
    assert latency_figures.corpus_run(None) is None
    with pytest.raises(BenchError, match="but of no corpus"):
        latency_figures.corpus_run(plain)
    write_json(plain / "run.json", {**json.loads((plain / "run.json").read_bytes()), "corpus": {}})
    assert latency_figures.corpus_run(None) == latency_figures.corpus_run(plain) == plain.resolve()


# The first hang -------------------------------------------------------------------------------------------


def trial_of(seed: int, outcome: str, duration_s: float) -> dict[str, Any]:
    return {"seed": seed, "outcome": outcome, "duration_s": duration_s}


def test_the_first_hang_is_counted_in_the_order_of_the_seeds() -> None:
    jittered = [trial_of(2, "hang", 4.0), trial_of(0, "healthy", 1.0), trial_of(1, "hang", 3.0)]
    plain = [trial_of(0, "healthy", 1.0), trial_of(1, "unknown", 9.0)]
    arms = first_hang_figures.first_hang_figure({"with": jittered, "without": plain}).arms
    assert arms["with"] == {
        "trials": 3, "hangs": 2, "all_s": 8, "first_hang_trial": 2, "first_hang_s": 4,
        "trials_per_hang": 1.5, "s_per_hang": 4,
    }  # fmt: skip
    assert arms["without"] == {"trials": 1, "hangs": 0, "all_s": 1}
    with pytest.raises(BenchError, match="no trial without"):
        first_hang_figures.first_hang_figure({"without": plain[1:]})


def test_the_arms_of_the_first_hang_differ_in_their_jitter_only(tmp_path: Path) -> None:
    text = first_hang_figures.SCENARIO.read_text()
    plain = tmp_path / "plain.toml"
    plain.write_text(first_hang_figures.without_jitter(text))
    with_jitter, without = (tomllib.loads(path.read_text()) for path in (first_hang_figures.SCENARIO, plain))
    assert with_jitter.pop("jitter")["probability"] > 0
    assert with_jitter.pop("name") == first_hang_figures.name_of(text) != without.pop("name")
    assert with_jitter == without
    assert load(plain).jitter.probability == 0
