"""What the audit reads, and how it says what it could not; suppressions, the baseline, three formats."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from audit_rig import audit, write_tree
from typer.testing import CliRunner

from harness.audit import scan as scan_module
from harness.audit.findings import Finding
from harness.audit.rules import RULES
from harness.audit.scan import scan
from harness.audit.source import AuditError, locate
from harness.cli import app
from harness.store import load_schema

ROOT = Path(__file__).resolve().parents[1]
PINS = "import torch\ndef f(n):\n    return torch.empty(n, pin_memory=True)\n"
FINE = "def f(n):\n    return n\n"


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def rules_of(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one finding, seen from the folder above it."""
    monkeypatch.chdir(tmp_path)
    return write_tree(tmp_path / "engine", {"__init__.py": "", "a.py": FINE, "lora/b.py": PINS})


# --- files ---


def test_a_file_that_cannot_be_read_is_told_and_hides_nothing(tree: Path) -> None:
    (tree / "broken.py").write_text("def f(:\n")
    (tree / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (tree / "odd.py").write_bytes(b"name = '\xe9'\n")
    (tree / "codec.py").write_bytes(b"# coding: klingon\n")
    (tree / "null.py").write_bytes(b"x = 1\0\n")
    (tree / "mac.py").write_bytes(PINS.replace("\n", "\r").encode())
    (tree / "bom.py").write_bytes(b"\xef\xbb\xbf" + PINS.encode())
    (tree / "sum.py").write_text(
        f"def f(x):\n    return x.pin_memory() if {' + '.join(['a'] * 900)} else x\n"
    )
    (tree / "deep.py").write_text("x = " + "(" * 5000 + ")" * 5000 + "\n")
    found = audit(tree)
    told = {Path(one.path).name for one in found if one.rule == "HG001"}
    assert told == {"broken.py", "odd.py", "codec.py", "null.py", "deep.py", "sum.py"}
    assert {Path(one.path).name for one in found if one.rule == "HG103"} == {"mac.py", "bom.py", "b.py"}
    assert all(
        one.line >= 1 and one.message.startswith("not audited: ") for one in found if one.rule == "HG001"
    )


def test_a_file_that_goes_away_meanwhile_is_told(tree: Path) -> None:
    located = locate(str(tree))
    (tree / "a.py").unlink()
    found = scan(located, RULES, workers=1)
    assert [(one.rule, Path(one.path).name) for one in found] == [("HG001", "a.py"), ("HG103", "b.py")]


def test_tests_links_and_environments_are_left_out_unless_asked_for(tree: Path) -> None:
    write_tree(
        tree,
        {"test/c.py": PINS, "test_d.py": PINS, ".venv/e.py": PINS, "env/pyvenv.cfg": "", "env/f.py": PINS},
    )
    (tree / "again").symlink_to(tree)
    assert [one.path for one in audit(tree)] == ["engine/lora/b.py"]
    assert {Path(one.path).name for one in audit(tree, tests=True)} == {"b.py", "c.py", "test_d.py"}


def test_a_wheel_is_read_in_place(tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(tree.rglob("*.py")):
            archive.write(path, path.relative_to(tmp_path).as_posix())
    assert [one.path for one in audit(wheel)] == ["engine/lora/b.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", wheel.name]


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = "raise SystemExit('imported')\n"
    write_tree(
        tmp_path / "site", {"bombpkg/__init__.py": bomb, "bombpkg/lora/b.py": PINS, "bombone.py": PINS}
    )
    write_tree(tmp_path / "site", {"bombpkg/lora/__init__.py": bomb})
    info = {"METADATA": "Metadata-Version: 2.1\nName: bomb-dist\nVersion: 1\n", "RECORD": "bombone.py,,\n"}
    write_tree(tmp_path / "site" / "bomb_dist-1.dist-info", info)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir("/")
    for name, paths in (
        ("bombpkg", ["bombpkg/lora/b.py"]),
        ("bombpkg.lora", ["bombpkg/lora/b.py"]),
        ("bombone", ["bombone.py"]),
        ("bomb-dist", ["bombone.py"]),
    ):
        found = scan(locate(name), ["HG103"], workers=1)
        assert [one.path.removeprefix(f"{tmp_path.relative_to('/')}/site/") for one in found] == paths
    assert not [name for name in sys.modules if name.startswith("bomb")]


def test_workers_find_what_one_process_finds_and_end(tmp_path: Path) -> None:
    files = {f"engine/m{number}.py": PINS if number % 7 == 0 else FINE for number in range(100)}
    located = locate(str(write_tree(tmp_path, files)))
    others = set(scan_module.multiprocessing.active_children())  # ranks of other tests
    alone = scan(located, RULES, workers=1)
    assert len(alone) == 15
    assert scan(located, RULES, workers=2) == alone
    assert set(scan_module.multiprocessing.active_children()) == others


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nowhere/at/all", "does not exist"),
        ("nowhere.whl", "does not exist"),
        ("no_such_package_here", "no package that this Python has"),
        ("no-such-package.sub", "no package that this Python has"),
    ],
)
def test_what_is_not_there_is_told(what: str, said: str) -> None:
    with pytest.raises(AuditError, match=said):
        locate(what)


