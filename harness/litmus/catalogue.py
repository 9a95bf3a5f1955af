"""All programs, in the order in which they are run and told."""

from __future__ import annotations

from collections.abc import Mapping

from harness.litmus import copies, graphs, groups, reuse
from harness.litmus.program import Program

PROGRAMS: Mapping[str, type[Program]] = {
    program.name: program
    for program in (
        copies.CopyRace,
        copies.CopyThenKernel,
        copies.CopyEventKernel,
        copies.EventRerecorded,
        copies.EventRerecordedLate,
        copies.EventMoved,
        copies.PinnedBarrier,
        copies.PageableBarrier,
        reuse.ReusePinned,
        reuse.ReusePageable,
        reuse.ReuseAfterEvent,
        reuse.StagingReused,
        reuse.BlockFreed,
        reuse.TensorFreed,
        reuse.ReadbackEarly,
        reuse.ReadbackAfterEvent,
        reuse.ReadbackPageable,
        graphs.GraphUnfenced,
        graphs.GraphFenced,
        groups.GroupReversed,
        groups.GroupOrdered,
        groups.GroupTwoStreams,
    )
}
