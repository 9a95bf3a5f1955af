"""The probe inside vLLM (V1 engine): which process has which seat, and what is hooked there.

Hooks are installed in every process, by name, and wait for their modules: a process that forks (vLLM's default
off a CPU) passes them on. The seat is taken where the engine's own code shows what a process is: an executor is
made in an engine core, a device is initialised in a worker; with one worker the engine core is the rank. What
the engine core and the workers do is hooked in ``vllm_engine_core.py`` and ``vllm_worker.py``.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from .vllm_engine_core import EngineCoreHooks
from .vllm_worker import WorkerHooks

if TYPE_CHECKING:
    from .probe import Probe

PIN_GATE = "vllm.utils.platform_utils:is_pin_memory_available"
PIN_CONSTANT = "PIN_MEMORY"


def install(probe: Probe) -> None:
    """Hooks this process. Called while vLLM loads its plugins."""
    WorkerHooks(probe).install()
    EngineCoreHooks(probe).install()
    probe.pinned.override(PIN_GATE, rebind="vllm.")
    answer = probe.pinned.answer
    if answer is not None:
        _correct_constants(answer)
        probe.patches.when_imported("vllm.v1.utils", lambda module: _correct_buffers(module, answer))


def _correct_constants(answer: bool) -> None:
    """Modules that were imported before us asked already and kept the answer."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and isinstance(vars(module).get(PIN_CONSTANT), bool):
            setattr(module, PIN_CONSTANT, answer)


def _correct_buffers(module: types.ModuleType, answer: bool) -> None:
    """``CpuGpuBuffer`` keeps the answer as the default of a parameter."""
    init: Any = module.CpuGpuBuffer.__init__
    if "pin_memory" in (init.__kwdefaults__ or {}):
        init.__kwdefaults__["pin_memory"] = answer
