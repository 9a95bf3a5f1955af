"""A bundle: what it holds, what it must not hold, and runs that are damaged."""

from __future__ import annotations

import gzip
import json
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ledger_rig import fill
from run_fixture import ARMS, RunBuilder, stream_order_diagnosis
from typer.testing import CliRunner

import reports
from harness.cli import app
from harness.ledger import LedgerWriter
from harness.ledger_snapshot import Snapshot
from harness.redact import Redactor
from harness.request import BadRequest
from harness.scenario import corpus_files, from_record, load, plan_arms, record, scenario_files
from harness.store import RunStore, StoreError, load_schema, read_run, read_samples, write_json
from reports import bundle
from reports.bundle_files import File, to_toml

HOST, USER = "gpu-node17", "alicia"
SECRETS = {
    "token": "hf_Zq8vK2mWx4RtYb7NcDsAfGhJ",
    "password": "correct-Horse9battery",
    "url": "deploy:s3cr3tpw",
    "bearer": "eyTok.en-0123456789",
    "prompt": "Summarise our merger with Initech",
    "mail": "alicia.keys@initech.example.net",
    "ip4": "10.77.3.14",
    "ip6": "fd12:3456:789a::17",
    "model": "/srv/initech/models",
}
FRAME = f"/home/{USER}/src/sglang/python/sglang/srt/managers/scheduler.py"
TORCH = "/opt/env/lib/python3.11/site-packages/torch"
LOG = f"""\
[2026-11-30 10:00:00 DP0 TP0] server_args=ServerArgs(model_path='{SECRETS["model"]}/r1', api_key='{SECRETS["password"]}',
[2026-11-30 10:00:01 DP0 TP0] Receive: obj=GenerateReqInput(rid='7', text='{SECRETS["prompt"]}', input_ids=[101, 2023, 77],
[2026-11-30 10:00:02] {HOST} joined {SECRETS["ip4"]}:29500 and [{SECRETS["ip6"]}]:29501
Authorization: Bearer {SECRETS["bearer"]}
GET https://{SECRETS["url"]}@artifacts.initech.example.net/wheel.whl by {SECRETS["mail"]}
  File "{FRAME}", line 888, in event_loop_overlap
    self.tp_group.all_reduce(hidden)  # of {USER} on {HOST.upper()}
"""  # noqa: E501
SCENARIO = load(scenario_files()["dp-pinned-hang"])


def stack(rank: int) -> dict[str, Any]:
    frames = [
        {"name": "event_loop_overlap", "filename": FRAME, "line": 888},
        {"name": "all_reduce", "filename": f"{TORCH}/distributed/c10d.py", "line": 21},
        {"name": "wait", "filename": "/usr/lib/python3.11/threading.py", "line": 331},
    ]  # fmt: skip
    thread = {"thread_id": 1, "name": "MainThread", "active": False, "owns_gil": False, "frames": frames}
    return {
        "schema": 1,
        "pid": 4000 + rank,
        "rank": rank,
        "source": "py-spy",
        "native": False,
        "threads": [thread],
    }


