"""A foreign engine's metrics in our words: what runs, what was retracted, what was not given back.

Not here: the engines' names for them (the dialects' ``samples``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving.targets.dialect import Count, Dialect

_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Metrics:
    """``values``: added up over all labels. ``by_rank``: by data-parallel rank, where a label tells. ``samples``:
    the engine's own names for them. A word is missing where the engine does not count it."""

    values: Mapping[Count, float] = field(default_factory=dict)
    by_rank: Mapping[Count, Mapping[int, float]] = field(default_factory=dict)
    samples: Mapping[str, float] = field(default_factory=dict)

    def since(self, before: Metrics, word: Count) -> int:
        """How much was counted between ``before`` and this."""
        return max(0, round(self.values.get(word, 0.0) - before.values.get(word, 0.0)))


def read_metrics(base_url: str, dialect: Dialect) -> Metrics:
    """Empty where the engine has none, does not answer, or answers what is no metrics."""
    call = dialect.metrics
    if call is None:
        return Metrics()
    try:
        response = httpx.request(
            call.method,
            base_url + call.path,
            headers=dict(call.headers),
            timeout=_DEADLINE_S,
            trust_env=False,
        )
        if response.status_code != 200:
            return Metrics()
        return parse(response.text, dialect)
    except (httpx.HTTPError, ValueError):
        return Metrics()


def parse(text: str, dialect: Dialect) -> Metrics:
    """Raises ValueError for what is no metrics."""
    totals: dict[str, float] = {}
    ranks: dict[str, dict[int, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            rank = sample.labels.get(dialect.rank_label, "")
            if rank.isdecimal():
                one = ranks.setdefault(sample.name, {})
                one[int(rank)] = one.get(int(rank), 0.0) + sample.value
    names: dict[Count, str] = {
        word: name
        for word, candidates in dialect.samples.items()
        if (name := next((name for name in candidates if name in totals), None)) is not None
    }
    return Metrics(
        values={word: totals[name] for word, name in names.items()},
        by_rank={word: ranks.get(name, {}) for word, name in names.items()},
        samples={name: totals[name] for name in sorted(names.values())},
    )
