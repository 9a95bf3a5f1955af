"""Hooks on an engine's functions and methods, by name: before, after or around the original.

A target is written ``package.module:Class.method`` or ``package.module:function``. A name that is not there
becomes "missing: why" in the status, never an exception; a module that is not imported yet is patched when it
is. The first exception of a hook turns that hook off for good; the original runs exactly once in any case, and
what it raises passes unchanged. Only ``InjectedError``, a fault that was asked for, leaves a hook. Not here:
what the hooks do.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .faults import InjectedError
from .status import Status

Hook = Callable[..., Any]


class _MissingError(Exception):
    """The text says what is not there."""


class Patches:
    """The hooks of one process and of its forked children."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._imports = _Imports()

    def wrap(
        self,
        target: str,
        *,
        before: Hook | None = None,
        after: Hook | None = None,
        around: Hook | None = None,
        rebind: str | None = None,
        role: str | None = None,
    ) -> bool:
        """Hooks ``target``: ``before(*args, **kwargs)``, ``after(result, *args, **kwargs)`` when the original
        returned, or ``around(call, *args, **kwargs)``, whose result counts and which calls ``call`` once.

        ``rebind``: copies that modules with names beginning so made by ``from x import y`` are replaced too.
        ``role``: only a process of this role must have imported the module by its first step; None: each.
        False where there is no such target; it is then in the status.
        """

        def make(original: Hook) -> Hook:
            return guarded(original, target, self._status, before=before, after=after, around=around)

        return self.replace(target, make, rebind=rebind, role=role)

    def replace(
        self,
        target: str,
        make: Callable[[Any], Any],
        *,
        rebind: str | None = None,
        role: str | None = None,
    ) -> bool:
        """Puts ``make(original)`` in the place of ``target``. As ``wrap``, but the replacement is not guarded."""
        module_name, _, qualified = target.partition(":")
        if module_name in sys.modules and not self._imports.under_way(module_name):
            return self._apply(target, sys.modules[module_name], qualified, make, rebind)
        self._status.waits(target, module_name, role)
        self._imports.when(module_name, lambda module: self._apply(target, module, qualified, make, rebind))
        return True

    def when_imported(self, module_name: str, act: Callable[[types.ModuleType], object]) -> None:
        """Calls ``act`` with the module, now or as soon as it is imported. Guarded."""

        def guarded_act(module: types.ModuleType) -> None:
            try:
                act(module)
            except Exception as error:
                self._status.failed(f"when {module_name} was imported", error)

        if module_name in sys.modules and not self._imports.under_way(module_name):
            guarded_act(sys.modules[module_name])
        else:
            self._imports.when(module_name, guarded_act)

    def _apply(
        self,
        target: str,
        module: types.ModuleType,
        qualified: str,
        make: Callable[[Any], Any],
        rebind: str | None,
    ) -> bool:
        try:
            original, replacement = _put(module, qualified, make)
            if rebind is not None:
                rebind_copies(original, replacement, rebind)
        except _MissingError as error:
            self._status.hook(target, f"missing: {error}")
            return False
        except Exception as error:
            self._status.hook(target, f"missing: {type(error).__name__}: {error}")
            self._status.failed(f"cannot patch {target}", error)
            return False
        self._status.hook(target, "on")
        return True


def guarded(
    original: Hook,
    name: str,
    status: Status,
    *,
    before: Hook | None = None,
    after: Hook | None = None,
    around: Hook | None = None,
) -> Hook:
    """``original`` with hooks that cannot harm it."""
    hook = _Guard(name, status)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if hook.off:
            return original(*args, **kwargs)
        if around is not None:
            return hook.around(original, around, args, kwargs)
        if before is not None:
            hook.run(before, args, kwargs)
        result = original(*args, **kwargs)
        if after is not None and not hook.off:
            hook.run(after, (result, *args), kwargs)
        return result

    return wrapper


class _Guard:
    """Whether one hook is still on."""

    def __init__(self, name: str, status: Status) -> None:
        self._name = name
        self._status = status
        self.off = False

    def run(self, hook: Hook, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            hook(*args, **kwargs)
        except InjectedError:
            raise
        except Exception as error:
            self._fail(error)

    def around(self, original: Hook, around: Hook, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = _Call(original)
        try:
            return around(call, *args, **kwargs)
        except InjectedError:
            raise
        except Exception as error:
            if error is call.error:
                raise
            self._fail(error)
        if call.error is not None:
            raise call.error
        return call.result if call.returned else original(*args, **kwargs)

    def _fail(self, error: Exception) -> None:
        self.off = True
        self._status.failed(f"the hook on {self._name} is off", error)
        self._status.hook(self._name, f"off: {type(error).__name__}: {error}")


class _Call:
    """The original as an ``around`` hook calls it, and what came of it."""

    __slots__ = ("_original", "error", "result", "returned")

    def __init__(self, original: Hook) -> None:
        self._original = original
        self.error: BaseException | None = None
        self.result: Any = None
        self.returned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._original(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


def rebind_copies(original: object, replacement: object, prefix: str) -> int:
    """Replaces ``original`` in the loaded modules whose names begin with ``prefix``. Returns how many copies."""
    found = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefix) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, replacement)
                found += 1
    return found


def _put(module: types.ModuleType, qualified: str, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    owner: Any = module
    *path, name = qualified.split(".")
    for part in path:
        if not hasattr(owner, part):
            raise _MissingError(f"{getattr(owner, '__name__', owner)} has no {part}")
        owner = getattr(owner, part)
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        raise _MissingError(f"{getattr(owner, '__name__', owner)} has no {name}") from None
    kind = type(found) if isinstance(found, staticmethod | classmethod) else None
    original = found.__func__ if kind is not None else found
    if not callable(original):
        raise _MissingError(f"{name} of {getattr(owner, '__name__', owner)} is no function")
    replacement = make(original)
    setattr(owner, name, replacement if kind is None else kind(replacement))
    return original, replacement


class _Imports(importlib.abc.MetaPathFinder):
    """Calls back after a module was executed for the first time."""

    def __init__(self) -> None:
        self._wanted: dict[str, list[Callable[[types.ModuleType], object]]] = {}
        self._finding: set[str] = set()

    def when(self, module_name: str, act: Callable[[types.ModuleType], object]) -> None:
        if not self._wanted and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._wanted.setdefault(module_name, []).append(act)

    def under_way(self, module_name: str) -> bool:
        """Is it in ``sys.modules`` already, and still being executed?"""
        spec = getattr(sys.modules.get(module_name), "__spec__", None)
        return bool(getattr(spec, "_initializing", False)) and module_name in self._wanted

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._wanted or fullname in self._finding:
            return None
        with self._looking(fullname):
            spec = next((found for found in self._others(fullname, path, target) if found), None)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = _Loader(spec.loader, lambda module: self._arrived(fullname, module))
        return spec

    @contextmanager
    def _looking(self, fullname: str) -> Iterator[None]:
        self._finding.add(fullname)
        try:
            yield
        finally:
            self._finding.discard(fullname)

    def _others(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> Iterator[importlib.machinery.ModuleSpec | None]:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None:
                yield find_spec(fullname, path, target)

    def _arrived(self, fullname: str, module: types.ModuleType) -> None:
        for act in self._wanted.pop(fullname, ()):
            act(module)


class _Loader(importlib.abc.Loader):
    """The module's own loader, and a word afterwards."""

    def __init__(self, loader: Any, arrived: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._arrived = arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        # The module must keep its own loader: inspect and pkgutil ask it for the source.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._arrived(module)
