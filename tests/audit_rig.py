"""Small source trees to be audited, and what the audit says of them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path

from harness.audit.findings import Finding
from harness.audit.rules import RULES
from harness.audit.scan import scan
from harness.audit.source import locate


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """``files``: source by path below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return root


def audit(
    root: Path, rules: Collection[str] = tuple(RULES), references: Sequence[Path] = (), *, tests: bool = False
) -> list[Finding]:
    return scan(locate(str(root), tests=tests), rules, [locate(str(one)) for one in references], workers=1)


def audit_source(tmp_path: Path, source: str, rule: str, name: str = "engine/code.py") -> list[int]:
    """Lines that ``rule`` objects to in one file of a tree."""
    found = audit(write_tree(tmp_path, {name: source}), [rule])
    assert all(finding.rule == rule and finding.path.endswith(name) for finding in found)
    return [finding.line for finding in found]
