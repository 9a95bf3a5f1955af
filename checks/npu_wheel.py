"""What a torch_npu wheel offers, read in place: nothing of it is installed, imported or run.

Python sources tell names and signatures. What is bound in C++ (the bases of Stream, Event and graphs) and the
environment variables that libraries read are texts in the libraries: that a text is there shows that the name
exists, not how it is called. Not here: what we use (``npu_names.py``).
"""

from __future__ import annotations

import ast
import mmap
import re
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Signature:
    """``names``: parameters in order, without self. ``most`` None: any number of positional ones. ``open``: any
    keyword, too."""

    names: tuple[str, ...]
    most: int | None
    open: bool

    def takes(self, count: int, names: tuple[str, ...]) -> bool:
        if self.most is not None and count > self.most:
            return False
        return self.open or set(names) <= set(self.names[count:])


@dataclass
class Wheel:
    """``path``: the .whl file, or a folder that one was unpacked into."""

    path: Path
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
        found = [re.match(r"torch_npu-([\w.+]+)\.dist-info/", name) for name in self.files]
        return next((one[1] for one in found if one), "?")

    def read(self, name: str) -> bytes | None:
        if name not in self.files:
            return None
        return (self.path / name).read_bytes() if self._archive is None else self._archive.read(name)

    def tree(self, module: str) -> ast.Module | None:
        """The syntax tree of a module, ``torch_npu.npu``; None where there is none."""
        if module not in self._trees:
            base = module.replace(".", "/")
            source = self.read(f"{base}.py") or self.read(f"{base}/__init__.py")
            self._trees[module] = None if source is None else ast.parse(source)
        return self._trees[module]

    def binds(self, module: str, name: str) -> bool:
        """Whether the module defines or imports the name, or lists it in ``__all__``."""
        tree = self.tree(module)
        return tree is not None and (
            any(_binds(node, name) for node in tree.body)
            or any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(tree))
        )

    def defined(self, name: str, package: str = "torch_npu/npu/") -> ast.FunctionDef | ast.ClassDef | None:
        """The function or class of that name, in whatever module of the package it stands at top level."""
        for file in self.files:
            if file.startswith(package) and file.endswith(".py"):
                tree = self.tree(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
                for node in [] if tree is None else tree.body:
                    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                        return node
        return None

    def method(self, owner: str, name: str) -> ast.FunctionDef | None:
        found = self.defined(owner)
        if not isinstance(found, ast.ClassDef):
            return None
        return next(
            (one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == name), None
        )

    def in_libraries(self, text: str) -> str | None:
        """The first library that has the text, with no letter beside it."""
        return next((name for name, content in self._libraries.items() if _has_word(content, text)), None)

    def in_sources(self, text: str) -> str | None:
        pattern = re.compile(rb"\b" + re.escape(text.encode()) + rb"\b")
        return next((name for name, content in self._sources.items() if pattern.search(content)), None)

    @cached_property
    def _libraries(self) -> dict[str, bytes | mmap.mmap]:
        return {name: self.read(name) or b"" for name in self.files if re.search(r"\.so(\.|$)", name)}

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        return {name: self.read(name) or b"" for name in self.files if name.endswith(".py")}


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any((alias.asname or alias.name) == name for alias in node.names)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return False


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
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    keywords = [one.arg for one in arguments.kwonlyargs]
    return Signature(
        (*names, *keywords), None if arguments.vararg else len(names), arguments.kwarg is not None
    )


def _has_word(content: bytes | mmap.mmap, text: str) -> bool:
    return (
        re.search(rb"(?<![A-Za-z0-9_])" + re.escape(text.encode()) + rb"(?![A-Za-z0-9_])", content)
        is not None
    )
