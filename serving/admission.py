"""How much of the KV pool admission leaves to the requests that are already in.

Here: one number and when it moves. Not here: who is admitted (``scheduler.py``). Rule and defaults are
SGLang's: requests seldom use all the tokens they may, so admission counts only a share of what they may still
use. The share falls while all goes well, which admits more; a retraction shows that it was too low.
"""

from __future__ import annotations

from collections.abc import Collection

from serving.requests import Request

HEADROOM_TOKENS = 20
"""Tokens beyond those decoded that each kept request is given when a retraction sets the share anew."""


class AdmissionRatio:
    """The share, ``value``, between 0 and 1. ``decay_steps``: decode steps that the whole fall takes."""

    def __init__(self, initial: float, floor_factor: float, decay_steps: int) -> None:
        self.initial = initial
        self.floor = initial * floor_factor
        self.value = initial
        self._decay = (self.initial - self.floor) / decay_steps

    def step(self, running: Collection[Request], *, decoded: bool, retracted: bool) -> None:
        """After each step that was not a prefill; ``running`` are the requests kept."""
        if retracted and running:
            expected = sum(len(request.output) + HEADROOM_TOKENS for request in running)
            allowed = sum(request.max_new_tokens for request in running)
            self.value = min(1.0, max(self.value, expected / allowed))
        elif decoded:
            self.value = max(self.floor, self.value - self._decay)
        elif not running:
            self.value = self.initial
