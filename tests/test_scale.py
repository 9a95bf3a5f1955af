"""Thousands of ranks: the same verdicts as of a few, in a proof that a person can read.

Evidence is made up by ``bench/synthetic.py``. How long it takes is the benchmark's; here is counted how often the
members of groups are gone through, which is what would grow with the square of the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from bench import synthetic
from harness import diagnosis_plans, diagnosis_stacks
from harness.diagnose import Diagnosis, Evidence, diagnose
from harness.diagnosis_case import Case
from harness.ledger_snapshot import CollectiveRecord
from harness.stack_places import Doing
from harness.stacks import ProcessStacks
from harness.standing import Confirmed, Healthy
from harness.waits import Wait, cycle_in, lacking
from harness.watchdog import Watchdog, WatchdogSettings

MOST_FACTS = 40
VERDICTS = {
    "skipped": ("hang", "collective-skipped"),
    "mismatch": ("hang", "collective-mismatch"),
    "divergence": ("hang", "decision-divergence"),
    "order": ("hang", "collective-order"),
    "stuck": ("hang", "unknown"),
    "healthy": ("none", "unknown"),
    "stacks": ("hang", "host-blocked"),
}


def blamed(found: Diagnosis) -> list[int | None]:
    return [culprit.rank for culprit in found.culprits]


def expected(case: synthetic.Case, world: int) -> list[int]:
    if case == "order":
        return [0, world // 2]
    return [] if case in ("stuck", "healthy") else [synthetic.culprit(world)]


@pytest.mark.parametrize("case", synthetic.CASES)
@pytest.mark.parametrize("world", [16, 256])
def test_the_verdict_does_not_depend_on_the_number_of_ranks(case: synthetic.Case, world: int) -> None:
    found = diagnose(synthetic.evidence(case, world, synthetic.SPARSE if world > 16 else synthetic.FULL))
    assert ((found.kind, found.mechanism), blamed(found)) == (VERDICTS[case], expected(case, world))
    assert len(found.proof) <= MOST_FACTS
    assert json.dumps(found.to_json())


def test_one_of_4096_ranks_is_named_in_a_few_words() -> None:
    found = diagnose(synthetic.evidence("divergence", 4096, synthetic.SPARSE))
    assert ((found.kind, found.mechanism), blamed(found)) == (VERDICTS["divergence"], [2049])
    said = [fact.fact for fact in found.proof]
    assert len(said) <= MOST_FACTS
    assert max(map(len, said)) < 500
    where = f"at step {synthetic.DIVERGED}, the first on which the ranks differ, tokens is"
    assert f"each of 4,095 ranks (0-2048, 2050-4095): {where} [4096, 64]" in said
    assert f"rank 2049: {where} [4095, 64]" in said
    assert found.collective is not None
    assert len(found.collective.waiting) == 4096


@pytest.mark.parametrize(
    ("case", "reason"), [("order", "cycle"), ("stuck", "stalled"), ("mismatch", "mismatch")]
)
def test_the_watchdog_confirms_what_it_sees_of_256_ranks(case: synthetic.Case, reason: str) -> None:
    watchdog = Watchdog(WatchdogSettings(), 256)
    samples = synthetic.samples(synthetic.evidence(case, 256, synthetic.SPARSE), moving=25, standing=40)
    standings = [watchdog.observe(sample) for sample in samples]
    assert all(isinstance(standing, Healthy) for standing in standings[:25])
    last = standings[-1]
    assert isinstance(last, Confirmed)
    assert last.reason == reason
    assert len(last.proof) <= MOST_FACTS


class Counted(tuple[int, ...]):
    """Ranks that count how many of them were handed out."""

    steps = 0

    def __iter__(self) -> Iterator[int]:
        for rank in super().__iter__():
            Counted.steps += 1
            yield rank


def steps_of(world: int) -> int:
    """Of the search for circles and roots among two halves of ``world`` ranks that wait for each other."""
    low, high = Counted(range(world // 2)), Counted(range(world // 2, world))
    both = tuple(range(world))
    found = (
        Wait("experts", 5, "all_gather", both, low, high, Counted(), (), ()),
        Wait("agree", 5, "all_gather", both, high, low, Counted(), (), ()),
    )
    Counted.steps = 0
    assert [link.rank for link in cycle_in(found)] == [0, world // 2]
    assert len(lacking(found)) == world
    return Counted.steps


def test_work_on_groups_grows_with_their_members_and_not_with_pairs() -> None:
    few, many = steps_of(256), steps_of(4096)
    assert few > 0
    assert many <= 16 * few


def test_what_a_process_does_is_read_from_its_stacks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = diagnosis_stacks.doing
    asked: list[int] = []

    def counted(stacks: ProcessStacks, *earlier: ProcessStacks | None, kernel: str | None = None) -> Doing:
        asked.append(stacks.pid)
        return read(stacks, *earlier, kernel=kernel)

    monkeypatch.setattr(diagnosis_stacks, "doing", counted)
    found = diagnose(synthetic.evidence("stacks", 64, synthetic.SPARSE))
    assert blamed(found) == [synthetic.culprit(64)]
    assert sorted(asked) == [1000 + rank for rank in range(64)]


def tables_of(evidence: Evidence) -> list[int]:
    """By rank, which table of decisions it has: as many numbers as there are tables."""
    case = Case.of(evidence)
    return [id(case.decisions(rank)) for rank in range(evidence.world)]


def test_ranks_that_wrote_the_same_share_one_table() -> None:
    tables = tables_of(synthetic.evidence("skipped", 64, synthetic.SPARSE))
    assert len(set(tables)) == 64 // synthetic.ATTENTION
    assert all(tables[rank] == tables[rank // 8 * 8] for rank in range(64))


def test_a_rank_that_wrote_otherwise_has_a_table_of_its_own() -> None:
    tables = tables_of(synthetic.evidence("divergence", 64, synthetic.SPARSE))
    odd = synthetic.culprit(64)
    assert tables.count(tables[odd]) == 1
    assert len(set(tables)) == 64 // synthetic.ATTENTION + 1


class Steps(dict[str, object]):
    """A record that counts how often it is asked for a field."""

    asked = 0

    def get(self, key: str, default: object = None) -> object:
        Steps.asked += 1
        return super().get(key, default)


def fields_asked(world: int) -> int:
    """Of all records, by a whole diagnosis."""
    evidence = synthetic.evidence("skipped", world, synthetic.SPARSE)
    decisions = {rank: tuple(map(Steps, records)) for rank, records in evidence.decisions.items()}
    Steps.asked = 0
    assert blamed(diagnose(replace(evidence, decisions=decisions))) == [synthetic.culprit(world)]
    return Steps.asked


def test_how_often_records_are_looked_into_grows_with_the_ranks() -> None:
    few, many = fields_asked(64), fields_asked(256)
    assert few > 0
    assert many <= 4 * few


def test_the_agreed_counts_are_held_against_rows_once_however_many_departed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    fits = diagnosis_plans._fits

    def counted(record: Mapping[str, Any], brought: CollectiveRecord) -> bool | None:
        asked.append(brought.sequence)
        return fits(record, brought)

    monkeypatch.setattr(diagnosis_plans, "_fits", counted)
    kept = synthetic.Detail(operations=2, collectives=8, decisions=4, every=50)
    numbers = []
    for world in (16, 64):
        asked.clear()
        found = diagnose(synthetic.evidence("mismatch", world, kept))
        assert (found.mechanism, blamed(found)) == ("collective-mismatch", [synthetic.culprit(world)])
        numbers.append(len(asked))
    assert 0 < numbers[1] <= 4 * numbers[0]
