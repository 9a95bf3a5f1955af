"""A detokenizer that takes one message after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import VERSION


def sock_recv(socket: Iterator[str]) -> str:
    return next(socket)


class DetokenizerManager:
    def __init__(self, messages: list[str]) -> None:
        self.socket = iter(messages)

    def event_loop(self) -> None:
        while True:
            sock_recv(self.socket)


def _run(messages: list[str]) -> None:
    with contextlib.suppress(StopIteration):
        DetokenizerManager(messages).event_loop()


if VERSION == "0.5.20":

    def run_detokenizer_process(messages: list[str]) -> None:
        _run(messages)

else:

    def run_detokenizer_process(messages: list[str]) -> None:
        load_plugins()
        _run(messages)
