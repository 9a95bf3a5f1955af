"""The example of docs/faults.md, as a reader would try it; and its tables, which must say what is registered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.fault_model import registered
from harness.faults import SITES

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "faults.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.hang
@pytest.mark.cluster
def test_the_example_hangs_is_explained_and_can_be_run_again(tmp_path: Path) -> None:
    (tmp_path / "my_faults.py").write_text(block("python"))
    (tmp_path / "my-hang.toml").write_text(block("toml"))
    arguments = ["my-hang.toml", "--faults", "my_faults.py", "--trials", "1", "--json", "--out", "runs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(app, ["run", *arguments])
        assert done.exit_code == 0, done.stderr
        (tmp_path / "my_faults.py").unlink()  # the run has its own copy
        again = CliRunner().invoke(app, ["rerun", json.loads(done.stdout)["run"], "--json", "--out", "runs"])
        assert again.exit_code == 0, again.stderr
    (scenario,) = json.loads(done.stdout)["scenarios"]
    assert [arm["hangs"]["k"] for arm in scenario["arms"]] == [1, 0]
    hung = tmp_path / "runs" / "latest" / "trials" / "my-hang.fault=on.seed-0"
    diagnosis = json.loads((hung / "diagnosis.json").read_text())
    assert [one["rank"] for one in diagnosis["culprits"]] == [1]
    assert diagnosis["mechanism"] == "collective-skipped"
    assert "my_faults" not in json.dumps(diagnosis["proof"])
    assert json.loads((hung / "faults" / "rank1.jsonl").read_text().splitlines()[0])["fault"] == "skip_nth"


def test_the_tables_name_every_site_and_every_standard_fault() -> None:
    text = DOCUMENT.read_text()
    sites, faults = text.split("## Sites")[1].split("## Standard faults")
    assert re.findall(r"^\| `([\w.]+)`", sites, re.MULTILINE) == list(SITES)
    standard = [name for name, one in registered().items() if one.__module__.startswith("harness.")]
    assert re.findall(r"^\| `(\w+)`", faults, re.MULTILINE) == standard


def test_a_file_without_faults_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("x = 1\n")
    done = CliRunner().invoke(app, ["run", "dp-retract", "--faults", str(tmp_path / "none.py"), "--dry-run"])
    assert done.exit_code == 2 and "registers no fault" in done.output
    done = CliRunner().invoke(app, ["run", "dp-retract", "--faults", str(tmp_path / "gone.py"), "--dry-run"])
    assert done.exit_code == 2 and "is no Python file" in done.output
