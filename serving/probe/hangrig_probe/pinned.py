"""The toggle ``pinned`` inside an engine: what it answers when the engine asks whether it may pin, and who asks.

``pageable``         no
``pinned``           yes
``pinned_sync``      yes, and the stream is synchronised after each copy that does not wait
``pinned_snapshot``  yes, and each such copy to the device is made from a private block

The last two are applied by ``copies.py``. An override reaches only who asks: who pins without asking, or does
not pin although it may, *bypasses* it, and is listed with file and line. Without an accelerator torch cannot
pin: on a CPU the engine keeps its own answer, and only the askers are counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .config import Config
from .patching import Patches
from .status import Status


class Pinned:
    """Any thread."""

    def __init__(self, config: Config, patches: Patches, status: Status) -> None:
        self.policy = config.pinned if config.device != "cpu" else None
        self._patches = patches
        self._status = status
        self._private: Callable[[Any], Any] | None = None
        self.answers: dict[str, int] = {}
        """Who asked, by file:line."""
        self.calls: dict[str, int] = {}
        """Who called ``Tensor.pin_memory``."""
        self._bypass: dict[str, int] = {}
        self.asked = config.pinned
        self._say()

    @property
    def answer(self) -> bool | None:
        """What the engine is told; None: its own answer stands."""
        return None if self.policy is None else self.policy != "pageable"

    def override(self, target: str, *, rebind: str | None = None) -> bool:
        """Puts our answer in the place of ``target``'s (``patching.py`` says how it is written)."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                self._count(self.answers, sys._getframe(1))
                return original(*args, **kwargs) if self.answer is None else self.answer

            return wrapper

        return self._patches.replace(target, make, rebind=rebind)

    def install(self, tensor_class: Any, empty_like: Callable[..., Any]) -> None:
        """Off a CPU: sees who pins. ``tensor_class``: torch.Tensor; ``empty_like``: torch.empty_like."""
        original = tensor_class.pin_memory
        copy_into = tensor_class.copy_

        @functools.wraps(original)
        def pin_memory(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            site = self._count(self.calls, sys._getframe(1))
            if self.answer is False:
                self.bypassed(site)
            return original(tensor, *args, **kwargs)

        def private(source: Any) -> Any:
            block = empty_like(source, pin_memory=True)
            copy_into(block, source)
            return block

        tensor_class.pin_memory = pin_memory
        self._private = private

    def private(self, source: Any) -> Any:
        """A pinned copy of ``source`` that nobody else will write to."""
        return None if self._private is None else self._private(source)

    def copied(self, pinned: bool, site: str) -> None:
        """A copy that does not wait was made at ``site``."""
        if self.answer is not None and pinned is not self.answer:
            self.bypassed(site)

    def bypassed(self, site: str) -> None:
        """``site`` did not do what the override says."""
        known = site in self._bypass
        self._bypass[site] = self._bypass.get(site, 0) + 1
        if not known:
            self._say()

    def _count(self, counts: dict[str, int], frame: Any) -> str:
        from .copies import site_of

        site = site_of(frame)
        counts[site] = counts.get(site, 0) + 1
        self._status.changed()
        return site

    def _say(self) -> None:
        self._status.set(
            pinned={
                "asked": self.asked,
                "applied": self.policy,
                "answers": self.answers,
                "calls": self.calls,
            },
            bypass=list(self._bypass),
        )
