"""Stacks of several processes of this machine at once: py-spy, and the process itself where py-spy is refused.

Every process is left as it was found: running if it ran, stopped if it was stopped. Whatever cannot be had is
said with the reason. One deadline for all; plain stacks come first and take 33 ms a process when all is well,
what a hung dumper may burn leaves time for a second try and for faulthandler, and native stacks (0.7 s) get the
rest. Files are the caller's business.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.faultdump import THREADS_SHOWN, DumpRequest, ask_for_dumps
from harness.process_control import ProcessId, read_stat
from harness.processes import ProcessEntry, read_process, send_signal, stop_is_pending
from harness.seats import Seat
from harness.stacks import ProcessStacks
from harness.stacks_parse import StackParseError, parse_pyspy_json
from harness.tools import ToolResult, run_tools

# Shares of the deadline.
_PLAIN_SHARE = 0.4
_AGAIN_SHARE = 0.55
_FALLBACK_SHARE = 0.75
_NATIVE_NEEDS_S = 0.5
"""Native stacks are not begun with less left: a py-spy that is killed at work costs its target a stop."""
# After its tracer died, a target stops when it is next scheduled; so long is waited for that.
_SETTLE_S = 0.3
_SETTLE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class DumpTarget:
    """``name`` for people, ``seat`` as the stacks bear it. ``fault_file``: where it dumps its stacks when asked."""

    name: str
    seat: Seat
    process: ProcessId
    fault_file: Path | None


class Lack(Protocol):
    """Takes note of a piece that could not be had. ``impossible``: by nothing, for its process was gone, or
    stopped, which native stacks cannot be taken of."""

    def __call__(self, what: str, why: str, impossible: bool = False, /) -> None: ...


@dataclass(slots=True)
class StackDumps:
    """``lack`` is told of every piece that could not be had."""

    targets: tuple[DumpTarget, ...]
    py_spy: Path | None
    deadline_s: float
    lack: Lack
    started_s: float = field(default_factory=time.monotonic)
    stacks: dict[DumpTarget, ProcessStacks] = field(default_factory=dict)
    native: dict[DumpTarget, ProcessStacks] = field(default_factory=dict)
    _found: dict[DumpTarget, ProcessEntry] = field(default_factory=dict)

    def take(self, *, native: bool) -> None:
        """Plain stacks of all living targets, and native ones where that was asked and time is left."""
        self._found = {target: _look(target) for target in self.targets}
        failed = self._plain()
        self._fallback(failed)
        if native:
            self._native()

    def _share_s(self, share: float) -> float:
        return self.started_s + share * self.deadline_s

    def _plain(self) -> dict[DumpTarget, str]:
        """Plain dumps of all living targets at once. Returns why it failed."""
        living = []
        for target, entry in self._found.items():
            if entry.alive:
                living.append(target)
            else:
                self.lack(f"stacks of {target.name}", _gone(entry), True)
        if self.py_spy is None:
            return dict.fromkeys(living, "py-spy is not installed here; install it with: pip install py-spy")
        failed: dict[DumpTarget, str] = {}
        self._spy(living, failed, self._share_s(_PLAIN_SHARE))
        # A blocking dump also fails, or hangs, when the process was stopped since it was looked at.
        stopped = [target for target in failed if self._cannot_be_suspended(target)]
        self._spy(stopped, failed, self._share_s(_AGAIN_SHARE))
        return failed

    def _spy(self, targets: Iterable[DumpTarget], failed: dict[DumpTarget, str], deadline_s: float) -> None:
        commands: dict[DumpTarget, list[str]] = {}
        for target in targets:
            commands[target] = self._command(target)
            if self._cannot_be_suspended(target):
                commands[target].append("--nonblocking")
        for target, result in self._run(commands, deadline_s).items():
            problem = self._parse(target, result, native=False)
            if problem is None:
                failed.pop(target, None)
            else:
                failed[target] = f"py-spy: {problem}"

    def _command(self, target: DumpTarget) -> list[str]:
        return [str(self.py_spy), "dump", "--pid", str(target.process.pid), "--json"]

    def _cannot_be_suspended(self, target: DumpTarget) -> bool:
        """Stopped, or in an uninterruptible wait of some length: a blocking dump fails or hangs."""
        now = _look(target).state
        return now == "T" or (now == "D" and self._found[target].state == "D")

    def _native(self) -> None:
        commands: dict[DumpTarget, list[str]] = {}
        left_s = self._share_s(1.0) - time.monotonic()
        for target, entry in self._found.items():
            what = f"native stacks of {target.name}"
            plain = self.stacks.get(target)
            now = _look(target)
            if not entry.alive or not now.alive:
                self.lack(what, _gone(now), True)
            elif self._cannot_be_suspended(target):
                pid = target.process.pid
                why = f"process {pid} is in state {now.state}; py-spy would have to suspend it"
                self.lack(what, why, True)
            elif self.py_spy is None or plain is None or plain.source != "py-spy":
                self.lack(what, "py-spy could not dump this process at all")
            elif left_s < _NATIVE_NEEDS_S:
                self.lack(what, f"only {max(0.0, left_s):.1f} s were left for them")
            else:
                commands[target] = [*self._command(target), "--native"]
        for target, result in self._run(commands, self._share_s(1.0)).items():
            problem = self._parse(target, result, native=True)
            if problem is not None:
                self.lack(f"native stacks of {target.name}", f"py-spy: {problem}", not _look(target).alive)

    # --- leaving nobody stopped

    def _run(
        self, commands: Mapping[DumpTarget, list[str]], deadline_s: float
    ) -> dict[DumpTarget, ToolResult]:
        """Runs py-spy on several targets; continues those that a killed py-spy left stopped."""
        before = {target: _look(target) for target in commands}
        results = run_tools(commands, deadline_s=deadline_s)
        ended_badly = [
            target
            for target, result in results.items()
            if result.killed or (result.returncode is not None and result.returncode < 0)
        ]
        self._continue(target for target in ended_badly if before[target].state != "T")
        return results

    def _continue(self, targets: Iterable[DumpTarget]) -> None:
        """Continues targets of which each ran before its tracer was killed, as soon as they stop.

        A stop that is on its way counts too: a target in an uninterruptible wait takes it after that.
        """
        waiting = list(targets)
        settled_s = time.monotonic() + _SETTLE_S
        while waiting:
            for target in tuple(waiting):
                entry = _look(target)
                if entry.state == "T" or stop_is_pending(target.process):
                    waiting.remove(target)
                    process = target.process
                    problem = send_signal(process.pid, process.start_time_ticks, signal.SIGCONT)
                    done = problem or "it stood stopped, and was continued"
                    self.lack(f"{target.name} undisturbed, after a py-spy that was killed at work", done)
                elif not entry.alive:
                    waiting.remove(target)
            if time.monotonic() >= settled_s:
                return
            time.sleep(_SETTLE_POLL_S)

    # --- what the tools said

    def _parse(self, target: DumpTarget, result: ToolResult, *, native: bool) -> str | None:
        """Keeps the stacks of a dump, or says why there are none."""
        if result.problem is not None:
            return result.problem
        pid = target.process.pid
        stat = read_stat(pid)
        if stat is not None and stat.start_time_ticks != target.process.start_time_ticks:
            return f"process {pid} ended and its number was given to another one meanwhile"
        text = result.stdout.decode("utf-8", "replace")
        try:
            stacks = parse_pyspy_json(text, pid=pid, rank=target.seat, native=native)
        except StackParseError as error:
            return str(error)
        (self.native if native else self.stacks)[target] = stacks
        return None

    def _fallback(self, failed: Mapping[DumpTarget, str]) -> None:
        """Asks the processes themselves where py-spy could not say; ``failed`` says why it could not.

        A forked child writes into its rank's file, so no file is asked for twice at a time.
        """
        for target, why in failed.items():
            self.lack(f"py-spy stacks of {target.name}", why, not _look(target).alive)
        waiting = list(failed)
        while waiting:
            asked: dict[Path | None, DumpTarget] = {}
            for target in waiting:
                asked.setdefault(target.fault_file, target)
            now = [t for t in waiting if t.fault_file is None or asked[t.fault_file] is t]
            waiting = [target for target in waiting if target not in now]
            requests = {target: DumpRequest(target.seat, target.process, target.fault_file) for target in now}
            answers = ask_for_dumps(requests, deadline_s=self._share_s(_FALLBACK_SHARE))
            for target, answer in answers.items():
                if isinstance(answer, str):
                    gone = not _look(target).alive
                    self.lack(f"stacks of {target.name}", f"faulthandler: {answer}", gone)
                else:
                    self.stacks[target] = answer
                    if len(answer.threads) >= THREADS_SHOWN:
                        shown = f"faulthandler shows the newest {THREADS_SHOWN} threads only"
                        self.lack(f"the oldest threads of {target.name}", shown)


def _look(target: DumpTarget) -> ProcessEntry:
    return read_process(target.process.pid, target.process.start_time_ticks, target.seat)


def _gone(entry: ProcessEntry) -> str:
    if entry.state == "Z":
        return f"process {entry.pid} has ended ({entry.exit or 'exit unknown'}) and nobody has collected it"
    if entry.state == "missing":
        return "no process is known for this rank"
    return f"process {entry.pid} is gone"
