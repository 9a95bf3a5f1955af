"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from local_ranks import LocalRanks


@pytest.fixture(scope="session")
def ranks() -> Iterator[LocalRanks]:
    """Warm rank processes; torch is imported only where they are used."""
    from local_ranks import LocalRanks

    local = LocalRanks()
    try:
        yield local
    finally:
        local.close()
