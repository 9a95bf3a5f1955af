"""What our code uses of torch_npu: names, call arguments and environment variables, found in its syntax trees.

The module ``torch.npu`` reaches our code under a few names (MODULE), instances of its classes under a few more
(INSTANCES): both are declared here by the expression that holds them, and an expression of the kind that nobody
declared is an error, so that a new use cannot be overlooked. Not here: what exists (``npu_wheel.py``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
MODULE = frozenset({"module", "self._module", "torch.npu"})
INSTANCES = {
    "graph.raw": "NPUGraph",
    "flag.raw": "ExternalEvent",
    "node.flag.raw": "ExternalEvent",
    "self._module.ExternalEvent()": "ExternalEvent",
    "self._raw": "Event",
    "began": "Event",
    "ended": "Event",
    "done": "Event",
    "event": "Event",
    "mark.event": "Event",
    "beat.event": "Event",
}
"""By the expression that holds one, in the files above. ``event``: of the platform, where it is not one of ours."""
METHODS = frozenset(
    {"query", "record", "wait", "reset", "replay", "elapsed_time", "synchronize", "update", "wait_event"}
)
OURS = frozenset(
    {"self", "stream", "self.compute", "self.update", "self.copy", "self.comm", "ours", "life", "graph"}
)
"""Our own objects that have methods of such names."""
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


def uses(root: Path, files: tuple[str, ...] = FILES) -> list[Use]:
    """Every use, once for each way of calling. Raises UndeclaredError and OSError."""
    found: dict[tuple[str, str, object], Use] = {}
    for file in files:
        for use in _uses(ast.parse((root / file).read_text()), file):
            found.setdefault((use.owner, use.name, use.arguments), use)
    return sorted(found.values(), key=lambda use: (use.owner, use.name, str(use.arguments)))


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
        if not isinstance(node, ast.Attribute):
            continue
        call, holder, where = calls.get(id(node)), ast.unparse(node.value), f"{file}:{node.lineno}"
        arguments = None if call is None else _arguments(call)
        if holder in MODULE:
            yield Use("", node.attr, arguments, where)
        elif imported := re.fullmatch(r"import_module\('(torch_npu[\w.]*)'\)", holder):
            yield Use(imported[1], node.attr, arguments, where)
        elif node.attr in METHODS and holder not in OURS:
            owner = INSTANCES.get(holder)
            if owner is not None:
                yield Use(owner, node.attr, arguments, where)
            elif holder.endswith("raw"):
                raise UndeclaredError(
                    f"{where}: {holder}.{node.attr}: say of which class {holder} is, in INSTANCES"
                )


def _arguments(call: ast.Call) -> tuple[int, tuple[str, ...]]:
    return len(call.args), tuple(sorted(one.arg for one in call.keywords if one.arg is not None))
