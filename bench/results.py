"""The stored document and the table on the screen.

Not here: numbers. Every ratio of a document is between arms of the figure it stands in, measured in one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Figure
from harness.store import write_json

SCHEMA = 1


def store(folder: Path, facts: Mapping[str, Any], figures: Sequence[Figure]) -> Path:
    """Writes ``<UTC time>.json`` and returns its path. Raises StoreError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    write_json(path, {"schema": SCHEMA, **facts, "figures": [figure.to_json() for figure in figures]})
    return path


def show(console: Console, figures: Sequence[Figure]) -> None:
    """One table a figure: arms with their numbers, then the ratios."""
    for figure in figures:
        quantities = list(dict.fromkeys(name for values in figure.arms.values() for name in values))
        console.print(f"{figure.name}: {figure.says}", markup=False)
        table = Table(show_edge=False)
        for heading in ("", *quantities):
            table.add_column(heading, justify="left" if not heading else "right")
        for arm, values in figure.arms.items():
            table.add_row(arm, *(f"{values[name]:.4g}" if name in values else "" for name in quantities))
        console.print(table)
        for between in figure.ratios:
            ratio = between.ratio
            console.print(
                f"  {between.over} / {between.under}, {between.quantity}: {ratio.value:.3f} "
                f"({ratio.low:.3f} to {ratio.high:.3f}, {ratio.pairs} pairs)"
            )
        console.print()
