"""Copies between host and device that do not wait: which are they, is the host's side pinned, who makes them.

Wraps ``Tensor.to``, ``copy_``, ``cuda``, ``npu`` and ``cpu``; a call without ``non_blocking`` passes straight
through. Here the two toggles that change a copy are applied: ``pinned_sync`` synchronises the stream after it,
``pinned_snapshot`` copies the host's side into a private block before it. On a CPU nothing is wrapped. Not
here: whether the engine pins at all (``pinned.py``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from .pinned import Pinned
from .recorder import Recorder
from .status import Status
from .streams import Streams

METHODS = ("to", "copy_", "cuda", "npu", "cpu")


class Copies:
    """The copies of this process. Any thread."""

    def __init__(self, recorder: Recorder, streams: Streams, pinned: Pinned, status: Status) -> None:
        self._recorder = recorder
        self._streams = streams
        self._pinned = pinned
        self._status = status
        self._module: Any = None
        self._sites: dict[tuple[CodeType, int], str] = {}
        self.counts: dict[str, int] = {}
        """By direction and kind of memory, such as "h2d pinned"."""
        self._off = False

    def install(self, module: Any, tensor_class: Any) -> None:
        """``module``: torch.cuda or torch.npu; ``tensor_class``: torch.Tensor."""
        self._module = module
        self._status.set(copies=self.counts)
        wrapped = []
        for name in METHODS:
            original = getattr(tensor_class, name, None)
            if original is not None:
                setattr(tensor_class, name, self._wrapped(original, name))
                wrapped.append(name)
        self._status.hook("torch.Tensor", "on" if wrapped else "missing: no method that copies")

    def _wrapped(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        into_self = name == "copy_"

        @functools.wraps(original)
        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("non_blocking") and True not in [one for one in args if one is True]:
                return original(tensor, *args, **kwargs)
            if self._off:
                return original(tensor, *args, **kwargs)
            synchronise = False
            try:
                source, to_cpu = _ends(tensor, args, kwargs, name)
                if source is not None and source.is_cpu != to_cpu:
                    host = tensor if into_self and to_cpu else source if source.is_cpu else None
                    private = self._record(source, host, to_cpu, sys._getframe(1))
                    synchronise = self._pinned.policy == "pinned_sync"
                    if private is not None and into_self:
                        args = (private, *args[1:])
                    elif private is not None:
                        tensor = private
            except Exception as error:
                self._fail(error)
            result = original(tensor, *args, **kwargs)
            if synchronise:
                self._module.current_stream().synchronize()
            return result

        return wrapper

    def _record(self, source: Any, host: Any, to_cpu: bool, frame: FrameType) -> Any:
        """Returns what to copy from instead, if anything."""
        pinned = host is not None and bool(host.is_pinned())
        direction = "d2h" if to_cpu else "h2d"
        kind = "pinned" if pinned else "pageable"
        what = f"{direction} {kind}"
        self.counts[what] = self.counts.get(what, 0) + 1
        self._status.changed()
        site = self._site(frame)
        nbytes = source.numel() * source.element_size()
        self._streams.last_copy = self._recorder.enqueue("copy", f"copy.{what} {nbytes} B", site)
        self._pinned.copied(pinned, site)
        if pinned and not to_cpu and self._pinned.policy == "pinned_snapshot":
            return self._pinned.private(source)
        return None

    def _site(self, frame: FrameType) -> str:
        key = (frame.f_code, frame.f_lineno)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = site_of(frame)
        return site

    def _fail(self, error: Exception) -> None:
        self._off = True
        self._status.failed("copies are no longer recorded", error)
        self._status.hook("torch.Tensor", f"off: {error}")


def site_of(frame: FrameType) -> str:
    """``file:line`` of a caller, the file from its package on."""
    path = frame.f_code.co_filename
    for mark in ("site-packages/", "dist-packages/"):
        path = path.rpartition(mark)[2]
    return f"{path}:{frame.f_lineno}"


def _ends(tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Any, bool]:
    """Where a copy comes from, and whether it goes to the host. (None, False) where it goes nowhere."""
    if name == "copy_":
        return (args[0] if args else kwargs.get("src")), tensor.is_cpu
    if name == "cpu":
        return tensor, True
    if name in ("cuda", "npu"):
        return tensor, False
    where: Any = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if hasattr(where, "is_cpu"):
        return tensor, bool(where.is_cpu)
    if hasattr(where, "type") and isinstance(where.type, str):
        return tensor, where.type == "cpu"
    if isinstance(where, str):
        return tensor, where.startswith("cpu")
    if isinstance(where, int):
        return tensor, False
    return None, False
