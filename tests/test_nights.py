"""Nights as commands: the image's torch stays the image's, and the documents' examples are what the CLI takes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from harness import cluster
from harness import image_environment as images
from harness import night as nights
from harness.cli import app
from harness.durations import parse_duration_s
from harness.night import Night
from harness.scenario import list_scenarios

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
NIGHT = Night(
    device="npu", budget_s=28800.0, trials=100, seed=0, out="runs", keep_days=30.0, keep=60, allow_skip=False,
    sglang_python=None, sglang_model=None,
)  # fmt: skip


def fake_image(folder: Path, *, torch: str | None = "2.9.0+cpu", inside: str = "image") -> Path:
    """A Python with a torch that is only a name and a version; returns its interpreter."""
    venv.create(folder / inside, symlinks=True, with_pip=False)
    python = folder / inside / "bin" / "python"
    if torch is not None:
        lay_torch(images.look(python).own, torch)
    return python


def lay_torch(site: str, version: str, name: str = "torch") -> None:
    package, metadata = Path(site) / name, Path(site) / f"{name}-{version}.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: not found')\n")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


# The environment ------------------------------------------------------------------------------------------


def test_the_image_is_looked_at_without_importing_torch(tmp_path: Path) -> None:
    image = images.look(fake_image(tmp_path))
    assert image.packages["torch"] == "2.9.0+cpu" and image.origins["torch_npu"] is None
    assert str(image.origins["torch"]).endswith("/torch/__init__.py")


def test_the_environment_sees_the_torch_of_an_image_that_is_an_environment_itself(tmp_path: Path) -> None:
    python, own = fake_image(tmp_path), tmp_path / "own"
    image = images.look(python)
    venv.create(own, symlinks=True, with_pip=False, system_site_packages=True)
    assert images.look(own / "bin" / "python").owned() != image.owned(), "venv alone does not see it"
    images._see_through(own / "bin" / "python", image)
    images._check(own / "bin" / "python", image)
    assert images.look(own / "bin" / "python").owned() == image.owned()


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [("torch", "2.13.0", True), ("torch_npu", "2.9.0", True), ("torchvision", "0.1", False)],
)
def test_a_torch_in_front_of_the_images_is_refused(
    tmp_path: Path, name: str, version: str, refused: bool
) -> None:
    python, own = fake_image(tmp_path), tmp_path / "own"
    image = images.look(python)
    venv.create(own, symlinks=True, with_pip=False, system_site_packages=True)
    images._see_through(own / "bin" / "python", image)
    lay_torch(images.look(own / "bin" / "python").own, version, name)
    if not refused:
        images._check(own / "bin" / "python", image)
        return
    with pytest.raises(images.ImageError, match="not the image's any more"):
        images._check(own / "bin" / "python", image)


def test_an_image_without_torch_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(images.NoTorchError, match=r"has no torch.*PYTHON="):
        images.make(fake_image(tmp_path, torch=None), tmp_path / "own", ROOT)
    assert not (tmp_path / "own").exists()
    with pytest.raises(images.ImageError, match="is no Python that runs"):
        images.look("/bin/false")


def test_torch_is_never_asked_for_and_the_image_is_pinned() -> None:
    wanted = images.requirements(PYPROJECT, "npu")
    assert not any(re.match(r"torch\b|torch[-_]npu", one) for one in wanted)
    assert any(one.startswith("ray") for one in wanted) and "nvidia-ml-py>=12" in images.requirements(
        PYPROJECT, "cuda"
    )
    packages = {
        "torch": "2.9.0+cpu",
        "torch_npu": "2.9.0",
        "ray": "2.40.0",
        "sympy": "1.13.3",
        "odd": "of our own",
    }
    image = images.Sight({}, packages, (), "", "3.11.9")
    assert images.constraints(image, PYPROJECT) == ["sympy==1.13.3", "torch==2.9.0+cpu", "torch_npu==2.9.0"]


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "work").write_text("mine")
    with pytest.raises(images.ImageError, match="is in the way"):
        images.make(fake_image(tmp_path), tmp_path / "own", ROOT)
    assert (tmp_path / "own" / "work").exists()


@pytest.mark.network
@pytest.mark.timeout(300)
def test_a_whole_environment_is_made_once_and_again_for_another_image(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "small"\nversion = "1"\ndependencies = ["torch>=2.7", "typer>=0.12"]\n'
        "[tool.setuptools]\npackages = []\n"
    )
    python, own = fake_image(tmp_path), tmp_path / "own"
    made = images.make(python, own, project)
    sight = images.look(made)
    assert sight.owned() == images.look(python).owned()
    assert "typer" in sight.packages and sight.packages["small"] == "1"
    before = (own / "pyvenv.cfg").stat().st_mtime_ns
    assert images.make(python, own, project) == made and (own / "pyvenv.cfg").stat().st_mtime_ns == before
    other = fake_image(tmp_path, torch="2.10.0", inside="other")
    assert images.look(images.make(other, own, project)).packages["torch"] == "2.10.0"


# The night ------------------------------------------------------------------------------------------------


def test_a_night_runs_the_builtin_scenarios_and_holds_them_against_the_last_pass() -> None:
    (only,) = nights.runs(NIGHT)
    assert only[: 1 + len(nights.BUILTIN)] == ["run", *nights.BUILTIN]
    assert shlex.join(only).endswith(
        "--device npu --trials 100 --seed 0 --time-budget 28800s --baseline last-pass --out runs"
    )
    assert nights.prune(NIGHT) == ["prune", "runs", "--keep-days", "30", "--keep", "60"]


def test_sglang_is_added_where_its_python_is_named_and_shares_the_budget() -> None:
    night = replace(
        NIGHT, sglang_python="/opt/sglang/bin/python", sglang_model="/models/lite", more=("--seed", "3")
    )
    own, sglang = nights.runs(night)
    assert sglang[1:3] == ["sglang-dp-npu", "sglang-dp-npu-retract"]
    assert "target.python=/opt/sglang/bin/python" in sglang and "model.directory=/models/lite" in sglang
    for arguments in (own, sglang):
        assert arguments[arguments.index("--time-budget") + 1] == "14400s"
        assert arguments[-2:] == ["--seed", "3"]


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_every_command_of_a_night_is_one_that_the_cli_takes(device: str) -> None:
    night = replace(NIGHT, device=device, sglang_python=sys.executable, allow_skip=True)
    for arguments in nights.runs(night):
        done = CliRunner().invoke(app, [*arguments, "--dry-run"])
        assert done.exit_code == 0, done.output


def test_the_scenarios_are_those_that_there_are() -> None:
    scenarios = {scenario.name: scenario for scenario in list_scenarios()}
    own = {name for name, scenario in scenarios.items() if scenario.target.name == "builtin"}
    assert set(nights.BUILTIN) == own
    for device, names in nights.SGLANG.items():
        assert {scenarios[name].target.device for name in names} == {device}


def test_the_first_of_70_2_1_3_4_0_is_the_nights_status() -> None:
    for better, worse in zip((0, 4, 3, 1, 2), (4, 3, 1, 2, 70), strict=True):
        assert nights.worst([better, worse]) == nights.worst([worse, better]) == worse
    assert nights.worst([0, 143]) == 143, "a signal's status is told as it is"


def test_hardware_is_seen_by_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci_manager").touch()
    assert not nights.has_device("npu", tmp_path)
    (tmp_path / "dev" / "davinci0").touch()
    assert nights.has_device("npu", tmp_path) and not nights.has_device("cuda", tmp_path)


class Steps:
    """Stands for the commands of a night; ``statuses`` by subcommand."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.ran: list[str] = []

    def __call__(self, command: list[str]) -> int:
        name = command[3] if command[1:3] == ["-m", "harness.cli"] else command[0]
        self.ran.append(name)
        return self.statuses.get(name, 0)


