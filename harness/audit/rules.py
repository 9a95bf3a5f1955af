"""The table of rules: what is checked, in which files, and what a reader can look up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from harness.audit import pinned, platform_answers, private_names, reused_source, stream_queries, teardown
from harness.audit.findings import Finding, Rule
from harness.audit.module import Module

UNREADABLE = Rule(
    "HG001",
    "not-read",
    "a file could not be read as Python",
    "nothing in this file was audited: what the other rules would say of it is unknown",
    "mend the file, leave it out of what is audited, or --ignore HG001 if it is a template or for another Python",
)
BAD_SUPPRESSION = Rule(
    "HG002",
    "suppression-without-reason",
    "a suppression suppresses nothing",
    "a finding that is allowed without a reason cannot be judged by whoever reads it next",
    "write it as `# hangrig: allow HG103 -- why this is right here`",
)


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A rule that a file alone decides. A file with none of ``words`` can have no finding and is not walked."""

    rule: Rule
    words: tuple[str, ...]
    check: Callable[[Module], Iterator[Finding]]


FILE_CHECKS: tuple[FileCheck, ...] = tuple(
    FileCheck(one.RULE, one.WORDS, one.check)
    for one in (private_names, pinned, reused_source, stream_queries, teardown)
)

RULES: Mapping[str, Rule] = {
    rule.id: rule
    for rule in sorted(
        (UNREADABLE, BAD_SUPPRESSION, platform_answers.RULE, *(check.rule for check in FILE_CHECKS)),
        key=lambda rule: rule.id,
    )
}
ABOUT_THE_AUDIT = frozenset({UNREADABLE.id, BAD_SUPPRESSION.id})
"""Told whatever is selected, for they say what the audit did not see; no comment can allow them."""
