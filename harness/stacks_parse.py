"""Reads what stack dumpers print: py-spy's JSON and text, and Python's faulthandler up to 3.14.

Pure. Lenient: a line or a field that is not understood is left out, because the dump of a sick process is
worth having in part; only a text without a single thread is an error.
"""

from __future__ import annotations

import json
import re

from harness.seats import Seat
from harness.stacks import Frame, ProcessStacks, ThreadStack, host_first, read_thread

_TEXT_PROCESS = re.compile(r"^Process (\d+):(?: (.*))?$")
_TEXT_THREAD = re.compile(r'^Thread (0x[0-9a-fA-F]+|\d+)(?: \(([^)]*)\))?(?:: "(.*)")?\s*$')
_TEXT_FRAME = re.compile(r"^\s+(.+) \((.*)\)\s*$")
_TEXT_LOCAL = re.compile(r"^\s{8,}\w+: ")
"""``py-spy dump --locals``: a variable below its frame."""
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackParseError(ValueError):
    """The text holds no stack. The message says whose format was expected and how the text begins."""


def parse_pyspy_json(text: str, *, pid: int, rank: Seat | None, native: bool) -> ProcessStacks:
    """``py-spy dump --json``. Raises StackParseError when it is no list of threads."""
    try:
        threads = json.loads(text)
    except ValueError as error:
        raise _nothing("py-spy --json", text) from error
    rows = [thread for thread in threads if isinstance(thread, dict)] if isinstance(threads, list) else []
    if not rows:
        raise _nothing("py-spy --json", text)
    return ProcessStacks(pid, rank, "py-spy", native, host_first(read_thread(row) for row in rows))


def parse_pyspy_text(
    text: str, *, pid: int = 0, rank: Seat | None = None, native: bool = False
) -> ProcessStacks:
    """``py-spy dump`` for people. The text's own pid counts where it names one."""
    builder = _Threads()
    for line in text.splitlines():
        if match := _TEXT_PROCESS.match(line):
            pid = int(match[1])
        elif match := _TEXT_THREAD.match(line):
            status = match[2] or ""
            builder.thread(int(match[1], 0), match[3], active="active" in status, owns_gil="gil" in status)
        elif _TEXT_LOCAL.match(line):
            continue
        elif match := _TEXT_FRAME.match(line):
            file, colon, number = match[2].rpartition(":")
            known = bool(colon) and number.isdecimal()
            builder.frame(match[1], file if known else match[2], int(number) if known else 0)
    return builder.process("py-spy", "py-spy dump", text, pid=pid, rank=rank, native=native)


def split_pyspy_text(text: str) -> tuple[tuple[str, str], ...]:
    """The processes of one or more ``py-spy dump`` after one another: what each was called, and its part of the
    text. A text without the line that names the process is one part."""
    parts: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if match := _TEXT_PROCESS.match(line):
            parts.append(((match[2] or "").strip(), [line]))
        elif parts:
            parts[-1][1].append(line)
        elif _TEXT_THREAD.match(line):
            parts.append(("", [line]))
    return tuple((title, "\n".join(lines)) for title, lines in parts)


def parse_faulthandler(text: str, *, pid: int, rank: Seat | None) -> ProcessStacks:
    """``faulthandler`` of Python 3.11 to 3.14. Only the newest name threads; ``<module>`` shows the main one.

    Of several dumps in one text the last counts: a file that every signal appends to.
    """
    builder = _Threads()
    for line in text.splitlines():
        if match := _FAULT_THREAD.match(line):
            if builder.knows(int(match[1], 16)):
                builder = _Threads()
            builder.thread(int(match[1], 16), match[2], active=False, owns_gil=False)
        elif match := _FAULT_FRAME.match(line):
            builder.frame(match[3], match[1], int(match[2]) if match[2].isdecimal() else 0)
        elif line and not line[0].isspace():
            builder.interrupt()
    builder.name_main()
    return builder.process("faulthandler", "faulthandler", text, pid=pid, rank=rank, native=False)


class _Threads:
    """Threads as their lines come by."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str | None, bool, bool, list[Frame]]] = []
        self._open = False

    def knows(self, thread_id: int) -> bool:
        return any(row[0] == thread_id for row in self._rows)

    def thread(self, thread_id: int, name: str | None, *, active: bool, owns_gil: bool) -> None:
        self._rows.append((thread_id, name or None, active, owns_gil, []))
        self._open = True

    def frame(self, name: str, filename: str, line: int) -> None:
        if self._open:
            self._rows[-1][4].append(Frame(name, filename, line))

    def interrupt(self) -> None:
        """Something that is no stack of a thread begins; its lines belong to nobody."""
        self._open = False

    def name_main(self) -> None:
        """A thread that ``threading`` did not start begins in a module: it is the main one.

        Python 3.14 prints the kernel's name, which for the main thread is the program's.
        """
        for index, (thread_id, name, active, owns_gil, frames) in enumerate(self._rows):
            ours = name is not None and name.startswith("hangrig-")
            if frames and frames[-1].name == "<module>" and not ours:
                self._rows[index] = (thread_id, "MainThread", active, owns_gil, frames)

    def process(
        self, source: str, expected: str, text: str, *, pid: int, rank: Seat | None, native: bool
    ) -> ProcessStacks:
        if not self._rows:
            raise _nothing(expected, text)
        threads = (
            ThreadStack(thread_id, name or f"thread {thread_id:#x}", active, owns_gil, tuple(frames))
            for thread_id, name, active, owns_gil, frames in self._rows
        )
        return ProcessStacks(pid, rank, source, native, host_first(threads))


def _nothing(expected: str, text: str) -> StackParseError:
    return StackParseError(f"expected the output of {expected}, found no thread in {text[:80]!r}")
