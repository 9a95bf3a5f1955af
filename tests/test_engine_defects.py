"""What the four platform defects do to a whole engine (HANGS.md, D1 to D4), and what keeps them harmless.

Outcomes of races are rates. The trials here are made so that each race is lost almost surely: many decode steps
of one graph before the first prefill (D1), copies far slower than the host (D2 to D4). Tokens are compared with
those of the same seed without the defect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_ranks import Trial, Trials

from harness.ledger import LedgerReader, Snapshot
from harness.target import TrialSpec

if TYPE_CHECKING:
    from local_ranks import LocalRanks

STALL_S = 3.0
"""Deadline of the engine's waits where it is to stall."""
SEEDS = (1, 2, 3)
ATTEMPTS = 10
"""At a defect that is a race: outcomes are rates."""
PREFILL_AT = 36
DECODES_THEN_PREFILL = {
    "kind": "alternating",
    "requests": 7,
    "long_decodes": 6,
    "every_steps": PREFILL_AT,
    "prompt_tokens": (6, 20),
    "decode_tokens": (4, 8),
    "grammar_share": 0.5,
}
"""Three rows a rank decode in one graph until a seventh request arrives."""
SHORT = {
    "kind": "prefix_tree",
    "requests": 8,
    "root_tokens": 8,
    "child_tokens": (1, 6),
    "decode_tokens": (8, 12),
    "grammar_share": 0.4,
}
SLOW_COPIES = {"memory_model": "cann", "copy_latency_us": 2000.0}


def defect(name: str, *ranks: int) -> dict[str, Any]:
    return {"defects": ({"name": name, "ranks": ranks},)}


def snapshots(trial: Trial) -> list[Snapshot]:
    found = []
    for path in trial.spec.ledger_paths.values():
        reader = LedgerReader.open(Path(path))
        found.append(reader.snapshot())
        reader.close()
    return found


@dataclass(frozen=True, slots=True)
class Made:
    """One token in the journal of the rank that made it."""

    rank: int
    step: int
    request: str
    token: int


def journal(trial: Trial) -> list[Made]:
    return [
        Made(rank, line["step"], request, token)
        for rank, path in trial.spec.journal_paths.items()
        for line in map(json.loads, Path(path).read_text().splitlines())
        for request, token in line["tokens"].items()
    ]


def wrong_tokens(trial: Trial, healthy: Mapping[str, list[int]]) -> list[Made]:
    """Those that differ from the healthy engine's, earliest first; a hung or dead rank's count too."""
    position: dict[str, int] = {}
    wrong = []
    for made in journal(trial):
        index = position[made.request] = position.get(made.request, -1) + 1
        expected = healthy[made.request]
        if index < len(expected) and made.token != expected[index]:
            wrong.append(made)
    return sorted(wrong, key=lambda made: made.step)


def failed_on_an_index(trial: Trial) -> bool:
    """Whether a rank's device met an index that no tensor has: wrong metadata, caught before a wrong token."""
    errors = [outcome.error or "" for outcome in trial.outcomes]
    return any(re.search(r"failed on the device: IndexError: index \d+ is out of bounds", e) for e in errors)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("defects"), DECODES_THEN_PREFILL)


@pytest.fixture(scope="module")
def healthy(ranks: LocalRanks, trials: Trials) -> Callable[[int], Trial]:
    """The fenced engine with pinned copies, once a seed."""
    return lru_cache(lambda seed: ranks.trial(2, trials.spec(seed=seed, toggles={"pinned": "pinned"})))


