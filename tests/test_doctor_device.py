"""The doctor on machines with accelerators, by what tools and environment say there. No such machine is here."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import smi_texts as texts
from test_device_tools import install, npu_smi

from harness import doctor_cuda as cuda
from harness import doctor_device as room
from harness import doctor_npu as npu
from harness.device_tools import GPU_PROCESSES, GPU_TABLE, NPU_TABLE, DeviceSnapshot, ecc_of, health_of
from harness.doctor import doctor
from harness.doctor_report import Check
from harness.npu_smi import parse_table
from harness.nvidia_smi import parse_gpus, parse_processes
from harness.store import load_schema

NOBODY: frozenset[int] = frozenset()


def snapshot(table: str, **outputs: str) -> DeviceSnapshot:
    return DeviceSnapshot("npu", {NPU_TABLE: table, **outputs})


# CANN and torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100R001C23", "8.3.RC1"),
        ("Version=7.8.0.1.231\nversion_dir=8.2.RC1", "7.8.0.1.231"),
        ("# version: 1.0\ntoolkit_running_version=[7.8.0.1.231:8.3.RC1]\n", "8.3.RC1"),
        ("version=[9.1.0]", "9.1.0"),
        ("nothing of the kind", None),
    ],
)
def test_the_version_of_cann(text: str, version: str | None) -> None:
    assert npu.parse_cann(text) == version


def test_a_set_env_that_was_not_sourced(tmp_path: Path) -> None:
    check = npu.check_cann({}, tmp_path)
    assert check.status == "fail" and "not sourced" in check.detail and "install CANN" in check.mend
    script = tmp_path / "ascend-toolkit" / "set_env.sh"
    script.parent.mkdir()
    script.touch()
    assert npu.check_cann({}, tmp_path).mend == f"source {script}"
    gone = npu.check_cann({"ASCEND_HOME_PATH": str(tmp_path / "gone")}, tmp_path)
    assert gone.status == "fail" and "no directory" in gone.detail


def test_a_cann_that_is_there(tmp_path: Path) -> None:
    env = {"ASCEND_TOOLKIT_HOME": str(tmp_path)}
    assert npu.check_cann(env, tmp_path).status == "warn"
    (tmp_path / "version.cfg").write_text("toolkit_running_version=[7.8.0.1.231:8.3.RC1]\n")
    assert npu.check_cann(env, tmp_path) == Check("CANN", "ok", f"8.3.RC1 at {tmp_path}")


@pytest.mark.parametrize(
    ("torch", "torch_npu", "built", "status", "said"),
    [
        ("2.9.0+cpu", "2.9.0.post2", None, "ok", "2.9.0.post2"),
        ("2.9.0", "2.7.1", None, "fail", "do not go together"),
        ("2.9.0", "2.9.0", "12.8", "fail", "a build for CUDA 12.8"),
        ("2.9.0", None, None, "fail", "torch_npu is not installed"),
        (None, "2.9.0", None, "fail", "torch is not installed"),
    ],
)
def test_the_pair_of_torch_and_torch_npu(
    torch: str | None, torch_npu: str | None, built: str | None, status: str, said: str
) -> None:
    check = npu.check_pairing(torch, torch_npu, built)
    assert check.status == status and said in check.detail
    assert status == "ok" or check.mend


def test_this_torch_is_no_cuda_build() -> None:
    import torch

    assert npu.cuda_build() == torch.version.cuda


@pytest.mark.parametrize(("value", "loads"), [(None, True), ("1", True), ("0", False)])
def test_whether_torch_loads_torch_npu_by_itself(value: str | None, loads: bool) -> None:
    env = {} if value is None else {"TORCH_DEVICE_BACKEND_AUTOLOAD": value}
    assert npu.torch_loads_npu(env) is loads


# Visible devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (None, "ok", "every device"),
        ("0,1,2", "ok", "3 devices"),
        ("0-3", "fail", "no list of logic ids"),
        ("0, 1", "fail", "no list of logic ids"),
        ("", "fail", "no list of logic ids"),
        ("1,0", "fail", "does not ascend"),
        ("0,0", "fail", "does not ascend"),
        ("15,16", "fail", "16 chips"),
    ],
)
def test_visible_npus(text: str | None, status: str, said: str) -> None:
    check = npu.check_visible({} if text is None else {"ASCEND_RT_VISIBLE_DEVICES": text}, 16)
    assert check.status == status and said in check.detail


def test_npus_of_unknown_number_are_not_held_against_it() -> None:
    assert npu.check_visible({"ASCEND_RT_VISIBLE_DEVICES": "30"}, 0).status == "ok"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (None, "ok", "every device"),
        ("1,0", "ok", "2 devices"),
        ("GPU-bbbb", "ok", "1 devices"),
        ("MIG-something", "ok", "1 devices"),
        ("", "fail", "hides every device"),
        ("-1", "fail", "hides every device"),
        ("0,2", "fail", "'2' is no device"),
        ("0,GPU-ffff", "fail", "'GPU-ffff' is no device"),
        ("0,0", "fail", "twice"),
    ],
)
def test_visible_gpus(text: str | None, status: str, said: str) -> None:
    env = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    check = cuda.check_visible(env, parse_gpus(texts.GPUS))
    assert check.status == status and said in check.detail


# Chips, GPUs, and who holds them -----------------------------------------------------------------------------


def test_chips_are_counted() -> None:
    check = npu.check_chips(parse_table(texts.npu_table()))
    assert check == Check("chips", "ok", "16 x Ascend910 on 8 cards, driver 25.3.rc1")
    assert npu.check_chips(parse_table("nonsense")).status == "fail"


def test_a_chip_with_an_alarm() -> None:
    said = {health_of(0, chip): texts.CHIP_OK for chip in range(2)} | {health_of(0, 1): texts.CHIP_ALARM}
    healthy = snapshot(texts.npu_table(cards=1), **said)
    check = npu.check_health(healthy, healthy.table)
    assert check.status == "fail" and "NPU 0 chip 1 Alarm 80C98001" in check.detail
    alone = snapshot(texts.npu_table(cards=1, health={(0, 0): "Critical"}))
    assert "NPU 0 chip 0 Critical" in npu.check_health(alone, alone.table).detail


@pytest.mark.parametrize(("now", "ever", "status"), [(0, 0, "ok"), (0, 5, "warn"), (1, 5, "fail")])
def test_uncorrected_memory_errors_of_a_card(now: int, ever: int, status: str) -> None:
    said = {health_of(0, chip): texts.CHIP_OK for chip in range(2)}
    found = snapshot(texts.npu_table(cards=1), **said, **{ecc_of(0): texts.ECC.format(now=now, ever=ever)})
    check = npu.check_health(found, found.table)
    assert check.status == status and bool(check.mend) is (status != "ok")


def test_a_health_that_nobody_tells_is_no_certainty() -> None:
    found = snapshot(texts.npu_table(cards=1))
    assert npu.check_health(found, found.table).status == "warn"


def test_who_holds_the_chips() -> None:
    table = parse_table(texts.npu_table(processes=((0, 1, 4242, "python3", 900),)))
    check = npu.check_holders(table, NOBODY)
    assert check.status == "warn" and "pid 4242 python3 on NPU 0 chip 1" in check.detail
    assert npu.check_holders(table, frozenset({4242})).status == "ok"
    held = npu.check_holders(parse_table(texts.npu_table(used={(2, 0): 30000})), NOBODY)
    assert held.status == "warn" and "NPU 2 chip 0 30000 of 65536 MiB" in held.detail


def test_gpus() -> None:
    gpus = parse_gpus(texts.GPUS)
    assert cuda.check_gpus(gpus).detail == "2 x NVIDIA H200, driver 570.86.15"
    worn = cuda.check_health(gpus)
    assert worn.status == "warn" and "GPU 1: 4 uncorrected" in worn.detail
    assert cuda.check_health(gpus[:1]).status == "ok"
    bad = parse_gpus(texts.GPUS.replace("29, 0, 0", "29, 2, 2"))
    assert cuda.check_health(bad).status == "fail"
    check = cuda.check_holders(gpus, parse_processes(texts.GPU_PROCESSES), NOBODY)
    assert check.status == "warn" and "pid 4711 /usr/bin/python3 on GPU 1" in check.detail
    unseen = cuda.check_holders(gpus, (), NOBODY)
    assert unseen.status == "warn" and "GPU 1 91022 of 143771 MiB" in unseen.detail
    assert cuda.check_gpus(()).status == "fail"


# The tools, and the whole ------------------------------------------------------------------------------------


def test_a_tool_that_hangs_stands_in_the_way() -> None:
    late = DeviceSnapshot("npu", problems={NPU_TABLE: "killed"}, late=frozenset({NPU_TABLE}))
    assert room.check_tool(late).status == "fail"
    some = DeviceSnapshot("cuda", {GPU_TABLE: "x"}, {GPU_PROCESSES: "Insufficient Permissions"})
    assert room.check_tool(some).status == "warn"
    whole = DeviceSnapshot("cuda", {}, {GPU_TABLE: "no driver"})
    assert room.check_tool(whole).status == "fail"
    assert room.check_tool(DeviceSnapshot("cuda", {GPU_TABLE: "x"})).status == "ok"
    absent = room.check_tool(DeviceSnapshot("npu", problems={"npu-smi": "npu-smi is not on PATH"}))
    assert absent.status == "warn" and "evidence" in absent.mend


def test_what_the_environment_hides_is_a_check_each() -> None:
    found = list(room.check_environment("npu", {"HCCL_EXEC_TIMEOUT": "0", "ASCEND_LAUNCH_BLOCKING": "1"}))
    assert [(check.name, check.status) for check in found] == [
        ("HCCL_EXEC_TIMEOUT", "warn"),
        ("ASCEND_LAUNCH_BLOCKING", "fail"),
    ]
    assert [check.status for check in room.check_environment("cuda", {})] == ["ok"]


def test_a_machine_without_the_device_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here is no torch_npu; a tool that answers does not make a device of it."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    npu_smi(tmp_path, texts.npu_table(cards=1))
    report = doctor("npu")
    by_name = {check.name: check for check in report.checks}
    assert report.exit == 4 and by_name["device npu"].status == "missing"
    assert by_name["chips"].status == "ok" and by_name["npu-smi"].status == "ok"
    assert all(check.mend for check in report.checks if check.status != "ok")
    assert len(by_name) == len(report.checks)
    document = report.to_json()
    jsonschema.validate(document, load_schema("doctor"))
    assert "Ascend910" in document["raw"][NPU_TABLE], "the raw words are kept"


def test_a_tool_that_answers_garbage_makes_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    install(tmp_path / "bin", "nvidia-smi", r"printf '\x01\x02,,\n'")
    by_name = {check.name: check for check in doctor("cuda").checks}
    assert by_name["device cuda"].status == "missing" and by_name["GPUs"].status == "fail"
