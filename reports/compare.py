"""Arms of one run side by side: what one toggle costs or gains, per hot path.

Works on the stored run and gives the contract's document for ``hangrig compare --json``; nothing here
judges hangs. Only trials that ran to their end count (a trial that hung has no say about speed), and a
ratio is taken over *matched* trials: the same scenario, seed and other toggles on both sides. Otherwise the
seeds that hang on one side would be missing from it alone, and the workloads compared would differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.store import read_run, safe_name, write_bytes, write_json
from reports import charts, markdown, result, words
from reports.html import environment
from reports.model import Result, TrialResult
from reports.statistics import PRACTICAL_THRESHOLD, Ratio, percentiles, ratio_of_medians
from reports.write import encode

SCHEMA = 1
PATHS = ("next_token_copy", "bitmask_copy", "token_count_copy", "step")
_BASELINES = {"pinned": "pageable"}
_DEFAULT_BASELINE = "off"

_Key = tuple[str, str, int | None]


class CompareError(ValueError):
    """The run cannot be compared by this toggle; the message says which toggles it varies."""


@dataclass(frozen=True, slots=True)
class _Side:
    """The usable trials that asked for one value, by (scenario, other toggles, seed)."""

    value: str
    trials: Mapping[_Key, TrialResult]


def compare_run(path: str | Path, by: str = "pinned") -> dict[str, Any]:
    """The document of ``hangrig compare RUN --by TOGGLE``.

    Raises CompareError when no trial of the run has that toggle, StoreError when ``path`` is no run.
    """
    return compare_result(result.build(read_run(path)), by)


def compare_result(built: Result, by: str) -> dict[str, Any]:
    sides = _sides(built, by)
    base = sides[0]
    paths = []
    for path in PATHS:
        values = {side.value: percentiles(_pooled(side, path)) for side in sides}
        if all(figures is None for figures in values.values()):
            continue
        ratios = {side.value: _ratio(side, base, path, built.seed) for side in sides if side is not base}
        paths.append(
            {
                "path": path,
                "values": {value: _figures(found) for value, found in values.items()},
                "against": base.value,
                "ratios": {value: ratio.to_json() for value, ratio in ratios.items()},
            }
        )
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "run": built.run,
        "by": by,
        "against": base.value,
        "simulation": built.simulation,
        "simulation_note": built.simulation_note,
        "trials": {side.value: len(side.trials) for side in sides},
        "same_as": _same_values(built, by),
        "paths": paths,
    }
    return {**document, "sentence": sentence(document)}


def exit_status(document: Mapping[str, Any]) -> int:
    """0, or 3 when there were too few samples everywhere."""
    return 0 if any(row["verdict"] != "too-few-samples" for row in _all_ratios(document)) else 3


def _all_ratios(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for path in document["paths"] for row in path["ratios"].values()]


def _value(trial: TrialResult, by: str) -> str | None:
    if by in trial.arm:
        return str(trial.arm[by])
    return next((item.requested for item in trial.resolutions if item.toggle == by), None)


def _sides(built: Result, by: str) -> list[_Side]:
    """The values of the toggle, the one to compare with first: the safe one where it was run."""
    grouped: dict[str, dict[_Key, TrialResult]] = {}
    toggles: set[str] = set()
    for trial in built.trials:
        toggles |= trial.arm.keys()
        value = _value(trial, by)
        if value is None:
            continue
        usable = grouped.setdefault(value, {})
        if trial.outcome in result.COMPARABLE_OUTCOMES:
            rest = words.arm_name({name: other for name, other in trial.arm.items() if name != by})
            usable[trial.scenario, rest, trial.seed] = trial
    if not grouped:
        known = words.listing(sorted(toggles), most=20) or "nothing"
        raise CompareError(f"no trial of {built.run} has a toggle {by!r}; this run varies {known}")
    against = _BASELINES.get(by, _DEFAULT_BASELINE)
    return [
        _Side(value, grouped[value]) for value in sorted(grouped, key=lambda value: (value != against, value))
    ]


def _same_values(built: Result, by: str) -> dict[str, str]:
    """Values that were not run because they resolve to what another arm of the run resolves to."""
    return {str(arm.arm[by]): arm.same_as for arm in built.arms if arm.same_as is not None and by in arm.arm}


def _pooled(side: _Side, path: str) -> list[float]:
    return [sample for trial in side.trials.values() for sample in trial.latency_us.get(path, ())]


def _ratio(side: _Side, base: _Side, path: str, seed: int) -> Ratio:
    matched = [
        key
        for key, trial in side.trials.items()
        if trial.latency_us.get(path) and key in base.trials and base.trials[key].latency_us.get(path)
    ]
    if not matched:
        return Ratio(None, None, None, "too-few-samples", "no matched trials ran to their end on both sides")
    own, other = ([who.trials[key].latency_us[path] for key in matched] for who in (side, base))
    return ratio_of_medians(own, other, seed=seed)


def _figures(found: Any) -> dict[str, Any]:
    if found is None:
        return {"p50_us": None, "p95_us": None, "p99_us": None, "count": 0}
    return {"p50_us": found.p50, "p95_us": found.p95, "p99_us": found.p99, "count": found.count}


# --- words -------------------------------------------------------------------------------------------------


def sentence(document: Mapping[str, Any]) -> str:
    """One sentence to paste into a discussion; it claims what the intervals carry and nothing more."""
    by, against = document["by"], document["against"]
    values = list(dict.fromkeys(value for path in document["paths"] for value in path["ratios"]))
    start = "In simulation, which is no evidence about hardware, " if document["simulation"] else ""
    if not values:
        return f"{start}there is nothing to compare with {by}={against} in this run."
    clauses = [f"{by}={value} has {_clauses(document, value)}" for value in values]
    text = f"{start}compared with {by}={against}, {'; '.join(clauses)}."
    return text[0].upper() + text[1:]


def _clauses(document: Mapping[str, Any], value: str) -> str:
    decided: list[str] = []
    undecided: list[str] = []
    for path in document["paths"]:
        row = path["ratios"].get(value)
        if row is None or row["verdict"] == "too-few-samples":
            undecided.append(path["path"])
        else:
            decided.append(_clause(path["path"], row))
    if undecided:
        decided.append(f"too few samples to tell for {words.listing(undecided, most=len(PATHS))}")
    return words.listing(decided, most=len(PATHS) + 1)


def _clause(path: str, row: Mapping[str, Any]) -> str:
    interval = f"95 % interval of the ratio {row['low']:.2f} to {row['high']:.2f}"
    if row["verdict"] == "same":
        return f"the same median {path} within {words.percent(PRACTICAL_THRESHOLD)} ({interval})"
    change = words.percent(round(abs(row["ratio"] - 1.0), 2))
    way = "shorter" if row["verdict"] == "faster" else "longer"
    return f"a {change} {way} median {path} ({interval})"


def _cells(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """path, value, p50, p95, p99, samples, ratio, interval, verdict: a row for each path and value."""
    rows = []
    for path in document["paths"]:
        for value, figures in path["values"].items():
            row = path["ratios"].get(value)
            times = [figures[key] for key in ("p50_us", "p95_us", "p99_us")]
            rows.append(
                (
                    path["path"],
                    value,
                    *("-" if time is None else words.microseconds(time) for time in times),
                    str(figures["count"]),
                    *(("1", "", "compared with") if row is None else _ratio_cells(row)),
                )
            )
    return rows


def _ratio_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
    interval = "" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
    verdict = row["verdict"]
    return ratio, interval, f"{verdict}: {row['why']}" if verdict == "too-few-samples" else verdict


HEAD = ("path", "value", "p50", "p95", "p99", "samples", "ratio", "95 % interval", "verdict")


def render(document: Mapping[str, Any]) -> str:
    """A plain table and the sentence, for a terminal."""
    rows = [HEAD, *_cells(document)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [f"{value} was not run: it resolves to {other}" for value, other in document["same_as"].items()]
    return "\n".join([*lines, "", document["sentence"], ""])


def write(path: str | Path, document: Mapping[str, Any]) -> None:
    """Writes compare-<by>.json, .md and .html into the run directory ``path``. Raises StoreError."""
    base = Path(path) / f"compare-{safe_name(document['by'])}"
    write_json(base.with_name(f"{base.name}.json"), document)
    write_bytes(base.with_name(f"{base.name}.md"), encode(render_markdown(document)))
    write_bytes(base.with_name(f"{base.name}.html"), encode(render_html(document)))


def render_markdown(document: Mapping[str, Any]) -> str:
    lines = [f"# {markdown.escape(document['by'])}, side by side", ""]
    lines += [markdown.escape(document["sentence"]), ""]
    if document["simulation"]:
        lines += [f"> **Simulation.** {markdown.escape(document['simulation_note'])}", ""]
    rows = [tuple(markdown.escape(cell) for cell in row) for row in _cells(document)]
    lines += [*markdown.table(HEAD, rows), ""]
    lines.append(_method())
    return "\n".join(lines) + "\n"


def render_html(document: Mapping[str, Any]) -> str:
    rows = [
        (f"{path['path']}: {value}", Ratio(row["ratio"], row["low"], row["high"], row["verdict"], row["why"]))
        for path in document["paths"]
        for value, row in path["ratios"].items()
    ]
    chart = charts.ratios(rows, f"{document['by']}={document['against']}", PRACTICAL_THRESHOLD)
    template = environment().get_template("compare.html.j2")
    return template.render(document=document, head=HEAD, rows=_cells(document), chart=chart, method=_method())


def _method() -> str:
    return (
        "Ratios are of medians over matched trials (same scenario, seed and other toggles). Intervals are "
        "95 %, by a bootstrap over whole trials. A difference counts when its interval leaves out 1 and it "
        f"passes {words.percent(PRACTICAL_THRESHOLD)}; too-few-samples means that more trials are "
        "needed to say either."
    )
