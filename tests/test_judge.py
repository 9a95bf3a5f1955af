"""A stored trial judged from its files: what the driver left, what the agents left, and what is missing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_fixture import SCENARIO, SITE, snapshot, stacks, write_evidence

from harness.judge import HISTORY, TrialContext, evidence_of, journal_tokens, judge
from harness.ledger_snapshot import CollectiveRecord, GroupState, Snapshot
from harness.store import RunStore, TrialStore, load_schema, read_trial, write_json

TOKENS = {"r0": [1, 2, 3], "r1": [4]}
MANIFEST: dict[str, Any] = {
    "command": "", "argv": [], "seed": 1, "versions": {}, "machine": {}, "device": "sim", "simulation": True,
    "simulation_note": "", "scenarios": [],
}  # fmt: skip


@pytest.fixture
def trial(tmp_path: Path) -> TrialStore:
    return RunStore.create(tmp_path, "a-run", MANIFEST).trial("t")


def finished(trial: TrialStore, **changes: Any) -> None:
    """What a driver stores of a trial in which every rank brought its result."""
    trial.write_tokens(TOKENS)
    write_json(trial.path / HISTORY, {**history(), "finished": True, "done": [0, 1], **changes})


def hung(trial: TrialStore, **changes: Any) -> None:
    write_evidence(trial)
    write_json(trial.path / HISTORY, {**history(), "captured": True, **changes})


def history() -> dict[str, Any]:
    return {
        "finished": False, "captured": False, "reason": "", "notes": [], "duration_s": 3.0, "done": [],
        "failed": {}, "died": [], "steps": 7, "retractions": 2, "leaks": [],
        "ranks": [{"rank": rank, "role": "rank", "node": "node-0", "pid": 4000 + rank} for rank in (0, 1)],
    }  # fmt: skip


def run_judge(trial: TrialStore, **expected: Any) -> dict[str, Any]:
    """trial.json; the expectations are those of an arm that must never hang."""
    reference = trial.path.parent / "reference.json"
    if not reference.exists():
        write_json(reference, {"requests": TOKENS})
    document = judge(trial, context(**expected), reference)
    jsonschema.validate(json.loads((trial.path / "trial.json").read_bytes()), load_schema("trial"))
    if (trial.path / "diagnosis.json").exists():
        jsonschema.validate(diagnosis(trial), load_schema("diagnosis"))
    return document


def context(**expected: Any) -> TrialContext:
    wanted = {"hang": "never", "min_rate": None, "mechanism": None, "tokens": "equal", **expected}
    planned = {
        "id": "t", "scenario": SCENARIO, "arm": {"pinned": "pinned"}, "resolved": {}, "seed": 1,
        "device": "sim", "expected": wanted,
    }  # fmt: skip
    return TrialContext(planned, "builtin", 2, True, 0, "hangrig rerun RUN t")


def diagnosis(trial: TrialStore) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((trial.path / "diagnosis.json").read_bytes())
    return document


def reason(document: dict[str, Any], name: str) -> str:
    found: str = next(check["reason"] for check in document["checks"] if check["name"] == name)
    return found


# Trials that finished -------------------------------------------------------------------------------------


def test_a_finished_trial_is_healthy_and_has_no_diagnosis(trial: TrialStore) -> None:
    finished(trial)
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"]) == ("healthy", "pass")
    assert (found["steps"], found["tokens"], found["retractions"]) == (7, 4, 2)
    assert (found["tokens_differ"], found["tokens_compared"]) == (0, 4)
    assert found["rerun"] == "hangrig rerun RUN t"
    assert not (trial.path / "diagnosis.json").exists()


def test_wrong_tokens_and_nothing_else_are_corruption(trial: TrialStore) -> None:
    finished(trial)
    trial.write_tokens({**TOKENS, "r1": [5]})
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"], found["tokens_differ"]) == ("corrupt", "fail", 1)
    written = diagnosis(trial)
    assert (written["kind"], written["mechanism"], written["signature"]) == ("none", "unknown", "")
    assert written["proof"][0]["evidence"] == "tokens.json" and "token" in written["proof"][0]["fact"]
    assert not (trial.evidence / "merged.json").exists()


def test_the_witness_of_a_rank_tells_whose_copies_spoiled_the_tokens(trial: TrialStore) -> None:
    finished(trial)
    trial.write_tokens({**TOKENS, "r1": [5]})
    (trial.path / "tokens").mkdir()
    for rank, (request, tokens) in enumerate(TOKENS.items()):
        lines = [
            json.dumps({"step": 3 + at, "tokens": {request: one}}) + "\n" for at, one in enumerate(tokens)
        ]
        (trial.path / "tokens" / f"rank{rank}.jsonl").write_text("".join(lines))
    wrong = {"path": "metadata_copy", "step": 3, "stream": "compute", "elements": 2, "of": 9}
    path = trial.decisions_path(1)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": 4, "copies": [wrong]}) + "\n")
    expected = {"kind": "none", "mechanism": "stream-order", "culprits": [1], "stream": "compute"}
    found = run_judge(trial, **expected, tokens="differ")
    assert found["verdict"] == "pass" and reason(found, "diagnosis").endswith("as expected")
    written = diagnosis(trial)
    assert (written["mechanism"], written["stream"], written["confidence"]) == (
        "stream-order",
        "compute",
        "proven",
    )
    assert [(one["rank"], one["pid"]) for one in written["culprits"]] == [(1, 4001)]
    assert written["signature"] == "none/stream-order/compute/metadata_copy/-/-"
    assert "request r1 of rank 1 differs from token 0 on, put out in step 3" in {
        f["fact"] for f in written["proof"]
    }


def test_a_trial_that_turns_out_healthy_loses_its_diagnosis(trial: TrialStore) -> None:
    finished(trial)
    trial.write_tokens({**TOKENS, "r1": [5]})
    assert run_judge(trial)["outcome"] == "corrupt" and (trial.path / "diagnosis.json").exists()
    trial.write_tokens(TOKENS)
    assert run_judge(trial)["outcome"] == "healthy"
    assert not (trial.path / "diagnosis.json").exists()


def test_a_finished_trial_that_an_agent_captured_before_is_healthy(trial: TrialStore) -> None:
    write_evidence(trial)
    finished(trial, captured=True)
    assert run_judge(trial)["outcome"] == "healthy"
    assert not (trial.path / "diagnosis.json").exists()


SLOW_TIMES = {
    "last_progress_s": 5.9, "suspected_s": 8.4, "confirmed_s": 10.4, "captured_s": 11.9, "went_on_s": 12.1,
}  # fmt: skip


def slow(trial: TrialStore, **manifest: Any) -> None:
    """A finished trial in which rank 1 stood in its step while rank 0 waited for it."""
    write_evidence(trial)
    for index in (0, 1):
        for rank in (0, 1):
            write_json(
                trial.evidence / f"sample-{index}" / "ledger" / f"rank{rank}.json",
                waiting(rank, index).to_json(),
            )
    path = trial.evidence / "manifest.json"
    document = {
        "reason": "slow",
        "road": "dissolved",
        "suspicion": "stalled",
        "ranks": [0, 1],
        "times": SLOW_TIMES,
    }
    write_json(path, {**json.loads(path.read_bytes()), **document, **manifest})
    finished(trial)


def waiting(rank: int, index: int, *, moved: bool = False) -> Snapshot:
    """Rank 0 has entered a collective that rank 1 has not come to; ``moved``: in the second sample it has."""
    entered = CollectiveRecord(183, "all_gather", (2,), "int64", 96_000_000_000, 96_000_000_000, None)
    came = rank == 0 or (moved and index == 1)
    group = GroupState("agree", (0, 1), 182 + came, 182 + came, 182, (entered,) if came else ())
    shown = snapshot(rank, index)
    host = replace(shown.host, phase="agree" if rank == 0 else "prefill", step=62 + (came and rank == 1))
    streams = {name: replace(shown.streams["copy"]) for name in shown.streams}
    return replace(shown, host=host, streams=streams, groups={"agree": group}, external=())


def test_a_trial_that_was_suspected_and_went_on_is_slow(trial: TrialStore) -> None:
    slow(trial)
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"], found["tokens_compared"]) == ("slow", "pass", 4)
    assert reason(found, "hang") == "slow, went on after 6.2 s"
    written = diagnosis(trial)
    assert (written["kind"], written["mechanism"], written["stream"]) == ("slow", "rank-slow", "host")
    assert [culprit["rank"] for culprit in written["culprits"]] == [1]
    assert written["collective"]["waiting"] == [0] and written["collective"]["missing"] == [1]
    assert {name: written[name] for name in SLOW_TIMES} == SLOW_TIMES
    assert written["proof"][0]["fact"] == "ranks 0, 1 made no progress for 6.2 s, and then went on"
    assert (trial.evidence / "merged.json").exists()


def test_a_rank_that_went_on_under_the_second_sample_is_slow_as_the_first_shows(trial: TrialStore) -> None:
    slow(trial)
    for rank in (0, 1):
        path = trial.evidence / "sample-1" / "ledger" / f"rank{rank}.json"
        write_json(path, waiting(rank, 1, moved=True).to_json())
    assert run_judge(trial)["outcome"] == "slow"
    written = diagnosis(trial)
    assert [culprit["rank"] for culprit in written["culprits"]] == [1]
    assert any("'prefill' of step 62" in fact["fact"] for fact in written["proof"])


@pytest.mark.parametrize(
    ("manifest", "ranks", "culprits"),
    [({"ranks": [1]}, (), [1]), ({}, (0, 1), []), ({"ranks": [1], "suspicion": "stopped"}, (), [1])],
    ids=["one stood by itself", "all stood alike", "stopped"],
)
def test_who_was_slow_where_nobody_waits(
    trial: TrialStore, manifest: dict[str, Any], ranks: tuple[int, ...], culprits: list[int]
) -> None:
    slow(trial, **manifest)
    for index in (0, 1):
        for rank in (0, 1):
            path = trial.evidence / f"sample-{index}" / "ledger" / f"rank{rank}.json"
            write_json(path, replace(waiting(1, index), header=snapshot(rank, index).header).to_json())
    assert run_judge(trial)["outcome"] == "slow"
    assert [culprit["rank"] for culprit in diagnosis(trial)["culprits"]] == culprits


def test_one_sample_of_a_suspicion_that_fell_leaves_a_healthy_trial(trial: TrialStore) -> None:
    slow(trial)
    shutil.rmtree(trial.evidence / "sample-1")
    assert run_judge(trial)["outcome"] == "healthy"
    assert not (trial.path / "diagnosis.json").exists()


def test_a_confirmed_hang_that_went_on_after_all_was_slow(trial: TrialStore) -> None:
    slow(trial, reason="stalled", road="budget", times={**SLOW_TIMES, "went_on_s": None})
    assert reason(run_judge(trial), "hang") == "slow, went on"
    assert diagnosis(trial)["kind"] == "slow"


def test_a_slow_trial_whose_tokens_differ_is_slow_with_a_failed_check(trial: TrialStore) -> None:
    slow(trial)
    trial.write_tokens({**TOKENS, "r1": [5]})
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"], found["tokens_differ"]) == ("slow", "fail", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "reference.json was not written"),
        ("{", "reference.json is damaged"),
        ('{"schema": 1, "why": "the reference did not finish: it hung"}', "the reference did not finish"),
    ],
)
def test_without_a_reference_the_tokens_are_unknown(trial: TrialStore, text: str | None, said: str) -> None:
    finished(trial)
    reference = trial.path.parent / "reference.json"
    if text is not None:
        reference.write_text(text)
    found = judge(trial, context(), reference)
    assert (found["outcome"], found["verdict"], found["tokens_compared"]) == ("healthy", "unknown", 0)
    assert said in reason(found, "tokens")


# Trials that did not --------------------------------------------------------------------------------------


def test_a_hang_is_diagnosed_from_its_files(trial: TrialStore) -> None:
    hung(trial)
    found = run_judge(trial, hang="sometimes", mechanism="stream-order", tokens="any")
    assert (found["outcome"], found["verdict"]) == ("hang", "pass")
    told = diagnosis(trial)
    assert (told["mechanism"], told["stream"]) == ("stream-order", "compute")
    assert [(culprit["rank"], culprit["pid"]) for culprit in told["culprits"]] == [(1, 4001)]
    assert told["operation"]["site"] == SITE
    assert (told["suspected_s"], told["captured_s"]) == (8.4, 11.9)
    merged = json.loads((trial.evidence / "merged.json").read_bytes())
    assert "rank 0 host" in json.dumps(merged)


def test_judging_again_changes_nothing(trial: TrialStore) -> None:
    hung(trial)
    first = run_judge(trial), diagnosis(trial)
    assert (run_judge(trial), diagnosis(trial)) == first


def test_a_trial_of_a_killed_driver_is_judged_from_evidence_and_journals(trial: TrialStore) -> None:
    write_evidence(trial)
    (trial.path / "tokens").mkdir()
    (trial.path / "tokens" / "rank0.jsonl").write_text('{"step": 1, "tokens": {"r0": 1}}\n{"step": 2, "to')
    (trial.path / "decisions" / "rank1.jsonl").write_text('{"step": 9, "retracted": ["r1", "r0"]}\n')
    found = run_judge(trial, hang="any", tokens="any")
    assert found["outcome"] == "hang"
    assert (found["steps"], found["retractions"], found["tokens"]) == (9, 2, 1)
    assert (found["tokens_compared"], found["tokens_differ"], found["ranks"]) == (1, 0, [])


def test_what_the_session_found_out_is_not_judged_away(trial: TrialStore) -> None:
    """An interrupted trial has evidence too; it shows ranks that were cut short, not a hang."""
    hung(trial, unknown="interrupted")
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"], reason(found, "hang")) == (
        "unknown",
        "unknown",
        "interrupted",
    )


def test_without_evidence_nothing_is_known(trial: TrialStore) -> None:
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"]) == ("unknown", "unknown")
    assert "left no evidence" in reason(found, "hang")
    told = diagnosis(trial)
    assert (told["kind"], told["culprits"], told["proof"]) == ("none", [], [])
    assert told["missing_evidence"] == [
        {"what": "a capture", "why": reason(found, "hang"), "impossible": False}
    ]


def test_ranks_that_move_are_no_hang_and_no_success(trial: TrialStore) -> None:
    hung(trial)
    for rank in (0, 1):
        moved = snapshot(rank, 1).to_json()
        moved["host"]["step"] += 1
        write_json(trial.evidence / "sample-1" / "ledger" / f"rank{rank}.json", moved)
    found = run_judge(trial, hang="any", tokens="any")
    assert (found["outcome"], found["verdict"]) == ("unknown", "unknown")
    assert "ranks that move" in reason(found, "hang")
    assert diagnosis(trial)["kind"] == "none"


def test_a_skipped_trial_is_skipped(trial: TrialStore) -> None:
    write_json(trial.path / HISTORY, {"skipped": "no npu device"})
    found = run_judge(trial)
    assert (found["outcome"], found["verdict"], reason(found, "leak")) == (
        "skipped", "skipped", "no npu device",
    )  # fmt: skip


# From files to evidence -----------------------------------------------------------------------------------


def test_a_dead_rank_is_dead_and_its_launchers_words_are_no_exception(trial: TrialStore) -> None:
    """Those words speak of a connection, which would make the dead rank look like another one's victim."""
    died = "ActorDiedError: worker exits with a connection error code 2. End of file"
    reset = "RuntimeError: gloo: Connection reset by peer"
    hung(trial, failed={"0": reset, "1": died}, died=[1])
    for sample in (0, 1):
        path = trial.evidence / f"sample-{sample}" / "processes.json"
        table = json.loads(path.read_bytes())
        table["ranks"][1]["state"] = "dead"
        write_json(path, table)
    found = run_judge(trial)
    told = diagnosis(trial)
    assert (found["outcome"], told["mechanism"]) == ("dead", "rank-dead")
    assert [culprit["rank"] for culprit in told["culprits"]] == [1]


