"""One parsed Python file, and the questions that rules ask of it. Pure.

Names are resolved through the imports of the whole file, those in functions included: an audit has no flow of
control, and a name that means two things in one file is rare.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property

from harness.audit.findings import Finding

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Unreadable(ValueError):
    """Not Python as this interpreter reads it. ``line`` from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Module:
    """``path`` as it is shown; ``name`` dotted, as it would be imported; ``data`` the file's bytes.

    Raises Unreadable.
    """

    def __init__(self, path: str, name: str, is_package: bool, data: bytes) -> None:
        self.path = path
        self.name = name
        self.is_package = is_package
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            self.text = data.decode(encoding)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # doubtful escapes in the audited file are not our news
                self.tree = ast.parse(data, filename=path)
        except SyntaxError as error:
            raise Unreadable(error.lineno or 1, error.msg) from error
        except (UnicodeDecodeError, LookupError, ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(1, str(error) or type(error).__name__) from error

    # --- text ---

    @cached_property
    def lines(self) -> list[str]:
        return re.split(r"\r\n|\r|\n", self.text)

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    @cached_property
    def comments(self) -> dict[int, str]:
        """Comments by line, without their ``#``."""
        found = {}
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT:
                    found[token.start[0]] = token.string.lstrip("#").strip()
        except (tokenize.TokenError, IndentationError):
            pass  # ast has read the file: what the tokenizer gave until here is all there is
        return found

    def comments_above(self, line: int) -> list[int]:
        """Lines of the comment that stands alone right above ``line``."""
        found = []
        line -= 1
        while self.line(line).lstrip().startswith("#"):
            found.append(line)
            line -= 1
        return found

    def finding(self, rule: str, node: ast.AST, message: str) -> Finding:
        line = getattr(node, "lineno", 1)
        first = min((d.lineno for d in getattr(node, "decorator_list", ())), default=line)
        definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        last = line if definition else getattr(node, "end_lineno", None) or line
        return Finding(rule, self.path, line, message, self.line(line).strip(), first, last)

    # --- places ---

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node, in the order of the source."""
        return [self.tree, *_descend(self.tree)]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in children(node)}

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(child, parent) from ``node`` up to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        return next(
            (up for _, up in self.above(node) if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef)), None
        )

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((up for _, up in self.above(node) if isinstance(up, ast.ClassDef)), None)

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in self.nodes if isinstance(node, ast.Call))

    # --- names ---

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name: what it stands for, dotted. Relative imports are made absolute."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.asname is not None
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if whole else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                base = self.absolute(node)
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{base}.{alias.name}"
        return found

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that ``from ... import`` names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def dotted(self, node: ast.AST) -> str:
        """``torch.cuda.memory.x`` of a chain of attributes, its first name resolved; empty for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])


_LEAVES = frozenset({"ctx", "id", "attr", "arg", "type_comment", "kind", "level", "module", "op", "ops"})


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields that can hold nodes below which there is something."""
    if kind is ast.Constant:
        return ()
    return tuple(field for field in kind._fields if field not in _LEAVES)


_FIELDS: Mapping[type[ast.AST], tuple[str, ...]] = {
    kind: _fields(kind) for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, ast.AST)
}


def children(node: ast.AST) -> list[ast.AST]:
    """As ``ast.iter_child_nodes``, several times as fast; without the contexts (Load, Store), which say nothing."""
    found: list[ast.AST] = []
    for name in _FIELDS[node.__class__]:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def _descend(root: ast.AST, but: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """All below ``root``; what is of a type in ``but`` is left out with all below it."""
    waiting = children(root)[::-1]
    while waiting:
        node = waiting.pop()
        if but and isinstance(node, but):
            continue
        yield node
        waiting += children(node)[::-1]


def within(function: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function's body, in the order of the source; not those of functions inside it."""
    return _descend(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == name), None)


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def last_name(node: ast.AST) -> str:
    """``join`` of ``a.b.join``, ``f`` of ``f``; empty else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
