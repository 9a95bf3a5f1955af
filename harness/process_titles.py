"""What a process title and a server's command line say about an engine: knowledge of SGLang and vLLM. Pure.

Titles are those of SGLang 0.5.20 to 0.5.23 and of vLLM 0.32 (``setproctitle`` in both). Putting processes into
seats is ``process_tree.py``. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

EngineName: TypeAlias = Literal["sglang", "vllm", "other"]

_SGLANG = re.compile(r"^sglang::(?P<what>[a-z_]+?)(?::\d+)?(?P<places>(?:_[A-Z][A-Z_]*\d+)*)$")
_SGLANG_ROLES = {
    "scheduler": "rank",
    "data_parallel_controller": "controller",
    "detokenizer": "detokenizer",
    "detokenizer_router": "detokenizer",
    "tokenizer_worker": "server",
}
# The prefix can be set (VLLM_PROCESS_NAME_PREFIX); these names cannot.
_VLLM = re.compile(
    r"^[^\s:]+::(?P<what>EngineCore|Worker|APIServer|DPCoordinator|DPSupervisor)"
    r"(?:_(?P<index>\d+))?(?P<places>(?:_[A-Z]+\d+)*)$"
)
_VLLM_ROLES = {
    "EngineCore": "engine_core",
    "Worker": "rank",
    "APIServer": "server",
    "DPCoordinator": "coordinator",
    "DPSupervisor": "server",
}
_PLACE = re.compile(r"([A-Z][A-Z_]*?)(\d+)")
_BASES = {"APIServer": "api_server", "DPSupervisor": "supervisor", "tokenizer_worker": "tokenizer_worker"}
_SERVERS: tuple[tuple[EngineName, re.Pattern[str]], ...] = (
    (
        "sglang",
        re.compile(r"(?:^|[\s/])(?:sglang[.]launch_server\b|sglang serve\b|sglang/launch_server[.]py\b)"),
    ),
    ("vllm", re.compile(r"(?:^|[\s/])(?:vllm[.]entrypoints[.]\w|vllm serve\b|vllm/entrypoints/\w)")),
)
_HELPERS = re.compile(
    r"multiprocessing[.](?:resource_tracker|forkserver|spawn)|--multiprocessing-fork|compile_worker|"
    r"^(?:\S*/)?(?:ba|da|z)?sh\b|^(?:\S*/)?(?:sudo|numactl|env|nohup|timeout|tee|tini|setsid|py-spy)\b"
)
_SPAWNED = re.compile(r"multiprocessing[.]spawn import spawn_main")
_FLAGS: dict[EngineName, dict[str, tuple[str, ...]]] = {
    "sglang": {
        "tp": ("--tp", "--tp-size", "--tensor-parallel-size"),
        "pp": ("--pp", "--pp-size", "--pipeline-parallel-size"),
        "dp": ("--dp", "--dp-size", "--data-parallel-size"),
        "nodes": ("--nnodes",),
        "device": ("--device",),
        "attention": ("--enable-dp-attention",),
    },
    "vllm": {
        "tp": ("-tp", "--tensor-parallel-size"),
        "pp": ("-pp", "--pipeline-parallel-size"),
        "dp": ("-dp", "--data-parallel-size"),
        "local": ("-dpl", "--data-parallel-size-local"),
        "nodes": ("-n", "--nnodes"),
        "executor": ("--distributed-executor-backend",),
    },
    "other": {},
}
_SIZES = ("tp", "pp", "dp", "nodes")
_COMM_CHARACTERS = 15
_COMMS = {
    "sglang::scheduler": "rank",
    "sglang::data_parallel_controller": "controller",
    "sglang::detokenizer": "detokenizer",
    "VLLM::Worker_": "rank",
    "VLLM::EngineCore": "engine_core",
}


@dataclass(frozen=True, slots=True)
class Titled:
    """What a title says by itself. ``what``: the engine's own word for the process. ``role``: rank, server,
    controller, detokenizer, engine_core or coordinator. ``places``: numbers by kind, as ``{"DP": 1, "TP": 3}``."""

    engine: EngineName
    what: str
    role: str
    index: int | None
    places: Mapping[str, int]

    @property
    def name(self) -> str:
        """The seat of a process that is no rank: ``engine_core-1``, ``api_server``."""
        base = _BASES.get(self.what, self.role)
        number = self.index or self.places.get("DP", 0)
        return f"{base}-{number}" if number else base


def seat_of_title(title: str) -> Titled | None:
    """Reads one process title; None for any that neither engine sets."""
    if match := _SGLANG.match(title):
        role = _SGLANG_ROLES.get(match["what"])
        return None if role is None else Titled("sglang", match["what"], role, None, _places(match["places"]))
    if match := _VLLM.match(title):
        index = None if match["index"] is None else int(match["index"])
        return Titled("vllm", match["what"], _VLLM_ROLES[match["what"]], index, _places(match["places"]))
    return None


def role_of_zombie(comm: str) -> str | None:
    """What a process was that has ended: only the kernel's name of it is left, the first 15 bytes of its title."""
    return next((role for title, role in _COMMS.items() if comm.startswith(title[:_COMM_CHARACTERS])), None)


