"""What reports say of a foreign engine: its own words beside the diagnosis, its probe, its command."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_fixture import RunBuilder

from harness.store import load_schema, write_json
from reports import write_all
from reports.engine import read_engine
from reports.terminal import show

ARM = {"probe": "on"}


def engine(**changes: Any) -> dict[str, Any]:
    document = {
        "schema": 1,
        "engine": "sglang 0.5.23",
        "command": "python -m sglang.launch_server --tp-size 2",
        "env": {"SGLANG_TEST_RETRACT": "1"},
        "said": [
            {"at_s": 5.0, "source": "health", "text": "/health answered 200 after 0.1 s"},
            {"at_s": 24.5, "source": "health", "text": "/health answered 503 after 20.0 s"},
        ],
        "deaths": [{"seat": 0, "pid": 11, "at_s": 189.0}],
        "exceptions": {},
        "faults": [{"index": 0, "name": "stop", "seat": 1, "at_s": 4.0, "what": "SIGSTOP"}],
        "probe": {
            "on": True,
            "processes": [
                {
                    "seat": 1,
                    "hooks": {"Scheduler.run_batch": "on", "Scheduler.gone": "missing: no such name"},
                    "errors": ["ledger: no space left"],
                    "bypass": ["sglang/srt/managers/overlap_utils.py:40"],
                }
            ],
        },
        "retractions": 12,
        "preemptions": 0,
        "requests": {"sent": 40, "finished": 7, "failed": 0},
        "metrics": {"sglang:num_running_reqs": 8.0},
    }
    return document | changes


def reported(tmp_path: Path, document: dict[str, Any], outcome: str = "stopped") -> tuple[str, str, str]:
    """HTML, Markdown and the terminal's text."""
    run = RunBuilder(tmp_path, device="cpu")
    trial = run.trial(
        ARM,
        7,
        outcome,
        expected="always",
        target="sglang",
        diagnosis={"kind": "stopped", "last_progress_s": 4.5, "captured_s": 6.0},
    )
    write_json(trial.evidence / "engine.json", document)
    result = write_all(run.path)
    text = io.StringIO()
    show(result, text)
    return (run.path / "report.html").read_text(), (run.path / "summary.md").read_text(), text.getvalue()


def test_the_document_fits_its_schema() -> None:
    jsonschema.validate(engine(), load_schema("engine"))


def test_the_engine_s_first_word_after_the_stall_stands_beside_the_diagnosis(tmp_path: Path) -> None:
    said = "itself first said, 20.0 s after the last progress (health): /health answered 503 after 20.0 s"
    for text in reported(tmp_path, engine()):
        assert said in " ".join(text.replace("\\", "").split())
        assert "hangrig had its evidence after 1.5 s" in " ".join(text.split())


def test_an_engine_that_said_nothing_is_told_as_that(tmp_path: Path) -> None:
    page, *_ = reported(tmp_path, engine(said=[{"at_s": 1.0, "source": "health", "text": "fine"}]))
    assert "sglang 0.5.23 itself said nothing of it until it was ended" in page


def test_a_probe_that_failed_in_part_and_what_it_does_not_reach_are_told(tmp_path: Path) -> None:
    for text in reported(tmp_path, engine(), outcome="healthy"):
        plain = " ".join(text.replace("\\", "").split())
        assert "rank 1: hook Scheduler.gone is missing: no such name; rank 1: ledger: no space left" in plain
        assert (
            "1 place in the engine may pin or copy without asking" in plain and "overlap_utils.py:40" in plain
        )
        assert "no evidence about an accelerator" in plain


def test_the_whole_command_is_in_the_page(tmp_path: Path) -> None:
    page, *_ = reported(tmp_path, engine())
    assert "python -m sglang.launch_server --tp-size 2" in page


def test_hostile_words_of_an_engine_stay_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    page, summary, text = reported(
        tmp_path,
        engine(engine=hostile, command=hostile, said=[{"at_s": 9.0, "source": "log", "text": hostile}]),
    )
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "<script" not in summary and hostile in text


@pytest.mark.parametrize(
    "document", [{}, {"said": 7, "probe": [1], "deaths": [{}], "faults": [{"seat": None}]}]
)
def test_a_damaged_document_gives_what_it_holds(tmp_path: Path, document: dict[str, Any]) -> None:
    assert read_engine(document).said == ()
    page, *_ = reported(tmp_path, document)
    assert "itself said nothing of it" in page