def planted(out: Path, **manifest: Any) -> Path:
    """A run with one healthy trial and one that hung, and private values in every kind of file."""
    arm = {"pinned": "pinned", "symm_mem": "off"}
    plan = {"id": "pinned=pinned,symm_mem=off-s3", "scenario": SCENARIO.name, "arm": arm, "seed": 3}
    builder = RunBuilder(out, planned=[{"id": "pinned=pageable-s0", "scenario": SCENARIO.name}, plan])
    builder.trial(ARMS[0], 0)
    diagnosis = stream_order_diagnosis()
    diagnosis["culprits"][0]["node"] = HOST
    trial = builder.trial(arm, 3, "hang", expected="sometimes", diagnosis=diagnosis)
    for index in (0, 1):
        for rank in (0, 1):
            write_json(trial.evidence / f"sample-{index}" / "stacks" / f"rank{rank}.json", stack(rank))
    (trial.evidence / "logs").mkdir()
    (trial.evidence / "logs" / "rank0.txt").write_text(LOG)
    engine = {
        "engine": "sglang 0.5.23",
        "command": f"{SECRETS['model']}/bin/python -m sglang.launch_server --api-key {SECRETS['password']}",
        "env": {"HF_TOKEN": SECRETS["token"], "SGLANG_TEST_RETRACT": "1"},
        "said": [{"at_s": 1.0, "source": "log", "text": f"lost {HOST}: {SECRETS['ip4']}"}],
        "log": LOG.splitlines(),
    }
    write_json(trial.evidence / "engine.json", engine)
    trial.event("launched", node=HOST, argv=["--password", SECRETS["password"]])
    ledger = LedgerWriter.create(trial.ledger_path(0), rank=0, world=2, node=HOST, device="sim")
    fill(ledger)
    ledger.close()
    trial.decisions_path(0).write_text(json.dumps({"step": 1, "note": f"from {HOST}"}) + '\n{"step": 2, "no')
    write_json(trial.path / "history.json", {"finished": False, "leaks": [f"shm of {USER}"]})
    text = json.loads(SCENARIO.model_dump_json(exclude_none=True))
    text["target"]["env"] = {"HF_TOKEN": SECRETS["token"]}
    scenario = {**record(SCENARIO, plan_arms(SCENARIO, "sim"), "sim"), "text": json.dumps(text)}
    path = builder.finish(
        machine={"node": HOST, "kernel": "6.1", "python": f"/home/{USER}/env/bin/python"},
        scenarios=[scenario],
        argv=["run", SCENARIO.name, "--set", f"target.env.HF_TOKEN={SECRETS['token']}"],
        command=f"hangrig run {SCENARIO.name} --set target.env.HF_TOKEN={SECRETS['token']}",
        **manifest,
    )
    reports.write_all(path)
    return path


def members(path: Path) -> dict[str, bytes]:
    """What the archive holds, by name below its folder."""
    with tarfile.open(path, "r:gz") as archive:
        found = {}
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.partition("/")[2]] = file.read()
        return found


def unpacked(path: Path, folder: Path) -> Path:
    with tarfile.open(path, "r:gz") as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


HUNG = "trials/pinned=pinned,symm_mem=off-s3"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bundle.Bundle]:
    out = tmp_path_factory.mktemp("runs")
    path = planted(out)
    yield bundle.make(path, HUNG.partition("/")[2], out=out / "b.tar.gz")


def test_no_private_value_is_in_it(made: bundle.Bundle) -> None:
    raw = gzip.decompress(made.path.read_bytes()).decode("utf-8", errors="replace").lower()
    for name, value in {**SECRETS, "host": HOST, "user": USER, "ids": "2023, 77", "home": "/home/"}.items():
        assert value.lower() not in raw, name
    for value in ("initech", "s3cr3tpw", "horse9"):
        assert value not in raw.replace("initech.example.net", ""), value


def test_the_story_stays(made: bundle.Bundle) -> None:
    files = members(made.path)
    stored = json.loads(files[f"{HUNG}/diagnosis.json"])
    wanted = {"schema": 1, **stream_order_diagnosis()}
    wanted["culprits"][0]["node"] = stored["culprits"][0]["node"]
    assert stored == wanted and stored["culprits"][0]["node"].startswith("host-")
    frames = json.loads(files[f"{HUNG}/evidence/sample-1/stacks/rank1.json"])["threads"][0]["frames"]
    assert [(frame["name"], frame["filename"].partition("/")[2], frame["line"]) for frame in frames] == [
        ("event_loop_overlap", "sglang/python/sglang/srt/managers/scheduler.py", 888),
        ("all_reduce", "site-packages/torch/distributed/c10d.py", 21),
        ("wait", "usr/lib/python3.11/threading.py", 331),
    ]
    log = files[f"{HUNG}/evidence/logs/rank0.txt"].decode()
    assert 'sglang/srt/managers/scheduler.py", line 888, in event_loop_overlap' in log
    assert "self.tp_group.all_reduce(hidden)" in log and "DP0 TP0" in log
    node = stored["culprits"][0]["node"]
    assert log.count(node) == 2  # the same host is the same placeholder everywhere
    assert f"{node} joined ip-" in log


