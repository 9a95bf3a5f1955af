"""From a scenario's words to the command and environment of SGLang and vLLM.

Here: the exact commands of the recipes, as documented, and each word's flag. Not here: what is refused
(``test_engine_refusals.py``), whether the engines know these flags (``test_engine_flags.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_specs import DIALECTS, argv, arrivals, env, place, recipe, spec, spec_of, value

from serving.targets.sglang import SglangTarget
from serving.targets.vllm import VllmTarget

DOCS = Path(__file__).parents[1] / "docs"
TARGETS = {"sglang": SglangTarget(), "vllm": VllmTarget()}

# --- recipes, word for word ---------------------------------------------------------------------------------

COMMANDS: Mapping[str, tuple[str, dict[str, str]]] = {
    "sglang-dp-cpu": (
        "python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init "
        "--random-seed 0 --dtype float32 --device cpu --tp-size 2 --dp-size 2 --enable-dp-attention "
        "--dist-init-addr 127.0.0.1:PORT+1 --max-total-tokens 1024 --page-size 1 --chunked-prefill-size 256 "
        "--max-running-requests 16 --attention-backend torch_native --disable-cuda-graph "
        "--disable-overlap-schedule --incremental-streaming-output --enable-metrics --host 127.0.0.1 --port PORT",
        {
            "SGLANG_INIT_NEW_TOKEN_RATIO": "0.7",
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "3",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "OMP_NUM_THREADS": "1",
        },
    ),
    "sglang-dp-npu": (
        "python -m sglang.launch_server --model-path vllm-ascend/DeepSeek-V2-Lite-W8A8 --random-seed 0 "
        "--dtype bfloat16 --quantization modelslim --device npu --tp-size 2 --dp-size 2 --enable-dp-attention "
        "--dist-init-addr 127.0.0.1:PORT+1 --max-total-tokens 4500 --page-size 128 --chunked-prefill-size 1024 "
        "--max-running-requests 32 --attention-backend ascend --cuda-graph-bs-decode 2 8 16 "
        "--incremental-streaming-output --enable-metrics --host 127.0.0.1 --port PORT --trust-remote-code",
        {
            "SGLANG_INIT_NEW_TOKEN_RATIO": "0.7",
            "SGLANG_USE_MODELSCOPE": "true",
            "HCCL_EXEC_TIMEOUT": "200",
            "STREAMS_PER_DEVICE": "32",
        },
    ),
    "sglang-dp-npu-retract": (
        "python -m sglang.launch_server --model-path vllm-ascend/DeepSeek-V2-Lite-W8A8 --random-seed 0 "
        "--dtype bfloat16 --quantization modelslim --device npu --tp-size 2 --dp-size 2 --enable-dp-attention "
        "--dist-init-addr 127.0.0.1:PORT+1 --max-total-tokens 4500 --page-size 128 --chunked-prefill-size 256 "
        "--max-running-requests 32 --attention-backend ascend --cuda-graph-bs-decode 2 8 16 "
        "--incremental-streaming-output --enable-metrics --host 127.0.0.1 --port PORT --trust-remote-code",
        {
            "SGLANG_INIT_NEW_TOKEN_RATIO": "0.7",
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "3",
            "SGLANG_USE_MODELSCOPE": "true",
            "HCCL_EXEC_TIMEOUT": "200",
            "STREAMS_PER_DEVICE": "32",
        },
    ),
    "sglang-dp-cuda": (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V2-Lite --random-seed 0 --dtype bfloat16 "
        "--device cuda --tp-size 2 --dp-size 2 --enable-dp-attention --dist-init-addr 127.0.0.1:PORT+1 "
        "--max-total-tokens 4480 --page-size 64 --chunked-prefill-size 512 --max-running-requests 64 "
        "--cuda-graph-bs-decode 1 2 4 8 16 32 --incremental-streaming-output --enable-metrics --host 127.0.0.1 "
        "--port PORT --trust-remote-code",
        {
            "SGLANG_INIT_NEW_TOKEN_RATIO": "0.7",
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "3",
        },
    ),
    "vllm-dp-cuda": (
        "python -m vllm.entrypoints.openai.api_server --model deepseek-ai/DeepSeek-V2-Lite --seed 0 "
        "--generation-config vllm --dtype bfloat16 --max-model-len 3072 --tensor-parallel-size 1 "
        "--data-parallel-size 2 --enable-expert-parallel --data-parallel-rpc-port PORT+1 --block-size 64 "
        "--num-gpu-blocks-override 70 --max-num-batched-tokens 256 --max-num-seqs 32 "
        "--cudagraph-capture-sizes 1 2 4 8 16 32 --async-scheduling --host 127.0.0.1 --port PORT "
        "--trust-remote-code",
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ),
    "vllm-tp-cpu": (
        "python -m vllm.entrypoints.openai.api_server --model MODEL --skip-tokenizer-init "
        "--seed 0 --generation-config vllm --dtype float32 --max-model-len 512 --tensor-parallel-size 2 "
        "--block-size 16 --num-gpu-blocks-override 34 --max-num-batched-tokens 512 --max-num-seqs 16 "
        "--enforce-eager --no-async-scheduling --no-enable-prefix-caching --host 127.0.0.1 --port PORT",
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
    ),
    "vllm-ascend": (
        "python -m vllm.entrypoints.openai.api_server --model vllm-ascend/DeepSeek-V2-Lite-W8A8 --seed 0 "
        "--generation-config vllm --dtype bfloat16 --quantization ascend --max-model-len 2560 "
        "--tensor-parallel-size 1 --data-parallel-size 2 --enable-expert-parallel --data-parallel-rpc-port PORT+1 "
        "--block-size 128 --num-gpu-blocks-override 35 --max-num-batched-tokens 512 --max-num-seqs 16 "
        "--cudagraph-capture-sizes 2 8 16 --async-scheduling --host 127.0.0.1 --port PORT --trust-remote-code",
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_MODELSCOPE": "true",
            "HCCL_EXEC_TIMEOUT": "200",
            "STREAMS_PER_DEVICE": "32",
        },
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_is_this_command(name: str) -> None:
    chosen = spec_of(recipe(name))
    command = DIALECTS[chosen.target["name"]].command(chosen, place(chosen))
    words, environment = COMMANDS[name]
    assert list(command.arguments) == words.split()
    assert command.env == environment


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_wrong_with_a_recipe(name: str) -> None:
    chosen = recipe(name)
    for arm in range(2 if chosen.arms.varied() else 1):
        found = spec_of(chosen, arm)
        for seed in range(20):
            assert DIALECTS[chosen.target.name].problem(found, arrivals(chosen, seed)) is None


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documentation_shows_it(name: str) -> None:
    chosen = spec_of(recipe(name))
    shown = TARGETS[chosen.target["name"]].commands(chosen)
    section = re.split(r"\n##+ ", (DOCS / "engines.md").read_text().split(f"### {name}\n")[1])[0]
    blocks = [block.replace("\\\n", "").strip() for block in section.split("```")[1::2]]
    assert list(shown) == blocks


def test_one_command_a_node() -> None:
    chosen = spec("sglang", "npu", target={"ranks": 4, "nodes": 2, "env": {"MINE": "a b"}})
    lines = TARGETS["sglang"].commands(chosen)
    assert len(lines) == 2
    for number, line in enumerate(lines):
        words = shlex.split(line)
        assert "MINE=a b" in words
        assert value(words, "--node-rank") == str(number)
        assert value(words, "--dist-init-addr") == "$HOST:$PORT_1"


def test_arms_differ_in_what_they_vary_only() -> None:
    off, on = (argv(spec_of(recipe("sglang-dp-cuda"), arm)) for arm in (0, 1))
    assert [flag for flag in on if flag not in off] == ["--enable-symm-mem"]
    pageable, pinned = (argv(spec_of(recipe("sglang-dp-npu"), arm)) for arm in (0, 1))
    assert pageable == pinned  # no flag sets it: the probe does


# --- one word, one flag -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "flag", "expected"),
    [
        ({"target": {"ranks": 4, "dp": 2}}, "--tp-size", "4"),
        ({"target": {"ranks": 4, "dp": 2}}, "--dp-size", "2"),
        ({"target": {"ranks": 4, "dp": 1}}, "--dp-size", None),
        ({"target": {"ranks": 4}}, "--dp-size", "4"),
        ({"engine": {"chunk_tokens": 256}, "target": {"dp": 1}}, "--chunked-prefill-size", "256"),
        ({"engine": {"chunk_tokens": 256}, "target": {"ranks": 4, "dp": 2}}, "--chunked-prefill-size", "512"),
        ({"engine": {"max_running": 10}, "target": {"ranks": 4, "dp": 2}}, "--max-running-requests", "20"),
        ({"engine": {"kv_tokens": 999}}, "--max-total-tokens", "999"),
        ({"engine": {"context_tokens": 640}}, "--context-length", "640"),
        ({"engine": {"dtype": "float16"}}, "--dtype", "float16"),
        ({"engine": {}}, "--dtype", None),
        ({"engine": {"quantization": "fp8"}}, "--quantization", "fp8"),
        ({"engine": {"attention_backend": "triton"}}, "--attention-backend", "triton"),
        ({"target": {"engine_watchdog_s": 100}}, "--watchdog-timeout", "100"),
        ({"target": {"engine_watchdog_s": 0.5}}, "--watchdog-timeout", "0.5"),
        ({"target": {}}, "--watchdog-timeout", None),
        ({"model": {"seed": 7}}, "--random-seed", "7"),
        ({"toggles": {}}, "--cuda-graph-bs-decode", None),
    ],
)
def test_sglang_word(tables: dict[str, Any], flag: str, expected: str | None) -> None:
    assert value(argv(spec("sglang", **tables)), flag) == expected


@pytest.mark.parametrize(
    ("toggles", "flag"),
    [
        ({"graph": "off"}, "--disable-cuda-graph"),
        ({"overlap": "off"}, "--disable-overlap-schedule"),
        ({"prefix_cache": "off"}, "--disable-radix-cache"),
        ({"symm_mem": "on"}, "--enable-symm-mem"),
    ],
)
def test_sglang_toggle(toggles: dict[str, str], flag: str) -> None:
    other = {name: {"on": "off", "off": "on"}[asked] for name, asked in toggles.items()}
    assert flag in argv(spec("sglang", "cuda", toggles=toggles))
    assert flag not in argv(spec("sglang", "cuda", toggles=other))
    assert flag not in argv(spec("sglang", "cuda"))  # its own default


def test_a_later_sglang_gets_the_flags_that_replace_the_old_ones() -> None:
    chosen = spec("sglang", toggles={"graph": "off"})
    for version in (None, "0.5.20", "0.5.23"):
        assert {"--enable-dp-attention", "--disable-cuda-graph"} <= set(argv(chosen, version=version))
    for version in ("0.5.24", "0.6.0rc1", "1.0.0"):
        later = argv(chosen, version=version)
        assert value(later, "--attn-dp-size") == "2"
        assert value(later, "--cuda-graph-backend-decode") == "disabled"
        assert not {"--enable-dp-attention", "--dp-size", "--disable-cuda-graph"} & set(later)


@pytest.mark.parametrize(
    ("tables", "flag", "expected"),
    [
        ({"target": {"ranks": 4}}, "--tensor-parallel-size", "4"),
        ({"target": {"ranks": 4}}, "--data-parallel-size", None),
        ({"target": {"ranks": 4, "dp": 2}}, "--tensor-parallel-size", "2"),
        ({"target": {"ranks": 4, "dp": 2}}, "--data-parallel-size", "2"),
        ({"engine": {"kv_tokens": 4500, "page_size": 64}}, "--num-gpu-blocks-override", "70"),
        ({"engine": {"page_size": 64}}, "--block-size", "64"),
        ({"engine": {"chunk_tokens": 300}}, "--max-num-batched-tokens", "300"),
        ({"engine": {"max_running": 9}, "target": {"ranks": 4, "dp": 2}}, "--max-num-seqs", "9"),
        ({"engine": {"attention_backend": "FLASHMLA"}}, "--attention-backend", "FLASHMLA"),
        ({"engine": {"quantization": "fp8"}}, "--quantization", "fp8"),
        ({"model": {"seed": 7}}, "--seed", "7"),
    ],
)
def test_vllm_word(tables: dict[str, Any], flag: str, expected: str | None) -> None:
    assert value(argv(spec("vllm", "cuda", **tables)), flag) == expected


@pytest.mark.parametrize(
    ("toggles", "flag"),
    [
        ({"graph": "off"}, "--enforce-eager"),
        ({"overlap": "on"}, "--async-scheduling"),
        ({"overlap": "off"}, "--no-async-scheduling"),
        ({"prefix_cache": "on"}, "--enable-prefix-caching"),
        ({"prefix_cache": "off"}, "--no-enable-prefix-caching"),
    ],
)
def test_vllm_toggle(toggles: dict[str, str], flag: str) -> None:
    assert flag in argv(spec("vllm", "cuda", toggles=toggles))
    assert flag not in argv(spec("vllm", "cuda"))


def test_variables_of_the_servers_environment() -> None:
    forced = env(spec("sglang", engine={"retract_every": 5, "admission_ratio": 0.25}))
    assert forced["SGLANG_TEST_RETRACT_INTERVAL"] == "5"
    assert forced["SGLANG_INIT_NEW_TOKEN_RATIO"] == "0.25"
    assert "SGLANG_TEST_RETRACT" not in env(spec("sglang", engine={"retract_every": 0}))
    assert "SGLANG_USE_CPU_ENGINE" not in env(spec("sglang", "cuda"))
    assert env(spec("sglang", target={"ranks": 4}))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2|3"
    assert env(spec("sglang", target={"ranks": 4, "nodes": 2}))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    for on, asked in (("1", "on"), ("0", "off")):
        assert env(spec("vllm", "cuda", toggles={"symm_mem": asked}))["VLLM_USE_NCCL_SYMM_MEM"] == on
    assert "VLLM_USE_NCCL_SYMM_MEM" not in env(spec("vllm", "cuda"))
    watched = env(spec("vllm", target={"engine_watchdog_s": 60}))
    assert watched["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "60"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_what_the_user_adds_comes_last_and_wins(engine: str) -> None:
    added = {"args": ["--log-level", "debug"], "env": {"HF_HUB_OFFLINE": "0", "MINE": "1"}}
    chosen = spec(engine, target=added)
    assert argv(chosen)[-2:] == ["--log-level", "debug"]
    assert env(chosen)["HF_HUB_OFFLINE"] == "0"
    assert env(chosen)["MINE"] == "1"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_weights_are_made_up_where_there_are_none(engine: str) -> None:
    assert value(argv(spec(engine, model={"preset": "lite"})), "--load-format") == "dummy"
    assert value(argv(spec(engine, model={"directory": "owner/model"})), "--load-format") is None


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_models_tokenizer_is_used_where_there_is_one(engine: str, tmp_path: Any) -> None:
    assert "--skip-tokenizer-init" in argv(spec(engine))
    (tmp_path / "config.json").write_text("{}")
    chosen = spec(engine, model={"directory": str(tmp_path)})
    assert "--skip-tokenizer-init" in argv(chosen)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in argv(chosen)
    assert env(chosen)["HF_HUB_OFFLINE"] == "1"
    named = spec(engine, model={"directory": "owner/model"})
    assert "--skip-tokenizer-init" not in argv(named)
    assert "HF_HUB_OFFLINE" not in env(named)  # the engine has to fetch it


def test_several_nodes_of_sglang() -> None:
    chosen = spec("sglang", "npu", target={"ranks": 4, "nodes": 2})
    first, second = argv(chosen, 0), argv(chosen, 1)
    assert [value(a, "--node-rank") for a in (first, second)] == ["0", "1"]
    assert {value(a, "--nnodes") for a in (first, second)} == {"2"}
    assert {value(a, "--dist-init-addr") for a in (first, second)} == {"127.0.0.1:PORT+1"}
    assert {value(a, "--tp-size") for a in (first, second)} == {"4"}


def test_several_nodes_of_vllm() -> None:
    groups = spec("vllm", "cuda", target={"ranks": 4, "dp": 4, "nodes": 2})
    first, second = argv(groups, 0), argv(groups, 1)
    assert {value(a, "--data-parallel-size-local") for a in (first, second)} == {"2"}
    assert {value(a, "--data-parallel-rpc-port") for a in (first, second)} == {"PORT+1"}
    assert "--headless" not in first
    assert value(second, "--data-parallel-start-rank") == "2"
    assert "--headless" in second
    wide = spec("vllm", "cuda", target={"ranks": 4, "nodes": 2})
    assert value(argv(wide, 1), "--node-rank") == "1"
    assert {value(argv(wide, node), "--master-port") for node in (0, 1)} == {"PORT+2"}
