"""The parent's side of the processes that run programs: started when needed, ended whatever they do.

A crew is one process, or two that share a communicator. An order is given in pieces, and each shot has its
deadline: where a member does not answer in time, the shot stalled. After a stall, a death or an error of the device
the whole crew is ended and the next piece begins with a new one, on a fresh device.

Not here: what a process does (``child.py``), what is ordered (``session.py``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.litmus.bench import Stress
from harness.litmus.program import ALWAYS_BAD, DIED, ERROR, STALLED
from harness.litmus.request import ChildRequest

COMMAND = (sys.executable, "-m", "harness.litmus.child")
MOST_STOPS = 3
"""So often a program may stall, die or fail before the rest of its shots is left out: each time costs a deadline
and a new process."""
_FIRST_PIECE = 2
_PIECE = 25
_GRACE_S = 5.0
"""Beyond the deadline that a process keeps itself."""
_END_S = 10.0


class CrewError(Exception):
    """The processes could not be started; the message says what they said."""


@dataclass(frozen=True, slots=True)
class Shot:
    number: int
    outcome: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """``space`` keeps the random numbers of tuning apart from those of the count."""

    program: str
    space: str
    stress: Stress
    shots: int
    budget_s: float


class _Member:
    """One process, and the lines that it answers."""

    def __init__(self, command: Sequence[str], request: ChildRequest, log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*command, request.to_text()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
            )
        self._log = log
        self._rest = b""

    def tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: the missing answer tells it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    def answer(self, until_s: float) -> dict[str, Any] | None:
        """The next line; None at the deadline (of the monotonic clock). EOFError when the process is gone."""
        out = self._process.stdout
        assert out is not None
        while b"\n" not in self._rest:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0 or not select.select([out], [], [], left_s)[0]:
                return None
            if not (read := out.read(65536)):
                raise EOFError
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_GRACE_S)
            if status < 0:
                return f"ended by {signal.Signals(-status).name}"
            return f"ended with status {status}"
        return "closed its output"

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "no word of it"

    def end(self) -> None:
        """Kills it with all that it started. Returns when it is gone, or after _END_S."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Crew:
    """``ranks`` processes on one kind of device. Use as a context: its end ends them."""

    def __init__(
        self, request: ChildRequest, logs: Path, start_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        self.facts: dict[str, Any] = {}
        """What rank 0 said of the platform, once it was started."""
        self._request = request
        self._logs = logs
        self._start_s = start_s
        self._command = command
        self._members: list[_Member] = []
        self._set_up: tuple[str, str, Stress] | None = None
        """The program that the members have set up."""
        self._meeting_place: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def shoot(self, order: Order) -> Iterator[Shot]:
        """Shots in the order of their numbers, fewer than asked when the budget is used up or after MOST_STOPS
        stops. Raises CrewError when a process cannot be started."""
        number, stops, spent_s = 0, 0, 0.0
        while stops < MOST_STOPS and (count := _next_piece(number, spent_s, order)):
            if not self._members:
                self._start()  # which is on nobody's budget
            began_s = time.monotonic()
            for shot in self._piece(order, number, count):
                yield shot
                number += 1
                if _stopped(shot):
                    self.end()
                    stops += 1
            spent_s += time.monotonic() - began_s

    def end(self) -> None:
        for member in self._members:
            member.end()
        self._members.clear()
        self._set_up = None
        if self._meeting_place is not None:
            self._meeting_place.cleanup()
            self._meeting_place = None

    def _piece(self, order: Order, first: int, count: int) -> Iterator[Shot]:
        told = {
            "program": order.program,
            "space": order.space,
            "stress": order.stress.to_json(),
            "first": first,
            "count": count,
        }
        for member in self._members:
            member.tell(told)
        wanted = (order.program, order.space, order.stress)
        setup_s = 0.0 if wanted == self._set_up else self._start_s
        self._set_up = wanted
        for number in range(first, first + count):
            shot = self._one(number, setup_s)
            setup_s = 0.0
            yield shot
            if _stopped(shot):
                return

    def _one(self, number: int, setup_s: float) -> Shot:
        """The worst of what the members say of one shot."""
        until_s = time.monotonic() + self._request.deadline_s + _GRACE_S + setup_s
        shots = [self._answer(member, number, until_s) for member in self._members]
        return max(shots, key=lambda shot: _BADNESS.get(shot.outcome, 0 if shot.outcome == "ordered" else 1))

    @staticmethod
    def _answer(member: _Member, number: int, until_s: float) -> Shot:
        try:
            answer = member.answer(until_s)
        except EOFError:
            return Shot(number, DIED, f"the process {member.how_it_ended()}: {member.last_words()}")
        if answer is None:
            return Shot(number, STALLED, "no answer at the deadline")
        return Shot(number, str(answer["outcome"]), str(answer.get("why", "")))

    def _start(self) -> None:
        until_s = time.monotonic() + self._start_s
        # Kept until the end: a process group may look into its store as long as it lives.
        self._meeting_place = tempfile.TemporaryDirectory(prefix="hangrig-litmus-")
        rendezvous = str(Path(self._meeting_place.name) / "rendezvous")
        request = replace(self._request, parent=os.getpid(), rendezvous=rendezvous)
        for rank in range(request.ranks):
            log = self._logs / f"rank{rank}.log"
            self._members.append(_Member(self._command, replace(request, rank=rank), log))
        for member in tuple(self._members):
            self._await_ready(member, until_s)

    def _await_ready(self, member: _Member, until_s: float) -> None:
        try:
            answer = member.answer(until_s)
            problem = f"was not ready after {self._start_s:g} s" if answer is None else answer.get("failed")
        except EOFError:
            answer, problem = None, f"{member.how_it_ended()}: {member.last_words()}"
        if answer is None or problem:
            self.end()
            raise CrewError(f"the process that runs the programs {problem or 'failed'}")
        self.facts = self.facts or answer["ready"]


def _next_piece(done: int, spent_s: float, order: Order) -> int:
    """How many shots to order: what fits into the rest of the budget at the pace so far, at most _PIECE."""
    left_s = order.budget_s - spent_s
    if left_s <= 0.0 or done == order.shots:
        return 0
    fitting = _FIRST_PIECE if done == 0 else int(left_s / spent_s * done)
    return max(1, min(fitting, _PIECE, order.shots - done))


_BADNESS = {ERROR: 3, **dict.fromkeys(ALWAYS_BAD, 4)}


def _stopped(shot: Shot) -> bool:
    return shot.outcome in (STALLED, DIED, ERROR)
