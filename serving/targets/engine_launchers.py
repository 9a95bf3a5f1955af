"""The launchers of one server as the driver talks to them: questions to all, answers in time or when they come.

A launcher may be hung or dead, or its node gone: nothing here waits without a deadline, and a launcher that is lost
says so once and is not asked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from harness.target import RankPool, RankProcess, TargetError

_POLL_S = 0.02


class Launchers:
    """One question is out at a time; a new one makes the answer to an older one worthless."""

    def __init__(self, pool: RankPool, processes: Sequence[RankProcess]) -> None:
        self.processes = tuple(processes)
        self._pool = pool
        self.asked = ""
        """The question that is out; empty when it was answered."""
        self.asked_s = 0.0
        """When it was put, or the last one was; monotonic seconds."""

    def ask(self, method: str, arguments: Sequence[Any], deadline_s: float) -> list[Any]:
        """The answers of all, in order, to the same question. Raises TargetError when one fails, dies, or does not
        answer in time."""
        return self.ask_each(method, [arguments] * len(self.processes), deadline_s)

    def ask_each(self, method: str, arguments: Sequence[Sequence[Any]], deadline_s: float) -> list[Any]:
        """As ``ask``, each with its own arguments."""
        self._put(method, arguments)
        deadline = time.monotonic() + deadline_s
        while (answers := self.answers()) is None:
            if time.monotonic() > deadline:
                done, _, _ = self._pool.poll()
                silent = [process.node for node, process in enumerate(self.processes) if node not in done]
                raise TargetError(
                    f"the launcher on {', '.join(silent)} did not answer {method} within {deadline_s:g} s"
                )
            time.sleep(_POLL_S)  # the pool can only be looked at
        return answers

    def question(self, method: str, arguments: Sequence[Any]) -> None:
        """Asks all and returns; ``answers`` has them when they have come."""
        self._put(method, [arguments] * len(self.processes))

    def answers(self) -> list[Any] | None:
        """All answers to the question that is out, None while one is missing. Raises TargetError for a launcher
        that failed or is gone."""
        done, failed, died = self._pool.poll()
        if failed or died:
            gone = {node: f"its process {self.processes[node].pid} is gone" for node in died}
            lost = {**failed, **gone}
            words = [f"the launcher on {self.processes[node].node}: {lost[node]}" for node in sorted(lost)]
            raise TargetError("; ".join(words))
        if len(done) < len(self.processes):
            return None
        self.asked = ""
        return [done[node] for node in range(len(self.processes))]

    def on_nodes(self, texts: Iterable[object]) -> list[str]:
        """Those that are not empty, each with its node where there are several."""
        several = len(self.processes) > 1
        return [
            f"{process.node}: {text}" if several else str(text)
            for process, text in zip(self.processes, texts, strict=True)
            if text
        ]

    def _put(self, method: str, arguments: Sequence[Sequence[Any]]) -> None:
        self.asked, self.asked_s = method, time.monotonic()
        self._pool.call(method, arguments)
