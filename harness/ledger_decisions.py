"""Decisions as lines of JSON: for the ring, where they must fit, and for a file, where they are whole.

A first divergence between ranks may lie an hour back, long out of the ring: hence the file. It is opened
without blocking, so a full pipe loses lines instead of stopping the host; a regular file on a file system
that itself blocks still blocks. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from harness.ledger_layout import DECISION_BYTES, LedgerError

_encode = json.JSONEncoder(separators=(",", ":"), default=str, skipkeys=True).encode


class DecisionFile:
    """Appends lines to a file and counts those it could not take. Never raises after it was opened."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor: int | None = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644
            )
        except OSError as error:
            raise LedgerError(
                f"{path}: cannot append decisions ({error.strerror}); make its directory first, "
                "or give another decisions_path"
            ) from error
        self._lost = 0
        self._broken_line = False

    def append(self, line: bytes) -> int:
        """Returns how many lines were lost so far."""
        whole = (b"\n" if self._broken_line else b"") + line + b"\n"
        try:
            written = -1 if self._descriptor is None else os.write(self._descriptor, whole)
        except OSError:
            # Full disk, full pipe, lost mount: the host path must not stop for a log. The loss is counted.
            written = -1
        if written != len(whole):
            self._lost += 1
            self._broken_line = self._broken_line or written > 0
        else:
            self._broken_line = False
        return self._lost

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def compact(record: Mapping[str, object]) -> bytes:
    """One line of JSON without its end; what JSON does not know is written as text."""
    return _encode(dict(record)).encode()


def shortened(record: Mapping[str, object]) -> bytes:
    """The entries of ``record``, in their order, that fit into the ring, and ``"truncated": true``."""
    kept: dict[str, object] = {"truncated": True}
    for key, value in record.items():
        if len(compact({**kept, key: value})) <= DECISION_BYTES:
            kept[key] = value
    return compact(kept)
