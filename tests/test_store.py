"""The run directory: what is written is read back, damage is told and not raised, a full disk is named."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.store import (
    MANIFEST_KEYS,
    RunStore,
    StoreError,
    load_schema,
    read_run,
    resolve_run,
    safe_name,
    write_bytes,
    write_json,
)

MANIFEST = {
    "command": "hangrig run dp-retract",
    "argv": ["run", "dp-retract"],
    "seed": 7,
    "versions": {"python": "3.11.7", "torch_npu": None},
    "machine": {"node": "here"},
    "device": "sim",
    "simulation": True,
    "simulation_note": "simulated",
    "scenarios": [],
}
TRIAL: dict[str, Any] = {
    "id": "s.default.seed-7",
    "scenario": "s",
    "arm": {},
    "seed": 7,
    "device": "sim",
    "target": "builtin",
    "resolved": {"pinned": {"requested": "default", "resolved": "pageable", "why": "safe default"}},
    "expected": "never",
    "outcome": "healthy",
    "verdict": "pass",
    "checks": [{"name": "hang", "verdict": "pass", "reason": "ended"}],
    "steps": 3,
    "tokens": 9,
    "retractions": 0,
    "duration_s": 0.5,
    "tokens_differ": 0,
    "tokens_compared": 9,
    "ranks": [{"rank": 0, "role": "rank", "node": "here", "pid": 12}],
    "rerun": "hangrig rerun runs/x s.default.seed-7",
}


def make_run(out: Path) -> RunStore:
    return RunStore.create(out, "dp-retract", MANIFEST)


def write_sample(folder: Path) -> None:
    documents: dict[str, dict[str, Any]] = {
        "ledger/rank0.json": {"schema": 1, "rank": 0},
        "stacks/rank0.json": {"schema": 1, "native": False},
        "stacks/rank0.native.json": {"schema": 1, "native": True},
        "processes.json": {"schema": 1, "ranks": []},
    }
    for name, document in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trial = run.trial(TRIAL["id"])
    trial.event("launched", pids=[12])
    trial.decisions_path(0).write_text('{"step": 1}\n{"step": 2}\n')
    write_sample(trial.evidence / "sample-0")
    write_sample(trial.evidence / "sample-10")
    write_json(trial.evidence / "manifest.json", {"reason": "suspected"})
    write_json(trial.evidence / "merged.json", {"groups": []})
    trial.write_latency({"step": [10.5, 11.0]})
    trial.write_tokens({"r0": [4, 5]})
    trial.write_diagnosis({"kind": "hang"})
    trial.write_trial(TRIAL)
    run.finish(exit=0)

    stored = read_run(tmp_path / "latest")
    assert stored.finished and stored.problems == ()
    assert stored.run["seed"] == 7 and stored.run["exit"] == 0
    (found,) = stored.trials
    assert found.problems == ()
    assert found.trial == {"schema": 1, **TRIAL}
    assert found.diagnosis == {"schema": 1, "kind": "hang"}
    assert found.manifest is not None and found.merged is not None
    assert [sample.index for sample in found.samples] == [0, 10]
    assert found.samples[0].ledgers == {0: {"schema": 1, "rank": 0}}
    assert found.samples[0].stacks[0]["native"] is False
    assert found.samples[0].native[0]["native"] is True
    assert found.samples[0].processes == {"schema": 1, "ranks": []}
    assert found.latency == {"step": [10.5, 11.0]} and found.tokens == {"r0": [4, 5]}
    assert found.decision_ranks() == (0,)
    assert found.decisions(0) == (({"step": 1}, {"step": 2}), ())
    assert found.all_decisions() == {0: ({"step": 1}, {"step": 2})}
    events, problems = found.events()
    assert problems == () and [event["kind"] for event in events] == ["launched"]


def test_documents_fit_their_schemas(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trial = run.trial(TRIAL["id"])
    trial.write_trial(TRIAL)
    trial.write_latency({"step": [1.0]})
    trial.write_tokens({"r0": [1]})
    run.finish()
    files = {
        "run": run.path / "run.json",
        "trial": trial.path / "trial.json",
        "latency": trial.path / "latency.json",
        "tokens": trial.path / "tokens.json",
    }
    for name, path in files.items():
        jsonschema.validate(json.loads(path.read_text()), load_schema(name))
    (line,) = (run.path / "trials.jsonl").read_text().splitlines()
    jsonschema.validate(json.loads(line), load_schema("trials"))


def test_every_schema_is_a_schema_and_wants_its_number() -> None:
    folder = Path(__file__).parent.parent / "harness" / "schemas"
    names = sorted(path.stem for path in folder.glob("*.json"))
    assert {"run", "trial", "diagnosis", "report", "compare", "manifest"} <= set(names)
    for name in names:
        schema = load_schema(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        if name != "trials":
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({"schema": 99}, schema)


def test_runs_of_one_second_are_apart_and_latest_is_the_newest(tmp_path: Path) -> None:
    first, second = make_run(tmp_path), make_run(tmp_path)
    assert first.path != second.path
    assert resolve_run(tmp_path / "latest") == second.path.resolve()
    assert not list(tmp_path.glob(".latest*"))


def test_a_manifest_without_its_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine"):
        RunStore.create(tmp_path, "x", {key: MANIFEST[key] for key in MANIFEST_KEYS if key != "machine"})
    assert not list(tmp_path.iterdir())


def test_damaged_files_become_problems(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trial = run.trial("damaged")
    write_sample(trial.evidence / "sample-0")
    (trial.evidence / "sample-0" / "stacks" / "rank0.json").write_text('{"schema": 1, "thre')
    (trial.evidence / "sample-0" / "ledger" / "rank1.json").write_bytes(b"\xff\x00")
    (trial.evidence / "sample-0" / "ledger" / "rankx.json").write_text("{}")
    (trial.evidence / "sample-oops").mkdir()
    (trial.path / "trial.json").write_text("[1, 2]")
    (trial.path / "diagnosis.json").write_text("")
    (trial.path / "latency.json").write_text('{"paths": {"step": [1, "x"], "copy": [2]}}')
    (trial.path / "tokens.json").write_text('{"other": 1}')
    trial.decisions_path(0).write_text('{"step": 1}\n{"st')
    run.trial("empty")

    stored = read_run(run.path)
    damaged, empty = stored.trials
    assert damaged.id == "damaged" and damaged.trial is None and damaged.diagnosis is None
    assert damaged.samples[0].stacks == {} and set(damaged.samples[0].ledgers) == {0}
    assert set(damaged.samples[0].native) == {0}
    assert damaged.latency == {"copy": [2]} and damaged.tokens == {}
    told = "\n".join(damaged.problems)
    for name in (
        "trial.json", "diagnosis.json", "stacks/rank0.json", "ledger/rank1.json", "paths.step", "tokens.json",
    ):  # fmt: skip
        assert name in told
    records, problems = damaged.decisions(0)
    assert records == ({"step": 1},) and "rank0.jsonl:2" in problems[0]
    assert empty.problems == ("trial.json: missing",)


def test_a_line_after_a_cut_one_is_not_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trial = run.trial("t")
    (trial.path / "events.jsonl").write_text('{"kind": "cut')
    trial.event("next")
    events, problems = read_run(run.path).trials[0].events()
    assert [event["kind"] for event in events] == ["next"]
    assert len(problems) == 1


def test_trials_come_in_the_order_in_which_they_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name in ("b", "a", "z"):
        run.trial(name).write_trial({**TRIAL, "id": name})
    run.trial("c")
    assert [trial.id for trial in read_run(run.path).trials] == ["b", "a", "z", "c"]


def test_a_lost_trial_is_a_problem(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / "trials.jsonl").write_text('{"id": "gone"}\n')
    assert any("gone" in problem for problem in read_run(run.path).problems)


@pytest.mark.parametrize("content", [None, "{", '{"schema": 99}'])
def test_what_is_no_run_is_said_so(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "run"
    (folder / "trials").mkdir(parents=True)
    if content is not None:
        (folder / "run.json").write_text(content)
    with pytest.raises(StoreError, match=r"run\.json"):
        read_run(folder)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        resolve_run(tmp_path / "none")
    (tmp_path / "latest").symlink_to("gone")
    with pytest.raises(StoreError, match="link to a run that is gone"):
        resolve_run(tmp_path / "latest")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file"):
        resolve_run(tmp_path / "file")


def test_a_disk_that_refuses_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    write_bytes(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError) as caught:
            write_bytes(path, b"x" * 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.path == path and "too large" in caught.value.reason
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["trial.json"]


def test_an_out_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(StoreError, match="choose another --out"):
        make_run(tmp_path / "out")


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"value": float("nan")})
    assert not list(tmp_path.iterdir())


def test_names_are_one_path_component(tmp_path: Path) -> None:
    assert safe_name("../a b/ü") == "_a_b__"
    assert safe_name("...") == "_"
    with pytest.raises(ValueError, match="plain file name"):
        make_run(tmp_path).trial("../outside")


def test_a_run_can_be_opened_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.trial("t").write_trial({**TRIAL, "id": "t", "verdict": "unknown"})
    again = RunStore.open(run.path)
    again.trial("t").write_trial({**TRIAL, "id": "t", "verdict": "pass"})
    again.finish()
    (trial,) = read_run(run.path).trials
    assert trial.trial is not None and trial.trial["verdict"] == "pass"
