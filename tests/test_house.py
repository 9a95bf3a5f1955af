"""Rules of the house that no linter knows: our own code under `hangrig audit`, documents that keep their word."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from harness.audit.rules import RULES
from harness.audit.scan import scan
from harness.audit.source import locate
from harness.scenario import list_scenarios, load

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("harness", "serving", "reports")


@pytest.mark.parametrize("package", PACKAGES)
def test_hangrig_audit_finds_nothing_in_our_own_code(package: str) -> None:
    found = scan(locate(str(ROOT / package)), RULES)
    assert [f"{one.path}:{one.line}: {one.rule} {one.message}" for one in found if not one.suppressed] == []


def test_the_catalogue_names_every_scenario_and_no_other() -> None:
    files = {path.name for path in (ROOT / "scenarios").glob("*.toml")}
    text = (ROOT / "scenarios" / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.toml)\)", text)) == files


def test_the_corpus_has_a_catalogue_and_every_file_its_row() -> None:
    folder = ROOT / "scenarios" / "corpus"
    text = (folder / "README.md").read_text()
    linked = re.findall(r"\]\(([\w-]+\.toml)\)", text)
    assert sorted(linked) == sorted(path.name for path in folder.glob("*.toml"))
    for path in folder.glob("*.toml"):
        scenario = load(path)
        assert scenario.name == path.stem and scenario.corpus is not None
        row = scenario.corpus.id
        assert path.stem.startswith(f"{row.lower()}-" if row is not None else "control-"), path
        if row is not None:
            (line,) = [line for line in text.splitlines() if f"({path.name})" in line]
            assert line.startswith(f"| {row} |"), line
            wanted = scenario.corpus.row.values().items()
            expected = [one for one in scenario.expect if one.arm.values().items() >= wanted]
            assert expected, path
            assert all(one.kind and one.mechanism and one.culprits is not None for one in expected), path


def test_stress_sim_runs_every_scenario_of_the_built_in_engine() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.search(r"^SCENARIOS := (.*)$", makefile, re.MULTILINE)
    assert named is not None
    own = {scenario.name for scenario in list_scenarios() if scenario.target.name == "builtin"}
    assert set(named[1].split()) == own


def test_the_probe_needs_nothing_but_the_ledger_and_torch() -> None:
    """It is put on an engine's path, where nothing of hangrig's is installed."""
    allowed = {*sys.stdlib_module_names, "torch", "sglang", "vllm"}
    found = set()
    for path in (ROOT / "serving" / "probe" / "hangrig_probe").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module or "")
    foreign = {name for name in found if name.partition(".")[0] not in allowed}
    assert foreign and {name for name in foreign if not name.startswith("harness.ledger")} == set()


def test_the_constraints_pin_torch_and_the_package_does_not() -> None:
    pinned = (ROOT / "constraints" / "cpu.txt").read_text()
    assert re.search(r"^torch==2\.\d+\.\d+$", pinned, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.7" in project["dependencies"]


def test_no_module_of_the_harness_is_left_out_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(
        c for c in contracts if c["name"] == "only the commands, the plugin and the run see reports"
    )
    modules = {f"harness.{path.stem}" for path in (ROOT / "harness").glob("*.py")} | {
        f"harness.{path.parent.name}" for path in (ROOT / "harness").glob("*/__init__.py")
    }
    exempt = {"harness.__init__", "harness.cli", "harness.corpus", "harness.pytest_plugin", "harness.run"}
    assert set(contract["source_modules"]) == modules - exempt


def test_readme_names_only_files_and_make_targets_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / link).exists(), link
