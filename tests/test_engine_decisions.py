"""What a rank writes down of a step before it launches it, and what faults of its decisions leave there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_ranks import Trial, Trials

from harness.fault_model import Fault, parse
from harness.faults import Active, Passing
from serving.dp_attention import Mode, Padding, StepPlan

if TYPE_CHECKING:
    from local_ranks import LocalRanks

WORKLOAD = {
    "kind": "alternating",
    "requests": 8,
    "every_steps": 3,
    "prompt_tokens": (4, 12),
    "decode_tokens": (4, 10),
    "long_decodes": 0,
    "grammar_share": 1.0,
}
BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("decisions"), WORKLOAD)


def decisions(trial: Trial, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.spec.decisions_paths[rank]).read_text().splitlines()]


def changed(run: str, plan: StepPlan, tokens: int) -> StepPlan | None:
    """The plan that the fault makes of it; None where it finds nothing to do."""
    fault: Fault = parse({"name": "change_plan", "run": run})
    passing = Passing("rank.plan", 1, 9, {"plan": plan, "tokens": tokens, "buckets": BUCKETS})
    if not fault.finds(passing):
        return None
    fault.act(passing, {})
    made: StepPlan = passing["plan"]
    return made


def decode(*tokens: int, bucket: int = 0, padding: Padding = Padding.MAX_LEN) -> StepPlan:
    modes = tuple(Mode.DECODE if count else Mode.IDLE for count in tokens)
    return StepPlan(9, modes, tokens, padding, bucket, True)


def test_each_record_counts_the_collectives_before_its_step(ranks: LocalRanks, trials: Trials) -> None:
    trial = ranks.trial(2, trials.spec(engine={"control_broadcast": True}))
    for rank in range(2):
        records = decisions(trial, rank)
        assert all(one["collectives"]["agree"] == one["step"] for one in records)
        assert all(one["collectives"]["world"] == one["step"] for one in records)
        assert "ran" not in records[0] and "passes" not in records[0]
        launched = [one for one in records if any(one["tokens"])]
        # Two layers with experts, two collectives in each: the record of a step comes before they are enqueued.
        assert [one["collectives"]["experts"] for one in launched] == [4 * n for n in range(len(launched))]
        told = [name for one in records for name in one["finished"]]
        assert sorted(told) == sorted(trial.results[rank].tokens)


def test_a_message_of_rank_0_changes_no_token(ranks: LocalRanks, trials: Trials) -> None:
    plain = ranks.trial(2, trials.spec())
    assert ranks.trial(2, trials.spec(engine={"control_broadcast": True})).tokens == plain.tokens


def test_what_a_rank_runs_otherwise_is_in_its_record(ranks: LocalRanks, trials: Trials) -> None:
    """Alone: there is no peer to hang with."""
    fault = {"name": "change_plan", "run": "eager", "steps": [4, 1000]}
    trial = ranks.trial(1, trials.of(1).spec(faults=[fault]))
    told = [one for one in decisions(trial) if "ran" in one]
    assert len(told) == 1
    assert told[0]["graph"] and not told[0]["ran"]["graph"] and not told[0]["update"]
    assert told[0]["ran"]["tokens"] == told[0]["tokens"]


def test_a_grammar_that_fails_has_the_step_made_once_more(ranks: LocalRanks, trials: Trials) -> None:
    trial = ranks.trial(1, trials.of(1).spec(faults=[{"name": "fail_grammar", "steps": [4, 1000]}]))
    records = decisions(trial)
    again, passed = [one for one in records if "passes" in one]
    assert passed["failed"] == again["failed"] and passed["passes"] == again["passes"]
    (failed,) = again["failed"]
    assert again["passes"] == 2 and trial.finish[failed["request"]].startswith("aborted: its grammar refused")
    steps = [one["step"] for one in records]
    assert steps.count(again["step"]) == 3, "the step, that it is made again, and that pass"
    assert records[-1]["collectives"]["agree"] == records[-1]["step"] + 1


def test_a_rank_that_cannot_use_the_graph_pads_as_an_eager_step_does() -> None:
    assert changed("eager", decode(0, 3, bucket=4), 3) == decode(0, 3, padding=Padding.SUM_LEN)
    assert changed("eager", decode(3, 3, bucket=4), 3) == decode(3, 3)
    assert changed("eager", decode(3, 3), 3) is None


def test_a_rank_that_goes_by_its_own_size_takes_another_bucket() -> None:
    assert changed("own_bucket", decode(4, 2, bucket=4), 2) == decode(4, 2, bucket=2)
    assert changed("own_bucket", decode(4, 0, bucket=4), 0) == decode(4, 0, bucket=1)
    assert changed("own_bucket", decode(4, 3, bucket=4), 3) is None


def test_an_unpadded_dummy_has_a_row_of_its_own_and_no_more() -> None:
    found = changed("unpadded", decode(4, 0), 0)
    assert found is not None and (found.local_rows(1), found.rows) == (1, 2)
    assert changed("unpadded", decode(1, 0), 0) is None, "one row is what the others have"
    assert changed("unpadded", decode(4, 0, padding=Padding.SUM_LEN), 0) is None
    assert changed("unpadded", decode(4, 0, bucket=4), 0) is None


def test_a_collective_is_told_whose_step_it_belongs_to() -> None:
    seen: list[dict[str, Any]] = []

    class Watcher:
        def visit(self, passing: Passing) -> None:
            seen.append(passing.values)

    active = Active((Watcher(),))
    active.visit("comm.enqueue", group="experts")
    active.visit("rank.launch", step=3, mode="prefill", tokens=5, idle=False, graph=False, grammar=True)
    active.visit("comm.enqueue", group="experts")
    assert "grammar" not in seen[0]
    assert seen[2] == {"group": "experts", "mode": "prefill", "tokens": 5, "idle": False, "grammar": True}
