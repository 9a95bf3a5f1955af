"""The agent alone, without Ray: its driver, its ranks and its commands are ordinary processes and files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import cluster_rig as rig
import pytest

from harness import agent_files, agent_launch, process_control
from harness.agent_files import AgentConfig, AgentTrial, Command, Status, WatchedRank
from harness.guarded import GuardedCluster
from harness.process_control import ProcessId
from harness.watchdog import WatchdogSettings


class Bench:
    """One agent, a process that stands for the driver, and some that stand for ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.evidence = folder / "evidence"
        self.evidence.mkdir()
        self.spool = folder / "spool"
        self.spool.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []
        self._counter = 0
        self.agent = ProcessId(0, 0)

    def launch(self, **changes: object) -> None:
        settings = {"driver": process_control.myself(), "lifetime_s": 120.0, "capture_s": 15.0, **changes}
        self.agent = agent_launch.launch(self.spool, AgentConfig.model_validate(settings), rig.DEADLINE_S)

    def process(self, *command: str, **env: str) -> ProcessId:
        started = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **env}, stdout=subprocess.DEVNULL
        )
        self._started.append(started)
        found = process_control.identify(started.pid)
        assert found is not None
        return found

    def sleeper(self, **env: str) -> ProcessId:
        return self.process("-c", "import threading; threading.Event().wait(200)", **env)

    def rank(self, number: int, steps: int, then: str, world: int = 1) -> WatchedRank:
        ledger = self.folder / f"rank{number}.ledger"
        env = {"PYTHONPATH": str(rig.ROOT)}
        process = self.process(
            rig.__file__, "rank", str(number), str(world), str(ledger), str(steps), then, **env
        )
        return WatchedRank(rank=number, process=process, ledger=ledger, faulthandler=Path(f"{ledger}.stacks"))

    def trial(self, *ranks: WatchedRank, settings: WatchdogSettings = rig.QUICK) -> AgentTrial:
        return AgentTrial(
            id="t", world=len(ranks), ranks=ranks, evidence=self.evidence, started_ns=time.monotonic_ns(),
            watchdog=settings,
        )  # fmt: skip

    def tell(self, **wish: object) -> None:
        self._counter += 1
        command = Command.model_validate({"counter": self._counter, **wish})
        agent_files.write(self.spool, agent_files.COMMAND, command)

    def status(self) -> Status:
        status = agent_files.read(self.spool, agent_files.STATUS, Status)
        assert status is not None
        return status

    def until_state(self, state: str) -> Status:
        def look() -> Status | None:
            status = self.status()
            return status if status.state == state and status.counter == self._counter else None

        return rig.until(look, f"state {state!r}")

    def close(self) -> None:
        for started in self._started:
            started.kill()
            started.wait(rig.DEADLINE_S)
        process_control.end([self.agent], rig.DEADLINE_S, grace_s=0.0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.close()


def test_it_belongs_to_nobody(bench: Bench) -> None:
    bench.launch()
    stat = process_control.find(bench.agent)
    assert stat is not None
    assert stat.parent != os.getpid()
    assert stat.session not in (os.getsid(0), bench.agent.pid)
    bench.tell(stop=True)
    assert agent_launch.retire(bench.spool, bench.agent, rig.DEADLINE_S) == []
    assert not bench.spool.exists()


def test_a_hang_is_captured_without_a_question(bench: Bench) -> None:
    bench.launch()
    bench.tell(trial=bench.trial(bench.rank(0, 40, "wait"), bench.rank(1, 40, "wait")))
    status = bench.until_state("captured")
    assert (status.reason, status.ranks, status.samples) == ("stalled", (0, 1), 2)
    assert status.evidence == bench.evidence
    assert [rig.host_functions(bench.evidence, 1, rank)[-2] for rank in (0, 1)] == ["run_rank"] * 2
    manifest = rig.load(bench.evidence / "manifest.json")
    assert (manifest["reason"], manifest["road"], manifest["missing"]) == ("stalled", "budget", [])
    assert manifest["times"] == status.times.model_dump()
    # The driver is alive: whether the ranks end is its affair.
    assert all(process_control.alive(rank.process) for rank in bench_ranks(bench))


def bench_ranks(bench: Bench) -> tuple[WatchedRank, ...]:
    command = agent_files.read(bench.spool, agent_files.COMMAND, Command)
    assert command is not None
    assert command.trial is not None
    return command.trial.ranks


def test_a_rank_that_pauses_and_goes_on_is_slow(bench: Bench) -> None:
    bench.launch()
    # Confirmed only after longer than the pause of two seconds.
    patient = WatchdogSettings(
        sample_period_s=0.05, floor_s=0.8, ceiling_s=1.0, startup_s=5.0, warm_steps=5, confirm_after_s=30.0
    )
    rank = bench.rank(0, 40, "pause")
    bench.tell(trial=bench.trial(rank, settings=patient))
    status = rig.until(lambda: status if (status := bench.status()).slow else None, "a slow rank")
    assert (status.slow, status.state, status.evidence) == ((0,), "watching", None)
    assert "rank 0 went on after a suspicion" in status.notes[0]
    manifest = rig.load(bench.evidence / "manifest.json")
    assert (manifest["reason"], len(manifest["samples"])) == ("slow", 1)
    assert "run_rank" in rig.host_functions(bench.evidence, 0, 0)


def test_a_rank_for_whom_all_wait_and_that_does_nothing_needs_no_learned_budget(bench: Bench) -> None:
    bench.launch()
    # A phase that a sample saw them leave has a learned budget all the same: no pause is short enough for that.
    patient = replace(
        rig.QUICK, startup_s=600.0, ceiling_s=600.0, idle_s=1.0, warm_steps=1000, budget_multiple=1e6
    )
    ranks = [bench.rank(0, 3, "meet", 2), bench.rank(1, 3, "wait", 2)]
    bench.tell(trial=bench.trial(*ranks, settings=patient))
    status = bench.until_state("captured")
    assert (status.reason, status.ranks) == ("stalled", (0, 1))
    assert "rank 1: nothing moved" in status.proof[0] and "its host sleeps" in status.proof[0]
    assert "rank 0 in all_gather 1 of group agree, which lacks rank 1" in status.proof[1]
    assert rig.load(bench.evidence / "manifest.json")["road"] == "budget"


def test_of_several_slow_bouts_the_longest_lies_in_front(bench: Bench) -> None:
    bench.launch()
    ends = [bench.folder / "first", bench.folder / "second"]
    rank = bench.rank(0, 40, f"compute:{ends[0]},{ends[1]}")
    bench.tell(trial=bench.trial(rank, settings=replace(rig.QUICK, startup_s=60.0)))
    for end, slow_so_far in zip(ends, ((), (0,)), strict=True):

        def sampled_twice(slow: tuple[int, ...] = slow_so_far) -> bool:
            status = bench.status()
            return (status.state, status.samples, status.slow) == ("suspect", 2, slow)

        rig.until(sampled_twice, "two samples of a bout")
        if end is ends[0]:
            Event().wait(1.0)  # the first bout is the longer one, unless the machine is starved in the second
        end.touch()
    rig.until(lambda: not process_control.alive(rank.process), "the rank's end")
    bench.tell(trial=None)
    bench.until_state("idle")
    front = rig.load(bench.evidence / "manifest.json")
    assert (front["reason"], front["road"], front["suspicion"], front["ranks"]) == (
        "slow", "dissolved", "stalled", [0],
    )  # fmt: skip
    times = [front["times"][name] for name in ("last_progress_s", "suspected_s", "confirmed_s", "went_on_s")]
    assert times == sorted(times)
    aside = [rig.load(path) for path in bench.evidence.glob("slow-*/manifest.json")]
    assert any(len(manifest["samples"]) == 2 for manifest in aside)
    assert all(length_s(front) >= length_s(manifest) for manifest in aside)
    depth = [rig.host_functions(bench.evidence, sample, 0).count("deeper") for sample in (0, 1)]
    # It went deeper between the samples, or had just gone on when the second one was taken.
    assert depth[0] > 0 and (depth[1] > depth[0] or depth[1] == 0)


def length_s(manifest: dict[str, Any]) -> float:
    times: dict[str, float] = manifest["times"]
    return times["went_on_s"] - times["last_progress_s"]


def test_a_trial_that_ends_under_suspicion_leaves_its_samples(bench: Bench) -> None:
    bench.launch()
    rank = bench.rank(0, 40, f"compute:{bench.folder / 'never'}")
    bench.tell(trial=bench.trial(rank, settings=replace(rig.QUICK, startup_s=60.0)))
    status = rig.until(lambda: status if (status := bench.status()).samples == 2 else None, "a second sample")
    assert status.state == "suspect"
    bench.tell(trial=None)
    bench.until_state("idle")
    manifest = rig.load(bench.evidence / "manifest.json")
    assert (manifest["reason"], manifest["road"], len(manifest["samples"])) == ("slow", "dissolved", 2)
    assert "the trial ended while rank 0 was suspected" in manifest["notes"]


def test_an_agent_that_was_starved_says_so_and_suspects_nobody(bench: Bench) -> None:
    bench.launch()
    rank = bench.rank(0, 4000, "wait")
    settings = replace(rig.QUICK, ceiling_s=rig.QUICK.floor_s)
    bench.tell(trial=bench.trial(rank, settings=settings))
    bench.until_state("watching")
    rig.until(rank.ledger.exists, "the ledger")
    Event().wait(10 * rig.QUICK.sample_period_s)
    for _ in range(2):
        process_control.send(bench.agent, signal.SIGSTOP)
        Event().wait(2 * settings.ceiling_s)
        process_control.send(bench.agent, signal.SIGCONT)
        status = rig.until(lambda: status if (status := bench.status()).notes else None, "a note")
    assert re.fullmatch(
        r"the watchdog itself was starved for \d+\.\d s( \(CPU pressure \d+ %\))?", status.notes[0]
    )
    assert (status.slow, status.samples, status.state) == ((), 0, "watching")


def test_an_idle_rank_whose_answer_is_there_is_no_hang(bench: Bench) -> None:
    bench.launch()
    rank = bench.rank(0, 5, "wait")
    bench.tell(trial=bench.trial(rank), done=(0,))
    rig.until(rank.ledger.exists, "the ledger")
    Event().wait(2 * rig.QUICK.ceiling_s)
    assert bench.status().state == "watching"


def test_a_gone_driver_means_evidence_first_and_then_the_end_of_all(bench: Bench) -> None:
    driver = bench.sleeper()
    cluster = GuardedCluster(mark=("HANGRIG_TEST_MARK", bench.folder.name), folder=bench.folder / "cluster")
    cluster.folder.mkdir()
    daemon = bench.sleeper(HANGRIG_TEST_MARK=bench.folder.name)
    owned, stopped = bench.sleeper(), bench.sleeper()
    bench.launch(driver=driver, cluster=cluster)
    rank = bench.rank(0, 5, "wait")
    bench.tell(trial=bench.trial(rank, settings=WatchdogSettings()), owned=(owned, stopped))
    bench.until_state("watching")
    rig.until(rank.ledger.exists, "the ledger")
    process_control.send(stopped, signal.SIGSTOP)
    process_control.send(driver, signal.SIGKILL)
    assert process_control.wait_gone([bench.agent], rig.DEADLINE_S) == []
    assert not any(process_control.alive(p) for p in (daemon, owned, stopped, rank.process))
    assert not cluster.folder.exists()
    assert not bench.spool.exists()
    assert "run_rank" in rig.host_functions(bench.evidence, 1, 0)
    assert rig.load(bench.evidence / "manifest.json")["reason"].startswith("driver gone")
    assert "driver gone" in (bench.evidence / agent_files.LOG).read_text()


def test_a_gone_driver_between_trials_ends_all_without_evidence(bench: Bench) -> None:
    driver, owned = bench.sleeper(), bench.sleeper()
    bench.launch(driver=driver)
    bench.tell(owned=(owned,))
    bench.until_state("idle")
    process_control.send(driver, signal.SIGKILL)
    assert process_control.wait_gone([bench.agent, owned], rig.DEADLINE_S) == []
    assert list(bench.evidence.iterdir()) == []
    assert not bench.spool.exists()


def test_a_silent_remote_driver_counts_as_gone(bench: Bench) -> None:
    owned = bench.sleeper()
    bench.launch(driver=None, driver_silence_s=1.0)
    bench.tell(owned=(owned,))
    assert process_control.wait_gone([bench.agent, owned], rig.DEADLINE_S) == []


def test_its_life_is_bounded(bench: Bench) -> None:
    owned = bench.sleeper()
    bench.launch(lifetime_s=2.0)
    bench.tell(owned=(owned,))
    assert process_control.wait_gone([bench.agent, owned], rig.DEADLINE_S) == []


def test_sigterm_ends_it_as_a_gone_driver_does(bench: Bench) -> None:
    bench.launch()
    rank = bench.rank(0, 5, "wait")
    bench.tell(trial=bench.trial(rank, settings=WatchdogSettings()))
    bench.until_state("watching")
    process_control.send(bench.agent, signal.SIGTERM)
    assert process_control.wait_gone([bench.agent, rank.process], rig.DEADLINE_S) == []
    assert (bench.evidence / "sample-1" / "stacks" / "rank0.json").exists()


def test_a_damaged_command_is_reported_and_survived(bench: Bench) -> None:
    bench.launch()
    (bench.spool / agent_files.COMMAND).write_text("{not json")
    status = rig.until(lambda: status if (status := bench.status()).error else None, "an error")
    assert "command.json: not a Command of this version" in (status.error or "")
    bench.tell()
    assert bench.until_state("idle").process == bench.agent


def test_a_disk_that_refuses_evidence_is_reported(bench: Bench) -> None:
    bench.launch()
    bench.evidence.rmdir()
    bench.evidence.write_text("a file where a directory should be")
    bench.tell(trial=bench.trial(bench.rank(0, 40, "wait")))
    status = bench.until_state("captured")
    assert str(bench.evidence) in (status.error or "")
    assert status.evidence is None


def test_an_agent_that_is_gone_has_a_problem(bench: Bench) -> None:
    bench.launch()
    status = bench.status()
    assert agent_launch.problem(bench.agent, status, 60.0) is None
    stale = status.model_copy(update={"heartbeat_ns": 1})
    assert "has been silent" in (agent_launch.problem(bench.agent, stale, 1.0) or "")
    busy = stale.model_copy(update={"busy_until_ns": time.monotonic_ns()})
    assert agent_launch.problem(bench.agent, busy, 60.0) is None
    process_control.end([bench.agent], rig.DEADLINE_S, grace_s=0.0)
    assert "is gone" in (agent_launch.problem(bench.agent, status, 60.0) or "")


def test_a_spool_without_a_configuration_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.agent", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(rig.ROOT)},
        capture_output=True, text=True, timeout=rig.DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "config.json: missing" in done.stderr