def test_everything_json_is_json_and_fits_its_schema(made: bundle.Bundle) -> None:
    files = members(made.path)
    for name, content in files.items():
        if name.endswith(".json"):
            json.loads(content)
    for name, of in (
        ("run", "run.json"),
        ("trial", f"{HUNG}/trial.json"),
        ("diagnosis", f"{HUNG}/diagnosis.json"),
        ("manifest", f"{HUNG}/evidence/manifest.json"),
        ("stacks", f"{HUNG}/evidence/sample-0/stacks/rank0.json"),
        ("processes", f"{HUNG}/evidence/sample-0/processes.json"),
        ("environment", "environment.json"),
        ("redactions", "redactions.json"),
    ):
        jsonschema.validate(json.loads(files[of]), load_schema(name))
    jsonschema.validate(made.to_json(), load_schema("bundle"))


def test_a_binary_ledger_becomes_its_snapshot(made: bundle.Bundle) -> None:
    files = members(made.path)
    snapshot = Snapshot.from_json(files[f"{HUNG}/ledger/rank0.json"])
    assert snapshot.header.node.startswith("host-") and snapshot.header.boot_id.startswith("machine-")
    assert snapshot.streams["compute"].oldest is not None
    assert not [name for name in files if name.endswith(".ledger")]
    converted = json.loads(files["redactions.json"])["converted"]
    assert "rank0.ledger, a binary file" in converted[f"{HUNG}/ledger/rank0.json"]


def test_the_redactions_are_listed_by_file_and_never_told(made: bundle.Bundle) -> None:
    listed = json.loads(members(made.path)["redactions.json"])
    log = listed["files"][f"{HUNG}/evidence/logs/rank0.txt"]
    assert log == {"email": 1, "host": 3, "ip": 2, "path": 2, "prompt": 2, "secret": 3, "user": 2}
    assert listed["files"]["run.json"]["secret"] == 3  # argv, command, the scenario's env
    assert listed["totals"] == made.redacted
    assert {
        "what": f"{HUNG}/decisions/rank0.jsonl",
        "why": "1 damaged or half-written lines, kept as they are",
    } in (listed["missing"])


def test_the_first_page(made: bundle.Bundle) -> None:
    with tarfile.open(made.path) as archive:
        names = archive.getnames()
    folder = names[0].partition("/")[0]
    text = members(made.path)["README.md"].decode()
    for words in (
        "# dp-pinned-hang, pinned=pinned,symm\\_mem=off seed=3: hang",
        "> **Simulation.**",
        "- hang: stream-order (proven)",
        "- culprit: rank 1 (worker on host-",
        "graph.replay decode",
        "1. on rank 1 the record of update.3 came before replay 58 had consumed the last one (`evidence/",
        f"    hangrig rerun {folder} pinned=pinned,symm_mem=off-s3\n",
        f"    hangrig run {folder}/scenario.toml --device sim --set arms.pinned='[\"pinned\"]' "
        "--set arms.symm_mem='[\"off\"]' --trials 1 --seed 3\n",
        "| torch | 2.13.0 | run.json |",
        "| engine | sglang 0.5.23 | evidence/engine.json |",
        "| cann | unknown | the run was made on another machine and did not record it |",
        "## Redacted",
        "| secret |",
        "## Missing",
        "## Converted",
    ):
        assert words in text, words
    assert "more facts in the report" not in text


def test_an_unpacked_bundle_is_a_run(made: bundle.Bundle, tmp_path: Path) -> None:
    run = unpacked(made.path, tmp_path)
    result = reports.write_all(run)
    assert (result.verdict, len(result.trials), result.never_run) == ("pass", 1, ())
    (trial,) = read_run(run).trials
    assert len(read_samples(trial.path / "evidence")) == 2
    page = (run / "report.html").read_text()
    assert "sglang/srt/managers/scheduler.py" in page or "update.3" in page
    (entry,) = RunStore.open(run).document["scenarios"]
    again = from_record(entry, device="sim")
    assert again.workload == SCENARIO.workload and again.target.env == {"HF_TOKEN": "secret-1"}
    assert load(run / "scenario.toml").model_dump() == again.model_dump()


