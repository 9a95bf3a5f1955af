"""The doctor: what it finds on a machine that works, and what it says of one that does not."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from harness import doctor as doctor_room
from harness.doctor import Check, DoctorReport, check_device, check_disk, check_package, check_py_spy, doctor
from harness.store import load_schema


def test_this_machine() -> None:
    report = doctor("sim")
    names = [check.name for check in report.checks]
    assert len(set(names)) == len(names)
    assert {
        "python",
        "torch",
        "ray",
        "py-spy",
        "ptrace",
        "/dev/shm",
        "disk",
        "cores",
        "memory",
        "xgrammar",
    } <= set(names)
    assert all(check.mend for check in report.checks if check.status != "ok")
    jsonschema.validate(report.to_json(), load_schema("doctor"))


@pytest.mark.parametrize(
    ("states", "ready", "status"),
    [
        (("ok", "ok"), True, 0),
        (("ok", "warn"), True, 0),
        (("warn", "fail"), False, 1),
        (("missing", "fail"), False, 4),
    ],
)
def test_the_exit_status(states: tuple[str, ...], ready: bool, status: int) -> None:
    checks = tuple(Check(str(i), state, "x", "y") for i, state in enumerate(states))  # type: ignore[arg-type]
    report = DoctorReport("sim", checks)
    assert (report.ready, report.exit) == (ready, status)


def test_a_stack_of_a_child_is_really_read() -> None:
    check = check_py_spy()
    assert check.status == "ok" and "1 thread" in check.detail


@pytest.mark.parametrize(
    ("program", "said"),
    [("/bin/false", "cannot read a stack"), ("/bin/true", "printed no JSON"), ("/none", "No such file")],
)
def test_a_py_spy_that_does_not_work(monkeypatch: pytest.MonkeyPatch, program: str, said: str) -> None:
    monkeypatch.setattr(doctor_room, "find_py_spy", lambda: program)
    check = check_py_spy()
    assert check.status == "fail" and said in check.detail and check.mend


def test_a_child_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_room, "CHILD", "raise SystemExit")
    assert check_py_spy().status == "warn"


def test_devices() -> None:
    assert check_device("sim").status == check_device("cpu").status == "ok"
    with pytest.raises(ValueError, match="allowed: sim, cpu, cuda, npu"):
        doctor("tpu")


def test_a_package_that_is_not_there() -> None:
    check = check_package("no-such-package-of-ours", "1.0")
    assert check.status == "fail" and "pip install" in check.mend


def test_the_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert str(tmp_path) in check_disk(tmp_path / "a" / "b").detail


@pytest.mark.parametrize(
    ("scope", "capable", "status"), [("3", True, "fail"), ("2", False, "fail"), ("2", True, "ok")]
)
def test_ptrace_scopes(monkeypatch: pytest.MonkeyPatch, scope: str, capable: bool, status: str) -> None:
    monkeypatch.setattr(doctor_room, "read_first_line", lambda path: scope)
    monkeypatch.setattr(doctor_room, "_has_capability", lambda bit: capable)
    assert doctor_room.check_ptrace().status == status
