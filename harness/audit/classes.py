"""Classes of a source tree with their bases, found through imports; nothing is imported. Pure but for its reader.

A module is parsed here only if somebody's base is in it: a platform and its ancestors are a handful of files.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.audit.module import Module

Reader = Callable[[str], Module | None]
"""A module by its dotted name; None when the tree does not have it or it cannot be read."""
_DEEPEST = 20
"""Of re-exports, and of ancestors: nothing sensible comes near it, and a cycle ends there."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassInfo:
    """A class statement and the module it stands in."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    def member(self, name: str) -> ast.stmt | None:
        """The method, or the assignment of a class attribute, that the class's own body gives the name."""
        found: ast.stmt | None = None
        for statement in flat(self.node.body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                if statement.name == name:
                    found = statement
            elif isinstance(statement, ast.Assign):
                if any(isinstance(t, ast.Name) and t.id == name for t in statement.targets):
                    found = statement
            elif (
                isinstance(statement, ast.AnnAssign)
                and statement.value is not None
                and isinstance(statement.target, ast.Name)
                and statement.target.id == name
            ):
                found = statement
        return found


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of its conditional blocks."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from flat([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handled = [inner for handler in statement.handlers for inner in handler.body]
            yield from flat([*statement.body, *handled, *statement.orelse, *statement.finalbody])


class ClassIndex:
    """Looks classes up by dotted name, through re-exports."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._modules: dict[str, Module | None] = {}
        self._infos: dict[tuple[str, str], ClassInfo] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._reader(name)
        return self._modules[name]

    def classes(self, module: Module) -> list[ClassInfo]:
        """Of the module's own level, its conditional blocks included."""
        return [self._info(module, node) for node in flat(module.tree.body) if isinstance(node, ast.ClassDef)]

    def _info(self, module: Module, node: ast.ClassDef) -> ClassInfo:
        return self._infos.setdefault((module.path, f"{node.name}:{node.lineno}"), ClassInfo(module, node))

    def find(self, dotted: str, depth: int = 0) -> ClassInfo | None:
        """``pkg.module.Class``, or a name that ``pkg.module`` has imported it under."""
        owner, _, name = dotted.rpartition(".")
        if not owner or depth > _DEEPEST:
            return None
        module = self.module(owner)
        if module is None:
            return None
        own = [info for info in self.classes(module) if info.node.name == name]
        if own:
            return own[-1]
        elsewhere = module.imports.get(name)
        if elsewhere is not None and elsewhere != dotted:
            return self.find(elsewhere, depth + 1)
        return next(
            (
                found
                for node in flat(module.tree.body)
                if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
                if (found := self.find(f"{module.absolute(node)}.{name}", depth + 1)) is not None
            ),
            None,
        )

    def bases(self, info: ClassInfo) -> list[ClassInfo]:
        found = []
        for written in info.node.bases:
            base = written.value if isinstance(written, ast.Subscript) else written  # Base[T]
            dotted = info.module.dotted(base)
            local = f"{info.module.name}.{dotted}"
            parent = self.find(local if "." not in dotted else dotted)
            if parent is not None and parent is not info:
                found.append(parent)
        return found

    def ancestors(self, info: ClassInfo) -> list[ClassInfo]:
        """All ancestors in the order in which Python would look a name up, nearly.

        Depth first, a class that several share at its last place: the order of C3 for the hierarchies that people
        write.
        """
        return self._linear(info, 0)[1:]

    def _linear(self, info: ClassInfo, depth: int) -> list[ClassInfo]:
        found = [info]
        if depth <= _DEEPEST:
            for base in self.bases(info):
                for one in self._linear(base, depth + 1):
                    if one in found and one is not info:
                        found.remove(one)
                    if one is not info:
                        found.append(one)
        return found
