"""SGLang's command line, read from the source of a wheel: the options it declares, and a parser made of them.

An option is a field of a namespace class (``arg_groups/fields``), annotated ``A[type, "help"]`` or
``A[type, Arg(...)]``, or a call of ``add_argument`` in ``server_args.py``. They are read as ``arg_utils.py`` of the
wheel reads them. Not here: where the wheels come from (``sglang_wheels.py``).
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_wheels import Wheel

FIELDS = "srt/arg_groups/fields"
CHOICES = "srt/arg_groups/choices.py"
SERVER_ARGS = "srt/server_args.py"
GRAPHS = "srt/model_executor/cuda_graph_config.py"
ENVIRON = "srt/environ.py"


@dataclass(frozen=True, slots=True)
class Option:
    """``takes``: how many values, "none", "one" or "many"."""

    names: tuple[str, ...]
    takes: str
    whole: bool = False
    """Its values are whole numbers."""
    choices: tuple[str, ...] | None = None


class ParseFailed(ValueError):
    """What the parser had said before it ended the process."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ParseFailed(message)


def parser(options: list[Option]) -> argparse.ArgumentParser:
    """Accepts what SGLang accepts, but no abbreviations."""
    made = _Parser(allow_abbrev=False, add_help=False)
    for option in options:
        if option.takes == "none":
            made.add_argument(*option.names, action="store_true")
            continue
        made.add_argument(
            *option.names,
            type=int if option.whole else str,
            nargs="+" if option.takes == "many" else None,
            choices=option.choices,
        )
    return made


def options(wheel: Wheel) -> list[Option]:
    """All options of ``python -m sglang.launch_server``. Raises AssertionError when the source has another shape
    than the one read here."""
    lists = _lists(wheel)
    found = [
        option
        for module in wheel.modules(FIELDS)
        for statement in ast.walk(wheel.tree(module))
        if isinstance(statement, ast.AnnAssign) and (option := _of_field(statement, lists)) is not None
    ]
    found += _of_calls(wheel.tree(SERVER_ARGS))
    assert len(found) > 200, f"sglang {wheel.release} declares its options in another way: {len(found)} found"
    return found


def variables(wheel: Wheel) -> set[str]:
    """The environment variables that ``environ.py`` declares."""
    return {
        target.id
        for statement in ast.walk(wheel.tree(ENVIRON))
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        for target in statement.targets
        if isinstance(target, ast.Name) and _name(statement.value.func).startswith("Env")
    }


def strings(tree: ast.AST) -> set[str]:
    """All string constants, parts of f-strings included."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def divisors(tree: ast.AST, of: str) -> set[str]:
    """By which attributes something whose name ends in ``of`` is divided without remainder: {"dp_size"}."""
    return {
        _name(node.right)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and _name(node.left) == of
    }


def _lists(wheel: Wheel) -> dict[str, tuple[str, ...]]:
    """Lists of choices that fields name: those of ``choices.py`` and ``Backend.ALL``."""
    found = {}
    for statement in wheel.tree(CHOICES).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values = _literals(statement.value)
            if values:
                found[statement.targets[0].id] = values
    backend = next(
        node for node in wheel.tree(GRAPHS).body if isinstance(node, ast.ClassDef) and node.name == "Backend"
    )
    constants = {
        statement.targets[0].id: statement.value
        for statement in backend.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    every = constants["ALL"]
    assert isinstance(every, ast.Tuple)
    named = [constants[_name(element)] for element in every.elts]
    found["Backend.ALL"] = tuple(n.value for n in named if isinstance(n, ast.Constant))
    return found


def _of_field(statement: ast.AnnAssign, lists: dict[str, tuple[str, ...]]) -> Option | None:
    annotation = statement.annotation
    if not (isinstance(annotation, ast.Subscript) and _name(annotation.value) == "A"):
        return None
    assert isinstance(statement.target, ast.Name)
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    meta: dict[str, ast.expr] = {}
    for part in parts[1:]:
        if isinstance(part, ast.Call) and _name(part.func) == "Arg":
            meta = {word.arg: word.value for word in part.keywords if word.arg}
    if _is(meta.get("no_cli"), True):
        return None
    name = "--" + statement.target.id.replace("_", "-")
    if isinstance(given := meta.get("cli_name"), ast.Constant):
        name = str(given.value)
    names = (name, *(_literals(meta["aliases"]) if "aliases" in meta else ()))
    inner = _without_none(parts[0])
    action = meta.get("action")
    if action is not None and _name(action) == "BooleanOptionalAction":
        return Option((*names, f"--no-{name[2:]}"), "none")
    if action is not None:
        return Option(names, "many")
    if _name(inner) == "bool":
        return Option(names, "none")
    own_parser = "type_parser" in meta
    choices = _choices(meta.get("choices"), lists)
    if isinstance(inner, ast.Subscript) and _name(inner.value) == "Literal":
        choices = choices or _literals(inner.slice)
    if isinstance(inner, ast.Subscript) and _name(inner.value) in ("List", "list") and not own_parser:
        return Option(names, "many", _name(inner.slice) == "int", choices)
    takes = "many" if "nargs" in meta else "one"
    return Option(names, takes, _name(inner) == "int" and not own_parser, choices)


def _of_calls(tree: ast.Module) -> Iterator[Option]:
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and _name(call.func) == "add_argument"):
            continue
        names = tuple(a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        words = {word.arg: word.value for word in call.keywords if word.arg}
        action = words.get("action")
        flag = _is(action, "store_true") or (action is not None and "nargs" not in words)
        yield Option(names, "none" if flag else "one")


def _choices(node: ast.expr | None, lists: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    if node is None:
        return None
    if isinstance(node, ast.Name):
        return lists.get(node.id)
    if isinstance(node, ast.Attribute):
        return lists.get(f"{_name(node.value)}.{node.attr}")
    return _literals(node) or None


def _without_none(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Subscript) and _name(node.value) == "Optional":
        return node.slice
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return node.left if _is(node.right, None) else node.right
    return node


def _literals(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return tuple(str(e.value) for e in node.elts if isinstance(e, ast.Constant))
    return (str(node.value),) if isinstance(node, ast.Constant) else ()


def _is(node: ast.expr | None, value: object) -> bool:
    return (isinstance(node, ast.Constant) and node.value is value) or (
        isinstance(node, ast.Constant) and isinstance(value, str) and node.value == value
    )


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
