"""SGLang as a target: its flags, its processes, its HTTP interface and what its log says.

Here: knowledge of SGLang, checked against 0.5.20 and 0.5.23 (``docs/engines.md`` has the table of words and flags).
Not here: starting, driving and ending servers (``engine_target.py``), what is wrong for any engine
(``engine_checks.py``).

With more than one data-parallel group SGLang runs *DP attention*: the groups share the tensor-parallel ranks, and
each step they agree on a batch. Its flags count for the whole server what the scenario counts for one rank, so two
of them are multiplied here: ``handle_data_parallelism`` divides ``--chunked-prefill-size`` by the number of groups,
and ``resolve_max_num_reqs`` divides ``--max-running-requests``. ``--max-total-tokens`` is each rank's own.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.target import EngineSpec
from serving.targets import engine_checks
from serving.targets.dialect import Call, Command, Count, Piece, Place, Seating
from serving.targets.engine_checks import words
from serving.targets.engine_target import EngineTarget
from serving.workload import Arrival, RequestSpec

_LAST_CHECKED = (0, 5, 23)
"""Its parser announces that ``--enable-dp-attention`` and ``--disable-cuda-graph`` will go; later releases get the
flags that it names instead."""
_KEPT_BACK_TOKENS = 2
"""A request may come to the smaller of pool and context less this (``tp_worker.py``, ``scheduler.py``)."""
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_SCHEDULER = re.compile(r"sglang::scheduler((?:_[A-Z_]+\d+)*)")
_TP_RANK = re.compile(r"_TP(\d+)")

_OWNED = {
    "--host": "leave it out: the launcher chooses it",
    "--port": "leave it out: the launcher chooses it",
    "--dist-init-addr": "leave it out: the launcher chooses it",
    "--nnodes": "set target.nodes",
    "--node-rank": "set target.nodes",
    "--model-path": "set model.directory",
    "--model": "set model.directory",
    "--tp": "set target.ranks",
    "--tp-size": "set target.ranks",
    "--tensor-parallel-size": "set target.ranks",
    "--dp": "set target.dp",
    "--dp-size": "set target.dp",
    "--data-parallel-size": "set target.dp",
    "--attn-dp-size": "set target.dp",
    "--attention-data-parallel-size": "set target.dp",
    "--enable-dp-attention": "set target.dp",
    "--pp-size": "leave it out: hangrig knows no pipeline ranks",
    "--pipeline-parallel-size": "leave it out: hangrig knows no pipeline ranks",
    "--device": "set target.device, or use --device of hangrig run",
}


class SglangDialect:
    """See `serving.targets.dialect.Dialect`."""

    name = "sglang"
    distributions: Sequence[str] = ("sglang",)
    ports = 16
    """With DP attention it takes the seven from ``--dist-init-addr`` on (``PortArgs``)."""
    health = Call("GET", "/health")
    metrics = Call("GET", "/metrics")
    # No pool in use: its gauge may be half a minute old, and SGLang itself checks the pool whenever it is idle.
    samples: Mapping[Count, Sequence[str]] = {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "retractions": ("sglang:num_retracted_requests_total",),
        "tokens_out": ("sglang:generation_tokens_total",),
        "steps": ("sglang:cuda_graph_passes_total",),
    }
    rank_label = "dp_rank"
    flush = Call("POST", "/flush_cache")
    troubles: Sequence[str] = ("health check failed",)
    harmless: Sequence[str] = (
        "server_args=", "ignore import error", "setup custom allreduce failed", "responses api",
        "yes/no token ids",
    )  # fmt: skip

    def problem(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> str | None:
        return next(self._problems(spec, arrivals), None)

    def _problems(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> Iterator[str]:
        engine, groups = spec.engine, self.data_parallel(spec)
        yield from engine_checks.shape_problems(spec, groups)
        page = engine["page_size"]
        pool = engine["kv_tokens"] // page * page
        longest = min(pool, engine["context_tokens"] or pool) - _KEPT_BACK_TOKENS
        yield from engine_checks.model_problems(spec, arrivals, longest)
        if engine["chunk_tokens"] % page:
            yield words(
                "engine.chunk_tokens", engine["chunk_tokens"], f"is no multiple of engine.page_size = {page}",
                "use one: sglang does not start otherwise",
            )  # fmt: skip
        yield from engine_checks.argument_problems(spec, _OWNED, "SGLANG_PLUGINS")
        roles = ("rank", "server", *(("controller",) if groups > 1 else ()), "detokenizer")
        yield from engine_checks.fault_problems(spec, roles, groups)

    def data_parallel(self, spec: EngineSpec) -> int:
        groups: int | None = spec.target["dp"]
        return spec.world if groups is None else groups

    def command(self, spec: EngineSpec, place: Place) -> Command:
        arguments = (
            spec.target["python"] or sys.executable, "-m", "sglang.launch_server",
            *self._model(spec, place),
            *self._parallel(spec, place),
            *self._engine(spec),
            *self._toggles(spec, place),
            "--incremental-streaming-output", "--enable-metrics",
            "--host", "127.0.0.1", "--port", str(place.port),
            *spec.target["args"],
        )  # fmt: skip
        return Command(arguments, self._env(spec) | spec.target["env"])

    def _model(self, spec: EngineSpec, place: Place) -> list[str]:
        engine = spec.engine
        flags = ["--model-path", place.model]
        if place.dummy:
            flags += ["--load-format", "dummy"]
        if not engine_checks.has_tokenizer(spec.model, place.model):
            flags += ["--skip-tokenizer-init"]
        flags += ["--random-seed", str(spec.model["seed"])]
        if engine["dtype"] != "auto":
            flags += ["--dtype", engine["dtype"]]
        if engine["quantization"] is not None:
            flags += ["--quantization", engine["quantization"]]
        if engine["context_tokens"] is not None:
            flags += ["--context-length", str(engine["context_tokens"])]
        return flags

    def _parallel(self, spec: EngineSpec, place: Place) -> list[str]:
        groups = self.data_parallel(spec)
        flags = ["--device", spec.device, "--tp-size", str(spec.world)]
        if groups > 1 and _is_later(place.version):
            flags += ["--attn-dp-size", str(groups)]
        elif groups > 1:
            flags += ["--dp-size", str(groups), "--enable-dp-attention"]
        flags += ["--dist-init-addr", f"{place.host}:{place.ports[0]}"]
        if place.nodes > 1:
            flags += ["--nnodes", str(place.nodes), "--node-rank", str(place.node)]
        return flags

    def _engine(self, spec: EngineSpec) -> list[str]:
        engine, groups = spec.engine, self.data_parallel(spec)
        flags = [
            "--max-total-tokens", str(engine["kv_tokens"]),
            "--page-size", str(engine["page_size"]),
            "--chunked-prefill-size", str(engine["chunk_tokens"] * groups),
            "--max-running-requests", str(engine["max_running"] * groups),
        ]  # fmt: skip
        if engine["attention_backend"] is not None:
            flags += ["--attention-backend", engine["attention_backend"]]
        if spec.target["engine_watchdog_s"] is not None:
            flags += ["--watchdog-timeout", f"{spec.target['engine_watchdog_s']:g}"]
        return flags

    def _toggles(self, spec: EngineSpec, place: Place) -> list[str]:
        toggles = spec.toggles
        flags: list[str] = []
        if toggles.get("graph") == "on":
            flags += ["--cuda-graph-bs-decode", *map(str, spec.engine["graph_buckets"])]
        elif toggles.get("graph") == "off" and _is_later(place.version):
            flags += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        elif toggles.get("graph") == "off":
            flags += ["--disable-cuda-graph"]
        if toggles.get("overlap") == "off":
            flags += ["--disable-overlap-schedule"]
        if toggles.get("prefix_cache") == "off":
            flags += ["--disable-radix-cache"]
        if toggles.get("symm_mem") == "on":
            flags += ["--enable-symm-mem"]
        return flags

    def _env(self, spec: EngineSpec) -> dict[str, str]:
        # Of the server: its schedulers read these when they are imported, and a client's environment is not theirs.
        env = {"SGLANG_INIT_NEW_TOKEN_RATIO": f"{spec.engine['admission_ratio']:g}"}
        if spec.engine["retract_every"]:
            env |= {
                "SGLANG_TEST_RETRACT": "1",
                "SGLANG_TEST_RETRACT_INTERVAL": str(spec.engine["retract_every"]),
            }
        if engine_checks.is_local(spec.model):
            env["HF_HUB_OFFLINE"] = "1"
        if spec.device == "cpu":
            local = spec.world // spec.target["nodes"]
            env |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(local)),
                "OMP_NUM_THREADS": "1",  # the binding is not kept by every kernel: more threads fight for that core
            }
        return env

    def expected(self, spec: EngineSpec, node: int) -> Sequence[Seating]:
        share = spec.world // spec.target["nodes"]
        ranks = [Seating(rank, "rank") for rank in range(node * share, (node + 1) * share)]
        if node > 0:
            return ranks
        controller = [Seating("controller", "controller")] if self.data_parallel(spec) > 1 else []
        return [*ranks, *controller, Seating("detokenizer", "detokenizer")]

    def seating(self, title: str, spec: EngineSpec) -> Seating | None:
        title = title.strip()
        if title == "sglang::data_parallel_controller":
            return Seating("controller", "controller")
        if title == "sglang::detokenizer":
            return Seating("detokenizer", "detokenizer")
        scheduler = _SCHEDULER.fullmatch(title)
        if scheduler is None:
            return None
        named = _TP_RANK.search(scheduler[1])
        rank = int(named[1]) if named else 0
        return Seating(rank, "rank") if rank < spec.world else None

    def call(self, request: RequestSpec, dp_rank: int | None, spec: EngineSpec) -> Call:
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": True,
        }
        if request.grammar is not None:
            from serving.sampling import grammar_text  # torch and xgrammar: only where a grammar is asked for

            sampling["ebnf"] = grammar_text(request.grammar)
        # Two seconds after a stream has ended SGLang aborts what runs under its id by then
        # (``TokenizerManager.create_abort_task``): the next trial's request must not have the same.
        body: dict[str, Any] = {
            "rid": f"{request.id}-{secrets.token_hex(4)}",
            "input_ids": list(request.prompt),
            "sampling_params": sampling,
            "stream": True,
        }
        if dp_rank is not None:
            body["routed_dp_rank"] = dp_rank
        return Call("POST", "/generate", body)

    def piece(self, event: Mapping[str, Any]) -> Piece:
        if "error" in event:
            error = event["error"]
            return Piece(error=str(error["message"] if isinstance(error, Mapping) else error))
        try:
            meta = event["meta_info"]
            return Piece(
                tokens=tuple(map(int, event["output_ids"])),
                finish=_finish(meta["finish_reason"]),
                dp_rank=meta.get("dp_rank"),
                retractions=meta.get("num_retractions"),
                cached_tokens=meta.get("cached_tokens"),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"an event without {error} in sglang's stream: {str(event)[:200]}") from error

    def retracted(self, line: str) -> int:
        found = _RETRACTED.search(line)
        return int(found[1]) if found else 0


def _finish(reason: Mapping[str, Any] | None) -> str | None:
    if reason is None:
        return None
    kind = str(reason["type"])
    return f"aborted: {reason.get('message') or 'no reason given'}" if kind == "abort" else kind


def _is_later(version: str | None) -> bool:
    """Than the last release whose flags were checked. A command that is only shown is of that release."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is not None and tuple(map(int, numbers.groups())) > _LAST_CHECKED


class SglangTarget(EngineTarget):
    """SGLang, served by a launcher on each node."""

    def __init__(self) -> None:
        super().__init__(SglangDialect())