@pytest.mark.parametrize(
    ("statuses", "ran", "status"),
    [
        ({}, ["doctor", "run", "prune"], 0),
        ({"doctor": 1}, ["doctor"], 1),
        ({"doctor": 4, "run": 4}, ["doctor", "run", "prune"], 4),
        ({"run": 1}, ["doctor", "run", "prune"], 1),
        ({"run": 0, "prune": 70}, ["doctor", "run", "prune"], 0),
    ],
)
def test_the_doctor_comes_first_and_old_runs_go_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int], ran: list[str], status: int
) -> None:
    steps = Steps(**statuses)
    monkeypatch.setattr(nights, "call", steps)
    assert nights.spend(replace(NIGHT, out=str(tmp_path)), Path("python")) == status
    assert steps.ran == ran


@pytest.mark.parametrize("hardware", [True, False])
def test_without_torch_only_a_machine_without_the_device_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: bool
) -> None:
    steps = Steps()
    monkeypatch.setattr(nights, "call", steps)
    monkeypatch.setattr(nights, "has_device", lambda device: hardware)
    python = str(fake_image(tmp_path, torch=None))
    if hardware:
        with pytest.raises(images.NoTorchError):
            nights.environment(NIGHT, python, tmp_path / "own")
        assert steps.ran == []
    else:
        assert nights.environment(NIGHT, python, tmp_path / "own") == ROOT / ".venv" / "bin" / "python"
        assert steps.ran == ["make"]


