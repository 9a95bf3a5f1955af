"""``hangrig diagnose`` on real dumps: recorded engines, their parts, two samples, other forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from offline_rig import CAPTURES, LEDGERS, WATCHED, as_text, ask, brief, facts, lacks
from typer.testing import CliRunner

from harness.cli import app
from harness.offline.recognise import DumpsError

SGLANG = CAPTURES / "sglang-dp2-scheduler1-stopped"
VLLM = CAPTURES / "vllm-tp2-worker1-stopped"
TITLES = {
    "scheduler_DP0_TP0": "sglang::scheduler_DP0_TP0",
    "scheduler_DP1_TP1": "sglang::scheduler_DP1_TP1",
    "data_parallel_controller": "sglang::data_parallel_controller",
    "detokenizer": "sglang::detokenizer",
    "launch_server": "python -m sglang.launch_server --tp 2 --dp 2 --enable-dp-attention",
}


def copied(source: Path, target: Path, *, without: str | None = None) -> Path:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if without is None or without not in path.name:
            shutil.copy(path, target)
    return target


# --- recorded engines


@pytest.mark.parametrize("name", ["sglang-dp2-healthy", "vllm-tp2-healthy"])
def test_a_healthy_server_with_both_ranks_in_a_collective_is_healthy(name: str) -> None:
    document, status = ask(CAPTURES / name)
    assert status == 0
    assert brief(document) == ("none", "unknown", [], "suspected")
    assert "at work; the others wait for it" in facts(document)


@pytest.mark.parametrize("name", ["sglang-dp2-idle", "vllm-tp2-between-steps"])
def test_an_idle_server_is_healthy(name: str) -> None:
    assert ask(WATCHED / name)[1] == 0


def test_the_stopped_scheduler_is_named_although_a_peer_is_the_one_in_the_collective() -> None:
    document, status = ask(SGLANG)
    assert status == 1
    assert brief(document) == ("stopped", "rank-stopped", [1], "suspected")
    assert document["culprits"][0]["pid"] == 21301
    assert document["collective"]["waiting"] == [0] and document["collective"]["missing"] == [1]
    assert document["operation"]["site"].endswith("forward_mla.py:926")
    assert "in the middle of its work" in facts(document)
    assert "ps -eo pid,stat" in lacks(document) and "a second sample" in lacks(document)


def test_a_refused_dump_says_that_the_process_is_stopped() -> None:
    document, status = ask(VLLM)
    assert status == 1
    assert brief(document) == ("stopped", "rank-stopped", [1], "supported")
    assert document["proof"][0]["evidence"] == "worker-tp1-blocking-dump.stderr.txt"


def test_without_the_refusal_the_stopped_worker_is_still_suspected(tmp_path: Path) -> None:
    document, status = ask(copied(VLLM, tmp_path / "dumps", without="stderr"))
    assert (brief(document), status) == (("stopped", "rank-stopped", [1], "suspected"), 1)
    assert "with Python's lock in its hands" in facts(document)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    ("name", "status", "culprits"),
    [
        ("sglang-dp2-healthy", 0, []),
        ("sglang-dp2-scheduler1-stopped", 1, [1]),
        ("vllm-tp2-healthy", 0, []),
        ("vllm-tp2-worker1-stopped", 1, [1]),
    ],
)
def test_the_same_as_text(tmp_path: Path, name: str, status: int, culprits: list[int], short: bool) -> None:
    for dump in (CAPTURES / name).glob("*.json"):
        (tmp_path / f"{dump.stem}.txt").write_text(as_text(dump, short=short))
    document, found = ask(tmp_path)
    assert (brief(document)[2], found) == (culprits, status)


def test_several_processes_in_one_text_are_known_by_their_titles(tmp_path: Path) -> None:
    parts = [as_text(path, short=True, title=TITLES[path.stem]) for path in sorted(SGLANG.glob("*.json"))]
    (tmp_path / "everything.log").write_text(
        "$ for p in ...; do py-spy dump --pid $p; done\n" + "".join(parts)
    )
    document, status = ask(tmp_path)
    assert (brief(document)[:3], status) == (("stopped", "rank-stopped", [1]), 1)
    assert [one["seat"] for one in document["processes"]] == [0, 1, "controller", "detokenizer", "server"]


def test_several_json_dumps_in_one_file(tmp_path: Path) -> None:
    dumps = [(VLLM / f"{name}.json").read_text() for name in ("worker-tp0", "worker-tp1")]
    (tmp_path / "all.json").write_text("\n".join(dumps))
    document, status = ask(tmp_path)
    assert [one["seat"] for one in document["processes"]] == ["pid-18128", "pid-18129"]
    assert (document["culprits"][0]["rank"], document["culprits"][0]["pid"], status) == (None, 18129, 1)


# --- process tables


@pytest.mark.parametrize(
    "table",
    [
        "  PID STAT WCHAN  COMMAND\n21300 Sl   futex  sglang::scheduler_DP0_TP0\n"
        "21301 Tl   do_sig sglang::scheduler_DP1_TP1\n",
        "USER       PID %CPU %MEM    VSZ   RSS TTY      STAT START   TIME COMMAND\n"
        "root     21300  0.0  0.3 1207400 81756 ?       Sl   01:21   0:00  \\_ sglang::scheduler_DP0_TP0\n"
        "root     21301  0.0  0.3 1207400 81756 ?       Tl   01:21   0:00  \\_ sglang::scheduler_DP1_TP1\n",
        "root     21301  0.0  0.3 1207400 81756 ?       Tl   01:21   0:00 sglang::scheduler_DP1_TP1\n",
        "top - 01:29:42 up  6:49\n\n  PID USER      PR  NI    VIRT    RES    SHR S  %CPU  %MEM     TIME+ COMMAND\n"
        "21301 root      20   0 1907436 309332 114364 T   0.0   1.3   0:06.50 sglang::schedul\n",
        "Name:\tsglang::schedul\nUmask:\t0022\nState:\tT (stopped)\nTgid:\t21301\nPid:\t21301\n",
        "21301 (sglang::schedul) T 1 21301 21301 0 -1 4194304 100 0 0 0 5 2 0 0 20 0 8 0 1000 0 0\n",
        '{"schema": 1, "ranks": [{"rank": 1, "name": "rank1", "pid": 21301, "state": "T", "exit": null}]}',
        '[{"pid": 21301, "status": "stopped"}]',
    ],
    ids=["ps -eo", "ps auxf", "ps aux without its header", "top -b", "status", "stat", "ours", "psutil"],
)  # fmt: skip
def test_a_table_that_says_stopped_is_believed(tmp_path: Path, table: str) -> None:
    copied(SGLANG, tmp_path / "stacks")
    (tmp_path / "processes.txt").write_text(table)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("stopped", "rank-stopped", [1], "supported"), 1)
    assert document["proof"][0]["evidence"] == "processes.txt"


def test_a_table_that_says_running_takes_the_suspicion_of_a_stop_away(tmp_path: Path) -> None:
    copied(SGLANG, tmp_path / "stacks")
    (tmp_path / "ps.txt").write_text("PID STAT CMD\n21300 Sl python\n21301 Sl python\n")
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "host-blocked", [1], "suspected"), 1)


def test_a_process_that_has_ended_is_named_by_what_is_left_of_its_title(tmp_path: Path) -> None:
    copied(SGLANG, tmp_path / "stacks", without="DP1")
    (tmp_path / "ps.txt").write_text(
        "PID STAT CMD\n21300 Sl sglang::scheduler_DP0_TP0\n21301 Zl [sglang::schedul] <defunct>\n"
    )
    document, status = ask(tmp_path)
    assert (brief(document)[:3], status) == (("dead", "rank-dead", [1]), 1)


# --- two samples


@pytest.mark.parametrize(
    "folders", [("sample-0", "sample-1"), ("before", "after"), ("t0", "t1"), ("9", "10")]
)
def test_two_samples_make_a_suspicion_supported(tmp_path: Path, folders: tuple[str, str]) -> None:
    for folder in folders:
        copied(SGLANG, tmp_path / folder)
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("stopped", "rank-stopped", [1], "supported"), 1)
    assert document["samples"] == 2
    assert "a second sample" not in lacks(document)
    assert "rank 0 (pid 21300): in all_reduce" in facts(document) and "in both samples" in facts(document)


def test_the_later_sample_is_the_one_that_counts(tmp_path: Path) -> None:
    copied(CAPTURES / "sglang-dp2-healthy", tmp_path / "before")
    copied(SGLANG, tmp_path / "after")
    for folder, letter in (("before", "S"), ("after", "T")):
        (tmp_path / folder / "ps.txt").write_text(f"PID STAT CMD\n21301 {letter} python\n")
    document, status = ask(tmp_path)
    assert (brief(document)[:3], status) == (("stopped", "rank-stopped", [1]), 1)
    assert document["proof"][0]["evidence"] == "after/ps.txt"


def test_ranks_that_left_their_places_between_two_samples_are_healthy(tmp_path: Path) -> None:
    copied(SGLANG, tmp_path / "before")
    copied(CAPTURES / "sglang-dp2-healthy", tmp_path / "after")
    assert ask(tmp_path)[1] == 0


def test_a_rank_that_ran_before_and_looks_stopped_since_is_suspected(tmp_path: Path) -> None:
    copied(CAPTURES / "sglang-dp2-healthy", tmp_path / "before")
    copied(SGLANG, tmp_path / "after")
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("stopped", "rank-stopped", [1], "suspected"), 1)


def test_the_same_healthy_dumps_twice_cannot_be_judged(tmp_path: Path) -> None:
    for folder in ("t0", "t1"):
        copied(CAPTURES / "sglang-dp2-healthy", tmp_path / folder)
    assert ask(tmp_path)[1] == 3


def test_a_table_gives_nameless_dumps_their_names(tmp_path: Path) -> None:
    rows = ["PID STAT CMD"]
    for dump in SGLANG.glob("*.json"):
        pid = json.loads(dump.read_text())[0]["pid"]
        shutil.copy(dump, tmp_path / f"pid-{pid}.json")
        rows.append(f"{pid} {'T' if pid == 21301 else 'S'} {TITLES[dump.stem]}")
    (tmp_path / "ps.txt").write_text("\n".join(rows))
    document, status = ask(tmp_path)
    assert (brief(document)[:3], status) == (("stopped", "rank-stopped", [1]), 1)
    assert document["engine"] == "sglang"


def test_folders_of_nodes_are_no_samples(tmp_path: Path) -> None:
    copied(SGLANG, tmp_path / "node-a", without="DP1")
    (tmp_path / "node-b").mkdir()
    shutil.copy(SGLANG / "scheduler_DP1_TP1.json", tmp_path / "node-b")
    document, status = ask(tmp_path)
    assert (document["samples"], brief(document)[2], status) == (1, [1], 1)


def test_dumps_of_several_servers_are_refused() -> None:
    with pytest.raises(DumpsError, match="several servers: sglang-dp2-healthy and vllm-tp2-healthy"):
        ask(CAPTURES)


# --- parts


def test_one_rank_alone_cannot_be_judged_and_a_hole_is_said(tmp_path: Path) -> None:
    shutil.copy(SGLANG / "scheduler_DP1_TP1.json", tmp_path / "rank1.json")
    document, status = ask(tmp_path)
    assert status == 3
    assert (document["kind"], document["culprits"]) == ("hang", [])
    assert "no dump from rank 0: py-spy dump --json" in lacks(document)


def test_damaged_and_foreign_files_are_said_and_the_rest_is_used(tmp_path: Path) -> None:
    copied(VLLM, tmp_path / "x")
    whole = (VLLM / "engine-core.json").read_text()
    (tmp_path / "x" / "engine-core.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "x" / "rank7.json").write_text("")
    (tmp_path / "x" / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "x" / "server.log").write_text("[2026-12-01 01:00:00] INFO ready\n")
    document, status = ask(tmp_path)
    assert (brief(document)[2], status) == ([1], 1)
    assert "x/engine-core.json: damaged or cut short" in lacks(document)
    assert "x/rank7.json: empty" in lacks(document)
    assert document["ignored"] == ["x/photo.png", "x/server.log"]


@pytest.mark.parametrize("name", ["nothing", "file", "empty", "foreign"])
def test_what_cannot_be_diagnosed_is_bad_usage(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.md").write_text("# notes")
    said = {
        "nothing": "No such file",
        "file": "is no directory",
        "empty": "it is empty. Looked for: py-spy",
        "foreign": "1 files of other kinds. Looked for: py-spy",
    }
    with pytest.raises(DumpsError, match=said[name]):
        ask(tmp_path / name)


# --- ledgers and decisions


def test_ledgers_say_themselves_for_how_long_they_stand() -> None:
    document, status = ask(LEDGERS / "sglang-dp2-allreduce-skipped")
    assert (brief(document)[1:3], status) == (("collective-skipped", [1]), 1)
    assert {fact["evidence"] for fact in document["proof"]} <= {"rank0.ledger.json", "rank1.ledger.json"}


def test_decision_files_alone_show_the_first_divergence(tmp_path: Path) -> None:
    for rank, tokens in ((0, [4, 4]), (1, [4, 9])):
        lines = [{"step": step, "mode": "decode", "tokens": [4, 4]} for step in range(5)]
        lines.append({"step": 5, "mode": "decode", "tokens": tokens})
        text = "\n".join(json.dumps(line) for line in lines)
        (tmp_path / f"rank{rank}.jsonl").write_text(text + '\n{"step": 6, "to')
    document, status = ask(tmp_path)
    assert (document["mechanism"], status) == ("decision-divergence", 1)
    assert "at step 5, the first on which the ranks differ, tokens is [4, 9]" in facts(document)
    assert "rank0.jsonl: its end is damaged" in lacks(document)


# --- the command


def test_the_command_prints_one_document_and_says_the_rest_elsewhere(tmp_path: Path) -> None:
    copied(VLLM, tmp_path / "x")
    (tmp_path / "x" / "nccl_trace_rank_0").write_bytes(b"\x80\x02cposix\nabort\n.")
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"])
    document = json.loads(done.stdout)
    assert (done.exit_code, document["schema"], brief(document)[2]) == (1, 1, [1])
    assert "x/nccl_trace_rank_0: a pickle" in done.stderr and "Convert it" in done.stderr
    said = CliRunner().invoke(app, ["diagnose", str(CAPTURES / "sglang-dp2-healthy")])
    assert (said.exit_code, said.stdout.splitlines()[0][:8]) == (0, "HEALTHY:")
    wrong = CliRunner().invoke(app, ["diagnose", str(tmp_path / "none"), "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "give the directory that holds the dumps" in wrong.stderr
