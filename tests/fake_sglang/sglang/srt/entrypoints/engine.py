"""The server's side: starts the other processes."""

from __future__ import annotations

import multiprocessing
from typing import Any

from sglang.srt.managers import detokenizer_manager  # noqa: F401
from sglang.srt.managers.data_parallel_controller import run_data_parallel_controller_process


def launch(messages: list[Any]) -> int | None:
    process = multiprocessing.get_context("spawn").Process(
        target=run_data_parallel_controller_process, args=(messages,)
    )
    process.start()
    process.join(60)
    return process.exitcode
