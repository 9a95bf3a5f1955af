"""What the targets make of SGLang's and vLLM's processes, answers and logs, and how they ask.

Here: seats by process title, requests, events of a stream. Not here: commands (``test_engine_commands.py``), and
servers that run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_specs import DIALECTS, spec

from serving.targets.dialect import Seating
from serving.workload import RequestSpec

# --- processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "ranks", "dp", "title", "seat"),
    [
        ("sglang", 2, 2, "sglang::scheduler_DP0_TP0", 0),
        ("sglang", 2, 2, "sglang::scheduler_DP1_TP1  ", 1),
        ("sglang", 4, 2, "sglang::scheduler_DP1_TP3_EP3", 3),
        ("sglang", 2, 1, "sglang::scheduler_TP1", 1),
        ("sglang", 1, 1, "sglang::scheduler", 0),
        ("sglang", 2, 2, "sglang::scheduler_DP1_TP7", None),
        ("sglang", 2, 2, "sglang::data_parallel_controller", "controller"),
        ("sglang", 2, 2, "sglang::detokenizer", "detokenizer"),
        ("sglang", 2, 2, "python -m sglang.launch_server --tp-size 2", None),
        ("vllm", 2, None, "VLLM::EngineCore", "engine_core"),
        ("vllm", 2, None, "VLLM::Worker_TP1", 1),
        ("vllm", 2, None, "VLLM::Worker", None),
        ("vllm", 4, 2, "VLLM::Worker_DP1_TP0_EP2", 2),
        ("vllm", 2, 2, "VLLM::Worker_DP1_EP1", 1),
        ("vllm", 4, 2, "VLLM::EngineCore_DP0", "engine_core"),
        ("vllm", 4, 2, "VLLM::EngineCore_DP1", "engine_core-1"),
        ("vllm", 2, 2, "VLLM::DPCoordinator", None),
        ("vllm", 1, None, "VLLM::EngineCore", 0),
    ],
)
def test_seat_by_title(engine: str, ranks: int, dp: int | None, title: str, seat: int | str | None) -> None:
    chosen = spec(engine, "cuda", target={"ranks": ranks, "dp": dp})
    found = DIALECTS[engine].seating(title, chosen)
    assert (found.seat if found else None) == seat


def test_on_a_cpu_one_rank_of_vllm_has_a_worker_of_its_own() -> None:
    chosen = spec("vllm", target={"ranks": 1})
    assert DIALECTS["vllm"].seating("VLLM::EngineCore", chosen) == Seating("engine_core", "engine_core")
    assert DIALECTS["vllm"].seating("VLLM::Worker", chosen) == Seating(0, "rank")


@pytest.mark.parametrize(
    ("engine", "target", "node", "seats"),
    [
        ("sglang", {"ranks": 2}, 0, [0, 1, "controller", "detokenizer"]),
        ("sglang", {"ranks": 2, "dp": 1}, 0, [0, 1, "detokenizer"]),
        ("sglang", {"ranks": 4, "nodes": 2}, 1, [2, 3]),
        ("vllm", {"ranks": 2}, 0, [0, 1, "engine_core"]),
        ("vllm", {"ranks": 4, "dp": 2}, 0, [0, 1, 2, 3, "engine_core", "engine_core-1"]),
        ("vllm", {"ranks": 4, "dp": 2, "nodes": 2}, 1, [2, 3, "engine_core-1"]),
        ("vllm", {"ranks": 4, "nodes": 2}, 1, [2, 3]),
        ("vllm", {"ranks": 1}, 0, [0]),
    ],
)
def test_seats_of_a_server_that_is_ready(
    engine: str, target: dict[str, Any], node: int, seats: list[int | str]
) -> None:
    expected = DIALECTS[engine].expected(spec(engine, "cuda", target=target), node)
    assert [seating.seat for seating in expected] == seats


# --- requests and answers -----------------------------------------------------------------------------------

REQUEST = RequestSpec(id="r7", prompt=(5, 6, 7), max_new_tokens=9)


def test_a_request_to_sglang() -> None:
    call = DIALECTS["sglang"].call(REQUEST, 1, spec("sglang"))
    assert (call.method, call.path) == ("POST", "/generate")
    assert call.body is not None
    assert call.body["rid"].startswith("r7-")
    assert {**call.body, "rid": "r7"} == {
        "rid": "r7",
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True},
        "stream": True,
        "routed_dp_rank": 1,
    }
    anywhere = DIALECTS["sglang"].call(replace(REQUEST, grammar="digits"), None, spec("sglang")).body
    assert anywhere is not None
    assert anywhere["rid"] != call.body["rid"]  # the same request again, in the next trial
    assert "routed_dp_rank" not in anywhere
    assert "root ::=" in anywhere["sampling_params"]["ebnf"]


def test_a_request_to_vllm() -> None:
    call = DIALECTS["vllm"].call(REQUEST, 1, spec("vllm"))
    assert (call.method, call.path) == ("POST", "/v1/completions")
    assert call.headers == {"X-data-parallel-rank": "1"}
    assert call.body is not None
    assert call.body["prompt"] == [5, 6, 7]
    assert call.body["return_token_ids"] is True
    anywhere = DIALECTS["vllm"].call(replace(REQUEST, grammar="digits"), None, spec("vllm"))
    assert not anywhere.headers
    assert anywhere.body is not None
    assert "root ::=" in anywhere.body["structured_outputs"]["grammar"]


def test_what_sglang_streams() -> None:
    read = DIALECTS["sglang"].piece
    meta = {"id": "r7", "finish_reason": None, "num_retractions": 2, "dp_rank": 1, "cached_tokens": 3}
    piece = read({"output_ids": [4, 2], "meta_info": meta})
    assert (piece.tokens, piece.whole, piece.finish) == ((4, 2), False, None)
    assert (piece.retractions, piece.dp_rank, piece.cached_tokens) == (2, 1, 3)
    for reason, finish in (
        ({"type": "length", "length": 9}, "length"),
        ({"type": "stop", "matched": 1}, "stop"),
        ({"type": "abort", "message": "too long"}, "aborted: too long"),
    ):
        assert read({"output_ids": [], "meta_info": {**meta, "finish_reason": reason}}).finish == finish
    assert read({"error": {"message": "no such rank", "code": 400}}).error == "no such rank"
    with pytest.raises(ValueError, match="meta_info"):
        read({"text": "?"})


def test_what_vllm_streams() -> None:
    read = DIALECTS["vllm"].piece
    chunk = {"index": 0, "text": "", "token_ids": [4, 2], "finish_reason": None}
    assert read({"choices": [chunk]}).tokens == (4, 2)
    assert read({"choices": [{**chunk, "finish_reason": "length"}]}).finish == "length"
    assert read({"choices": [{**chunk, "finish_reason": "abort"}]}).finish == "aborted: abort"
    assert read({"choices": [], "usage": {}}).tokens == ()
    refused = read({"error": {"message": "too long", "code": 400}})
    assert (refused.error, refused.lost) == ("too long", False)
    dead = read(
        {"error": {"message": "EngineCore encountered an issue. See stack trace (above)", "code": 500}}
    )
    assert dead.lost
    with pytest.raises(ValueError, match="choices"):
        read({"text": "?"})


def test_retractions_in_sglangs_log() -> None:
    count = DIALECTS["sglang"].retracted
    assert count("[2026-11-30 21:51:13 DP0 TP0] Testing retraction. #retracted_reqs: 1, #new_t") == 1
    assert count("[DP1 TP1] KV cache pool is full. Retract requests. #retracted_reqs: 12, #new_t") == 12
    assert count("[DP0 TP0] Testing retraction. #retracted_reqs: 0, #new_tokens_gained: 0") == 0
    assert count("[DP0 TP0] Decode batch, #running-req: 7") == 0
