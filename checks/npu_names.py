"""What our code uses of torch_npu and torch.cuda: names, arguments, environment variables, from its syntax trees.

The module ``torch.npu`` or ``torch.cuda`` reaches our code under a few names (MODULE), instances of its classes
under a few more (INSTANCES), and some names are reached by ``getattr`` (REACHED): all are declared here by the
expression that holds them. An expression of the kind that nobody declared is an error, so that a new use cannot be
overlooked. Not here: what exists (``npu_wheel.py``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

FILES = (
    "harness/device_facts.py",
    "harness/doctor_device.py",
    "harness/devices/accelerator.py",
    "harness/devices/accelerator_graph.py",
    "harness/devices/accelerator_memory.py",
    "harness/devices/accelerator_streams.py",
    "harness/devices/facts.py",
    "harness/devices/heartbeats.py",
    "harness/devices/npu.py",
    "harness/devices/opening.py",
    "serving/probe/hangrig_probe/copies.py",
    "serving/probe/hangrig_probe/graphs.py",
    "serving/probe/hangrig_probe/probe.py",
    "serving/probe/hangrig_probe/streams.py",
    "serving/targets/builtin_device.py",
)
"""Where code runs on an NPU. ``cuda.py`` beside them is CUDA's alone."""
CUDA_FILES = (
    *(file for file in FILES if file != "harness/devices/npu.py"),
    "harness/devices/cuda.py",
    "serving/symmetric_cuda.py",
)
MODULE = frozenset({"module", "self._module", "torch.npu"})
_GIVE_MODULE = frozenset({"device_module", "torch.get_device_module"})
GRAPH = "NPUGraph"
"""``CUDAGraph`` where the module is torch.cuda."""
MADE = {"Event": "Event", "ExternalEvent": "ExternalEvent", "Stream": "Stream", "current_stream": "Stream"}
"""Of which class the result is, by the name that is called in the module."""
INSTANCES = {
    "graph.raw": GRAPH,
    "graph.bound": "Event",
    "flag.raw": "ExternalEvent",
    "node.flag.raw": "ExternalEvent",
    "self._raw": "Event",
    "began": "Event",
    "ended": "Event",
    "done": "Event",
    "event": "Event",
    "mark.event": "Event",
    "beat.event": "Event",
}
"""By the expression that holds one, in the files above. ``event``: of the platform, where it is not one of ours."""
SYMMETRIC = {"memory": "torch.distributed._symmetric_memory", "handle": "_SymmetricMemory"}
"""The same for ``serving/symmetric_cuda.py`` alone."""
METHODS = frozenset(
    {"query", "record", "wait", "reset", "replay", "elapsed_time", "synchronize", "update"}
    | {"wait_event", "wait_stream", "record_event", "capture_begin", "capture_end"}
)
OURS = frozenset(
    {"self", "stream", "self.compute", "self.update", "self.copy", "self.comm", "ours", "life", "graph"}
    | {"life.stopped", "self._life.closed", "wake"}
)
"""Our own objects that have methods of such names, and the standard library's."""
REACHED: dict[str, tuple[tuple[str, str], ...]] = {
    "harness/device_facts.py: hasattr(module, _GRAPHS[device])": (("", GRAPH),),
    "serving/probe/hangrig_probe/graphs.py: hasattr(module, name)": (("", GRAPH),),
    "serving/probe/hangrig_probe/graphs.py: getattr(module, name)": (("", GRAPH),),
    "serving/probe/hangrig_probe/graphs.py: getattr(graph_class, name)": (
        (GRAPH, "capture_begin"),
        (GRAPH, "capture_end"),
        (GRAPH, "replay"),
    ),
}
"""Names that stand in no attribute: file and call, then class (empty: the module) and name of each."""
_CLASSES = frozenset({"graph_class"})
"""Expressions that hold a class of the module."""
_VARIABLE = re.compile(
    r"^(?:HCCL|TORCH_HCCL|ASCEND|ACL|NPU_SHMEM|TASK_QUEUE|PER_STREAM|STREAMS_PER|TORCH_DEVICE_BACKEND)_[A-Z_]+$"
)
_NOT_VARIABLES = re.compile(r"^(?:ACL_ERROR_|HCCL_E_)")


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """``owner``: empty for ``torch.npu`` itself, a class of it, or a module of torch_npu. ``arguments``: how many
    positional ones, then the names of the others; None: it is not called."""

    owner: str
    name: str
    arguments: tuple[int, tuple[str, ...]] | None
    where: str

    @property
    def words(self) -> str:
        full = f"{self.owner}.{self.name}" if self.owner else self.name
        if self.arguments is None:
            return full
        count, names = self.arguments
        return f"{full}({', '.join([*['·'] * count, *(f'{name}=' for name in names)])})"


