"""What our code uses of torch_npu is found and held against a wheel; made-up wheels lack this and that."""

from __future__ import annotations

import ast
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from checks import npu_api
from checks.npu_api import CUDA, DOCUMENT, LOOKED_FOR, LOOKED_FOR_WORDS, NPU, ROOT, Finding, check, main
from checks.npu_names import CUDA_FILES, FILES, GRAPH, REACHED, UndeclaredError, Use, uses, variables
from checks.npu_wheel import Wheel
from serving.probe.hangrig_probe import graphs

STREAMS = """
class Event(torch_npu._C._NPUEventBase):
    def record(self, stream=None): ...
    def wait(self, stream=None): ...

class Stream(torch_npu._C._NPUStreamBase):
    def __new__(cls, device=None, priority=0, **kwargs): ...
"""
GRAPHS = """
def graph_task_update_begin(stream, handle): ...

class graph:
    def __init__(self, npu_graph, pool=None, stream=None): ...

class NPUGraph(torch_npu._C._NPUGraph):
    def __new__(cls): ...
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    path = tmp_path / "torch_npu-2.9.9-cp311.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch_npu-2.9.9.dist-info/METADATA", "")
        archive.writestr(
            "torch_npu/npu/__init__.py",
            "from .streams import Event, Stream\n__all__ = ['graph']\nWORDS = ['graph_task_update_begin']\n",
        )
        archive.writestr("torch_npu/npu/streams.py", STREAMS)
        archive.writestr("torch_npu/npu/graphs.py", GRAPHS)
        archive.writestr("torch_npu/_C.so", b"\x00query\x00replay_all\x00HCCL_EXEC_TIMEOUT\x00")
    return Wheel(path)


def use(name: str, arguments: tuple[int, tuple[str, ...]] | None = None, owner: str = "") -> Use:
    return Use(owner, name, arguments, "npu.py:1")


def only(wheel: Wheel, one: Use) -> Finding:
    (finding,) = check(wheel, [one], {})
    return finding


@pytest.mark.parametrize(
    ("one", "standing"),
    [
        (use("Event"), "exists"),
        (use("Stream", (1, ("priority", "anything"))), "exists"),
        (use("graph", (1, ("stream",))), "exists"),
        (use("graph", (1, ("stream", "capture_error_mode"))), "missing"),
        (use("graph", (0, ("npu_graph",))), "exists"),
        (use("graph", (0, ("stream",))), "missing"),  # npu_graph has no default
        (use("graph", (4, ())), "missing"),
        (use("graph_task_update_begin", (2, ())), "missing"),  # defined, but torch.npu does not offer it
        (use("record", (1, ()), "Event"), "exists"),
        (use("record", (2, ()), "Event"), "missing"),
        (use("query", (0, ()), "Event"), "by name"),
        (use("replay", (0, ()), "NPUGraph"), "missing"),  # a longer word in a library is another name
    ],
)
def test_names_and_arguments_are_held_against_the_wheel(wheel: Wheel, one: Use, standing: str) -> None:
    assert only(wheel, one).standing == standing


def test_variables_are_the_wheels_or_known_to_be_canns(wheel: Wheel) -> None:
    named = dict.fromkeys(("HCCL_EXEC_TIMEOUT", "ASCEND_WORK_PATH", "HCCL_EXEC_TIME"), "x.py")
    assert [one.standing for one in check(wheel, [], named)] == ["exists", "CANN", "missing"]


def test_a_wheel_without_what_we_use_fails_and_says_where_it_is_used(
    wheel: Wheel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--wheel", str(wheel.path), "--json"]) == 1
    said = capsys.readouterr().err
    assert "torch_npu 2.9.9: graph_task_group_begin(·): no such name (used at harness/devices/npu.py:" in said


def test_a_wheel_that_cannot_be_had_is_status_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(npu_api.KEPT, str(tmp_path))
    monkeypatch.setattr(npu_api, "NPU", replace(NPU, releases=("hangrig-no-such-package==0.0.1",)))
    assert main([]) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("other.raw.record(1)", r"a\.py:2: other\.raw\.record: say of which class other\.raw is"),
        ("flag.wait(other)", r"a\.py:2: flag\.wait: say of which class flag is"),
        (
            "torch.npu.default_stream().query()",
            r"a\.py:2: torch\.npu\.default_stream\(\): say of which class",
        ),
        ("api = device_module(other)", r"a\.py:2: api holds the module"),
        ("getattr(torch.npu, other)()", r"a\.py:2: getattr\(torch\.npu, other\): say which names"),
    ],
)
def test_a_use_through_something_that_nobody_declared_is_an_error(
    tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "a.py").write_text(f"def f(flag, other):\n    {line}\n")
    with pytest.raises(UndeclaredError, match=said):
        uses(tmp_path, ("a.py",))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("free, _ = device_module(kind).mem_get_info(0)", "mem_get_info(·)"),
        ("torch.get_device_module(kind).set_device(device=0)", "set_device(device=)"),
        ("module.current_stream().synchronize()", "Stream.synchronize()"),
        ("getattr(module, '_sleep')", "_sleep"),
        ("import_module('torch_npu.npu.utils').get_cann_version()", "torch_npu.npu.utils.get_cann_version()"),
    ],
)
def test_a_use_is_found_however_it_is_reached(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "a.py").write_text(f"{line}\n")
    assert words in [one.words for one in uses(tmp_path, ("a.py",))]


def test_what_the_probe_replaces_in_a_graph_class_is_declared() -> None:
    """The hooks reach those methods by name alone."""

    class NPUGraph:
        def capture_begin(self) -> None: ...
        def capture_end(self) -> None: ...
        def replay(self) -> None: ...
        def reset(self) -> None: ...
        def update(self) -> None: ...

    before = dict(vars(NPUGraph))
    graphs.install(SimpleNamespace(NPUGraph=NPUGraph), Mock(), Mock(), Mock())
    replaced = {name for name, value in vars(NPUGraph).items() if before.get(name) is not value}
    declared = REACHED["serving/probe/hangrig_probe/graphs.py: getattr(graph_class, name)"]
    assert {(GRAPH, name) for name in replaced} == set(declared)


def test_every_declared_reach_is_still_in_its_file() -> None:
    for place in REACHED:
        file, _, call = place.partition(": ")
        calls = {ast.unparse(node) for node in ast.walk(ast.parse((ROOT / file).read_text()))}
        assert call in calls, place


def test_a_gate_counts_for_its_release_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("2.7.1", "2.9.9"):
        path = tmp_path / f"torch_npu-{version}-cp311.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"torch_npu-{version}.dist-info/METADATA", "")
        assert main(["--wheel", str(path), "--json"]) == 1
        assert ("PER_STREAM_QUEUE" in capsys.readouterr().err) is (version == "2.9.9")


def test_every_file_that_runs_on_an_npu_is_read() -> None:
    """Files beside the accelerator's that get the platform's module, whatever they call it."""
    takes = {
        str(path.relative_to(ROOT))
        for folder in ("harness", "serving")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"get_device_module\(|device_module\(|self\._module\b", path.read_text())
    }
    assert takes - set(FILES) <= {"harness/devices/cuda.py", "harness/toggles.py"}, takes - set(FILES)


def test_the_document_has_every_use_and_every_variable() -> None:
    """It is written by make check-npu-api: run that when this fails."""
    npu, extra, cuda = re.findall(r"(?:^\|.*\n)+", DOCUMENT.read_text(), re.MULTILINE)
    assert told(npu) == {one.words for one in uses(ROOT)} | set(variables(ROOT))
    assert told(extra) == {one.words for one in LOOKED_FOR} | set(LOOKED_FOR_WORDS)
    assert told(cuda) == {one.words for one in uses(ROOT, CUDA_FILES, CUDA.graph)}
    assert "**missing**" not in npu + cuda


def told(table: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


@pytest.mark.network
def test_the_real_wheels_have_what_we_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torch_npu: torch's are twice as large, and left to make check-npu-api."""
    monkeypatch.setattr(npu_api, "CUDA", replace(CUDA, releases=()))
    assert main(["--json"]) == 0, capsys.readouterr().err
