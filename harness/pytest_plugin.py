"""For hang tests in pytest: the ``hang`` marker and the ``hang_trial`` fixture; ``hang_watch`` for any test.

    @pytest.mark.hang
    def test_pinned_copies(hang_trial):
        outcome = hang_trial("dp-pinned-hang", trials=2, settings=['arms.symm_mem=["off"]'])
        outcome.expect("healthy", arm={"pinned": "pageable"})
        outcome.expect("hang", arm={"pinned": "pinned"}, mechanism="stream-order", culprits=[1])

Where the marker names them, ``hang(scenario="dp-pinned-hang", timeout=300)``, the fixture is called without a
scenario, and a run that takes longer is ended. A run is a process of its own, so neither Ray nor torch comes into
pytest, and a test that ends early leaves nothing running. When an expectation fails, the message is the diagnosis.
Every pytest of the environment loads this module: at import it needs pytest and the standard library only.

Not here: tests that start no scenario and are watched (``pytest_hang_watch.py``), running (``harness.cli`` does, in
that process) and wording a diagnosis (``reports.hang_text``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from harness.pytest_hang_watch import HangWatch

RUN_S = 900.0
"""Longest that one run may take, all its trials together."""
STOP_S = 90.0
"""How long a run that is to stop may take to capture, store and end what it started."""
_SAID_LINES = 15

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HangOutcome:
    """A finished run. ``report`` is report.json, ``trials`` are trial.json documents in the order of the plan,
    ``diagnoses`` are diagnosis.json by trial id, ``path`` is the run's directory."""

    path: Path
    exit: int
    report: Document
    trials: tuple[Document, ...]
    diagnoses: Mapping[str, Document]

    def matching(self, arm: Mapping[str, str] | None = None, scenario: str | None = None) -> list[Document]:
        """The trials whose arm has these toggles. Raises ValueError where there is none."""
        found = [
            trial
            for trial in self.trials
            if scenario in (None, trial["scenario"])
            and all(trial["arm"].get(name) == value for name, value in (arm or {}).items())
        ]
        if not found:
            arms = sorted({json.dumps(trial["arm"]) for trial in self.trials})
            raise ValueError(f"no trial of {scenario or 'any scenario'} has {arm}; arms: {', '.join(arms)}")
        return found

    def expect(
        self,
        outcome: str,
        *,
        arm: Mapping[str, str] | None = None,
        scenario: str | None = None,
        mechanism: str | None = None,
        culprits: Collection[int] | None = None,
    ) -> None:
        """Fails the test unless every matching trial has this outcome, this mechanism and these culprit ranks.

        The message says what the first other one did: its diagnosis.
        """
        __tracebackhide__ = True
        for trial in self.matching(arm, scenario):
            found = self.diagnoses.get(trial["id"], {})
            ranks = {culprit["rank"] for culprit in found.get("culprits", ())}
            wrong = []
            if trial["outcome"] != outcome:
                wrong.append(f"outcome {outcome}, not {trial['outcome']}")
            if mechanism is not None and found.get("mechanism") != mechanism:
                wrong.append(f"mechanism {mechanism}, not {found.get('mechanism')}")
            if culprits is not None and ranks != set(culprits):
                wrong.append(f"culprit ranks {sorted(culprits)}, not {sorted(ranks)}")
            if wrong:
                pytest.fail(f"expected {'; '.join(wrong)}\n{self.words(trial['id'])}", pytrace=False)

    def words(self, trial_id: str) -> str:
        """The diagnosis of one trial for a person, or what its checks say, and how to run it again."""
        # Not at import: reports bring the libraries that draw charts.
        from harness.store import read_run
        from reports.hang_text import diagnosis_lines
        from reports.result import build

        trial = next(t for t in build(read_run(self.path)).trials if t.id == trial_id)
        if trial.diagnosis is not None and trial.diagnosis.kind != "none":
            lines = diagnosis_lines(trial)
        else:
            lines = [f"{trial.outcome}: {trial.scenario}, {trial.name}"]
            lines += [f"{check.name}: {check.verdict}: {check.reason}" for check in trial.checks]
        return "\n".join(
            [*lines, f"evidence: {self.path / 'trials' / trial_id}", f"again with: {trial.rerun}"]
        )


