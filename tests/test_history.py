"""Many nights on one page: a step that is there is found, chance is none, and what broke is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.rates import rate
from harness.store import load_schema
from harness.stored import SCHEMA
from reports import history, history_page
from reports.history import History, HistoryError, read

HOSTILE = "<script>alert(1)</script>"
PAGES = 60


@dataclass
class Nights:
    """Writes runs as their two documents alone, one a day."""

    folder: Path
    made: list[str] = field(default_factory=list)

    def add(
        self,
        hangs: tuple[int, int] = (0, 20),
        step_us: float | None = 9000.0,
        *,
        arms: Sequence[str] = ("pageable",),
        device: str = "npu",
        verdict: str = "pass",
        headline: str = "all as expected",
        text: str = "{}",
        signatures: Sequence[dict[str, Any]] = (),
        versions: dict[str, str] | None = None,
        report: bool = True,
    ) -> None:
        number = len(self.made)
        name = f"202601{number:02}T000000Z-night"
        self.made.append(name)
        path = self.folder / name
        (path / "trials").mkdir(parents=True)
        run = {
            "schema": SCHEMA, "argv": ["run", "s"], "device": device, "simulation": device == "sim",
            "started_utc": f"2026-{1 + number // 28:02}-{1 + number % 28:02}T00:00:00+00:00",
            "finished_utc": "x", "versions": versions or {"torch": "2.13"}, "machine": {}, "drivers": {},
            "scenarios": [
                {
                    "name": "s", "text": text,
                    "arms": [
                        {"arm": {"pinned": arm}, "arm_string": f"pinned={arm}", "same_as": None, "resolved": {}}
                        for arm in arms
                    ],
                }
            ],
        }  # fmt: skip
        (path / "run.json").write_text(json.dumps(run))
        latency = {} if step_us is None else {"step": {"p50": step_us}}
        rows = [
            {
                "arm": {"pinned": arm}, "hangs": rate(*hangs).to_json(), "corrupt": rate(0, hangs[1]).to_json(),
                "latency_us": latency,
            }
            for arm in arms
        ]  # fmt: skip
        document = {
            "verdict": verdict, "headline": headline, "signatures": list(signatures),
            "scenarios": [{"name": "s", "arms": rows}],
        }  # fmt: skip
        if report:
            (path / "report.json").write_text(json.dumps(document))

    def read(self) -> History:
        return read(self.folder)


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path / "runs")


def answers(found: History) -> dict[str, str]:
    (line,) = found.lines
    return {step.figure: step.answer for step in line.steps}


def test_a_step_of_the_latency_is_found_with_its_night(nights: Nights) -> None:
    for number in range(20):
        nights.add(step_us=9000.0 + 10 * (number % 3) if number < 12 else 11000.0 + 10 * (number % 3))
    (line,) = nights.read().lines
    (step,) = history_page.found_steps(line)
    assert (step.figure, step.night) == ("step", nights.made[12])
    assert step.words().startswith("step: from 9.01 ms to 11 ms (1.22 times) with 20260112")


def test_a_step_of_the_hang_rate_is_found(nights: Nights) -> None:
    for number in range(16):
        nights.add((0, 20) if number < 9 else (6, 20), None)
    (line,) = nights.read().lines
    (step,) = history_page.found_steps(line)
    assert (step.figure, step.night, step.before, step.after) == ("hangs", nights.made[9], 0.0, 0.3)


def test_a_change_below_the_practical_threshold_is_none(nights: Nights) -> None:
    for number in range(24):
        nights.add(step_us=9000.0 + number / 10 if number < 12 else 9200.0 + number / 10)
    assert answers(nights.read()) == {"hangs": "none", "step": "none"}


def test_few_nights_say_so(nights: Nights) -> None:
    for number in range(2 * history.LEAST_NIGHTS - 1):
        nights.add(step_us=9000.0 * (1 + number))
    assert answers(nights.read()) == {"hangs": "too few nights", "step": "too few nights"}


def test_chance_makes_steps_on_few_pages(tmp_path: Path) -> None:
    """Flat nights with noise, 4 arms: at most 5 % of pages, and some more that luck of this seed allows."""
    generator = np.random.default_rng(5)
    alarms = 0
    for page in range(PAGES):
        nights = Nights(tmp_path / str(page))
        for _ in range(16):
            hung = int(generator.binomial(20, 0.2))
            nights.add((hung, 20), float(9000.0 * generator.lognormal(0.0, 0.2)), arms=("a", "b", "c", "d"))
        alarms += any(history_page.found_steps(line) for line in nights.read().lines)
    assert alarms / PAGES <= 0.1


def test_other_devices_and_other_definitions_are_other_lines(nights: Nights) -> None:
    for device, text in (("npu", "{}"), ("cuda", "{}"), ("npu", '{"model": {"preset": "small"}}')):
        nights.add(device=device, text=text)
    lines = nights.read().lines
    assert [(line.device, line.definition, len(line.points)) for line in lines] == [
        ("cuda", 1, 1), ("npu", 1, 1), ("npu", 2, 1),
    ]  # fmt: skip


def test_signatures_have_their_first_and_last_night(nights: Nights) -> None:
    row = {"signature": "hang/a", "mechanism": "stream-order", "count": 2, "status": "known"}
    nights.add(signatures=[row])
    nights.add()
    nights.add(signatures=[{**row, "count": 3}, {**row, "signature": "hang/b", "status": "new"}])
    found = nights.read()
    one = next(seen for seen in found.signatures if seen.signature == "hang/a")
    assert (one.first, one.last, one.nights, one.trials) == (nights.made[0], nights.made[2], 2, 5)
    said = history_page.text(found)
    assert "signature hang/b (stream-order, new): new tonight" in said
    assert f"signature hang/a (stream-order, known): since {nights.made[0]}, in 2 nights" in said


def test_what_showed_nothing_is_told_with_its_reason(nights: Nights) -> None:
    nights.add()
    nights.add(verdict="skipped", headline="no npu device on this machine", versions={"torch": "2.14"})
    nights.add(report=False, versions={"torch": "2.14"})
    (nights.folder / "notes").mkdir()
    found = nights.read()
    assert [night.why for night in found.nights] == [
        "", "no npu device on this machine", "it has no readable report.json (hangrig report writes it)",
    ]  # fmt: skip
    assert found.nights[1].changed == ("version of torch: 2.13 then, 2.14 now",)
    assert found.nights[2].changed == ()


def test_the_page_is_one_file_that_shows_hostile_text_as_text(nights: Nights) -> None:
    for _ in range(9):
        nights.add(device="sim", arms=(HOSTILE,), headline=HOSTILE, verdict="fail")
    page = history_page.render(nights.read())
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "All nights are on the simulated device" in page and "no evidence about hardware" in page
    assert "http:" not in page and "https:" not in page


def test_the_command_writes_the_page_and_prints_one_document(nights: Nights, tmp_path: Path) -> None:
    nights.add()
    done = CliRunner().invoke(app, ["history", str(nights.folder), "--json"])
    assert done.exit_code == 0, done.output
    jsonschema.validate(json.loads(done.stdout), load_schema("history"))
    assert (nights.folder / "history.html").stat().st_size > 0
    nothing = CliRunner().invoke(app, ["history", str(tmp_path / "none")])
    assert nothing.exit_code == 2 and "holds no run" in nothing.output
    with pytest.raises(HistoryError):
        read(tmp_path / "none")


def test_sixty_nights_of_thirty_arms_stay_small(nights: Nights) -> None:
    arms = [f"arm{number}" for number in range(30)]
    for _ in range(60):
        nights.add(arms=arms)
    page = history_page.render(nights.read())
    assert len(page.encode()) < 5_000_000
