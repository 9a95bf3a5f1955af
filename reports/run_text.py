"""A run as a whole in a line or two of plain text, the same in every sink: what its time budget left out.

Not here: single hangs (``hang_text.py``) and the wording of figures (``words.py``).
"""

from __future__ import annotations

from reports.model import Result
from reports.words import seconds


def time_budget(result: Result) -> str:
    """How many of the planned trials ran in the time; empty where the budget left out none."""
    if not result.left_out:
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
