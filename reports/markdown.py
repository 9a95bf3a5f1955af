"""summary.md: the run in a page that fits a pull request or a job summary.

Layout only. Text from a run is escaped for Markdown and HTML, since job summaries render both. GitHub refuses a job
summary of more than LIMIT_BYTES as a whole, so a longer one is cut, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from reports import baseline, words
from reports.hang_text import diagnosis_lines, hang_groups, heading
from reports.known import new_issues, web_address
from reports.model import ArmResult, Recognition, Result
from reports.run_text import stopping, time_budget
from reports.toggles import toggle_rows

_BARE_PIPE = re.compile(r"(?<!\\)\|")
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")
LIMIT_BYTES = 1 << 20
"""Of a step's job summary (GitHub Docs, "Workflow commands", "Adding a job summary")."""
_CUT = "\n\nCut here: the rest does not fit into a job summary, and is in report.html.\n"
_NAMED = 8
"""Trials that never ran are named up to so many."""


def escape(text: str) -> str:
    """``text`` as plain words in Markdown, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("\\<", "&lt;")


def code(text: str) -> str:
    """``text`` as code, on one line; the fence is longer than any run of backticks inside."""
    flat = " ".join(text.split())
    runs = [len(run) for run in re.findall(r"`+", flat)]
    fence = "`" * (max(runs, default=0) + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def block(text: str) -> str:
    """``text`` as an indented block of code, which nothing inside can end."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Cells are Markdown already; a pipe in code still needs its backslash."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [_BARE_PIPE.sub("\\\\|", cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def render(result: Result) -> str:
    lines = [f"# {result.verdict}: {escape(result.name)}", "", escape(result.headline), ""]
    if result.simulation:
        lines += [f"> **Simulation.** {escape(result.simulation_note)}", ""]
    lines += [
        f"{words.count(len(result.trials), 'trial')} on {escape(result.device)}, seed {result.seed}, "
        f"exit status {result.exit}.",
        "",
    ]
    if told := time_budget(result):
        lines += [f"> **Time budget.** {escape(told)}.", ""]
    if answers := stopping(result):
        lines += [
            f"**Stopping rule:** {escape(answers[0])}.",
            "",
            *(f"- {escape(one)}" for one in answers[1:]),
            "",
        ]
    for scenario in result.scenarios:
        lines += [f"## {escape(scenario.name)}: {scenario.verdict}", ""]
        head = ("arm", "hang expected", "hung", "95 % interval", "tokens differ", "verdict", "why")
        lines += [*table(head, map(_arm, scenario.arms)), ""]
    if result.baseline is not None:
        lines += [
            "## Against the baseline",
            "",
            *(f"- {escape(line)}" for line in baseline.lines(result.baseline)),
            "",
        ]
    lines += _hangs(result)
    lines += _checks(result)
    lines += _toggles(result)
    lines += _notes(result)
    if result.engine_notes:
        lines += [
            "## About the probe in the engine",
            "",
            *(f"- {escape(x)}" for x in result.engine_notes),
            "",
        ]
    if result.never_run:
        lines += ["## Planned, never run", "", *(f"- {code(trial)}" for trial in result.never_run[:_NAMED])]
        more = len(result.never_run) - _NAMED
        lines += [*([f"- and {more} more, in `report.json`"] if more > 0 else []), ""]
    if result.problems:
        lines += [
            "## What went wrong with the run itself",
            "",
            *(f"- {escape(text)}" for text in result.problems),
            "",
        ]
    return fitted("\n".join(lines).rstrip() + "\n")


def fitted(text: str, limit_bytes: int = LIMIT_BYTES) -> str:
    """``text``, cut between two of its lines where it is longer than the limit as UTF-8."""
    whole = text.encode("utf-8", "replace")
    if len(whole) <= limit_bytes:
        return text
    kept = whole[: limit_bytes - len(_CUT.encode())]
    return kept[: kept.rfind(b"\n")].decode("utf-8", "ignore") + _CUT


def _arm(arm: ArmResult) -> tuple[str, ...]:
    return (
        code(arm.name),
        escape(arm.expectation.hang),
        words.hung(arm.hangs, arm.slow),
        words.interval(arm.hangs),
        words.k_of_n(arm.corrupt) if arm.corrupt.n else "not compared",
        arm.verdict,
        escape(arm.why),
    )


def _hangs(result: Result) -> list[str]:
    groups = hang_groups(result)
    if not groups:
        return []
    lines = [f"## {heading(first for first, _ in groups)}", ""]
    for first, others in groups:
        title, *facts = diagnosis_lines(first)
        lines += [f"### {escape(title)}", ""]
        lines += [f"- {escape(fact)}" for fact in facts]
        if others:
            lines.append(f"- the same in {words.count(len(others), 'other trial')}")
        lines += ["", block(first.rerun), ""]
    return [*lines, *_known(result)]


def _known(result: Result) -> list[str]:
    """Every signature with what the known issues say of it, and a block for each that is new."""
    if not result.signatures:
        return []
    rows = [(code(row.signature), str(row.count), row.status, _issue(row.known)) for row in result.signatures]
    lines = ["## Signatures", "", *table(("signature", "trials", "status", "known issue"), rows), ""]
    if new := new_issues(result):
        lines += ["For `known-issues.toml`, once the link is written:", ""]
        for text in new:
            lines += [block(text), ""]
    return lines


def _issue(known: Recognition) -> str:
    link = f"<{known.link}>" if web_address(known.link) else escape(known.link)
    until = f"until {known.expires}" if known.expires else ""
    told = [escape(known.title or known.note), link, until, escape(known.why)]
    return "; ".join(filter(None, told))


def _toggles(result: Result) -> list[str]:
    """Every toggle as it was asked for and as the platform gave it."""
    rows = [
        (
            code(f"{row.toggle}={row.requested}"),
            code(f"{row.toggle}={row.resolved}"),
            str(row.arms),
            escape(row.why),
        )
        for row in toggle_rows(result)
    ]
    head = ("requested", "resolved", "arms", "why")
    return ["## Toggles: requested and resolved", "", *table(head, rows), ""] if rows else []


def _notes(result: Result) -> list[str]:
    told = [f"- {code(trial.name)}: {escape(note)}" for trial in result.trials for note in trial.notes]
    return ["## Notes of the watchdog", "", *told, ""] if told else []


def _checks(result: Result) -> list[str]:
    rows = [
        (code(trial.name), escape(check.name), escape(check.verdict), escape(check.reason))
        for trial in result.trials
        for check in trial.checks
        if check.verdict in ("fail", "unknown")
    ]
    if not rows:
        return []
    head = ("trial", "check", "verdict", "reason")
    return ["## Checks that did not pass", "", *table(head, rows), ""]
