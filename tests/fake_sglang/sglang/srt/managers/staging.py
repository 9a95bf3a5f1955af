"""Copies that ask whether they may pin, and copies that do not. Read, never called."""

from __future__ import annotations

from typing import Any

from sglang.srt.utils.common import is_pin_memory_available


def asks(tensor: Any, device: str) -> Any:
    pinned = tensor.pin_memory() if is_pin_memory_available(device) else tensor
    return pinned.to(device, non_blocking=True)


def does_not_ask(tensor: Any, device: str) -> Any:
    return tensor.pin_memory().to(device, non_blocking=True)
