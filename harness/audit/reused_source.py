"""HG104: an asynchronous copy from a host buffer that is written again with no event in sight (HANGS.md, D). Pure.

Two shapes are looked for: a buffer that an object keeps, written by a method other than the one that made it and
copied with ``non_blocking``; and a buffer made before a loop, written and copied inside it. In sight means: in the
class, or in the function, somebody records, waits or synchronises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.audit.findings import Finding, Rule
from harness.audit.module import Function, Module, is_constant, keyword, last_name, within

RULE = Rule(
    "HG104",
    "source-reused-in-flight",
    "a non_blocking copy reads a host buffer that is written again, with no event in sight",
    "from pinned memory the copy may still be reading when the host writes the next values: the device gets the "
    "next step's data, or a mixture. Pageable memory hides it, because such a copy ends in a synchronisation",
    "record an event after the copy and wait for it before the next write, or take a fresh buffer each time",
)
WORDS = ("non_blocking",)

_HOST_NAME = re.compile(r"(^|_)(cpu|host|pin|pinned|np)(_|$)", re.IGNORECASE)
_WRITES = frozenset(
    {"copy_", "fill_", "zero_", "index_copy_", "scatter_", "index_fill_", "masked_fill_", "copyto"}
)
_FENCES = frozenset(
    {"record", "record_event", "record_stream", "synchronize", "wait", "wait_event", "wait_stream", "query",
     "npu_synchronize", "current_stream_synchronize"}
)  # fmt: skip
_VIEWS = frozenset({"numpy", "view", "flatten", "reshape", "narrow", "view_as", "squeeze", "unsqueeze", "t"})


@dataclass(frozen=True, slots=True)
class _Copy:
    call: ast.Call
    source: str
    """``self.x`` or ``x``: the buffer itself, without views of it."""


def check(module: Module) -> Iterator[Finding]:
    copying = [copy.call for copy in _copies(module.nodes)]
    owners = {owner: None for call in copying if (owner := module.class_of(call)) is not None}
    functions = {function: None for call in copying if (function := module.function_of(call)) is not None}
    for owner in owners:
        yield from _kept(module, owner)
    for function in functions:
        yield from _in_loops(module, function)


def _kept(module: Module, owner: ast.ClassDef) -> Iterator[Finding]:
    methods = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    everything = {method.name: list(within(method)) for method in methods}
    nodes = [node for body in everything.values() for node in body]
    copies = [copy for copy in _copies(nodes) if copy.source.startswith("self.")]
    if not copies or _fenced(nodes):
        return
    made = _host_buffers(nodes, "self.")
    aliases = _aliases(nodes)
    for copy in copies:
        if copy.source not in made:
            continue
        writers = sorted(
            name
            for name, body in everything.items()
            if any(_root(target, aliases) == copy.source for target in _written(body))
        )
        if writers:
            yield module.finding(
                "HG104",
                copy.call,
                f"copies {copy.source} without blocking; {', '.join(writers)} of {owner.name} writes it again, and "
                "nothing in the class waits for the copy",
            )


def _in_loops(module: Module, function: Function) -> Iterator[Finding]:
    body = list(within(function))
    if not any(isinstance(node, ast.For | ast.While) for node in body) or _fenced(body):
        return
    made, aliases = _host_buffers(body, ""), _aliases(body)
    said: set[ast.Call] = set()
    for loop in body:
        if not isinstance(loop, ast.For | ast.While):
            continue
        inside = [node for statement in loop.body for node in (statement, *within(statement))]
        written = {_root(target, aliases) for target in _written(inside)}
        fresh = {
            _root(target, {})
            for node in inside
            for target in _targets(node)
            if not isinstance(target, ast.Subscript)
        }
        for copy in _copies(inside):
            if copy.source in made and copy.source in written - fresh and copy.call not in said:
                said.add(copy.call)
                yield module.finding(
                    "HG104",
                    copy.call,
                    f"copies {copy.source} without blocking in a loop that writes it again, and nothing in "
                    f"{function.name} waits for the copy",
                )


def _copies(nodes: Iterable[ast.AST]) -> Iterator[_Copy]:
    """Copies to a device, with the buffer that they read."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        blocking = keyword(node, "non_blocking")
        if blocking is None or is_constant(blocking, False):
            continue
        name = node.func.attr
        source: ast.expr | None = None
        if name == "copy_":
            source = node.args[0] if node.args else keyword(node, "src")
        elif name in ("to", "cuda", "npu") and not _to_host(node):
            source = node.func.value
        if source is not None and (root := _root(source, {})):
            yield _Copy(node, root)


def _to_host(call: ast.Call) -> bool:
    asked = [*call.args, *(one.value for one in call.keywords if one.arg == "device")]
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in asked)


def _root(node: ast.AST, aliases: dict[str, str]) -> str:
    """``self.x`` or ``x`` below subscripts and views; empty when a copy or a call stands between."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            node = node.func.value
        else:
            break
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return aliases.get(f"self.{node.attr}", f"self.{node.attr}")
    return ""


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [one for t in node.targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [node.target] if isinstance(node, ast.AnnAssign) and node.value is not None else []


def _host_buffers(nodes: Iterable[ast.AST], prefix: str) -> set[str]:
    """What is made in host memory: pinned, on "cpu" by name, or by a name that says so."""
    found = set()
    for node in nodes:
        for target in _targets(node):
            value = getattr(node, "value", None)
            root = "" if isinstance(target, ast.Subscript) else _root(target, {})
            if root.startswith(prefix) and root and _on_host(value, root.removeprefix("self.")):
                found.add(root)
    return found


def _on_host(value: ast.AST | None, name: str) -> bool:
    if not isinstance(value, ast.Call):
        return False
    function = last_name(value.func)
    if function == "pin_memory":
        return True
    if function not in (
        "empty",
        "zeros",
        "ones",
        "full",
        "empty_like",
        "zeros_like",
        "tensor",
        "empty_strided",
    ):
        return False
    pinned, device = keyword(value, "pin_memory"), keyword(value, "device")
    if isinstance(device, ast.Constant) and device.value == "cpu":
        return True
    if pinned is not None and not is_constant(pinned, False):
        return True
    return device is None and bool(_HOST_NAME.search(name))


def _aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Names that are views of another: ``self.x_np = self.x.numpy()``."""
    found: dict[str, str] = {}
    for node in nodes:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call | ast.Subscript) and (source := _root(value, {})):
            for target in _targets(node):
                if not isinstance(target, ast.Subscript) and (root := _root(target, {})) and root != source:
                    found[root] = source
    return found


def _written(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is written in place: by subscript, by a method that ends in ``_``, by ``np.copyto`` and ``out=``."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from (target for target in _targets(node) if isinstance(target, ast.Subscript))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            yield node.target
        elif isinstance(node, ast.Call):
            name = last_name(node.func)
            if name == "copyto" and node.args:
                yield node.args[0]
            elif name in _WRITES and isinstance(node.func, ast.Attribute):
                yield node.func.value
            if (out := keyword(node, "out")) is not None:
                yield out


def _fenced(nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node.func) in _FENCES for node in nodes)
