"""Clusters, ranks and agents together, for real: what hangs is captured, what was started is ended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cluster_rig as rig
import pytest

from harness import process_control
from harness.agents import Agents
from harness.cluster import ClusterError, ClusterOptions, ExistingCluster, LocalCluster
from harness.process_control import ProcessId
from harness.rank_environment import Patience
from harness.rank_pool import PoolOptions, RankPool
from harness.target import RankProcess

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Rig:
    cluster: LocalCluster
    agents: Agents
    pool: RankPool

    def begin(self, identity: str, folder: Path, steps: int, then: str) -> Path:
        """Starts a trial on all ranks; returns its evidence directory."""
        ranks = self.pool.processes
        found = rig.trial(identity, ranks, folder)
        self.agents.begin_trial(found)
        arguments = [(str(rig.ledger(folder, identity, rank.rank)), steps, then) for rank in ranks]
        self.pool.call("run", arguments)
        return found.evidence

    def stepped(self, folder: Path, identity: str) -> None:
        """Waits until every rank has made a ledger."""
        paths = [rig.ledger(folder, identity, rank.rank) for rank in self.pool.processes]
        rig.until(lambda: all(path.exists() for path in paths), "the ledgers")

    def renew(self) -> None:
        """New ranks in place of hung, stopped or dead ones."""
        self.agents.end_trial()
        self.agents.own(self.pool.replace([rank.rank for rank in self.pool.processes]))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    cluster, agents = (
        LocalCluster(ClusterOptions(workers=2, npus=2, gpus=1, env=rig.ENV)),
        Agents(rig.OPTIONS),
    )
    dumps = tmp_path_factory.mktemp("dumps")
    pool = RankPool(cluster, PoolOptions(dumps=dumps), tracer=agents.pid_on)
    agents.start(cluster, rig.DEADLINE_S)
    try:
        agents.own(pool.start(rig.RANK, [{"rank": rank, "world": 2} for rank in range(2)]))
        yield Rig(cluster, agents, pool)
    finally:
        pool.stop(10.0)
        agents.stop(10.0)
        left = cluster.stop(10.0)
    assert left == []
    assert cluster.processes() == []
    assert not cluster.folder.exists()


def identity(rank: RankProcess) -> ProcessId:
    return ProcessId(rank.pid, rank.start_time_ticks)


def test_ranks_are_processes_of_the_cluster_that_are_known_by_name(system: Rig) -> None:
    ranks = system.pool.processes
    assert [rank.rank for rank in ranks] == [0, 1]
    assert {identity(rank) for rank in ranks} <= set(system.cluster.processes())
    for rank in ranks:
        assert Path(rank.log_path or "").is_relative_to(system.cluster.folder)
        assert Path(rank.log_path or "").exists()
    agent = process_control.identify(system.agents.pid_on(ranks[0].node))
    assert agent is not None
    assert agent not in system.cluster.processes()


def test_ranks_dump_their_own_stacks_when_asked(system: Rig) -> None:
    for rank in system.pool.processes:
        path = Path(rank.faulthandler_path or "")
        assert path.read_text() == ""
        assert process_control.send(identity(rank), signal.SIGUSR2)
        rig.until(lambda path=path: "most recent call first" in path.read_text(), "a dump")


def test_a_trial_that_ends_is_healthy_and_leaves_no_evidence(system: Rig, tmp_path: Path) -> None:
    evidence = system.begin("healthy", tmp_path, 40, "return")
    done = rig.until(lambda: len(system.pool.poll()[0]) == 2 and system.pool.poll()[0], "two results")
    assert done == {0: "rank 0 made 40 steps", 1: "rank 1 made 40 steps"}
    for rank in done:
        system.agents.mark_done(rank)
    (view,) = system.agents.poll()
    assert view.problem is None
    assert view.status is not None
    assert view.status.state == "watching"
    assert view.status.trial == "healthy"
    system.agents.end_trial()
    assert list(evidence.iterdir()) == []


def test_an_exception_of_a_rank_comes_home(system: Rig, tmp_path: Path) -> None:
    system.begin("raising", tmp_path, 1, "raise")
    failed = rig.until(lambda: len(system.pool.poll()[1]) == 2 and system.pool.poll()[1], "two failures")
    assert "RuntimeError: rank 1 raised on purpose" in failed[1]
    system.agents.end_trial()


def test_hung_ranks_are_captured_with_the_stacks_of_all(system: Rig, tmp_path: Path) -> None:
    evidence = system.begin("hang", tmp_path, 40, "wait")
    status = rig.until_captured(system.agents).status
    assert status is not None
    assert (status.reason, status.ranks) == ("stalled", (0, 1))
    for rank in range(2):
        for sample in range(2):
            assert "stuck_here" in rig.host_functions(evidence, sample, rank)
        assert (evidence / "sample-1" / "stacks" / f"rank{rank}.native.json").exists()
        assert rig.load(evidence / "sample-1" / "ledger" / f"rank{rank}.json")["host"]["step"] == 40
    manifest = rig.load(evidence / "manifest.json")
    assert [sample["index"] for sample in manifest["samples"]] == [0, 1]
    times = manifest["times"]
    assert times["last_progress_s"] < times["suspected_s"] < times["confirmed_s"] < times["captured_s"]
    assert manifest["missing"] == []
    before = {identity(rank) for rank in system.pool.processes}
    system.renew()
    assert before.isdisjoint({identity(rank) for rank in system.pool.processes})
    assert not any(process_control.alive(process) for process in before)


def test_a_killed_rank_is_found_dead(system: Rig, tmp_path: Path) -> None:
    evidence = system.begin("killed", tmp_path, 100_000, "return")
    system.stepped(tmp_path, "killed")
    process_control.send(identity(system.pool.processes[1]), signal.SIGKILL)
    status = rig.until_captured(system.agents).status
    assert status is not None
    assert (status.reason, status.ranks) == ("dead", (1,))
    table = rig.load(evidence / "sample-1" / "processes.json")["ranks"]
    assert {entry["rank"]: entry["state"] in ("dead", "Z") for entry in table} == {0: False, 1: True}
    assert "run_rank" in rig.host_functions(evidence, 1, 0)
    missing = [lack["what"] for lack in rig.load(evidence / "manifest.json")["missing"]]
    assert any("rank 1" in what for what in missing)
    failed = rig.until(lambda: system.pool.poll()[1], "Ray's word for the dead rank")
    assert "Died" in failed[1]
    assert system.pool.alive() == {0: True, 1: False}
    system.renew()


def test_a_stopped_rank_is_told_apart_and_can_be_ended(system: Rig, tmp_path: Path) -> None:
    evidence = system.begin("stopped", tmp_path, 100_000, "return")
    system.stepped(tmp_path, "stopped")
    stopped = identity(system.pool.processes[0])
    process_control.send(stopped, signal.SIGSTOP)
    status = rig.until_captured(system.agents).status
    assert status is not None
    assert (status.reason, status.ranks) == ("stopped", (0,))
    assert "run_rank" in rig.host_functions(evidence, 1, 0)
    table = rig.load(evidence / "sample-1" / "processes.json")["ranks"]
    assert table[0]["state"] == "T"
    system.renew()
    assert not process_control.alive(stopped)


def test_the_driver_can_ask_for_a_capture(system: Rig, tmp_path: Path) -> None:
    evidence = system.begin("asked", tmp_path, 100_000, "return")
    system.stepped(tmp_path, "asked")
    system.agents.capture_now("the trial's time is over")
    rig.until_captured(system.agents)
    manifest = rig.load(evidence / "manifest.json")
    assert manifest["reason"] == "the trial's time is over"
    first, last = (rig.load(evidence / f"sample-{i}" / "ledger" / "rank0.json") for i in range(2))
    assert first["host"]["step"] < last["host"]["step"]
    system.renew()


def test_a_constructor_that_raises_ends_the_start_with_its_exception(system: Rig) -> None:
    owned: list[RankProcess] = []
    pool = RankPool(system.cluster, owner=owned.extend)
    kwargs = [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "broken": True}]
    before = set(system.cluster.processes())
    with pytest.raises(ClusterError, match="rank 1 was told to break"):
        pool.start(rig.RANK, kwargs)
    assert [rank.rank for rank in owned] == [0, 1]  # told before one was constructed
    assert pool.processes == ()
    gone = process_control.wait_gone(set(system.cluster.processes()) - before, 10.0)
    assert gone == []


def test_npus_are_reserved_and_shown_to_the_ranks(system: Rig) -> None:
    pool = RankPool(system.cluster, PoolOptions(device="npu", env={"HANGRIG_TEST": "here"}))
    ranks = pool.start(rig.RANK, [{"rank": rank, "world": 2} for rank in range(2)])
    try:
        assert sorted(rank.device for rank in ranks) == ["npu:0", "npu:1"]
        pool.call("environment", [("ASCEND_RT_VISIBLE_DEVICES",), ("HANGRIG_TEST",)])
        done = rig.until(lambda: len(pool.poll()[0]) == 2 and pool.poll()[0], "two answers")
        assert done == {0: ranks[0].device.removeprefix("npu:"), 1: "here"}
    finally:
        assert pool.stop(10.0) == []
    with pytest.raises(ClusterError, match="3 ranks on npu need 3 NPU, the cluster has 2"):
        pool.start(rig.RANK, [{"rank": rank, "world": 3} for rank in range(3)])


def test_ranks_share_a_gpu_and_see_all_of_them(system: Rig) -> None:
    """Ray hides nothing from them; each knows the number of its own."""
    pool = RankPool(system.cluster, PoolOptions(device="cuda", devices=0.5, see_all=True))
    ranks = pool.start(rig.RANK, [{"rank": rank, "world": 2} for rank in range(2)])
    try:
        assert [rank.device for rank in ranks] == ["cuda:0", "cuda:0"]
        pool.call("environment", [("CUDA_VISIBLE_DEVICES",), ("HANGRIG_HELD_DEVICES",)])
        done = rig.until(lambda: len(pool.poll()[0]) == 2 and pool.poll()[0], "two answers")
        assert done == {0: None, 1: "0"}
    finally:
        assert pool.stop(10.0) == []
    with pytest.raises(ClusterError, match="2 ranks on cuda need 2 GPU, the cluster has 1"):
        RankPool(system.cluster, PoolOptions(device="cuda")).start(rig.RANK, [{}, {}])


def test_ranks_on_npus_get_an_environment_for_their_libraries(system: Rig, tmp_path: Path) -> None:
    options = PoolOptions(
        device="npu",
        env={"HCCL_EXEC_TIMEOUT": "600"},
        dumps=tmp_path,
        patience=Patience(hang_s=60, trial_s=300),
        engine_env={"TORCH_HCCL_STATUS_SAVE_INTERVAL": "9"},
    )
    pool = RankPool(system.cluster, options)
    pool.start(rig.RANK, [{"rank": rank, "world": 2} for rank in range(2)])
    try:
        assert sorted(pool.environments) == [0, 1]
        found = pool.environments[0]
        assert found.left == {"HCCL_EXEC_TIMEOUT": "600", "TORCH_HCCL_STATUS_SAVE_INTERVAL": "9"}
        names = ("TORCH_HCCL_DEBUG_INFO_PIPE_FILE", "HCCL_EXEC_TIMEOUT")
        pool.call("environment", [(name,) for name in names])
        done = rig.until(lambda: len(pool.poll()[0]) == 2 and pool.poll()[0], "two answers")
        assert done == {0: found.set[names[0]], 1: "600"}
        assert Path(found.set[names[0]]).parent.is_dir(), "a library that finds no folder for its pipe aborts"
    finally:
        assert pool.stop(10.0) == []


def test_an_address_where_nothing_answers_is_refused() -> None:
    with pytest.raises(ClusterError, match="nothing answers at"):
        ExistingCluster("127.0.0.1:1").start(5.0)
    with pytest.raises(ClusterError, match="no Ray address"):
        ExistingCluster("somewhere").start(5.0)


def test_a_killed_driver_leaves_stacks_on_disk_and_no_process(system: Rig, tmp_path: Path) -> None:
    driver, found = rig.start_driver("one", tmp_path)
    assert len(rig.living(found["ranks"])) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait(rig.DEADLINE_S)
    agent = [ProcessId(*pair) for pair in found["agent"]]
    assert process_control.wait_gone(agent, rig.DEADLINE_S) == []
    assert rig.living(found["cluster"] + found["ranks"]) == []
    assert not Path(found["folder"]).exists()
    evidence = tmp_path / "killed" / "evidence"
    assert rig.load(evidence / "manifest.json")["reason"].startswith("driver gone")
    for rank in range(2):
        assert "stuck_here" in rig.host_functions(evidence, 1, rank)
    # Its neighbour on the same machine is none the worse.
    assert system.pool.alive() == {0: True, 1: True}
    assert system.agents.poll()[0].problem is None


def test_a_driver_that_gets_ctrl_c_ends_everything_itself(system: Rig, tmp_path: Path) -> None:
    driver, found = rig.start_driver("one", tmp_path)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=rig.DEADLINE_S)
    assert json.loads(output.splitlines()[-1]) == {"left": []}
    assert rig.living(found["cluster"] + found["ranks"] + found["agent"]) == []
    assert not Path(found["folder"]).exists()
    assert system.pool.alive() == {0: True, 1: True}


def test_two_nodes_bring_their_evidence_together(tmp_path: Path) -> None:
    driver, found = rig.start_driver("two", tmp_path)
    assert driver.wait(rig.DEADLINE_S) == 0
    assert found["problems"] == [None, None]
    assert found["placement"] == found["nodes"]
    evidence = tmp_path / "two" / "evidence"
    for sample in range(2):
        for rank in range(2):
            assert "stuck_here" in rig.host_functions(evidence, sample, rank)
        table = rig.load(evidence / f"sample-{sample}" / "processes.json")["ranks"]
        assert [entry["rank"] for entry in table] == [0, 1]
    assert (evidence / "sample-1" / "stacks" / "rank1.native.json").exists()
    manifest = rig.load(evidence / "manifest.json")
    assert list(manifest["nodes"]) == found["nodes"][1:]
    assert (found["left"], found["raylets"]) == ([], 2)
    assert rig.living(found["processes"]) == []
    assert found["spools"] == 2
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_dead_agent_is_reported(system: Rig, tmp_path: Path) -> None:
    """The last of this file: nobody guards the cluster after it but the fixture."""
    system.begin("unwatched", tmp_path, 100_000, "return")
    os.kill(system.agents.pid_on(system.pool.processes[0].node), signal.SIGKILL)
    view = rig.until(lambda: next((v for v in system.agents.poll() if v.problem), None), "a problem")
    assert "is gone" in (view.problem or "")
    assert system.agents.captured(system.agents.poll()) is False
