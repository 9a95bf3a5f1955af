"""Known issues: the file and its mistakes, what is known, changed or new, and where a reader sees it."""

from __future__ import annotations

import io
import json
import tomllib
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_fixture import ARMS, SCENARIO, RunBuilder, stream_order_diagnosis
from typer.testing import CliRunner

import reports
from harness import run as runs
from harness.cli import app
from harness.known_issues import again, load_known_issues
from harness.request import BadRequest
from harness.store import load_schema
from reports import terminal
from reports.known import new_issues
from reports.model import Result

SIGNATURE = "hang/stream-order/compute/graph.replay/-/serving"
LINK = "https://github.com/sgl-project/sglang/issues/39423"
TODAY = date(2026, 12, 1)
FITTING = {
    "scenario": SCENARIO,
    "kind": "hang",
    "mechanism": "stream-order",
    "stream": "compute",
    "operation": "graph.replay decode[4]",
    "culprit": "worker",
}


def file(folder: Path, *issues: dict[str, Any], name: str = "known-issues.toml") -> Path:
    """A file of known issues; the keys that every entry needs are filled in."""
    lines = []
    for issue in issues:
        entry = {"signature": SIGNATURE, "link": LINK, "expires": date(2027, 1, 31), "note": "a fence is due"}
        lines.append("[[issue]]")
        for key, value in (entry | issue).items():
            lines.append(f"{key} = {value.isoformat() if isinstance(value, date) else json.dumps(value)}")
    path = folder / name
    path.write_text("\n".join(lines))
    return path


def hung(folder: Path, verdict: str = "pass", **changes: Any) -> RunBuilder:
    builder = RunBuilder(folder)
    diagnosis = {"signature": SIGNATURE, **changes}
    builder.trial(ARMS[1], 0, "hang", expected="any", verdict=verdict, diagnosis=diagnosis)
    return builder


def reported(folder: Path, *issues: dict[str, Any], today: date = TODAY, **changes: Any) -> Result:
    """The reports of a run with one hang, whose file of known issues has ``issues``."""
    known = load_known_issues(file(folder, *issues), today)
    return reports.write_all(hung(folder, **changes).finish(known_issues=known))


def status(result: Result) -> tuple[str, str]:
    (row,) = result.signatures
    return row.status, row.known.why


