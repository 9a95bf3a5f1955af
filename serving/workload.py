"""What is asked of the engine and when: seeded request generators, one class of parameters a kind.

Here: prompts, lengths, arrival steps, and which rank gets what. Not here: scheduling, and scenario files,
whose workload tables have these classes' fields. A seed and a vocabulary fix every request; the number of
ranks only decides where each one goes, so the same requests can be compared over world sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from serving.requests import Request

Span = tuple[int, int]
"""Lowest and highest value, both possible, all equally likely."""

FIRST_TOKEN = 1
"""Lowest token id in a prompt; 0 is the stop token of grammars."""

_PREFILL_TOKENS_A_STEP = 64
"""Prompt tokens that one step computes at the least, for the estimate of how many steps a burst takes."""


class WorkloadError(ValueError):
    """A kind that does not exist, or a parameter out of range."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as a client sends it. Sampling is greedy (temperature 0), and no end-of-sequence token ends the
    output, so that a seed fixes lengths as far as no grammar does."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    grammar: str | None = None
    """Name of a grammar that the output is held to."""
    rank: int | None = None
    """The rank it is pinned to, modulo the number of ranks; None is dealt out in turn."""

    def request(self) -> Request:
        """A new request for a scheduler."""
        return Request(self.id, self.prompt, self.max_new_tokens, self.grammar)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the engine step before which it arrives."""

    step: int
    request: RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Prompts are the paths from the root of a random tree; all arrive at once.

    The workload of SGLang's retraction test (HANGS.md), 401 requests there: each node hangs below any earlier
    one and adds a run of tokens, so prompts share prefixes of many lengths.
    """

    kind: ClassVar[str] = "prefix_tree"
    requests: int = 64
    root_tokens: int = 117
    """Tokens that every prompt begins with; the root itself is a request."""
    child_tokens: Span = (0, 256)
    """Tokens that each further node adds."""
    decode_tokens: Span = (0, 256)
    """Tokens that a request generates; 0 counts as 1."""
    grammar_share: float = 0.0
    """Share of the requests that name a grammar."""
    grammar: str = "digits"
    rank: int | None = None
    """The rank that gets all requests; None deals them out."""

    def __post_init__(self) -> None:
        _check(self, {"requests": 1, "root_tokens": 1, "child_tokens": 0, "decode_tokens": 0})

    def arrivals(self, dice: Dice) -> list[Arrival]:
        prompts = [dice.tokens(self.root_tokens)]
        while len(prompts) < self.requests:
            parent = dice.shape.choice(prompts)
            prompts.append(parent + dice.tokens(dice.between(self.child_tokens)))
        return [Arrival(0, dice.spec(self, prompt)) for prompt in prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Groups of requests that arrive at once, with idle gaps between them, and one long prompt.

    What the reporters of a stalled symmetric pool used (HANGS.md, F1).
    """

    kind: ClassVar[str] = "bursts"
    bursts: int = 4
    requests_per_burst: int = 8
    gap_steps: int = 30
    """Idle steps at the least between the end of a burst, estimated as if nothing were retracted, and the
    next one."""
    prompt_tokens: Span = (16, 128)
    decode_tokens: Span = (4, 32)
    long_prompt_tokens: int = 0
    """Length of one more request's prompt, in the middle burst and on rank 0, or on ``rank``; 0 for none."""
    grammar_share: float = 0.0
    grammar: str = "digits"
    rank: int | None = None
    """The rank that gets all requests; None deals them out."""

    def __post_init__(self) -> None:
        least = {"bursts": 1, "requests_per_burst": 1, "gap_steps": 0, "prompt_tokens": 1}
        _check(self, least | {"decode_tokens": 0, "long_prompt_tokens": 0})

    def arrivals(self, dice: Dice) -> list[Arrival]:
        arrivals: list[Arrival] = []
        step = 0
        pinned_to = self.rank or 0
        for burst in range(self.bursts):
            lengths = [dice.between(self.prompt_tokens) for _ in range(self.requests_per_burst)]
            if self.long_prompt_tokens and burst == self.bursts // 2:
                lengths.append(self.long_prompt_tokens)
            specs = [dice.spec(self, dice.tokens(length)) for length in lengths]
            if len(specs) > self.requests_per_burst:
                specs[-1] = replace(specs[-1], rank=pinned_to)
            arrivals.extend(Arrival(step, spec) for spec in specs)
            prefills = sum(-(-length // _PREFILL_TOKENS_A_STEP) for length in lengths)
            step += prefills + max(spec.max_new_tokens for spec in specs) + self.gap_steps
        return arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternating:
    """Short prefills on one rank after the other while all ranks decode, with decode steps between them.

    The pattern of the pinned-memory hang (HANGS.md, D1): a prefill on one rank makes all ranks run one step
    without a graph update.
    """

    kind: ClassVar[str] = "alternating"
    requests: int = 16
    """All of them, the long ones included."""
    every_steps: int = 6
    """Steps between two arrivals."""
    prompt_tokens: Span = (8, 32)
    decode_tokens: Span = (8, 24)
    """Tokens that the short ones generate."""
    grammar_share: float = 0.5
    """Share of the short ones that name a grammar."""
    grammar: str = "digits"
    long_decodes: int = 4
    """The first this many requests arrive at once and decode until after the last arrival. With fewer than
    there are ranks, some rank does not decode throughout. They name no grammar: it could end them early."""
    rank: int | None = None
    """The rank that gets all requests; None deals them out."""

    def __post_init__(self) -> None:
        least = {"requests": 1, "every_steps": 1, "prompt_tokens": 1, "decode_tokens": 0, "long_decodes": 0}
        _check(self, least)

    def arrivals(self, dice: Dice) -> list[Arrival]:
        last_step = self.every_steps * max(0, self.requests - self.long_decodes)
        arrivals = []
        for index in range(self.requests):
            spec = dice.spec(self, dice.tokens(dice.between(self.prompt_tokens)))
            if index < self.long_decodes:
                decode = last_step + self.decode_tokens[1] + 1
                spec = replace(spec, max_new_tokens=decode, grammar=None)
            arrivals.append(Arrival(self.every_steps * max(0, index - self.long_decodes + 1), spec))
        return arrivals


Workload = PrefixTree | Bursts | Alternating

KINDS: Mapping[str, type[Workload]] = {kind.kind: kind for kind in (PrefixTree, Bursts, Alternating)}
"""The kinds by name."""


class Dice:
    """The random choices of one seed, in separate streams: no parameter shifts what another one draws."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.shape = random.Random(f"{seed}/shape")
        self._tokens = random.Random(f"{seed}/tokens")
        self._decode = random.Random(f"{seed}/decode")
        self._grammar = random.Random(f"{seed}/grammar")
        self._vocab_size = vocab_size
        self._made = 0

    def between(self, span: Span) -> int:
        return self.shape.randint(*span)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._tokens.randrange(FIRST_TOKEN, self._vocab_size) for _ in range(count))

    def spec(self, workload: Workload, prompt: tuple[int, ...]) -> RequestSpec:
        """The next request: numbered in order, its length and grammar drawn."""
        name = f"r{self._made:04d}"
        self._made += 1
        decode = max(1, self._decode.randint(*workload.decode_tokens))
        constrained = self._grammar.random() < workload.grammar_share
        return RequestSpec(name, prompt, decode, workload.grammar if constrained else None, workload.rank)


def workload(table: Mapping[str, Any]) -> Workload:
    """Parameters from a table with ``kind``; lists may stand for spans. Raises WorkloadError."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise WorkloadError(f"workload.kind is {kind!r}; allowed: {', '.join(KINDS)}")
    allowed = [field.name for field in fields(KINDS[kind])]
    values = {name: value for name, value in table.items() if name != "kind"}
    if unknown := sorted(set(values) - set(allowed)):
        raise WorkloadError(
            f"workload {kind} has no parameter {', '.join(unknown)}; allowed: {', '.join(allowed)}"
        )
    make: Any = KINDS[kind]
    made: Workload = make(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    return made


def generate(workload: Workload, *, seed: int, vocab_size: int) -> tuple[Arrival, ...]:
    """All requests of a trial in order of arrival. ``vocab_size``: prompts use the ids from 1 up to it."""
    if vocab_size <= FIRST_TOKEN:
        raise WorkloadError(f"vocab_size is {vocab_size}, it must be at least {FIRST_TOKEN + 1}")
    return tuple(sorted(workload.arrivals(Dice(seed, vocab_size)), key=lambda arrival: arrival.step))


def for_rank(arrivals: Sequence[Arrival], rank: int, world: int) -> tuple[Arrival, ...]:
    """One rank's share, in order: its pinned requests, and of all others each whose index falls on it."""
    if not 0 <= rank < world:
        raise WorkloadError(f"rank {rank} is not one of {world} ranks")
    return tuple(
        arrival
        for index, arrival in enumerate(arrivals)
        if (index if arrival.request.rank is None else arrival.request.rank) % world == rank
    )


def longest_context(arrivals: Iterable[Arrival]) -> int:
    """Most tokens, prompt and output, that one request may come to; 0 without requests."""
    return max((len(a.request.prompt) + a.request.max_new_tokens for a in arrivals), default=0)


def _check(workload: Workload, least: Mapping[str, int]) -> None:
    """Raises WorkloadError for a value below its least, a span upside down, or a share outside 0 to 1."""
    for name, bound in least.items():
        value = getattr(workload, name)
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and (len(value) != 2 or value[0] > value[1]):
            raise WorkloadError(f"workload {workload.kind}: {name} is {value}, give (lowest, highest)")
        if min(values) < bound:
            raise WorkloadError(f"workload {workload.kind}: {name} is {value}, the least is {bound}")
    if workload.rank is not None and workload.rank < 0:
        raise WorkloadError(f"workload {workload.kind}: rank is {workload.rank}, the least is 0")
    share = workload.grammar_share
    if not 0.0 <= share <= 1.0:
        raise WorkloadError(f"workload {workload.kind}: grammar_share is {share}, it must be from 0 to 1")
