"""Which trial of a stored run is meant: the one that was named, else the first that did not pass, else the first
hang, else the first. Pure; the documents are the caller's, and may be damaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.checkers import HANGS
from harness.request import BadRequest


def choose_trial(
    run: object, ids: Sequence[str], judged: Iterable[Mapping[str, Any]], named: str | None
) -> str:
    """``ids``: the run's trials in order; ``judged``: their trial.json. ``run`` is named in the message. Raises
    BadRequest."""
    if named is None:
        documents = list(judged)
        bad = {one.get("id") for one in documents if one.get("verdict") not in ("pass", "skipped")}
        hung = {one.get("id") for one in documents if one.get("outcome") in HANGS}
        order = [one for one in ids if one in bad] or [one for one in ids if one in hung] or list(ids)
        if not order:
            raise BadRequest(f"{run} has no trials; run the scenario anew")
        return order[0]
    if named not in ids:
        known = "\n  ".join(ids)
        raise BadRequest(f"{run} has no trial {named!r}; it has:\n  {known}")
    return named
