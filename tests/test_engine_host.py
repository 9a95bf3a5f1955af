"""A foreign engine from launch to stop, through a real cluster and a real pool: started, driven, hurt, ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster_rig as rig
import fake_dialect as fake
import fake_engine
import pytest
from cluster_rig import DEADLINE_S, until

from harness import process_control
from harness.cluster import ClusterOptions, LocalCluster
from harness.ledger import LedgerReader, LedgerWriter
from harness.process_control import ProcessId
from harness.rank_pool import PoolOptions, RankPool
from harness.target import EngineSpec, LaunchSpec, OtherProcess, Progress, RankProcess, TargetError, TrialSpec
from serving.targets import engine_results, engine_tree
from serving.targets.engine_client import Outcome
from serving.targets.engine_metrics import Metrics
from serving.targets.engine_results import Mark, Trial
from serving.workload import generate, workload

WORKLOAD = {"kind": "alternating", "requests": 8, "grammar_share": 0.0, "decode_tokens": [4, 9]}
CLIENT = {"parallelism": None, "step_s": 0.0, "deadline_s": DEADLINE_S}
LONG = {"kind": "alternating", "requests": 4, "grammar_share": 0.0, "decode_tokens": [4000, 4000]}

cluster_test = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    found = LocalCluster(ClusterOptions(workers=1, env=rig.ENV))
    found.start(DEADLINE_S)
    try:
        yield found
    finally:
        left = found.stop(10.0)
    assert left == []


class Running:
    """A target that may be up, with the pool that it lives in."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.folder = folder
        self.target = fake.FakeTarget()
        self.pool = RankPool(cluster, PoolOptions(role="launcher", dumps=folder))

    def launch(self, spec: EngineSpec) -> None:
        self.target.launch(LaunchSpec(start=spec, timeout_s=60.0, scratch=self.folder), self.pool)

    def tree(self) -> list[engine_tree.TreeProcess]:
        return [process for mark in self.target._marks for process in engine_tree.find(mark)]

    def drive(self, table: Mapping[str, Any] = WORKLOAD, seed: int = 1, **client: Any) -> None:
        (self.folder / "tokens").mkdir(exist_ok=True)
        self.target.drive(
            TrialSpec(
                id="t", seed=seed, toggles={}, model={}, engine={}, workload=table, client={**CLIENT, **client},
                sim={}, jitter={}, ledger_paths={}, decisions_paths={},
                journal_paths={0: str(self.folder / "tokens" / "rank0.jsonl")}, timeout_s=60.0,
            )
        )  # fmt: skip

    def until_progress(self, what: str, found: Any) -> Progress:
        last: list[Progress] = []

        def look() -> bool:
            last[:] = [self.target.progress()]
            return bool(found(last[0]))

        until(look, what)
        return last[0]

    def finished(self) -> Progress:
        return self.until_progress("the end of the trial", lambda progress: progress.done)

    def seat(self, seat: int | str) -> RankProcess | OtherProcess:
        both = {rank.rank: rank for rank in self.target.processes()} | {
            o.name: o for o in self.target.others()
        }
        return both[seat]

    def send(self, seat: int | str, number: signal.Signals) -> None:
        assert process_control.send(identity(self.seat(seat)), number)


def identity(process: RankProcess | OtherProcess) -> ProcessId:
    return ProcessId(process.pid, process.start_time_ticks)


@contextmanager
def running(cluster: LocalCluster, folder: Path, spec: EngineSpec | None = None) -> Iterator[Running]:
    found = Running(cluster, folder)
    try:
        if spec is not None:
            found.launch(spec)
        yield found
    finally:
        found.target.stop(20.0)
        left = found.pool.stop(10.0)
    assert left == []
    assert found.tree() == []


def tokens(progress: Progress) -> dict[str, list[int]]:
    return {name: list(ids) for result in progress.done.values() for name, ids in result.tokens.items()}


def expected(seed: int = 1) -> dict[str, list[int]]:
    return {
        arrival.request.id: [
            fake_engine.token(list(arrival.request.prompt), place)
            for place in range(arrival.request.max_new_tokens)
        ]
        for arrival in generate(workload(WORKLOAD), seed=seed, vocab_size=1024)
    }


