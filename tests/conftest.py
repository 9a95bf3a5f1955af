"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from local_ranks import LocalRanks

    from harness.pytest_plugin import HangOutcome


# Before anything imports torch, and for what tests start. The models here are tiny: a second thread only makes the
# first one wait at a barrier, and where others want the processor too it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run: what fails here fails again. More are tried by raising a test's max_examples.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def ranks() -> Iterator[LocalRanks]:
    """Warm rank processes; torch is imported only where they are used."""
    from local_ranks import LocalRanks

    local = LocalRanks()
    try:
        yield local
    finally:
        local.close()


@pytest.fixture(scope="session")
def pinned_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HangOutcome:
    """Seed 1 of dp-pinned-hang, pageable and pinned, and of its healthy twin: one real run for several files."""
    from run_rig import run_pinned

    from harness.pytest_plugin import runner

    return run_pinned(runner(request.config, tmp_path_factory), tmp_path_factory.mktemp("scenarios"))
