"""`make lint` as part of the tests: style, format, types, and the arrows between the rooms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL_S = 240
TOOLS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "import-linter": ["lint-imports"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_is_content(tool: str) -> None:
    name, *arguments = TOOLS[tool]
    command = [str(Path(sys.executable).parent / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TOOL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
