"""Environments of the real engines, without a network: when they are built, what stands in, the model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from engines import environments
from engines.environments import MARKER, RECIPES, SGLANG, STANDINS, BuildError, Recipe, environment
from engines.model import PRESET, write_model

from harness import process_control
from harness.process_control import ProcessId
from serving.model_config import load_config, preset
from serving.weights import load_weights, random_weights

PROBE = "import tiny; raise SystemExit(0 if tiny.VALUE == {value} else 'tiny.VALUE is ' + repr(tiny.VALUE))"


def wheel(folder: Path, value: int) -> Path:
    """A wheel of one module, so that pip needs no index."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", f"VALUE = {value}\n")
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr(
            "tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny-1.dist-info/RECORD", "tiny.py,,\n")
    return path


def recipe(path: Path, value: int) -> Recipe:
    return Recipe(
        engine="tiny",
        pip=(("install", "--no-index", str(path)),),
        files=(path,),
        standins=STANDINS,
        check=PROBE.format(value=value),
    )


def run(python: Path | str, program: str, **environ: str) -> str:
    """What ``program`` printed. Fails with what it said when it did not end well."""
    done = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the recipe decides ---------------------------------------------------------------------------------------


def test_the_key_changes_with_each_thing_that_decides_the_content(tmp_path: Path) -> None:
    requirements, standins = tmp_path / "requirements.txt", tmp_path / "standins"
    requirements.write_text("a==1\n")
    (standins / "part").mkdir(parents=True)
    (standins / "part" / "__init__.py").write_text("")
    base = Recipe("e", pip=(("install", "b==1"),), files=(requirements,), standins=standins, check="pass")
    seen = {base.key()}

    def is_new(changed: Recipe) -> bool:
        before = len(seen)
        seen.add(changed.key())
        return len(seen) == before + 1

    assert base.key() in seen  # the same recipe has the same key
    assert is_new(dataclasses.replace(base, engine="f"))
    assert is_new(dataclasses.replace(base, pip=(("install", "b==2"),)))
    assert is_new(dataclasses.replace(base, pip=(("install", "b==1"), ("install", "c==1"))))
    assert is_new(dataclasses.replace(base, standins=None))
    assert is_new(dataclasses.replace(base, check="import b"))
    assert is_new(dataclasses.replace(base, check_environment=(("A", "1"),)))
    requirements.write_text("a==2\n")
    assert is_new(base)
    (standins / "part" / "__init__.py").write_text("pass\n")
    assert is_new(base)
    (standins / "part" / "__init__.py").rename(standins / "part" / "other.py")
    assert is_new(base)


def test_the_key_ignores_where_the_checkout_lies_and_compiled_files(tmp_path: Path) -> None:
    keys = set()
    for name in ("here", "there"):
        folder = tmp_path / name
        (folder / "standins" / "__pycache__").mkdir(parents=True)
        (folder / "standins" / "module.py").write_text("")
        (folder / "standins" / "__pycache__" / "module.pyc").write_text(name)
        (folder / "requirements.txt").write_text("a==1\n")
        file = folder / "requirements.txt"
        keys.add(Recipe("e", (("install", "-r", str(file)),), (file,), folder / "standins").key())
    assert len(keys) == 1


def test_every_recipe_names_files_that_exist_and_pins_what_it_installs() -> None:
    assert list(RECIPES) == ["sglang", "vllm"]
    for each in RECIPES.values():
        assert all(path.is_file() for path in each.files)
        words = [word for arguments in each.pip if arguments[0] == "install" for word in arguments[1:]]
        files = {str(path) for path in each.files}
        named = [word for word in words if not word.startswith("-") and word not in files]
        assert named and all("==" in word for word in named)
        lines = [line for path in each.files for line in path.read_text().splitlines() if line]
        assert all("==" in line and "+" not in line for line in lines)  # no build of one machine only
        assert not any("://" in word for word in [*words, *lines])  # whose registry it is, pip knows


