"""What can be seen of a foreign engine from outside during a trial: who of it dies, what its log says, how its
health answers. One thread looks at processes and log, one asks for its health.

Not here: finding the processes (``engine_tree.py``), what its requests bring (``engine_client.py``).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

import httpx

from harness import process_control
from serving.targets.dialect import Call
from serving.targets.engine_log import LogTail
from serving.targets.engine_process import exit_words
from serving.targets.engine_tree import Seated

_LOOK_MS = 200
_HEALTH_EVERY_S = 5.0
_HEALTH_DEADLINE_S = 30.0
_SAID_KEPT = 400
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Death:
    """``at_ns``: monotonic, when it was seen. ``exit``: in words, None where nobody knows."""

    seated: Seated
    at_ns: int
    exit: str | None

    @property
    def words(self) -> str:
        name = (
            self.seated.seat
            if self.seated.role == self.seated.seat
            else f"{self.seated.role} {self.seated.seat}"
        )
        return f"{name} (process {self.seated.id.pid}) ended" + (f": {self.exit}" if self.exit else "")


class Witness:
    """Looks from ``watch`` until ``close``. ``each_line`` is given every line of the log, in a thread of ours."""

    def __init__(self, tail: LogTail, each_line: Callable[[str], None] | None = None) -> None:
        self._tail = tail
        self._each_line = each_line
        self._lock = Lock()
        self._reading = Lock()
        self._closing = Event()
        self._since_ns = time.monotonic_ns()
        self._deaths: list[Death] = []
        self._said: list[tuple[int, str, str]] = []
        self._unsaid = 0
        self._watched: dict[int, Seated] = {}
        self._poller = select.poll()
        self._threads: list[Thread] = []
        self._health: str | None = None

    def watch(self, seats: Sequence[Seated], base_url: str | None, health: Call) -> None:
        """Begins. ``base_url``: of the node that serves HTTP; None on the others."""
        for seated in seats:
            try:
                descriptor = os.pidfd_open(seated.id.pid)
            except ProcessLookupError:
                self._died(seated)
                continue
            if not process_control.alive(seated.id):
                os.close(descriptor)
                self._died(seated)
                continue
            self._watched[descriptor] = seated
            self._poller.register(descriptor, select.POLLIN)
        self._start(self._look, "hangrig-witness")
        if base_url is not None:
            self._start(lambda: self._ask(base_url, health), "hangrig-health")

    def begin(self) -> None:
        """A trial begins: what was said before is forgotten, who died is not. What the log holds by now is read
        first: it belongs to the trial before."""
        self._read()
        with self._lock:
            self._since_ns = time.monotonic_ns()
            self._said.clear()
            self._unsaid = 0
            self._health = None

    @property
    def deaths(self) -> tuple[Death, ...]:
        """In the order in which they were seen."""
        with self._lock:
            return tuple(self._deaths)

    def since_s(self, at_ns: int) -> float:
        """Seconds from the trial's beginning."""
        return round((at_ns - self._since_ns) / 1e9, 3)

    def said(self) -> list[dict[str, Any]]:
        """What the engine said of trouble in this trial, in order."""
        with self._lock:
            said, unsaid = list(self._said), self._unsaid
        lines = [{"at_s": self.since_s(at), "source": source, "text": text} for at, source, text in said]
        if unsaid:
            lines.append({**lines[-1], "text": f"... and {unsaid} more lines like these"})
        return lines

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(_END_S)
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()

    # In threads ------------------------------------------------------------------------------------------

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _look(self) -> None:
        while not self._closing.is_set():
            for descriptor, _ in self._poller.poll(_LOOK_MS):
                self._poller.unregister(descriptor)
                self._died(self._watched.pop(descriptor))
                os.close(descriptor)
            self._read()

    def _read(self) -> None:
        with self._reading:
            for line in self._tail.read(self._each_line):
                self._say("log", line)

    def _died(self, seated: Seated) -> None:
        # Its parent may not have asked yet: then the kernel still says how it ended.
        stat = process_control.find(seated.id)
        code = stat.exit_code if stat is not None else 0
        with self._lock:
            self._deaths.append(Death(seated, time.monotonic_ns(), exit_words(code) if code else None))

    def _ask(self, base_url: str, call: Call) -> None:
        with httpx.Client(base_url=base_url, timeout=_HEALTH_DEADLINE_S, trust_env=False) as client:
            while not self._closing.wait(_HEALTH_EVERY_S):
                answer, good = _health(client, call)
                with self._lock:
                    changed, self._health = (
                        answer.split(" after ")[0] != self._health,
                        answer.split(" after ")[0],
                    )
                if changed or not good:
                    self._say("health", answer)

    def _say(self, source: str, text: str) -> None:
        with self._lock:
            if len(self._said) < _SAID_KEPT:
                self._said.append((time.monotonic_ns(), source, text))
            else:
                self._unsaid += 1


def _health(client: httpx.Client, call: Call) -> tuple[str, bool]:
    began = time.monotonic()
    try:
        response = client.request(call.method, call.path, json=call.body, headers=dict(call.headers))
    except httpx.HTTPError as error:
        what, good = f"did not answer ({type(error).__name__})", False
    else:
        what, good = f"answered {response.status_code}", response.status_code == 200
    return f"{call.path} {what} after {time.monotonic() - began:.1f} s", good