def test_a_folder_without_python_and_a_damaged_wheel_are_told(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="no Python files"):
        locate(str(tmp_path))
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"PK\3\4 no zip")
    with pytest.raises(AuditError, match="no wheel that can be read"):
        locate(str(wheel))


# --- suppression ---


@pytest.mark.parametrize(
    "source",
    [
        PINS.replace("True)", "True)  # hangrig: allow HG103 -- CUDA graphs need it"),
        PINS.replace("    return", "    # hangrig: allow HG104, HG103 -- reason\n    return"),
        PINS.replace("    return", "    # hangrig: allow HG103 -- reason\n    # and more words\n    return"),
        PINS.replace("True)", "\n        True,\n    )  # noqa: X1  # hangrig: allow HG103 -- reason").replace(
            "=\n", "="
        ),
    ],
)
def test_a_suppression_with_a_reason_suppresses(tree: Path, source: str) -> None:
    (tree / "lora" / "b.py").write_text(source)
    (one,) = audit(tree)
    assert (one.rule, one.suppressed) == ("HG103", "inline") and one.reason


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("hangrig: allow HG103", "has no reason"),
        ("hangrig: allow HG103 --", "has no reason"),
        ("hangrig: allow HG999 -- reason", "HG999: no such rule"),
        ("hangrig: allow -- reason", "names no rule"),
        ("hangrig: allow HG001 -- reason", "cannot be allowed"),
    ],
)
def test_a_bad_suppression_suppresses_nothing_and_is_told(tree: Path, comment: str, said: str) -> None:
    (tree / "lora" / "b.py").write_text(PINS.replace("True)", f"True)  # {comment}"))
    found = audit(tree)
    assert rules_of(found) == ["HG002", "HG103"] and not any(one.suppressed for one in found)
    assert said in found[0].message


@pytest.mark.parametrize(
    "source",
    [
        PINS.replace("True)", "True)  # hangrig: allow HG104 -- reason"),
        PINS.replace("    return", "    # hangrig: allow HG103 -- reason\n\n    return"),
        PINS.replace("    return", "    s = '# hangrig: allow HG103 -- reason'\n    return"),
    ],
)
def test_a_suppression_of_another_rule_or_place_does_not_count(tree: Path, source: str) -> None:
    (tree / "lora" / "b.py").write_text(source)
    assert [(one.rule, one.suppressed) for one in audit(tree)] == [("HG103", "")]


# --- the command ---


def test_text_names_place_reason_and_what_to_do_and_exits_1(tree: Path) -> None:
    done = call("engine")
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("engine/lora/b.py:3: HG103 torch.empty(pin_memory=True) asks no platform")
    assert "→ ask the platform" in done.stdout
    assert "1 findings in 3 files" in done.stdout