class HangTrial(Protocol):
    """What the ``hang_trial`` fixture is."""

    def __call__(
        self,
        *scenarios: str | Path,
        device: str = "sim",
        trials: int = 1,
        seed: int = 1,
        settings: Sequence[str] = (),
    ) -> HangOutcome:
        """Runs scenarios (names or files) and returns what came of it. ``trials`` per arm, trial i with
        ``seed + i``; ``settings`` as ``--set``. Skips the test where the device is not there."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hangrig", "hang tests")
    group.addoption(
        "--hangrig-out", metavar="DIR", type=Path, help="Where hang tests store their runs, to be kept."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "hang(scenario=None, timeout=900): makes ranks run for real, to see whether and why they hang",
    )
    config.addinivalue_line(
        "markers", "hang_watch(timeout): fails with a diagnosis of its whole process tree when it stalls"
    )
    config.pluginmanager.register(HangWatch(config), "hangrig-hang-watch")


@pytest.fixture
def hang_trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HangTrial:
    """Runs scenarios and returns a `HangOutcome`. Runs are stored under ``--hangrig-out``, else under pytest's
    own temporary directory. The marker's ``scenario`` is run where none is given."""
    marker = request.node.get_closest_marker("hang")
    named = () if marker is None else _named(marker.kwargs.get("scenario"))
    timeout_s = float(RUN_S if marker is None else marker.kwargs.get("timeout", RUN_S))
    return runner(request.config, tmp_path_factory, named, timeout_s)


def runner(
    config: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    named: Sequence[str] = (),
    timeout_s: float = RUN_S,
) -> HangTrial:
    """What ``hang_trial`` gives a test, for fixtures that several tests share. ``named``: run where the call names
    no scenario."""
    kept: Path | None = config.getoption("--hangrig-out")

    def run(
        *scenarios: str | Path,
        device: str = "sim",
        trials: int = 1,
        seed: int = 1,
        settings: Sequence[str] = (),
    ) -> HangOutcome:
        out = tmp_path_factory.mktemp("hangrig") if kept is None else kept.absolute()
        chosen = scenarios or named
        if not chosen:
            raise ValueError("hang_trial: give a scenario, or name one in the marker: hang(scenario=...)")
        arguments = [*map(str, chosen), "--device", device, "--trials", str(trials), "--seed", str(seed)]
        for setting in settings:
            arguments += ["--set", setting]
        return run_scenarios([*arguments, "--out", str(out)], timeout_s)

    return run


def _named(scenario: object) -> tuple[str, ...]:
    """The marker's scenarios: one, or several in a list."""
    if scenario is None:
        return ()
    return (str(scenario),) if isinstance(scenario, str | Path) else tuple(map(str, scenario))  # type: ignore[call-overload]


def run_scenarios(arguments: Sequence[str], timeout_s: float | None = None) -> HangOutcome:
    """``hangrig run ARGUMENTS`` as a process. Fails the test when there was no run or it took longer than
    ``timeout_s`` (RUN_S when None), skips it without device."""
    __tracebackhide__ = True
    command = [sys.executable, "-m", "harness.cli", "run", *arguments, "--json"]
    # In a group of its own: Ctrl-C at pytest's terminal is handed on below, once.
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, said = driver.communicate(timeout=RUN_S if timeout_s is None else timeout_s)
    except BaseException:  # also pytest's own timeout and Ctrl-C: nothing that was started may stay
        _stop(driver)
        raise
    if driver.returncode not in (0, 1, 3, 4):
        tail = "\n".join(said.splitlines()[-_SAID_LINES:])
        pytest.fail(f"hangrig run ended with status {driver.returncode}:\n{tail}", pytrace=False)
    outcome = read_outcome(json.loads(output), driver.returncode)
    if outcome.report["verdict"] == "skipped":
        pytest.skip(next(c["reason"] for t in outcome.trials for c in t["checks"]))
    return outcome


def read_outcome(report: Document, status: int) -> HangOutcome:
    """A stored run as an outcome. ``report``: its report.json."""
    path = Path(report["run"])
    ids = [one for scenario in report["scenarios"] for arm in scenario["arms"] for one in arm["trials"]]
    folders = [path / "trials" / one for one in ids]
    diagnosed = [folder for folder in folders if (folder / "diagnosis.json").exists()]
    return HangOutcome(
        path=path,
        exit=status,
        report=report,
        trials=tuple(json.loads((folder / "trial.json").read_bytes()) for folder in folders),
        diagnoses={folder.name: json.loads((folder / "diagnosis.json").read_bytes()) for folder in diagnosed},
    )


def _stop(driver: subprocess.Popen[str]) -> None:
    """The driver ends its ranks itself when it is asked; when it cannot, its agent does."""
    driver.terminate()
    try:
        driver.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.communicate()