# --- the file ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("issue = 3", "issue=3: is no list of tables; write [[issue]]"),
        ("[[issues]]", "issues=[{}]: unknown key; did you mean issue? allowed: issue"),
        ("[[issue]", "is no TOML"),
        ("[[issue]]", "issue.1.signature: is missing; add it"),
        ({"expires": "soon"}, "issue.1.expires=soon: is no date; write a day without quotes, as 2027-01-31"),
        (
            {"link": "SGL-3"},
            "issue.1.link=SGL-3: is no http or https address; write the address of the report",
        ),
        ({"link": "https://..."}, "issue.1.link=https://...: is no http or https address"),
        ({"link": "https://me:pw@host/1"}, "holds credentials"),
        ({"note": " "}, "issue.1.note= : is empty"),
        ({"mechanism": "stream"}, "issue.1.mechanism=stream: is not allowed; allowed: collective-skipped, "),
        ({"kind": "none"}, "issue.1.kind=none: is not allowed; allowed: hang, slow"),
        ({"scenarios": "x"}, "issue.1.scenarios=x: unknown key; did you mean scenario? allowed: signature, "),
    ],
)
def test_a_mistake_names_file_key_value_and_what_to_do(
    tmp_path: Path, text: str | dict[str, Any], said: str
) -> None:
    path = file(tmp_path, text) if isinstance(text, dict) else tmp_path / "known-issues.toml"
    if isinstance(text, str):
        path.write_text(text)
    with pytest.raises(BadRequest) as raised:
        load_known_issues(path)
    assert f"{path}: " in str(raised.value) and said in str(raised.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as raised:
        load_known_issues(file(tmp_path, {"link": "x"}, {"stream": "side", "note": ""}))
    assert [line.split("=")[0].rpartition(" ")[2] for line in str(raised.value).splitlines()] == [
        "issue.1.link",
        "issue.2.note",
        "issue.2.stream",
    ]


def test_one_signature_twice_is_refused_unless_scenarios_part_them(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"issue\.2\.signature=.* is listed as issue 1 too"):
        load_known_issues(file(tmp_path, {}, {"note": "other"}))
    record = load_known_issues(file(tmp_path, {"scenario": "a"}, {"scenario": "b"}), TODAY)
    assert [issue["scenario"] for issue in record["issues"]] == ["a", "b"]
    assert record["on"] == "2026-12-01" and record["file"] == "known-issues.toml"


@pytest.mark.parametrize("command", ["run", "report", "recheck", "rerun"])
def test_a_bad_file_stops_every_command_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    stored = hung(tmp_path).finish()
    before = (stored / "run.json").read_bytes()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known-issues.toml").write_text("[[issue]]\nlink = 3\n")
    subject = "dp-retract" if command == "run" else str(stored)
    done = CliRunner().invoke(app, [command, subject])
    assert done.exit_code == 2, done.output
    assert "known-issues.toml: issue.1.link=3" in done.stderr
    assert (stored / "run.json").read_bytes() == before and not (stored / "report.json").exists()
    absent = CliRunner().invoke(app, [command, subject, "--known-issues", "none.toml"])
    assert absent.exit_code == 2 and "none.toml: cannot be read" in absent.stderr


# --- known, changed, new ---


def test_without_a_file_a_hang_is_new(tmp_path: Path) -> None:
    result = reports.write_all(hung(tmp_path).finish())
    assert status(result) == ("new", "")


@pytest.mark.parametrize("entry", [{}, FITTING, {"operation": "graph.replay"}], ids=["bare", "full", "loose"])
def test_a_listed_signature_is_known(tmp_path: Path, entry: dict[str, Any]) -> None:
    assert status(reported(tmp_path, entry)) == ("known", "")


@pytest.mark.parametrize(
    ("key", "listed", "why"),
    [
        ("scenario", "dp-retract", "the scenario is dp-pinned-hang, listed is dp-retract"),
        ("kind", "livelock", "the kind is hang, listed is livelock"),
        ("mechanism", "rank-dead", "the mechanism is stream-order, listed is rank-dead"),
        ("stream", "update", "the stream is compute, listed is update"),
        ("operation", "all_reduce", "the operation is graph.replay decode[8], listed is all_reduce"),
        ("culprit", "server", "the culprit is worker, listed is server"),
    ],
)
def test_a_listed_signature_that_looks_different_has_changed(
    tmp_path: Path, key: str, listed: str, why: str
) -> None:
    assert status(reported(tmp_path, {**FITTING, key: listed})) == ("changed", why)


OTHER = "hang/stream-order/update/graph.replay/-/serving"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"scenario": SCENARIO}, "changed"),
        ({"operation": "graph.replay prefill"}, "changed"),
        ({}, "new"),  # one mechanism has many causes
        ({"scenario": "dp-retract"}, "new"),
        ({"operation": "all_reduce"}, "new"),
        ({"scenario": SCENARIO, "operation": "all_reduce"}, "new"),
        ({"scenario": SCENARIO, "mechanism": "livelock"}, "new"),
        ({"scenario": SCENARIO, "kind": "dead"}, "new"),
    ],
)
def test_another_signature_of_the_same_root_has_changed(
    tmp_path: Path, entry: dict[str, Any], expected: str
) -> None:
    found, why = status(reported(tmp_path, {"signature": OTHER, **entry}))
    assert found == expected
    assert (f"the signature is {SIGNATURE}, listed is {OTHER}" in why) is (expected == "changed")


@pytest.mark.parametrize(
    ("today", "expected"),
    [
        (date(2027, 1, 31), ("known", "")),
        (date(2027, 2, 1), ("new", "its entry expired on 2027-01-31")),
    ],
)
def test_an_entry_counts_through_its_last_day(tmp_path: Path, today: date, expected: tuple[str, str]) -> None:
    assert status(reported(tmp_path, {}, today=today)) == expected


def test_the_entry_that_fits_best_is_taken(tmp_path: Path) -> None:
    near = {"signature": OTHER, "scenario": SCENARIO, "note": "same root"}
    gone = {"scenario": "elsewhere", "expires": date(2026, 1, 1), "note": "expired"}
    fits = {"scenario": SCENARIO, "note": "fits"}
    (row,) = reported(tmp_path, gone, near, fits).signatures
    assert (row.status, row.known.note) == ("known", "fits")
    folder = tmp_path / "again"
    folder.mkdir()
    (row,) = reported(folder, gone, near).signatures
    assert (row.status, row.known.note) == ("changed", "same root")


def test_one_trial_that_changed_makes_its_signature_changed(tmp_path: Path) -> None:
    builder = hung(tmp_path)
    other = {"signature": SIGNATURE, "stream": "update"}
    builder.trial(ARMS[1], 1, "hang", expected="any", diagnosis=other)
    known = load_known_issues(file(tmp_path, {"stream": "compute"}), TODAY)
    result = reports.write_all(builder.finish(known_issues=known))
    assert status(result) == ("changed", "the stream is update, listed is compute")
    assert "a known issue that has changed" in (builder.path / "summary.md").read_text()


def test_a_known_hang_that_was_not_expected_still_fails(tmp_path: Path) -> None:
    checks = [{"name": "hang", "verdict": "fail", "reason": "hung where none was allowed"}]
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[1], 0, "hang", verdict="fail", checks=checks, diagnosis={"signature": SIGNATURE})
    known = load_known_issues(file(tmp_path, FITTING), TODAY)
    result = reports.write_all(builder.finish(known_issues=known))
    assert (result.verdict, result.exit, status(result)[0]) == ("fail", 1, "known")
    failure = next(ET.parse(builder.path / "junit.xml").iter("failure"))
    said = f"known issue: a fence is due, {LINK} (until 2027-01-31)"
    assert failure.get("message") == f"hang: hung where none was allowed; {said}"
    assert said in (failure.text or "")


