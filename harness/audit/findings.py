"""What a rule says of a place, and what a reader needs to know of a rule. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PAGE = "docs/audit.md"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the audit. ``id`` is what suppressions, baselines and ``--select`` name."""

    id: str
    name: str
    summary: str
    why: str
    """What happens on a platform where it matters; the same for every finding."""
    mend: str

    @property
    def anchor(self) -> str:
        """Where its page is, below the project's root."""
        return f"{PAGE}#{self.id.lower()}"


@dataclass(frozen=True, slots=True)
class Finding:
    """``line`` from 1; ``first`` and ``last`` are the lines in which a suppression may stand."""

    rule: str
    path: str
    line: int
    message: str
    text: str
    """The source line, for people and for the fingerprint."""
    first: int
    last: int
    suppressed: Literal["", "inline", "baseline"] = ""
    reason: str = ""
    """Of a suppression."""

    @property
    def normal_text(self) -> str:
        """The line without its own spacing and trailing comment: what survives a reformatting."""
        return re.sub(r"\s+", " ", re.sub(r"\s#\s.*$", "", self.text)).strip()

    @property
    def order(self) -> tuple[str, int, str, str]:
        return self.path, self.line, self.rule, self.message