def test_the_same_run_gives_the_same_bytes(made: bundle.Bundle, tmp_path: Path) -> None:
    assert made.path.read_bytes()[4:8] == b"\0\0\0\0"  # gzip's time
    again = bundle.make(Path(made.run), made.trial, out=tmp_path / "other.tar.gz")
    assert again.path.read_bytes() == made.path.read_bytes()
    with tarfile.open(made.path) as archive:
        entries = archive.getmembers()
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname, entry.mode) for entry in entries} == {
        (0, 0, 0, "", 0o644)
    }


# --- choosing, and where it goes ---


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bundle", *map(str, arguments)])


def test_without_a_trial_the_one_that_rerun_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = planted(tmp_path / "runs")
    done = call(tmp_path / "runs" / "latest", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    jsonschema.validate(told, load_schema("bundle"))
    assert told["trial"] == HUNG.partition("/")[2]
    assert Path(told["path"]) == tmp_path / f"{path.name}-{told['trial']}.tar.gz"
    assert told["bytes"] == Path(told["path"]).stat().st_size
    for line in (f"{told['trial']}, {told['files']} files", "redacted: "):
        assert line in call(path, "--force").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("/none",), "does not exist"),
        (("{tmp}",), "is no run directory"),
        (("{run}", "pinned=other-s9"), "has no trial 'pinned=other-s9'; it has:\n  pinned=pageable-s0"),
        (("{run}", "--out", "{tmp}/there.tar.gz"), "exists; name another file, or add --force"),
        (("{run}", "--out", "{tmp}/no/x.tar.gz"), "its folder does not exist"),
        (("{run}", "--out", "{tmp}"), "is a directory"),
        (("{run}", "--keep", "secret"), "secrets are never kept"),
    ],
)
def test_bad_usage_is_told_and_writes_nothing(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    path = planted(tmp_path / "runs")
    (tmp_path / "there.tar.gz").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = call(*(one.format(run=path, tmp=tmp_path) for one in arguments))
    assert done.exit_code == 2 and said in done.stderr and done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "there.tar.gz").read_text() == "mine"


def test_force_replaces(tmp_path: Path) -> None:
    path = planted(tmp_path / "runs")
    (tmp_path / "there.tar.gz").write_text("mine")
    assert call(path, "--out", tmp_path / "there.tar.gz", "--force").exit_code == 0
    assert "README.md" in members(tmp_path / "there.tar.gz")


def test_keep(tmp_path: Path) -> None:
    path = planted(tmp_path / "runs")
    made = bundle.make(path, out=tmp_path / "b.tar.gz", keep=["ip", HOST])
    text = b"\n".join(members(made.path).values()).decode()
    assert SECRETS["ip4"] in text and HOST in text
    assert USER not in text and SECRETS["token"] not in text
    assert json.loads(members(made.path)["redactions.json"])["kept"] == [HOST, "ip"]


# --- what is wrong ---


def test_an_archive_that_still_holds_a_value_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = planted(tmp_path / "runs")
    encoded = File.encoded

    def forgetful(file: File) -> bytes:
        content = encoded(file)
        return content + SECRETS["token"].encode() if file.name.endswith("rank0.txt") else content

    monkeypatch.setattr(File, "encoded", forgetful)
    done = call(path, "--out", tmp_path / "b.tar.gz")
    assert done.exit_code == 70
    assert "evidence/logs/rank0.txt: secret-" in done.stderr and SECRETS["token"] not in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["runs"]


