"""A run goes on when Ray dies under it: what it stands on is started anew, a bounded number of times."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import run_rig as rig

from harness import process_control
from harness.cluster import ClusterError
from harness.machine import read_first_line
from harness.renewal import MOST, renewable


class Ground:
    """Starts numbers; ``dead`` are those that do not bear any more."""

    def __init__(self, *, fails_to_end: bool = False) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.dead: set[int] = set()
        self.said: list[str] = []
        self.fails_to_end = fails_to_end

    @contextmanager
    def up(self) -> Iterator[int]:
        number = len(self.started)
        self.started.append(number)
        try:
            yield number
        finally:
            self.ended.append(number)
        if self.fails_to_end and number in self.dead:
            raise ClusterError("it does not answer")

    def broken(self, number: int) -> str | None:
        return f"{number} is dead" if number in self.dead else None


def test_what_works_is_kept_and_what_is_dead_is_ended_and_replaced() -> None:
    ground = Ground(fails_to_end=True)
    with renewable(ground.up, ground.broken, ground.said.append) as whole:
        assert (whole(), whole()) == (0, 0)
        ground.dead.add(0)
        assert (whole(), whole()) == (1, 1)
        assert ground.ended == [0]
    assert (ground.started, ground.ended) == ([0, 1], [0, 1])
    assert ground.said == [
        f"0 is dead: the cluster is started anew (time 1 of at most {MOST})",
        "while the old one was ended: it does not answer",
    ]


def test_one_that_dies_again_and_again_is_given_up() -> None:
    ground = Ground()
    ground.dead = set(range(100))
    given_up = pytest.raises(ClusterError, match=f"{MOST} is dead, after it was started anew {MOST} times")
    with given_up, renewable(ground.up, ground.broken, ground.said.append) as whole:
        for _ in range(100):
            whole()
    assert ground.started == ground.ended == list(range(MOST + 1)), "every one was ended, the last too"


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_a_run_whose_raylet_is_killed_between_trials_runs_all_of_them(tmp_path: Path) -> None:
    """After the first trial comes the reference of the second: what dies then has spoilt no trial."""
    settings = rig.options([*rig.QUICK, "workload.requests=4"])
    with rig.Command.start(tmp_path, "run", "dp-retract", "--trials", "2", "--json", *settings) as command:
        first = command.trial(0)
        rig.until((first / "trial.json").exists, "the first trial's end")
        assert command.cluster is not None
        raylets = [
            process
            for process in process_control.marked_with(*command.cluster)
            if read_first_line(Path(f"/proc/{process.pid}/comm")) == "raylet"
        ]
        assert len(raylets) == 1
        process_control.send(raylets[0], signal.SIGKILL)
        folder = command.cluster_folder
        status = command.wait()
        assert status == 0, command.stderr
        assert "the cluster is started anew (time 1 of at most 5)" in command.stderr
        assert folder is not None and not folder.exists()
        outcomes = [rig.load(path)["outcome"] for path in command.path.glob("trials/*/trial.json")]
        assert outcomes == ["healthy", "healthy"]
        assert command.left() == []
        assert list((tmp_path / "tmp").glob("hg-*")) == []
