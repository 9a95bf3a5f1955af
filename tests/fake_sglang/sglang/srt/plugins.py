"""Plugins are loaded once a process; what fails in one is the plugin's affair."""

from __future__ import annotations

from importlib.metadata import entry_points

_loaded = False


def load_plugins() -> None:
    global _loaded  # noqa: PLW0603
    if not _loaded:
        _loaded = True
        for entry in entry_points(group="sglang.srt.plugins"):
            entry.load()()
