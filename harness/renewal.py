"""What a run stands on, started anew when it has died under it: one dead raylet must not cost the night.

Here: when to start anew and how often, whatever it is that is started. Not here: clusters and agents, and what
makes them dead (``Ranks.broken``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from ray.exceptions import RayError

from harness.cluster import ClusterError

MOST = 5
"""Times in one run: a machine on which Ray dies every hour measures nothing else."""

T = TypeVar("T")


class LostGroundError(ClusterError):
    """A trial could not begin because what it stands on is dead: it can be tried again on a new one."""


@contextlib.contextmanager
def renewable(
    up: Callable[[], AbstractContextManager[T]],
    broken: Callable[[T], str | None],
    say: Callable[[str], None],
) -> Iterator[Callable[[], T]]:
    """A function that gives what ``up`` starts, and a new one when ``broken`` has a reason against the last.

    It raises ClusterError when a start fails, or after MOST of them. The first start is made at once.
    """
    times = 0
    with contextlib.ExitStack() as stack:
        current = stack.enter_context(up())

        def whole() -> T:
            nonlocal current, times
            why = broken(current)
            if why is None:
                return current
            times += 1
            if times > MOST:
                raise ClusterError(f"{why}, after it was started anew {MOST} times")
            say(f"{why}: the cluster is started anew (time {times} of at most {MOST})")
            try:
                stack.close()
            except (ClusterError, RayError) as error:  # what is dead need not answer
                say(f"while the old one was ended: {error}")
            current = stack.enter_context(up())
            return current

        yield whole
