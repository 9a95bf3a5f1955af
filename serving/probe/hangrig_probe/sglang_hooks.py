"""The probe inside SGLang (0.5.20 to 0.5.23): which of its processes this is, and what is hooked in each.

Here: the choice of role, the server process, and the version's peculiarities at start. Not here: the schedulers
(``sglang_rank.py``), their communicators (``sglang_groups.py``), the processes that are no ranks
(``sglang_others.py``), and the search for copies that nobody gates (``sglang_sites.py``).

SGLang's own ``HookRegistry`` is not used. It applies hooks after the plugin has returned and only logs a name that
it cannot find, so the probe could not say which of its hooks are missing in this version; it imports the modules
of its targets, which would load the scheduler into the detokenizer; and a hook that raises there raises in the
engine. The probe patches what this process has loaded, at once, and knows the outcome name by name.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING

from . import sglang_others as others
from .sglang_rank import SCHEDULER, RankHooks

if TYPE_CHECKING:
    from .probe import Probe

PIN_GATE = "sglang.srt.utils.common:is_pin_memory_available"
"""Every call site of the engine asks this function, and it asks the platform."""
ENTRIES = {
    "run_scheduler_process": "rank",
    "run_data_parallel_controller_process": "controller",
    "run_detokenizer_process": "detokenizer",
    others.controller_process.__name__: "controller",
}
"""The functions that SGLang's processes begin with; plugins are loaded inside them."""


def install(probe: Probe) -> None:
    """Hooks this process. Called while SGLang loads its plugins, before it builds anything."""
    role = process_role()
    if role == "controller":
        others.Controller(probe).install()
    elif role == "detokenizer":
        others.Detokenizer(probe).install()
    elif role == "server":
        others.Server(probe).install()
    elif SCHEDULER in sys.modules:
        probe.pinned.override(PIN_GATE, rebind="sglang.")
        RankHooks(probe).install()


def process_role() -> str:
    """What this process is to SGLang: the entry that is running it; without one, the main process is the server."""
    frame = sys._getframe(1)
    while frame is not None:
        role = ENTRIES.get(frame.f_code.co_name)
        if role is not None:
            return role
        frame = frame.f_back  # type: ignore[assignment]
    return "server" if multiprocessing.parent_process() is None else "rank"