# Up, driven, down ------------------------------------------------------------------------------------------


@cluster_test
def test_two_trials_on_a_warm_server_and_an_orderly_end(cluster: LocalCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, fake.spec(engine={"retract_every": 3})) as up:
        ranks, others = up.target.processes(), up.target.others()
        assert [(rank.rank, rank.role, rank.device) for rank in ranks] == [
            (0, "rank", "cpu"),
            (1, "rank", "cpu"),
        ]
        assert {other.name: other.role for other in others} == {
            "server": "server", "controller": "controller", "client": "client"
        }  # fmt: skip
        assert all(process_control.alive(identity(process)) for process in (*ranks, *others))
        assert "ready to roll" in Path(up.seat("server").log_path or "").read_text()
        assert [rank.log_path for rank in ranks] == [None, None]
        for seed in (1, 2):
            up.drive(seed=seed)
            done = up.finished().done
            assert tokens(Progress(done=done)) == expected(seed)
            assert set(done[0].tokens) == {f"r{index:04d}" for index in (0, 2, 4, 6)}
            total = sum(len(ids) for ids in expected(seed).values())
            assert sum(result.counters["tokens_out"] for result in done.values()) == total
            assert all(result.counters["retractions"] > 0 for result in done.values())
            assert {len(result.latency_us["ttft"]) for result in done.values()} == {4}
            assert [list(result.leaks) for result in done.values()] == [[], []]
            assert len(fake.load(tmp_path / "tokens" / "rank0.jsonl")) == total
        testimony = up.target.testimony(DEADLINE_S)
        assert testimony["requests"] == {"sent": 8, "finished": 8, "failed": 0}
        assert testimony["retractions"] == sum(result.counters["retractions"] for result in done.values())
        assert {line["source"] for line in testimony["said"]} <= {"log", "health"}
        assert any("Testing retraction" in line["text"] for line in testimony["said"])
        assert "fake_engine.py" in testimony["command"]
        assert testimony["env"]["SPT_NOENV"] == "1"
        assert testimony["metrics"]["fake_tokens_total"] > total
        server = identity(up.seat("server"))
        up.target.stop(20.0)
        assert not process_control.alive(server)
        assert up.tree() == []
        # The launcher still lives; its server's folder does not.
        assert list(tmp_path.glob("engine-*/node0")) == []


@cluster_test
def test_the_client_has_a_ledger(cluster: LocalCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, fake.spec()) as up:
        path = Path(up.seat("client").ledger_path or "")
        reader = LedgerReader.open(path)
        assert (reader.snapshot().host.phase, reader.snapshot().header.device) == ("parked", "client")
        up.drive(LONG)
        until(lambda: reader.snapshot().host.step > 5, "tokens in the client's ledger")
        assert reader.snapshot().host.phase == "serve"
        assert reader.snapshot().header.pid == up.seat("client").pid
        assert up.target.progress().done == {}
        reader.close()


