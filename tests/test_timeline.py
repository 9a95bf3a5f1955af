"""What the ranks did last: spans on lanes, the trace file that viewers open, and the picture of the last steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ledger_builder import Group, Rank, Stream
from run_fixture import ARMS, RunBuilder, stream_order_diagnosis

import reports
from harness.store import StoredTrial, TrialStore, read_run, write_json
from reports import timeline_chart, trace
from reports.model import Result, TrialResult
from reports.result import build
from reports.timeline import Lane, Timeline, timeline

TAKEN_S = (8.0, 10.0)
"""Since the trial's start. The rank's own clock said 100 and 102 then."""
HOSTILE = "<script>alert(1)</script>"


def rank(number: int, done: int, *, label: str = "embed") -> Rank:
    """Compute has done ``done`` of three operations of the steps 4 and 5; a collective is entered and not done."""
    stream = Stream(
        [("metadata_copy", 4), ("graph.replay decode.8", 4), (label, 5)],
        done,
        times={1: (97.0, 97.5), 2: (97.1, 99.0), 3: (97.2, 99.5)},
    )
    one = Rank(number, step=5, groups={"experts": Group((0, 1)).round("all_gather").enter("all_reduce")})
    one.streams["compute"] = stream
    one.decisions = [{"step": 4, "mode": "decode", "tokens": [3, 5]}, {"step": 5, "mode": "prefill"}]
    return one


def stored(
    tmp_path: Path, samples: Mapping[int, Mapping[int, Rank]], *, taken: bool = True, **diagnosis: Any
) -> tuple[StoredTrial, TrialResult, Result]:
    """A run with one hung trial whose samples hold those ledgers."""
    builder = RunBuilder(tmp_path)
    made: TrialStore = builder.trial(ARMS[1], 1, "hang", diagnosis={"last_progress_s": 7.0, **diagnosis})
    for index, ranks in samples.items():
        for number, one in ranks.items():
            path = made.evidence / f"sample-{index}" / "ledger" / f"rank{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, one.snapshot(100.0 + 2 * index).to_json())
    rows = [{"index": index, "taken_s": TAKEN_S[index]} for index in samples] if taken else []
    write_json(made.evidence / "manifest.json", {"reason": "", "samples": rows, "missing": []})
    run = read_run(builder.finish())
    result = build(run)
    return run.trials[0], result.trials[0], result


def lane(line: Timeline, seat: int, name: str) -> Lane:
    return next(one for one in line.lanes if (one.seat, one.name) == (seat, name))


def test_an_operation_begins_when_it_is_enqueued_or_when_the_one_before_is_done(tmp_path: Path) -> None:
    trial, result, _ = stored(tmp_path, {0: {0: rank(0, 2)}})
    line = timeline(trial, result)
    assert line is not None
    spans = lane(line, 0, "compute").spans
    assert [(span.name, span.begin_s, span.end_s) for span in spans] == [
        ("metadata_copy", pytest.approx(5.0), pytest.approx(5.5)),
        ("graph.replay decode.8", pytest.approx(5.5), pytest.approx(7.0)),
        ("embed", pytest.approx(7.0), None),
    ]
    assert spans[1].enqueued_s == pytest.approx(5.1)


def test_what_stands_behind_an_unfinished_operation_has_not_begun(tmp_path: Path) -> None:
    trial, result, _ = stored(tmp_path, {0: {0: rank(0, 1)}})
    line = timeline(trial, result)
    assert line is not None
    replay, embed = lane(line, 0, "compute").spans[1:]
    assert (replay.begin_s, replay.end_s) == (pytest.approx(5.5), None)
    assert (embed.begin_s, embed.end_s) == (None, None)


def test_a_later_sample_says_what_has_ended_meanwhile(tmp_path: Path) -> None:
    trial, result, _ = stored(tmp_path, {0: {0: rank(0, 1)}, 1: {0: rank(0, 3)}})
    line = timeline(trial, result)
    assert line is not None
    assert [span.end_s for span in lane(line, 0, "compute").spans] == pytest.approx([5.5, 7.0, 7.5])
    assert line.end_s == TAKEN_S[1]


def test_the_hosts_steps_carry_what_was_decided(tmp_path: Path) -> None:
    trial, result, _ = stored(tmp_path, {0: {0: rank(0, 2)}})
    line = timeline(trial, result)
    assert line is not None
    first, second = lane(line, 0, "steps").spans
    assert (first.name, first.details) == ("step 4 decode", {"tokens": [3, 5]})
    assert (first.begin_s, first.end_s) == (pytest.approx(5.0), pytest.approx(5.2))
    assert (second.name, second.end_s) == ("step 5 prefill", None)


def test_marks_are_the_moments_of_the_diagnosis_and_the_faults(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    made = builder.trial(ARMS[1], 1, "hang")
    path = made.evidence / "sample-0" / "ledger" / "rank0.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, rank(0, 1).snapshot(100.0).to_json())
    write_json(made.evidence / "manifest.json", {"samples": [{"index": 0, "taken_s": 8.0}]})
    acts = made.path / "faults" / "rank1.jsonl"
    acts.parent.mkdir()
    act = {"index": 0, "fault": "drop", "site": "graph.update", "step": 4, "at_s": 5.25, "values": {}}
    acts.write_text(json.dumps(act) + "\n")
    run = read_run(builder.finish())
    line = timeline(run.trials[0], build(run).trials[0])
    assert line is not None and line.stall_s == stream_order_diagnosis()["last_progress_s"]
    assert [(mark.kind, mark.at_s, mark.seat) for mark in line.marks] == [
        ("fault", 5.25, 1), ("stall", 5.9, None), ("suspected", 8.4, None), ("confirmed", 10.4, None),
    ]  # fmt: skip


def test_without_ledgers_or_their_times_there_is_no_timeline(tmp_path: Path) -> None:
    trial, result, _ = stored(tmp_path / "a", {})
    assert timeline(trial, result) is None
    trial, result, _ = stored(tmp_path / "b", {0: {0: rank(0, 1)}}, taken=False)
    assert timeline(trial, result) is None


# The trace file -------------------------------------------------------------------------------------------------

PHASES = {
    "M": {"name", "pid", "tid", "ts", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
"""What each event must have, by the Trace Event Format."""


def checked(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a document that keeps to the format; complete events of a thread do not overlap."""
    events = document["traceEvents"]
    free: dict[tuple[int, int], float] = {}
    for event in events:
        assert PHASES[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "X":
            at = (event["pid"], event["tid"])
            assert event["dur"] >= 0 and event["ts"] >= free.get(at, -math.inf) - 1e-3, event
            free[at] = event["ts"] + event["dur"]
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(starts)) == len(starts)
    assert sorted(starts) == sorted(event["id"] for event in events if event["ph"] == "f")
    return list(events)


