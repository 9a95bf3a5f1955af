"""The corpus: what is chosen, how a stored one is scored, and the part of it that fits into a test run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from harness.arms import has_all
from harness.cli import app
from harness.corpus import Wish, jobs, manifest, variants
from harness.request import BadRequest
from harness.store import RunStore, load_schema, read_run
from reports.corpus import Corpus, build, markdown, score, write

ENTRY = {"id": "A1", "name": "a1-x", "ranks": 2, "dp": 2, "row": {"fault": "on"}, "twin": {"fault": "twin"}}
CONTROL = {"id": None, "name": "control-y", "ranks": 2, "dp": 2, "row": {}, "twin": {}}
CHOSEN = {"a1-x": ENTRY, "control-y": CONTROL}
EXPECTED = {
    "kind": "hang",
    "mechanism": "collective-skipped",
    "culprits": [1],
    "stream": "host",
    "group": None,
}
RIGHT = {
    "kind": "hang", "mechanism": "collective-skipped", "culprits": [{"rank": 1}], "last_progress_s": 2.0,
    "confirmed_s": 3.5, "missing_evidence": [],
}  # fmt: skip


def stored(tmp_path: Path, trials: list[dict[str, Any]], planned: list[str] | None = None) -> Path:
    run: dict[str, Any] = {
        "command": "hangrig corpus", "argv": [], "seed": 0, "versions": {}, "machine": {}, "device": "sim",
        "simulation": True, "simulation_note": "", "scenarios": [], "corpus": CHOSEN,
        "planned": [{"id": name} for name in planned or []],
    }  # fmt: skip
    store = RunStore.create(tmp_path, "corpus", run)
    for number, trial in enumerate(trials):
        diagnosis = trial.pop("diagnosis", None)
        one = store.trial(f"t{number}")
        document = {
            "id": f"t{number}", "scenario": "a1-x", "arm": {"fault": "on"}, "outcome": "hang", "checks": [],
            "diagnosis_expected": EXPECTED, **trial,
        }  # fmt: skip
        one.write_trial(document)
        if diagnosis is not None:
            one.write_diagnosis(diagnosis)
    return store.path


def scored(tmp_path: Path, *trials: dict[str, Any], planned: list[str] | None = None) -> Corpus:
    return write(stored(tmp_path, list(trials), planned))


def test_a_right_answer_a_healthy_twin_and_a_healthy_control(tmp_path: Path) -> None:
    found = scored(
        tmp_path,
        {"diagnosis": RIGHT},
        {"arm": {"fault": "twin"}, "outcome": "healthy"},
        {"scenario": "control-y", "arm": {}, "outcome": "slow"},
    )
    assert found.exit == 0
    document = json.loads((Path(found.run) / "corpus.json").read_text())
    jsonschema.validate(document, load_schema("corpus"))
    (row,), (twin,), (control,) = document["rows"], document["twins"], document["controls"]
    assert [row[key] for key in ("id", "seeds", "detected", "kind_right", "mechanism_right", "culprit_right")] == [
        "A1", 1, 1, 1, 1, 1,
    ]  # fmt: skip
    assert row["confirm_s"] == {"p50": 1.5, "p95": 1.5} and row["evidence_complete"] == 1
    assert (twin["trials"], twin["false_alarms"]) == (1, 0)
    assert (control["name"], control["trials"], control["false_alarms"], control["slow"]) == (
        "control-y",
        1,
        0,
        1,
    )
    assert document["totals"]["culprit_right"]["k"] == document["totals"]["culprit_right"]["n"] == 1
    assert "| A1 | a1-x | 2 | 1/1 | 1/1 | 1/1 | 1/1 | 1/1 | 1.5 s | 0/1 |" in markdown(found)


@pytest.mark.parametrize(
    ("trial", "status", "wrong"),
    [
        ({"outcome": "healthy"}, 1, "healthy"),
        ({"diagnosis": {**RIGHT, "culprits": [{"rank": 0}]}}, 1, r"ranks \[0\]"),
        ({"diagnosis": {**RIGHT, "culprits": [{"rank": 0}, {"rank": 1}]}}, 1, r"ranks \[0, 1\]"),
        ({"diagnosis": {**RIGHT, "mechanism": "unknown"}}, 1, "unknown"),
        ({"outcome": "dead", "diagnosis": {**RIGHT, "kind": "dead"}}, 1, "dead"),
        ({"arm": {"fault": "twin"}, "diagnosis": RIGHT}, 1, None),
        ({"arm": {"fault": "twin"}, "outcome": "corrupt"}, 1, None),
        ({"scenario": "control-y", "arm": {}, "outcome": "stopped"}, 1, None),
        ({"outcome": "unknown", "checks": [{"name": "hang", "verdict": "unknown", "reason": "no"}]}, 3, None),
        (
            {
                "diagnosis": RIGHT,
                "checks": [{"name": "fault", "verdict": "unknown", "reason": "never acted"}],
            },
            3,
            None,
        ),
    ],
)
def test_what_is_not_right_costs_its_status(
    tmp_path: Path, trial: dict[str, Any], status: int, wrong: str | None
) -> None:
    found = scored(tmp_path, trial)
    assert found.exit == status
    said = "\n".join(one.said for one in found.scores)
    if wrong is None:
        assert not said
    else:
        assert re.search(wrong, said)


def test_a_missing_piece_of_evidence_is_counted_and_a_dead_process_is_none(tmp_path: Path) -> None:
    lack = {"what": "evidence/sample-0/stacks/rank1.json", "why": "py-spy was refused"}
    gone = {"what": "evidence/sample-0/stacks/rank1.json", "why": "the process is gone", "impossible": True}
    found = scored(
        tmp_path,
        {"diagnosis": {**RIGHT, "missing_evidence": [lack]}},
        {"diagnosis": {**RIGHT, "missing_evidence": [gone]}},
    )
    (row,) = found.to_json()["rows"]
    assert (row["seeds"], row["evidence_complete"], found.exit) == (2, 1, 0)


def test_a_trial_that_never_ran_leaves_the_answer_open(tmp_path: Path) -> None:
    found = scored(tmp_path, {"diagnosis": RIGHT}, planned=["t0", "t1"])
    assert (found.exit, found.never_run) == (3, ("t1",))


def test_a_trial_is_scored_as_it_ends(tmp_path: Path) -> None:
    path = stored(tmp_path, [{"diagnosis": RIGHT}])
    one = score(path / "trials" / "t0", CHOSEN)
    assert one is not None and one.culprit and one.confirm_s == 1.5
    assert score(path / "trials" / "t0", {}) is None
    assert score(path / "trials" / "t9", CHOSEN) is None


def test_rows_families_controls_and_files_can_be_chosen() -> None:
    names = {one.file for one in variants(Wish(only=("A1",)))}
    assert names == {"a1-idle-raises"}
    assert names <= {one.file for one in variants(Wish(only=("A",)))}
    assert names == {one.file for one in variants(Wish(only=("a1-idle-raises",)))}
    with pytest.raises(BadRequest, match=r"--only Z9: is no row of the corpus; rows: A1"):
        variants(Wish(only=("A1", "Z9")))


def test_rows_twins_and_ranks_have_their_own_numbers_of_trials() -> None:
    chosen = variants(Wish(only=("A1",), seeds=2, twins=5, wide=3))
    planned = {
        job.scenario.target.ranks: job.trials for job, _ in jobs(Wish(seeds=2, twins=5, wide=3), chosen)
    }
    counts = {
        ranks: [sum(plan.arm["fault"] == arm for plan in trials) for arm in ("on", "twin")]
        for ranks, trials in planned.items()
    }
    assert counts == {2: [2, 5], 4: [2, 3]}
    assert set(manifest(chosen)["corpus"]) == {"a1-idle-raises", "a1-idle-raises-4-ranks"}


def test_the_quick_part_has_every_row_and_control_with_few_ranks_and_a_twin_for_each_family() -> None:
    def twins(wish: Wish) -> set[str]:
        return {
            job.scenario.name
            for job, _ in jobs(wish, variants(wish))
            if job.scenario.corpus is not None
            and any(has_all(plan.arm, job.scenario.corpus.twin.values()) for plan in job.trials)
        }

    quick = Wish(only=("A", "B"), quick=True)
    for one in variants(quick):
        assert one.scenario.corpus is not None
        assert one.scenario.target.ranks == one.scenario.corpus.ranks[0]
    assert twins(quick) == {"a1-idle-raises", "b1-eager-beside-graph"}
    assert twins(replace(quick, twins=1)) == {one.scenario.name for one in variants(quick)}
    whole = variants(Wish(quick=True))
    trials = {job.scenario.name: len(job.trials) for job, _ in jobs(Wish(quick=True), whole)}
    assert min(trials.values()) == 1 and set(trials) == {one.scenario.name for one in whole}
    rows = {one.scenario.corpus.id for one in variants(Wish()) if one.scenario.corpus}
    assert {one.scenario.corpus.id for one in whole if one.scenario.corpus} == rows


@pytest.mark.hang
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_quick_part_of_the_corpus_is_all_right(tmp_path: Path) -> None:
    """Every row found and blamed on the right rank, no twin and no control called a hang."""
    command = [
        Path(sys.executable).parent / "hangrig",
        "corpus",
        "--quick",
        "--json",
        "--out",
        tmp_path / "runs",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("corpus"))
    assert {row["id"] for row in document["rows"]} == {
        one.scenario.corpus.id for one in variants(Wish(quick=True)) if one.scenario.corpus
    } - {None}
    assert document["totals"]["false_alarms"]["k"] == 0 and document["controls"]


def test_naming_no_row_is_not_all_of_them() -> None:
    done = CliRunner().invoke(app, ["corpus", "--only", " ,"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--only: names no row; give ids or names such as A1,D1" in done.stderr


def test_a_wrong_row_is_bad_usage() -> None:
    done = CliRunner().invoke(app, ["corpus", "--only", "Z9"])
    assert done.exit_code == 2 and "is no row of the corpus" in done.output


def test_a_run_of_something_else_is_no_corpus(tmp_path: Path) -> None:
    path = stored(tmp_path, [])
    document = json.loads((path / "run.json").read_text())
    del document["corpus"]
    (path / "run.json").write_text(json.dumps(document))
    with pytest.raises(KeyError):
        build(read_run(path))