@cluster_test
def test_a_leak_is_told(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(cluster, tmp_path, fake.spec(target={"args": ["--leak", "7"]})) as up:
        up.drive()
        done = up.finished().done
        assert list(done[0].leaks) == ["KV pool: 7 in use after the trial, by the engine's metrics"]
        assert list(done[1].leaks) == []


# Faults, deaths, hangs -------------------------------------------------------------------------------------


@cluster_test
def test_a_stopped_rank_hangs_the_trial_and_is_ended_with_the_rest(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    stop = {"name": "stop", "role": "rank", "ranks": (1,), "after_tokens": 12}
    with running(cluster, tmp_path, fake.spec(faults=[stop])) as up:
        up.drive(LONG)
        until(lambda: state(up.seat(1)) == "T", "a stopped rank")
        assert state(up.seat(0)) != "T"
        testimony = up.target.testimony(DEADLINE_S)
        assert [(fault["name"], fault["seat"]) for fault in testimony["faults"]] == [("stop", 1)]
        assert testimony["requests"]["finished"] == 0
        progress = up.target.progress()
        assert (progress.done, progress.failed, progress.gave_up) == ({}, {}, "")
        up.target.stop(20.0)
        assert up.tree() == []


def state(process: RankProcess | OtherProcess) -> str:
    stat = process_control.find(identity(process))
    return "gone" if stat is None else stat.state


@cluster_test
def test_a_killed_rank_is_told_with_what_the_client_saw(cluster: LocalCluster, tmp_path: Path) -> None:
    kill = {"name": "kill", "role": "rank", "ranks": (1,), "after_tokens": 12}
    with running(cluster, tmp_path, fake.spec(faults=[kill])) as up:
        up.drive(LONG)
        pids = {rank.rank: rank.pid for rank in up.target.processes()}
        progress = up.until_progress(
            "the end of all", lambda p: p.gave_up and len(p.died) == 2 and "the server ended" in p.gave_up
        )
        assert progress.failed[1].startswith(f"rank 1 (process {pids[1]}) ended: ")
        assert "the server was lost at request r000" in progress.gave_up
        assert "the server ended: status 1" in progress.gave_up
        testimony = up.target.testimony(DEADLINE_S)
        assert testimony["deaths"][0]["seat"] == 1
        assert testimony["deaths"][0]["at_s"] >= testimony["faults"][0]["at_s"]
        assert {death["seat"] for death in testimony["deaths"]} == {0, 1, "controller", "server"}
        assert any("scheduler 1 died" in line["text"] for line in testimony["said"])
        assert up.target.linger(0.0)


@cluster_test
def test_an_engines_own_watchdog_is_let_act(cluster: LocalCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, fake.spec(target={"args": ["--watchdog", "3"]})) as up:
        assert not up.target.linger(0.0)
        up.drive(LONG)
        up.send(0, signal.SIGSTOP)
        assert up.target.linger(DEADLINE_S)
        testimony = up.target.testimony(DEADLINE_S)
        assert any("Scheduler watchdog timeout (3 s)" in line["text"] for line in testimony["said"])


@cluster_test
def test_a_killed_launcher_is_told_and_its_server_ended(cluster: LocalCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, fake.spec(target={"args": ["--deaf", "--orphan"]})) as up:
        up.drive(LONG)
        up.send(1, signal.SIGSTOP)
        up.send("client", signal.SIGKILL)
        progress = up.until_progress("the launcher's end", lambda p: p.gave_up)
        client = up.seat("client")
        assert progress.gave_up == f"the launcher on {client.node}: its process {client.pid} is gone"
        until(lambda: up.tree() == [], "the guard's work")
        assert up.target.testimony(DEADLINE_S) == {}
        assert up.target.linger(DEADLINE_S)


@cluster_test
def test_a_launcher_that_hangs_holds_nobody_up(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(cluster, tmp_path, fake.spec(target={"args": ["--deaf"]})) as up:
        up.send("client", signal.SIGSTOP)
        up.drive()
        with caplog.at_level(logging.WARNING, logger="hangrig.engine"):
            assert up.target.testimony(0.5) == {}
            up.target.stop(1.0)
        assert "did not answer testimony within 0.5 s" in caplog.text
        assert up.tree() == []


@cluster_test
def test_two_nodes_are_one_server(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hg-two-", dir="/tmp") as short:  # Ray's sockets have short paths
        program = subprocess.run(
            [sys.executable, str(fake.PROGRAM.with_name("fake_nodes.py")), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(rig.ROOT), "RAY_TMPDIR": short},
            stdout=subprocess.PIPE,
            text=True,
            timeout=4 * DEADLINE_S,
            check=True,
        )
    found = json.loads(program.stdout.splitlines()[-1])
    first, second = found["nodes"]
    assert found["ranks"] == {"0": first, "1": second}
    assert found["others"] == {
        "server": first, "controller": first, "server-1": second, "controller-1": second, "client": first
    }  # fmt: skip
    # The tokens came on the first node, the fault was due on the second.
    assert (found["died"], found["faults"]) == ([1], [["kill", 1]])
    assert found["sent"] == 2
    assert found["left"] == []


# Starts that fail ------------------------------------------------------------------------------------------


def failed(cluster: LocalCluster, folder: Path, spec: EngineSpec) -> str:
    with running(cluster, folder) as up:
        with pytest.raises(TargetError) as error:
            up.launch(spec)
        assert up.tree() == []
    return str(error.value)


@cluster_test
def test_a_server_that_dies_says_its_last_words(cluster: LocalCluster, tmp_path: Path) -> None:
    found = failed(cluster, tmp_path, fake.spec(target={"args": ["--die"]}))
    assert found == (
        "fake: the server ended during its start (status 3); the end of its log:\n"
        "  fake engine: starting\n  RuntimeError: this engine was told to die"
    )


@cluster_test
def test_a_server_that_never_gets_well_is_given_up(cluster: LocalCluster, tmp_path: Path) -> None:
    found = failed(cluster, tmp_path, fake.spec(target={"args": ["--unhealthy"], "start_s": 1.0}))
    assert found.startswith(
        "fake: not ready within 1 s (target.start_s): /health was not answered 200; the end"
    )


@cluster_test
def test_a_first_generation_is_part_of_the_start(cluster: LocalCluster, tmp_path: Path) -> None:
    found = failed(cluster, tmp_path, fake.spec(target={"args": ["--refuse"]}))
    assert (
        "healthy, but the first generation of data-parallel group 0 failed: HTTP 400: I do not like" in found
    )


@cluster_test
def test_a_taken_port_is_tried_once_more(cluster: LocalCluster, tmp_path: Path) -> None:
    once = {"args": ["--once", str(tmp_path / "once")]}
    with running(cluster, tmp_path, fake.spec(target=once)) as up:
        assert len(up.target.processes()) == 2


@cluster_test
@pytest.mark.parametrize(
    ("python", "words"),
    [
        (
            "/no/such/python",
            "target.python = /no/such/python: no such program; name the interpreter in which",
        ),
        ("/bin/false", "target.python = /bin/false: does not run: status 1"),
    ],
)
def test_an_interpreter_that_is_none(cluster: LocalCluster, tmp_path: Path, python: str, words: str) -> None:
    assert failed(cluster, tmp_path, fake.spec(target={"python": python})).startswith(words)


@cluster_test
def test_an_interpreter_without_the_engine(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(cluster, tmp_path) as up:
        up.target._dialect = _Absent()
        with pytest.raises(
            TargetError, match=r"fake is not installed there \(none of no-such-engine\); install"
        ):
            up.launch(fake.spec())


class _Absent(fake.FakeDialect):
    distributions = ("no-such-engine",)


@cluster_test
def test_a_model_that_is_not_there(cluster: LocalCluster, tmp_path: Path) -> None:
    found = failed(cluster, tmp_path, fake.spec(model={"directory": "/no/such/model"}))
    assert found.startswith("model.directory: /no/such/model is no directory")


# Before anything starts ------------------------------------------------------------------------------------


def test_the_command_can_be_shown_before_anything_starts() -> None:
    target = fake.FakeTarget()
    (line,) = target.commands(
        fake.spec(target={"args": ["--x", "a b"], "env": {"MY_TOKEN": "s", "B": "1 2"}})
    )
    assert line.startswith("B='1 2' FAKE_MODEL=$SCRATCH/model MY_TOKEN='***' ")
    assert line.endswith("--port $PORT --ranks 2 --first-rank 0 --retract-every 0 --x 'a b'")


def test_what_needs_a_new_start() -> None:
    target, spec = fake.FakeTarget(), fake.spec()
    fixed = target.fixed(spec)
    assert fixed == target.fixed(replace(spec, target={**spec.target, "start_s": 5.0, "let_s": 1.0}))
    for other in (
        fake.spec(engine={"retract_every": 4}),
        fake.spec(target={"env": {"A": "1"}}),
        fake.spec(model={"seed": 3}),
        fake.spec(faults=[{"name": "stop", "role": "rank", "ranks": (), "after_tokens": 1}]),
        replace(spec, toggles={"probe": "on"}),
        replace(spec, toggles={"probe": "off", "pinned": "pinned"}),
    ):
        assert target.fixed(other) != fixed


def test_what_the_pool_has_to_offer() -> None:
    target = fake.FakeTarget()
    needs = target.needs(fake.spec())
    assert (needs.processes, needs.devices, needs.spread, needs.role) == (1, 0, False, "launcher")
    needs = target.needs(replace(fake.spec(4, target={"nodes": 2}), device="npu"))
    assert (needs.processes, needs.devices, needs.spread) == (2, 2, True)


def test_mistakes_are_told_before_anything_starts() -> None:
    target = fake.FakeTarget()
    target.validate(fake.spec(), WORKLOAD, (1, 2))
    with pytest.raises(TargetError, match=r"kv_tokens = 13: unlucky"):
        target.validate(fake.spec(engine={"kv_tokens": 13}), WORKLOAD, (1,))
    with pytest.raises(TargetError, match="no such model"):
        target.validate(fake.spec(model={"preset": "no such model"}), WORKLOAD, (1,))


def test_nothing_is_asked_of_a_target_that_is_not_up() -> None:
    target = fake.FakeTarget()
    assert target.testimony(1.0) == {}
    assert target.linger(1.0)
    target.stop(1.0)
    with pytest.raises(TargetError, match="fake is not running; call launch first"):
        target.progress()


# Results ---------------------------------------------------------------------------------------------------


def trial(**fields: Any) -> Trial:
    defaults: dict[str, Any] = {
        "world": 4, "groups": 2, "outcomes": (), "before": Metrics(), "after": Metrics(), "logged": 0,
        "duration_s": 2.0, "steps": {}, "decode_steps": {},
    }  # fmt: skip
    return Trial(**{**defaults, **fields})


def test_a_groups_results_are_its_first_ranks() -> None:
    outcomes = [
        Outcome("a", 0, [1, 2], "length", retractions=2),
        Outcome("b", 1, [3], "aborted: no room", retractions=1, cached_tokens=5),
    ]
    results = trial(outcomes=outcomes, steps={0: 9, 1: 9}, decode_steps={0: 4}).results()
    assert [dict(result.tokens) for result in results] == [{"a": [1, 2]}, {}, {"b": [3]}, {}]
    assert [result.steps for result in results] == [9, 9, 0, 0]
    assert results[0].counters == {"retractions": 2, "tokens_out": 2, "cached_tokens": 0, "aborted": 0}
    assert results[2].counters == {"retractions": 1, "tokens_out": 1, "cached_tokens": 5, "aborted": 1}
    assert results[1].counters == {}
    assert results[2].finish == {"b": "aborted: no room"}


def test_retractions_that_no_answer_tells_come_from_metrics_or_the_log() -> None:
    outcomes = [Outcome("a", 0, [1]), Outcome("b", 1, [1])]
    before = Metrics({"retractions": 3.0}, {"retractions": {0: 1.0, 1: 2.0}})
    after = Metrics({"retractions": 8.0}, {"retractions": {0: 2.0, 1: 6.0}})
    results = trial(outcomes=outcomes, before=before, after=after).results()
    assert [result.counters.get("retractions") for result in results] == [1, None, 4, None]
    unlabelled = trial(outcomes=outcomes, after=Metrics({"retractions": 4.0, "preemptions": 4.0})).results()
    assert unlabelled[0].counters["preemptions"] == unlabelled[0].counters["retractions"] == 4
    logged = trial(outcomes=outcomes, logged=6)
    assert logged.retractions() == 6
    assert [result.counters.get("retractions") for result in logged.results()] == [6, None, 0, None]


def test_steps_are_counted_from_ledger_and_decisions(tmp_path: Path) -> None:
    ledger, decisions = tmp_path / "rank0.ledger", tmp_path / "rank0.decisions.jsonl"
    assert engine_results.mark(ledger, decisions) == Mark()
    writer = LedgerWriter.create(ledger, rank=0, world=1, node="here", device="cpu", decisions_path=decisions)
    writer.phase("forward", 5)
    writer.decision({"step": 5, "mode": "decode"})
    before = engine_results.mark(ledger, decisions)
    assert before.steps == 5
    for step, mode in ((6, "decode"), (7, "prefill"), (8, "decode"), (9, "idle")):
        writer.phase("forward", step)
        writer.decision({"step": step, "mode": mode})
    writer.close()
    assert engine_results.mark(ledger, decisions).steps == 9
    with decisions.open("a") as file:
        file.write('{"mode": "decode", "st')  # cut
    assert engine_results.decode_steps(decisions, before) == 2
    assert engine_results.decode_steps(tmp_path / "none", before) == 0
