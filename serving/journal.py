"""The tokens of one rank as they come, step by step, in a file that outlives the rank.

A hung rank brings no result home; its journal still says which tokens it had made and in which step, so that a
wrong one before the stall can be seen. One JSON object a line: ``{"step": 12, "tokens": {"r0003": 417}}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from harness import faults


class Journal:
    """Appends; each line is one write, so a reader sees whole lines. Losses are counted, not raised: a full
    disk must not stop the engine."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
        self.lost = 0

    def append(self, step: int, tokens: Mapping[str, int]) -> None:
        """``tokens``: the token that each request got in ``step``."""
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("rank.log", step=step, descriptor=self._file)
        line = json.dumps({"step": step, "tokens": tokens}, separators=(",", ":")).encode() + b"\n"
        try:
            self.lost += os.write(self._file, line) != len(line)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        os.close(self._file)
