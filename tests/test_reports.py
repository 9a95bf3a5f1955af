"""Every sink of one stored run: what programs parse, what people read, what a browser must not do."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest
from junitparser import Failure, JUnitXml
from prometheus_client.parser import text_string_to_metric_families
from run_fixture import ARMS, NOTE, SCENARIO, RunBuilder, d1_run, merged, write_evidence

import reports
from harness.diagnosis_model import Missing, nothing_stopped
from harness.store import read_run, write_json
from reports import html, junit, markdown, terminal
from reports.result import build

HOSTILE = "<script>alert(1)</script> \"&' | `code` \x1b[31m\x00\ud800 {{ 7 * 7 }} [link](javascript:1)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its reports: two arms as expected, one hang of another kind that no one expected."""
    out = tmp_path_factory.mktemp("runs")
    builder = RunBuilder(out)
    for seed in range(6):
        builder.trial(ARMS[0], seed)
        expected = {"expected": "sometimes", "min_rate": 0.3, "mechanism_expected": "stream-order"}
        builder.trial(ARMS[1], seed, "hang" if seed < 4 else "healthy", tokens_expected="any", **expected)
    builder.trial(
        {"pinned": "pinned_sync"},
        0,
        "hang",
        verdict="fail",
        checks=[{"name": "hang", "verdict": "fail", "reason": "hung where none was allowed"}],
        diagnosis={"mechanism": "collective-skipped", "signature": "collective-skipped/dp/all_reduce"},
    )
    path = builder.finish()
    reports.write_all(path)
    return path


def test_what_was_slow_is_shown_and_called_no_hang(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[0], 0)
    said = {
        "kind": "slow", "mechanism": "rank-slow", "confidence": "supported", "signature": "slow/rank-slow/host",
        "stream": "host", "operation": None, "went_on_s": 14.2, "missing_evidence": [],
    }  # fmt: skip
    starved = "the watchdog itself was starved for 3.1 s (CPU pressure 97 %)"
    builder.trial(ARMS[0], 1, "slow", diagnosis=said, notes=[starved])
    path = builder.finish()
    reports.write_all(path)
    document = json.loads((path / "report.json").read_text())
    assert (document["verdict"], document["scenarios"][0]["arms"][0]["hangs"]["k"]) == ("pass", 0)
    assert document["headline"].endswith("behaved as expected; 1 trial was slow.")
    shown = io.StringIO()
    stored = read_run(path)
    terminal.show(build(stored), shown)
    texts = (shown.getvalue(), (path / "summary.md").read_text(), (path / "report.html").read_text())
    for text in texts:
        assert "slow: rank-slow" in text and "1 slow" in text and "What stopped" not in text
    assert all(starved in text for text in texts[1:])
    assert "it went on after 8.3 s" in texts[0] and "What was slow" in texts[1]
    assert "second sample 10.4 s, went on 14.2 s" in texts[2]


def schema(name: str) -> Any:
    return json.loads((resources.files("harness") / "schemas" / f"{name}.json").read_text())


def test_the_fixture_is_a_run_as_the_schemas_know_it(run: Path) -> None:
    hang = run / "trials" / "pinned=pinned-s0"
    capture = hang / "evidence"
    for name, path in (
        ("run", run / "run.json"),
        ("trial", hang / "trial.json"),
        ("diagnosis", hang / "diagnosis.json"),
        ("latency", hang / "latency.json"),
        ("manifest", capture / "manifest.json"),
        ("ledger", capture / "sample-1" / "ledger" / "rank1.json"),
        ("stacks", capture / "sample-1" / "stacks" / "rank1.json"),
        ("processes", capture / "sample-1" / "processes.json"),
    ):
        jsonschema.validate(json.loads(path.read_text()), schema(name))