# --- building ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of environments in which two callers at once asked for ``tiny``, made from a wheel."""
    folder = tmp_path_factory.mktemp("engines")
    wanted = recipe(wheel(folder / "wheels", 1), 1)
    found: list[Path] = []
    callers = [threading.Thread(target=lambda: found.append(environment(wanted, folder))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert found == [folder / "tiny" / "bin" / "python"] * 2
    return folder


@pytest.fixture
def engines(built: Path, tmp_path: Path) -> Path:
    """That folder without the packages, to be spoiled."""
    no_packages = shutil.ignore_patterns("lib", "lib64")
    return Path(shutil.copytree(built, tmp_path / "engines", symlinks=True, ignore=no_packages))


def test_two_callers_at_once_build_once(built: Path) -> None:
    assert (built / "tiny.log").read_text().count("Successfully installed tiny") == 1


def test_an_environment_holds_what_the_recipe_says_and_the_stand_ins(built: Path) -> None:
    python = built / "tiny" / "bin" / "python"
    program = """
import importlib.metadata as metadata, tiny, torchvision
print(tiny.VALUE, metadata.version("torchvision"), torchvision.__file__)
"""
    value, version, place = run(python, program).split()
    assert (value, version) == ("1", "0.28.0+standin")
    assert Path(place).is_relative_to(built)


def test_a_ready_environment_is_found_and_not_built(engines: Path) -> None:
    log = engines / "tiny.log"
    log.unlink()
    found = environment(recipe(engines / "wheels" / "tiny-1-py3-none-any.whl", 1), engines)
    assert found == engines / "tiny" / "bin" / "python"
    assert not log.exists()


@pytest.mark.parametrize("spoil", ["no marker", "torn marker", "no interpreter", "other recipe"])
def test_a_half_built_or_outdated_environment_is_built_again(
    engines: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    marker, value = engines / "tiny" / MARKER, 1
    (engines / "tiny" / "left-over").write_text("")
    if spoil == "no marker":
        marker.unlink()
    elif spoil == "torn marker":
        marker.write_text('{"recipe": ')
    elif spoil == "no interpreter":
        (engines / "tiny" / "bin" / "python").unlink()
    else:
        value = 2
    wanted = recipe(wheel(engines / "wheels", value), value)
    builds: list[Recipe] = []
    monkeypatch.setattr(environments._Build, "run", lambda build: builds.append(build.recipe))
    environment(wanted, engines)
    assert builds == [wanted]


def test_a_failed_step_says_what_pip_said_and_leaves_nothing_ready(tmp_path: Path) -> None:
    broken = Recipe("tiny", pip=(("install", "--no-index", "no-such-distribution==1"),))
    with pytest.raises(BuildError) as failure:
        environment(broken, tmp_path)
    text = str(failure.value)
    assert "pip install --no-index no-such-distribution==1 ended with status 1" in text
    assert "No matching distribution found for no-such-distribution==1" in text
    assert str(tmp_path / "tiny.log") in text
    assert not (tmp_path / "tiny" / MARKER).exists()


def test_a_failed_check_leaves_nothing_ready(tmp_path: Path) -> None:
    useless = Recipe("tiny", pip=(), check="raise SystemExit('the engine cannot be imported')")
    with pytest.raises(BuildError, match="the engine cannot be imported"):
        environment(useless, tmp_path)
    assert not (tmp_path / "tiny" / MARKER).exists()


def test_a_step_past_its_deadline_is_ended_with_its_children(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = engines / "ready"
    os.mkfifo(ready)
    program = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
with open({str(ready)!r}, "w") as pipe:
    pipe.write(f"{{os.getpid()}} {{child.pid}}")
child.wait()
"""
    processes: list[ProcessId] = []
    wait = subprocess.Popen.wait

    def passed(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """The deadline passes once the step's child runs."""
        if timeout == 5.0:
            found = [process_control.identify(int(pid)) for pid in ready.read_text().split()]
            processes.extend(identity for identity in found if identity is not None)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", passed)
    build = environments._Build(Recipe("tiny", pip=()), engines / "tiny", engines / "tiny.log", lock=2)
    with pytest.raises(BuildError, match="a step did not end within 5 s"):
        build._step("a step", [sys.executable, "-c", program], 5.0)
    assert len(processes) == 2
    assert process_control.wait_gone(processes, 30.0) == []


def test_a_builder_that_never_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "BUILDER_S", 0.2)
    with (
        environments._only_builder(tmp_path / "tiny.lock"),
        pytest.raises(BuildError, match=r"tiny\.lock: held by another process"),
    ):
        environment(Recipe("tiny", pip=()), tmp_path)


def test_the_command_prints_interpreters_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environments.CACHE_VARIABLE, str(tmp_path))
    asked: list[tuple[str, Path]] = []

    def found(wanted: Recipe, folder: Path) -> Path:
        asked.append((wanted.engine, folder))
        return folder / wanted.engine / "bin" / "python"

    monkeypatch.setattr(environments, "environment", found)
    assert environments.main(["vllm"]) == 0
    assert json.loads(capsys.readouterr().out) == {"vllm": str(tmp_path / "vllm" / "bin" / "python")}
    assert environments.main([]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["sglang", "vllm"]
    assert asked == [("vllm", tmp_path), ("sglang", tmp_path), ("vllm", tmp_path)]

    def broken(wanted: Recipe, folder: Path) -> Path:
        raise BuildError("no space left")

    monkeypatch.setattr(environments, "environment", broken)
    assert environments.main(["sglang"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "error: no space left\n")


# --- stand-ins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["sgl_kernel", "torchvision"])
def test_names_and_submodules_of_a_stand_in_exist_and_raise_when_called(package: str) -> None:
    program = f"""
import importlib, importlib.util, inspect
package = importlib.import_module("{package}")
deep = importlib.import_module("{package}.some.deep.module")
from {package}.some import function
from {package} import Kind, some
assert some.deep.module is deep and package.some is some and package.Kind is Kind
assert importlib.util.find_spec("{package}.anything") is not None
class Mine(Kind): pass
assert not isinstance(1, Kind) and Kind | None is not None
{{Kind.MEMBER: 1}}
for call in (function, package.another, deep.name, Kind.MEMBER, Kind.method, Mine):
    try:
        call(1, key=2)
    except NotImplementedError as error:
        print(error)
    else:
        raise SystemExit(f"{{call}} can be called")
for protocol in ("__wrapped__", "__torch_function__", "__len__"):
    assert not hasattr(package, protocol) and not hasattr(Kind, protocol), protocol
inspect.getmodule(function), inspect.unwrap(function), repr(package), repr(Kind.MEMBER)
"""
    said = run(sys.executable, program, PYTHONPATH=str(STANDINS)).splitlines()
    assert [line.split()[0] for line in said] == [
        f"{package}.some.function", f"{package}.another", f"{package}.some.deep.module.name",
        f"{package}.Kind.MEMBER", f"{package}.Kind.method", "__main__.Mine",
    ]  # fmt: skip
    assert all("only a stand-in" in line for line in said)


def test_a_stand_in_answers_for_its_own_package_only() -> None:
    program = """
import importlib.util, sgl_kernel, torchvision
print(importlib.util.find_spec("torchvision_of_another_name"), importlib.util.find_spec("sgl_kernel_npu"))
"""
    assert run(sys.executable, program, PYTHONPATH=str(STANDINS)).split() == ["None", "None"]


def test_metadata_of_the_stand_ins_is_found() -> None:
    program = """
import importlib.metadata as metadata
for name in ("torchvision", "sglang-kernel", "hangrig-sglang-cpu"):
    print(metadata.version(name))
(plugin,) = metadata.entry_points(group="sglang.srt.plugins", name="hangrig_sglang_cpu")
print(plugin.load().__name__, plugin.dist.name)
"""
    said = run(sys.executable, program, PYTHONPATH=str(STANDINS)).split()
    assert said == ["0.28.0+standin", "0+standin", "1", "close_gaps", "hangrig-sglang-cpu"]


def test_the_plugin_closes_both_gaps_and_the_check_notices_when_it_did_not(tmp_path: Path) -> None:
    """With the two modules that it changes in their 0.5.23 shape; the real ones are tested with the server."""
    backend = tmp_path / "sglang" / "srt" / "layers" / "attention" / "torch_native_backend.py"
    handler = tmp_path / "sglang" / "srt" / "models" / "deepseek_common" / "attention_backend_handler.py"
    for path in (backend, handler):
        path.parent.mkdir(parents=True)
    backend.write_text("class TorchNativeAttnBackend:\n    pass\n")
    handler.write_text(
        "def _dispatch_mla_subtype(attn, forward_batch):\n    return 'mla'\n"
        "class AttentionBackendRegistry:\n    _handlers = {}\n"
        "    @classmethod\n    def register(cls, name, handler):\n        cls._handlers[name] = handler\n"
    )
    check = [line for line in SGLANG.check.splitlines() if "sglang." in line or line.startswith("assert")]
    check = [line for line in check if "plugins" not in line and "launch_server" not in line]
    assert [line.split()[0] for line in check] == ["from", "from", "assert", "assert"]
    plugin = ["import hangrig_sglang_cpu", "hangrig_sglang_cpu.close_gaps()"]
    effect = [
        "assert TorchNativeAttnBackend().get_cpu_graph_seq_len_fill_value() == 1",
        "assert AttentionBackendRegistry._handlers['torch_native'](None, None) == 'mla'",
    ]
    places = f"{tmp_path}:{STANDINS}"
    run(sys.executable, "\n".join([*plugin, *check, *effect]), PYTHONPATH=places)
    with pytest.raises(AssertionError, match="the plugin of tests/engines/standins did not run"):
        run(sys.executable, "\n".join(check), PYTHONPATH=places)


# --- the model ------------------------------------------------------------------------------------------------


def test_the_model_folder_reads_back_as_the_preset_with_the_seeds_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", seed=7)
    config = load_config(folder)
    assert config == preset(PRESET)
    expected, found = random_weights(config, 7), load_weights(config, folder)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_model_has_what_the_engines_kernels_want() -> None:
    """SGLang and vLLM have kernels for these head sizes; SGLang reads DeepSeek-V2 with YaRN only."""
    fields = preset(PRESET).to_json()
    assert fields["architectures"] == ["DeepseekV2ForCausalLM"]
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    assert [fields[name] for name in sizes] == [512, 64, 128, 128]
    assert fields["rope_scaling"]["type"] == "yarn"
    assert fields["vocab_size"] <= 4096