def test_json_is_as_the_contract_says(tree: Path) -> None:
    done = call("engine", "--format", "json")
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("audit"))
    assert done.exit_code == 1 and document["files"] == 3 and document["schema"] == 1
    (one,) = document["findings"]
    assert (one["rule"], one["path"], one["line"], one["suppressed"]) == (
        "HG103",
        "engine/lora/b.py",
        3,
        False,
    )
    page, _, anchor = one["docs"].partition("#")
    assert f'<a id="{anchor}"></a>' in (ROOT / page).read_text()


def test_no_finding_exits_0(tree: Path) -> None:
    assert call(tree / "a.py").exit_code == 0
    assert call("engine", "--ignore", "HG103").exit_code == 0
    assert call("engine", "--select", "HG104,HG106").exit_code == 0
    assert call("engine", "--select", "HG103").exit_code == 1


def test_select_still_tells_what_was_not_audited(tree: Path) -> None:
    (tree / "broken.py").write_text("def f(:\n")
    done = call("engine", "--select", "HG104")
    assert done.exit_code == 1 and "HG001" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/x"], "does not exist"),
        (["engine", "--format", "xml"], "allowed: text, json, sarif"),
        (["engine", "--select", "HG9"], "no such rule; there are HG001"),
        (["engine", "--ignore", "pinned"], "no such rule"),
        (["engine", "--baseline", "none.json"], "none.json: does not exist; write it with --write-baseline"),
        (["engine", "--baseline", "engine/a.py"], "no baseline that can be read"),
        (["engine", "--write-baseline", "no/folder/b.json"], "cannot be written"),
        (["engine", "--reference", "nowhere/x"], "nowhere/x: does not exist"),
    ],
)
def test_bad_usage_exits_2(tree: Path, arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split()) and done.stdout == ""


def test_entries_that_are_none_are_told_by_number(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('{"schema": 1, "entries": [{"fingerprint": "x"}, {"rule": "HG103"}]}')
    done = call("engine", "--baseline", "b.json")
    assert done.exit_code == 2 and "entries[1].fingerprint is missing" in done.stderr


# --- the baseline ---


def test_a_baseline_survives_shifted_lines_and_sees_what_is_new(tree: Path, tmp_path: Path) -> None:
    assert call("engine", "--write-baseline", "b.json").exit_code == 0
    assert json.loads((tmp_path / "b.json").read_text())["entries"][0]["line"] == 3
    path = tree / "lora" / "b.py"
    path.write_text("# a line more\n\n\n" + PINS.replace("    return torch", "      return   torch"))
    done = call("engine", "--baseline", "b.json", "--format", "json")
    (one,) = json.loads(done.stdout)["findings"]
    assert done.exit_code == 0 and (one["line"], one["suppressed"], one["suppressed_by"]) == (
        6,
        True,
        "baseline",
    )
    path.write_text(PINS + PINS)  # the same line once more is a new finding
    done = call("engine", "--baseline", "b.json", "--format", "json")
    assert done.exit_code == 1
    assert [one["suppressed"] for one in json.loads(done.stdout)["findings"]] == [True, False]


def test_a_baseline_tells_its_stale_entries_and_leaves_inline_ones_out(tree: Path, tmp_path: Path) -> None:
    assert call("engine", "--write-baseline", "b.json").exit_code == 0
    path = tree / "lora" / "b.py"
    path.write_text(PINS.replace("True)", "True)  # hangrig: allow HG103 -- reason"))
    done = call("engine", "--baseline", "b.json")
    assert done.exit_code == 0
    assert "1 allowed in the source; 1 entries of the baseline match nothing any more" in done.stdout
    assert "match nothing" not in call("engine", "--baseline", "b.json", "--select", "HG101").stdout
    assert "baseline written, 0 entries" in call("engine", "--write-baseline", "b.json").stdout


# --- SARIF ---

_TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["$schema", "version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "additionalProperties": False,
                "properties": {
                    "tool": {"$ref": "#/$defs/tool"},
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "originalUriBaseIds": {"type": "object"},
                    "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
                },
            },
        },
    },
    "$defs": {
        "tool": {
            "required": ["driver"],
            "properties": {
                "driver": {
                    "required": ["name", "rules"],
                    "properties": {
                        "name": {"type": "string"},
                        "rules": {"type": "array", "items": {"$ref": "#/$defs/rule"}},
                    },
                }
            },
        },
        "rule": {
            "required": ["id", "name", "shortDescription", "fullDescription", "help"],
            "properties": {
                "shortDescription": _TEXT,
                "fullDescription": _TEXT,
                "help": {**_TEXT, "required": ["text", "markdown"]},
                "helpUri": {"type": "string", "pattern": "^https?://"},
                "defaultConfiguration": {"properties": {"level": {"enum": ["none", "note", "warning", "error"]}}},
            },
        },
        "result": {
            "required": ["ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"],
            "additionalProperties": False,
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer"},
                "level": {"enum": ["none", "note", "warning", "error"]},
                "message": _TEXT,
                "locations": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/location"}},
                "partialFingerprints": {"additionalProperties": {"type": "string"}},
                "suppressions": {
                    "items": {"required": ["kind"], "properties": {"kind": {"enum": ["inSource", "external"]}}}
                },
            },
        },
        "location": {
            "required": ["physicalLocation"],
            "properties": {
                "physicalLocation": {
                    "required": ["artifactLocation", "region"],
                    "properties": {
                        "artifactLocation": {
                            "required": ["uri"],
                            "properties": {"uri": {"pattern": r"^(?!/)(?![a-z]+:)[^\\ ]+$"}},
                        },
                        "region": {"required": ["startLine"], "properties": {"startLine": {"minimum": 1}}},
                    },
                }
            },
        },
    },
}  # fmt: skip
"""What SARIF 2.1.0 (sections 3.13 to 3.58) and code scanning require of the parts that are written here."""


