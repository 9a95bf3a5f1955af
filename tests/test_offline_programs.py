"""``hangrig diagnose`` on ordinary programs of torch, dumped by py-spy: neither SGLang nor vLLM nor ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from offline_rig import ask, brief, facts

from harness.capture import find_py_spy

READY_S = 60
_PROGRAM = """
import os, sys, threading, time
import torch
import torch.distributed as dist

rank, folder, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(600)

def train():
    tensor = torch.ones(8)
    open(f"{folder}/ready{rank}", "w").close()
    if rank == 0 or mode == "collective":
        dist.all_reduce(tensor) if rank == 0 else dist.barrier()
    elif mode == "sleep":
        time.sleep(600)
    elif mode == "event":
        threading.Event().wait(600)
    elif mode == "loader":
        next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
    elif mode == "work":
        while True:
            sum(range(1000))

train()
"""


@contextmanager
def running(folder: Path, mode: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks that have come to where they stay."""
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(folder), mode],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        deadline_s = time.monotonic() + READY_S
        while not all((folder / f"ready{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline_s, "the ranks did not start"
            time.sleep(0.05)
        yield ranks
    finally:
        for process in ranks:
            os.killpg(process.pid, 9)
            process.wait()


def dump(process: subprocess.Popen[bytes], path: Path, *options: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = find_py_spy()
    assert found is not None
    command = [str(found), "dump", "--pid", str(process.pid), *options]
    done = subprocess.run(command, capture_output=True, check=False, timeout=30)
    path.write_bytes(done.stdout or done.stderr)


def settled(folder: Path, ranks: list[subprocess.Popen[bytes]], wanted: str) -> None:
    """Until both stand where they stay: a rank is ready a moment before."""
    deadline_s = time.monotonic() + READY_S
    while True:
        for rank, process in enumerate(ranks):
            dump(process, folder / f"look{rank}")
        both = [(folder / f"look{rank}").read_text() for rank in range(2)]
        if "all_reduce" in both[0] and wanted in both[1]:
            return
        assert time.monotonic() < deadline_s, both
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("mode", "frame", "said"),
    [
        ("sleep", "train (", "rank 1 (pid {pid}): stands in train"),
        ("event", "Event.wait", "rank 1 (pid {pid}): held up, waits for a lock or an event in train"),
        ("loader", "_try_get_data", "rank 1 (pid {pid}): waits for its data loader in train"),
    ],
)
def test_a_rank_that_stands_in_its_own_code_while_the_other_waits(
    tmp_path: Path, mode: str, frame: str, said: str
) -> None:
    with running(tmp_path, mode) as ranks:
        settled(tmp_path, ranks, frame)
        for sample in ("t0", "t1"):
            for rank, process in enumerate(ranks):
                options = ("--json",) if sample == "t0" else ()
                dump(process, tmp_path / "dumps" / sample / f"rank{rank}.txt", *options)
    document, status = ask(tmp_path / "dumps")
    assert (brief(document), status) == (("hang", "host-blocked", [1], "supported"), 1)
    assert said.format(pid=ranks[1].pid) in facts(document)
    assert "rank 0" in facts(document) and "in all_reduce, called by train" in facts(document)


def test_native_stacks_say_what_it_waits_for(tmp_path: Path) -> None:
    with running(tmp_path, "sleep") as ranks:
        settled(tmp_path, ranks, "train (")
        for rank, process in enumerate(ranks):
            dump(process, tmp_path / "dumps" / f"rank{rank}.txt", "--native")
    document, status = ask(tmp_path / "dumps")
    assert (brief(document), status) == (("hang", "host-blocked", [1], "suspected"), 1)
    assert "held up, sleeps in train" in facts(document)


def test_a_rank_that_works_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path, "work") as ranks:
        settled(tmp_path, ranks, "(active")
        for rank, process in enumerate(ranks):
            dump(process, tmp_path / "dumps" / f"rank{rank}.json", "--json")
    document, status = ask(tmp_path / "dumps")
    assert (document["kind"], status) == ("none", 0)
    assert "rank 1 at work; the others wait for it" in facts(document)


def test_ranks_in_different_collectives_in_both_samples(tmp_path: Path) -> None:
    with running(tmp_path, "collective") as ranks:
        settled(tmp_path, ranks, "barrier")
        for sample in ("first", "second"):
            for rank, process in enumerate(ranks):
                dump(process, tmp_path / "dumps" / sample / f"rank{rank}.json", "--json")
    document, status = ask(tmp_path / "dumps")
    assert (brief(document), status) == (("hang", "collective-skipped", [], "suspected"), 1)
    assert "rank 0 in all_reduce by train; rank 1 in barrier by train" in facts(document)
