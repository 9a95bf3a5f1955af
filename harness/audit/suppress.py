"""Findings that the source itself allows: ``# hangrig: allow HG103 -- reason``. Pure.

The comment stands on a line of the finding's statement, or alone right above it. Without a reason it suppresses
nothing and is itself told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.audit.findings import Finding
from harness.audit.module import Module
from harness.audit.rules import ABOUT_THE_AUDIT, BAD_SUPPRESSION, RULES

_ALLOW = re.compile(r"(?:^|#)\s*hangrig:\s*allow\b(?P<rules>[^#]*?)(?:--(?P<reason>.*))?$")


@dataclass(frozen=True, slots=True)
class _Allowance:
    rules: frozenset[str]
    reason: str


def suppress(module: Module, findings: Iterable[Finding]) -> list[Finding]:
    """The findings, those that are allowed marked so."""
    found = list(findings)
    if not found or "hangrig:" not in module.text:
        return found
    allowed = {line: one for line, one in _allowances(module).items() if not _problem(one)}
    return [_marked(module, finding, allowed) for finding in found]


def _marked(module: Module, finding: Finding, allowed: dict[int, _Allowance]) -> Finding:
    for line in [*range(finding.first, finding.last + 1), *module.comments_above(finding.first)]:
        one = allowed.get(line)
        if one is not None and finding.rule in one.rules:
            return replace(finding, suppressed="inline", reason=one.reason)
    return finding


def bad_suppressions(module: Module) -> list[Finding]:
    """A finding for each suppression that suppresses nothing."""
    if "hangrig:" not in module.text:
        return []
    found = []
    for line, one in _allowances(module).items():
        if problem := _problem(one):
            text = module.line(line).strip()
            found.append(Finding(BAD_SUPPRESSION.id, module.path, line, problem, text, line, line))
    return found


def _allowances(module: Module) -> dict[int, _Allowance]:
    found = {}
    for line, comment in module.comments.items():
        if said := _ALLOW.search(comment):
            rules = frozenset(word for word in re.split(r"[\s,]+", said["rules"]) if word)
            found[line] = _Allowance(rules, (said["reason"] or "").strip())
    return found


def _problem(one: _Allowance) -> str:
    if not one.rules:
        return "names no rule; write # hangrig: allow HG103 -- reason"
    if unknown := sorted(one.rules - set(RULES)):
        return f"{', '.join(unknown)}: no such rule"
    if never := sorted(one.rules & ABOUT_THE_AUDIT):
        return f"{', '.join(never)}: cannot be allowed in the source"
    return "" if one.reason else "has no reason, so it suppresses nothing; add: -- reason"
