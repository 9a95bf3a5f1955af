"""The ledger between processes: a reader beside a hurried writer, and after the writer was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from ledger_rig import CHILD_DEADLINE_S, content, read

from harness.ledger import (
    LedgerReader,
    Snapshot,
)

WRITER = """
import sys, threading
from pathlib import Path
from harness.ledger import LedgerWriter
total = int(sys.argv[2])
w = LedgerWriter.create(Path(sys.argv[1]), rank=0, world=2, node="n", device="sim")
group = w.group("tp", (0, 1))
room = threading.Semaphore(200)
ready = threading.Semaphore(0)
def completing():
    for n in range(1, total + 1):
        ready.acquire()
        w.collective_start(group, n)
        w.complete("compute", n)
        w.stamp("compute")
        w.collective_complete(group, n)
        w.external_consumed([2])
        room.release()
thread = threading.Thread(target=completing, daemon=True)
thread.start()
print("ready", flush=True)
for n in range(1, total + 1):
    room.acquire()
    w.phase(f"phase {n}", n)
    w.external_recorded(2)
    w.enqueue("compute", f"op {n}", f"x.py:{n}")
    w.collective_enqueue(group, f"op {n}", (n,), "float32")
    w.decision({"n": n})
    ready.release()
thread.join()
"""


def check(snapshot: Snapshot) -> None:
    """Everything that ``WRITER`` makes true at every moment."""
    host = snapshot.host
    assert host.phase == (f"phase {host.step}" if host.step else "start")
    assert host.phase_changes == host.step + 1
    state = snapshot.streams["compute"]
    assert state.completed <= state.enqueued
    for record in (*state.recent, *((state.oldest,) if state.oldest else ())):
        assert (record.label, record.site, record.step) == (
            f"op {record.sequence}",
            f"x.py:{record.sequence}",
            record.sequence,
        )
        assert record.completed_ns is None or record.completed_ns > record.enqueued_ns
        assert (record.completed_ns is None) == (record.sequence > state.completed)
    assert [record.sequence for record in state.recent] == list(
        range(max(1, state.enqueued - 63), state.enqueued + 1)
    )
    if state.oldest is not None:
        assert state.oldest.sequence == state.completed + 1
    group = snapshot.groups["tp"]
    assert group.completed <= group.started <= group.enqueued
    assert all((c.operation, c.shape) == (f"op {c.sequence}", (c.sequence,)) for c in group.recent)
    for event in snapshot.external:
        assert event.waits <= event.records
    numbers = [record["n"] for record in snapshot.decisions]
    assert numbers == list(range(snapshot.decisions_total - len(numbers) + 1, snapshot.decisions_total + 1))


def start_writer(path: Path, total: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(total)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_a_reader_beside_a_hurried_writer_sees_no_wrong_number(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ledger"
    total = 40_000
    child = start_writer(path, total)
    reader = LedgerReader.open(path)
    marks: list[tuple[int, ...]] = []
    deadline_s = time.monotonic() + CHILD_DEADLINE_S
    while child.poll() is None:
        assert time.monotonic() < deadline_s
        snapshot = reader.snapshot()
        check(snapshot)
        mark = snapshot.watermark()
        if marks and len(marks[-1]) == len(mark):
            assert all(earlier <= later for earlier, later in zip(marks[-1], mark, strict=True))
        marks.append(mark)
    assert child.returncode == 0
    assert len(set(marks)) > 10
    last = reader.snapshot()
    check(last)
    assert last.streams["compute"].completed == last.groups["tp"].completed == last.decisions_total == total
    reader.close()


DECIDER = """
import sys
from pathlib import Path
from harness.ledger import LedgerWriter

path = Path(sys.argv[1])
w = LedgerWriter.create(path, rank=0, world=1, node="n", device="d", decisions_path=path.with_suffix(".jsonl"))
print("ready", flush=True)
n = 0
while True:
    n += 1
    w.decision({"step": n})
"""


def test_no_decision_is_lost_with_a_killed_process(tmp_path: Path) -> None:
    """Lines that wait for the file are in the ring, which is mapped."""
    path = tmp_path / "rank0.ledger"
    child = subprocess.Popen([sys.executable, "-c", DECIDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    reader = LedgerReader.open(path)
    deadline_s = time.monotonic() + CHILD_DEADLINE_S
    while reader.snapshot().decisions_total < 10_000:
        assert time.monotonic() < deadline_s
    child.kill()
    child.wait(CHILD_DEADLINE_S)
    snapshot = reader.snapshot()
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    in_file = [json.loads(line)["step"] for line in lines]
    assert in_file == list(range(1, len(in_file) + 1))
    in_ring = [record["step"] for record in snapshot.decisions]
    assert max(in_file[-1], in_ring[-1]) - snapshot.decisions_total in (0, 1)  # killed between file and ring
    assert sorted({*in_file, *in_ring}) == list(range(1, max(in_file[-1], in_ring[-1]) + 1))
    assert snapshot.decisions_lost == 0
    reader.close()


def test_the_ledger_outlives_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ledger"
    child = start_writer(path, 10_000_000)
    reader = LedgerReader.open(path)
    deadline_s = time.monotonic() + CHILD_DEADLINE_S
    while reader.snapshot().host.step < 1000:
        assert time.monotonic() < deadline_s
    child.send_signal(signal.SIGKILL)
    assert child.wait(CHILD_DEADLINE_S) == -signal.SIGKILL
    snapshot = reader.snapshot()
    check(snapshot)
    assert snapshot.host.step >= 1000
    assert reader.snapshot().watermark() == snapshot.watermark()
    assert content(read(path)) == content(snapshot)
    assert snapshot.header.pid == child.pid
    reader.close()
