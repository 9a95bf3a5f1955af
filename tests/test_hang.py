"""The hang that this project exists for, made to happen: found, explained, and told from its healthy twins."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import run_rig as rig

from harness.diagnose import Diagnosis, Evidence, diagnose
from harness.pytest_plugin import HangOutcome
from harness.stacks import ProcessStacks

PINNED = {"pinned": "pinned"}
PAGEABLE = {"pinned": "pageable"}
STREAM_THREADS = {"hangrig-compute", "hangrig-copy", "hangrig-comm", "hangrig-update"}
LONGEST_S = 240

hang = pytest.mark.hang
timeout = pytest.mark.timeout(LONGEST_S)


@pytest.fixture
def hung(pinned_run: HangOutcome) -> Path:
    """Directory of the trial that hung."""
    (trial,) = pinned_run.matching(PINNED, "dp-pinned-hang")
    return pinned_run.path / "trials" / trial["id"]


@hang
@timeout
def test_the_pinned_arm_hangs_in_the_order_of_its_streams(pinned_run: HangOutcome) -> None:
    pinned_run.expect("hang", arm=PINNED, scenario="dp-pinned-hang", mechanism="stream-order", culprits=[1])


@hang
@timeout
def test_the_run_is_as_expected_and_says_so(pinned_run: HangOutcome) -> None:
    report = pinned_run.report
    assert (pinned_run.exit, report["verdict"], report["simulation"]) == (0, "pass", True)
    (signature,) = report["signatures"]
    assert (signature["mechanism"], signature["count"]) == ("stream-order", 1)


@hang
@timeout
def test_the_diagnosis_names_rank_stream_operation_and_site(pinned_run: HangOutcome, hung: Path) -> None:
    found = pinned_run.diagnoses[hung.name]
    assert (found["kind"], found["confidence"], found["stream"]) == ("hang", "proven", "compute")
    (culprit,) = found["culprits"]
    pids = {rank["rank"]: rank["pid"] for rank in rig.load(hung / "trial.json")["ranks"]}
    assert (culprit["rank"], culprit["pid"], culprit["device"]) == (1, pids[1], "sim:1")
    operation = found["operation"]
    assert operation["label"].startswith("graph.replay decode.")
    assert re.fullmatch(r"serving/engine\.py:\d+", operation["site"])
    replays = (rig.ROOT / "serving" / "engine.py").read_text().splitlines()
    assert ".replay(" in replays[int(operation["site"].split(":")[1]) - 1]
    assert operation["pending_s"] > 0
    assert found["collective"] is None
    times = [found[name] for name in ("last_progress_s", "suspected_s", "confirmed_s", "captured_s")]
    assert times == sorted(times) and times[0] > 0


@hang
@timeout
def test_the_proof_counts_records_and_waits_and_points_at_files(pinned_run: HangOutcome, hung: Path) -> None:
    proof = pinned_run.diagnoses[hung.name]["proof"]
    facts = [fact["fact"] for fact in proof]
    assert any(
        re.search(r"rank 1: external event .* has \d+ records and \d+ waits by completed replays", fact)
        for fact in facts
    )
    assert any("no update of decode." in fact and "no further record comes" in fact for fact in facts)
    for fact in proof:
        assert (hung / fact["evidence"]).is_file(), fact


@hang
@timeout
def test_the_counters_of_the_healthy_rank_show_no_lost_record(hung: Path) -> None:
    overtaken = {
        rank: sum(event["overtaken"] for event in ledger["external"])
        for rank in (0, 1)
        for ledger in [rig.load(hung / "evidence" / "sample-1" / "ledger" / f"rank{rank}.json")]
    }
    assert overtaken[0] == 0 and overtaken[1] > 0


@hang
@timeout
def test_stacks_of_every_thread_of_every_rank_are_on_disk(hung: Path) -> None:
    for rank in (0, 1):
        for sample in (0, 1):
            assert {"MainThread", *STREAM_THREADS} <= rig.threads(hung, sample, rank)
        assert {"MainThread", *STREAM_THREADS} <= rig.threads(hung, 1, rank, native=True)
        stacks = rig.load(hung / "evidence" / "sample-1" / "stacks" / f"rank{rank}.native.json")
        names = {frame["filename"] for thread in stacks["threads"] for frame in thread["frames"]}
        assert any(name.endswith(".py") for name in names) and any("lib" in name for name in names)


@hang
@timeout
def test_the_diagnosis_needs_no_stack_of_a_stream_thread(pinned_run: HangOutcome, hung: Path) -> None:
    """On hardware there are none: streams are no threads there."""
    evidence = rig.stored_evidence(pinned_run.path, hung.name)
    whole, bare = diagnose(evidence), diagnose(without_threads(evidence, STREAM_THREADS))
    assert whole.to_json()["proof"] == pinned_run.diagnoses[hung.name]["proof"]
    assert judgement(bare) == judgement(whole)
    # The threads of simulated streams add facts behind those that decide.
    assert len(bare.proof) < len(whole.proof)
    assert whole.proof[: len(bare.proof)] == bare.proof


@hang
@timeout
@pytest.mark.parametrize(
    ("scenario", "arm"),
    [("dp-pinned-hang", PAGEABLE), ("dp-pinned-twin", PINNED), ("dp-pinned-twin", PAGEABLE)],
    ids=["pageable keeps the barrier", "pinned without the defect", "pageable without the defect"],
)
def test_healthy_twins_are_healthy_and_their_tokens_are_right(
    pinned_run: HangOutcome, scenario: str, arm: dict[str, str]
) -> None:
    pinned_run.expect("healthy", arm=arm, scenario=scenario)
    (trial,) = pinned_run.matching(arm, scenario)
    reference = rig.load(pinned_run.path / "reference" / f"{scenario}.seed-1.json")["requests"]
    tokens = rig.load(pinned_run.path / "trials" / trial["id"] / "tokens.json")["requests"]
    assert tokens == reference
    assert trial["tokens_differ"] == 0
    assert trial["tokens_compared"] == trial["tokens"] == sum(map(len, reference.values()))
    assert {check["verdict"] for check in trial["checks"]} == {"pass"}
    assert trial["id"] not in pinned_run.diagnoses


def without_threads(evidence: Evidence, names: set[str]) -> Evidence:
    def bare(stacks: ProcessStacks | None) -> ProcessStacks | None:
        if stacks is None:
            return None
        return replace(stacks, threads=tuple(t for t in stacks.threads if t.name not in names))

    samples = tuple(
        replace(
            sample,
            ranks={
                number: replace(rank, stacks=bare(rank.stacks), native=bare(rank.native))
                for number, rank in sample.ranks.items()
            },
        )
        for sample in evidence.samples
    )
    return replace(evidence, samples=samples)


def judgement(found: Diagnosis) -> dict[str, object]:
    """All that a diagnosis claims, without the facts that it rests on."""
    return {name: value for name, value in found.to_json().items() if name != "proof"}
