"""Findings as SARIF 2.1.0, as code scanning takes it: rules with help, relative URIs, partial fingerprints. Pure.

Suppressed findings are in it with their reason; code hosts then show them as dismissed. ``helpUri`` is left out
unless somebody says where the pages of the rules are served: a made-up address helps nobody.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from harness.audit.baseline import fingerprints
from harness.audit.command import AuditResult
from harness.audit.findings import Finding, Rule
from harness.audit.rules import RULES, UNREADABLE

SCHEMA_URI = "https://json.schemastore.org/sarif-2.1.0.json"
_KINDS = {"inline": "inSource", "baseline": "external"}


def sarif(result: AuditResult, version: str, docs_url: str | None = None) -> dict[str, Any]:
    """One SARIF log with one run. ``docs_url``: where docs/audit.md is served."""
    order = {name: index for index, name in enumerate(RULES)}
    prints = fingerprints(result.findings)
    return {
        "$schema": SCHEMA_URI,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "hangrig audit",
                        "version": version,
                        "rules": [_rule(rule, docs_url) for rule in RULES.values()],
                    }
                },
                "columnKind": "utf16CodeUnits",
                "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "Where hangrig was run."}}},
                "results": [
                    _result(finding, order[finding.rule], one)
                    for finding, one in zip(result.findings, prints, strict=True)
                ],
            }
        ],
    }


def _rule(rule: Rule, docs_url: str | None) -> dict[str, Any]:
    where = f"{docs_url}#{rule.id.lower()}" if docs_url else None
    text = f"{_sentence(rule.why)} {_sentence(rule.mend)}"
    markdown = f"**{_sentence(rule.summary)}**\n\n{_sentence(rule.why)}\n\n{_sentence(rule.mend)}"
    page = f"[{rule.id}]({where})" if where else f"`{rule.anchor}`"
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": _sentence(rule.summary)},
        "fullDescription": {"text": _sentence(rule.why)},
        "help": {"text": f"{text} See {where or rule.anchor}.", "markdown": f"{markdown}\n\nSee {page}."},
        **({"helpUri": where} if where else {}),
        "defaultConfiguration": {"level": "note" if rule is UNREADABLE else "warning"},
        "properties": {"tags": ["reliability"]},
    }


def _result(finding: Finding, index: int, fingerprint: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": "note" if finding.rule == UNREADABLE.id else "warning",
        "message": {"text": finding.message},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(finding.path), "uriBaseId": "%SRCROOT%"},
                    "region": {"startLine": finding.line},
                }
            }
        ],
        "partialFingerprints": {"primaryLocationLineHash": fingerprint, "hangrigAudit/v1": fingerprint},
    }
    if finding.suppressed:
        found["suppressions"] = [{"kind": _KINDS[finding.suppressed], "justification": finding.reason}]
    return found


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
