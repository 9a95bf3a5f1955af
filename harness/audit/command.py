"""`hangrig audit`: a request in, a result out, and the result as text and as JSON.

Not here: options and exit statuses (`harness.cli`), SARIF (`sarif`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.audit import baseline
from harness.audit.findings import PAGE, Finding
from harness.audit.rules import RULES
from harness.audit.scan import scan, selected
from harness.audit.source import AuditError, locate


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What to audit and how. ``references``: paths or packages that are read for base classes only."""

    what: str
    select: Collection[str] = ()
    ignore: Collection[str] = ()
    references: Sequence[str] = ()
    tests: bool = False
    baseline: Path | None = None
    write_baseline: Path | None = None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """``files``: audited. ``stale``: entries of the baseline that match nothing any more. ``written``: entries."""

    findings: tuple[Finding, ...]
    files: int
    duration_s: float
    stale: int = 0
    written: int | None = None

    @property
    def open(self) -> tuple[Finding, ...]:
        """Those that nobody has allowed."""
        return tuple(finding for finding in self.findings if not finding.suppressed)

    @property
    def exit(self) -> int:
        """0 no finding, 1 findings; 0 when a baseline was written, which takes them all in."""
        return 1 if self.open and self.written is None else 0

    def to_json(self) -> dict[str, Any]:
        """As CONTRACTS.md says, and more fields; ``schema`` is added by whoever prints it."""
        return {
            "findings": [
                {
                    "rule": finding.rule,
                    "path": finding.path,
                    "line": finding.line,
                    "message": finding.message,
                    "why": RULES[finding.rule].why,
                    "suppressed": bool(finding.suppressed),
                    "suppressed_by": finding.suppressed or None,
                    "reason": finding.reason or None,
                    "mend": RULES[finding.rule].mend,
                    "docs": RULES[finding.rule].anchor,
                    "fingerprint": one,
                }
                for finding, one in zip(self.findings, baseline.fingerprints(self.findings), strict=True)
            ],
            "files": self.files,
            "duration_s": round(self.duration_s, 3),
            "baseline": {"stale": self.stale, "written": self.written},
        }

    def text(self) -> str:
        """A line a finding, why for each rule once, and the counts."""
        lines = [f"{one.path}:{one.line}: {one.rule} {one.message}" for one in self.open]
        counts = Counter(finding.rule for finding in self.open)
        for rule in (RULES[name] for name in sorted(counts)):
            lines += ["", f"{rule.id} {rule.name} ({counts[rule.id]}): {rule.why}.", f"  → {rule.mend}"]
        allowed = Counter(finding.suppressed for finding in self.findings if finding.suppressed)
        counted = [f"{len(self.open)} findings in {self.files} files, {self.duration_s:.1f} s"]
        counted += [f"{allowed['inline']} allowed in the source"] * bool(allowed["inline"])
        counted += [f"{allowed['baseline']} in the baseline"] * bool(allowed["baseline"])
        counted += [f"{self.stale} entries of the baseline match nothing any more: write it anew"] * bool(
            self.stale
        )
        counted += [f"baseline written, {self.written} entries"] * (self.written is not None)
        return "\n".join([*lines, *([""] if lines else []), "; ".join(counted)])


def run_audit(request: AuditRequest) -> AuditResult:
    """Raises AuditError for a wish that cannot be met."""
    started = time.monotonic()
    for option, names in (("--select", request.select), ("--ignore", request.ignore)):
        if unknown := sorted(set(names) - set(RULES)):
            raise AuditError(
                f"{option} {','.join(unknown)}: no such rule; there are {', '.join(RULES)} ({PAGE})"
            )
    rules = selected(request.select, request.ignore, RULES)
    known = Counter[str]() if request.baseline is None else baseline.read(request.baseline, rules)
    tree = locate(request.what, tests=request.tests)
    references = [locate(one) for one in request.references]
    findings = scan(tree, rules, references)
    marked, stale = baseline.apply(findings, known)
    written = None
    if request.write_baseline is not None:
        written = baseline.write(request.write_baseline, marked)
    return AuditResult(tuple(marked), len(tree.files), time.monotonic() - started, stale, written)
