"""What torch's watchdog wrote into logs, and what is concluded of it. The lines are those of public reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from flight_builder import Recorder
from offline_rig import ask, brief, facts

from harness.offline.torch_log import UNNAMED, parse_torch_log

E = "[E626 16:48:25.440238649 ProcessGroupNCCL.cpp:2268]"


def timed_out(rank: int, number: int, operation: str = "ALLREDUCE", inside: int | None = None) -> str:
    return (
        f"[rank{rank}]:{E} [Rank {rank if inside is None else inside}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran "
        "for 600020 milliseconds before timing out.\n"
    )


def status(rank: int, number: int, enqueued: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:{E} [{group} Rank {rank}]  failure detected by watchdog at work sequence id: {number} PG "
        f"status: last enqueued work: {enqueued}, last completed work: {number - 1}\n"
    )


def signal(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:{E} [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal due to a collective "
        f"timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: "
        f"{enqueued}, last completed NCCL work: {completed}.This is most likely caused by\n"
    )


def test_the_rank_that_never_came(tmp_path: Path) -> None:
    text = "INFO serving\n" + "".join(timed_out(rank, 77) + status(rank, 77, 79) for rank in (0, 1, 3))
    (tmp_path / "server.log").write_text(text + signal(2, 76, 76))
    document, exit_ = ask(tmp_path)
    assert (brief(document), exit_) == (("hang", "collective-skipped", [2], "supported"), 1)
    assert "rank 0 entered all_reduce 77 of group default_pg and has not finished it, for 600" in facts(
        document
    )
    assert "rank 2 never entered all_reduce 77 of group default_pg: its last one there is 76" in facts(
        document
    )


def test_a_log_a_rank_and_another_operation(tmp_path: Path) -> None:
    for rank, operation in enumerate(("ALLREDUCE", "BROADCAST", "ALLREDUCE")):
        lines = timed_out(rank, 77, operation) + status(rank, 77, 79)
        (tmp_path / f"rank{rank}.log").write_text(lines.replace(f"[rank{rank}]:", ""))
    document, exit_ = ask(tmp_path)
    # Without what came before, one that left a call out looks the same: not proven.
    assert (brief(document), exit_) == (("hang", "collective-mismatch", [1], "supported"), 1)
    assert document["collective"]["mismatch"]["what"] == "operation"


def test_all_inside_is_a_hang_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(timed_out(r, 7) + status(r, 7, 7) for r in range(2)))
    document, exit_ = ask(tmp_path)
    assert (document["culprits"], document["mechanism"], exit_) == ([], "unknown", 1)
    assert "every rank of group default_pg entered all_reduce 7" in facts(document)


def test_groups_of_one_number_are_not_taken_for_one(tmp_path: Path) -> None:
    """Before torch 2.5 a log has only the process's own number of a group: each attention group is number 3."""
    lines = [
        timed_out(rank, number, inside=rank - 4)
        + status(rank, number, number, "PG 3").replace(f"Rank {rank}]", f"Rank {rank - 4}]")
        for rank, number in ((4, 9), (5, 7))
    ]
    (tmp_path / "a.log").write_text("".join(lines))
    document, _ = ask(tmp_path)
    assert (document["culprits"], document["mechanism"]) == ([], "unknown")
    assert "a log does not say who else is in group 3 of rank" in facts(document)


def test_a_timeout_of_which_nothing_is_known_is_never_healthy(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").write_text(signal(1, 70, 70))
    document, exit_ = ask(tmp_path)
    assert (document["kind"], document["culprits"], exit_) == ("hang", [], 3)
    assert "torch's watchdog saw a collective time out on rank 0, says rank 1" in facts(document)


def test_a_recorder_outranks_a_log(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(timed_out(0, 3) + status(0, 3, 3) + signal(1, 9, 9))
    made = [Recorder(2).many(9) for _ in range(2)]
    made[0].call(state="started")
    for rank, recorder in enumerate(made):
        recorder.write(tmp_path / f"rank_{rank}.json")
    document, _ = ask(tmp_path)
    assert (brief(document)[:3], document["collective"]["sequence"]) == (
        ("hang", "collective-skipped", [1]),
        10,
    )


@pytest.mark.parametrize(
    ("line", "group", "counts"),
    [
        (
            "[rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 1 Rank 1] Timeout at NCCL work: 8, last enqueued NCCL work: "
            "9, last completed NCCL work: 7.",
            "1",
            (9, 7),
        ),
        (
            "x [stderr] [rank3]:[E909 09:55:46.9 ProcessGroupNCCL.cpp:1709] [PG 0 (default_pg) Rank 3] Timeout at "
            "NCCL work: 2070, last enqueued NCCL work: 2082, last completed NCCL work: 2069.",
            "0",
            (2082, 2069),
        ),
        (
            "[rank3]:[E1026 04:01:29.5 ProcessGroupNCCL.cpp:2] [PG ID 1 PG GUID 17(tp) Rank 0]  failure detected "
            "by watchdog at work sequence id: 5 PG status: last enqueued work: 7, last completed work: 4",
            "17",
            (7, 4),
        ),
    ],
)
def test_each_version_of_the_status_line(line: str, group: str, counts: tuple[int, int]) -> None:
    (dump,) = parse_torch_log(line, "a.log", None).values()
    assert (dump.groups[group].enqueued, dump.groups[group].completed) == counts


def test_old_lines_without_rank_group_or_size() -> None:
    line = (
        "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96, "
        "OpType=COALESCED, Timeout(ms)=1800000) ran for 25624887 milliseconds before timing out."
    )
    ((rank, dump),) = parse_torch_log(line, "a.log", None).items()
    (entry,) = dump.groups[UNNAMED].entries
    assert (rank, entry.operation, entry.shapes, entry.lasted_s) == (7, "coalesced", (), 25624.887)
    assert parse_torch_log("[rank0]: Watchdog caught nothing\n", "a.log", None) == {}
