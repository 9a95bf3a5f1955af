"""What a rank does so that its stacks can be taken from outside. Runs inside the rank; standard library only.

The side that takes them is ``capture.py``. Both calls are safe to make anywhere; neither starts a thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
from pathlib import Path
from typing import IO

# linux/prctl.h. Lets a process that is no ancestor, and its children, trace this one under Yama (ptrace_scope
# 1).
_PR_SET_PTRACER = 0x59616D61

# faulthandler keeps the number of the descriptor, not the file: a collected file would close it under the
# handler.
_files: list[IO[str]] = []


def install_faulthandler(path: Path) -> None:
    """From now on SIGUSR2 appends the stacks of all threads to ``path``, even while the GIL is held.

    Raises OSError when the file cannot be opened. Call it in the main thread or any other, once a process.
    """
    file = path.open("a")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _files.append(file)


def allow_tracing_by(pid: int) -> bool:
    """Lets process ``pid`` and its descendants attach to this one. False where the kernel has no such rule.

    Without Yama nothing forbids it in the first place: False is then no hindrance.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return False
    return int(prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)) == 0
