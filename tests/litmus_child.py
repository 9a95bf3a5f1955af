"""A process of the litmus tests whose programs do what the environment asks: LITMUS_TEST is JSON, name to deed.

Deeds: ``never`` shows nothing, ``hang`` sleeps in the shot of number 1, ``die`` kills the process there, ``raise``
raises there, ``foreign`` finds a value that nobody wrote. Programs that are not named are the real ones. With
LITMUS_ONCE, a path, only the first process starts.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

from harness.litmus.catalogue import PROGRAMS
from harness.litmus.child import main
from harness.litmus.copies import Copied

LONG_S = 600.0


def doing(deed: str) -> type[Copied]:
    class Deed(Copied):
        name = "deed"

        def shoot(self, number: int) -> str:
            self.number = number
            return super().shoot(number)

        def body(self) -> None:
            if self.number != 1:
                return
            if deed == "hang":
                threading.Event().wait(LONG_S)
            elif deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif deed == "raise":
                raise RuntimeError("the device is on fire")

        def observe(self) -> str:
            return "other" if deed == "foreign" else "new"

    return Deed


if __name__ == "__main__":
    deeds = json.loads(os.environ["LITMUS_TEST"])
    if once := os.environ.get("LITMUS_ONCE"):
        Path(once).touch(exist_ok=False)
    main({**PROGRAMS, **{name: doing(deed) for name, deed in deeds.items()}})