# --- where it is seen ---


def test_every_sink_shows_the_link(tmp_path: Path) -> None:
    result = reported(tmp_path, {**FITTING, "title": "D1: records lost"})
    path = Path(result.run)
    document = json.loads((path / "report.json").read_text())
    jsonschema.validate(document, load_schema("report"))
    jsonschema.validate(json.loads((path / "run.json").read_text()), load_schema("run"))
    (row,) = document["signatures"]
    assert (row["status"], row["link"], row["expires"], row["note"], row["title"], row["why"]) == (
        "known", LINK, "2027-01-31", "a fence is due", "D1: records lost", None,
    )  # fmt: skip
    page = (path / "report.html").read_text()
    assert page.count(f'<a href="{LINK}" rel="noopener noreferrer">') == 2  # beside the hang, in the table
    assert f"D1: records lost; <{LINK}>; until 2027-01-31" in (path / "summary.md").read_text()
    stream = io.StringIO()
    terminal.show(result, stream)
    assert f"  known issue: D1: records lost, {LINK} (until 2027-01-31)\n" in stream.getvalue()
    assert "new signature" not in stream.getvalue()
    assert "[[issue]]" not in page + (path / "summary.md").read_text()


def test_an_address_that_is_none_is_no_link(tmp_path: Path) -> None:
    known = load_known_issues(file(tmp_path, {}), TODAY)
    known["issues"][0]["link"] = "javascript:alert(1)"
    result = reports.write_all(hung(tmp_path).finish(known_issues=known))
    page = (Path(result.run) / "report.html").read_text()
    assert 'href="javascript' not in page and "javascript:alert(1)" in page


def test_a_damaged_record_makes_everything_new(tmp_path: Path) -> None:
    for number, record in enumerate(
        ([], {"on": "today", "issues": 3}, {"on": "2026-12-01", "issues": [{"signature": SIGNATURE}]})
    ):
        folder = tmp_path / str(number)
        assert status(reports.write_all(hung(folder).finish(known_issues=record)))[0] == "new"


def test_the_block_of_a_new_hang_needs_only_its_link(tmp_path: Path) -> None:
    result = reports.write_all(hung(tmp_path).finish())
    summary = (Path(result.run) / "summary.md").read_text()
    text = summary[summary.index("    [[issue]]") :].split("\n\n")[0]
    text = "\n".join(line.removeprefix("    ") for line in text.splitlines())
    path = tmp_path / "known-issues.toml"
    path.write_text(text)
    with pytest.raises(BadRequest) as raised:
        load_known_issues(path)
    assert str(raised.value).count("\n") == 0 and "issue.1.link=" in str(raised.value)
    written = text.replace(tomllib.loads(text)["issue"][0]["link"], LINK)
    path.write_text(written)
    known = load_known_issues(path, date.fromisoformat(result.started_utc[:10]))
    assert status(reports.write_all(hung(tmp_path / "again").finish(known_issues=known))) == ("known", "")
    assert "[[issue]]" in (Path(result.run) / "report.html").read_text()


def test_the_block_survives_hostile_text(tmp_path: Path) -> None:
    hostile = 'a"b\\c\n\x7f[[issue]] \ud800'
    diagnosis = {**stream_order_diagnosis(), "signature": hostile, "operation": {"label": hostile}}
    result = reports.write_all(hung(tmp_path, **diagnosis).finish())
    (text,) = new_issues(result)
    (entry,) = tomllib.loads(text)["issue"]
    assert entry["signature"].startswith('a"b\\c ')


def test_the_terminal_has_one_line_for_new_ones(tmp_path: Path) -> None:
    path = hung(tmp_path).finish()
    done = CliRunner().invoke(app, ["report", str(path)])
    assert "1 new signature; the report has an entry for known-issues.toml for it\n" in done.stdout
    assert "[[issue]]" not in done.stdout


# --- remembered ---


def test_reports_keep_to_the_file_that_the_run_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = hung(tmp_path).finish()
    assert runs.report(path).report["signatures"][0]["status"] == "new"
    file(tmp_path, {"note": "first"})
    assert runs.report(path).report["signatures"][0]["note"] == "first"  # it remembered none
    file(tmp_path, {"note": "second"})
    assert runs.report(path).report["signatures"][0]["note"] == "first"
    named = file(tmp_path, {"note": "third"}, name="other.toml")
    assert runs.report(path, named).report["signatures"][0]["note"] == "third"
    assert json.loads((path / "run.json").read_text())["known_issues"]["file"] == "other.toml"


def test_a_rerun_takes_along_what_the_run_remembers_and_dates_it_anew(tmp_path: Path) -> None:
    record = load_known_issues(file(tmp_path, {}), date(2020, 1, 1))
    anew = again(record)
    assert anew is not None and anew["issues"] == record["issues"] and anew["on"] > "2026"
    assert again(None) is None
