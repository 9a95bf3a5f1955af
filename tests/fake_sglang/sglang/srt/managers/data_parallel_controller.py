"""A controller that polls for messages."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import VERSION


class Again(Exception):
    """No message yet."""


def sock_recv(socket: Iterator[str | None]) -> str:
    message = next(socket)
    if message is None:
        raise Again
    return message


class DataParallelController:
    def __init__(self, messages: list[str | None]) -> None:
        self.socket = iter(messages)
        self.handled: list[str] = []

    def event_loop(self) -> None:
        while True:
            while True:
                try:
                    message = sock_recv(self.socket)
                except Again:
                    break
                if message == "broken":
                    raise RuntimeError("cannot dispatch")
                self.handled.append(message)


def _run(messages: list[str | None]) -> None:
    controller = DataParallelController(messages)
    try:
        controller.event_loop()
    except (StopIteration, RuntimeError):
        print("handled", *controller.handled)


if VERSION == "0.5.20":

    def run_data_parallel_controller_process(messages: list[str | None]) -> None:
        _run(messages)

else:

    def run_data_parallel_controller_process(messages: list[str | None]) -> None:
        load_plugins()
        _run(messages)
