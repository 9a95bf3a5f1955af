"""HG105: what blocks when it is asked of an NPU stream (PLATFORMS.md, torch_npu and CANN). Pure.

``Stream.query()``, ``Stream.npu_stream``, ``hash(stream)`` and ``repr(stream)`` wait for torch_npu's task queue
with the GIL held. Code for CUDA alone, or for another device, is no finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from harness.audit.device_scope import calls_cuda_by_name, names_npu, only_cuda, other_device
from harness.audit.findings import Finding, Rule
from harness.audit.module import Module, last_name

RULE = Rule(
    "HG105",
    "stream-query-blocks",
    "a stream is asked a question that blocks on Ascend",
    "on torch_npu Stream.query(), .npu_stream, hash() and repr() of a stream wait for the task queue and hold the "
    "GIL: a watchdog that asks hangs with the stream it watches, and a hot path stalls behind the dispatch thread",
    "record an event on the stream and query the event, which does not block; key tables by name, not by stream",
)
WORDS = (".query()", ".npu_stream", "Stream(", "current_stream(", "default_stream(")

_STREAM_NAME = re.compile(r"(^|_)streams?\d*$", re.IGNORECASE)
_MAKERS = frozenset({"Stream", "current_stream", "default_stream", "ExternalStream"})
_Named = tuple[ast.AST | None, str]


def check(module: Module) -> Iterator[Finding]:
    if only_cuda(module) or other_device(module):
        return
    made = _streams(module)
    for node in module.nodes:
        what = _question(module, node, made)
        if what and not _cuda_here(module, node):
            yield module.finding(
                "HG105", node, f"{what} waits for the task queue of an NPU, with the GIL held"
            )


def _question(module: Module, node: ast.AST, made: set[_Named]) -> str:
    if isinstance(node, ast.Attribute) and node.attr == "npu_stream" and isinstance(node.ctx, ast.Load):
        return ast.unparse(node)[-60:] if _is_stream(module, node.value, made, by_name=True) else ""
    if isinstance(node, ast.Call):
        asked, given = node.func, node.args
        if isinstance(asked, ast.Attribute) and asked.attr == "query" and not given:
            return ast.unparse(node)[-60:] if _is_stream(module, asked.value, made, by_name=True) else ""
        if isinstance(asked, ast.Name) and asked.id in ("hash", "repr", "str") and len(given) == 1:
            return f"{asked.id}() of a stream" if _is_stream(module, given[0], made, by_name=False) else ""
    elif isinstance(node, ast.FormattedValue) and _is_stream(module, node.value, made, by_name=False):
        return "a stream in an f-string"
    elif isinstance(node, ast.Dict | ast.Set):
        keys = node.keys if isinstance(node, ast.Dict) else node.elts
        if any(key is not None and _is_stream(module, key, made, by_name=False) for key in keys):
            return "a stream as a key, which hashes it,"
    return ""


def _streams(module: Module) -> set[_Named]:
    """Names and attributes that the file gives a stream."""
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _makes(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {_named(module, target) for target in targets}
    return found


def _named(module: Module, node: ast.AST) -> _Named:
    """A name means something in its function, an attribute in its class."""
    owner = module.function_of(node) if isinstance(node, ast.Name) else module.class_of(node)
    return owner, ast.unparse(node)


def _makes(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) in _MAKERS


def _is_stream(module: Module, node: ast.AST, made: set[_Named], *, by_name: bool) -> bool:
    """A call that gives a stream, a name that got one, or (``by_name``) one that is called after one."""
    if _makes(node):
        return True
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    return _named(module, node) in made or (by_name and bool(_STREAM_NAME.search(last_name(node))))


def _cuda_here(module: Module, node: ast.AST) -> bool:
    """The function works on CUDA by name, and the file does not think of Ascend."""
    function = module.function_of(node)
    return function is not None and calls_cuda_by_name(function) and not names_npu(module)
