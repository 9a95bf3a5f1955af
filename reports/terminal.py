"""The result on a terminal: verdict, arms, toggles that were refused, hangs in a few lines each, the lines that
repeat them.

Plain text where the stream is no terminal. Text from a run is never read as markup, and control characters
in it (a terminal obeys them) are shown as escapes.
"""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import baseline, words
from reports.hang_text import diagnosis_lines, hang_groups
from reports.known import new_issues
from reports.model import Result, ScenarioResult
from reports.run_text import stopping, time_budget
from reports.toggles import toggle_rows

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow", "skipped": "dim"}
_PLAIN_WIDTH = 150


def printable(text: str) -> str:
    """``text`` with control characters as escapes: a thread's name must not move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process with status 1; the status of a run is not the reader's affair."""
        raise BrokenPipeError


def show(result: Result, stream: IO[str]) -> None:
    """Writes the whole result to ``stream`` (the commands give standard error under ``--json``). Raises
    BrokenPipeError when nobody reads it."""
    interactive = stream.isatty()
    console = _Console(
        file=stream,
        highlight=False,
        no_color=not interactive,
        width=None if interactive else _PLAIN_WIDTH,
        soft_wrap=not interactive,
    )
    for scenario in result.scenarios:
        console.print(_arms(scenario))
    for row in toggle_rows(result):
        if row.refused:
            console.print(Text(f"toggle {printable(row.line)}", style="yellow"), soft_wrap=True)
    for first, others in hang_groups(result):
        title, *facts = map(printable, diagnosis_lines(first))
        more = f" (and {words.count(len(others), 'other trial')} alike)" if others else ""
        console.print(Text(f"{title}{more}", style="bold"))
        for fact in facts:
            console.print(Text(f"  {fact}"))
        console.print(Text(f"  again with: {printable(first.rerun)}", style="cyan"), soft_wrap=True)
    if new := len(new_issues(result)):
        told = "for each" if new > 1 else "for it"
        console.print(
            f"{words.count(new, 'new signature')}; the report has an entry for known-issues.toml {told}"
        )
    if told := time_budget(result):
        console.print(Text(f"time budget: {told}", style="yellow"))
    for line in stopping(result):
        console.print(Text(printable(line), style="yellow"))
    for line in [] if result.baseline is None else baseline.lines(result.baseline):
        console.print(Text(printable(line), style="yellow"))
    for trial in result.never_run:
        console.print(Text(f"never ran: {printable(trial)}", style="yellow"))
    for problem in result.problems:
        console.print(Text(f"problem: {printable(problem)}", style="yellow"))
    for note in result.engine_notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))
    if result.simulation:
        console.print(Text(f"Simulation. {printable(result.simulation_note)}", style="yellow"))
    verdict = Text(result.verdict.upper(), style=_STYLES[result.verdict])
    console.print(verdict.append(f"  {printable(result.headline)}", style="default"))
    console.print(Text(f"{printable(result.run)}/report.html", style="dim"), soft_wrap=True)


def _arms(scenario: ScenarioResult) -> Table:
    table = Table(title=Text(printable(scenario.name)), title_justify="left", box=None, pad_edge=False)
    for name in ("arm", "expected", "hung", "95 % interval", "tokens differ", "step p50", "verdict"):
        table.add_column(name, overflow="fold", justify="left")
    for arm in scenario.arms:
        step = arm.latency_us.get("step")
        table.add_row(
            Text(printable(arm.name if arm.same_as is None else f"{arm.name} (as {arm.same_as})")),
            Text(printable(arm.expectation.hang)),
            words.hung(arm.hangs, arm.slow),
            words.interval(arm.hangs),
            words.k_of_n(arm.corrupt) if arm.corrupt.n else "not compared",
            "-" if step is None else words.microseconds(step.p50),
            Text(arm.verdict, style=_STYLES[arm.verdict]),
        )
    return table
