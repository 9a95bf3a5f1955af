"""The hang corpus as a run: which scenarios, with how many ranks and seeds, and their trials.

Here: the choice (``Wish``), the variants of a scenario for each number of ranks, the order of trials, and the
view while they run. The rows themselves are scenario files (``scenarios/corpus``). Not here: a trial
(``session.py``) and what a stored corpus is worth (``reports.corpus``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.arms import ArmPlan, expand, plan_arms
from harness.live import LiveView
from harness.request import BadRequest, RunRequest
from harness.scenario import ScenarioError, corpus_files, from_record, load
from harness.scenario_model import Scenario
from harness.session import Job
from harness.toggles import gather_facts
from reports.corpus import Score, part_of, score, table

DEVICE = "sim"
_REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Wish:
    """What of the corpus is to be run, and how often."""

    only: tuple[str, ...] = ()
    """Rows (A1), families (A), controls or files by name; none named means all."""
    seeds: int = 1
    """Trials of each row, with seeds 0, 1, ..."""
    twins: int | None = None
    """Trials of each twin and control; as many as seeds where nothing is said."""
    wide: int = 3
    """At most so many trials of anything with more than two ranks."""
    quick: bool = False
    """Only the part that fits into five minutes: the files marked for it, with their first number of ranks, and
    unless ``twins`` says more, the twin of one row of each family."""
    seed: int = 0
    """The first one."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One file of the corpus with one number of ranks."""

    scenario: Scenario
    file: str
    """Its name, without the number of ranks."""

    def to_json(self) -> dict[str, Any]:
        """What run.json keeps, for the score of a stored run."""
        entry = self.scenario.corpus
        assert entry is not None
        target = self.scenario.target
        return {
            "id": entry.id,
            "name": self.file,
            "ranks": target.ranks,
            "dp": target.dp or target.ranks,
            "row": entry.row.values() if entry.id is not None else {},
            "twin": entry.twin.values() if entry.id is not None else {},
        }


def variants(wish: Wish) -> list[Variant]:
    """The chosen files, those with few ranks first: ranks stay warm as long as their number is the same. Raises
    BadRequest for a name that is none, ScenarioError for a broken file."""
    files = corpus_files()
    scenarios = {name: load(path) for name, path in files.items()}
    chosen = {name: one for name, one in scenarios.items() if not wish.only or _named(wish.only, name, one)}
    for word in wish.only:
        if not any(_named([word], name, one) for name, one in scenarios.items()):
            known = sorted({one.corpus.id for one in scenarios.values() if one.corpus and one.corpus.id})
            controls = [name for name, one in scenarios.items() if one.corpus and one.corpus.id is None]
            raise BadRequest(
                f"--only {word}: is no row of the corpus; rows: {', '.join(known)}; "
                f"controls: {', '.join(controls) or 'none'}"
            )
    found = []
    for name, scenario in chosen.items():
        if scenario.corpus is None:
            raise BadRequest(f"{files[name]}: corpus: is missing; say which row it is")
        if wish.quick and not scenario.corpus.quick:
            continue
        counts = scenario.corpus.ranks[:1] if wish.quick else scenario.corpus.ranks
        found += [Variant(_with_ranks(scenario, count), name) for count in counts]
    if not found:
        raise BadRequest("nothing of the corpus is chosen; leave out --quick, or name other rows")
    return sorted(found, key=lambda one: (one.scenario.target.ranks, _order(one)))


def _named(words: Sequence[str], name: str, scenario: Scenario) -> bool:
    row = scenario.corpus.id if scenario.corpus is not None else None
    names = {name} if row is None else {name, row, row[0], row.lower(), row[0].lower()}
    return any(word in names for word in words)


def _order(variant: Variant) -> tuple[Any, ...]:
    row = variant.scenario.corpus.id if variant.scenario.corpus is not None else None
    found = re.fullmatch(r"([A-Z])([0-9]+)", row or "")
    return (row is None, *((found[1], int(found[2])) if found else ("", 0)), variant.file)


