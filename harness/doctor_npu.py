"""What only an Ascend machine has: CANN, the pairing of torch and torch_npu, chips, their health, who else holds
them.

Here: those checks. All judgements are pure functions of texts and versions; what is read from this machine is
read in `npu_checks`. Facts are PLATFORMS.md's where no other source is named. None of it was run on an NPU."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from harness.device_tools import NPU_TABLE, DeviceSnapshot, ecc_of, health_of
from harness.doctor_report import Check, Memory, holders, own_pids
from harness.machine import package_version
from harness.npu_smi import HEALTHY, NpuTable, parse_ecc, parse_health
from harness.toggles import torch_release

ASCEND = Path("/usr/local/Ascend")
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


def npu_checks(snapshot: DeviceSnapshot, env: Mapping[str, str]) -> list[Check]:
    """All that is asked beside whether torch sees a device."""
    table = snapshot.table
    checks = [
        check_cann(env, ASCEND),
        check_pairing(package_version("torch"), package_version("torch_npu"), cuda_build()),
        check_visible(env, len(table.chips)),
    ]
    if NPU_TABLE in snapshot.outputs:
        checks += [check_chips(table), check_health(snapshot, table), check_holders(table, own_pids())]
    return checks


def torch_loads_npu(env: Mapping[str, str]) -> bool:
    """Whether ``import torch`` loads installed backends: any other value than 1 says no (torch's ``__init__``)."""
    return env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


# CANN ------------------------------------------------------------------------------------------------------


def check_cann(env: Mapping[str, str], installed: Path) -> Check:
    """Whether CANN's ``set_env.sh`` was sourced, and which version it named."""
    home = next((env[name] for name in _HOMES if env.get(name)), None)
    if home is None:
        scripts = sorted(installed.glob("*/set_env.sh"))
        mend = (
            f"source {scripts[0]}"
            if scripts
            else "install CANN and source its set_env.sh, or use a CANN image"
        )
        return Check("CANN", "fail", f"{' and '.join(_HOMES)} are not set: set_env.sh was not sourced", mend)
    if not Path(home).is_dir():
        return Check(
            "CANN", "fail", f"{home} is no directory", "source the set_env.sh of the CANN that is installed"
        )
    for path in _version_files(Path(home)):
        try:
            found = parse_cann(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if found is not None:
            return Check("CANN", "ok", f"{found} at {home}")
    detail = f"{home} names no version that we can read"
    return Check("CANN", "warn", detail, "write the version down by hand: reports cannot compare it")


def _version_files(home: Path) -> Iterator[Path]:
    arch = home / f"{platform.machine()}-linux"
    names = ("ascend_toolkit_install.info", "ascend_nnae_install.info", "ascend_nnrt_install.info")
    yield from (folder / name for name in names for folder in (arch, home))
    yield from (home / name for name in ("version.cfg", "version.info"))
    yield from (home / part / "version.info" for part in ("runtime", "compiler", "opp"))


def parse_cann(text: str) -> str | None:
    """The version of ``version=8.3.RC1`` and its like, or of ``toolkit_running_version=[7.8.0.1.231:8.3.RC1]``,
    of which the second part is the release."""
    found = re.search(r"^\s*\w*version\s*=\s*\[[^\]:]*:([^\]]+)\]", text, re.IGNORECASE | re.MULTILINE)
    found = found or re.search(r"^\s*version\s*=\s*\[?([^\s\]]+)", text, re.IGNORECASE | re.MULTILINE)
    return found[1].strip() if found else None


# torch and torch_npu ---------------------------------------------------------------------------------------


def check_pairing(torch: str | None, torch_npu: str | None, cuda: str | None) -> Check:
    """Versions of the packages, None: not installed; ``cuda``: what torch was built for. torch_npu X.Y goes with
    torch X.Y, and not in one process with a CUDA build."""
    name = "torch_npu"
    if torch is None or torch_npu is None:
        lack = "torch" if torch is None else "torch_npu"
        return Check(name, "fail", f"{lack} is not installed", "use an image that has both, of one release")
    pair = f"torch {torch}, torch_npu {torch_npu}"
    if cuda is not None:
        plain = torch.partition("+")[0]
        mend = f"install the CPU build of torch: torch=={plain}+cpu (on aarch64 torch=={plain})"
        return Check(name, "fail", f"{pair}: torch is a build for CUDA {cuda}", mend)
    if torch_release(torch) != torch_release(torch_npu):
        wanted = ".".join(map(str, torch_release(torch)))
        return Check(
            name,
            "fail",
            f"{pair} do not go together",
            f"install torch_npu {wanted}.*, or torch of its release",
        )
    return Check(name, "ok", pair)


def cuda_build() -> str | None:
    """The CUDA version that the installed torch was built for, read from its file: importing it may fail here."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        built = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return built[1] if built else None
    return None


# Devices ---------------------------------------------------------------------------------------------------


def check_visible(env: Mapping[str, str], chips: int) -> Check:
    """ASCEND_RT_VISIBLE_DEVICES holds logic ids, ascending, with commas. ``chips`` 0: not known."""
    name = "ASCEND_RT_VISIBLE_DEVICES"
    text = env.get(name)
    if text is None:
        return Check(name, "ok", "not set: every device is visible")
    ids = text.split(",")
    if not text or not all(part.isdecimal() for part in ids):
        mend = "write logic ids with commas, as 0,1,2; no ranges, no spaces"
        return Check(name, "fail", f"{text!r} is no list of logic ids", mend)
    numbers = [int(part) for part in ids]
    if numbers != sorted(set(numbers)):
        return Check(
            name, "fail", f"{text} does not ascend", f"write {','.join(map(str, sorted(set(numbers))))}"
        )
    if chips and numbers[-1] >= chips:
        detail = f"{text}: npu-smi shows {chips} chips, numbered from 0"
        return Check(
            name, "fail", detail, "name devices that are there; a 910C card has two chips, each with a number"
        )
    return Check(name, "ok", f"{text}: {len(numbers)} devices")


def check_chips(table: NpuTable) -> Check:
    """How many there are, and of which driver."""
    if not table.chips:
        return Check("chips", "fail", "npu-smi info names none that we can read", "look at its raw output")
    names = [chip.name for chip in table.chips]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    detail = f"{counted} on {len(table.cards)} cards, driver {table.driver or 'unknown'}"
    if table.unread:
        mend = "its format is new to us: count the devices by hand"
        return Check("chips", "warn", f"{detail}; {len(table.unread)} rows could not be read", mend)
    return Check("chips", "ok", detail)


def check_health(snapshot: DeviceSnapshot, table: NpuTable) -> Check:
    """By chip: the table's word, or that of the question for its health where the table is content; and the memory
    errors of each card. Errors since the start are a fault now, older ones a sign of wear."""
    bad: list[str] = []
    worn: list[str] = []
    answers = 0
    for chip in table.chips:
        said = parse_health(snapshot.outputs.get(health_of(chip.npu, chip.chip), ""))
        answers += said is not None
        state = said.status if said is not None and chip.health == HEALTHY else chip.health
        if state != HEALTHY:
            more = f"{said.code} {said.information}" if said is not None else ""
            bad.append(f"{chip.words} {state} {more}".strip())
    for card in table.cards:
        for name, count in parse_ecc(snapshot.outputs.get(ecc_of(card), "")).items():
            if count and "Double" in name:
                (bad if "Error Count" in name else worn).append(f"NPU {card} {name} {count}")
    if bad:
        mend = "do not run on it: leave it out of ASCEND_RT_VISIBLE_DEVICES, and have it looked at"
        return Check("health", "fail", "; ".join(bad), mend)
    if worn:
        return Check("health", "warn", "; ".join(worn), "watch it: it had uncorrected memory errors before")
    if table.chips and not answers:
        detail = "the table says OK of all chips; npu-smi -t health gave no answer"
        return Check("health", "warn", detail, "run npu-smi info -t health -i CARD -c CHIP by hand")
    return Check("health", "ok", f"{len(table.chips)} chips OK, no uncorrected memory error told")


def check_holders(table: NpuTable, own: frozenset[int]) -> Check:
    """Whether somebody else uses the chips. ``own``: processes of ours."""
    return holders(
        [
            f"pid {one.pid} {one.name}".strip() + f" on NPU {one.npu} chip {one.chip}"
            for one in table.processes
            if one.pid not in own
        ],
        [Memory(chip.words, chip.used_mib, chip.total_mib) for chip in table.chips],
    )
