"""Whose copies spoiled the tokens: what the witnesses recorded, and what the tokens alone can tell."""

from __future__ import annotations

from typing import Any

from harness.diagnosis_corruption import Differing, after_wrong_copies, copy_facts, corruption
from harness.diagnosis_model import Cause, Fact


def wrong(step: int, path: str = "metadata_copy", stream: str = "compute") -> dict[str, Any]:
    return {"path": path, "step": step, "stream": stream, "elements": 3, "of": 20}


def recorded(*copies: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return ({"step": 1, "mode": "decode"}, *({"step": copy["step"] + 1, "copies": [copy]} for copy in copies))


def words(facts: tuple[Fact, ...]) -> str:
    return "\n".join(fact.fact for fact in facts)


def test_the_rank_whose_copies_were_wrong_before_the_tokens_is_proven() -> None:
    differing = [Differing("r1", 4, (1,), 9), Differing("r0", 6, (0,), 11)]
    found = corruption({0: recorded(), 1: recorded(wrong(8), wrong(9, "bitmask_copy"))}, differing, (0, 1))
    assert (found.kind, found.mechanism, found.ranks) == ("none", "stream-order", (1,))
    assert (found.stream, found.confidence) == ("compute", "proven")
    said = words(found.facts)
    assert "rank 1: the metadata_copy of step 8, on compute, brought 3 of 20 values other than" in said
    assert "the first of 2 such copies (metadata_copy 1, bitmask_copy 1)" in said
    assert "request r1 of rank 1 differs from token 4 on, put out in step 9" in said
    assert found.facts[0].evidence == "decisions/rank1.jsonl"


def test_every_rank_that_recorded_a_wrong_copy_has_the_defect() -> None:
    differing = [Differing("r1", 4, (1,), 9)]
    found = corruption({0: recorded(wrong(30)), 1: recorded(wrong(8, stream="copy"))}, differing, (0, 1))
    assert (found.ranks, found.stream) == ((0, 1), "copy")
    assert found.facts[0].fact.startswith("rank 1: "), "the first one first"


def test_wrong_tokens_from_before_the_first_wrong_copy_are_not_explained_by_it() -> None:
    found = corruption({1: recorded(wrong(8))}, [Differing("r1", 0, (1,), 3)], (0, 1))
    assert (found.mechanism, found.ranks, found.confidence) == ("stream-order", (1,), "supported")


def test_without_a_record_the_tokens_suspect_a_rank_only_when_all_wrong_requests_are_its_own() -> None:
    mine = [Differing("r1", 4, (1,), 9), Differing("r3", 2, (1,), 12)]
    found = corruption({0: recorded(), 1: recorded()}, mine, (0, 1))
    assert (found.mechanism, found.ranks, found.confidence) == ("unknown", (1,), "suspected")
    assert "all requests of rank 0 are right" in words(found.facts)
    everywhere = [*mine, Differing("r0", 4, (0,), 20)]
    assert corruption({}, everywhere, (0, 1)).ranks == ()
    assert corruption({}, [Differing("r1", 4, (2, 3), 9)], (0, 1, 2, 3)).ranks == (), "a group of two"
    assert corruption({}, [Differing("r1", 4, (), None)], ()).ranks == (), "nobody knows who served it"


def test_a_device_that_failed_after_wrong_copies_failed_of_them() -> None:
    raised = Cause(
        "hang", "rank-dead", (1,), (Fact("rank 1 raised DeviceError: index", "history.json"),), "proven"
    )
    found = after_wrong_copies(raised, {1: recorded(wrong(8))})
    assert (found.mechanism, found.ranks, found.stream) == ("stream-order", (1,), "compute")
    assert [fact.fact[:10] for fact in found.facts] == ["rank 1: th", "rank 1 rai"]
    assert after_wrong_copies(raised, {0: recorded(wrong(8)), 1: recorded()}) is raised, (
        "another rank's copies"
    )


def test_healthy_ranks_record_nothing() -> None:
    assert copy_facts({0: recorded(), 1: recorded()}) == []
