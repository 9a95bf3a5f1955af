"""What many ranks do alike, told once: facts of one rank each, folded into one of all of them. Pure.

Rules give one fact a rank and need not care how many ranks there are; a proof of thousands of lines helps nobody.
Facts of a few ranks stay as they are. Times and process ids always differ and become ranges; facts that differ in
another number are told apart, the rarest first, because the odd rank is often the culprit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from harness.diagnosis_model import Fact, Missing
from harness.seats import MANY, numbers_words

_OF_A_RANK = re.compile(r"rank (\d+)(?=:? .)")
_LOOSE = re.compile(r"(?<=\(pid )\d+(?=\))|\b\d+\.\d+(?= s\b)")
"""Process ids and times."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OF_A_FILE = re.compile(r"(.*/rank)(\d+)(\.[\w.]+)|(.*: rank )(\d+)()")
_KEPT = 8
"""Of facts that differ in their numbers only, at most so many are told; the others become one, with ranges."""

_Words: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class _Variant:
    """Facts that say the same, by their places in the argument. ``words`` stand between the ``loose`` numbers."""

    words: _Words
    places: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    loose: list[_Words] = field(default_factory=list)

    @property
    def told(self) -> int:
        """Facts that tell it."""
        return len(self.places) if len(self.places) < MANY else 1

    def text(self) -> str:
        spans = [_span(values) for values in zip(*self.loose, strict=True)]
        return _between(self.words, spans)


def fold(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """The facts in their order, what nine ranks or more have in common as one, where the first of them stood."""
    variants: dict[_Words, _Variant] = {}
    for place, fact in enumerate(facts if len(facts) >= MANY else ()):
        of = _OF_A_RANK.match(fact.fact)
        if of is not None:
            rest = fact.fact[of.end() :]
            words = tuple(_LOOSE.split(rest))
            variant = variants.setdefault(words, _Variant(words))
            variant.places.append(place)
            variant.ranks.append(int(of[1]))
            variant.loose.append(tuple(_LOOSE.findall(rest)))
    families: dict[_Words, list[_Variant]] = {}
    for words, variant in variants.items():
        families.setdefault(tuple(_NUMBER.sub("0", part) for part in words), []).append(variant)
    instead: dict[int, Fact | None] = {}
    for family in families.values():
        _fold_family(family, facts, instead)
    return tuple(said for place, fact in enumerate(facts) if (said := instead.get(place, fact)) is not None)


def fold_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """The same for facts that point at no evidence."""
    return (
        tuple(fact.fact for fact in fold([Fact(text, "") for text in texts]))
        if len(texts) >= MANY
        else tuple(texts)
    )


def _fold_family(family: Sequence[_Variant], facts: Sequence[Fact], instead: dict[int, Fact | None]) -> None:
    rarest_first = sorted(family, key=lambda variant: len(variant.places))
    told = 0
    rest: list[_Variant] = []
    few = sum(len(variant.places) for variant in family) < MANY
    for variant in (rarest_first[-1], *rarest_first[:-1]):
        if not few and told + variant.told > _KEPT:
            rest.append(variant)
            continue
        told += variant.told
        if len(variant.places) >= MANY:
            _put([variant], variant.text(), facts, instead)
    if rest:
        _put(rest, _text_of_all(rest), facts, instead)


def _put(
    variants: Sequence[_Variant], text: str, facts: Sequence[Fact], instead: dict[int, Fact | None]
) -> None:
    """One fact in the place of all of theirs."""
    places = [place for variant in variants for place in variant.places]
    ranks = {rank for variant in variants for rank in variant.ranks}
    first = min(places)
    instead.update(dict.fromkeys(places))
    instead[first] = Fact(
        f"each of {len(ranks):,} ranks ({numbers_words(sorted(ranks))}){text}", facts[first].evidence
    )


def _text_of_all(variants: Sequence[_Variant]) -> str:
    """Numbers in which the variants differ as ranges."""
    texts = [variant.text() for variant in variants]
    numbers = [_NUMBER.findall(text) for text in texts]
    if len({len(found) for found in numbers}) > 1:  # one of them has a range already, where another has none
        return texts[0]
    return _between(_NUMBER.split(texts[0]), [_span(values) for values in zip(*numbers, strict=True)])


def _between(words: Sequence[str], values: Sequence[str]) -> str:
    return words[0] + "".join(value + part for value, part in zip(values, words[1:], strict=True))


def _span(values: Iterable[str]) -> str:
    different = sorted(set(values), key=float)
    return different[0] if len(different) == 1 else f"{different[0]} to {different[-1]}"


def fold_missing(pieces: Sequence[Missing]) -> tuple[Missing, ...]:
    """Each piece once; the same file of nine ranks or more, missing for the same reason, as one piece."""
    first: dict[str, Missing] = {}
    for piece in pieces:
        first.setdefault(piece.what, piece)
    alike: dict[tuple[str, str, str, bool], list[tuple[str, int]]] = {}
    for what, piece in first.items():
        of = _OF_A_FILE.fullmatch(what)
        if of is not None:
            before, rank, after = of[1] or of[4], int(of[2] or of[5]), of[3] or ""
            key = (before, after, piece.why, piece.impossible)
            alike.setdefault(key, []).append((what, rank))
    instead: dict[str, Missing | None] = {}
    for (before, after, why, impossible), found in alike.items():
        if len(found) >= MANY:
            instead.update((what, None) for what, _ in found)
            ranks = numbers_words(rank for _, rank in found)
            whole = f"{before}*{after} of ranks {ranks}" if after else f"{before.removesuffix(' ')}s {ranks}"
            instead[found[0][0]] = Missing(whole, why, impossible)
    told = (instead.get(what, piece) for what, piece in first.items())
    return tuple(one for one in told if one is not None)
