"""What SGLang or vLLM cannot do is refused before anything starts, with key, value and remedy.

Here: each refusal of the two dialects, beside what is nearly the same and fits. Not here: what scenario files
themselves may say (``test_scenario.py``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from engine_specs import DIALECTS, arrivals, scenario, spec_of


@pytest.mark.parametrize(
    ("engine", "device", "tables", "expected"),
    [
        ("sglang", "sim", {}, r"device = sim: sglang runs on cpu, cuda, npu only; use --device cpu"),
        ("sglang", "cpu", {"target": {"ranks": 3, "dp": 2}}, r"target.dp = 2: does not divide target.ranks = 3"),
        ("sglang", "cpu", {"target": {"ranks": 3, "nodes": 2}}, r"target.nodes = 2: does not divide"),
        ("sglang", "cpu", {"model": {"preset": "tiny"}}, r"model.preset = tiny: .*use small"),
        ("sglang", "cpu", {"engine": {"padding": "max_len"}}, r"engine.padding = max_len: .*leave it out"),
        ("sglang", "cpu", {"engine": {"page_size": 64, "chunk_tokens": 100}}, r"chunk_tokens = 100: is no mult"),
        ("sglang", "cpu", {"target": {"args": ["--port", "1"]}}, r"args = --port: .*leave it out"),
        ("sglang", "cpu", {"target": {"args": ["--tp-size=4"]}}, r"args = --tp-size=4: .*set target.ranks"),
        ("sglang", "cpu", {"target": {"env": {"SGLANG_PLUGINS": "other"}}}, r"SGLANG_PLUGINS = other: leaves out"),
        ("vllm", "cuda", {"target": {"env": {"VLLM_PLUGINS": "ascend"}}}, r"VLLM_PLUGINS = ascend: leaves out"),
        ("vllm", "cpu", {"target": {"dp": 2}}, r"target.dp = 2: on a CPU vllm has no all_gatherv"),
        ("vllm", "cuda", {"target": {"ranks": 8, "dp": 2, "nodes": 4}}, r"nodes = 4: does not divide target.dp"),
        ("vllm", "cpu", {"toggles": {"overlap": "on"}}, r"overlap = on: on a CPU .*set toggles.overlap = off"),
        ("vllm", "cuda", {"engine": {"page_size": 1}}, r"engine.page_size = 1: .*multiples of 16 .*use 16"),
        ("vllm", "cuda", {"engine": {"context_tokens": None}}, r"context_tokens = none: .*set it to 4480"),
        ("vllm", "cuda", {"engine": {"kv_tokens": 512}}, r"context_tokens = 512: .*use 496 at most"),
        ("vllm", "cuda", {"engine": {"chunk_tokens": 64}}, r"chunk_tokens = 64: lies below engine.max"),
        ("vllm", "cuda", {"engine": {"retract_every": 3}}, r"engine.retract_every = 3: .*set it to 0"),
        ("vllm", "cuda", {"engine": {"admission_ratio": 0.5}}, r"admission_ratio = 0.5: vllm sets no"),
        ("vllm", "cuda", {"target": {"args": ["-tp", "2"]}}, r"target.args = -tp: .*set target.ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be(engine: str, device: str, tables: dict[str, Any], expected: str) -> None:
    chosen = scenario(engine, "cuda" if device == "sim" else device, **tables)
    found = DIALECTS[engine].problem(replace(spec_of(chosen), device=device), arrivals(chosen))
    assert found is not None
    assert re.search(expected, found)


FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sglang", {"name": "raise"}, {"toggles": {"probe": "off"}}, r"name = raise: .*off in this arm"),
    ("sglang", {"name": "stop", "role": "engine_core"}, {}, r"role = engine_core: .*detokenizer"),
    ("sglang", {"name": "stop", "role": "controller"}, {"target": {"dp": 1}}, r"role = controller: .*no such"),
    ("sglang", {"name": "kill", "ranks": [0, 2]}, {}, r"ranks = \[0, 2\]: .*no rank 2; use ranks 0 to 1"),
    ("sglang", {"name": "raise", "role": "controller"}, {}, r"role = controller: .*a step of a rank"),
    ("sglang", {"name": "block", "role": "server"}, {}, r"role = server: .*of: rank, controller"),
    ("sglang", {"name": "stop", "role": "server", "ranks": [1]}, {}, r"ranks = \[1\]: a server is no rank"),
    ("sglang", {"name": "raise", "mode": "idle"}, {"target": {"dp": 1}}, r"mode = idle: .*target.dp is 1"),
    ("vllm", {"name": "stop", "role": "detokenizer"}, {}, r"role = detokenizer: .*, engine_core"),
    ("vllm", {"name": "abort_by_clock"}, {}, r"abort_by_clock: in vllm one"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "fault", "tables", "expected"), FAULTS)
def test_faults_that_cannot_happen(
    engine: str, fault: dict[str, Any], tables: dict[str, Any], expected: str
) -> None:
    chosen = scenario(engine, faults=[fault], **tables)
    found = DIALECTS[engine].problem(spec_of(chosen), ())
    assert found is not None
    assert re.search(expected, found)


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ("sglang", {"name": "skip_collective", "ranks": [1], "operation": "all_reduce"}),
        ("sglang", {"name": "raise", "mode": "idle", "ranks": [1]}),
        ("sglang", {"name": "abort_by_clock", "ranks": [0]}),
        ("sglang", {"name": "block", "role": "controller"}),
        ("sglang", {"name": "stop", "role": "detokenizer"}),
        ("vllm", {"name": "block", "role": "engine_core"}),
        ("vllm", {"name": "skip_collective", "ranks": [1]}),
    ],
)
def test_faults_that_can(engine: str, fault: dict[str, Any]) -> None:
    chosen = spec_of(scenario(engine, faults=[fault]))
    assert DIALECTS[engine].problem(chosen, ()) is None
    if fault["name"] == "stop":
        unseen = replace(chosen, toggles={**chosen.toggles, "probe": "off"})
        assert DIALECTS[engine].problem(unseen, ()) is None


def test_one_rank_of_vllm_has_no_other_engine_core() -> None:
    chosen = scenario("vllm", "cuda", target={"ranks": 1}, faults=[{"name": "stop", "role": "engine_core"}])
    found = DIALECTS["vllm"].problem(spec_of(chosen), ())
    assert found is not None
    assert "use one of: rank, server" in found


@pytest.mark.parametrize(
    ("engine", "tables", "fits"),
    [
        ("sglang", {"engine": {"kv_tokens": 102, "page_size": 1, "chunk_tokens": 64}}, True),
        ("sglang", {"engine": {"kv_tokens": 101, "page_size": 1, "chunk_tokens": 64}}, False),
        ("sglang", {"engine": {"kv_tokens": 127, "page_size": 64, "chunk_tokens": 64}}, False),
        ("sglang", {"engine": {"context_tokens": 102}}, True),
        ("sglang", {"engine": {"context_tokens": 101}}, False),
        ("vllm", {"engine": {"context_tokens": 100}}, True),
        ("vllm", {"engine": {"context_tokens": 99}}, False),
    ],
)
def test_requests_that_the_engine_would_cut_short(engine: str, tables: dict[str, Any], fits: bool) -> None:
    load = {"prompt_tokens": [60, 60], "decode_tokens": [40, 40]}
    chosen = scenario(engine, workload=load, **tables)
    found = DIALECTS[engine].problem(spec_of(chosen), arrivals(chosen))
    assert (found is None) == fits
    assert found is None or "a request of 100 tokens" in found


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_grammars_need_a_tokenizer(engine: str) -> None:
    chosen = scenario(engine, workload={"grammar_share": 1.0})
    found = DIALECTS[engine].problem(spec_of(chosen), arrivals(chosen))
    assert found is not None
    assert "workload.grammar_share" in found
    named = scenario(engine, workload={"grammar_share": 1.0}, model={"directory": "owner/model"})
    assert DIALECTS[engine].problem(spec_of(named), arrivals(named)) is None
