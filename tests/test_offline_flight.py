"""Flight recorders of all ranks: real ones of gloo, then NCCL's form, one rule a test."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flight_builder import Recorder, write_all
from offline_rig import ask, brief, facts, lacks

RUN_S = 120
_PROGRAM = """
import datetime, os, sys, threading, time
import torch
import torch.distributed as dist

rank, folder, mode = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=3,
                        timeout=datetime.timedelta(seconds=100))
part = dist.new_group([0, 1])
tensor = torch.ones(4, 8)
for _ in range(3):
    dist.all_reduce(tensor)
if rank < 2:
    dist.broadcast(tensor, 0, group=part)

def rest():
    if mode == "skips" and rank == 1:
        return
    dist.barrier() if mode == "mixes" and rank == 1 else dist.all_reduce(tensor)

threading.Thread(target=rest, daemon=True).start()
deadline = time.monotonic() + 60
def dump():
    return torch._C._distributed_c10d._dump_fr_trace_json()
# Everybody has done what it will do when the counts say so.
import json
def settled():
    entries = json.loads(dump())["entries"]
    last = 3 if mode == "skips" and rank == 1 else 4
    numbers = [e["collective_seq_id"] for e in entries if e["process_group"][0] == "0"]
    # What is done is marked a moment later than its caller goes on.
    open_ = [e for e in entries if not e["retired"]]
    stuck = mode != "healthy" and last == 4
    return max(numbers, default=0) == last and len(open_) == (1 if stuck else 0)
while not settled() and time.monotonic() < deadline:
    time.sleep(0.05)
with open(f"{folder}/nccl_trace_rank_{rank}", "wb") as file:  # what torch writes itself at a timeout
    file.write(torch._C._distributed_c10d._dump_fr_trace())
text = dump()
with open(f"{folder}/pending_rank_{rank}", "wb") as file:
    file.write(text if isinstance(text, bytes) else text.encode())
os.rename(f"{folder}/pending_rank_{rank}", f"{folder}/trace_rank_{rank}.json")
# Who ends first breaks the others' connections.
while not all(os.path.exists(f"{folder}/trace_rank_{r}.json") for r in range(3)) and time.monotonic() < deadline:
    time.sleep(0.05)
