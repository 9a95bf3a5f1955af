"""What a capture takes of accelerators: recorders on request, status files, logs, and the tools beside it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import smi_texts as texts
from device_rig import library
from flight_builder import Recorder
from test_device_tools import install, npu_smi

from harness import process_control
from harness.agent_files import AgentTrial, WatchedRank
from harness.device_evidence import PLOG_TAIL_BYTES, DeviceCapture, DeviceRequest
from harness.device_files import log_files, newest_dump, press, status_files
from harness.offline.recognise import recognise
from harness.rank_environment import Written
from harness.seats import Seat
from harness.trial_evidence import TrialEvidence

LONG_S = 20.0


class Lacks(dict[str, str]):
    def __call__(self, what: str, why: str, impossible: bool = False, /) -> None:
        self[what] = why


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only tools of the test, and the shell's; a kernel log that may be read."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    now = int(time.monotonic())
    lines = f"[    5.000000] NVRM: Xid (PCI:0000:01:00): 79, old\n[{now + 5}.000000] davinci: new\n"
    (tmp_path / "dmesg.txt").write_text(lines)
    install(tmp_path / "bin", "dmesg", f"cat {tmp_path}/dmesg.txt")
    return tmp_path


def taken(
    folder: Path,
    written: Written,
    pids: Mapping[Seat, int],
    *,
    deadline_s: float = LONG_S,
    since_ns: int | None = None,
) -> Lacks:
    """One capture into ``folder/evidence``; what it lacks."""
    lacks = Lacks()
    capture = DeviceCapture(
        DeviceRequest(
            written,
            pids,
            folder / "evidence",
            1,
            time.monotonic_ns() if since_ns is None else since_ns,
            time.monotonic() + deadline_s,
        ),
        lacks,
    )
    capture.begin()
    capture.end()
    return lacks


def names(folder: Path) -> set[str]:
    root = folder / "evidence"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# Flight recorders --------------------------------------------------------------------------------------------


def test_a_rank_dumps_when_it_is_asked(folder: Path) -> None:
    content = folder / "content"
    content.write_bytes(pickle.dumps(Recorder().many(3).document()))
    prefix = str(folder / "trace_rank_")
    with library(Path(f"{folder}/pipe_rank_0.pipe"), Path(f"{prefix}0"), content) as pid:
        lacks = taken(folder, Written("cuda", (prefix,), str(folder / "pipe_rank_")), {0: pid, 1: pid})
    assert "flight recorder of rank 0" not in lacks
    assert "made no pipe" in lacks["flight recorder of rank 1"]
    found = recognise("flight/rank0.pickle", (folder / "evidence/flight/rank0.pickle").read_bytes())
    assert found.flight is not None and found.flight.groups["0"].enqueued == 3


def test_a_dump_of_a_timeout_is_picked_up_and_one_of_another_trial_is_not(folder: Path) -> None:
    prefix = str(folder / "trace_rank_")
    for rank, age_s in ((0, 10.0), (1, 1000.0)):
        path = Path(f"{prefix}{rank}")
        path.write_bytes(b"dump")
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    since_ns = time.monotonic_ns() - 100 * 10**9
    lacks = taken(folder, Written("npu", (prefix,)), {0: 1, 1: 1}, since_ns=since_ns)
    assert names(folder) >= {"flight/rank0.pickle"} and "flight/rank1.pickle" not in names(folder)
    assert "10 s before" in lacks["flight recorder of rank 0 of this moment"]
    assert "no pipe" in lacks["flight recorder of rank 1"]


def test_a_rank_that_does_not_answer_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.device_evidence._DUMP_S", 0.3)
    content = folder / "content"
    content.touch()
    prefix = str(folder / "trace_rank_")
    with library(Path(f"{folder}/pipe_rank_0.pipe"), Path(f"{prefix}0"), content, "deaf") as pid:
        lacks = taken(folder, Written("cuda", (prefix,), str(folder / "pipe_rank_")), {0: pid})
    assert "wrote none within" in lacks["flight recorder of rank 0"]


def test_pressing_never_waits_and_writes_into_no_file(folder: Path) -> None:
    os.mkfifo(folder / "p0.pipe")
    assert "nobody reads" in press(str(folder / "p"), 0).why
    (folder / "p1.pipe").write_text("precious")
    assert "no pipe" in press(str(folder / "p"), 1).why
    assert (folder / "p1.pipe").read_text() == "precious"
    assert "told of no pipe" in press("", 2).why
    assert newest_dump((str(folder / "none"),), 0, 0.0) is None


# Files of HCCL and CANN --------------------------------------------------------------------------------------


def test_status_files_and_logs_are_told_by_pid(folder: Path) -> None:
    status, plog = folder / "status", folder / "plog"
    status.mkdir()
    mine = status / "torch_hccl_status-1_10.0.0.1_3_2_4242_1796000000123.log"
    mine.write_text('{"last_comm_op": []}')
    (status / "torch_hccl_status-1_10.0.0.1_3_2_9999_1796000000123.log").write_text("{}")
    (status / "other.log").touch()
    for name in (
        "debug/plog/plog-4242_20261130193146001.log",
        "run/plog/plog-4242_20261130193146001.log",
        "debug/device-0/device-4242_20261130193146002.log",
        "debug/plog/plog-9999_20261130193146001.log",
        "debug/plog/readme-4242.txt",
    ):
        path = plog / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("first\n" + "x" * PLOG_TAIL_BYTES + "\nlast line\n")
    assert status_files(str(status), {4242}) == {4242: [mine]}
    assert len(log_files((str(plog),), {4242})[4242]) == 3
    lacks = taken(
        folder, Written("npu", status=str(status), logs=(str(plog),)), {1: 4242, 2: 77, "server": 5}
    )
    found = names(folder)
    assert f"hccl-status/rank1/{mine.stem}.json" in found
    tails = {name for name in found if name.startswith("plog/rank1/")}
    kinds = {name.split("/")[2].partition("-4242")[0] for name in tails}
    assert kinds == {"debug-plog-plog", "run-plog-plog", "debug-device-0-device"}
    tail = (folder / "evidence" / min(tails)).read_text()
    assert tail.endswith("last line\n") and "first" not in tail
    assert "process 77" in lacks["plog of rank 2"] and "plog of server" not in lacks


# Tools -------------------------------------------------------------------------------------------------------


def test_the_tools_words_and_the_kernels_are_kept(folder: Path) -> None:
    npu_smi(folder, texts.npu_table(cards=1))
    lacks = taken(folder, Written("npu"), {0: 1})
    assert lacks == {}
    at = folder / "evidence/sample-1/device"
    assert (at / "npu-smi-info.txt").read_text() == texts.npu_table(cards=1)
    assert (at / "npu-smi-health-0.1.txt").read_text() == "asked: info -t health -i 0 -c 1\n"
    assert "davinci: new" in (at / "kernel-log.txt").read_text()
    assert "Xid" not in (at / "kernel-log.txt").read_text(), "from before the trial"


def test_a_driver_that_hangs_costs_the_deadline_and_no_more(folder: Path) -> None:
    install(folder / "bin", "nvidia-smi", "exec sleep 1000")
    lacks = taken(folder, Written("cuda"), {0: 1}, deadline_s=1.0)
    assert "deadline" in lacks["nvidia-smi-q"] and "nvidia-smi-gpus" in lacks
    assert names(folder) == {"sample-1/device/kernel-log.txt"}


def test_what_may_not_be_read_is_said(folder: Path) -> None:
    install(
        folder / "bin",
        "dmesg",
        'echo "dmesg: read kernel buffer failed: Operation not permitted" >&2; exit 1',
    )
    lacks = taken(folder, Written("cuda"), {0: 1})
    assert "not permitted" in lacks["kernel log"] and "not on PATH" in lacks["nvidia-smi"]


def test_device_files_are_no_dumps_of_processes() -> None:
    """`hangrig diagnose` walks the same directory: a table of npu-smi must not be taken for one of processes."""
    for text in (texts.npu_table(processes=((0, 1, 4242, "python3", 9),)), texts.GPU_PROCESSES, texts.ECC):
        assert recognise("sample-1/device/x.txt", text.encode()).kind == "unknown"


def test_the_agent_is_told_where_the_libraries_write(folder: Path) -> None:
    """Driver and agent speak through JSON; only a capture of a confirmed hang takes the devices."""
    written = Written("npu", (str(folder / "trace_"),), str(folder / "pipe_"), "", (str(folder),))
    trial = AgentTrial(id="t", world=1, ranks=(), evidence=folder / "evidence", device=written)
    again = AgentTrial.model_validate_json(trial.model_dump_json())
    assert again.device == written
    watched = WatchedRank(rank=0, process=process_control.myself(), ledger=None)
    evidence = TrialEvidence(
        again.model_copy(update={"ranks": (watched,)}),
        since_ns=time.monotonic_ns(),
        capture_s=LONG_S,
        busy=lambda _: None,
    )
    evidence.take(native=False)
    assert not [name for name in names(folder) if "/device/" in name]
    evidence.take(native=True)
    assert "sample-1/device/kernel-log.txt" in names(folder)
    assert "flight recorder of rank 0" in {lack.what for lack in evidence.reports[1].missing}
