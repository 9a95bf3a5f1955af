"""The page and the text of ``hangrig history``: one file, no script, no network. Layout only; facts are
``history.py``'s."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from harness.rates import rate
from reports import words
from reports.charts import PALETTE, STYLE, TEXT, Chart, svg_of
from reports.history import History, Line, Night, Step
from reports.html import environment

MOST_DRAWN = 40
"""Lines that are drawn, those with steps and most nights first: the page stays small."""


def render(history: History) -> str:
    nights = {night.name: number for number, night in enumerate(history.nights)}
    drawn = sorted(history.lines, key=lambda line: (not found_steps(line), -len(line.points)))[:MOST_DRAWN]
    return (
        environment()
        .get_template("history.html.j2")
        .render(
            history=history,
            steps=[(line, step) for line in history.lines for step in found_steps(line)],
            quiet=[night for night in history.nights if night.verdict != "pass" or night.why],
            changed=[night for night in history.nights if night.changed],
            charts=[(line, chart(line, history.nights, nights)) for line in drawn if len(line.points) > 1],
            left_out=max(0, len(history.lines) - len(drawn)),
            simulation=any(night.simulation for night in history.nights),
            only_simulation=all(night.simulation for night in history.nights),
            k_of_n=words.k_of_n,
        )
    )


def text(history: History) -> str:
    """For a terminal: how many nights, steps, signatures of the last night."""
    passed = sum(night.verdict == "pass" for night in history.nights)
    last = history.nights[-1]
    lines = [
        f"{words.count(len(history.nights), 'night')}, {passed} passed; the last, {last.name}, is {last.verdict}"
        + (f": {last.why}" if last.why else "")
    ]
    for line in history.lines:
        lines += [f"step: {name(line)}: {step.words()}" for step in found_steps(line)]
    for one in history.signatures:
        if one.last == last.name:
            seen = "new tonight" if one.first == last.name else f"since {one.first}, in {one.nights} nights"
            lines.append(f"signature {one.signature} ({one.mechanism}, {one.status}): {seen}")
    return "\n".join(lines)


def name(line: Line) -> str:
    which = f", definition {line.definition}" if line.definition > 1 else ""
    return f"{line.scenario}, {line.arm} on {line.device}{which}"


def found_steps(line: Line) -> list[Step]:
    return [step for step in line.steps if step.answer == "step"]


def chart(line: Line, nights: Sequence[Night], place: dict[str, int]) -> Chart:
    """Hang rate with its interval above, the median step below."""
    at = [place[point.night] for point in line.points]
    steps = [
        (place[point.night], point.latency_us["step"] / 1e3)
        for point in line.points
        if "step" in point.latency_us
    ]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name(line)}):
        figure = Figure(figsize=(7.4, 2.6 if steps else 1.5), layout="constrained")
        rows = figure.subplots(2 if steps else 1, 1, sharex=True, squeeze=False)[:, 0]
        rates = [rate(point.hangs.k, point.hangs.n) for point in line.points]
        shares = [one.k / one.n for one in rates]
        spread = [
            [share - one.low for share, one in zip(shares, rates, strict=True)],
            [one.high - share for share, one in zip(shares, rates, strict=True)],
        ]
        rows[0].errorbar(at, shares, yerr=spread, fmt="o", color=PALETTE[5], markersize=3.5, linewidth=0.9)
        rows[0].set_ylim(-0.05, 1.05)
        rows[0].set_yticks((0.0, 0.5, 1.0), ("0", "50 %", "100 %"))
        rows[0].set_ylabel("hung")
        if steps:
            rows[1].plot(*zip(*steps, strict=True), "o-", color=PALETTE[0], markersize=3.5, linewidth=0.9)
            rows[1].set_ylim(bottom=0.0)
            rows[1].set_ylabel("step, ms")
        for axes in rows:
            axes.grid(True)
            axes.set_axisbelow(True)
            axes.set_xlim(-0.5, len(nights) - 0.5)
            for number, night in enumerate(nights):
                if night.changed and night.device == line.device:
                    axes.axvline(number - 0.5, color=TEXT, alpha=0.5, linewidth=0.7, linestyle=":")
            for step in found_steps(line):
                axes.axvline(place[step.night or ""] - 0.5, color=PALETTE[1], linewidth=1.2)
        rows[-1].set_xlabel("nights, oldest first")
        svg = svg_of(figure, name(line), f"history {name(line)}")
    reading = (
        "A point is a night: above the share of its trials that hung, with the 95 % interval, below the median "
        "step. Before a dotted line versions or the machine were others; an orange one is a step."
    )
    return Chart(name(line), svg, reading)
