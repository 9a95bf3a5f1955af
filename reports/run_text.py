"""A run as a whole in a line or two of plain text, the same in every sink: what was left out of it, and why.

Not here: single hangs (``hang_text.py``) and the wording of figures (``words.py``).
"""

from __future__ import annotations

from reports.model import Result
from reports.words import count, seconds


def time_budget(result: Result) -> str:
    """How many of the planned trials ran in the time; empty where the budget left out none."""
    if not result.left_out or result.settled:
        return ""
    arms = [arm for arm in result.arms if arm.same_as is None]
    ran = [len(arm.trials) for arm in arms]
    each = str(min(ran)) if min(ran) == max(ran) else f"{min(ran)} to {max(ran)}"
    planned = {arm.planned for arm in arms}
    of = f" of {planned.pop()}" if len(planned) == 1 else ""
    within = "the time budget" if result.time_budget_s is None else seconds(result.time_budget_s)
    return (
        f"{sum(ran)} of {sum(ran) + len(result.left_out)} planned trials were run in {within}, {each}{of} in each "
        "arm; arms are judged by those"
    )


def stopping(result: Result) -> list[str]:
    """What became of a run under ``--stop``, then its questions and answers; empty where it was not asked."""
    if not result.stopping:
        return []
    left_out = len(result.left_out)
    if not result.settled:
        first = "not all questions are settled"
    elif left_out:
        first = f"settled: {count(left_out, 'planned trial was', 'planned trials were')} not needed"
    else:
        first = "settled"
    note = "the intervals of arms take no notice of a run that ended early"
    return [
        f"{first}; {note}" if left_out else first,
        *(f"{asked}: {said}" for asked, _, said in result.stopping),
    ]
