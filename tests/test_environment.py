"""What a machine says of drivers, packages and commits: read from files and tools that are made up here."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest

from harness.environment import Reading, driver_readings, git_head, package_readings, processor

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.3        44                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3402 / 65536         |
| 1     910B3               | Warning       | 91.0        43                0    / 0             |
"""


def tool(folder: Path, name: str, text: str, status: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text(text)
    (folder / name).write_text(f"#!/bin/sh\n/bin/cat '{folder}/{name}.txt'\nexit {status}\n")
    (folder / name).chmod(0o755)


def readings(root: Path) -> dict[str, Reading]:
    return {one.name: one for one in driver_readings(root)}


def test_a_machine_without_accelerators_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    found = readings(tmp_path)
    assert {one.value for one in found.values()} == {None}
    assert found["nvidia driver"].why == "nvidia-smi: not found"
    assert found["ascend devices"].why == "npu-smi: not found"
    assert found["cann"].why.startswith(f"no {tmp_path}/usr/local/Ascend/cann/")


def test_what_the_tools_and_files_of_vendors_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path / "bin", "nvidia-smi", "NVIDIA H200, 570.86.15\nNVIDIA H200, 570.86.15\n")
    tool(tmp_path / "bin", "npu-smi", NPU_SMI)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    ascend = tmp_path / "usr/local/Ascend"
    toolkit = ascend / "ascend-toolkit/latest" / f"{platform.machine()}-linux"
    for path, text in (
        (ascend / "driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n"),
        (ascend / "firmware/version.info", "Version=7.7.0.6.236\npackage_version=25.2.0\n"),
        (toolkit / "ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    found = readings(tmp_path)
    assert {name: one.value for name, one in found.items()} == {
        "nvidia devices": "2 x NVIDIA H200",
        "nvidia driver": "570.86.15",
        "ascend devices": "2 x 910B3",
        "ascend driver": "25.2.0",
        "ascend firmware": "7.7.0.6.236",
        "cann": "8.3.RC1",
    }
    newer = tmp_path / "cann-9.1" / f"{platform.machine()}-linux"
    newer.mkdir(parents=True)
    (newer / "ascend_toolkit_install.info").write_text("version=9.1.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(newer.parent))
    assert readings(tmp_path)["cann"].value == "9.1.0"  # what is sourced comes before what is installed


def test_a_tool_that_fails_is_told_and_the_kernel_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path / "bin", "nvidia-smi", "NVIDIA-SMI has failed, because", status=9)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert readings(tmp_path)["nvidia driver"].value is None
    assert "status 9" in readings(tmp_path)["nvidia driver"].why
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    assert readings(tmp_path)["nvidia driver"] == Reading("nvidia driver", "570.86.15", str(version))


def test_the_processor_is_named_or_the_lack_of_it() -> None:
    one = processor()
    assert one.name == "processor" and (one.value or "names no model" in one.why)


# --- packages ---


def environment(folder: Path, name: str, version: str, origin: dict[str, object] | None = None) -> str:
    """A virtual environment with one package; returns its interpreter."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")  # it is never run
    python.chmod(0o755)
    info = folder / "lib/python3.12/site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    return str(python)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("version", "origin", "commit"),
    [
        ("0.5.23", {"url": "https://x/y.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, COMMIT),
        ("0.32.0+g1a2b3c4d5", None, "1a2b3c4d5"),
        ("0.32.0.dev3+cpu.g1a2b3c4d5.d20260101", None, "1a2b3c4d5"),
        ("0.5.23", None, None),
        ("0.5.23", {"url": "file:///nowhere", "dir_info": {"editable": True}}, None),
    ],
)
def test_an_engine_s_package_and_commit(
    tmp_path: Path, version: str, origin: dict[str, object] | None, commit: str | None
) -> None:
    python = environment(tmp_path, "sgl-kernel", version, origin)
    package, of = package_readings(python, ["sgl-kernel"])
    assert (package.value, of.name, of.value) == (version, "sgl-kernel commit", commit)


def test_a_package_or_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    python = environment(tmp_path, "sglang", "0.5.23")
    (absent,) = package_readings(python, ["vllm"])
    assert absent.value is None and "not in" in absent.why and "site-packages" in absent.why
    (lost,) = package_readings(str(tmp_path / "no/python"), ["vllm"])
    assert lost.value is None and "no packages of" in lost.why
    (own, *_) = package_readings("", ["typer"])
    assert own.value is not None


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *arguments],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_commit_of_a_checkout_is_read_without_git(tmp_path: Path) -> None:
    checkout = tmp_path / "engine"
    checkout.mkdir()
    assert git_head(checkout) is None
    git(checkout, "init", "-q")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "one")
    head = git(checkout, "rev-parse", "HEAD")
    assert git_head(checkout) == head
    git(checkout, "pack-refs", "--all")
    assert git_head(checkout) == head
    git(checkout, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "side")
    assert git_head(tmp_path / "tree") == head
    git(checkout, "checkout", "-q", "--detach")
    assert git_head(checkout) == head
    url = {"url": f"file://{checkout}/python", "dir_info": {"editable": True}}
    python = environment(tmp_path / "env", "sglang", "0.5.23", url)
    assert package_readings(python, ["sglang"])[1].value == head
