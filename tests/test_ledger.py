"""The ledger: what was written is what is read, at every turn of its rings."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_rig import CHILD_DEADLINE_S, fill, make, read

from harness import ledger_layout as layout
from harness.ledger import (
    STREAMS,
    CollectiveRecord,
    LedgerError,
    Snapshot,
    process_start_time_ticks,
)
from harness.ledger_decisions import PENDING_LINES, DecisionFile, compact

# --- round trip


def test_header_names_the_process(tmp_path: Path) -> None:
    header = read(make(tmp_path)).header
    assert (header.version, header.rank, header.world, header.node, header.device) == (
        4,
        0,
        2,
        "node-a",
        "sim",
    )
    assert header.pid == os.getpid()
    assert header.start_time_ticks == process_start_time_ticks(os.getpid())
    assert header.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_streams_know_their_oldest_unfinished_operation(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.phase("decode", 12)
    before_ns = time.monotonic_ns()
    for label in ("a", "b", "c"):
        writer.enqueue("compute", label, "engine.py:10")
    writer.complete("compute", 1)
    state = read(writer).streams["compute"]
    assert (state.enqueued, state.completed) == (3, 1)
    assert state.oldest is not None
    assert (state.oldest.sequence, state.oldest.label, state.oldest.step) == (2, "b", 12)
    assert state.oldest.site == "engine.py:10" and state.oldest.completed_ns is None
    first = state.recent[0]
    assert first.completed_ns is not None
    # b was enqueued before a completed, so it has been the oldest since then.
    assert before_ns <= state.oldest.enqueued_ns < first.completed_ns == state.oldest_since_ns
    assert state.stamp_ns == first.completed_ns
    assert [record.label for record in state.recent] == ["a", "b", "c"]
    assert read(writer).streams["copy"].oldest is None


def test_one_completion_covers_all_before_it(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for _ in range(5):
        writer.enqueue("copy", "h2d", "x.py:1")
    writer.complete("copy", 4)
    writer.complete("copy", 2)
    state = read(writer).streams["copy"]
    assert state.completed == 4
    assert [record.completed_ns is not None for record in state.recent] == [True] * 4 + [False]


def test_an_operation_enqueued_on_an_idle_stream_is_oldest_since_its_enqueue(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.complete("comm", writer.enqueue("comm", "a", "x.py:1"))
    writer.enqueue("comm", "b", "x.py:2")
    state = read(writer).streams["comm"]
    assert state.oldest is not None and state.oldest_since_ns == state.oldest.enqueued_ns


def test_collectives(tmp_path: Path) -> None:
    writer = make(tmp_path)
    group = writer.group("attention", (0, 1, 5))
    assert writer.group("attention", (0, 1, 5)) == group
    assert writer.collective_enqueue(group, "all_gather", (2, 3), "int64") == 1
    assert writer.collective_enqueue(group, "all_reduce", (7,), "float32", count=3) == 4
    writer.collective_start(group, 1)
    writer.collective_complete(group, 1)
    writer.collective_start(group, 2)
    state = read(writer).groups["attention"]
    assert (state.ranks, state.enqueued, state.started, state.completed) == ((0, 1, 5), 4, 2, 1)
    assert [(c.sequence, c.operation, c.shape, c.dtype) for c in state.recent] == [
        (1, "all_gather", (2, 3), "int64"),
        (2, "all_reduce", (7,), "float32"),
        (3, "all_reduce", (7,), "float32"),
        (4, "all_reduce", (7,), "float32"),
    ]
    assert [c.started_ns is not None for c in state.recent] == [True, True, False, False]
    assert [c.completed_ns is not None for c in state.recent] == [True, False, False, False]


def test_a_collective_that_is_entered_at_once_has_its_start_in_the_same_write(tmp_path: Path) -> None:
    writer = make(tmp_path)
    group = writer.group("tp", (0, 1))
    first = writer.collective_enter(group, "all_reduce", (4, 64), "float32")
    writer.collective_complete(group, first)
    writer.collective_enter(group, "broadcast", (1,), "int64")
    state = read(writer).groups["tp"]
    assert (state.enqueued, state.started, state.completed) == (2, 2, 1)
    done, inside = state.recent
    assert (done.sequence, done.operation, done.shape, done.dtype) == (1, "all_reduce", (4, 64), "float32")
    assert done.started_ns == done.enqueued_ns and (done.completed_ns or 0) >= done.enqueued_ns
    assert inside.started_ns == inside.enqueued_ns and inside.completed_ns is None


def test_a_completed_replay_completes_its_captured_collectives(tmp_path: Path) -> None:
    writer = make(tmp_path)
    group = writer.group("tp", (0, 1))
    last = writer.collective_enqueue(group, "all_reduce", (7,), "float32", count=3)
    writer.collective_complete(group, last)
    state = read(writer).groups["tp"]
    assert (state.started, state.completed) == (3, 3)
    assert all(record.completed_ns is not None for record in state.recent)


def test_a_collective_that_ended_early_does_not_hide_the_one_before_it(tmp_path: Path) -> None:
    writer = make(tmp_path)
    group = writer.group("tp", (0, 1))
    for _ in range(4):
        writer.collective_enqueue(group, "all_reduce", (1,), "float32")
    for sequence in (1, 3, 4):
        writer.collective_complete(group, sequence)
    assert read(writer).groups["tp"].completed == 1
    writer.collective_complete(group, 2)
    assert read(writer).groups["tp"].completed == 4


def test_groups_that_cannot_be_registered(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.group("tp", (0, 1))
    with pytest.raises(LedgerError, match="name of its own"):
        writer.group("tp", (0, 2))
    with pytest.raises(LedgerError, match="no room for group 'wide' of 300 ranks"):
        writer.group("wide", range(300))
    for index in range(1, layout.GROUPS):
        writer.group(f"group {index}", (0,))
    with pytest.raises(LedgerError, match="holds 32 groups"):
        writer.group("one more", (0,))
    assert len(read(writer).groups) == layout.GROUPS


def test_host_phase_counts_changes_and_beats(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.phase("prefill", 1)
    first = read(writer).host
    writer.phase("prefill", 1)
    second = read(writer).host
    assert (second.phase, second.step, second.since_ns) == ("prefill", 1, first.since_ns)
    assert second.phase_changes == first.phase_changes and second.heartbeat_ns > first.heartbeat_ns
    writer.phase("decode", 2)
    third = read(writer).host
    assert (third.phase, third.step, third.phase_changes) == ("decode", 2, first.phase_changes + 1)
    assert third.since_ns > first.since_ns


def test_a_host_waits_until_the_operation_is_done_or_it_goes_on(tmp_path: Path) -> None:
    writer = make(tmp_path)
    assert read(writer).host.wait is None and read(writer).host_wait() is None
    writer.phase("launch", 1)
    for label in ("copy", "gemm"):
        writer.enqueue("compute", label, "f.py:1")
    writer.host_waits("compute", 2)
    writer.complete("compute", 1)
    wait = read(writer).host_wait()
    assert wait is not None and (wait.stream, wait.sequence) == ("compute", 2)
    assert Snapshot.from_json(json.dumps(read(writer).to_json())).host_wait() == wait
    writer.complete("compute", 2)
    assert read(writer).host_wait() is None
    writer.enqueue("copy", "tokens", "f.py:2")
    writer.host_waits("copy", 1)
    assert read(writer).host_wait() is not None
    writer.phase("process", 1)  # it gave up waiting
    assert read(writer).host_wait() is None


def test_the_header_names_the_host_thread(tmp_path: Path) -> None:
    assert read(make(tmp_path)).header.thread == threading.get_native_id()


# --- external events


def test_a_record_over_a_set_flag_is_overtaken(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.name_external(0, "layer 0")
    writer.external_recorded(0)
    writer.external_consumed([0])
    writer.external_recorded(0)
    assert read(writer).external[0].overtaken == 0
    writer.external_recorded(0)  # The third: the replay of the second has not completed.
    writer.external_recorded(0)
    state = read(writer).external[0]
    assert (state.name, state.records, state.waits) == ("layer 0", 4, 1)
    assert (state.overtaken, state.first_overtaken) == (2, 3)


def test_after_a_lost_record_a_consumed_flag_can_be_set_again(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.external_recorded(1)
    writer.external_recorded(1)  # Lost.
    for _ in range(3):
        writer.external_consumed([1])
        writer.external_recorded(1)
    state = read(writer).external[1]
    assert (state.records, state.waits, state.overtaken, state.first_overtaken) == (5, 3, 1, 2)


def test_external_events_keep_their_index(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.external_recorded(127)
    writer.external_consumed([5])
    external = read(writer).external
    assert len(external) == 128 and external[127].records == 1 and external[5].waits == 1


# --- decisions


def test_decisions_in_ring_and_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    writer = make(tmp_path, decisions_path=path)
    for step in range(100):
        writer.decision({"step": step, "mode": "decode", "tokens": [1, step]})
    snapshot = read(writer)
    assert [record["step"] for record in snapshot.decisions] == list(range(36, 100))
    assert (snapshot.decisions_total, snapshot.decisions_lost) == (100, 0)
    writer.stamp("compute")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(100))


@given(
    st.dictionaries(
        st.one_of(st.text(), st.integers(), st.none(), st.booleans(), st.tuples(st.integers())),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just(Path("x"))),
            lambda inner: st.one_of(st.lists(inner), st.tuples(inner), st.dictionaries(st.text(), inner)),
        ),
    )
)
def test_a_line_is_what_json_would_write(record: dict[Any, Any]) -> None:
    assert compact(record).decode() == json.dumps(record, separators=(",", ":"), default=str, skipkeys=True)


def test_a_long_decision_is_shortened_in_the_ring_only(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    writer = make(tmp_path, decisions_path=path)
    record = {"step": 1, "retracted": list(range(1000)), "mode": "prefill", "odd": Path("x")}
    writer.decision(record)
    assert read(writer).decisions == ({"truncated": True, "step": 1, "mode": "prefill", "odd": "x"},)
    assert json.loads(path.read_text())["retracted"] == list(range(1000))


def test_a_decisions_pipe_that_nobody_empties_loses_lines_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keep_open = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = make(tmp_path, decisions_path=path)
    for step in range(200):
        writer.decision({"step": step, "text": "x" * 700})
    snapshot = read(writer)
    assert snapshot.decisions_total == 200 and 0 < snapshot.decisions_lost < 200
    os.close(keep_open)


def test_a_full_disk_under_the_decisions_is_counted(tmp_path: Path) -> None:
    writer = make(tmp_path, decisions_path=Path("/dev/full"))
    writer.decision({"step": 1})
    writer.decision({"step": 2})
    writer.stamp("copy")
    writer.decision({"step": 3})
    assert read(writer).decisions_lost == 2


def test_a_line_that_waits_for_the_next_one_is_in_the_ring_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    writer = make(tmp_path, decisions_path=path)
    for step in range(PENDING_LINES - 1):
        writer.decision({"step": step})
        in_file = {json.loads(line)["step"] for line in path.read_text().splitlines()}
        assert in_file | {record["step"] for record in read(writer).decisions} == set(range(step + 1))
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(
        range(PENDING_LINES - 1)
    )


def test_a_file_system_that_blocks_another_thread_costs_the_oldest_lines_and_is_counted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank0.jsonl"
    file = DecisionFile(path)
    slots = layout.LAYOUT.decisions.slots
    with file._flushing:  # as a thread that does not come back from its write
        lost = [file.append(b"%d" % number) for number in range(slots + 5)]
    assert lost[slots - 1 :] == [0, 1, 2, 3, 4, 5]
    file.close()
    assert path.read_text().splitlines() == [str(number) for number in range(5, slots + 5)]


def test_lines_of_which_the_file_takes_a_part_are_counted_and_the_next_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = DecisionFile(path)
    line = b"x" * 1000
    size = fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    lines = size // len(line) + 2
    file.pending.extend([line] * lines)
    file.flush()
    taken = os.read(reader, 2 * size)
    whole = taken.count(b"\n")
    assert 0 < whole < lines
    file.append(b"y")
    file.flush()
    assert os.read(reader, size) == (b"" if taken.endswith(b"\n") else b"\n") + b"y\n"
    assert file.append(b"z") == lines - whole
    file.close()
    os.close(reader)


def test_after_close_a_late_stamp_is_harmless(tmp_path: Path) -> None:
    writer = make(tmp_path, decisions_path=tmp_path / "d.jsonl")
    writer.close()
    writer.stamp("copy")
    writer.decision({"step": 1})
    snapshot = read(writer)
    assert snapshot.streams["copy"].stamp_ns > 0 and snapshot.decisions_lost == 1


# --- rings


def test_more_outstanding_than_the_ring_holds(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for number in range(1, 301):
        writer.enqueue("compute", f"op {number}", "x.py:1")
    state = read(writer).streams["compute"]
    assert state.oldest is not None
    assert (state.oldest.sequence, state.oldest.label, state.oldest.site, state.oldest.step) == (
        1,
        "?",
        "?",
        -1,
    )
    assert [record.sequence for record in state.recent] == list(range(237, 301))
    writer.complete("compute", 44)
    state = read(writer).streams["compute"]
    assert state.oldest is not None and (state.oldest.sequence, state.oldest.label) == (45, "op 45")


@given(enqueued=st.integers(0, 700), completed=st.integers(0, 700))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_and_details_at_every_turn_of_the_ring(tmp_path: Path, enqueued: int, completed: int) -> None:
    writer = make(tmp_path)
    completed = min(enqueued, completed)
    for number in range(1, enqueued + 1):
        writer.enqueue("copy", f"op {number}", f"x.py:{number}")
        if number <= completed:
            writer.complete("copy", number)
    state = read(writer).streams["copy"]
    assert (state.enqueued, state.completed) == (enqueued, completed)
    assert [record.sequence for record in state.recent] == list(range(max(1, enqueued - 63), enqueued + 1))
    for record in state.recent:
        assert record.label == f"op {record.sequence}" and record.site == f"x.py:{record.sequence}"
        assert (record.completed_ns is not None) == (record.sequence <= completed)
    if enqueued == completed:
        assert state.oldest is None
    else:
        assert state.oldest is not None and state.oldest.sequence == completed + 1
        known = enqueued - completed <= 256
        assert state.oldest.label == (f"op {completed + 1}" if known else "?")


def test_collective_rings_turn(tmp_path: Path) -> None:
    writer = make(tmp_path)
    group = writer.group("tp", (0, 1))
    for number in range(1, 201):
        sequence = writer.collective_enqueue(group, "all_reduce", (number,), "float32")
        if number <= 180:
            writer.collective_start(group, sequence)
            writer.collective_complete(group, sequence)
    state = read(writer).groups["tp"]
    assert (state.enqueued, state.started, state.completed) == (200, 180, 180)
    assert [record.sequence for record in state.recent] == list(range(169, 201))
    assert all(record.shape == (record.sequence,) for record in state.recent)
    assert [record.completed_ns is not None for record in state.recent] == [True] * 12 + [False] * 20


# --- text and shapes


@given(text=st.text(max_size=200), shape=st.lists(st.integers(-(2**40), 2**40), max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_is_cut_between_characters(tmp_path: Path, text: str, shape: list[int]) -> None:
    writer = make(tmp_path)
    writer.phase(text, 1)
    writer.enqueue("update", text, text)
    writer.name_external(0, text)
    writer.collective_enqueue(writer.group(text, (0,)), text, shape, text)
    snapshot = read(writer)
    operation = snapshot.streams["update"].oldest
    (group,) = snapshot.groups.values()
    assert operation is not None
    for found, width, tail in (
        (snapshot.host.phase, 32, False),
        (operation.label, 64, False),
        (operation.site, 96, True),
        (snapshot.external[0].name if snapshot.external else "", 48, False),
        (group.name, 48, False),
        (group.recent[0].operation, 32, False),
        (group.recent[0].dtype, 16, False),
    ):
        assert text.endswith(found) if tail else text.startswith(found)
        assert len(found.encode()) <= width
        # No more is cut than one character, of at most four bytes, forces.
        assert found == text or len(found.encode()) > width - 4
    assert group.recent[0].shape == tuple(shape[:8])


@given(name=st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_labels_that_are_no_proper_text_do_not_raise(tmp_path: Path, name: str) -> None:
    writer = make(tmp_path)
    writer.enqueue("compute", name, name)
    assert read(writer).streams["compute"].enqueued == 1


# --- watermark and JSON


def test_watermark_moves_with_progress_and_only_with_it(tmp_path: Path) -> None:
    writer = make(tmp_path)
    fill(writer)
    group = writer.group("tp", (0, 1))
    mark = read(writer).watermark()
    writer.heartbeat()
    writer.phase("decode", 5)
    for stream in STREAMS:
        writer.stamp(stream)
    assert read(writer).watermark() == mark
    seen = {mark}
    for move in (
        lambda: writer.phase("idle", 5),
        lambda: writer.phase("idle", 6),
        lambda: writer.enqueue("update", "u", "x.py:1"),
        lambda: writer.complete("update", 6),
        lambda: writer.external_recorded(3),
        lambda: writer.external_consumed([3]),
        lambda: writer.collective_enqueue(group, "all_reduce", (1,), "float32"),
        lambda: writer.collective_start(group, 11),
        lambda: writer.collective_complete(group, 11),
        lambda: writer.decision({"step": 6}),
    ):
        move()
        mark = read(writer).watermark()
        assert mark not in seen
        seen.add(mark)


def test_snapshot_survives_json(tmp_path: Path) -> None:
    writer = make(tmp_path)
    fill(writer)
    snapshot = read(writer)
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert Snapshot.from_json(json.dumps(snapshot.to_json())) == snapshot
    assert snapshot.to_json()["schema"] == 1
    assert isinstance(snapshot.groups["tp"].recent[0], CollectiveRecord)


def test_a_foreign_json_is_refused(tmp_path: Path) -> None:
    writer = make(tmp_path)
    fill(writer)
    good = read(writer).to_json()
    for bad in (
        "[1]",
        "{",
        {"schema": 1},
        {**good, "schema": 9},
        {**good, "host": {"phase": "x"}},
        {**good, "streams": 3},
    ):
        with pytest.raises(LedgerError, match="snapshot: "):
            Snapshot.from_json(bad)


def test_collectives_of_one_group_from_two_threads(tmp_path: Path) -> None:
    writer = make(tmp_path)
    group = writer.group("tp", (0, 1))
    for _ in range(2000):
        writer.collective_enqueue(group, "all_reduce", (1,), "float32")

    def executing(first: int) -> None:
        for sequence in range(first, 2001, 2):
            writer.collective_start(group, sequence)
            writer.collective_complete(group, sequence)

    threads = [threading.Thread(target=executing, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CHILD_DEADLINE_S)
    state = read(writer).groups["tp"]
    assert (state.enqueued, state.started, state.completed) == (2000, 2000, 2000)
