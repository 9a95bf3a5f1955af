"""The vendors' tools: what their outputs say, and that a tool that is absent, slow, failing or mad stops
nothing."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
import smi_texts as texts

from harness import process_control
from harness.device_tools import GPU_TABLE, NPU_TABLE, DeviceSnapshot, ecc_of, health_of, take_snapshot
from harness.npu_smi import ChipHealth, parse_ecc, parse_health, parse_table
from harness.nvidia_smi import parse_gpus, parse_processes

LONG_S = 20.0


def install(folder: Path, name: str, script: str) -> None:
    """A tool of that name, as a shell script."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def npu_smi(folder: Path, table: str, more: str = "") -> None:
    """One that answers every question with a line of the question, and ``info`` with the table."""
    (folder / "table.txt").write_text(table)
    script = f'case "$*" in info) cat {folder}/table.txt;; {more} *) echo "asked: $*";; esac'
    install(folder / "bin", "npu-smi", script)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only tools of the test, and the shell's."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


# What they print ---------------------------------------------------------------------------------------------


def test_a_910c_shows_two_chips_a_card() -> None:
    found = parse_table(
        texts.npu_table(health={(3, 1): "Alarm"}, processes=((0, 1, 4242, "python3", 900), (1, 0, 7, "", 5)))
    )
    assert (found.tool, found.driver) == ("25.3.rc1", "25.3.rc1")
    assert len(found.chips) == 16 and found.cards == tuple(range(8)) and found.unread == ()
    chip = found.chips[7]
    assert (chip.words, chip.physical, chip.health) == ("NPU 3 chip 1", 7, "Alarm")
    assert (chip.name, chip.used_mib, chip.total_mib) == ("Ascend910", 3100, 65536)
    assert [(one.npu, one.chip, one.pid, one.name, one.used_mib) for one in found.processes] == [
        (0, 1, 4242, "python3", 900),
        (1, 0, 7, "", 5),
    ]


def test_a_910b_has_no_column_of_physical_numbers() -> None:
    found = parse_table(texts.npu_table(cards=2, chips=1))
    assert [(chip.npu, chip.chip, chip.physical) for chip in found.chips] == [(0, 0, None), (1, 0, None)]


@pytest.mark.parametrize("text", ["", "dcmi module initialize failed. ret is -8005\n", "| 0 | \x00 |\n|||\n"])
def test_a_text_without_a_table_is_no_device(text: str) -> None:
    assert parse_table(text).chips == ()


def test_rows_that_make_no_sense_are_told() -> None:
    odd = (
        "| 0     Ascend910           | 17 ?          | nothing of the kind                                |\n"
    )
    assert parse_table(odd).unread == (odd.strip(),)


def test_the_health_of_a_chip_is_not_that_of_the_cards_controller() -> None:
    assert parse_health(texts.CHIP_OK) == ChipHealth("OK")
    alarm = parse_health(texts.CHIP_ALARM)
    assert alarm is not None and (alarm.status, alarm.code) == ("Alarm", "80C98001")
    assert "RAS State" in alarm.information
    assert parse_health(texts.CARD_HEALTH) == ChipHealth("Warning"), "the worst chip; the MCU is none"
    assert parse_health("asked: info") is None


def test_memory_errors_are_the_greatest_of_the_chips() -> None:
    found = parse_ecc(texts.ECC.format(now=2, ever=5))
    assert found["HBM Double Bit Error Count"] == 2
    assert found["HBM Double Bit Aggregate Total Err Cnt"] == 5
    assert found["HBM Single Bit Error Count"] == 3
    assert parse_ecc("not supported") == {}


def test_gpus_and_their_processes() -> None:
    first, second = parse_gpus(texts.GPUS)
    assert (first.index, first.name, first.driver) == (0, "NVIDIA H200", "570.86.15")
    assert (first.volatile, second.volatile, second.aggregate) == (0, None, 4)
    assert (second.used_mib, second.total_mib) == (91022, 143771)
    (process,) = parse_processes(texts.GPU_PROCESSES)
    assert (process.uuid, process.pid, process.used_mib) == (second.uuid, 4711, 91000)
    assert parse_gpus("NVIDIA-SMI has failed\n") == parse_processes("") == ()


# The tools themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "tool"), [("npu", "npu-smi"), ("cuda", "nvidia-smi")])
def test_an_absent_tool_is_said(path: Path, device: str, tool: str) -> None:
    assert take_snapshot(device, time.monotonic() + LONG_S) == DeviceSnapshot(
        device, problems={tool: f"{tool} is not on PATH"}
    )


def test_devices_without_a_tool_are_not_asked() -> None:
    assert take_snapshot("sim", time.monotonic() + LONG_S) == DeviceSnapshot("sim")


def test_every_chip_and_card_is_asked(path: Path) -> None:
    npu_smi(path, texts.npu_table(cards=2))
    found = take_snapshot("npu", time.monotonic() + LONG_S)
    assert found.problems == {} and len(found.table.chips) == 4
    assert found.outputs[health_of(1, 1)] == "asked: info -t health -i 1 -c 1\n"
    assert found.outputs[ecc_of(1)] == "asked: info -t ecc -i 1\n"
    # The table, the mapping, four chips' health, and four kinds of two cards.
    assert len(found.outputs) == 2 + 4 + 8


def test_a_tool_that_hangs_is_cut_off_and_the_rest_is_kept(path: Path) -> None:
    npu_smi(path, texts.npu_table(cards=1), more='"info -t memory -i 0") exec sleep 1000;;')
    found = take_snapshot("npu", time.monotonic() + 4.0)
    assert set(found.problems) == found.late == {"npu-smi-memory-0"}
    assert "deadline" in found.problems["npu-smi-memory-0"]
    assert NPU_TABLE in found.outputs and ecc_of(0) in found.outputs


def test_a_driver_that_hangs_gives_no_table(path: Path) -> None:
    install(path / "bin", "npu-smi", "exec sleep 1000")
    found = take_snapshot("npu", time.monotonic() + 1.0)
    assert found.late == {NPU_TABLE, "npu-smi-map"} and found.table.chips == ()


def test_a_tool_that_fails_says_why_on_standard_output(path: Path) -> None:
    install(path / "bin", "nvidia-smi", 'echo "NVIDIA-SMI has failed because of the driver"; exit 9')
    found = take_snapshot("cuda", time.monotonic() + LONG_S)
    assert "NVIDIA-SMI has failed" in found.problems[GPU_TABLE] and "status 9" in found.problems[GPU_TABLE]
    assert found.outputs[GPU_TABLE], "what it said is kept"


def test_garbage_is_kept_as_it_is(path: Path) -> None:
    install(path / "bin", "nvidia-smi", r"printf '\xff\x00|,\n,,,\n'")
    found = take_snapshot("cuda", time.monotonic() + LONG_S)
    assert found.problems == {} and parse_gpus(found.outputs[GPU_TABLE]) == ()


def test_tools_that_hang_leave_no_process(path: Path) -> None:
    """What the tool started is ended with it."""
    install(path / "bin", "npu-smi", f"sleep 1000 & echo $! >> {path}/pids; wait")
    take_snapshot("npu", time.monotonic() + 1.0)
    pids = [int(line) for line in (path / "pids").read_text().split()]
    assert len(pids) == 2
    left = [process for pid in pids if (process := process_control.identify(pid)) is not None]
    assert process_control.wait_gone(left, LONG_S) == []
