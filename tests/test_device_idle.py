"""Whether devices are back to idle between trials: figures of the tools, and a session that goes on regardless."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from smi_texts import npu_table

import harness.session as session_room
from harness.arms import expand
from harness.controller import Ended
from harness.device_idle import Figures, IdleDevices, InUse, gpus, look, npus
from harness.live import LiveView
from harness.request import RunRequest
from harness.scenario import find_scenario, load
from harness.session import Job, Session
from harness.store import MANIFEST_KEYS, RunStore
from harness.target import Progress, RankProcess, RankResult

GPUS = """index, uuid, name, driver_version, memory.total [MiB], memory.used [MiB]
0, GPU-a, NVIDIA H200, 570.1, 143771, 1200
1, GPU-b, NVIDIA H200, 570.1, 143771, 300
"""
PROCESSES = """gpu_uuid, pid, process_name, used_gpu_memory [MiB]
GPU-a, 4711, python, 800
"""


def test_figures_of_both_tools() -> None:
    assert gpus(GPUS, PROCESSES) == {"cuda:0": InUse(1200, ((4711, 800),)), "cuda:1": InUse(300)}
    table = npu_table(cards=2, used={(1, 0): 9000}, processes=((1, 0, 99, "python", 5900),))
    found = npus(table)
    assert list(found) == ["npu:0", "npu:1", "npu:2", "npu:3"]
    assert (found["npu:2"], found["npu:3"]) == (InUse(9000, ((99, 5900),)), InUse(3100))
    assert list(npus(npu_table(cards=2, chips=1))) == ["npu:0", "npu:1"]


def test_a_tool_that_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert look("cuda") == "nvidia-smi is not on PATH"
    devices = IdleDevices(lambda: look("npu"))
    devices.begin()
    devices.hold({0: "npu:0"})
    assert devices.unknown == "npu-smi is not on PATH" and devices.busy() is None


def test_the_tool_that_answers_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ncase $1 in *compute*) cat <<'E'\n{PROCESSES}E\n;; *) cat <<'E'\n{GPUS}E\n;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert look("cuda") == gpus(GPUS, PROCESSES)


class Tool:
    """Figures one after the other, the last one for ever."""

    def __init__(self, *answers: Figures | str) -> None:
        self.answers = [*answers]
        self.asked = 0

    def __call__(self) -> Figures | str:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def used(first: int | None, second: int | None = 300, *, by: int | None = None) -> Figures:
    return {"cuda:0": InUse(first, () if by is None else ((by, first),)), "cuda:1": InUse(second)}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (used(700), None),
        (
            used(5000, by=42),
            "cuda:0 has 5000 MiB in use, 300 MiB before the first trial, held by process 42 (5000",
        ),
        (used(5000), "held by no process that the tool names"),
        (used(300, 90_000), None),
        (used(None), None),
        ({"cuda:1": InUse(300)}, "cuda:0 is not listed any more"),
        ("it did not answer within 15 s", "cannot be told any more: it did not answer"),
    ],
)
def test_only_more_memory_on_a_device_of_ours_is_a_reason(now: Figures | str, said: str | None) -> None:
    devices = IdleDevices(Tool(used(300), now))
    devices.begin()
    devices.hold({0: "cuda:0"})
    found = devices.busy()
    assert (found is None) if said is None else (found is not None and said in found)


def test_memory_that_comes_back_late_is_waited_for() -> None:
    tool, pauses = Tool(used(300), used(9000), used(4000), used(310)), list[float]()
    devices = IdleDevices(tool)
    devices.begin()
    devices.hold({0: "cuda:0"})
    assert devices.wait(60.0, pauses.append) is None
    assert len(pauses) == 2
    never = IdleDevices(Tool(used(300), used(9000)))
    never.begin()
    never.hold({0: "cuda:0"})
    assert "9000 MiB" in (never.wait(0.0, pauses.append) or "")


# A session -----------------------------------------------------------------------------------------------------


class Ranks:
    """One rank that is always up; counts how often it was ended."""

    trials = 0
    target: Any = None
    discarded = 0

    def broken(self) -> None:
        """The cluster below them stands."""

    def discard(self, deadline_s: float) -> list[Any]:
        self.discarded += 1
        return []


RESULT = RankResult(
    rank=0, steps=5, decode_steps=4, duration_s=1.0, tokens={"r": [1]}, finish={"r": "length"},
    counters={}, latency_us={}, nbytes={}, leaks=(),
)  # fmt: skip
HEALTHY = Ended(1.0, Progress(done={0: RESULT}), finished=True, captured=False)
HUNG = Ended(1.0, Progress(), finished=False, captured=False, reason="it hung")


def run_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: Tool, ends: Sequence[Ended]
) -> tuple[list[dict[str, Any]], Ranks, int]:
    """The histories of as many trials as there are ``ends``, those that ran taking the next end each; the ranks;
    how many ends were not needed."""
    ranks, left = Ranks(), [*ends]
    process = RankProcess(0, "rank", "here", 1, 1, "cuda:0")

    class Target:
        def others(self) -> tuple[()]:
            return ()

        def testimony(self, deadline_s: float) -> dict[str, Any]:
            return {}

    ranks.target = Target()

    @contextmanager
    def up(session: Session, world: int, view: LiveView) -> Iterator[tuple[None, Ranks]]:
        yield None, ranks

    def ensure(session: Session, *_: object) -> Sequence[RankProcess]:
        assert session.idle is not None
        session.idle.hold({0: process.device})
        return (process,)

    monkeypatch.setattr(Session, "_up", up)
    monkeypatch.setattr(Session, "_ensure", ensure)
    monkeypatch.setattr(Session, "_record_environment", lambda *_: None)
    monkeypatch.setattr(Session, "_drive", lambda *_, **__: left.pop(0))
    monkeypatch.setattr(session_room, "_IDLE_S", 0.0)
    scenario = load(find_scenario("dp-retract"))
    plans = expand(scenario, "sim", trials=len(ends), seed=0)
    monkeypatch.setattr(session_room, "_compared", lambda job: set())
    store = RunStore.create(tmp_path / "runs", "idle", dict.fromkeys(MANIFEST_KEYS, ""))
    session = Session(RunRequest(scenarios=(scenario,)), store, simulation=True, idle=IdleDevices(tool))
    session.run([Job(scenario, plans)])
    folders = [store.path / "trials" / plan.id for plan in plans]
    return [json.loads((folder / "history.json").read_text()) for folder in folders], ranks, len(left)


def test_one_hang_fails_neither_the_next_trial_nor_the_night(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory comes back: the next trial runs as ever."""
    histories, ranks, left = run_session(
        monkeypatch, tmp_path, Tool(used(300), used(310)), [HEALTHY, HUNG, HEALTHY]
    )
    assert [one.get("finished") for one in histories] == [True, False, True]
    assert (ranks.discarded, left) == (1, 0)


def test_a_trial_on_a_busy_device_is_unknown_and_says_why_and_the_night_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory is still taken after the hang, before the second trial and after it; before the third it is back."""
    tool = Tool(used(300), used(9000, by=42), used(9000, by=42), used(9000, by=42), used(310))
    histories, _, left = run_session(monkeypatch, tmp_path, tool, [HUNG, HEALTHY, HEALTHY])
    assert [one.get("finished") for one in histories] == [False, None, True]
    assert "not back to idle after an earlier trial: cuda:0 has 9000 MiB" in histories[1]["unknown"]
    assert "process 42" in histories[1]["unknown"]
    assert left == 1, "the second trial was never driven"