def test_an_update_without_its_fence_corrupts_first_and_stops_at_the_first_prefill(
    ranks: LocalRanks, trials: Trials, healthy: Callable[[int], Trial]
) -> None:
    corrupted_first = False
    for seed in SEEDS:
        spec = trials.spec(seed=seed, timeout_s=STALL_S, toggles={"pinned": "pinned"}, sim=defect("D1", 1))
        trial = ranks.stressed(2, spec)

        fenced, overtaking = trial.outcomes
        assert overtaking.error is not None
        assert overtaking.error.startswith(f"DeviceTimeout: an event was not done after {STALL_S:g} s")
        assert fenced.error is not None
        assert fenced.error.startswith(("DeviceTimeout: an event was not done", "DeviceError"))
        stuck = snapshots(trial)
        stuck_steps = set()
        for snapshot in stuck:
            compute, update = snapshot.streams["compute"], snapshot.streams["update"]
            assert snapshot.host.phase == "wait-result"
            assert compute.oldest is not None and compute.oldest.label == "graph.replay decode.4"
            assert compute.oldest.site.startswith("serving/engine.py:")
            assert update.enqueued == update.completed > 0, "the update streams have nothing left to do"
            stuck_steps.add(compute.oldest.step)
        (stuck_step,) = stuck_steps
        assert snapshots(trial)[0].host.step == stuck_step + 1, "the host is one step ahead"
        overtaken = [sum(event.overtaken for event in snapshot.external) for snapshot in stuck]
        assert overtaken[0] == 0 < overtaken[1]

        wrong = wrong_tokens(trial, healthy(seed).tokens)
        assert {made.rank for made in wrong} <= {1}
        if wrong and wrong[0].step < stuck_step:
            corrupted_first = True
            break
    assert corrupted_first


@pytest.mark.parametrize("pinned", ["pageable", "pinned_sync"])
def test_a_copy_that_synchronises_hides_the_missing_fence(
    ranks: LocalRanks, trials: Trials, healthy: Callable[[int], Trial], pinned: str
) -> None:
    trial = ranks.trial(2, trials.spec(toggles={"pinned": pinned}, sim=defect("D1", 1)))
    assert trial.tokens == healthy(1).tokens
    assert [sum(event.overtaken for event in snapshot.external) for snapshot in snapshots(trial)] == [0, 0]


def test_the_fenced_engine_never_overtakes_a_replay(healthy: Callable[[int], Trial]) -> None:
    for snapshot in snapshots(healthy(1)):
        used = [event for event in snapshot.external if event.records]
        assert used and all(event.records == event.waits for event in used)
        assert not any(event.overtaken for event in used)
        assert all(stream.enqueued == stream.completed for stream in snapshot.streams.values())


@pytest.fixture(scope="module")
def unharmed(ranks: LocalRanks, trials: Trials) -> dict[str, list[int]]:
    trial = ranks.trial(2, Trials(trials.directory / "unharmed", SHORT).spec(toggles={"pinned": "pinned"}))
    return trial.tokens


@pytest.mark.parametrize(
    ("name", "pinned", "differ"),
    [
        ("D2", "pageable", False),
        ("D2", "pinned_sync", False),
        ("D2", "pinned_snapshot", False),
        ("D2", "pinned", True),
        ("D3", "pageable", False),
        ("D3", "pinned_sync", False),
        ("D3", "pinned", True),
        ("D3", "pinned_snapshot", True),
        ("D4", "pageable", False),
        ("D4", "pinned_sync", False),
        ("D4", "pinned", True),
    ],
)
def test_tokens_tell_host_memory_that_is_touched_too_early(
    ranks: LocalRanks,
    trials: Trials,
    unharmed: Mapping[str, list[int]],
    tmp_path: Path,
    name: str,
    pinned: str,
    differ: bool,
) -> None:
    """D2: the source is reused; D3: no order against the stream; D4: the block is given away."""
    short = Trials(tmp_path, SHORT)

    def spec() -> TrialSpec:
        return short.spec(timeout_s=STALL_S, toggles={"pinned": pinned}, sim=SLOW_COPIES | defect(name, 0, 1))

    if differ:  # a race: on a busy machine half of the trials get away with it
        trials_of_it = (ranks.stressed(2, spec()) for _ in range(ATTEMPTS))
        assert any(wrong_tokens(trial, unharmed) or failed_on_an_index(trial) for trial in trials_of_it)
    else:
        trial = ranks.trial(2, spec())
        assert wrong_tokens(trial, unharmed) == []
        assert trial.tokens == unharmed
