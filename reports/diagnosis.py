"""Reads diagnosis.json into the model, leniently. What the diagnosis claims is not judged here."""

from __future__ import annotations

from collections.abc import Mapping

from reports import fields
from reports.fields import Document
from reports.model import Collective, Culprit, Diagnosis, Fact, Missing, Operation


def read_diagnosis(document: Document) -> Diagnosis:
    return Diagnosis(
        kind=fields.text(document, "kind", "unknown"),
        mechanism=fields.text(document, "mechanism", "unknown"),
        culprits=tuple(_culprit(row) for row in fields.rows(document, "culprits")),
        stream=fields.optional_text(document, "stream"),
        operation=_operation(fields.table(document, "operation")),
        collective=_collective(fields.table(document, "collective")),
        proof=tuple(
            Fact(fields.text(row, "fact"), fields.text(row, "evidence"))
            for row in fields.rows(document, "proof")
        ),
        confidence=fields.text(document, "confidence", "unknown"),
        signature=fields.text(document, "signature"),
        last_progress_s=fields.number(document, "last_progress_s"),
        suspected_s=fields.number(document, "suspected_s"),
        confirmed_s=fields.number(document, "confirmed_s"),
        captured_s=fields.number(document, "captured_s"),
        went_on_s=fields.number(document, "went_on_s"),
        missing_evidence=read_missing(document, "missing_evidence"),
    )


def read_missing(document: Document, key: str) -> tuple[Missing, ...]:
    return tuple(
        Missing(fields.text(row, "what", "?"), fields.text(row, "why", "no reason recorded"))
        for row in fields.rows(document, key)
    )


def _culprit(row: Document) -> Culprit:
    return Culprit(
        rank=fields.optional_integer(row, "rank"),
        role=fields.text(row, "role", "rank"),
        node=fields.text(row, "node", "unknown"),
        pid=fields.optional_integer(row, "pid"),
        device=fields.optional_text(row, "device"),
    )


def _operation(row: Document) -> Operation | None:
    if not row:
        return None
    return Operation(
        label=fields.text(row, "label", "?"),
        sequence=fields.optional_integer(row, "sequence"),
        site=fields.text(row, "site", "unknown site"),
        pending_s=fields.number(row, "pending_s"),
    )


def _collective(row: Document) -> Collective | None:
    if not row:
        return None
    mismatch = fields.table(row, "mismatch")
    return Collective(
        group=fields.text(row, "group", "?"),
        sequence=fields.optional_integer(row, "sequence"),
        operation=fields.text(row, "operation", "?"),
        waiting=fields.integers(row, "waiting"),
        missing=fields.integers(row, "missing"),
        mismatch_what=fields.optional_text(mismatch, "what"),
        mismatch_sides=_sides(mismatch),
    )


def _sides(mismatch: Document) -> tuple[str, ...]:
    """Each side as one line: a side may be a plain text or an object of any fields."""
    sides = mismatch.get("sides")
    if not isinstance(sides, list):
        return ()
    return tuple(
        ", ".join(f"{key} {value}" for key, value in side.items()) if isinstance(side, Mapping) else str(side)
        for side in sides
    )