def test_the_check_sees_what_json_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = planted(tmp_path / "runs")
    monkeypatch.setattr(Redactor, "document", lambda self, document: document)
    with pytest.raises(StoreError, match="still in it"):
        bundle.make(path, out=tmp_path / "b.tar.gz")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_a_damaged_run_gives_what_it_holds_and_says_what_is_missing(tmp_path: Path) -> None:
    path = planted(tmp_path / "runs")
    hung = path / HUNG
    cut(hung / "evidence" / "engine.json")
    cut(hung / "ledger" / "rank0.ledger")
    cut(hung / "trial.json")
    (hung / "diagnosis.json").unlink()
    (hung / "evidence" / "core.1234").write_bytes(b"\0\1")
    (hung / "evidence" / "link.txt").symlink_to("/etc/passwd")
    (path / "summary.md").unlink()
    made = bundle.make(path, HUNG.partition("/")[2], out=tmp_path / "b.tar.gz")
    files = members(made.path)
    missing = {one.what.removeprefix(f"{HUNG}/"): one.why for one in made.missing}
    assert "damaged or half-written" in missing["evidence/engine.json"]
    assert "damaged or half-written" in missing["trial.json"]
    assert missing["diagnosis.json"] == "not in the trial's directory"
    assert "cannot be read as a ledger" in missing["ledger/rank0.ledger"]
    assert {one.what.removeprefix(f"{HUNG}/") for one in made.left_out} == {
        "evidence/core.1234",
        "evidence/link.txt",
    }
    assert f"{HUNG}/evidence/engine.json.damaged.txt" in files and f"{HUNG}/evidence/engine.json" not in files
    assert f"{HUNG}/evidence/sample-1/stacks/rank0.json" in files and "summary.md" in files
    raw = b"\n".join(files.values()).decode()
    assert SECRETS["token"] not in raw and HOST not in raw and USER not in raw
    for words in ("diagnosis.json", "core.1234", "of a kind that cannot be redacted"):
        assert words in files["README.md"].decode()


def test_a_run_whose_head_is_lost(tmp_path: Path) -> None:
    path = planted(tmp_path / "runs")
    cut(path / "run.json")
    made = bundle.make(path, HUNG.partition("/")[2], out=tmp_path / "b.tar.gz")
    files = members(made.path)
    assert "run.json.damaged.txt" in files and f"{HUNG}/diagnosis.json" in files
    assert SECRETS["token"] not in files["run.json.damaged.txt"].decode()
    assert "run.json" in {one.what for one in made.missing}


def test_a_trial_that_never_ran(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "runs", planned=[{"id": "lost", "scenario": "x", "arm": {}}])
    made = bundle.make(builder.path, "lost", out=tmp_path / "b.tar.gz")
    assert ("trials/lost", "planned, but it has no directory: it never ran") in [
        (one.what, one.why) for one in made.missing
    ]
    assert "unknown" in members(made.path)["README.md"].decode()


def test_an_empty_run_has_nothing_to_bundle(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="has no trials"):
        bundle.make(RunBuilder(tmp_path).path, out=tmp_path / "b.tar.gz")


def test_this_machine_is_asked_where_the_run_was_made_on_it(tmp_path: Path) -> None:
    path = planted(tmp_path / "runs", drivers={"cann": "8.3.RC1"})
    document = json.loads((path / "run.json").read_text())
    document["machine"]["node"] = socket.gethostname()
    write_json(path / "run.json", document)
    made = bundle.make(path, out=tmp_path / "b.tar.gz")
    facts = json.loads(members(made.path)["environment.json"])["facts"]
    by_name = {fact["what"]: fact for fact in facts}
    assert by_name["cann"] == {"what": "cann", "value": "8.3.RC1", "from": "run.json"}
    assert by_name["processor"]["from"].endswith("when bundled")
    assert by_name["hangrig commit"]["from"]
    if socket.gethostname() not in ("localhost",):
        assert socket.gethostname() not in {fact["value"] for fact in facts}


def test_a_long_log_gives_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = planted(tmp_path / "runs")
    monkeypatch.setattr("reports.bundle_files.TEXT_LIMIT_BYTES", 100)
    made = bundle.make(path, out=tmp_path / "b.tar.gz")
    text = members(made.path)[f"{HUNG}/evidence/logs/rank0.txt"].decode()
    assert text.startswith("    self.tp_group") and "event_loop" not in text
    assert any("all but its last" in one.why for one in made.left_out)


@pytest.mark.parametrize("name", [*scenario_files(), *corpus_files()])
def test_every_scenario_survives_as_toml(tmp_path: Path, name: str) -> None:
    path = (scenario_files() | corpus_files())[name]
    scenario = load(path)
    stored = json.loads(record(scenario, [], "sim")["text"])
    (tmp_path / "again.toml").write_text(to_toml(stored))
    assert load(tmp_path / "again.toml").model_dump() == scenario.model_dump()
