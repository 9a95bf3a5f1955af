"""A rank's library for tests: a process that makes a pipe and dumps when it is asked, as torch's monitor does.

    python device_rig.py PIPE DUMP CONTENT MODE

``MODE`` is ``answer``, or ``deaf``: it has the pipe open and never reads from it. It prints ``up`` and ends with
its standard input.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 30.0
END_S = 10.0


@contextmanager
def library(pipe: Path, dump: Path, content: Path, mode: str = "answer") -> Iterator[int]:
    """The process's pid, once its pipe is open."""
    command = [sys.executable, __file__, str(pipe), str(dump), str(content), mode]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        assert readable and process.stdout.readline() == b"up\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate(timeout=END_S)


def main(arguments: Sequence[str]) -> None:
    pipe, dump, content, mode = arguments
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    print("up", flush=True)
    watched = [0] if mode == "deaf" else [0, descriptor]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready:
            return
        if os.read(descriptor, 128):
            Path(dump).write_bytes(Path(content).read_bytes())
        else:  # nobody has it open any more; torch polls, and so sees the same
            os.close(descriptor)
            descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            watched = [0, descriptor]


if __name__ == "__main__":
    main(sys.argv[1:])
