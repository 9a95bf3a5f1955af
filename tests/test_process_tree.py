"""The processes of an engine: titles as the engines set them, and real trees of small processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from harness.process_control import ProcessId, identify, read_stat
from harness.process_titles import Titled, read_flags, seat_of_title
from harness.process_tree import Member, Row, Tree, arrange, read_tree

SGLANG = "python -m sglang.launch_server --model-path m --tp 2 --dp 2 --enable-dp-attention --device cpu"
VLLM = "python -m vllm.entrypoints.openai.api_server --model m --tensor-parallel-size 2"
SPAWNED = (
    "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5) --multiprocessing-fork"
)
TRACKER = "python -c from multiprocessing.resource_tracker import main;main(4)"


def row(pid: int, title: str, parent: int = 1, **more: object) -> Row:
    """A row of the process table; a title with blanks is a command line."""
    command = () if more.get("state") == "Z" else tuple(title.split(" "))
    fields: dict[str, object] = {"state": "S", "comm": title[:15], **more}
    return Row(ProcessId(pid, pid), parent, command=command, **fields)  # type: ignore[arg-type]


def seats(tree: Tree) -> dict[object, tuple[str, int]]:
    return {member.seat: (member.role, member.process.pid) for member in tree.members}


def member(tree: Tree, seat: object) -> Member:
    return next(member for member in tree.members if member.seat == seat)


# --- titles


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("sglang::scheduler", ("sglang", "rank", {})),
        ("sglang::scheduler_DP1_TP1", ("sglang", "rank", {"DP": 1, "TP": 1})),
        ("sglang::scheduler_DP0_PP1_TP12_EP3", ("sglang", "rank", {"DP": 0, "PP": 1, "TP": 12, "EP": 3})),
        (
            "sglang::scheduler_DP0_ATTN_CP1_MOE_DP2_TP3",
            ("sglang", "rank", {"DP": 0, "ATTN_CP": 1, "MOE_DP": 2, "TP": 3}),
        ),
        ("sglang::data_parallel_controller", ("sglang", "controller", {})),
        ("sglang::detokenizer", ("sglang", "detokenizer", {})),
        ("sglang::tokenizer_worker:4711", ("sglang", "server", {})),
        ("VLLM::EngineCore", ("vllm", "engine_core", {})),
        ("VLLM::EngineCore_DP1", ("vllm", "engine_core", {"DP": 1})),
        ("VLLM::Worker_TP1", ("vllm", "rank", {"TP": 1})),
        ("MINE::Worker_DP1_PP0_TP1_EP3", ("vllm", "rank", {"DP": 1, "PP": 0, "TP": 1, "EP": 3})),
        ("VLLM::APIServer_1", ("vllm", "server", {})),
        ("VLLM::DPCoordinator", ("vllm", "coordinator", {})),
    ],
)
def test_titles_of_both_engines(title: str, expected: tuple[str, str, dict[str, int]]) -> None:
    titled = seat_of_title(title)
    assert titled is not None
    assert (titled.engine, titled.role, titled.places) == expected


@pytest.mark.parametrize(
    "title",
    [
        SGLANG,
        VLLM,
        SPAWNED,
        "sglang::router",
        "sglang::scheduler_x",
        "a VLLM::Worker_TP1",
        "VLLM::Worker_TP1 --help",
    ],
)
def test_other_titles_say_nothing(title: str) -> None:
    assert seat_of_title(title) is None


def test_names_of_processes_that_are_no_ranks() -> None:
    names = [
        Titled("vllm", what, role, index, places).name
        for what, role, index, places in (
            ("EngineCore", "engine_core", None, {"DP": 0}),
            ("EngineCore", "engine_core", None, {"DP": 1}),
            ("APIServer", "server", 0, {}),
            ("APIServer", "server", 2, {}),
            ("DPCoordinator", "coordinator", None, {}),
        )
    ]
    assert names == ["engine_core", "engine_core-1", "api_server", "api_server-2", "coordinator"]


def test_flags_in_every_spelling() -> None:
    spellings = ("--tp 2", "--tp=2", "--tensor-parallel-size 2", "--tensor_parallel_size=2", "--tp-size 2")
    assert [read_flags("sglang", text.split())["tp"] for text in spellings] == ["2"] * 5
    assert read_flags("vllm", ["-tp", "4"])["tp"] == "4"
    assert read_flags("vllm", ["--config", "a.yaml", "-tp", "4"]) == {}


# --- seats


def test_sglang_with_dp_attention() -> None:
    tree = arrange(
        [
            row(10, SGLANG),
            row(11, TRACKER, 10),
            row(12, "sglang::scheduler_DP0_TP0", 10),
            row(13, "sglang::scheduler_DP1_TP1", 10),
            row(14, "sglang::data_parallel_controller", 10),
            row(15, "sglang::detokenizer", 10),
        ]
    )
    assert tree.engine == "sglang"
    assert seats(tree) == {
        0: ("rank", 12),
        1: ("rank", 13),
        "controller": ("controller", 14),
        "detokenizer": ("detokenizer", 15),
        "server": ("server", 10),
    }
    assert [member.seat for member in tree.members] == [0, 1, "controller", "detokenizer", "server"]
    assert [helper.process.pid for helper in tree.helpers] == [11]
    assert (tree.expected_ranks, tree.missing_ranks(), tree.notes) == ((0, 1), (), ())
    assert [member(tree, rank).device for rank in (0, 1)] == ["cpu", "cpu"]


def test_sglang_replicas_follow_one_another() -> None:
    titles = [f"sglang::scheduler_DP{dp}_TP{tp}" for dp in (0, 1) for tp in (0, 1)]
    server = "python -m sglang.launch_server --tp 2 --dp 2"
    tree = arrange([row(10, server), *(row(20 + i, title, 10) for i, title in enumerate(titles))])
    assert seats(tree) == {
        0: ("rank", 20),
        1: ("rank", 21),
        2: ("rank", 22),
        3: ("rank", 23),
        "server": ("server", 10),
    }
    alone = arrange([row(20 + i, f"sglang::scheduler_DP{i}", 10) for i in (0, 1)])
    assert set(seats(alone)) == {0, 1}
    assert "give the pid of the sglang server" in alone.notes[0]


def test_sglang_pipeline_ranks_count_after_tensor_ranks() -> None:
    titles = [f"sglang::scheduler_PP{pp}_TP{tp}" for pp in (0, 1) for tp in (0, 1)]
    tree = arrange([row(20 + i, title) for i, title in enumerate(titles)])
    assert [member.rank for member in tree.members] == [0, 1, 2, 3]
    assert [member.process.pid for member in tree.members] == [20, 21, 22, 23]


def test_the_second_node_knows_its_ranks_by_the_server_s_flags() -> None:
    server = "python -m sglang.launch_server --tp 8 --pp 2 --nnodes 2 --node-rank 1"
    tree = arrange([row(10, server), *(row(20 + tp, f"sglang::scheduler_PP1_TP{tp}", 10) for tp in range(4))])
    assert [member.rank for member in tree.members if member.rank is not None] == [8, 9, 10, 11]
    assert (tree.expected_ranks, tree.missing_ranks()) == (None, ())
    assert tree.notes == ("the server spans 2 nodes, of which only this one is seen",)


def test_vllm_workers_cores_and_servers() -> None:
    tree = arrange(
        [
            row(9, "/bin/bash -c vllm serve m -dp 2 -tp 2"),
            row(10, "/venv/bin/python /venv/bin/vllm serve m -dp 2 -tp 2 --api-server-count 2", 9),
            row(11, "VLLM::APIServer_0", 10),
            row(12, "VLLM::APIServer_1", 10),
            row(13, "VLLM::DPCoordinator", 10),
            row(14, "VLLM::EngineCore_DP0", 10),
            row(15, "VLLM::EngineCore_DP1", 10),
            row(16, "VLLM::Worker_DP0_TP0", 14),
            row(17, "VLLM::Worker_DP0_TP1", 14),
            row(18, "VLLM::Worker_DP1_TP0", 15),
            row(19, "VLLM::Worker_DP1_TP1", 15),
        ]
    )
    assert tree.engine == "vllm"
    assert {seat: pid for seat, (_, pid) in seats(tree).items()} == {
        0: 16, 1: 17, 2: 18, 3: 19, "api_server": 11, "api_server-1": 12, "coordinator": 13,
        "engine_core": 14, "engine_core-1": 15, "server": 10,
    }  # fmt: skip
    assert [helper.process.pid for helper in tree.helpers] == [9]
    assert tree.expected_ranks == (0, 1, 2, 3)


def test_vllm_s_engine_core_is_the_rank_where_there_are_no_workers() -> None:
    tree = arrange([row(10, "python -m vllm.entrypoints.openai.api_server"), row(11, "VLLM::EngineCore", 10)])
    assert seats(tree) == {0: ("rank", 11), "server": ("server", 10)}
    several = arrange([row(11 + dp, f"VLLM::EngineCore_DP{dp}", 10) for dp in (0, 1)])
    assert set(seats(several)) == {0, 1}


def test_workers_of_ray_are_not_expected_here() -> None:
    tree = arrange([row(10, VLLM + " --distributed-executor-backend ray"), row(11, "VLLM::EngineCore", 10)])
    assert tree.expected_ranks is None


def test_a_rank_without_a_process_is_missing() -> None:
    tree = arrange([row(10, SGLANG), row(12, "sglang::scheduler_DP0_TP0", 10)])
    assert tree.missing_ranks() == (1,)
    starting = arrange([row(10, SGLANG), row(12, SPAWNED, 10)])
    assert starting.missing_ranks() == ()


def test_a_zombie_takes_the_only_place_that_is_free() -> None:
    rows = [row(10, SGLANG), row(12, "sglang::scheduler_DP0_TP0", 10)]
    tree = arrange([*rows, row(13, "sglang::scheduler_DP1_TP1", 10, state="Z")])
    assert seats(tree)[1] == ("rank", 13)
    assert tree.missing_ranks() == ()
    unknown = arrange([*rows, row(13, "python", 10, state="Z")])
    assert unknown.missing_ranks() == (1,)
    controller = arrange([*rows, row(14, "sglang::data_parallel_controller", 10, state="Z")])
    assert seats(controller)["controller"] == ("controller", 14)


def test_two_servers_at_once_are_told_apart_and_said() -> None:
    servers = [(10, 12), (20, 22)]
    rows = [r for server, rank in servers for r in (row(server, VLLM), row(rank, "VLLM::Worker_TP0", server))]
    tree = arrange(rows)
    assert seats(tree) == {
        0: ("rank", 12), "rank0-22": ("rank", 22), "server": ("server", 10), "server-1": ("server", 20),
    }  # fmt: skip
    assert "two processes are rank 0" in tree.notes[0]


def test_other_programs_are_known_by_torchrun_s_environment() -> None:
    tree = arrange(
        [
            row(10, "python -m torch.distributed.run train.py"),
            row(11, "python train.py", 10, environment={"RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"}),
            row(12, "python train.py", 10, environment={"RANK": "0", "CUDA_VISIBLE_DEVICES": "4,5"}),
        ]
    )
    assert tree.engine == "other"
    assert seats(tree) == {0: ("rank", 12), 1: ("rank", 11), "python-10": ("other", 10)}
    assert [member(tree, rank).device for rank in (0, 1)] == ["cuda:4", "cuda:5"]
    inherited = arrange([row(10 + i, "python x.py", environment={"RANK": "0"}) for i in (0, 1)])
    assert set(seats(inherited)) == {"python-10", "python-11"}


@pytest.mark.parametrize(
    ("environment", "nodes", "device"),
    [
        ({}, (), None),
        ({}, ("/dev/nvidia3",), "cuda:3"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "8,9"}, (), "npu:9"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "12"}, (), "npu:12"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("/dev/nvidia0", "/dev/nvidia1"), "cuda:1"),
        ({}, ("/dev/davinci0", "/dev/davinci1"), "npu:1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, (), None),
    ],
)
def test_devices(environment: dict[str, str], nodes: Sequence[str], device: str | None) -> None:
    tree = arrange(
        [
            row(11, "VLLM::Worker_TP0"),
            row(12, "VLLM::Worker_TP1", environment=environment, device_nodes=tuple(nodes)),
        ]
    )
    assert member(tree, 1).device == device


# --- real processes

PARENT = """
import os, subprocess, sys
children = [subprocess.Popen([title, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
            executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for title in sys.argv[1:]]
for child in children:
    child.stdout.readline()
gone = subprocess.Popen(["true"])
os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # stays a zombie
print(*(child.pid for child in children), gone.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def process_tree(*titles: str) -> Iterator[tuple[int, list[int]]]:
    """A parent with a child of each title and a zombie, all of which end when their input does."""
    command = [sys.executable, "-c", PARENT, *titles]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        yield parent.pid, [int(pid) for pid in parent.stdout.readline().split()]


def test_a_real_tree() -> None:
    with process_tree("sglang::scheduler_DP0_TP0", "sglang::scheduler_DP1_TP1") as (
        parent,
        (first, second, gone),
    ):
        tree = read_tree(parent)
        # Titles set by argv hold the arguments behind them, so these are not the engine's: the program is.
        assert tree.engine == "other"
        assert {member.process.pid for member in tree.members} == {parent, first, second, gone}
        assert all(member.process == identify(member.process.pid) for member in tree.members)
        zombie = read_stat(gone)
        assert zombie is not None and zombie.gone


def test_no_such_process_is_said() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ProcessLookupError, match=f"no process {ended.pid}"):
        read_tree(os.getpid(), ended.pid)