def test_damaged_pieces_are_missing_and_said(trial: TrialStore) -> None:
    hung(trial)
    (trial.evidence / "sample-1" / "ledger" / "rank0.json").write_text('{"schema": 1, "head')
    shutil.rmtree(trial.evidence / "sample-0" / "stacks")
    evidence = evidence_of(read_trial(trial.path), history(), context())
    assert evidence.samples[1].ranks[0].snapshot is None
    assert evidence.samples[1].ranks[1].snapshot is not None
    assert evidence.samples[0].ranks[0].stacks is None
    assert any("rank0.json" in lack.why for lack in evidence.missing)
    run_judge(trial, hang="any", tokens="any")
    lacking = [lack["what"] for lack in diagnosis(trial)["missing_evidence"]]
    assert "evidence/sample-1/ledger/rank0.json" in lacking


def test_ranks_are_known_by_what_the_history_says(trial: TrialStore) -> None:
    hung(trial, done=[0])
    (trial.evidence / "sample-1" / "processes.json").unlink()
    evidence = evidence_of(read_trial(trial.path), {**history(), "done": [0]}, context())
    first, last = evidence.samples
    assert [first.ranks[rank].state for rank in (0, 1)] == ["S", "S"]
    assert last.ranks[1].state is None
    assert (last.ranks[1].pid, last.ranks[1].node) == (4001, "node-0")
    assert (last.ranks[0].task_done, last.ranks[1].task_done) == (True, False)
    assert last.ranks[0].stacks is not None and last.ranks[0].stacks.pid == stacks(0)["pid"]


def test_journals_are_joined_by_request(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    lines = ['{"step": 1, "tokens": {"a": 1, "b": 5}}', '{"step": 2, "tokens": {"a": 2}}', ""]
    (tmp_path / "tokens" / "rank0.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokens" / "rank1.jsonl").write_text('{"step": 1, "tokens": {"c": 7}}\n')
    assert journal_tokens(tmp_path) == {"a": [1, 2], "b": [5], "c": [7]}
