"""What recorders, status files and error codes of an accelerator's libraries do to the diagnosis of a trial."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from flight_builder import Recorder
from test_error_codes import EI0002
from test_judge import MANIFEST, context, diagnosis, history, hung

from harness.device_reading import read_library_evidence
from harness.diagnosis_library import with_library
from harness.diagnosis_model import Cause, Confidence, Fact, LibraryEvidence, LoggedCode, StatusWord
from harness.error_codes import find_codes
from harness.judge import HISTORY, judge
from harness.offline.flight_recorder import parse_flight_recorder
from harness.store import RunStore, TrialStore, load_schema, write_json

XID = "NVRM: Xid (PCI:0000:01:00): 48, pid=4001, double bit error\n"
UNDECIDED = Cause(
    "hang", "unknown", (), (Fact("captured because: asked", "evidence/manifest.json"),), "suspected"
)


def recorded(*recorders: Recorder) -> LibraryEvidence:
    return LibraryEvidence(
        flights={
            rank: parse_flight_recorder(one.document(), f"evidence/flight/rank{rank}.pickle")
            for rank, one in enumerate(recorders)
        }
    )


def skipped_by_rank_1() -> LibraryEvidence:
    return recorded(Recorder().many(4).call(state="started", at_s=5.0), Recorder().many(4))


def codes(*of: tuple[int | str | None, str]) -> LibraryEvidence:
    return LibraryEvidence(
        codes=tuple(LoggedCode(seat, found, "evidence/x") for seat, line in of for found in find_codes(line))
    )


def words(cause: Cause) -> str:
    return "\n".join(fact.fact for fact in cause.facts)


def test_a_hang_that_nothing_decided_is_the_recorders_to_tell() -> None:
    found = with_library(UNDECIDED, skipped_by_rank_1(), 2)
    assert (found.mechanism, found.ranks, found.confidence) == ("collective-skipped", (1,), "supported")
    assert found.facts[0].evidence == "evidence/flight/rank0.pickle"
    assert found.facts[-1] == UNDECIDED.facts[0], "what was known before stays"


@pytest.mark.parametrize("confidence", ["proven", "supported"])
def test_a_cause_that_was_found_gets_facts_and_keeps_its_culprit(confidence: Confidence) -> None:
    cause = replace(UNDECIDED, mechanism="stream-order", ranks=(0,), confidence=confidence)
    found = with_library(cause, skipped_by_rank_1(), 2)
    assert (found.mechanism, found.ranks, found.confidence) == ("stream-order", (0,), confidence)
    assert "rank 1 never entered" in words(found)


def test_recorders_that_show_nothing_open_say_so() -> None:
    found = with_library(UNDECIDED, recorded(Recorder().many(4), Recorder().many(4)), 2)
    assert found.ranks == () and "every collective that was entered is finished" in words(found)


def test_a_damaged_recorder_blames_nobody() -> None:
    alone = replace(recorded(Recorder().many(4).call(state="started")), unreadable=frozenset({1}))
    assert with_library(UNDECIDED, alone, 2).ranks == ()


def test_who_waited_is_not_to_blame_and_who_broke_is_suspected() -> None:
    waited = with_library(UNDECIDED, codes((0, EI0002.format(rank=1))), 2)
    assert waited.ranks == () and waited.mechanism == "unknown"
    assert "rank 0: EI0002 (notify wait timed out, for rank 1 of its communicator)" in words(waited)
    broke = with_library(UNDECIDED, codes((0, EI0002.format(rank=1)), (1, XID)), 2)
    assert (broke.mechanism, broke.ranks, broke.confidence) == ("rank-dead", (1,), "suspected")
    assert broke.facts[0].fact.startswith("rank 1: Xid 48"), "the fault comes first"


@pytest.mark.parametrize("of", [((0, XID), (1, XID)), ((None, XID),)])
def test_several_faults_and_a_nodes_name_nobody(of: tuple[tuple[int | None, str], ...]) -> None:
    found = with_library(UNDECIDED, codes(*of), 2)
    assert found.ranks == () and "Xid 48" in words(found)


@pytest.mark.parametrize("kind", ["slow", "none"])
def test_what_is_no_hang_is_left_alone(kind: Any) -> None:
    cause = replace(UNDECIDED, kind=kind)
    assert with_library(cause, skipped_by_rank_1(), 2) == cause


def test_open_operations_of_hccls_status_are_facts() -> None:
    word = StatusWord(1, "HcclAllreduce", "18", "7", "start", "evidence/hccl-status/rank1/x.json")
    library = LibraryEvidence(status=(word, replace(word, sequence="17", status="end")))
    found = with_library(UNDECIDED, library, 2)
    assert "HcclAllreduce 18 of group 7 as start" in words(found) and "17" not in words(found)


# From a trial's directory ------------------------------------------------------------------------------------


@pytest.fixture
def trial(tmp_path: Path) -> TrialStore:
    return RunStore.create(tmp_path, "a-run", MANIFEST).trial("t")


def put(trial: TrialStore, name: str, content: str | bytes) -> None:
    path = trial.evidence / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def leave(trial: TrialStore) -> None:
    """Evidence of ranks 0 and 1 (pids 4000 and 4001) as a capture on an accelerator leaves it."""
    for rank, one in enumerate((Recorder().many(4).call(state="started"), Recorder().many(4))):
        put(trial, f"flight/rank{rank}.pickle", pickle.dumps(one.document()))
    put(trial, "logs/rank0.txt", f"all well\n{EI0002.format(rank=1)}\n")
    put(
        trial,
        "logs/server.txt",
        "(Worker_TP1 pid=4001) CUDA error: device-side assert triggered\nEI9999: x\n",
    )
    put(trial, "plog/rank0/debug-plog-plog-4000_1.log", EI0002.format(rank=1))
    put(trial, "sample-1/device/kernel-log.txt", XID)
    row = {"seq": 18, "op_type": "HcclAllreduce", "pg_id": "7", "comm_ids": "all", "status": "start"}
    put(trial, "hccl-status/rank0/torch_hccl_status-0_a_0_2_4000_1.json", json.dumps({"last_comm_op": [row]}))
    put(trial, "hccl-status/rank1/torch_hccl_status-1_a_0_2_4001_1.json", '{"last_comm_op": [')


def test_what_a_trial_left_is_read_by_seat(trial: TrialStore) -> None:
    leave(trial)
    put(trial, "flight/rank2.pickle", b"\x80\x04damaged")
    found = read_library_evidence(
        trial.path, {4000: 0, 4001: 1}, {"client": "RuntimeError: error code is 507048"}
    )
    assert set(found.flights) == {0, 1} and found.unreadable == {2}
    assert {(one.seat, one.found.code) for one in found.codes} == {
        (0, "EI0002"), (1, "CUDA assert"), ("server", "EI9999"), (1, "Xid 48"), ("client", "507048"),
    }  # fmt: skip
    assert [(word.rank, word.sequence) for word in found.status] == [(0, "18")]
    assert all((trial.path / one.evidence).exists() or one.evidence == "history.json" for one in found.codes)


def test_torchs_watchdog_in_a_log_stands_in_for_a_recorder(trial: TrialStore) -> None:
    line = (
        "[rank1]:[E ProcessGroupHCCL.cpp:634] [PG ID 0 PG GUID 0(default_pg) Rank 1] Watchdog caught collective "
        "operation timeout: "
        "WorkHCCL(SeqNum=18, OpType=ALLREDUCE, NumelIn=32, NumelOut=32, Timeout(ms)=60000) ran for 60021 "
        "milliseconds before timing out.\n"
    )
    put(trial, "logs/rank1.txt", line)
    found = read_library_evidence(trial.path, {}, {})
    assert found.flights[1].by_log and [one.found.code for one in found.codes] == ["torch timeout"]


def test_a_trial_on_an_accelerator_has_the_libraries_words_in_its_diagnosis(trial: TrialStore) -> None:
    hung(trial)
    leave(trial)
    known = context()
    on_npu = replace(known, planned={**known.planned, "device": "npu"}, simulation=False)
    judge(trial, on_npu, trial.path / "no-reference.json")
    found = diagnosis(trial)
    jsonschema.validate(found, load_schema("diagnosis"))
    assert {(one["of"], one["code"], one["peer"]) for one in found["error_codes"]} >= {
        (0, "EI0002", 1), (1, "Xid 48", None),
    }  # fmt: skip
    facts = [fact["fact"] for fact in found["proof"]]
    assert any("rank 1 never entered all_reduce 5" in fact for fact in facts)
    assert any(fact.startswith("rank 1: Xid 48") for fact in facts)
    assert all(
        (trial.path / fact["evidence"]).exists() for fact in found["proof"] if "flight" in fact["evidence"]
    )


def test_a_trial_on_sim_is_judged_as_before(trial: TrialStore) -> None:
    hung(trial)
    judge(trial, context(), trial.path / "no-reference.json")
    before = diagnosis(trial)
    leave(trial)
    write_json(trial.path / HISTORY, {**history(), "captured": True})
    judge(trial, context(), trial.path / "no-reference.json")
    assert diagnosis(trial) == before and before["error_codes"] == []
