"""Tests of real devices run when ``-m`` names their marker, whatever else it says, and never otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MARKERS = {"cuda", "npu"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = MARKERS & set(re.findall(r"\w+", config.option.markexpr))
    left_out = [
        item
        for item in items
        if HERE in item.path.parents and not asked & {mark.name for mark in item.iter_markers()}
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
