"""What a wheel of torch_npu or torch offers, read in place: nothing of it is installed, imported or run.

Python sources tell names and signatures. What is bound in C++ (the bases of Stream, Event and graphs) and the
environment variables that libraries read are texts in the libraries: that a text is there shows that the name
exists, not how it is called. Not here: what we use (``npu_names.py``).
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Signature:
    """``names``: parameters in order, without self, of which the first ``positional`` may come without their name.
    ``many``: any number more of those; ``open``: any keyword, too. ``needed``: those without a default."""

    names: tuple[str, ...]
    positional: int
    many: bool
    open: bool
    needed: frozenset[str]

    def takes(self, count: int, names: tuple[str, ...]) -> bool:
        if count > self.positional and not self.many:
            return False
        placed = min(count, self.positional)
        if self.needed - {*self.names[:placed], *names}:
            return False
        return self.open or set(names) <= set(self.names[placed:])


@dataclass
class Wheel:
    """``path``: the .whl file, or a folder that one was unpacked into."""

    path: Path
    package: str = "torch_npu"
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @cached_property
    def _archive(self) -> zipfile.ZipFile | None:
        return None if self.path.is_dir() else zipfile.ZipFile(self.path)

    @cached_property
    def files(self) -> tuple[str, ...]:
        if self._archive is not None:
            return tuple(self._archive.namelist())
        return tuple(str(one.relative_to(self.path)) for one in self.path.rglob("*") if one.is_file())

    @property
    def version(self) -> str:
        """By its metadata folder; ? where it has none."""
        pattern = re.compile(re.escape(self.package) + r"-([\w.+]+)\.dist-info/")
        found = [pattern.match(name) for name in self.files]
        return next((one[1] for one in found if one), "?")

    def read(self, name: str) -> bytes | None:
        if name not in self.files:
            return None
        return (self.path / name).read_bytes() if self._archive is None else self._archive.read(name)

    def tree(self, module: str) -> ast.Module | None:
        """The syntax tree of a module, ``torch_npu.npu``; None where there is none."""
        if module not in self._trees:
            base = module.replace(".", "/")
            names = (f"{base}.py", f"{base}/__init__.py", f"{base}.pyi")
            source = next((found for name in names if (found := self.read(name)) is not None), None)
            self._trees[module] = None if source is None else ast.parse(source)
        return self._trees[module]

    def binds(self, module: str, name: str) -> bool:
        """Whether the module defines or imports the name, or lists it in ``__all__``."""
        tree = self.tree(module)
        return tree is not None and any(_binds(node, name) for node in tree.body)

    def defined(
        self, name: str, places: Sequence[str] = ("torch_npu/npu/",)
    ) -> ast.FunctionDef | ast.ClassDef | None:
        """The function or class of that name at top level of a module whose file begins with one of ``places``."""
        for file in (file for place in places for file in self.files if file.startswith(place)):
            if file.endswith((".py", ".pyi")):
                tree = self.tree(re.sub(r"(/__init__)?\.pyi?$", "", file).replace("/", "."))
                for node in [] if tree is None else tree.body:
                    if (
                        isinstance(node, ast.FunctionDef | ast.ClassDef)
                        and node.name == name
                        and "overload" not in map(ast.unparse, node.decorator_list)
                    ):
                        return node
        return None

    def method(
        self, owner: str, name: str, places: Sequence[str] = ("torch_npu/npu/",)
    ) -> ast.FunctionDef | None:
        found = self.defined(owner, places)
        if not isinstance(found, ast.ClassDef):
            return None
        return next(
            (one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == name), None
        )

    def in_libraries(self, text: str) -> str | None:
        """The first library that has the text, with no letter beside it."""
        return next((name for name, content in self._libraries.items() if _has_word(content, text)), None)

    def in_sources(self, text: str) -> str | None:
        """The same of Python sources."""
        return next((name for name, content in self._sources.items() if _has_word(content, text)), None)

    @cached_property
    def _libraries(self) -> dict[str, bytes]:
        return {name: self.read(name) or b"" for name in self.files if re.search(r"\.so(\.|$)", name)}

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        return {name: self.read(name) or b"" for name in self.files if name.endswith(".py")}


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any((alias.asname or alias.name) == name for alias in node.names)
    if isinstance(node, ast.Assign | ast.AugAssign):
        held = {target.id for target in _targets(node) if isinstance(target, ast.Name)}
        return name in held or (
            "__all__" in held
            and any(isinstance(one, ast.Constant) and one.value == name for one in ast.walk(node.value))
        )
    return False


def _targets(node: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def signature(node: ast.FunctionDef | ast.ClassDef) -> Signature | None:
    """How it is called; a class by its ``__init__`` or ``__new__``, whichever takes more. None: nothing says."""
    if isinstance(node, ast.ClassDef):
        makers = [
            found
            for one in node.body
            if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")
            if (found := signature(one)) is not None
        ]
        return max(makers, key=lambda found: len(found.names), default=None)
    arguments = node.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    needed = {*names[: len(names) - len(arguments.defaults)]} - {"self", "cls"}
    needed |= {
        one.arg
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    keywords = [one.arg for one in arguments.kwonlyargs]
    return Signature(
        (*names, *keywords),
        len(names),
        arguments.vararg is not None,
        arguments.kwarg is not None,
        frozenset(needed),
    )


def _has_word(content: bytes, text: str) -> bool:
    word = text.encode()
    at = content.find(word)
    while at >= 0:
        beside = content[max(at - 1, 0) : at] + content[at + len(word) : at + len(word) + 1]
        if not re.search(rb"[A-Za-z0-9_]", beside):
            return True
        at = content.find(word, at + 1)
    return False