os._exit(0)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Dumps of three ranks over gloo: ``recorded("skips")``."""
    made: dict[str, Path] = {}

    def of(mode: str) -> Path:
        if mode in made:
            return made[mode]
        folder = tmp_path_factory.mktemp(mode)
        program = folder / "program.py"
        program.write_text(_PROGRAM)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), str(folder), mode],
                env={**os.environ, "RANK": str(rank), "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(3)
        ]
        for process in ranks:
            process.wait(RUN_S)
        made[mode] = folder / "dumps"
        made[mode].mkdir()
        for rank in range(3):
            shutil.copy(folder / f"trace_rank_{rank}.json", made[mode])
            (folder / "pickled").mkdir(exist_ok=True)
            shutil.copy(folder / f"nccl_trace_rank_{rank}", folder / "pickled")
        return made[mode]

    return of


# --- real


def test_real_dumps_of_a_healthy_program_are_healthy(recorded: Any) -> None:
    document, status = ask(recorded("healthy"))
    assert (document["kind"], status) == ("none", 0)
    assert "group default_pg: every collective that was entered is finished" in facts(document)


def test_real_dumps_name_the_rank_that_never_came(recorded: Any) -> None:
    document, status = ask(recorded("skips"))
    assert (brief(document), status) == (("hang", "collective-skipped", [1], "supported"), 1)
    assert document["collective"] == {
        "group": "default_pg", "sequence": 4, "operation": "all_reduce", "waiting": [0, 2], "missing": [1],
        "mismatch": None,
    }  # fmt: skip
    assert "rank 1 never entered all_reduce 4 of group default_pg: its last one there is 3" in facts(document)


def test_real_dumps_show_both_sides_of_a_mismatch(recorded: Any) -> None:
    document, status = ask(recorded("mixes"))
    assert (brief(document)[:3], status) == (("hang", "collective-mismatch", [1]), 1)
    mismatch = document["collective"]["mismatch"]
    assert mismatch["what"] == "operation"
    assert [(side["ranks"], side["operation"]) for side in mismatch["sides"]] == [
        ([0, 2], "all_reduce"), ([1], "barrier"),
    ]  # fmt: skip


def test_real_dumps_without_one_of_them(recorded: Any, tmp_path: Path) -> None:
    for rank in (0, 2):
        shutil.copy(recorded("skips") / f"trace_rank_{rank}.json", tmp_path)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "unknown", [1], "suspected"), 1)
    assert "no dump from rank 1, a member of group default_pg" in facts(document)
    assert "the flight recorder of rank 1" in lacks(document)


# --- who is missing


def test_everything_finished_is_healthy_also_at_different_moments(tmp_path: Path) -> None:
    write_all(tmp_path, [Recorder(2).many(49), Recorder(2).many(60)])
    assert ask(tmp_path)[1] == 0


def test_the_rank_behind_its_peers_is_missing(tmp_path: Path) -> None:
    made = [Recorder(4).many(49) for _ in range(4)]
    for rank in (0, 1, 3):
        made[rank].call(state="started")
    write_all(tmp_path, made)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "collective-skipped", [2], "supported"), 1)
    assert (document["collective"]["sequence"], document["collective"]["waiting"]) == (50, [0, 1, 3])


def test_a_ring_that_begins_late_is_enough(tmp_path: Path) -> None:
    write_all(tmp_path, [Recorder(2).many(4000).call(state="started"), Recorder(2).many(4000)], keep=8)
    document, status = ask(tmp_path)
    assert (brief(document)[2], document["collective"]["sequence"], status) == ([1], 4001, 1)


def test_a_rank_that_waits_elsewhere_is_not_the_one(tmp_path: Path) -> None:
    """Rank 1 is missing in the outer group, since it waits in the inner one for rank 2."""
    groups = {"0": ("default_pg", range(3)), "7": ("inner", (1, 2))}
    made = [Recorder(3, groups).many(5) for _ in range(3)]
    made[0].call(state="started")
    made[1].call(group="7", state="started")
    write_all(tmp_path, made)
    document, _ = ask(tmp_path)
    assert brief(document)[2] == [2]


def test_a_member_without_a_dump_is_suspected_at_most(tmp_path: Path) -> None:
    made = [Recorder(4).many(9).call(state="started") for _ in range(3)]
    write_all(tmp_path, made)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "unknown", [3], "suspected"), 1)
    assert "no dump from rank 3" in facts(document)


def test_groups_of_one_name_that_share_no_member_are_two(tmp_path: Path) -> None:
    made = []
    for rank in range(4):
        members = (0, 1) if rank < 2 else (2, 3)
        made.append(Recorder(4, {"0": ("default_pg", range(4)), "5": ("tp", members)}).many(7, group="5"))
    made[2].call(group="5", state="started")
    write_all(tmp_path, made)
    document, _ = ask(tmp_path)
    assert (brief(document)[2], document["collective"]["waiting"]) == ([3], [2])


def test_a_rank_that_never_used_the_group_is_missing_in_it(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", range(2)), "9": ("moe", range(2))}
    made = [Recorder(2, groups).many(3) for _ in range(2)]
    made[0].call(group="9", state="started")
    write_all(tmp_path, made)
    document, _ = ask(tmp_path)
    assert (brief(document)[2], document["collective"]["group"]) == ([1], "moe")
    assert "it has entered none there" in facts(document)


# --- what differs


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"operation": "_all_gather_base"}, "operation"),
        ({"size": (4, 9)}, "size"),
        ({"dtype": "Half"}, "dtype"),
    ],
)
def test_a_mismatch_shows_both_sides_and_the_smaller_one_is_named(
    tmp_path: Path, odd: dict[str, Any], what: str
) -> None:
    made = [Recorder(3).many(9) for _ in range(3)]
    for rank, recorder in enumerate(made):
        recorder.call(**(odd if rank == 1 else {}), state="started")
    write_all(tmp_path, made)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "collective-mismatch", [1], "proven"), 1)
    mismatch = document["collective"]["mismatch"]
    assert (mismatch["what"], [side["ranks"] for side in mismatch["sides"]]) == (what, [[0, 2], [1]])


def test_other_shapes_of_as_many_elements_are_no_mismatch(tmp_path: Path) -> None:
    write_all(tmp_path, [Recorder(2).call(size=(4, 8)), Recorder(2).call(size=(32,))])
    assert ask(tmp_path)[1] == 0


def test_of_two_ranks_the_one_whose_calls_are_shifted_left_one_out(tmp_path: Path) -> None:
    made = [Recorder(2).many(9) for _ in range(2)]
    made[0].call(state="started").call("_all_gather_base", state="scheduled").call(
        "barrier", state="scheduled"
    )
    made[1].call("_all_gather_base", state="started").call("barrier", state="scheduled")
    write_all(tmp_path, made)
    document, _ = ask(tmp_path)
    assert brief(document) == ("hang", "collective-skipped", [1], "supported")
    assert "rank 1 brought to 10 what comes after all_reduce" in facts(document)


def test_of_two_ranks_the_one_that_leaves_its_own_pattern_is_named(tmp_path: Path) -> None:
    made = [Recorder(2) for _ in range(2)]
    for recorder in made:
        for _ in range(4):
            recorder.call("all_reduce").call("all_reduce").call("_all_gather_base")
    made[0].call("all_reduce", state="started")
    made[1].call("broadcast", state="started")
    write_all(tmp_path, made)
    assert brief(ask(tmp_path)[0])[1:3] == ("collective-mismatch", [1])


def test_two_groups_in_two_orders(tmp_path: Path) -> None:
    groups = {"0": ("a", (0, 1)), "1": ("b", (0, 1))}
    made = [Recorder(2, groups).many(3, group="0").many(3, group="1") for _ in range(2)]
    made[0].call(group="0", state="started")
    made[1].call(group="1", state="started")
    write_all(tmp_path, made)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "collective-order", [0, 1], "supported"), 1)


# --- nobody is missing


def test_all_inside_cannot_be_told_from_one_moment_of_a_healthy_program(tmp_path: Path) -> None:
    write_all(tmp_path, [Recorder(2).many(9).call(state="started") for _ in range(2)])
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "unknown", [], "suspected"), 3)
    assert "nobody is missing" in facts(document)
    assert "py-spy dump --json" in lacks(document)


def test_all_inside_for_long_is_a_hang_of_which_nobody_can_be_named(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", range(2)), "1": ("heartbeat", range(2))}
    made = [Recorder(2, groups).many(9).call(state="started") for _ in range(2)]
    for recorder in made:
        recorder.call(group="1", at_s=45.0)
    write_all(tmp_path, made)
    document, status = ask(tmp_path)
    assert (brief(document)[2], status) == ([], 1)
    assert document["operation"]["pending_s"] == pytest.approx(45.0, abs=0.1)


def test_all_inside_in_two_samples_is_a_hang(tmp_path: Path) -> None:
    for folder in ("t0", "t1"):
        write_all(tmp_path / folder, [Recorder(2).many(9).call(state="started") for _ in range(2)])
    assert ask(tmp_path)[1] == 1


def test_the_device_that_does_not_come_to_it_is_suspected(tmp_path: Path) -> None:
    write_all(tmp_path, [Recorder(2).many(9).call(state=state) for state in ("started", "scheduled")])
    document, _ = ask(tmp_path)
    assert brief(document) == ("hang", "unknown", [1], "suspected")
    assert "its device has not started it" in facts(document)


# --- point to point


def test_a_send_without_its_receive(tmp_path: Path) -> None:
    made = [Recorder(3).many(2) for _ in range(3)]
    made[0].p2p("send 0->2", state="started")
    write_all(tmp_path, made)
    document, status = ask(tmp_path)
    assert (brief(document)[2], document["collective"]["missing"], status) == ([2], [2], 1)
    assert "rank 2 has no recv of that number" in facts(document)


def test_a_send_and_its_receive_are_no_finding(tmp_path: Path) -> None:
    made = [Recorder(2).many(2) for _ in range(2)]
    made[0].p2p("send 0->1", state="started")
    made[1].p2p("recv 1<-0", state="started")
    write_all(tmp_path, made)
    assert ask(tmp_path)[1] == 0


# --- with stacks


def stack(*frames: tuple[str, str], active: bool = False, pid: int = 40) -> str:
    made = [{"name": name, "filename": file, "line": 12} for name, file in frames]
    return json.dumps(
        [{"pid": pid, "thread_name": "MainThread", "os_thread_id": pid, "active": active, "owns_gil": False,
          "frames": made}]
    )  # fmt: skip


ALL_REDUCE = (
    ("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py"),
    ("step", "/app/train.py"),
)


def test_the_stack_of_the_missing_rank_says_where_it_stands(tmp_path: Path) -> None:
    made = [Recorder(2).many(9) for _ in range(2)]
    made[0].call(state="started")
    write_all(tmp_path, made)
    (tmp_path / "rank0.json").write_text(stack(*ALL_REDUCE, pid=40))
    (tmp_path / "rank1.json").write_text(
        stack(("save", "/app/checkpoint.py"), ("step", "/app/train.py"), pid=41)
    )
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "host-blocked", [1], "supported"), 1)
    assert document["operation"]["site"] == "/app/checkpoint.py:12"
    assert document["culprits"][0]["pid"] == 41
    assert "rank 1 (pid 41): stands in save" in facts(document)
    assert document["collective"]["group"] == "default_pg"


def test_recorders_give_a_stopped_process_its_collective(tmp_path: Path) -> None:
    made = [Recorder(2).many(9) for _ in range(2)]
    made[0].call(state="started")
    write_all(tmp_path, made)
    (tmp_path / "rank1.json").write_text(stack(("save", "/app/checkpoint.py"), pid=41))
    (tmp_path / "ps.txt").write_text("PID STAT CMD\n41 T python train.py\n")
    document, _ = ask(tmp_path)
    assert brief(document)[:3] == ("stopped", "rank-stopped", [1])
    assert (document["collective"]["sequence"], document["collective"]["group"]) == (10, "default_pg")


# --- form


def test_a_pickle_is_never_loaded_and_said_how_to_convert(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "loaded",))

    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "nccl_trace_rank_0").write_bytes(pickle.dumps(Trap(), protocol=2))
    document, status = ask(tmp_path / "dumps")
    assert (document["culprits"], status) == ([], 3)
    assert "a pickle of more than plain values, which is not loaded" in lacks(document)
    assert "Convert it" in lacks(document) and "_dump_nccl_trace_json" in lacks(document)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("mode", ["healthy", "skips", "mixes"])
def test_what_torch_pickled_says_the_same_as_its_json(recorded: Any, mode: str) -> None:
    dumps = recorded(mode)
    document, status = ask(dumps)
    pickled, same = ask(dumps.parent / "pickled")
    assert (brief(pickled), same) == (brief(document), status)
    assert pickled["collective"] == document["collective"]
    # Only the pickle has the callers' lines.
    assert mode == "healthy" or "called at" in facts(pickled)


@pytest.mark.parametrize("cut", [True, False])
def test_a_rank_whose_dump_is_damaged_is_not_blamed_for_giving_none(tmp_path: Path, cut: bool) -> None:
    made = [Recorder(2).many(5) for _ in range(2)]
    made[0].call(state="started").write(tmp_path / "rank_0.json")
    if cut:
        (tmp_path / "rank_1.json").write_text(json.dumps(made[1].document())[:900])
    document, status = ask(tmp_path)
    blamed = [] if cut else [1]
    assert ([culprit["rank"] for culprit in document["culprits"]], status) == (blamed, 3 if cut else 1)
    assert ("no dump from rank 1 that can be read" in facts(document)) is cut
    assert ("rank_1.json: damaged or cut short" in lacks(document)) is cut
    assert "diagnose it again" in document["next"][0]


def test_a_converted_pickle_has_the_callers_line(tmp_path: Path) -> None:
    made = [Recorder(2).many(2) for _ in range(2)]
    made[0].call(state="started")
    frames = [{"name": n, "filename": f, "line": 7} for n, f in ALL_REDUCE]
    document = made[0].document()
    for entry in document["entries"]:
        entry["frames"] = frames
        entry["time_discovered_completed_ns"] = entry["time_discovered_completed_ns"] or None
    (tmp_path / "rank_0.json").write_text(json.dumps(document))
    made[1].write(tmp_path / "rank_1.json")
    assert "called at /app/train.py:7" in facts(ask(tmp_path)[0])


@pytest.mark.parametrize(
    "names",
    [
        ("hccl_trace_rank_0", "hccl_trace_rank_1"),
        ("node/rank0/fr.json", "node/rank1/fr.json"),
        ("0.json", "1.json"),
    ],
)
def test_the_rank_is_in_the_name(tmp_path: Path, names: tuple[str, str]) -> None:
    made = [Recorder(2).many(3) for _ in range(2)]
    made[1].call(state="started")
    for recorder, name in zip(made, names, strict=True):
        recorder.write(tmp_path / name)
    assert brief(ask(tmp_path)[0])[2] == [0]


def test_a_recorder_of_nobody_is_said(tmp_path: Path) -> None:
    Recorder(2).many(3).write(tmp_path / "trace.json")
    document, status = ask(tmp_path)
    assert status == 3
    assert "give the file a name with its rank" in lacks(document)