def test_the_trace_has_a_lane_for_each_rank_and_stream(tmp_path: Path) -> None:
    trial, told, result = stored(tmp_path, {1: {0: rank(0, 2), 1: rank(1, 1, label=HOSTILE)}})
    line = timeline(trial, told)
    assert line is not None
    events = checked(document := json.loads(trace.render(line, told, result)))
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    assert {
        (0, "rank 0"),
        (1, "rank 1"),
        (1, "stream compute"),
        (0, "group experts"),
        (0, "host steps"),
    } <= named
    unfinished = [
        e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1 and e["cat"] == "stream,unfinished"
    ]
    assert unfinished == ["graph.replay decode.8 (unfinished)"]
    assert f"{HOSTILE} (queued)" in [e["name"] for e in events if e["ph"] == "i"]
    stall = next(e for e in events if e.get("cat") == "stall")
    assert (stall["ts"], stall["s"]) == (7_000_000, "g")
    assert document["otherData"]["simulation"] is True and "Simulation" in document["otherData"]["note"]


def test_one_collective_on_two_ranks_is_joined_by_an_arrow(tmp_path: Path) -> None:
    trial, told, result = stored(tmp_path, {0: {0: rank(0, 2), 1: rank(1, 1)}})
    line = timeline(trial, told)
    assert line is not None
    arrows = [e for e in checked(json.loads(trace.render(line, told, result))) if e["ph"] in "sf"]
    assert {e["name"] for e in arrows} == {"experts #1", "experts #2"}
    assert {e["pid"] for e in arrows} == {0, 1}


def test_every_captured_trial_gets_its_trace_and_the_page_its_pictures(tmp_path: Path) -> None:
    trial, _, _ = stored(tmp_path, {0: {0: rank(0, 2), 1: rank(1, 1)}})
    waits = {
        "schema": 1,
        "nodes": [
            {"id": "a", "kind": "host", "rank": 0, "name": "host", "label": HOSTILE},
            {"id": "b", "kind": "stream", "rank": 1, "name": "compute", "label": "x $y$ & z"},
        ],
        "arrows": [{"waits": "a", "on": "b", "why": "synchronises"}],
    }
    write_json(trial.path / "evidence" / "waits.json", waits)
    run = trial.path.parents[1]
    reports.write_all(run)
    checked(json.loads((trial.path / "trace.json").read_bytes()))
    page = (run / "report.html").read_text()
    assert "Who waits for whom" in page and "The last steps before the stall" in page
    assert (
        f"trials/{trial.id.replace('=', '%3D')}/trace.json" in page or f"trials/{trial.id}/trace.json" in page
    )
    assert "<script" not in page and "&lt;script&gt;" in page


# The picture ----------------------------------------------------------------------------------------------------


def test_the_picture_says_how_to_read_it_and_whom_it_leaves_out(tmp_path: Path) -> None:
    trial, told, _ = stored(tmp_path, {0: {number: rank(number, 2) for number in range(6)}})
    line = timeline(trial, told)
    assert line is not None
    chart = timeline_chart.chart(line, {5})
    assert chart is not None and "rank 5 * compute" in chart.svg and "rank 3 compute" not in chart.svg
    assert "2 more are in the trace file only" in chart.reading


def test_without_a_moment_of_stall_nothing_is_drawn(tmp_path: Path) -> None:
    trial, told, _ = stored(tmp_path, {0: {0: rank(0, 2)}}, last_progress_s=None)
    line = timeline(trial, told)
    assert line is not None and line.stall_s is None
    assert timeline_chart.chart(line, ()) is None