def _with_ranks(scenario: Scenario, ranks: int) -> Scenario:
    """The scenario with another number of ranks, in attention groups of the same size."""
    own = scenario.target
    if ranks == own.ranks:
        return scenario
    size = own.ranks // (own.dp or own.ranks)
    target = {"ranks": ranks, **({"dp": ranks // size} if own.dp is not None else {})}
    text = scenario.model_copy(update={"name": f"{scenario.name}-{ranks}-ranks"}).model_dump_json(
        exclude_none=True
    )
    settings = [f"target.{key}={value}" for key, value in target.items()]
    try:
        return from_record({"name": scenario.name, "text": text}, settings)
    except ScenarioError as error:
        raise BadRequest(f"{scenario.name} with corpus.ranks={ranks}: {error}") from error


def jobs(wish: Wish, chosen: Sequence[Variant]) -> list[tuple[Job, Sequence[ArmPlan]]]:
    """The trials of each variant, a seed in every arm before the next seed; and its arms, for the record."""
    found: list[tuple[Job, Sequence[ArmPlan]]] = []
    rows_alone = _rows_alone(wish, chosen)
    for variant in chosen:
        scenario = variant.scenario
        facts = gather_facts(DEVICE, scenario.target.ranks)
        most = wish.wide if scenario.target.ranks > 2 else 10**9
        seeds = min(wish.seeds, most)
        healthy = min(wish.seeds if wish.twins is None else wish.twins, most)
        if variant.file in rows_alone:
            healthy = 0
        planned = expand(scenario, DEVICE, max(seeds, healthy), wish.seed, facts)
        entry = variant.to_json()
        trials = [
            plan for plan in planned if plan.index < (seeds if part_of(plan.arm, entry) == "row" else healthy)
        ]
        found.append((Job(scenario, trials), plan_arms(scenario, DEVICE, facts)))
    return found


def _rows_alone(wish: Wish, chosen: Sequence[Variant]) -> set[str]:
    """Files whose twins are left out: in the quick part a family's first row has one, as all twins of a family
    do much the same."""
    if not wish.quick or wish.twins is not None:
        return set()
    first: dict[str, str] = {}
    rows = [one for one in chosen if one.scenario.corpus is not None and one.scenario.corpus.id is not None]
    for one in rows:
        first.setdefault(one.to_json()["id"][0], one.file)
    return {one.file for one in rows} - set(first.values())


def request(
    wish: Wish, chosen: Sequence[Variant], *, out: Path, argv: Sequence[str], json: bool
) -> RunRequest:
    return RunRequest(
        scenarios=tuple(one.scenario for one in chosen), device=DEVICE, seed=wish.seed, trials=wish.seeds,
        out=out, argv=tuple(argv), json=json,
    )  # fmt: skip


def manifest(chosen: Sequence[Variant]) -> dict[str, Any]:
    """What run.json says of a corpus beside what it says of every run."""
    return {"corpus": {one.scenario.name: one.to_json() for one in chosen}}


class CorpusView(LiveView):
    """The table of the rows so far, drawn while trials run; elsewhere than on a terminal a line a trial."""

    def __init__(self, total: int, chosen: Sequence[Variant]) -> None:
        super().__init__(total)
        self._chosen: Mapping[str, Any] = manifest(chosen)["corpus"]
        self._scores: list[Score] = []
        self._shown_s = 0.0

    def judged(self, trial: Path) -> None:
        """A trial has been judged."""
        found = score(trial, self._chosen)
        if found is not None:
            self._scores.append(found)

    def update(self, suspect: str | None) -> None:
        if self._live is None or time.monotonic() - self._shown_s < _REFRESH_S:
            return
        self._shown_s = time.monotonic()
        self._live.update(self._table())

    def _table(self) -> Table:
        drawn = table(self._chosen, self._scores)
        drawn.caption = self._title
        return drawn