class UndeclaredError(ValueError):
    """Code uses something that may be torch_npu's and that is not declared here."""


def uses(root: Path, files: tuple[str, ...] = FILES, graph: str = GRAPH) -> list[Use]:
    """Every use, once for each way of calling; ``graph``: the module's class of graphs. Raises UndeclaredError
    and OSError."""
    found: dict[tuple[str, str, object], Use] = {}
    for file in files:
        for use in _uses(ast.parse((root / file).read_text()), file):
            if graph == GRAPH or not use.owner.startswith("torch_npu"):
                own = replace(use, owner=_named(use.owner, graph), name=_named(use.name, graph))
                found.setdefault((own.owner, own.name, own.arguments), own)
    return sorted(found.values(), key=lambda use: (use.owner, use.name, str(use.arguments)))


def _named(name: str, graph: str) -> str:
    return graph if name == GRAPH else name


def variables(root: Path) -> dict[str, str]:
    """Environment variables of torch_npu and CANN that the package or a scenario names, and where first."""
    found: dict[str, str] = {}
    for folder in ("harness", "serving", "scenarios"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py":
                words = [node.value for node in ast.walk(ast.parse(path.read_text())) if _is_text(node)]  # type: ignore[attr-defined]
            elif path.suffix == ".toml":
                words = re.findall(r"[A-Z_]+", path.read_text())
            else:
                continue
            for word in words:
                if _VARIABLE.match(word) and not _NOT_VARIABLES.match(word):
                    found.setdefault(word, str(path.relative_to(root)))
    return dict(sorted(found.items()))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _uses(tree: ast.Module, file: str) -> Iterator[Use]:
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            _check_name(node, file)
        elif isinstance(node, ast.Call):
            yield from _reached(node, file)
        elif isinstance(node, ast.Attribute):
            call, holder, where = calls.get(id(node)), ast.unparse(node.value), f"{file}:{node.lineno}"
            owner = _owner(node.value, where)
            if owner is None and file == "serving/symmetric_cuda.py":
                owner = SYMMETRIC.get(holder)
            if owner is None and node.attr in METHODS and holder not in OURS:
                owner = INSTANCES.get(holder)
                if owner is None:
                    raise UndeclaredError(
                        f"{where}: {holder}.{node.attr}: say of which class {holder} is, in INSTANCES or OURS"
                    )
            if owner is not None:
                yield Use(owner, node.attr, None if call is None else _arguments(call), where)


def _owner(node: ast.expr, where: str) -> str | None:
    """Whose attributes these are, by the expression alone: "" is the module, None: nothing says so."""
    text = ast.unparse(node)
    if text in MODULE or _gives_module(node):
        return ""
    if imported := re.fullmatch(r"import_module\('(torch_npu[\w.]*)'\)", text):
        return imported[1]
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if _owner(node.func.value, where) != "":
        return None
    if node.func.attr not in MADE:
        raise UndeclaredError(f"{where}: {text}: say of which class that is, in MADE")
    return MADE[node.func.attr]


def _gives_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in _GIVE_MODULE


def _check_name(node: ast.Assign | ast.AnnAssign, file: str) -> None:
    """The module may be kept under a declared name only."""
    if node.value is None or not _gives_module(node.value):
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if ast.unparse(target) not in MODULE:
            raise UndeclaredError(f"{file}:{node.lineno}: {ast.unparse(target)} holds the module: see MODULE")


def _reached(call: ast.Call, file: str) -> Iterator[Use]:
    if not (isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")):
        return
    where, of = f"{file}:{call.lineno}", ast.unparse(call.args[0])
    if of not in _CLASSES and _owner(call.args[0], where) != "":
        return
    name = call.args[1]
    if isinstance(name, ast.Constant) and isinstance(name.value, str) and of not in _CLASSES:
        yield Use("", name.value, None, where)
        return
    known = REACHED.get(f"{file}: {ast.unparse(call)}")
    if known is None:
        raise UndeclaredError(f"{where}: {ast.unparse(call)}: say which names that reaches, in REACHED")
    for owner, one in known:
        yield Use(owner, one, None, where)


def _arguments(call: ast.Call) -> tuple[int, tuple[str, ...]]:
    return len(call.args), tuple(sorted(one.arg for one in call.keywords if one.arg is not None))
