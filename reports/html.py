"""report.html: one file that reads from a disk, without a script and without the network.

Layout only; every fact comes from the Result and the evidence views. All text from a run is untrusted and
is escaped by the template engine; the page's policy forbids scripts and every fetch besides. A field that a
template names and the model lacks is an error (StrictUndefined), not a blank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.store import StoredRun, StoredTrial
from reports import baseline, corpus, timeline_chart, wait_chart, words
from reports.charts import Chart, distribution
from reports.engine import bypassing
from reports.evidence import HangGroup, blamed_seats, group_hangs
from reports.hang_text import heading
from reports.injected import Injected, injected
from reports.known import new_issues, web_address
from reports.model import Result, TrialResult
from reports.run_text import stopping, time_budget
from reports.timeline import timeline
from reports.toggles import toggle_rows

MOST_PICTURES = 12
"""Groups of hangs that are drawn: the page stays small enough to be sent around."""
LATENCY_ORDER = ("step", "next_token_copy", "bitmask_copy", "token_count_copy")


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of a table of names and values, from a nested document."""

    name: str
    value: str


def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "percent": words.percent,
        "interval": words.interval,
        "k_of_n": words.k_of_n,
        "seconds": words.seconds,
        "microseconds": words.microseconds,
        "arm": words.arm_name,
        "web": web_address,
        "svg": Markup,  # charts only: markup of our own making
    }
    made.globals["count"] = words.count
    return made


def render(result: Result, stored: StoredRun) -> str:
    """The page. Links go to files beside it in the run directory, and only to those that exist."""
    trials = {trial.id: trial for trial in stored.trials}
    groups = group_hangs(trials, result)
    broken = _broken(stored, result)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            result=result,
            corpus=corpus.page(stored),
            time_budget=time_budget(result),
            stopping=stopping(result),
            baseline=[] if result.baseline is None else baseline.lines(result.baseline),
            hangs=groups,
            heading=heading(group.first.trial for group in groups),
            noted=[trial for trial in result.trials if trial.notes],
            injected=[one for one in broken if one.rows],
            spared=sum(not one.rows for one in broken),
            checks=[trial for trial in result.trials if _checks_to_show(trial)],
            new_issues=new_issues(result),
            charts=latency_charts(result),
            paths=latency_paths(result),
            toggles=toggle_rows(result),
            versions=flatten(result.versions),
            machine=flatten(result.machine),
            link=_Links(stored),
            pictures={group.first.trial.id: pictures(group, trials) for group in groups[:MOST_PICTURES]},
            bypass=bypassing([trial.engine for trial in result.trials if trial.engine is not None]),
            engine_commands=list(dict.fromkeys(t.engine.command for t in result.trials if t.engine)),
        )
    )


def pictures(group: HangGroup, stored: Mapping[str, StoredTrial]) -> list[Chart]:
    """Of the first trial of a group: who waits for whom, and its last steps."""
    trial = group.first.trial
    blamed = blamed_seats(trial)
    line = timeline(stored[trial.id], trial)
    waiting = wait_chart.chart(stored[trial.id].waits or {}, blamed)
    steps = None if line is None else timeline_chart.chart(line, blamed)
    return [chart for chart in (waiting, steps) if chart is not None]


def _broken(stored: StoredRun, result: Result) -> list[Injected]:
    """Trials with faults, in the order of the run."""
    results = {trial.id: trial for trial in result.trials}
    found = [injected(one, results[one.id]) for one in stored.trials if one.id in results]
    return [one for one in found if one is not None]


def _checks_to_show(trial: TrialResult) -> bool:
    return trial.verdict in ("fail", "unknown") or any(
        check.verdict in ("fail", "unknown") for check in trial.checks
    )


def latency_paths(result: Result) -> list[str]:
    found = {path for arm in result.arms for path in arm.latency_us}
    return [path for path in LATENCY_ORDER if path in found] + sorted(found - set(LATENCY_ORDER))


def latency_charts(result: Result) -> list[Chart]:
    several = len(result.scenarios) > 1
    charts = []
    for path in latency_paths(result):
        curves = {
            f"{arm.scenario} {arm.name}" if several else arm.name: [
                value for trial in arm.samples_us.get(path, ()) for value in trial
            ]
            for arm in result.arms
        }
        chart = distribution(path, curves)
        if chart is not None:
            charts.append(chart)
    return charts


def flatten(document: Mapping[str, Any], prefix: str = "") -> list[Setting]:
    """Nested tables as dotted names; lists as one line."""
    found: list[Setting] = []
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += flatten(value, f"{name}.")
        elif isinstance(value, list):
            found.append(Setting(name, ", ".join(map(str, value))))
        else:
            found.append(Setting(name, "unknown" if value is None else str(value)))
    return found


class _Links:
    """Relative addresses of files of a trial, or None for what is not there or not inside it."""

    def __init__(self, stored: StoredRun) -> None:
        self._paths = {trial.id: trial.path for trial in stored.trials}

    def __call__(self, trial_id: str, evidence: str) -> str | None:
        base = self._paths.get(trial_id)
        name = PurePosixPath(evidence.partition("#")[0])
        if base is None or not name.parts or name.is_absolute() or ".." in name.parts:
            return None
        if not (base / name).exists():
            return None
        return quote(f"trials/{trial_id}/{name}")
