"""From logits to next tokens: the grammar bitmask on its way in, the sampled tokens on their way out.

Grammar-constrained requests are masked with xgrammar's bitmask, filled on the host from the tokens the request
has so far and copied to the device in every step (path ``bitmask_copy``). So the mask of step n needs the token
of step n-1, while the forward pass of step n does not: that is why the host builds it after the launch.
Sampling is greedy. The tokens stay on the device for the next step and go to the host on ``copy``
(path ``next_token_copy``).

Not here: which rows of a batch sample (``engine.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import xgrammar as xgr

GRAMMARS = {
    "digits": "root ::= [0-9]+",
    "list": 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z] [a-z0-9]*',
    "date": 'root ::= [0-9] [0-9] [0-9] [0-9] "-" [0-9] [0-9] "-" [0-9] [0-9]',
}
"""Grammars that requests may name, in xgrammar's EBNF."""

STOP_TOKEN = 0
_CHARACTERS = '0123456789abcdefghijklmnopqrstuvwxyz{}[]":,-_. '


class GrammarError(ValueError):
    """A request names a grammar that does not exist, or a vocabulary is too small for it."""


def vocabulary(size: int) -> list[str]:
    """The text of each token of a model that has no tokenizer: a stop token, single characters, fillers."""
    if size < len(_CHARACTERS) + 1:
        raise GrammarError(f"vocab_size {size}: grammars need at least {len(_CHARACTERS) + 1} tokens")
    fillers = [f"<{index}>" for index in range(len(_CHARACTERS) + 1, size)]
    return ["</s>", *_CHARACTERS, *fillers]


def grammar_text(name: str) -> str:
    """The grammar of that name. Raises GrammarError."""
    if name not in GRAMMARS:
        raise GrammarError(f"there is no grammar {name!r}; allowed: {', '.join(GRAMMARS)}")
    return GRAMMARS[name]


@lru_cache(maxsize=4)
def _compiler(vocab_size: int) -> xgr.GrammarCompiler:
    info = xgr.TokenizerInfo(
        vocabulary(vocab_size),
        vocab_type=xgr.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=[STOP_TOKEN],
    )
    return xgr.GrammarCompiler(info, max_threads=1)


class Grammars:
    """The matchers of this rank's requests. A matcher follows the tokens that were committed."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._matchers: dict[str, xgr.GrammarMatcher] = {}

    def start(self, request_id: str, grammar: str) -> None:
        compiled = _compiler(self.vocab_size).compile_grammar(grammar_text(grammar))
        self._matchers[request_id] = xgr.GrammarMatcher(compiled)

    def constrained(self, request_id: str) -> bool:
        return request_id in self._matchers

    def words(self) -> int:
        """int32 words of one row of a bitmask."""
        return -(-self.vocab_size // 32)

    def fill(self, mask_SW: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Row i allows what request i may continue with; all bits set where it has no grammar."""
        mask_SW.fill_(-1)
        for row, request_id in enumerate(request_ids):
            matcher = self._matchers.get(request_id)
            if matcher is not None and not matcher.is_terminated():
                matcher.fill_next_token_bitmask(mask_SW, row)

    def accept(self, request_id: str, token: int) -> bool:
        """Advances the matcher. True when the request is at its end: complete, or the token broke the grammar
        (which a correct mask rules out)."""
        matcher = self._matchers.get(request_id)
        if matcher is None:
            return False
        return not matcher.accept_token(token) or bool(matcher.is_terminated())

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)


def sample(logits_SV: torch.Tensor, mask_SW: torch.Tensor | None) -> torch.Tensor:
    """Greedy next tokens (S,) int64. ``mask_SW`` is int32, one bit a token, or None."""
    if mask_SW is not None:
        xgr.apply_token_bitmask_inplace(logits_SV, mask_SW)
    return logits_SV.argmax(dim=-1)
