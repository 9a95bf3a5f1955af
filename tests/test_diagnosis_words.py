"""Facts of many ranks told once, and of few as they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.diagnosis_model import Fact, Missing
from harness.diagnosis_words import fold, fold_missing
from harness.seats import numbers_words, seats_words


def facts(*texts: str) -> list[Fact]:
    return [Fact(text, f"ledger/{number}") for number, text in enumerate(texts)]


def told(given: list[Fact]) -> list[str]:
    return [fact.fact for fact in fold(given)]


def test_ranges_from_nine_ranks_on() -> None:
    assert seats_words([2, 0, 1]) == "ranks 0, 1, 2"
    assert seats_words(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert seats_words(range(9)) == "ranks 0-8"
    assert numbers_words([*range(17), *range(18, 4096)]) == "0-16, 18-4095"
    assert (
        seats_words([*range(0, 20, 2), "controller"])
        == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and controller"
    )


def test_facts_of_eight_ranks_stay_as_they_are() -> None:
    few = facts(*(f"rank {rank} is in all_gather 5 of group experts and waits" for rank in range(8)))
    assert fold(few) == tuple(few)


def test_what_nine_ranks_do_alike_is_one_fact_where_the_first_stood() -> None:
    given = facts(
        "captured", *(f"rank {rank} is in all_gather 5 and waits" for rank in range(9)), "rank 9 is not"
    )
    assert told(given) == ["captured", "each of 9 ranks (0-8) is in all_gather 5 and waits", "rank 9 is not"]
    assert fold(given)[1].evidence == "ledger/1"


def test_times_and_process_ids_become_ranges() -> None:
    stands = facts(*(f"rank {r}: (pid {100 + r}) stands since {r}.50 s, at x.py:7" for r in range(12)))
    assert told(stands) == [
        "each of 12 ranks (0-11): (pid 100 to 111) stands since 0.50 to 11.50 s, at x.py:7"
    ]


def test_the_odd_rank_is_told_apart() -> None:
    given = facts(*(f"rank {r}: at step 5, tokens is {[4, 4] if r != 17 else [4, 5]}" for r in range(100)))
    assert told(given) == [
        "each of 99 ranks (0-16, 18-99): at step 5, tokens is [4, 4]",
        "rank 17: at step 5, tokens is [4, 5]",
    ]


def test_of_many_variants_the_commonest_and_the_rarest_are_told_and_the_others_become_one() -> None:
    given = facts(*(f"rank {r}: has enqueued {r // 8 if r < 800 else 7000} operations" for r in range(2000)))
    assert len(told(given)) <= 9
    assert told(given)[-1] == "each of 1,200 ranks (800-1999): has enqueued 7000 operations"
    assert told(given)[0] == "each of 800 ranks (0-799): has enqueued 0 to 99 operations"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.sampled_from("ab")), max_size=200))
def test_no_rank_is_forgotten_and_the_bound_holds(found: list[tuple[int, int, str]]) -> None:
    given = facts(*(f"rank {rank}: {word} {number}" for rank, number, word in found))
    after = told(given)
    assert len(after) <= 2 * 9
    if len(given) < 9:
        assert after == [fact.fact for fact in given]
    said: set[int] = set()
    for text in after:
        if text.startswith("each of "):
            for part in text.partition("(")[2].partition(")")[0].split(", "):
                first, _, last = part.partition("-")
                said |= set(range(int(first), int(last or first) + 1))
        else:
            said.add(int(text.split()[1].rstrip(":")))
    assert said == {rank for rank, _, _ in found}


def test_missing_pieces_of_many_ranks_are_one() -> None:
    pieces = [
        Missing("a second sample", "the capture has 1"),
        *(Missing(f"evidence/sample-0/ledger/rank{rank}.json", "not in the capture") for rank in range(20)),
        *(
            Missing(f"evidence/sample-0/processes.json: rank {rank}", "not in the capture")
            for rank in range(20)
        ),
        Missing("evidence/sample-0/ledger/rank20.json", "the process is gone"),
        Missing("evidence/sample-0/ledger/rank3.json", "said twice"),
    ]
    assert [(piece.what, piece.why) for piece in fold_missing(pieces)] == [
        ("a second sample", "the capture has 1"),
        ("evidence/sample-0/ledger/rank*.json of ranks 0-19", "not in the capture"),
        ("evidence/sample-0/processes.json: ranks 0-19", "not in the capture"),
        ("evidence/sample-0/ledger/rank20.json", "the process is gone"),
    ]
