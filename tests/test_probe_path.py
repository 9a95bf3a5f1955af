"""The folder that an engine's Python finds the probe in: complete, alone, off by default, and harmless when broken.

Each test starts a process as an engine would: the folder first on its path, the plugin found by its entry point.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from probe_rig import ledger, status

from serving.targets.probe_path import assemble

CHILD_DEADLINE_S = 120.0

PLUGIN = """
import sys
from importlib.metadata import entry_points
(plugin,) = [one for one in entry_points(group=sys.argv[1]) if one.name == "hangrig_probe"]
plugin.load()()
"""
FAKE_VLLM = """
import sys, types
sys.modules['vllm'] = types.ModuleType('vllm')
sys.modules['vllm'].__version__ = '9'
"""
SEATED = """
from hangrig_probe import probe
made = probe._started[0]
made.take_seat(1, role='engine_core')
made.recorder.phase('recv')
"""


def _run(folder: Path, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HANGRIG"))}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**kept, "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=CHILD_DEADLINE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch") / "probe"
    assemble(folder)
    return folder


def _config(folder: Path, **more: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "folder": str(folder), "node": "n", "device": "cpu", "world": 2, **more}
    file = folder / "config.json"
    file.write_text(json.dumps(document))
    return str(file)


def test_the_folder_holds_the_probe_its_metadata_and_of_hangrig_the_ledger(path: Path) -> None:
    assert {one.name for one in path.iterdir()} == {"hangrig_probe", "hangrig_probe-1.dist-info", "harness"}
    modules = {one.stem for one in (path / "harness").glob("*.py")}
    assert {"__init__", "ledger", "ledger_layout", "ledger_rings"} <= modules
    assert {one for one in modules if not one.startswith("ledger")} == {"__init__"}


def test_assembling_again_leaves_nothing_of_before(path: Path, tmp_path: Path) -> None:
    assemble(tmp_path / "probe")
    (tmp_path / "probe" / "hangrig_probe" / "old.py").touch()
    assemble(tmp_path / "probe")
    assert not (tmp_path / "probe" / "hangrig_probe" / "old.py").exists()


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "vllm.general_plugins"])
def test_without_the_variable_nothing_is_loaded(path: Path, group: str) -> None:
    program = PLUGIN + "print(sorted(name for name in sys.modules if name.split('.')[0] in sys.argv[2:]))"
    done = _run(path, program, group, "torch", "harness", "hangrig_probe")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['hangrig_probe']\n", "")


def test_with_it_only_the_standard_library_and_the_ledger_are(path: Path, tmp_path: Path) -> None:
    program = (
        FAKE_VLLM
        + PLUGIN
        + SEATED
        + "print(sorted({getattr(one, '__file__', None) or '' for one in sys.modules.values()}))"
    )
    done = _run(path, program, "vllm.general_plugins", HANGRIG_PROBE=_config(tmp_path))
    assert done.returncode == 0, done.stderr
    foreign = [
        file
        for file in json.loads(done.stdout.replace("'", '"'))
        if "site-packages" in file and "_distutils" not in file
    ]
    ours = {Path(file).parent.name for file in foreign}
    assert "torch" not in ours
    assert "pydantic" not in ours
    assert ledger(tmp_path, "rank1").host.phase == "recv"
    document = status(tmp_path, "rank1")
    assert (document["engine"], document["errors"]) == ("vllm 9", [])


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ('{"schema": 7}', "schema: expected 1, found 7")]
)
def test_a_damaged_configuration_leaves_the_engine_alone_and_is_reported(
    path: Path, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    done = _run(path, PLUGIN + "print('serves')", "vllm.general_plugins", HANGRIG_PROBE=str(file))
    assert (done.returncode, done.stdout) == (0, "serves\n")
    (found,) = tmp_path.glob("pid*.probe.json")
    assert said in json.loads(found.read_text())["errors"][0]
    assert said in done.stderr


def test_a_configuration_that_is_not_there_is_in_the_log(path: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no-folder" / "config.json"
    done = _run(path, PLUGIN + "print('serves')", "vllm.general_plugins", HANGRIG_PROBE=str(missing))
    assert (done.returncode, done.stdout) == (0, "serves\n")
    assert "cannot read what HANGRIG_PROBE names" in done.stderr


def test_a_full_disk_leaves_the_engine_alone_and_is_in_the_log(path: Path, tmp_path: Path) -> None:
    full = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    )
    program = (
        FAKE_VLLM + "sys.dont_write_bytecode = True\n" + PLUGIN + full + SEATED + "sys.stderr.write('serves')"
    )
    done = _run(path, program, "vllm.general_plugins", HANGRIG_PROBE=_config(tmp_path))
    assert (done.returncode, done.stderr.endswith("serves")) == (0, True), done.stderr
    assert "cannot make a ledger" in done.stderr
    assert "cannot write" in done.stderr
    assert not list(tmp_path.glob("*.ledger"))


def test_a_hook_module_that_fails_leaves_the_engine_alone_and_is_reported(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "probe"
    assemble(broken)
    (broken / "hangrig_probe" / "vllm_hooks.py").write_text(
        "def install(probe):\n    raise KeyError('renamed')\n"
    )
    config = _config(tmp_path / "out")
    done = _run(
        broken, FAKE_VLLM + PLUGIN + SEATED + "print('serves')", "vllm.general_plugins", HANGRIG_PROBE=config
    )
    assert (done.returncode, done.stdout) == (0, "serves\n"), done.stderr
    assert "KeyError: 'renamed'" in done.stderr
    assert "KeyError: 'renamed'" in status(tmp_path / "out", "rank1")["errors"][0]


def test_a_forked_child_takes_a_seat_of_its_own(path: Path, tmp_path: Path) -> None:
    program = (
        FAKE_VLLM
        + PLUGIN
        + SEATED
        + """
import os
made.recorder.new_step()
child = os.fork()
if child == 0:
    made.recorder.phase('not seated yet')
    made.take_seat(0, role='engine_core')
    made.recorder.phase('child')
    os._exit(0)
_, code = os.waitpid(child, 0)
made.recorder.phase('parent')
print(code)
"""
    )
    done = _run(path, program, "vllm.general_plugins", HANGRIG_PROBE=_config(tmp_path))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    parent, child = ledger(tmp_path, "rank1"), ledger(tmp_path, "rank0")
    assert (parent.host.phase, parent.host.step) == ("parent", 1)
    assert (child.host.phase, child.host.step) == ("child", 0)
    assert parent.header.pid != child.header.pid
    assert status(tmp_path, "rank0")["pid"] == child.header.pid
