"""Which Python files are audited, and how their bytes are read. Nothing is imported or run.

A file, a folder, a wheel (read in place), or an installed package by its import or distribution name. Links to
folders are not followed. Tests are left out unless asked for: what they do to devices is their own business.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_TEST_FILE = re.compile(r"^(test_.*|.*_test|conftest)\.py$")
_PACKAGE = re.compile(r"^[A-Za-z][\w.-]*$")


class AuditError(ValueError):
    """What is to be audited, or an option's file, is not there or not usable; the message says what to do."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """``path`` as it is shown, with ``/``; ``location`` a path of the machine, or a member of the wheel."""

    path: str
    name: str
    """Dotted, as it would be imported; for files of a bare folder from that folder on."""
    is_package: bool
    location: str


@dataclass(frozen=True, slots=True)
class Tree:
    """The files in the order of their paths."""

    files: tuple[SourceFile, ...]
    wheel: str | None = None
    _by_last: dict[str, list[SourceFile]] = field(default_factory=dict, repr=False, compare=False)

    def read(self, file: SourceFile) -> bytes:
        """Raises OSError, or KeyError and BadZipFile of a damaged wheel."""
        if self.wheel is None:
            return Path(file.location).read_bytes()
        return _opened(self.wheel).read(file.location)

    def find(self, name: str) -> SourceFile | None:
        """The module ``name``; else the only one whose name ends in it, for sources below ``src/``."""
        if not self._by_last:
            for file in self.files:
                self._by_last.setdefault(file.name.rpartition(".")[2], []).append(file)
        near = self._by_last.get(name.rpartition(".")[2], [])
        exact = [file for file in near if file.name == name]
        if exact:
            return exact[0]
        ending = [file for file in near if file.name.endswith(f".{name}")]
        return ending[0] if len(ending) == 1 else None


@functools.lru_cache(maxsize=2)
def _opened(wheel: str) -> zipfile.ZipFile:
    """A wheel has ten thousand members: its list is read once. Closed when another takes its place."""
    return zipfile.ZipFile(wheel)


def locate(what: str, *, tests: bool = False) -> Tree:
    """The files of ``what``. Raises AuditError."""
    path = Path(what)
    if path.is_file():
        tree = _wheel(path, tests) if path.suffix in (".whl", ".zip") else _single(path)
    elif path.is_dir():
        tree = _folder(path, tests)
    elif path.suffix in (".py", ".whl") or "/" in what or "\\" in what or not _PACKAGE.match(what):
        raise AuditError(f"{what}: does not exist")
    else:
        tree = _package(what, tests)
    if not tree.files:
        others = "" if tests else ", tests not counted (--tests takes them in)"
        raise AuditError(f"{what}: has no Python files{others}")
    return tree


def _is_test(parts: tuple[str, ...]) -> bool:
    return bool(_TEST_FILE.match(parts[-1])) or any(part in _TEST_FOLDERS for part in parts[:-1])


def _module_name(parts: tuple[str, ...]) -> tuple[str, bool]:
    """(dotted name, is a package) of a path below the import root."""
    stem = parts[-1].removesuffix(".py")
    if stem == "__init__":
        return ".".join(parts[:-1]), True
    return ".".join([*parts[:-1], stem]), False


def _import_root(folder: Path) -> Path:
    """The folder above the outermost package that ``folder`` is in; itself where it is in none."""
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def _shown(path: Path, root: Path) -> str:
    """Below the current folder if it is there, as code hosts want it; else below the import root."""
    here = Path.cwd()
    return path.relative_to(here if path.is_relative_to(here) else root).as_posix()


def _files(paths: Iterable[Path], root: Path) -> tuple[SourceFile, ...]:
    found = []
    for path in sorted(paths):
        name, is_package = _module_name(path.relative_to(root).parts)
        found.append(SourceFile(_shown(path, root), name, is_package, str(path)))
    return tuple(sorted(found, key=lambda file: file.path))


def _single(path: Path) -> Tree:
    path = path.absolute()
    return Tree(_files([path], _import_root(path.parent)))


def _folder(folder: Path, tests: bool) -> Tree:
    folder = folder.absolute()
    found = []
    for path in _walk(folder):
        if tests or not _is_test(path.relative_to(folder).parts):
            found.append(path)
    return Tree(_files(found, _import_root(folder)))


def _walk(folder: Path) -> Iterable[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise AuditError(f"{folder}: cannot be read: {error.strerror}") from error
    for path in entries:
        if path.is_dir():
            hidden = path.name.startswith(".") or path.name in _SKIPPED or (path / "pyvenv.cfg").exists()
            if not hidden and not path.is_symlink():
                yield from _walk(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _wheel(path: Path, tests: bool) -> Tree:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise AuditError(f"{path}: is no wheel that can be read: {error}") from error
    found = []
    for member in sorted(members):
        parts = PurePosixPath(member).parts
        if member.endswith(".py") and (tests or not _is_test(parts)):
            name, is_package = _module_name(parts)
            found.append(SourceFile(member, name, is_package, member))
    return Tree(tuple(found), str(path.absolute()))


def _package(what: str, tests: bool) -> Tree:
    """An installed package, found by the path finder alone: asking for a submodule would import its parents."""
    top, *rest = what.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top) if "-" not in what else None
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            inside = Path(folder, *rest)
            if inside.is_dir():
                return _folder(inside, tests)
            if rest and inside.with_suffix(".py").is_file():
                return _single(inside.with_suffix(".py"))
        if not rest and spec.origin is not None and spec.origin.endswith(".py"):
            return _single(Path(spec.origin))
    try:
        installed = importlib.metadata.distribution(what)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise AuditError(
            f"{what}: is no file, no folder and no package that this Python has; give a path, a wheel, or run "
            "hangrig from the engine's own Python"
        ) from error
    root = Path(str(installed.locate_file("")))
    listed = [Path(str(file)) for file in installed.files or () if str(file).endswith(".py")]
    found = [root / file for file in listed if ".." not in file.parts and (tests or not _is_test(file.parts))]
    return Tree(_files([path for path in found if path.is_file()], root))