def test_report_json_keeps_its_contract(run: Path) -> None:
    document = json.loads((run / "report.json").read_text())
    jsonschema.validate(document, schema("report"))
    assert document["verdict"] == "fail"
    assert document["exit"] == 1
    assert document["simulation"] is True
    assert document["run"] == str(run)
    arms = document["scenarios"][0]["arms"]
    assert [arm["arm"]["pinned"] for arm in arms] == ["pageable", "pinned", "pinned_sync"]
    assert [arm["hangs"]["k"] for arm in arms] == [0, 4, 1]
    assert set(arms[0]["latency_us"]) == {"step", "next_token_copy", "bitmask_copy", "token_count_copy"}
    assert document["signatures"][0]["count"] == 4


def test_junit_has_a_suite_a_scenario_and_a_case_a_trial(run: Path) -> None:
    root = ET.parse(run / "junit.xml").getroot()
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == [SCENARIO]
    suite = suites[0]
    counts = [suite.get(key) for key in ("tests", "failures", "errors", "skipped")]
    assert counts == ["13", "1", "0", "0"]
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert {case.get("classname") for case in cases.values()} == {SCENARIO}
    expected_hang = cases["pinned=pinned seed=0"]
    assert expected_hang.find("failure") is None
    assert "stream-order" in expected_hang.findtext("system-out", "")
    failure = cases["pinned=pinned_sync seed=0"].find("failure")
    assert failure is not None
    assert failure.get("message") == "hang: hung where none was allowed"
    assert "hangrig rerun" in (failure.text or "")
    assert list(cases["pinned=pageable seed=0"]) == []


def test_a_reader_of_ci_servers_counts_junit_as_we_do(run: Path) -> None:
    """junitparser reads what Jenkins, GitLab and GitHub's reporters read."""
    found = JUnitXml.fromfile(str(run / "junit.xml"))
    assert (found.tests, found.failures, found.errors, found.skipped) == (13, 1, 0, 0)
    cases = [case for suite in found for case in suite]
    assert all(case.classname == SCENARIO and case.name and case.time is not None for case in cases)
    (failed,) = [case for case in cases if case.result]
    assert isinstance(failed.result[0], Failure) and "hangrig rerun" in (failed.result[0].text or "")
    assert sum("stream-order" in (case.system_out or "") for case in cases) == 4


def test_a_summary_that_is_too_long_is_cut_between_lines_and_says_so() -> None:
    text = "".join(f"- line {number} é\n" for number in range(100))
    cut = markdown.fitted(text, 600)
    assert len(cut.encode()) <= 600
    kept, _, said = cut.partition("\n\nCut here")
    assert text.startswith(kept + "\n") and "report.html" in said
    assert markdown.fitted(text, len(text.encode())) == text


def test_junit_says_unknown_skipped_and_never_run(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, planned=[{"id": "lost", "scenario": SCENARIO, "arm": ARMS[0]}])
    builder.trial(ARMS[0], 0, "unknown")
    builder.trial(ARMS[1], 0, "skipped")
    root = ET.fromstring(junit.render(build(read_run(builder.finish()))))
    tags = {str(case.get("name")): [child.tag for child in case] for case in root.iter("testcase")}
    assert tags["pinned=pageable seed=0"] == ["error"]
    assert tags["pinned=pinned seed=0"] == ["skipped"]
    assert tags["lost"] == ["error"]
    assert (root.get("errors"), root.get("skipped")) == ("2", "1")


