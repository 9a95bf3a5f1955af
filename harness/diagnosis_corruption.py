"""Wrong tokens although nothing stopped: which rank's copies brought something else than they were to bring. Pure.

An engine with a copy witness records, in its decisions, each copy that did not bring what its source held. No other
rank can cause that, so every rank that recorded one has the defect. Without such a record the tokens are all there
is: they tell the rank when all wrong requests are served by some of the ranks, and never the mechanism.

Not here: a hang, which keeps its own diagnosis (``diagnose.py``; ``copy_facts`` are added to its proof), and the
comparison of tokens (``checkers.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.diagnosis_model import Cause, Fact, stream_name
from harness.seats import seats_words

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Differing:
    """A request whose tokens differ from the reference, first at ``position`` of its output. ``ranks`` served it,
    and put that token out in ``step``; None where they put out none."""

    request: str
    position: int
    ranks: tuple[int, ...]
    step: int | None


@dataclass(frozen=True, slots=True)
class _Wrong:
    """What the witness of one rank recorded, in the order of the steps."""

    rank: int
    copies: tuple[Mapping[str, Any], ...]

    @property
    def first(self) -> Mapping[str, Any]:
        return self.copies[0]


def corruption(
    decisions: Mapping[int, Sequence[Mapping[str, Any]]],
    differing: Sequence[Differing],
    serving: Iterable[int],
) -> Cause:
    """``decisions`` by rank; ``serving``: the ranks that put out any token."""
    spoke = _recorded(decisions)
    facts = [*copy_facts(decisions), *_token_facts(differing)]
    if not spoke:
        return _by_tokens(facts, differing, frozenset(serving))
    first = min((wrong.first for wrong in spoke), key=lambda copy: int(copy["step"]))
    # A wrong copy spoils the other ranks' tokens too: they pass through its experts.
    explained = all(one.step is None or int(first["step"]) <= one.step for one in differing)
    return Cause(
        kind="none",
        mechanism="stream-order",
        ranks=tuple(wrong.rank for wrong in spoke),
        facts=tuple(facts),
        confidence="proven" if explained and differing else "supported",
        stream=stream_name(str(first["stream"])),
        family=str(first["path"]),
    )


def after_wrong_copies(cause: Cause, decisions: Mapping[int, Sequence[Mapping[str, Any]]]) -> Cause:
    """A rank whose device failed after it had recorded wrong copies: what it computed with is nearer to the cause
    than what it raised."""
    spoke = {wrong.rank: wrong for wrong in _recorded(decisions)}
    if cause.mechanism != "rank-dead" or not cause.ranks or not all(rank in spoke for rank in cause.ranks):
        return cause
    first = spoke[min(rank for rank in cause.ranks if isinstance(rank, int))].first
    return replace(
        cause,
        mechanism="stream-order",
        facts=(*copy_facts(decisions), *cause.facts),
        confidence="supported",
        stream=stream_name(str(first["stream"])),
        family=str(first["path"]),
    )


def copy_facts(decisions: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Fact]:
    """What the witnesses recorded, the first rank first."""
    facts = []
    for wrong in sorted(_recorded(decisions), key=lambda one: (int(one.first["step"]), one.rank)):
        first, count = wrong.first, len(wrong.copies)
        paths = Counter(str(copy["path"]) for copy in wrong.copies)
        others = ", ".join(f"{path} {times}" for path, times in paths.most_common())
        facts.append(
            Fact(
                f"rank {wrong.rank}: the {first['path']} of step {first['step']}, on {first['stream']}, brought "
                f"{first['elements']} of {first['of']} values other than its source held when it was enqueued"
                + (f"; it was the first of {count} such copies ({others})" if count > 1 else ""),
                _path(wrong.rank),
            )
        )
    return facts


def _recorded(decisions: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[_Wrong]:
    found = []
    copies_of: dict[int, list[Mapping[str, Any]]] = {}
    """By identity of the records: thousands of ranks may share them."""
    for rank, records in sorted(decisions.items()):
        if id(records) not in copies_of:
            copies_of[id(records)] = [copy for record in records for copy in record.get("copies", ())]
        copies = copies_of[id(records)]
        if copies:
            found.append(_Wrong(rank, tuple(sorted(copies, key=lambda copy: int(copy["step"])))))
    return found


def _by_tokens(facts: list[Fact], differing: Sequence[Differing], serving: frozenset[int]) -> Cause:
    """Each request is served by the ranks of one attention group. Two such ranks cannot be told apart, where every
    rank has wrong requests the tokens single out none, and a rank may be wrong through the experts of another: so
    this suspects at most."""
    ranks = {rank for one in differing for rank in one.ranks}
    apart = all(len(one.ranks) == 1 for one in differing)
    named = tuple(sorted(ranks)) if apart and ranks and ranks < serving else ()
    if named:
        others = tuple(sorted(serving - ranks))
        facts = [*facts, Fact(f"all requests of {seats_words(others)} are right", "tokens.json")]
    return Cause("none", "unknown", named, tuple(facts), "suspected")


def _token_facts(differing: Sequence[Differing]) -> list[Fact]:
    def when(one: Differing) -> tuple[bool, int, str]:
        return one.step is None, one.step or 0, one.request

    found = sorted(differing, key=when)
    facts = []
    for one in found[:_SHOWN]:
        step = "" if one.step is None else f", put out in step {one.step}"
        of = f" of {seats_words(one.ranks)}" if one.ranks else ""
        facts.append(
            Fact(f"request {one.request}{of} differs from token {one.position} on{step}", "tokens.json")
        )
    by_rank = Counter(rank for one in found for rank in one.ranks)
    if len(found) > 1:
        each = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(by_rank.items()))
        facts.append(Fact(f"{len(found)} requests differ{f' ({each})' if each else ''}", "tokens.json"))
    return facts


def _path(rank: int) -> str:
    return f"decisions/rank{rank}.jsonl"
