"""The command ``hangrig watch``: options in, a watch, an exit status out. Not here: what a watch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.store import write_json
from harness.watch.run import WatchError, WatchRequest, WatchResult, watch
from harness.watch.text import document, text


def run_watch(request: WatchRequest, tell: Callable[[str], None]) -> tuple[dict[str, Any], str, int]:
    """The document, the text for people and the exit status; the document is stored beside the evidence.

    Raises WatchError for bad usage and StoreError.
    """
    result: WatchResult = watch(request, tell)
    found = document(result)
    write_json(result.folder / "watch.json", found)
    return found, text(result), result.exit


def request_of(
    pids: tuple[int, ...], *, once: bool, timeout_s: float | None, out: Path, metrics: str | None
) -> WatchRequest:
    """``timeout_s`` None without ``once``: ten minutes."""
    return WatchRequest(pids, None if once else (timeout_s or 600.0), out, metrics)


__all__ = ["WatchError", "request_of", "run_watch"]
