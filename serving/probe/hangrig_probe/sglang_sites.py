"""Where the installed SGLang pins memory, or copies without waiting, without asking whether it may pin.

The engine has one gate, ``is_pin_memory_available``; overriding it changes what asks. What does not ask keeps its
own way, so a comparison of pinned against pageable has to name it. This reads source text and judges by the
function around a place: one that names the gate asks. A decision passed on (``pin_memory=pin_memory``) is judged
where it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

GATES = ("is_pin_memory_available", "async_h2d", "async_d2h")
_PLACE = re.compile(
    r"pin_memory\s*=\s*(?P<value>not\b|[^\s,)=]+)|(?P<pins>\.pin_memory\()|(?P<copies>non_blocking\s*=\s*True\b)"
)
_PASSED_ON = re.compile(r"(?!not$|True$)[A-Za-z_][\w.]*$")
_DEFINITION = re.compile(r"(\s*)(?:async\s+)?def\s")


def ungated(package: Path) -> list[str]:
    """``file:line`` of each such place under ``package``, a package inside another one, from whose name the file is
    told (``sglang/srt/lora/layers.py:145``). Unreadable files are passed over."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if "pin_memory" in text or "non_blocking" in text:
            name = path.relative_to(package.parent.parent).as_posix()
            found.extend(f"{name}:{line}" for line in _places(text.splitlines()))
    return found


def _places(lines: list[str]) -> Iterator[int]:
    for index, line in enumerate(lines):
        code = line.split("#", 1)[0]
        place = _PLACE.search(code)
        if place is None or _DEFINITION.match(code):
            continue
        value = place["value"]
        if value is not None and _PASSED_ON.match(value):
            continue
        if not any(gate in inner for inner in _function(lines, index) for gate in GATES):
            yield index + 1


def _function(lines: list[str], index: int) -> list[str]:
    """The lines of the innermost function around ``index``; without one, the line itself."""
    limit = _indent(lines[index])
    for start in range(index - 1, -1, -1):
        if not lines[start].strip() or lines[start].lstrip()[0] in ")]}#":
            continue
        definition = _DEFINITION.match(lines[start])
        depth = _indent(lines[start])
        if definition and depth < limit:
            end = start + 1
            while end < len(lines) and (
                not lines[end].strip() or _indent(lines[end]) > depth or end <= index
            ):
                end += 1
            return lines[start:end]
        limit = min(limit, depth)
        if limit == 0:
            break
    return [lines[index]]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
