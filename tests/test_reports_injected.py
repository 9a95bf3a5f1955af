"""What faults did, in the report: which, where, when and on which rank; and that their record is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_fixture import ARMS, RunBuilder

from harness.store import read_run
from reports import html
from reports.injected import injected
from reports.result import build


def act(step: int, **more: Any) -> str:
    values = {"group": "experts", "operation": "all_reduce", "shape": "[4]", "capturing": False}
    told = {
        "fault": "skip",
        "index": 0,
        "rank": 1,
        "step": step,
        "at_s": 1.25,
        "site": "comm.enqueue",
        "values": values,
    }
    return json.dumps({**told, **more}) + "\n"


def run_with(tmp_path: Path, logs: dict[str, str]) -> Path:
    """Of two trials, of which the second had the faults of ``logs``, by file name."""
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[0], 0)
    trial = builder.trial(ARMS[0], 1)
    folder = trial.path / "faults"
    folder.mkdir(exist_ok=True)
    for name, text in logs.items():
        (folder / name).write_text(text)
    return builder.finish()


def test_acts_of_one_fault_at_one_site_are_one_line(tmp_path: Path) -> None:
    own = act(9, fault="block", index=1, site="rank.step", values={"step": 9}, at_s=2.5)
    path = run_with(
        tmp_path, {"rank0.jsonl": "", "rank1.jsonl": act(7) + act(8, at_s=1.5) + own + '{"fault": "ki'}
    )
    stored = read_run(path)
    results = {trial.id: trial for trial in build(stored).trials}
    views = [injected(one, results[one.id]) for one in stored.trials]
    assert views[0] is None
    assert views[1] is not None
    rows = [(r.rank, r.fault, r.site, r.where, r.step, r.last_step, r.at_s, r.acts) for r in views[1].rows]
    assert rows == [
        (1, "skip", "comm.enqueue", "group experts, operation all_reduce", 7, 8, 1.25, 2),
        (1, "block", "rank.step", "", 9, 9, 2.5, 1),
    ]


def test_the_page_has_them_labelled_as_injected(tmp_path: Path) -> None:
    path = run_with(tmp_path, {"rank0.jsonl": "", "rank1.jsonl": act(7, fault="<b>own</b>")})
    stored = read_run(path)
    page = html.render(build(stored), stored)
    section = page.partition("Injected: what was broken on purpose")[2].partition("<h2>")[0]
    assert "no diagnosis sees this" in section and "1 trial in which faults acted" in section
    assert "&lt;b&gt;own&lt;/b&gt;" in section and "<b>own</b>" not in page
    assert "group experts, operation all_reduce" in section and "1.2 s" in section
    assert "/faults/rank1.jsonl" in section


def test_faults_that_never_acted_are_counted_and_runs_without_faults_say_nothing(tmp_path: Path) -> None:
    stored = read_run(run_with(tmp_path / "a", {"rank0.jsonl": "", "rank1.jsonl": ""}))
    page = html.render(build(stored), stored)
    assert "In 1 trial with faults none acted" in page and "in which faults acted" not in page
    stored = read_run(run_with(tmp_path / "b", {}))
    assert "Injected" not in html.render(build(stored), stored)


def test_a_damaged_record_breaks_no_report(tmp_path: Path) -> None:
    odd = json.dumps({"fault": 7, "site": None, "step": "x", "at_s": "soon", "values": [1]}) + "\n[]\n"
    stored = read_run(run_with(tmp_path, {"rank1.jsonl": odd, "rankx.jsonl": act(1)}))
    page = html.render(build(stored), stored)
    assert "1 trial in which faults acted" in page
