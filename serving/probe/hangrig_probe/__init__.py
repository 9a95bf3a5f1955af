"""hangrig's probe: a plugin of SGLang and vLLM that writes the ledger of each of the engine's processes.

Off unless the environment variable HANGRIG_PROBE names its configuration (``config.py``). Standard library, torch
and the ledger only. Whatever fails in here, the engine serves on: failures go to the status file (``status.py``),
and to standard error where that cannot be written.

The two functions are the entry points, called once in every process of the engine. ``probe.py`` ties the parts
together; ``sglang_hooks.py`` and ``vllm_hooks.py`` know the engines, nothing else does.
"""

from __future__ import annotations

import importlib
import os
import sys

__all__ = ["sglang", "vllm"]


def sglang() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    _start("sglang")


def vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``."""
    _start("vllm")


def _start(engine: str) -> None:
    if not os.environ.get("HANGRIG_PROBE"):
        return
    try:
        from .probe import start

        probe = start(engine)
        if probe is not None:
            with probe.guard(f"{engine} hooks"):
                importlib.import_module(f".{engine}_hooks", __package__).install(probe)
    except Exception as error:
        # Without a working probe there is no status file: the log of the engine is what is left.
        print(f"hangrig_probe: off in process {os.getpid()}: {error!r}", file=sys.stderr, flush=True)
