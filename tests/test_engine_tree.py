"""The processes of a foreign engine: all of them found, each in its seat, all of them ended."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_dialect as fake
import pytest
from cluster_rig import DEADLINE_S, ROOT, until

from harness import process_control
from harness.process_control import ProcessId
from serving.targets import engine_process, engine_shm, engine_tree
from serving.targets.dialect import Command, Seating
from serving.targets.engine_faults import Faults
from serving.targets.engine_log import LogTail
from serving.targets.engine_process import StartError
from serving.targets.engine_tree import Seated, TreeProcess
from serving.targets.engine_witness import Witness

LAUNCHER = """
import sys, time
from pathlib import Path
from serving.targets import engine_process
from serving.targets.dialect import Command
guard = engine_process.start_guard(sys.argv[1])
engine_process.become_subreaper()
server = engine_process.EngineServer(Command(tuple(sys.argv[3:])), {}, Path(sys.argv[2]), sys.argv[1])
print(guard.pid, server.id.pid, flush=True)
for line in sys.stdin:
    deadline_s, grace_s = map(float, line.split())
    print([process.title for process in server.end(deadline_s, grace_s)], server.exit_words(), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[fake.FakeServer]:
    found = fake.FakeServer("tree-tests")
    yield found
    found.end()


def seating(title: str) -> Seating | None:
    return fake.FakeDialect().seating(title, fake.spec())


def status(seat: int | str, process: ProcessId, **fields: Any) -> dict[str, Any]:
    return {"seat": seat, "pid": process.pid, "start_time_ticks": process.start_time_ticks, **fields}


# Who sits where --------------------------------------------------------------------------------------------


def test_processes_are_found_and_seated_by_title(server: fake.FakeServer) -> None:
    tree = server.tree()
    assert tree[0].id == server.id
    found = engine_tree.seats(tree, server.id, (), seating)
    assert {seated.seat: seated.role for seated in found} == {
        "server": "server", 0: "rank", 1: "rank", "controller": "controller"
    }  # fmt: skip
    titles = {process.id: process.title for process in tree}
    for seated in found:
        if isinstance(seated.seat, int):
            assert titles[seated.id].startswith(f"fake::scheduler_DP{seated.seat}_TP{seated.seat} ")


def test_a_probe_knows_better_than_a_title(server: fake.FakeServer) -> None:
    tree = server.tree()
    by_title = {seated.seat: seated.id for seated in engine_tree.seats(tree, server.id, (), seating)}
    told = [
        status(5, by_title[0], role="rank", device="cpu"),
        status("engine_core", by_title["controller"]),
        status(1, ProcessId(by_title[1].pid, by_title[1].start_time_ticks - 1)),
    ]
    found = {seated.seat: seated for seated in engine_tree.seats(tree, server.id, told, seating)}
    assert found[5].id == by_title[0]
    assert found[5].status["device"] == "cpu"
    assert (found["engine_core"].role, found["engine_core"].id) == ("engine_core", by_title["controller"])
    # That process is another one than the status speaks of: its title counts, and nothing else.
    assert (found[1].id, dict(found[1].status)) == (by_title[1], {})
    assert set(found) == {5, 1, "engine_core", "server"}


def test_of_two_with_one_title_the_older_is_the_rank() -> None:
    def process(pid: int, ticks: int) -> TreeProcess:
        return TreeProcess(ProcessId(pid, ticks), 1, "S", "fake::scheduler_DP0_TP0 x")

    found = engine_tree.seats([process(9, 1), process(4, 2)], ProcessId(1, 1), (), seating)
    assert [(seated.seat, seated.id.pid) for seated in found] == [(0, 9)]


def test_status_files_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank0.probe.json").write_text('{"seat": 0}')
    (tmp_path / "rank1.probe.json").write_text('{"seat": ')
    (tmp_path / "rank2.probe.json").write_text("[]")
    (tmp_path / "rank3.json").write_text('{"seat": 3}')
    assert engine_tree.read_statuses(tmp_path) == [{"seat": 0}]
    assert engine_tree.read_statuses(tmp_path / "nowhere") == []


def test_processes_that_left_the_tree_are_found_by_their_mark() -> None:
    server = fake.FakeServer("tree-orphan", "--orphan")
    try:
        (orphan,) = [process for process in server.tree() if "--idle-for-ever" in process.title]
        ours = {process.id.pid for process in server.tree()} - {orphan.id.pid}
        assert orphan.parent not in ours
    finally:
        server.end()  # which asserts that nothing is left


# A launcher and its server ---------------------------------------------------------------------------------


class Launcher:
    """What a launcher does with a server, in a process of its own that can be killed."""

    def __init__(self, folder: Path, mark: str, *arguments: str) -> None:
        (port,) = engine_process.free_ports(1)
        self.mark = mark
        self.log = folder / "server.log"
        command = [sys.executable, str(fake.PROGRAM), "--port", str(port), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, mark, str(folder), *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": "secret"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.guard, self.server = map(int, self.answer().split())
        until(lambda: self.log.exists() and "ready to roll" in self.log.read_text(), "a server")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end_server(self, deadline_s: float, grace_s: float) -> str:
        assert self.process.stdin is not None
        print(deadline_s, grace_s, file=self.process.stdin, flush=True)
        return self.answer()

    def tree(self) -> list[TreeProcess]:
        return engine_tree.find(self.mark)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()
        left = engine_process.end_marked(self.mark, time.time(), time.monotonic() + DEADLINE_S)
        assert left == []


def test_a_server_that_is_asked_ends_by_itself(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "launcher-asked")
    try:
        assert launcher.end_server(20.0, 10.0) == "[] status 0"
        assert launcher.tree() == []
    finally:
        launcher.close()


def test_a_server_that_does_not_listen_is_killed_with_all_it_started(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "launcher-deaf", "--deaf", "--orphan")
    try:

        def whole() -> list[TreeProcess]:
            found = launcher.tree()
            return found if any("--idle-for-ever" in process.title for process in found) else []

        tree = until(whole, "the process that left the tree, under its last title")
        (stopped,) = [process for process in tree if "TP1" in process.title]
        assert process_control.send(stopped.id, signal.SIGSTOP)
        assert launcher.end_server(20.0, 0.2) == "[] signal SIGKILL"
        assert launcher.tree() == []
        zombies = [stat for process in tree if (stat := process_control.find(process.id)) is not None]
        assert zombies == []
    finally:
        launcher.close()


def test_a_killed_launcher_takes_its_server_along(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "launcher-killed", "--deaf", "--orphan")
    try:
        (stopped,) = [process for process in launcher.tree() if "TP0" in process.title]
        assert process_control.send(stopped.id, signal.SIGSTOP)
        launcher.process.kill()
        until(lambda: launcher.tree() == [], "the guard's work")
        until(lambda: process_control.identify(launcher.guard) is None, "the guard's end")
    finally:
        launcher.close()


def test_a_server_gets_an_environment_of_its_own(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "launcher-env")
    try:
        raw = Path(f"/proc/{launcher.server}/environ").read_bytes().split(b"\0")
        env = dict(entry.decode().split("=", 1) for entry in raw if b"=" in entry)
        assert env["SPT_NOENV"] == "1"
        assert env[engine_tree.MARK] == "launcher-env"
        assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
        assert not [name for name in env if name.startswith("RAY_") or name == "PYTHONPATH"]
        assert os.getsid(launcher.server) == launcher.server
    finally:
        launcher.close()


def test_what_may_be_shown_of_an_environment() -> None:
    env = {"HF_TOKEN": "x", "API_KEY": "y", "TOKENIZER": "z", "SGLANG_X": "1"}
    assert engine_process.shown(env) == {
        "API_KEY": "***",
        "HF_TOKEN": "***",
        "SGLANG_X": "1",
        "TOKENIZER": "z",
    }


def test_the_dialects_words_win_and_the_probe_comes_first() -> None:
    command = Command(("/opt/engine/bin/python",), {"PYTHONPATH": "/theirs", "A": "dialect"})
    env = engine_process.environment(command, {"PYTHONPATH": "/probe", "A": "ours"}, "m")
    assert (env["PYTHONPATH"], env["A"]) == ("/probe:/theirs", "dialect")
    assert env["PATH"].startswith("/opt/engine/bin:")


def test_a_program_that_is_not_there_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot start /no/such/python: No such file"):
        engine_process.EngineServer(Command(("/no/such/python",)), {}, tmp_path, "m")


def test_free_ports_follow_each_other_and_are_free() -> None:
    ports = engine_process.free_ports(5)
    assert ports == list(range(ports[0], ports[0] + 5))
    with pytest.raises(StartError, match="no 3 consecutive free ports between 20000 and"):
        engine_process.free_ports(3, tries=0)


def test_shared_memory_that_is_left_is_removed() -> None:
    def shared(path: Path) -> mmap.mmap:
        path.write_bytes(b"x" * 4096)
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 4096)

    began = time.time()
    mine, other = Path(f"/dev/shm/hangrig-test-{os.getpid()}"), Path(f"/dev/shm/hangrig-other-{os.getpid()}")
    other.write_bytes(b"x")
    try:
        mapped = shared(mine)
        found = engine_shm.of([os.getpid(), 2**22 + 1])
        assert mine in found
        assert other not in found
        assert engine_shm.remove([mine], time.time() + 60.0) == []  # older than whoever is ended
        assert engine_shm.remove([mine, Path("/etc/hostname")], began - 60.0) == [mine]
        assert not mine.exists()
        assert mine not in engine_shm.of([os.getpid()])
        mapped.close()
    finally:
        mine.unlink(missing_ok=True)
        other.unlink()


# What is seen from outside ---------------------------------------------------------------------------------


def test_the_log_is_read_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    tail = LogTail(log, troubles=("retracted",), harmless=("error_rate=0",))
    assert tail.read() == []
    lines: list[str] = []
    log.write_text("starting\nINFO error_rate=0.1\n[TP1] Scheduler watchdog timeout (10 s)\nValueErr")
    assert tail.read(lines.append) == ["[TP1] Scheduler watchdog timeout (10 s)"]
    with log.open("a") as file:
        file.write("or: no\nrequest r3 was Retracted\n\nOSError: [Errno 98] Address already in use\nhalf")
    assert tail.read(lines.append) == [
        "ValueError: no", "request r3 was Retracted", "OSError: [Errno 98] Address already in use"
    ]  # fmt: skip
    assert lines[0] == "starting"
    assert lines[-1] == "OSError: [Errno 98] Address already in use"
    assert tail.last(2) == ["OSError: [Errno 98] Address already in use", "half"]
    assert tail.port_taken


def seats_of(server: fake.FakeServer) -> list[Seated]:
    return engine_tree.seats(server.tree(), server.id, (), seating)


def test_deaths_are_told_in_order_with_how(tmp_path: Path) -> None:
    server = fake.FakeServer("witness-deaths", "--deaf")
    witness = Witness(LogTail(tmp_path / "none"))
    try:
        seats = seats_of(server)
        witness.watch(seats, None, fake.FakeDialect.health)
        for seat in (1, "controller"):
            (victim,) = [seated for seated in seats if seated.seat == seat]
            process_control.send(victim.id, signal.SIGKILL)
            until(lambda seat=seat: witness.deaths and witness.deaths[-1].seated.seat == seat, "a death")
        assert [death.seated.seat for death in witness.deaths] == [1, "controller"]
        # Nobody has asked how they ended: the kernel still knows.
        assert (
            witness.deaths[0].words
            == f"rank 1 (process {witness.deaths[0].seated.id.pid}) ended: signal SIGKILL"
        )
        assert witness.deaths[1].words.startswith("controller (process ")
    finally:
        witness.close()
        server.end()


def test_one_that_was_dead_before_is_a_death_too(server: fake.FakeServer, tmp_path: Path) -> None:
    witness = Witness(LogTail(tmp_path / "none"))
    witness.watch([Seated(3, "rank", ProcessId(2**22 + 1, 1))], None, fake.FakeDialect.health)
    assert [death.seated.seat for death in witness.deaths] == [3]
    witness.close()


def test_faults_are_due_by_tokens_and_happen_once(tmp_path: Path) -> None:
    server = fake.FakeServer("fault-tests")
    try:
        tables = [
            {"name": "stop", "role": "rank", "ranks": (1,), "after_tokens": 10},
            {"name": "block", "role": "controller", "ranks": (), "after_tokens": 5},
            {"name": "kill", "role": "controller", "ranks": (), "after_tokens": 20},
        ]
        seats = {seated.seat: seated for seated in seats_of(server)}
        faults = Faults(tables, lambda: list(seats.values()), tmp_path)
        faults.begin()
        faults.due(4)
        assert faults.records() == []
        faults.due(5)
        assert (tmp_path / "due-1").exists()
        faults.due(12)
        faults.due(13)
        until(lambda: state_of(seats[1]) == "T", "a stopped process")
        assert state_of(seats[0]) != "T"
        faults.due(25)
        process_control.wait_gone([seats["controller"].id], DEADLINE_S)
        found = [(record["index"], record["name"], record["seat"]) for record in faults.records()]
        assert found == [(1, "block", None), (0, "stop", 1), (2, "kill", "controller")]
        assert faults.records()[1]["what"] == f"SIGSTOP to process {seats[1].id.pid}"
        faults.begin()
        assert faults.records() == []
        assert not (tmp_path / "due-1").exists()
        faults.due(20)
        assert faults.records()[-1]["what"] == f"process {seats['controller'].id.pid} was gone already"
    finally:
        server.end()


def state_of(seated: Seated) -> str:
    stat = process_control.find(seated.id)
    return "gone" if stat is None else stat.state


def test_all_ranks_are_meant_where_none_is_named(tmp_path: Path) -> None:
    from serving.targets.engine_faults import hit

    table = {"name": "stop", "role": "rank", "ranks": (), "after_tokens": 1}
    ranks = [Seated(0, "rank", ProcessId(1, 1)), Seated(1, "rank", ProcessId(2, 1))]
    assert all(hit(table, rank) for rank in ranks)
    assert [hit({**table, "ranks": (1,)}, rank) for rank in ranks] == [False, True]
    assert not hit(table, Seated("server", "server", ProcessId(3, 1)))


def test_models(tmp_path: Path) -> None:
    from torch import equal

    from serving.model_config import load_config, preset
    from serving.targets.engine_model import ModelMissing, find_model, write_model
    from serving.weights import load_weights, random_weights

    written = write_model({"preset": None, "directory": None}, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (written.path, written.dummy) == (str(tmp_path / "model"), False)
    assert written.vocab_size == config["vocab_size"]
    own_weights = load_weights(load_config(tmp_path / "model"), tmp_path / "model")
    assert equal(own_weights["lm_head.weight"], random_weights(preset("small"), 0)["lm_head.weight"])
    assert find_model({"preset": "lite"}, tmp_path).dummy
    assert config["kv_lora_rank"] == 512
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"vocab_size": 77}')
    assert find_model({"directory": str(own)}, tmp_path).dummy
    (own / "model.safetensors").touch()
    assert not find_model({"directory": str(own)}, tmp_path).dummy
    assert find_model({"directory": str(own)}, tmp_path).vocab_size == 77
    named = find_model({"directory": "deepseek-ai/DeepSeek-V2-Lite"}, tmp_path)
    assert (named.path, named.dummy) == ("deepseek-ai/DeepSeek-V2-Lite", False)
    with pytest.raises(ModelMissing, match="/no/such/model is no directory"):
        find_model({"directory": "/no/such/model"}, tmp_path)
    (own / "config.json").write_text("{")
    with pytest.raises(ModelMissing, match=r"needs a readable config\.json"):
        find_model({"directory": str(own)}, tmp_path)
