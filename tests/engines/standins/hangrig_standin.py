"""A module in the place of one that has no build for this processor: it can be imported, and nothing in it works.

Every attribute and every submodule exists, so that code which imports the package at its top can be loaded; a
call says what is missing. Not here: which packages are replaced (one folder each beside this file).

Imported inside an engine's environment: standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

REASON = "is not in this environment, only a stand-in that can be imported: the CPU path must not reach it"


class _Kind(type):
    """The type of every missing name. A class, since code also inherits from names and asks isinstance."""

    def __getattr__(cls, name: str) -> Any:
        if _is_protocol(name):
            raise AttributeError(f"{cls.__module__}.{cls.__qualname__} has no {name}: it is a stand-in")
        return missing(cls.__module__, f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} {REASON}")


def missing(module: str, qualified_name: str) -> type:
    """A name of ``module`` that exists. Calling it raises NotImplementedError; so are its own attributes."""
    name = qualified_name.rpartition(".")[2]
    return _Kind(name, (), {"__module__": module, "__qualname__": qualified_name})


def stand_in(package: str) -> None:
    """Makes the imported ``package`` answer for all its names and submodules."""
    module = sys.modules[package]
    module.__class__ = _Package
    sys.meta_path.append(_Submodules(package))


def _is_protocol(name: str) -> bool:
    """Whether the interpreter or a library asks what kind of object this is."""
    return name.startswith("__") and name.endswith("__")


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if _is_protocol(name):
            raise AttributeError(f"{self.__name__} has no {name}: it is a stand-in")
        found = missing(self.__name__, name)
        setattr(self, name, found)
        return found


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any submodule of one package, and any below that."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names come when they are asked for."""