def test_junit_fails_an_arm_that_only_its_counts_condemn(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    for seed in range(8):
        builder.trial(ARMS[1], seed, expected="sometimes", min_rate=0.5)
    root = ET.fromstring(junit.render(build(read_run(builder.finish()))))
    failed = [case.get("name") for case in root.iter("testcase") if case.find("failure") is not None]
    assert failed == ["pinned=pinned (arm)"]


def test_metrics_parse_and_hold_the_rates(run: Path) -> None:
    text = (run / "metrics.prom").read_text()
    samples = {
        (sample.name, sample.labels.get("arm", ""), sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["hangrig_run_exit_status", "", ""] == 1.0
    assert samples["hangrig_arm_hang_rate_observed", "pinned=pinned", ""] == pytest.approx(4 / 6)
    assert samples["hangrig_arm_trials", "pinned=pinned", "hang"] == 4.0


def test_summary_says_verdict_arms_hangs_and_how_to_repeat_them(run: Path) -> None:
    text = (run / "summary.md").read_text()
    assert text.startswith("# fail: a-run\n")
    assert f"> **Simulation.** {NOTE}" in text
    row = "| `pinned=pinned` | sometimes | 4 of 6 | 22.3 to 95.7 % | 0 of 6 | pass |"
    assert row in text
    assert text.index("collective-skipped") < text.index("stream-order"), "the unexpected comes first"
    assert f"    hangrig rerun {run} pinned=pinned-s0" in text
    assert "the same in 3 other trials" in text


def test_terminal_is_plain_text_without_a_tty(run: Path) -> None:
    stream = io.StringIO()
    terminal.show(build(read_run(run)), stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "FAIL  dp-pinned-hang, pinned=pinned_sync: no hang was allowed, 1 of 1 hung" in text
    assert f"again with: hangrig rerun {run} pinned=pinned-s0\n" in text
    assert "stream: compute, graph.replay decode[8] #412 from serving/engine.py:212" in text


def test_every_report_tells_what_became_of_the_toggles(run: Path) -> None:
    """Requested, resolved and why; on a terminal only what somebody asked for and did not get."""
    stream = io.StringIO()
    terminal.show(build(read_run(run)), stream)
    why = "needs torch 2.8 or newer and CUDA"
    assert f"toggle symm_mem: on → off, {why}" in stream.getvalue()
    assert "toggle pinned" not in stream.getvalue()
    assert f"| `symm_mem=on` | `symm_mem=off` | 3 | {why} |" in (run / "summary.md").read_text()
    page = (run / "report.html").read_text()
    assert "<b><code>symm_mem=off</code></b>" in page and why in page
    told = {entry.get("name"): entry.get("value") for entry in ET.parse(run / "junit.xml").iter("property")}
    assert told["pinned=pinned: symm_mem"] == f"on → off, {why}"


# --- the page ----------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags, addresses and the text of a page, and checks that elements close in order."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_is_one_file_without_network_or_script(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    for address in page.addresses:
        assert address.startswith("#") or (run / unquote(address)).is_file(), address
    assert any("evidence/sample-1/ledger/rank1.json" in address for address in page.addresses)


def test_the_page_says_what_a_maintainer_needs(run: Path) -> None:
    text = Page((run / "report.html").read_text()).text
    verdict, simulation, arms = (text.index(word) for word in ("exit status 1", "Simulation.", "Arms"))
    assert verdict < simulation < arms
    for words in (
        NOTE,
        "22.3 to 95.7 %",
        "sometimes ≥ 30 %",
        "rank 1 (worker on node-0, pid 4001, sim:1)",
        "graph.replay decode[8] #412, enqueued at serving/engine.py:212 , unfinished for 6.2 s",
        "last progress 5.9 s, suspected 8.4 s, confirmed 10.4 s, captured 11.9 s",
        "native stack of rank 0: py-spy ended with status 1",
        "wait_result, step 62",
        "#183 all_reduce 8x64 float32",
        "compute of ranks 0, 1",
        f"hangrig rerun {run} pinned=pinned-s0",
        "hung where none was allowed",
        "symm_mem=on symm_mem=off",
        "Each curve is one arm",
        "hangrig run dp-pinned-hang",
        "cpu.cores 2",
    ):
        assert words in text, words


def test_equal_hangs_are_printed_once(run: Path) -> None:
    text = Page((run / "report.html").read_text()).text
    assert text.count("Ranks and streams in the last sample") == 2  # two signatures, five hangs
    assert "The same in 3 other trials" in text


def test_the_stalled_stream_of_the_culprit_stands_out(run: Path) -> None:
    rows = re.findall(r'<tr class="culprit">.*?</tr>', (run / "report.html").read_text(), flags=re.DOTALL)
    assert len(rows) == 2
    assert all("<td>compute</td>" in row and "411" in row for row in rows)


def test_no_simulation_banner_on_hardware(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, device="npu")
    builder.trial(ARMS[0], 0, device="npu")
    stored = read_run(builder.finish())
    assert "Simulation" not in html.render(build(stored), stored)
    assert "Simulation" not in markdown.render(build(stored))


def test_hostile_text_stays_text_in_every_sink(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    trial = builder.trial(
        {"pinned": HOSTILE},
        0,
        "hang",
        verdict="fail",
        scenario=HOSTILE,
        rerun=HOSTILE,
        checks=[{"name": HOSTILE, "verdict": "fail", "reason": HOSTILE}],
        diagnosis={
            "signature": HOSTILE,
            "proof": [
                {"fact": HOSTILE, "evidence": "../../../run.json"},
                {"fact": "x", "evidence": "javascript:1"},
            ],
            "culprits": [{"rank": 0, "role": HOSTILE, "node": HOSTILE, "pid": 1, "device": HOSTILE}],
            "missing_evidence": [{"what": HOSTILE, "why": HOSTILE}],
        },
        latency={"step": [1.0, 2.0], HOSTILE: [1.0, 2.0]},
    )
    write_evidence(trial, thread=HOSTILE)
    path = builder.finish(versions={HOSTILE: HOSTILE})
    reports.write_all(path)
    text = (path / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert not [address for address in page.addresses if ".." in address or ":" in address]
    ET.parse(path / "junit.xml")
    list(text_string_to_metric_families((path / "metrics.prom").read_text()))
    json.loads((path / "report.json").read_text())
    summary = (path / "summary.md").read_text()
    prose = re.sub(r"(?<!\\)(`+)[^`].*?\1", "", re.sub(r"^    .*$", "", summary, flags=re.MULTILINE))
    assert "<script>" not in prose
    assert not re.search(r"(?<!\\)\]\(", prose)
    stream = io.StringIO()
    terminal.show(build(read_run(path)), stream)
    assert not re.search(r"[\x00\x1b]", stream.getvalue())


def test_a_deep_stack_tree_is_cut_and_not_a_crash(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    trial = builder.trial(ARMS[0], 0, "hang", expected="any")
    node: dict[str, Any] = {"frame": "leaf", "members": ["rank 0 host"], "children": []}
    for level in range(150):
        members = [f"rank {rank} host" for rank in range(level + 2)]
        node = {"frame": f"level {level}", "members": members, "children": [node]}
    write_json(trial.evidence / "merged.json", {"roots": [node, *merged()["roots"]]})
    stored = read_run(builder.finish())
    text = Page(html.render(build(stored), stored)).text
    assert "deeper frames left out" in text
    assert "wait_external" in text


def test_writing_twice_gives_the_same_files(tmp_path: Path) -> None:
    path = d1_run(tmp_path, healthy=2, hung=1)
    names = ("report.json", "report.html", "summary.md", "junit.xml", "metrics.prom")
    reports.write_all(path)
    first = [(path / name).read_bytes() for name in names]
    reports.write_all(path)
    assert [(path / name).read_bytes() for name in names] == first
    assert not list(path.glob(".*.tmp"))


def test_what_stopped_nowhere_is_told_as_that(tmp_path: Path) -> None:
    """Trials that were not healthy all have a diagnosis.json; its kind ``none`` is no diagnosis to show."""
    nothing = nothing_stopped((), (Missing("a capture", "interrupted"),), simulation=True).to_json()
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[0], 0, "corrupt").write_diagnosis(nothing)
    builder.trial(ARMS[0], 1, "unknown").write_diagnosis(nothing)
    result = reports.write_all(builder.finish())
    stream = io.StringIO()
    terminal.show(result, stream)
    assert "unknown, without a diagnosis\n" in stream.getvalue()
    assert "missing evidence: a capture" in stream.getvalue() and "corrupt, " not in stream.getvalue()
    page = (builder.path / "report.html").read_text()
    assert "unknown, without a diagnosis" in page and "corrupt, without" not in page
    assert result.signatures == ()
