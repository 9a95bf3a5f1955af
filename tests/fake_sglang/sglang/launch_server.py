"""The server's entry: plugins first, then the engine."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins import load_plugins


def run_server(messages: list[Any]) -> int | None:
    load_plugins()
    from sglang.srt.entrypoints.engine import launch

    return launch(messages)