def test_make_hands_its_variables_on() -> None:
    command = [
        "make",
        "-n",
        "stress-npu",
        "PYTHON=py",
        "BUDGET=2h",
        "TRIALS=7",
        "ALLOW_SKIP=1",
        "ARGS=--set a.b=1",
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    (line,) = [line for line in said.splitlines() if "harness.night" in line]
    night = nights.parse(shlex.split(line)[3:])
    assert (night.device, night.budget_s, night.trials, night.allow_skip) == ("npu", 7200.0, 7, True)
    assert night.more == ("--set", "a.b=1")
    assert shlex.split(line)[:3] == ["py", "-m", "harness.night"]


@pytest.mark.parametrize("text", ["", "0", "2x", "h2", "-1h"])
def test_a_budget_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no duration|no time"):
        parse_duration_s(text)
    with pytest.raises(SystemExit) as left:
        nights.parse(["npu", f"--budget={text}"])
    assert left.value.code == 2


# The documents --------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "nights.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def documents() -> list[Any]:
    return [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]


def texts(value: Any) -> list[str]:
    """Every string in a document."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in texts(part)]


def commands(text: str) -> list[list[str]]:
    """The hangrig command lines of a shell script, variables as a word of their own."""
    whole = text.replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in whole.splitlines()]
    return [shlex.split(line.split(" || ")[0])[1:] for line in lines if line.startswith("hangrig ")]


def test_the_examples_are_a_workflow_and_a_ray_job() -> None:
    workflow, job = documents()
    assert set(workflow["jobs"]) and workflow[True]["schedule"], "yaml reads the key on as true"
    (night,) = workflow["jobs"].values()
    assert "self-hosted" in night["runs-on"] and night["timeout-minutes"] > 480
    assert "--cap-add SYS_PTRACE" in night["container"]["options"]
    uploads = [
        step for step in night["steps"] if str(step.get("uses", "")).startswith("actions/upload-artifact")
    ]
    assert uploads and uploads[0]["if"] == "always()"
    assert any("GITHUB_STEP_SUMMARY" in text for text in texts(workflow))
    assert job["kind"] == "RayJob"
    pods = [job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]]
    pods += [group["template"]["spec"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert "SYS_PTRACE" in container["securityContext"]["capabilities"]["add"]
        assert any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["volumes"])
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
    worker = pods[1]["containers"][0]
    assert worker["resources"]["limits"]["huawei.com/Ascend910"] == 16
    assert "--ray-address" in job["spec"]["entrypoint"]


def test_every_hangrig_command_in_the_documents_is_one_that_the_cli_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    found = [
        one
        for text in (*blocks(""), *blocks("sh"), *(t for d in documents() for t in texts(d)))
        for one in commands(text)
    ]
    assert {one[0] for one in found} >= {"run", "prune", "doctor"}
    for arguments in found:
        command = app.registered_commands
        assert arguments[0] in {entry.name for entry in command}, arguments
        dry = ["--dry-run"] if arguments[0] in ("run", "prune") else ["--help"]
        done = CliRunner().invoke(app, [*arguments, *dry])
        assert done.exit_code == 0, (arguments, done.output)


def test_every_night_in_the_documents_is_one_that_can_be_had() -> None:
    text = (ROOT / "docs" / "nights.md").read_text()
    lines = re.findall(r"python3 -m harness\.night ([^\n`]*)", text)
    assert len(lines) >= 4
    for line in lines:
        nights.parse(shlex.split(line))


def test_auto_is_the_cluster_of_the_job_or_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_CURRENT_CLUSTER", tmp_path / "current")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(cluster.ClusterError, match="no Ray cluster runs on this machine"):
        cluster.resolve_address("auto")
    (tmp_path / "current").write_text("10.0.0.7:6379\n")
    assert cluster.resolve_address("auto") == "10.0.0.7:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.8:6379")
    assert cluster.resolve_address("auto") == "10.0.0.8:6379"
    assert cluster.resolve_address("10.0.0.9:6379") == "10.0.0.9:6379"
