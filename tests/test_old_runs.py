"""A run of the first release opens in this one: reported, judged again, compared, bundled, and damaged on the way.

``stored_runs/run-0.1.0.tar.xz`` is ``hangrig run dp-pinned-hang --trials 1 --seed 1`` with two arms, as version
0.1.0 stored it; without its reports and its binary ledgers, and with the paths and names of the machine replaced.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from harness import run as run_room
from harness.cli import app
from harness.store import load_schema, read_run

ARCHIVE = Path(__file__).parent / "stored_runs" / "run-0.1.0.tar.xz"
HUNG = "dp-pinned-hang.pinned=pinned,symm_mem=off.seed-1"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run-0.1.0"


def test_it_is_reported_as_it_was(stored: Path) -> None:
    outcome = run_room.report(stored)
    assert outcome.exit == 0 and outcome.report["verdict"] == "pass"
    jsonschema.validate(outcome.report, load_schema("report"))
    (signature,) = outcome.report["signatures"]
    assert (signature["mechanism"], signature["count"]) == ("stream-order", 1)
    page = (stored / "report.html").read_text()
    assert "The last steps before the stall" in page and "Simulation" in page
    assert (stored / "trials" / HUNG / "trace.json").exists()


def test_it_is_judged_again_by_the_rules_of_now(stored: Path) -> None:
    before = json.loads((stored / "trials" / HUNG / "diagnosis.json").read_text())
    outcome = run_room.recheck(stored)
    assert outcome.exit == 0
    after = json.loads((stored / "trials" / HUNG / "diagnosis.json").read_text())
    for key in ("kind", "mechanism", "culprits", "stream", "confidence", "signature"):
        assert after[key] == before[key], key
    assert "Who waits for whom" in (stored / "report.html").read_text()


def test_it_can_be_compared_with_itself_and_planned_again(stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "again"
    shutil.copytree(stored, other)
    compared = CliRunner().invoke(app, ["compare", str(stored), str(other), "--json"])
    assert compared.exit_code == 0, compared.output
    arms = CliRunner().invoke(app, ["compare", str(stored), "--by", "pinned", "--json"])
    assert arms.exit_code == 3, arms.output  # of one trial nothing is said
    assert json.loads(arms.stdout)["against"] == "pageable"


def test_it_is_bundled(stored: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["bundle", str(stored), HUNG, "--out", str(tmp_path / "b.tar.gz")])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "b.tar.gz").exists()


def test_fields_that_a_newer_release_added_change_nothing(stored: Path) -> None:
    for path in (stored / "run.json", stored / "trials" / HUNG / "trial.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "from_the_future": {"x": [1]}}))
    assert run_room.report(stored).report["verdict"] == "pass"


@pytest.mark.parametrize(
    "half", ["trial.json", "diagnosis.json", "history.json", "evidence/sample-1/ledger/rank1.json"]
)
def test_half_written_it_gives_what_it_holds_and_says_what_is_missing(stored: Path, half: str) -> None:
    path = stored / "trials" / HUNG / half
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outcome = run_room.report(stored)
    assert outcome.exit in (0, 3)
    assert len(read_run(stored).trials) == 2
    if half != "history.json":  # which only judging reads
        assert Path(half).name in (stored / "report.html").read_text()
