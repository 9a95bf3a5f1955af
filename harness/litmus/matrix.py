"""Which program catches which defect of the simulated device: the table in docs/litmus.md.

``python -m harness.litmus.matrix [--iterations N] [--seed S]`` runs every program under both memory models, sound
and with each defect, and prints a Markdown table of how often each watched outcome was seen; where it is forbidden,
in bold. Its status is 1 where a sound model shows one, or a defect none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.litmus.judge import Judged
from harness.litmus.request import DEFECTS, LitmusRequest
from harness.litmus.rules import MODELS
from harness.litmus.session import run_session

Cells = Mapping[str, Mapping[str, Judged]]


def measure(iterations: int, seed: int) -> Cells:
    """By column (``sound`` or a defect, and the model), then by program."""
    columns: dict[str, dict[str, Judged]] = {}
    for defect in ("", *DEFECTS):
        for model in MODELS:
            request = LitmusRequest(
                model=model, iterations=iterations, seed=seed, defects=(defect,) if defect else ()
            )
            name = f"{defect or 'sound'} {model}"
            sys.stderr.write(f"{name}\n")
            with tempfile.TemporaryDirectory(prefix="hangrig-litmus-") as logs:
                findings = run_session(request, Path(logs), lambda said: None)
            columns[name] = {line.name: line for line in findings.lines}
    return columns


def table(columns: Cells) -> str:
    """Programs by columns, in Markdown."""
    names = list(next(iter(columns.values())))
    rows = [["program", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(_cell(column[name]) for column in columns.values())] for name in names]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def is_as_it_should_be(columns: Cells) -> bool:
    """Nothing forbidden in a sound column, something in each other."""
    return all(
        any(line.verdict == "fail" for line in column.values()) != name.startswith("sound")
        for name, column in columns.items()
    )


def _cell(line: Judged) -> str:
    seen = f"{line.observed.k}/{line.observed.n}"
    return f"**{seen}**" if line.verdict == "fail" else seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    wished = parser.parse_args(argv)
    columns = measure(wished.iterations, wished.seed)
    sys.stdout.write(table(columns) + "\n")
    return 0 if is_as_it_should_be(columns) else 1


if __name__ == "__main__":
    sys.exit(main())
