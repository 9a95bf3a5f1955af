"""What a file is and whose it is; damage of any kind never breaks the command."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from flight_builder import Recorder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offline_rig import CAPTURES, LEDGERS, ask, lacks

from harness.offline.recognise import recognise
from harness.offline.seating import claim_of_name, rank_of_name
from harness.offline.tables import read_table, stopped_by_refusal
from harness.stacks_parse import split_pyspy_text

FAULTHANDLER = (
    'Thread 0x00007f01 (most recent call first):\n  File "/v/x.py", line 3 in poll\n\n'
    'Current thread 0x00007f02 (most recent call first):\n  File "/v/site-packages/torch/distributed/'
    'distributed_c10d.py", line 9 in all_reduce\n  File "/app/train.py", line 4 in <module>\n'
)
DAMAGE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


TIMED_OUT = (
    "[rank1]:[E626 16:48:25.44 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds\n"
)


def ledger(rank: int) -> Any:
    """A recorded one."""
    return json.loads((LEDGERS / "sglang-dp2-raise-on-idle" / f"rank{rank}.ledger.json").read_text())


# --- what it is


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", (CAPTURES / "vllm-tp2-healthy" / "worker-tp0.json").read_bytes(), "stacks"),
        ("a.txt", b'Thread 7 (idle): "MainThread"\n    f (a.py:3)\n', "stacks"),
        ("a.log", FAULTHANDLER.encode(), "stacks"),
        ("a", json.dumps(Recorder(2).many(2).document()).encode(), "flight recorder"),
        ("a.json", json.dumps(json.dumps(Recorder(2).many(2).document())).encode(), "flight recorder"),
        ("a.txt", b"PID STAT CMD\n1 S x\n", "process table"),
        ("a.txt", (CAPTURES / "vllm-tp2-worker1-stopped" / "worker-tp1-blocking-dump.stderr.txt").read_bytes(),
         "refused dump"),
        ("a.jsonl", b'{"step": 1, "modes": ["decode"]}\n{"step": 2, "modes": ["decode"]}\n', "decisions"),
        ("a.jsonl", b'{"kind": "started", "utc": "x"}\n{"kind": "ended", "utc": "x"}\n', "unknown"),
        ("a.pickle", b"\x80\x02}q\x00.", "unknown"),
        ("a.pickle", b"\x80\x02cposix\nabort\nq\x00.", "pickle"),
        ("nccl_trace_rank_0", b"\x80\x02}q\x00(X\x07\x00\x00\x00ver", "damaged"),
        ("nccl_trace_rank_0", pickle.dumps(Recorder(2).many(2).document(), protocol=2), "flight recorder"),
        ("server.log", TIMED_OUT.encode(), "torch log"),
        ("a.json", b'{"kind": "hang", "mechanism": "unknown", "culprits": []}', "own record"),
        ("a.json", b"[{", "damaged"),
        ("a.json", b"[]", "damaged"),
        ("a.json", b"", "damaged"),
        ("a.log", b"", "unknown"),
        ("a.log", b"[rank0]: Traceback\n", "unknown"),
        ("a.md", b"# PIDs\n", "unknown"),
        ("a.bin", b"x\0y", "unknown"),
        ("a.ledger", b"HANGRIG\n\0\0\0", "ledger"),
    ],
)  # fmt: skip
def test_content_says_what_a_file_is(name: str, content: bytes, kind: str) -> None:
    assert recognise(name, content).kind == kind


def test_native_stacks_are_told_from_plain_ones() -> None:
    text = 'Thread 7 (idle): "MainThread"\n    clock_nanosleep (libc.so.6)\n    train (train.py:3)\n'
    assert recognise("a.txt", text.encode()).stacks[0].stacks.native


def test_variables_in_a_text_dump_are_no_frames() -> None:
    text = (
        'Thread 7 (idle): "MainThread"\n    train (train.py:3)\n        Arguments:\n            rank: 1\n'
        '            text: "some (words)"\n'
    )
    (found,) = recognise("a.txt", text.encode()).stacks
    assert [frame.name for frame in found.stacks.threads[0].frames] == ["train"]


def test_parts_of_a_text_keep_their_titles() -> None:
    text = "$ py-spy\nProcess 4: python a.py --rank 1\nPython v3\n\nProcess 5: x\n"
    assert [title for title, _ in split_pyspy_text(text)] == ["python a.py --rank 1", "x"]


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.json")
    (tmp_path / "ps.txt").write_text("PID STAT CMD\n7 S x\n")
    assert ask(tmp_path)[1] == 3


def test_a_damaged_ledger_is_said(tmp_path: Path) -> None:
    (tmp_path / "rank0.ledger").write_bytes(b"HANGRIG\n" + b"\xff" * 40)
    (tmp_path / "rank1.json").write_text(json.dumps({**ledger(1), "groups": 7}))
    document, status = ask(tmp_path)
    assert status == 3
    assert "rank0.ledger:" in lacks(document) and "rank1.json: a ledger that cannot be read" in lacks(
        document
    )


def test_numbers_that_are_no_ranks_are_not_counted_up_to(tmp_path: Path) -> None:
    dump = (CAPTURES / "vllm-tp2-healthy" / "worker-tp0.json").read_text()
    for name in ("scheduler_DP99999_TP99999.json", "rank99999.json"):
        (tmp_path / name).write_text(dump)
    Recorder(2).many(2).p2p("send 0->999999999", state="started").write(tmp_path / "trace_rank_77777.json")
    (tmp_path / "p.json").write_text(json.dumps({"ranks": [{"rank": 2**40, "pid": 7, "state": "T"}]}))
    document, status = ask(tmp_path)
    assert (document["culprits"], status) == ([], 3)


# --- whose it is


@pytest.mark.parametrize(
    ("path", "rank", "places", "role"),
    [
        ("rank3.json", 3, {}, "rank"),
        ("nccl_trace_rank_12", 12, {}, "rank"),
        ("scheduler_DP0_TP1.json", None, {"DP": 0, "TP": 1}, "rank"),
        ("worker-tp1.json", None, {"TP": 1}, "rank"),
        ("VLLM_Worker_TP0.txt", None, {"TP": 0}, "rank"),
        ("worker_2.txt", 2, {}, "rank"),
        ("node1/rank0/stack.json", 0, {}, "rank"),
        ("data_parallel_controller.json", None, {}, "controller"),
        ("api-server.json", None, {}, "server"),
        ("engine-core.json", None, {}, "engine_core"),
        ("pid-123.json", None, {}, ""),
        ("dumps/stack.json", None, {}, ""),
    ],
)
def test_names(path: str, rank: int | None, places: dict[str, int], role: str) -> None:
    found = claim_of_name(path)
    assert (found.rank, dict(found.places), found.role) == (rank, places, role)


def test_recorders_are_named_by_their_last_number() -> None:
    assert [rank_of_name(name) for name in ("fr_3.json", "t0/rank_2.json", "trace.json")] == [3, 2, None]


# --- tables


def test_tables_with_a_date_of_many_words() -> None:
    text = "PID STARTED STAT COMMAND\n7 Mon Nov 30 18:39:59 2026 Tl python train.py --rank 3\n"
    (row,) = read_table(text)
    assert (row.pid, row.state, row.title) == (7, "T", "python train.py --rank 3")


def test_only_a_stop_by_a_signal_counts_as_one() -> None:
    said = "Failed to suspend process\n 1: unexpected waitpid result PtraceEvent(Pid(9), {}, 128) to 9"
    assert stopped_by_refusal(said.replace("{}", "SIGSTOP")) == 9
    assert stopped_by_refusal(said.replace("{}", "SIGTRAP")) is None


# --- damage

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def spoiled(document: Any, chance: random.Random, value: Any) -> Any:
    """The same document with one value somewhere replaced by ``value``."""
    if isinstance(document, dict) and document and chance.random() < 0.85:
        key = chance.choice(list(document))
        return {**document, key: spoiled(document[key], chance, value)}
    if isinstance(document, list) and document and chance.random() < 0.85:
        at = chance.randrange(len(document))
        return [*document[:at], spoiled(document[at], chance, value), *document[at + 1 :]]
    return value


def whole() -> dict[str, Any]:
    recorder = Recorder(2).many(3).p2p("send 0->1", state="started").call(state="started")
    return {
        "fr/rank_0.json": recorder.document(),
        "fr/rank_1.json": Recorder(2).many(3).document(),
        "rank0.json": json.loads((CAPTURES / "vllm-tp2-worker1-stopped" / "worker-tp0.json").read_text()),
        "rank1.json": json.loads((CAPTURES / "vllm-tp2-worker1-stopped" / "worker-tp1.json").read_text()),
        "ledger/rank0.json": ledger(0),
        "ledger/rank1.json": ledger(1),
        "processes.json": {"schema": 1, "ranks": [{"rank": 1, "pid": 7, "state": "S", "name": "rank1"}]},
        "evidence/manifest.json": {
            "reason": "stalled",
            "times": {"captured_s": 1.0},
            "samples": [],
            "missing": [],
        },
        "rank0.jsonl": {"step": 1, "tokens": [1, 2], "collectives": {"tp": 4}, "dp": 0, "retracted": []},
    }


@DAMAGE
@given(seed=st.integers(0, 2**32), value=VALUES)
def test_a_wrong_value_anywhere_never_breaks_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, value: Any
) -> None:
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("spoiled")
    for name, document in whole().items():
        (folder / name).parent.mkdir(exist_ok=True)
        wrong = spoiled(document, chance, value) if chance.random() < 0.5 else document
        (folder / name).write_text(json.dumps(wrong))
    ask(folder)


@DAMAGE
@given(seed=st.integers(0, 2**32), junk=st.binary(max_size=40))
def test_files_cut_and_overwritten_never_break_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, junk: bytes
) -> None:
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("cut")
    for name, document in whole().items():
        (folder / name).parent.mkdir(exist_ok=True)
        content = json.dumps(document).encode()
        at = chance.randrange(len(content))
        kept = content[:at] + junk + (content[at + len(junk) :] if chance.random() < 0.5 else b"")
        (folder / name).write_bytes(kept)
    ask(folder)
