"""Grammars, bitmasks and greedy sampling."""

from __future__ import annotations

import pytest
import torch

from serving.sampling import GRAMMARS, STOP_TOKEN, GrammarError, Grammars, sample, vocabulary

VOCAB = 100
TEXT = vocabulary(VOCAB)


def token(text: str) -> int:
    return TEXT.index(text)


def mask_of(grammars: Grammars, *request_ids: str) -> torch.Tensor:
    mask_SW = torch.zeros((len(request_ids), grammars.words()), dtype=torch.int32)
    grammars.fill(mask_SW, request_ids)
    return mask_SW


def allowed(grammars: Grammars, request_id: str) -> set[str]:
    """Texts that the mask lets through, found by sampling until nothing is left."""
    mask_SW = mask_of(grammars, request_id)
    found: set[str] = set()
    logits_SV = torch.zeros((1, VOCAB))
    for index in range(VOCAB):
        logits_SV.fill_(-1.0)
        logits_SV[0, index] = 1.0
        if int(sample(logits_SV.clone(), mask_SW)) == index:
            found.add(TEXT[index])
    return found


def test_without_a_mask_the_largest_logit_wins() -> None:
    logits_SV = torch.tensor([[0.1, 3.0, 2.0], [5.0, 1.0, 2.0]])
    assert sample(logits_SV, None).tolist() == [1, 0]


def test_a_mask_keeps_a_request_to_its_grammar_whatever_the_logits() -> None:
    grammars = Grammars(VOCAB)
    grammars.start("d", "digits")
    logits_SV = torch.zeros((1, VOCAB))
    logits_SV[0, token("z")] = 9.0
    logits_SV[0, token("7")] = 1.0
    assert sample(logits_SV, mask_of(grammars, "d")).tolist() == [token("7")]
    assert allowed(grammars, "d") == set("0123456789")


def test_the_mask_follows_the_tokens_that_were_accepted() -> None:
    grammars = Grammars(VOCAB)
    grammars.start("l", "list")
    assert allowed(grammars, "l") == {"["}
    assert not grammars.accept("l", token("["))
    assert not grammars.accept("l", token("q"))
    assert {",", "]", "q", "5"} <= allowed(grammars, "l")
    assert not {"[", ".", TEXT[STOP_TOKEN]} & allowed(grammars, "l")


def test_a_request_ends_when_its_grammar_is_complete() -> None:
    grammars = Grammars(VOCAB)
    grammars.start("t", "date")
    assert not any(grammars.accept("t", token(character)) for character in "1999-12-31")
    assert allowed(grammars, "t") == {TEXT[STOP_TOKEN]}
    assert grammars.accept("t", STOP_TOKEN)
    assert allowed(grammars, "t") == set(TEXT), "what comes after the end is dropped and must not be masked"


def test_a_token_that_breaks_the_grammar_ends_the_request() -> None:
    grammars = Grammars(VOCAB)
    grammars.start("d", "digits")
    assert grammars.accept("d", token("a"))


def test_rows_without_a_grammar_are_not_masked() -> None:
    grammars = Grammars(VOCAB)
    grammars.start("d", "digits")
    mask_SW = mask_of(grammars, "free", "d", "other")
    assert mask_SW[0].eq(-1).all() and mask_SW[2].eq(-1).all()
    assert not mask_SW[1].eq(-1).all()
    assert not grammars.accept("free", token("a"))


def test_a_forgotten_request_has_no_grammar_any_more() -> None:
    grammars = Grammars(VOCAB)
    grammars.start("d", "digits")
    assert grammars.constrained("d")
    grammars.forget("d")
    grammars.forget("d")
    assert not grammars.constrained("d")
    assert mask_of(grammars, "d").eq(-1).all()


def test_two_requests_of_one_grammar_are_apart() -> None:
    grammars = Grammars(VOCAB)
    for name in ("a", "b"):
        grammars.start(name, "list")
    grammars.accept("a", token("["))
    assert allowed(grammars, "b") == {"["} != allowed(grammars, "a")


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_every_grammar_can_begin(grammar: str) -> None:
    grammars = Grammars(VOCAB)
    grammars.start("r", grammar)
    assert 0 < len(allowed(grammars, "r")) < VOCAB


def test_an_unknown_grammar_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="no grammar 'verse'; allowed: digits, list, date"):
        Grammars(VOCAB).start("r7", "verse")


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    grammars = Grammars(40)
    with pytest.raises(GrammarError, match="vocab_size 40: grammars need at least 48"):
        grammars.start("d", "digits")
    assert len(vocabulary(48)) == 48


@pytest.mark.parametrize(("size", "words"), [(64, 2), (65, 3), (512, 16)])
def test_a_row_has_a_bit_for_each_token(size: int, words: int) -> None:
    assert Grammars(size).words() == words
