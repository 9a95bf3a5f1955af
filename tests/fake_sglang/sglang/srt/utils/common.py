"""The gate of pinned memory."""

from __future__ import annotations


def is_pin_memory_available(device: object = None) -> bool:
    return device == "cuda"
