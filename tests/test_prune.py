"""Old runs go by age and by number; a baseline, a run that goes on and what is no run stay."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from harness.cli import app
from harness.process_control import myself
from harness.prune import prune
from harness.run_list import last_pass, runs_in
from harness.store import RunStore, StoreError, load_schema, point_latest, write_json

NOW = datetime.now(UTC)


def stored(
    out: Path,
    days: float,
    verdict: str | None = "fail",
    *,
    scenario: str = "dp-retract",
    device: str = "sim",
    text: str = "{}",
    name: str = "a",
    **changes: Any,
) -> Path:
    """A run that began ``days`` ago, as the store writes it, in the folder of that time."""
    arm = {"arm": {}, "arm_string": "default", "resolved": {}, "same_as": None}
    manifest: dict[str, Any] = {
        "command": "hangrig run", "argv": ["run", scenario], "seed": 0, "versions": {}, "machine": {},
        "device": device, "simulation": device == "sim", "simulation_note": None,
        "scenarios": [{"name": scenario, "text": text, "arms": [arm]}],
    }  # fmt: skip
    store = RunStore.create(out, name, manifest)
    began = NOW - timedelta(days=days)
    path = out / f"{began:%Y%m%dT%H%M%SZ}-{name}"
    store.path.rename(path)
    point_latest(out, path.name)
    store.path = path
    store.document["started_utc"] = began.isoformat()
    store.finish()
    if changes:
        store.remember(**changes)
    if verdict is not None:
        write_json(path / "report.json", {"verdict": verdict})
    return path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["prune", *arguments])


def aged(run: Path, days: float) -> None:
    """As if nothing in it had been written since then."""
    then = time.time() - days * 86400
    for path in (run / "run.json", run / "trials", run):
        os.utime(path, (then, then))


def test_runs_go_by_age_and_by_number(tmp_path: Path) -> None:
    runs = [stored(tmp_path, days) for days in (1, 2, 3, 10, 40)]
    done = prune(tmp_path, keep_days=30, keep=None)
    assert (done.removed, done.left) == ((runs[4],), 4)
    done = prune(tmp_path, keep_days=30, keep=2)
    assert (done.removed, done.left) == ((runs[2], runs[3]), 2)
    assert [run.path for run in runs_in(tmp_path)] == runs[:2]


def test_the_newest_pass_of_every_kind_stays(tmp_path: Path) -> None:
    old_pass = stored(tmp_path, 50, "pass")
    older_pass = stored(tmp_path, 60, "pass")
    other_device = stored(tmp_path, 70, "pass", device="npu")
    other_set = stored(tmp_path, 80, "pass", scenario="dp-idle-burst")
    newest = stored(tmp_path, 1)
    done = prune(tmp_path, keep_days=30, keep=1)
    assert done.removed == (older_pass,)
    assert {path for path, _ in done.kept} == {old_pass, other_device, other_set}
    assert dict(done.kept)[old_pass] == "the newest pass of dp-retract on sim"
    assert all(path.exists() for path in (old_pass, other_device, other_set, newest))


def test_a_run_that_goes_on_stays_and_one_that_died_goes_later(tmp_path: Path) -> None:
    own = myself()
    driver = {"pid": own.pid, "start_time_ticks": own.start_time_ticks}
    going = stored(tmp_path, 40, None, finished_utc=None, driver=driver)
    elsewhere = stored(tmp_path, 41, None, finished_utc=None, driver={"pid": own.pid, "start_time_ticks": 1})
    died = stored(tmp_path, 42, None, finished_utc=None, driver={"pid": own.pid, "start_time_ticks": 2})
    aged(going, 3)
    aged(died, 3)
    done = prune(tmp_path, keep_days=30, keep=None)
    assert done.removed == (died,)
    assert "is going on" in dict(done.kept)[going]
    assert "in the last two days" in dict(done.kept)[elsewhere]


def test_what_is_no_run_is_never_touched(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    renamed = stored(tmp_path, 90)
    renamed = renamed.rename(tmp_path / "the-hang-of-october")
    watch = tmp_path / "20200101T000000Z-watch"
    foreign = tmp_path / "20200101T000000Z-foreign"
    damaged = tmp_path / "20200101T000000Z-damaged"
    for folder in (watch, foreign, damaged):
        (folder / "trials").mkdir(parents=True)
    (watch / "trials").rmdir()
    (foreign / "run.json").write_text('{"schema": 1, "finished_utc": "x"}')
    (damaged / "run.json").write_text("{")
    outside = stored(tmp_path / "elsewhere", 90)
    linked = tmp_path / outside.name
    linked.symlink_to(outside)
    assert prune(tmp_path, keep_days=2, keep=1).removed == ()
    for path in (renamed, watch, foreign, damaged, linked, outside):
        assert path.exists(), path


def test_links_inside_a_run_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    old = stored(tmp_path / "runs", 40)
    (old / "trials" / "link").symlink_to(precious)
    assert prune(tmp_path / "runs", keep_days=30, keep=None).removed == (old,)
    assert (precious / "file").read_text() == "kept" and not old.exists()


def test_latest_points_at_what_is_left(tmp_path: Path) -> None:
    baseline = stored(tmp_path, 60, "pass")
    gone = stored(tmp_path, 40)
    assert (tmp_path / "latest").resolve() == gone
    prune(tmp_path, keep_days=30, keep=None)
    assert (tmp_path / "latest").resolve() == baseline
    write_json(baseline / "report.json", {"verdict": "fail"})
    prune(tmp_path, keep_days=30, keep=None)
    assert list(tmp_path.iterdir()) == []


def test_a_prune_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    half = stored(tmp_path, 40)
    (half / "run.json").unlink()
    half = half.rename(tmp_path / f".pruned-{half.name}")
    stays = stored(tmp_path, 1)
    prune(tmp_path, keep_days=30, keep=None)
    assert not half.exists() and stays.exists()


def test_a_dry_run_says_what_would_go_and_removes_nothing(tmp_path: Path) -> None:
    old = stored(tmp_path, 40)
    done = call(str(tmp_path), "--keep-days", "30", "--dry-run")
    assert (done.exit_code, done.stdout.splitlines()) == (
        0,
        [f"would remove {old}", "would remove 1 of 1 runs"],
    )
    assert old.exists() and (tmp_path / "latest").resolve() == old


def test_the_document_is_as_its_schema_says(tmp_path: Path) -> None:
    old = stored(tmp_path, 40)
    stored(tmp_path, 35, "pass")
    done = call(str(tmp_path), "--keep-days", "30", "--keep", "60", "--json")
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("prune"))
    assert document["removed"] == [str(old)] and document["left"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--keep-days, --keep or both"),
        (("--keep", "0"), "--keep"),
        (("--keep-days", "-1"), "--keep-days"),
    ],
)
def test_no_limit_and_no_sense_are_bad_usage(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = call(str(tmp_path), *arguments)
    assert done.exit_code == 2 and said in done.stderr
    assert call(str(tmp_path / "none"), "--keep", "1").exit_code == 2


def test_one_that_cannot_be_removed_is_told_and_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = stored(tmp_path, 40), stored(tmp_path, 50)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == stuck:
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    done = prune(tmp_path, keep_days=30, keep=None)
    assert (done.removed, done.failed) == ((other,), ((stuck, "Permission denied"),))
    assert call(str(tmp_path), "--keep-days", "30").exit_code == 70
    assert stuck.exists()


def test_the_last_pass_is_of_the_same_device_scenarios_and_arms(tmp_path: Path) -> None:
    entry = stored(tmp_path, 9, "pass")
    stored(tmp_path, 8, "fail")
    stored(tmp_path, 7, "pass", device="npu")
    stored(tmp_path, 6, "pass", scenario="dp-idle-burst")
    stored(tmp_path, 5, "pass", text='{"workload": {"requests": 9}}')
    stored(tmp_path, 4, "pass", argv=["rerun", "x"])
    stored(tmp_path, 3, "pass", finished_utc=None)
    runs = runs_in(tmp_path)
    found = last_pass(runs, "sim", next(run for run in runs if run.path == entry).arms)
    assert found is not None and found.path == entry
    assert last_pass(runs, "cuda", found.arms) is None
    assert last_pass(runs, "sim", {("dp-retract", "default"): "another definition"}) is None


def test_a_folder_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert runs_in(tmp_path / "none") == ()
    with pytest.raises(StoreError):
        RunStore.open(tmp_path / "none")