def is_helper(title: str, engine: EngineName | None = None) -> bool:
    """A tracker, a compiler, a shell, a wrapper, or a process of ``multiprocessing`` without a title yet. Those of
    an engine take one; those of any other program (``engine`` is "other") do its work as they are."""
    works = engine == "other" and _SPAWNED.search(title) is not None
    return not works and _HELPERS.search(title) is not None


def served_by(title: str) -> EngineName | None:
    """The engine whose server has this command line. A shell that started one is none."""
    if is_helper(title):
        return None
    return next((engine for engine, pattern in _SERVERS if pattern.search(title)), None)


def read_flags(engine: EngineName, command: Sequence[str]) -> dict[str, str]:
    """A server's flags that say how large it is, by our words; empty where a file holds its flags."""
    if any(word.partition("=")[0] == "--config" for word in command):
        return {}
    found = {"seen": ""}
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        following = command[position + 1] if position + 1 < len(command) else ""
        for key, spellings in _FLAGS[engine].items():
            if name.replace("_", "-") in spellings:
                found[key] = value if equals else following
    return found


def expected_ranks(engine: EngineName, flags: Mapping[str, str]) -> tuple[int, ...] | None:
    """The ranks that the flags ask for, where all are on one node; None: cannot be told."""
    if engine == "other" or not flags or flags.get("executor") not in (None, "mp"):
        return None
    sizes = {name: _integer(flags.get(name), 1) for name in _SIZES}
    if sizes["nodes"] != 1 or "local" in flags:
        return None
    # With DP attention the data-parallel ranks are those of the tensor-parallel group.
    world = sizes["tp"] * sizes["pp"] * (1 if "attention" in flags else sizes["dp"])
    return tuple(range(world))


def global_ranks(
    engine: EngineName, places: Sequence[Mapping[str, int]], flags: Mapping[str, str]
) -> list[int]:
    """Of processes by the numbers of their titles: ``pp * tp_size + tp``. Data-parallel replicas, each of which
    numbers its ranks from 0, follow one another."""
    tp = max([_integer(flags.get("tp"), 1), *(one.get("TP", 0) + 1 for one in places)])
    pp = max([_integer(flags.get("pp"), 1), *(one.get("PP", 0) + 1 for one in places)])
    own = [one.get("PP", 0) * tp + one.get("TP", 0) for one in places]
    groups = [one.get("DP", 0) for one in places]
    replicas = engine == "vllm" or ("attention" not in flags and _replicas(own, groups))
    return [number + (group * tp * pp if replicas else 0) for number, group in zip(own, groups, strict=True)]


def _replicas(own: Sequence[int], groups: Sequence[int]) -> bool:
    """SGLang: with DP attention the ranks of one world differ, whatever their data-parallel groups; of replicas
    each begins where the others do."""
    first: dict[int, int] = {}
    for number, group in zip(own, groups, strict=True):
        first[group] = min(number, first.get(group, number))
    return len(first) > 1 and len(set(first.values())) == 1


def _places(text: str) -> dict[str, int]:
    return {kind.strip("_"): int(number) for kind, number in _PLACE.findall(text)}


def _integer(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() else default
