"""The scenarios beside this file, run against real servers as a user would run them: ``make test-engines``.

One ``hangrig run`` an engine, so that Ray starts once and one report shows everything; then each trial is held
against what its scenario does to the engine: the right process, rank and story.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.store import load_schema, read_run
from reports.engine import read_engine
from tests.engines import environments

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

SCENARIOS = Path(__file__).parent / "scenarios"
RUN_S = 2400.0
TITLES = ("sglang::", "VLLM::", "sglang.launch_server", "vllm.entrypoints")

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """One engine's run: exit status and trials by scenario and probe."""

    status: int
    path: Path
    trials: Mapping[tuple[str, str], Document]
    text: str

    def trial(self, scenario: str, probe: str = "on") -> Document:
        return self.trials[scenario, probe]

    def file(self, scenario: str, name: str, probe: str = "on") -> Document:
        document: Document = json.loads(
            (self.path / "trials" / self.trial(scenario, probe)["id"] / name).read_text()
        )
        return document


def run(engine: str, python: Path, out: Path) -> Shown:
    files = sorted(str(path) for path in SCENARIOS.glob(f"{engine}-*.toml"))
    command = [sys.executable, "-m", "harness.cli", "run", *files, "--set", f"target.python={python}"]
    done = subprocess.run(
        [*command, "--seed", "1", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    print(done.stdout)  # kept by pytest, shown where something fails
    path = (out / "latest").resolve()
    trials = {
        (stored.trial["scenario"], stored.trial["resolved"]["probe"]["resolved"]): stored.trial
        for stored in read_run(path).trials
        if stored.trial is not None
    }
    return Shown(done.returncode, path, trials, done.stdout)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Kept where ``HANGRIG_ENGINE_RUNS`` says, so that the reports outlive the tests."""
    import os

    kept = os.environ.get("HANGRIG_ENGINE_RUNS")
    return Path(kept).absolute() if kept else tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def sglang(results: Path) -> Shown:
    return run("sglang", environments.sglang(), results / "sglang")


@pytest.fixture(scope="session")
def vllm(results: Path) -> Shown:
    return run("vllm", environments.vllm(), results / "vllm")


@pytest.fixture
def shown(request: pytest.FixtureRequest, engine: str) -> Shown:
    found: Shown = request.getfixturevalue(engine)
    return found


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("probe", ["on", "off"])
def test_a_healthy_server_under_pressure_is_healthy(shown: Shown, engine: str, probe: str) -> None:
    trial = shown.trial(f"{engine}-stress", probe)
    assert (trial["outcome"], trial["verdict"]) == ("healthy", "pass"), shown.text
    least = 10 if engine == "sglang" else 5
    assert trial["retractions"] >= least
    assert engine == "sglang" or trial["counters"]["preemptions"] >= least
    assert len(trial["ranks"]) == 2 and trial["tokens"] > 500


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_tokens_are_the_same_with_the_probe_and_without(shown: Shown, engine: str) -> None:
    checks = {
        probe: next(
            c for c in shown.trial(f"{engine}-stress", probe)["checks"] if c["name"] == "tokens"
        )["verdict"]
        for probe in ("on", "off")
    }  # fmt: skip
    assert checks == {"on": "skipped", "off": "pass"}  # the first to finish is the reference
    assert shown.trial(f"{engine}-stress", "off")["tokens_compared"] > 500


WITHOUT_A_PROBE = [
    ("sglang", "stopped", "stopped", "rank-stopped"),
    ("sglang", "killed", "dead", "rank-dead"),
    ("vllm", "stopped", "stopped", "rank-stopped"),
    ("vllm", "killed", "dead", "rank-dead"),
]


@pytest.mark.parametrize("probe", ["on", "off"])
@pytest.mark.parametrize(("engine", "what", "kind", "mechanism"), WITHOUT_A_PROBE)
def test_a_rank_that_was_stopped_or_killed_is_named(
    shown: Shown, engine: str, what: str, kind: str, mechanism: str, probe: str
) -> None:
    expect(shown, f"{engine}-{what}", kind, mechanism, [1], probe)


@pytest.mark.parametrize(
    ("engine", "what", "kinds", "mechanism"),
    [
        ("sglang", "skipped", ("dead",), "collective-skipped"),
        ("sglang", "idle-raise", ("dead",), "collective-skipped"),
        ("sglang", "clock", ("dead",), "decision-divergence"),
        ("vllm", "skipped", ("dead", "hang"), "collective-skipped"),
    ],
)
def test_the_rank_that_began_it_is_named_and_not_the_one_that_crashed(
    shown: Shown, engine: str, what: str, kinds: tuple[str, ...], mechanism: str
) -> None:
    found = expect(shown, f"{engine}-{what}", kinds, mechanism, [1])
    assert found["confidence"] in ("proven", "supported")


@pytest.mark.parametrize(
    ("engine", "what", "role"), [("sglang", "controller", "controller"), ("vllm", "core", "engine_core")]
)
def test_a_blocked_process_that_is_no_rank_is_named_by_its_role(
    shown: Shown, engine: str, what: str, role: str
) -> None:
    found = expect(shown, f"{engine}-{what}", ("hang",), "host-blocked", [None])
    assert found["culprits"][0]["role"] == role


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_trial_has_the_engine_s_own_words_and_its_command(shown: Shown, engine: str) -> None:
    import jsonschema

    assert len(shown.trials) == (11 if engine == "sglang" else 9)
    for (scenario, probe), trial in shown.trials.items():
        said = shown.file(scenario, "evidence/engine.json", probe)
        jsonschema.validate(said, load_schema("engine"))
        assert said["engine"].startswith(engine) and f"{engine}" in said["command"]
        assert said["probe"]["on"] == (probe == "on")
        assert [p["errors"] for p in said["probe"]["processes"] if p["errors"]] == []
        if trial["outcome"] != "healthy":
            assert said["faults"], f"{scenario}: its fault was not made"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_was_let_alone_speaks_long_after_we_have_the_evidence(
    shown: Shown, engine: str
) -> None:
    """SGLang's watchdog fires (set to 30 s) and names the rank that waits; vLLM says that it waits, after 60 s."""
    found = expect(shown, f"{engine}-watchdog", "stopped", "rank-stopped", [1])
    voice = read_engine(shown.file(f"{engine}-watchdog", "evidence/engine.json"))
    own = ("watchdog timeout", "shared memory broadcast block", "timed out")
    words = [
        one for one in voice.said if one.source == "log" and any(word in one.text.lower() for word in own)
    ]
    assert words and (words[0].at_s or 0.0) > found["captured_s"], voice.said
    assert not any("DP1" in one.text or "Worker_TP1" in one.text for one in words)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_all_is_as_expected_and_nothing_is_left(shown: Shown, engine: str) -> None:
    assert shown.status == 0, shown.text
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(t in " ".join(p.info["cmdline"] or ()) for t in TITLES)
    ]
    assert left == []


def expect(
    shown: Shown,
    scenario: str,
    kinds: str | tuple[str, ...],
    mechanism: str,
    ranks: list[int | None],
    probe: str = "on",
) -> Document:
    trial = shown.trial(scenario, probe)
    found = shown.file(scenario, "diagnosis.json", probe)
    told = f"{scenario}: {json.dumps(found['proof'], indent=1)}"
    assert found["kind"] in ((kinds,) if isinstance(kinds, str) else kinds), told
    assert found["mechanism"] == mechanism, told
    assert [culprit["rank"] for culprit in found["culprits"]] == ranks, told
    assert trial["verdict"] == "pass", trial["checks"]
    pids = {rank["rank"]: rank["pid"] for rank in trial["ranks"]}
    for culprit in found["culprits"]:
        assert culprit["rank"] is None or culprit["pid"] == pids[culprit["rank"]]
    return found
