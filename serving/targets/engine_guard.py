"""The guard of one server: ends all its processes once their launcher is gone.

    python -m serving.targets.engine_guard LAUNCHER_PID LAUNCHER_START_TICKS MARK

It detaches itself, prints its pid, and waits for the launcher's end. A launcher that stopped its server leaves
nothing for it to do. It needs neither Ray nor the driver, so it works on every node whoever was killed.
"""

from __future__ import annotations

import os
import sys
import time

from harness import process_control
from harness.process_control import ProcessId
from serving.targets.engine_process import end_marked

_LOOK_S = 60.0
_END_S = 60.0


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 when a process would not die."""
    if len(arguments) != 3:
        print("usage: python -m serving.targets.engine_guard PID START_TICKS MARK", file=sys.stderr)
        return 2
    launcher, mark = ProcessId(int(arguments[0]), int(arguments[1])), arguments[2]
    _detach()
    print(os.getpid(), flush=True)
    _let_go()
    since = time.time()
    while process_control.wait_gone([launcher], _LOOK_S):
        pass
    return 1 if end_marked(mark, since, time.monotonic() + _END_S) else 0


def _detach() -> None:
    """The caller goes on as a grandchild in a session of its own, adopted by init."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)


def _let_go() -> None:
    """Whoever reads our output must see its end."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
