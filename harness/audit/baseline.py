"""Findings that were there before: a file of fingerprints that survives shifted lines.

An entry is a rule, a path and the source line, its spacing folded; the same line twice in a file is two entries, so
one more of it is a new finding. Not here: suppression in the source (`suppress`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.audit.findings import Finding
from harness.audit.source import AuditError

SCHEMA = 1


def fingerprint(finding: Finding) -> str:
    """16 hexadecimal digits."""
    what = "\n".join([finding.rule, finding.path, finding.normal_text])
    return hashlib.sha256(what.encode(errors="surrogatepass")).hexdigest()[:16]


def fingerprints(findings: Iterable[Finding]) -> list[str]:
    """One for each finding, in their order; ``:2`` for the second of a kind, as code scanning wants it."""
    seen: Counter[str] = Counter()
    found = []
    for finding in findings:
        one = fingerprint(finding)
        seen[one] += 1
        found.append(f"{one}:{seen[one]}")
    return found


def read(path: Path, rules: Collection[str]) -> Counter[str]:
    """Fingerprints of ``rules`` and how often each. Raises AuditError with what to do."""
    how = "write it with --write-baseline"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AuditError(f"{path}: does not exist; {how}") from error
    except (OSError, ValueError) as error:
        raise AuditError(f"{path}: is no baseline that can be read ({error}); {how}") from error
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list) or document.get("schema") != SCHEMA:
        raise AuditError(f"{path}: is no baseline of schema {SCHEMA}; {how}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("fingerprint"), str):
            raise AuditError(f"{path}: entries[{number}].fingerprint is missing; {how}")
    return Counter(entry["fingerprint"] for entry in entries if entry.get("rule") in rules)


def write(path: Path, findings: Sequence[Finding]) -> int:
    """Writes all but what the source itself allows; the number of entries. Raises AuditError."""
    entries: list[dict[str, Any]] = [
        {
            "fingerprint": fingerprint(finding),
            "rule": finding.rule,
            "path": finding.path,
            "line": finding.line,
            "text": finding.text,
        }
        for finding in findings
        if finding.suppressed != "inline"
    ]
    try:
        path.write_text(json.dumps({"schema": SCHEMA, "entries": entries}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise AuditError(f"{path}: cannot be written: {error.strerror}") from error
    return len(entries)


def apply(findings: Iterable[Finding], known: Counter[str]) -> tuple[list[Finding], int]:
    """The findings, known ones marked so, and how many entries match nothing any more."""
    left = Counter(known)
    marked = []
    for finding in findings:
        one = fingerprint(finding)
        if not finding.suppressed and left[one] > 0:
            left[one] -= 1
            marked.append(replace(finding, suppressed="baseline", reason="in the baseline"))
        else:
            marked.append(finding)
    return marked, sum(left.values())
