"""The collector of garbage, kept from walking through evidence while evidence is read and worked on. Pure.

The evidence of thousands of ranks is millions of objects, none of them garbage. Each time a part of them has been
made, the collector goes through all: of a diagnosis of 4,096 ranks it took three quarters of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Reference cycles are not looked for meanwhile; whatever has none goes as always. May be nested."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
