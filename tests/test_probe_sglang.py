"""The probe's hooks in SGLang, in real processes of a package shaped like it (``fake_sglang``): what they write of
phases, steps, decisions and collectives, and the faults they make. The engine itself: ``make test-engines``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from harness.ledger import Snapshot
from harness.ledger_reader import LedgerReader
from serving.probe.hangrig_probe.sglang_sites import ungated
from serving.targets.probe_path import assemble

FAKE = Path(__file__).parent / "fake_sglang"
PROCESS_S = 120.0
"""Deadline of one process, the import of torch included."""
VERSIONS = ("0.5.20", "0.5.23")
SCHEDULER = "sglang.srt.managers.scheduler:"

Line = dict[str, Any] | None


@pytest.fixture(scope="module")
def probe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "path"
    assemble(folder)
    return folder


@dataclass
class Rig:
    """One engine's folder, and processes that find the probe and the fake engine on their path."""

    folder: Path
    probe_path: Path

    def configure(self, *, world: int = 2, faults: Sequence[Mapping[str, Any]] = ()) -> None:
        """All faults are due at once."""
        document = {"schema": 1, "folder": str(self.folder), "node": "n0", "device": "cpu", "world": world}
        document["faults"] = list(faults)
        (self.folder / "config.json").write_text(json.dumps(document))
        for index in range(len(faults)):
            (self.folder / f"due-{index}").touch()

    @contextmanager
    def process(self, code: str, version: str = "0.5.23") -> Iterator[subprocess.Popen[str]]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.probe_path}{os.pathsep}{FAKE}",
            "HANGRIG_PROBE": str(self.folder / "config.json"),
            "FAKE_SGLANG": version,
        }
        started = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield started
        finally:
            started.kill()
            started.communicate()

    def run(self, code: str, version: str = "0.5.23") -> str:
        with self.process(code, version) as process:
            output, errors = process.communicate(timeout=PROCESS_S)
        assert process.returncode == 0, errors
        return output

    def ranks(
        self,
        scripts: Sequence[Sequence[Line]],
        *,
        version: str = "0.5.23",
        dp_ranks: Sequence[int | None] = (0, 1),
        attention: bool = True,
    ) -> list[dict[str, Any]]:
        """What the two schedulers said in the end."""
        script, meet = json.dumps(scripts), f"file://{self.folder / 'meet'}"
        codes = [
            "from sglang.srt.managers.scheduler import run_scheduler_process\n"
            f"run_scheduler_process({script!r}, {meet!r}, {rank}, {dp_ranks[rank]}, {attention})"
            for rank in (0, 1)
        ]
        with self.process(codes[0], version) as one, self.process(codes[1], version) as other:
            heard = [process.communicate(timeout=PROCESS_S) for process in (one, other)]
        for process, (_, errors) in zip((one, other), heard, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(output.splitlines()[-1]) for output, _ in heard]

    def status(self, stem: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / f"{stem}.probe.json").read_text())
        return document

    def ledger(self, stem: str) -> Snapshot:
        reader = LedgerReader.open(self.folder / f"{stem}.ledger")
        try:
            return reader.snapshot()
        finally:
            reader.close()

    def decisions(self, rank: int) -> list[dict[str, Any]]:
        lines = (self.folder / f"rank{rank}.decisions.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def rig(tmp_path: Path, probe_path: Path) -> Rig:
    rig = Rig(tmp_path, probe_path)
    rig.configure()
    return rig


def decode(*rids: str, **more: Any) -> Line:
    return {"mode": "DECODE", "rids": list(rids), **more}


def idle(tokens: list[int]) -> Line:
    return {"mode": "IDLE", "rids": [], "tokens": tokens}


def checksum(*rids: str) -> int:
    return crc32("\n".join(rids).encode())


@pytest.mark.parametrize("version", VERSIONS)
def test_each_batch_has_its_decision(rig: Rig, version: str) -> None:
    rig.ranks(
        [
            [
                None,
                {"mode": "EXTEND", "rids": ["b", "a"], "tokens": [14, 0]},
                decode("a", "b", tokens=[2, 0], finish=["b"]),
                {"idle": 300},
                decode("a", tokens=[1, 0], retract=["a"], refuse=["never"]),
                decode("a", tokens=[1, 0], abort=["a"]),
                decode(tokens=[0, 0]),
                None,
            ],
            [
                None,
                idle([14, 0]),
                idle([2, 0]),
                {"idle": 300},
                idle([1, 0]),
                idle([1, 0]),
                idle([0, 0]),
                None,
            ],
        ],
        version=version,
    )
    mine, other = rig.decisions(0), rig.decisions(1)
    nothing: dict[str, list[str]] = {"retracted": [], "finished": [], "aborted": []}
    common: dict[str, Any] = {"dp": 0, "waiting": 0, **nothing}
    both = checksum("a", "b")
    assert mine == [
        {
            **common,
            "step": 1,
            "mode": "prefill",
            "batch": 2,
            "tokens": [14, 0],
            "requests": both,
            "tokens_out": 0,
        }
        | {"collectives": {}},
        {
            **common,
            "step": 2,
            "mode": "decode",
            "batch": 2,
            "tokens": [2, 0],
            "requests": both,
            "tokens_out": 2,
        }
        | {"collectives": {"tp": 1}},
        {**common, "step": 3, "mode": "decode", "batch": 1, "tokens": [1, 0], "requests": checksum("a")}
        | {"tokens_out": 4, "retracted": ["a"], "finished": ["b"], "aborted": ["never"]}
        | {"collectives": {"tp": 2}},
        {**common, "step": 4, "mode": "decode", "batch": 1, "tokens": [1, 0], "requests": checksum("a")}
        | {"tokens_out": 5, "collectives": {"tp": 3}},
        {**common, "step": 5, "mode": "decode", "batch": 0, "tokens": [0, 0], "requests": 0, "tokens_out": 6}
        | {"aborted": ["a"], "collectives": {"tp": 4}},
    ]
    assert [one["mode"] for one in other] == ["idle"] * 5
    assert [one["step"] for one in other] == [1, 2, 3, 4, 5]
    assert [one["collectives"].get("tp", 0) for one in other] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_knows_its_place_and_its_groups(rig: Rig, version: str) -> None:
    rig.ranks([[decode("a"), None], [decode("b"), None]], version=version)
    for rank in (0, 1):
        status = rig.status(f"rank{rank}")
        assert (status["seat"], status["role"], status["dp_rank"], status["tp_rank"]) == (
            rank,
            "rank",
            rank,
            rank,
        )
        assert status["errors"] == []
        assert status["exception"] is None
        assert status["hooks"][SCHEDULER + "Scheduler.run_batch"] == "on"
        # This engine cannot be disaggregated.
        assert status["hooks"][SCHEDULER + "Scheduler.get_next_disagg_decode_batch_to_run"].startswith(
            "missing"
        )
        [(site, asked)] = status["pinned"]["answers"].items()
        assert "sglang/srt/managers/scheduler.py:" in site
        assert asked == 1
        ledger = rig.ledger(f"rank{rank}")
        assert {name: group.ranks for name, group in ledger.groups.items()} == {"tp": (0, 1)}
        [collective] = ledger.groups["tp"].recent
        assert (collective.operation, collective.shape, collective.dtype) == ("all_reduce", (3,), "float32")
        assert collective.completed_ns is not None
        assert (ledger.host.phase, ledger.host.step) == ("idle", 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_of_a_replica_are_counted_on(rig: Rig, version: str) -> None:
    rig.configure(world=4)
    rig.ranks([[decode("a")], [decode("a")]], version=version, dp_ranks=(1, 1), attention=False)
    assert rig.status("rank3")["seat"] == 3
    assert rig.ledger("rank2").groups["tp"].ranks == (2, 3)
    [decision] = rig.decisions(2)
    assert decision["own_tokens"] == [1]
    assert "tokens" not in decision


def test_a_loop_without_a_batch_only_lives(rig: Rig) -> None:
    rig.ranks([[decode("a"), {"idle": 2000}], [decode("b"), {"idle": 3}]])
    long, short = rig.ledger("rank0"), rig.ledger("rank1")
    assert long.decisions_total == short.decisions_total == 1
    assert long.host.phase == short.host.phase == "idle"
    assert long.host.phase_changes == short.host.phase_changes
    assert long.host.heartbeat_ns > long.host.since_ns


def test_an_idle_batch_that_raises_leaves_its_traceback(rig: Rig) -> None:
    rig.configure(faults=[{"name": "raise", "mode": "idle", "ranks": [1]}])
    scripts = [
        [decode("a", tokens=[1, 1]), decode("a", tokens=[1, 0])],
        [decode("b", tokens=[1, 1]), idle([1, 0])],
    ]
    said = rig.ranks(scripts)
    assert said[1]["said"].startswith("InjectedError")
    status = rig.status("rank1")
    assert "InjectedError" in status["exception"]
    [fault] = status["faults"]
    assert (fault["name"], fault["step"], fault["mode"]) == ("raise", 2, "idle")
    # Its peer entered the collective that it never came to.
    assert rig.ledger("rank0").groups["tp"].started == 2
    assert rig.ledger("rank1").groups["tp"].started == 1
    assert rig.decisions(1)[-1]["mode"] == "idle"
    assert said[0]["said"] != "done"
    assert rig.status("rank0")["exception"] is not None
    assert rig.status("rank0")["exception_ns"] > status["exception_ns"]


def test_a_skipped_collective_leaves_the_peer_waiting(rig: Rig) -> None:
    rig.configure(
        faults=[{"name": "skip_collective", "operation": "all_reduce", "group": "tp", "ranks": [1]}]
    )
    scripts = [[decode("a"), decode("a")], [decode("b"), decode("b")]]
    said = rig.ranks(scripts)
    assert [one["said"] == "done" for one in said] == [False, True]
    waiting, skipper = rig.ledger("rank0").groups["tp"], rig.ledger("rank1").groups["tp"]
    assert (waiting.started, waiting.completed) == (2, 1)
    assert (skipper.started, skipper.completed) == (1, 1)
    assert rig.status("rank1")["faults"][0]["what"] == "skipped all_reduce of group tp"
    assert rig.status("rank0")["faults"] == []


def test_an_abort_by_one_clock_is_made_on_one_rank(rig: Rig) -> None:
    rig.configure(faults=[{"name": "abort_by_clock", "ranks": [1]}])
    script = [decode("a", "b"), decode("a", "b"), decode("a", "b")]
    said = rig.ranks([script, script], dp_ranks=(None, None), attention=False)
    assert [one["heard"] for one in said] == [[], ["a"]]
    assert [one["aborted"] for one in rig.decisions(0)] == [[], [], []]
    assert [one["aborted"] for one in rig.decisions(1)] == [[], [], ["a"]]


def test_the_last_running_request_is_not_the_clocks(rig: Rig) -> None:
    rig.configure(faults=[{"name": "abort_by_clock", "ranks": [1]}])
    script = [decode("a"), decode("a"), decode("a", "b"), decode("a", "b")]
    said = rig.ranks([script, script], dp_ranks=(None, None), attention=False)
    assert [one["heard"] for one in said] == [[], ["a"]]
    assert rig.status("rank1")["faults"][0]["step"] == 3


def test_the_controller_tells_each_message(rig: Rig) -> None:
    messages = [None, "x", None, None, "y", "broken"]
    said = rig.run(
        "from sglang.srt.managers import data_parallel_controller as it\n"
        f"it.run_data_parallel_controller_process({messages!r})"
    )
    assert said.split() == ["handled", "x", "y"]
    ledger = rig.ledger("controller")
    assert (ledger.host.phase, ledger.host.step) == ("process", 3)
    assert "cannot dispatch" in rig.status("controller")["exception"]


def test_a_blocked_controller_takes_up_nothing(rig: Rig) -> None:
    rig.configure(faults=[{"name": "block", "role": "controller", "seconds": 3600}])
    code = (
        "from sglang.srt.managers import data_parallel_controller as it\n"
        "it.run_data_parallel_controller_process(['x'])"
    )
    with rig.process(code) as process:
        deadline = time.monotonic() + PROCESS_S
        while not (rig.folder / "controller.probe.json").exists() or not rig.status("controller")["faults"]:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the fault was not made"
            time.sleep(0.01)
        ledger = rig.ledger("controller")
    assert (ledger.host.phase, ledger.host.step) == ("recv", 0)


def test_the_detokenizer_is_parked_between_messages(rig: Rig) -> None:
    rig.run(
        "from sglang.srt.managers import detokenizer_manager as it\n"
        "it.run_detokenizer_process(['one', 'two'])"
    )
    ledger = rig.ledger("detokenizer")
    assert (ledger.host.phase, ledger.host.step) == ("parked", 2)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_server_lists_what_does_not_ask_and_its_controller_has_the_probe(rig: Rig, version: str) -> None:
    script = rig.folder / "serve.py"
    script.write_text(
        "from sglang.launch_server import run_server\n"
        "if __name__ == '__main__':\n    raise SystemExit(run_server(['x', 'y']))\n"
    )
    said = rig.run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", version)
    assert said.split() == ["handled", "x", "y"]
    assert rig.ledger("controller").host.step == 2
    status = rig.status("server")
    assert status["role"] == "server"
    assert not (rig.folder / "server.ledger").exists()
    assert [place.rpartition(":")[0] for place in status["bypass"]] == ["sglang/srt/managers/staging.py"]
    assert any("detokenizer" in hook for hook in status["hooks"]) == (version == "0.5.20")


def test_ungated_places_are_those_whose_function_asks_nobody(tmp_path: Path) -> None:
    package = tmp_path / "engine" / "srt"
    package.mkdir(parents=True)
    (package / "some.py").write_text(
        "\n".join(
            [
                "def gated(t, device):",
                "    pin = is_pin_memory_available(device)",
                "    return torch.tensor(t, pin_memory=pin).to(device, non_blocking=True)",
                "",
                "def passed_on(t, pin_memory=False):",
                "    return torch.tensor(t, pin_memory=pin_memory)",
                "",
                "def bare(",
                "    t,",
                "):",
                "    if t:",
                "        return t.pin_memory()  # line 12",
                "    return t.to('npu', non_blocking=True)  # line 13",
                "",
                "class Buffer:",
                "    def make(self):",
                "        self.use_pin_memory = not on_cpu  # line 17",
                "        self.host = torch.empty(3, pin_memory=True)  # line 18",
                "",
                "    def read(self):",
                "        return async_d2h(self.host), self.host.copy_(x, non_blocking=False)",
                "",
                "# pin_memory=True",
            ]
        )
    )
    (package / "damaged.py").write_bytes(b"pin_memory=True \xff")
    assert ungated(package) == [f"engine/srt/some.py:{line}" for line in (12, 13, 17, 18)]
