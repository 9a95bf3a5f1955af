"""The diagnosis on ledgers of real engines (tests/ledger_captures), as they were left when the engine had ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ledger_builder import Group, Rank

from harness.diagnose import Diagnosis, Evidence, EvidenceSample, RankEvidence, diagnose
from harness.ledger_snapshot import Snapshot
from harness.seats import Seat
from harness.stacks_parse import parse_pyspy_json

CAPTURES = Path(__file__).parent / "captures"
LEDGERS = Path(__file__).parent / "ledger_captures"


def ended(
    name: str, exceptions: dict[Seat, str], deaths: dict[Seat, float], *, without: tuple[int, ...] = ()
) -> Diagnosis:
    """Both ranks and the server gone, in both samples; ``without``: ranks whose ledger was lost."""
    snapshots = {
        rank: Snapshot.from_json((LEDGERS / name / f"rank{rank}.ledger.json").read_text()) for rank in (0, 1)
    }
    ranks = {
        rank: RankEvidence(
            snapshot=None if rank in without else snapshot,
            state="dead",
            pid=snapshot.header.pid,
            node="node-a",
        )
        for rank, snapshot in snapshots.items()
    }
    others = {"server": RankEvidence(state="dead", pid=1, node="node-a", role="server")}
    samples = tuple(EvidenceSample(at, ranks, others=others) for at in (1.0, 2.0))
    return diagnose(Evidence(2, samples, exceptions=exceptions, deaths=deaths))


def blamed(found: Diagnosis) -> list[int | None]:
    return [culprit.rank for culprit in found.culprits]


RESET = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:4253: Connection reset by peer."


@pytest.mark.parametrize("first", [0, 1])
def test_a_skipped_all_reduce_of_the_dp_gather_is_blamed_on_the_rank_that_skipped(first: int) -> None:
    """Whichever of them gloo ended first."""
    deaths: dict[Seat, float] = {first: 2.2, 1 - first: 2.7, "server": 7.4}
    found = ended("sglang-dp2-allreduce-skipped", {1 - first: RESET}, deaths)
    assert (found.kind, found.mechanism, blamed(found)) == ("dead", "collective-skipped", [1])
    assert found.collective is not None and found.collective.group == "tp"
    assert any(
        "(number 966) is all_reduce (2, 128) bfloat16, where whole steps that began alike went on with "
        "all_reduce (129, 128) bfloat16: it left one out" in fact.fact
        for fact in found.proof
    )


def test_without_the_other_rank_s_ledger_nobody_is_accused_of_skipping() -> None:
    found = ended("sglang-dp2-allreduce-skipped", {0: RESET}, {1: 2.2, 0: 2.7}, without=(0,))
    assert found.mechanism == "rank-dead"


def test_a_rank_that_raised_on_its_idle_batch_is_blamed_and_not_the_one_that_lost_its_peer() -> None:
    raised: dict[Seat, str] = {1: "ValueError: no rows in the idle batch", 0: RESET}
    found = ended("sglang-dp2-raise-on-idle", raised, {1: 110.4, 0: 111.2, "server": 115.0})
    assert (found.kind, found.mechanism, blamed(found)) == ("dead", "collective-skipped", [1])
    assert any("rank 1 raised ValueError: no rows in the idle batch" in fact.fact for fact in found.proof)


def test_the_same_ledgers_of_a_rank_that_was_killed_blame_the_killed_one() -> None:
    """No word of its own, and no collective out of order: the first to end is the cause."""
    found = ended("sglang-dp2-raise-on-idle", {0: RESET}, {1: 10.4, 0: 10.8, "server": 15.5})
    assert (found.kind, found.mechanism, blamed(found)) == ("dead", "rank-dead", [1])


def test_the_captures_are_of_a_real_engine() -> None:
    document = json.loads((LEDGERS / "sglang-dp2-raise-on-idle" / "rank1.ledger.json").read_text())
    assert document["decisions"][-1]["mode"] == "idle" and document["decisions"][-1]["batch"] == 0


def process(rank: Rank, at_s: float, role: str) -> RankEvidence:
    return RankEvidence(
        snapshot=rank.snapshot(at_s), stacks=rank.stacks(), state="S", pid=900, node="node-a", role=role
    )


def serving(*, controller: str, client_moves: bool = False, rank_moves: bool = False) -> Evidence:
    """Two ranks without a batch, a client with requests in flight, a controller in the phase that is given."""
    ranks = [Rank(0, phase="idle", step=44), Rank(1, phase="idle", step=44)]
    control = Rank(0, phase=controller, step=7)
    client = Rank(0, phase="serve", step=1395)
    samples = []
    for at_s in (100.0, 101.0):
        others = {
            "client": process(client, at_s, "client"),
            "controller": process(control, at_s, "controller"),
        }
        samples.append(EvidenceSample(at_s, {r.rank: process(r, at_s, "rank") for r in ranks}, others=others))
        client.step += client_moves
        for rank in ranks:
            rank.changes += 1  # its idle loop goes round
            rank.step += rank_moves
    return Evidence(2, tuple(samples), reason="stalled (client)")


def test_a_controller_that_hands_nothing_on_is_blamed_although_the_ranks_go_round() -> None:
    found = diagnose(serving(controller="recv"))
    assert (found.kind, found.mechanism) == ("hang", "host-blocked")
    assert [(culprit.rank, culprit.role) for culprit in found.culprits] == [(None, "controller")]
    assert "client: 1395 tokens received, none for 3.00 s, with requests in flight" in found.proof[0].fact


@pytest.mark.parametrize(
    "healthy", [{"client_moves": True}, {"rank_moves": True}], ids=["tokens come", "the ranks make steps"]
)
def test_a_controller_that_stands_while_work_goes_on_is_healthy(healthy: dict[str, bool]) -> None:
    assert diagnose(serving(controller="recv", **healthy)).kind == "none"


def test_requests_that_stand_with_everybody_waiting_for_work_name_nobody() -> None:
    found = diagnose(serving(controller="parked"))
    assert found.kind == "hang" and found.culprits == () and found.confidence == "suspected"


def test_peers_of_one_attention_group_that_run_different_batches() -> None:
    """HANGS.md, C1: rank 1 dropped a request by its own clock; over gloo rank 0 is the first to die of it."""
    ranks = [Rank(rank, phase="forward", step=26) for rank in (0, 1)]
    for rank in ranks:
        tp = rank.groups["tp"] = Group((0, 1)).round("all_reduce", "all_gather")
        shared = {"mode": "decode", "batch": 13, "own_tokens": [13], "requests": 34, "aborted": [], "dp": 0}
        rank.decisions = [{"step": 25, **shared}]
        rank.decisions.append({"step": 26, **shared})
        tp.enter("all_reduce", (13, 128) if rank.rank == 0 else (126, 128))
    ranks[1].decisions[-1] |= {"mode": "prefill", "batch": 2, "own_tokens": [126], "aborted": ["ca3a"]}

    def dead(rank: Rank) -> RankEvidence:
        return RankEvidence(snapshot=rank.snapshot(), state="dead", pid=rank.rank + 1, node="node-a")

    samples = tuple(EvidenceSample(at, {r.rank: dead(r) for r in ranks}) for at in (1.0, 2.0))
    found = diagnose(Evidence(2, samples, exceptions={1: RESET}, deaths={0: 1.0, 1: 1.2}))
    assert (found.kind, found.mechanism, blamed(found)) == ("dead", "decision-divergence", [1])
    assert any("it aborted ca3a" in fact.fact for fact in found.proof)


def test_ranks_of_different_attention_groups_may_run_different_batches() -> None:
    ranks = [Rank(rank, phase="forward", step=3) for rank in (0, 1)]
    for rank in ranks:
        rank.decisions = [{"step": 3, "mode": "idle" if rank.rank else "decode", "batch": 1 - rank.rank,
                           "requests": rank.rank, "dp": rank.rank}]  # fmt: skip
    samples = tuple(
        EvidenceSample(at, {r.rank: process(r, at, "rank") for r in ranks}) for at in (100.0, 101.0)
    )
    assert diagnose(Evidence(2, samples)).mechanism != "decision-divergence"


def test_without_any_ledger_the_stacks_speak() -> None:
    """Scheduler 1 stopped, the probe off: the recorded dumps (tests/captures)."""
    samples = []
    folder = CAPTURES / "sglang-dp2-scheduler1-stopped"
    for at_s in (1.0, 2.0):
        ranks = {
            rank: RankEvidence(
                stacks=parse_pyspy_json(
                    (folder / f"scheduler_DP{rank}_TP{rank}.json").read_text(), pid=7, rank=rank, native=False
                ),
                state="T" if rank else "S", pid=7 + rank, node="node-a",
            )
            for rank in (0, 1)
        }  # fmt: skip
        samples.append(EvidenceSample(at_s, ranks))
    found = diagnose(Evidence(2, tuple(samples), reason="stopped (rank 1)"))
    assert (found.kind, found.mechanism, blamed(found)) == ("stopped", "rank-stopped", [1])
