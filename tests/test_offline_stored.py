"""``hangrig diagnose`` on what hangrig itself stored: evidence, trials, live ledgers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ledger_builder import Group, Rank
from offline_rig import CAPTURES, LEDGERS, WATCHED, ask, brief, facts

from harness.offline.recognise import DumpsError
from harness.stacks_parse import parse_pyspy_json

GROUP = (0, 1)


def ranks(*, late: bool = True) -> tuple[Rank, Rank]:
    """Both stand in their steps; with ``late`` rank 1 has not entered what rank 0 waits in."""
    made = Rank(0), Rank(1)
    for rank in made:
        rank.groups["tp"] = Group(GROUP).round("all_reduce", "all_gather", "all_reduce", "all_gather")
    made[0].groups["tp"].enter("all_reduce")
    if not late:
        made[1].groups["tp"].enter("all_reduce")
    return made


def put(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def evidence(folder: Path, *, state: str = "S", samples: int = 2) -> Path:
    for index in range(samples):
        sample = folder / f"sample-{index}"
        for rank in ranks():
            put(sample / "ledger" / f"rank{rank.rank}.json", rank.snapshot().to_json())
        rows = [{"rank": r, "name": f"rank{r}", "pid": 1000 + r, "state": "S", "exit": None} for r in (0, 1)]
        rows[1]["state"] = state
        put(sample / "processes.json", {"schema": 1, "ranks": rows})
    put(folder / "manifest.json", {"reason": "collective", "times": {}, "samples": [], "missing": []})
    return folder


def test_an_evidence_directory_is_diagnosed_by_its_ledgers(tmp_path: Path) -> None:
    document, status = ask(evidence(tmp_path))
    assert (brief(document), status) == (("hang", "host-blocked", [1], "supported"), 1)
    assert document["collective"]["missing"] == [1]
    assert {fact["evidence"] for fact in document["proof"]} == {
        "sample-1/ledger/rank0.json", "sample-1/ledger/rank1.json"
    }  # fmt: skip


def test_the_process_table_of_an_evidence_directory_counts(tmp_path: Path) -> None:
    document, status = ask(evidence(tmp_path, state="T"))
    assert (brief(document), status) == (("stopped", "rank-stopped", [1], "proven"), 1)
    assert document["proof"][0]["evidence"] == "sample-1/processes.json"


def test_stored_stacks_are_read_as_well(tmp_path: Path) -> None:
    folder = CAPTURES / "vllm-tp2-worker1-stopped"
    for index in range(2):
        for rank in range(2):
            text = (folder / f"worker-tp{rank}.json").read_text()
            stacks = parse_pyspy_json(text, pid=18128 + rank, rank=rank, native=False)
            put(tmp_path / f"sample-{index}" / "stacks" / f"rank{rank}.json", stacks.to_json())
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("stopped", "rank-stopped", [1], "supported"), 1)


def test_a_suspicion_that_fell_is_slow(tmp_path: Path) -> None:
    folder = evidence(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    more = {"road": "dissolved", "slow": [0, 1], "times": {"last_progress_s": 1.0, "went_on_s": 6.5}}
    put(folder / "manifest.json", {**manifest, **more})
    document, status = ask(folder)
    assert (brief(document)[:3], status) == (("slow", "rank-slow", [1]), 1)


def test_a_child_of_a_rank_is_none(tmp_path: Path) -> None:
    child = json.loads((WATCHED / "vllm-tp2-between-steps" / "rank0.json").read_text())
    child |= {"rank": "child 77 of rank 1", "pid": 77}
    folder = evidence(tmp_path)
    for index in range(2):
        put(folder / f"sample-{index}" / "children" / "rank1.77.json", child)
    document, _ = ask(folder)
    assert brief(document)[2] == [1]
    assert {one["seat"]: one["role"] for one in document["processes"]} == {
        0: "rank", 1: "rank", "child 77 of rank 1": "other"
    }  # fmt: skip


def test_one_sample_of_ledgers_is_a_suspicion_where_it_does_not_say_since_when(tmp_path: Path) -> None:
    for rank in ranks():
        fresh = rank.snapshot()
        put(tmp_path / f"rank{rank.rank}.json", {**fresh.to_json(), "host": {**fresh.to_json()["host"],
            "since_ns": fresh.taken_ns}})  # fmt: skip
    document, status = ask(tmp_path)
    assert (brief(document), status) == (("hang", "collective-skipped", [1], "suspected"), 1)


def test_idle_ledgers_are_healthy(tmp_path: Path) -> None:
    for number in GROUP:
        rank = Rank(number, phase="parked")
        rank.groups["tp"] = Group(GROUP).round("all_reduce")
        put(tmp_path / f"rank{number}.json", rank.snapshot().to_json())
    document, status = ask(tmp_path)
    assert (document["kind"], status) == ("none", 0)
    assert "rank 0: nothing is under way" in facts(document)


def trial(folder: Path, history: dict[str, Any], **more: Any) -> Path:
    put(folder / "history.json", {"schema": 1, "ranks": [], **history})
    put(folder / "trial.json", {"schema": 1, "id": "x", "device": "sim", "target": "builtin",
                                "ranks": [{"rank": r, "role": "rank", "node": "n", "pid": 1000 + r} for r in GROUP],
                                **more})  # fmt: skip
    return folder


def test_a_trial_is_diagnosed_with_what_its_history_says(tmp_path: Path) -> None:
    folder = trial(tmp_path, {"finished": False, "failed": {"1": "ValueError: no tokens"}})
    evidence(folder / "evidence")
    document, status = ask(tmp_path)
    assert (brief(document)[:3], status) == (("hang", "collective-skipped", [1]), 1)
    assert "rank 1 raised ValueError: no tokens" in facts(document)
    assert document["simulation"] is True


def test_a_trial_that_finished_is_healthy_and_one_with_wrong_tokens_is_not(tmp_path: Path) -> None:
    folder = trial(tmp_path, {"finished": True}, outcome="healthy")
    assert ask(folder)[1] == 0
    trial(folder, {"finished": True}, outcome="corrupt")
    culprit = {"rank": 1, "role": "rank", "node": "n", "pid": 7, "device": "sim"}
    proof = [{"fact": "12 tokens differ", "evidence": "tokens.json"}]
    said = {"kind": "none", "mechanism": "stream-order", "culprits": [culprit], "proof": proof}
    put(folder / "diagnosis.json", said)
    document, status = ask(folder)
    assert (brief(document)[:3], status) == (("none", "stream-order", [1]), 1)


def test_of_several_trials_one_has_to_be_chosen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        trial(tmp_path / "trials" / name, {"finished": True})
    with pytest.raises(DumpsError, match="2 trials; give the directory of one of them: trials/a, trials/b"):
        ask(tmp_path)


def test_one_trial_below_the_directory_is_found(tmp_path: Path) -> None:
    trial(tmp_path / "run" / "trials" / "a", {"finished": True})
    assert ask(tmp_path)[1] == 0


def test_a_recorded_pair_of_ledgers_beside_other_files(tmp_path: Path) -> None:
    shutil.copytree(LEDGERS / "sglang-dp2-raise-on-idle", tmp_path / "x")
    (tmp_path / "x" / "README.md").write_text("# what")
    document, status = ask(tmp_path)
    assert (brief(document)[2], status) == ([1], 1)
    assert document["ignored"] == ["x/README.md"]