def test_sarif_is_what_code_scanning_takes(tree: Path) -> None:
    write_tree(
        tree,
        {
            "my file.py": PINS + PINS.replace("True)", "True)  # hangrig: allow HG103 -- why not"),
            "x.py": "(\n",
        },
    )
    done = call("engine", "--format", "sarif", "--docs-url", "https://example.org/audit.md")
    document = json.loads(done.stdout)
    jsonschema.validate(document, SARIF)
    assert done.exit_code == 1
    (run,) = document["runs"]
    rules, results = run["tool"]["driver"]["rules"], run["results"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert rules[3]["helpUri"] == f"https://example.org/audit.md#{rules[3]['id'].lower()}"
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in results)
    places = [one["locations"][0]["physicalLocation"] for one in results]
    found = [(one["artifactLocation"]["uri"], one["region"]["startLine"]) for one in places]
    assert found == [
        ("engine/lora/b.py", 3),
        ("engine/my%20file.py", 3),
        ("engine/my%20file.py", 6),
        ("engine/x.py", 1),
    ]
    assert [one.get("suppressions") for one in results] == [
        None, None, [{"kind": "inSource", "justification": "why not"}], None,
    ]  # fmt: skip
    prints = [one["partialFingerprints"]["primaryLocationLineHash"] for one in results]
    assert len(set(prints)) == len(prints)


def test_sarif_without_an_address_makes_none_up(tree: Path) -> None:
    document = json.loads(call("engine", "--format", "sarif").stdout)
    rules = document["runs"][0]["tool"]["driver"]["rules"]
    assert not any("helpUri" in rule for rule in rules)
    assert all(f"docs/audit.md#{rule['id'].lower()}" in rule["help"]["text"] for rule in rules)


def test_every_rule_has_its_place_on_the_page() -> None:
    text = (ROOT / "docs" / "audit.md").read_text()
    for rule in RULES.values():
        assert f'<a id="{rule.id.lower()}"></a>' in text and f"{rule.id} {rule.name}" in text
