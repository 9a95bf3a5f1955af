"""What can be wrong with a scenario for any foreign engine, told before anything starts.

Here: the rules that SGLang and vLLM share, each sentence with the key, its value, what is wrong and what to do. Not
here: what only one of them refuses (``sglang.py``, ``vllm.py``), and keys and values that the harness has checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.target import EngineSpec
from serving.workload import Arrival, longest_context

DEVICES = ("cpu", "cuda", "npu")
PROBE_PLUGIN = "hangrig_probe"
"""Name of the probe's entry points (``serving/probe/hangrig_probe-1.dist-info/entry_points.txt``)."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "tiktoken.model",
)
"""A model's directory has a tokenizer when one of them is in it."""
_FROM_OUTSIDE = ("stop", "kill")
"""Faults that need no probe."""
_SEEN_INSIDE = ("rank", "controller", "engine_core")
"""Roles of the processes whose main loop the probe follows: only there can it make them block."""
_IN_A_STEP = ("skip_collective", "raise", "abort_by_clock")


def words(key: str, value: object, what: str, remedy: str) -> str:
    """One problem, worded as those of scenario files are."""
    return f"{key} = {value}: {what}; {remedy}"


def has_tokenizer(model: Mapping[str, Any], place: str | None = None) -> bool:
    """Whether the engine finds a tokenizer: never for a preset, always for a name that the engine resolves, and for
    a directory (``place``: where it lies on this node) when one of ``TOKENIZER_FILES`` is in it."""
    if not model.get("directory"):
        return False
    folder = Path(place or model["directory"]).expanduser()
    return not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES)


def is_local(model: Mapping[str, Any]) -> bool:
    """Whether the model is files on disk, so that no hub need be asked. A name such as ``owner/model`` is not."""
    directory = model.get("directory")
    return not directory or directory.startswith(("/", ".", "~")) or Path(directory).is_dir()


def shape_problems(spec: EngineSpec, groups: int) -> Iterator[str]:
    """Device, ranks, groups and nodes."""
    target = spec.target
    if spec.device not in DEVICES:
        yield words(
            "device", spec.device, f"{target['name']} runs on {', '.join(DEVICES)} only",
            "use --device cpu, cuda or npu, or set target.device",
        )  # fmt: skip
    if spec.world % groups:
        yield words(
            "target.dp", groups, f"does not divide target.ranks = {spec.world}",
            "use a divisor: every group has the same number of ranks",
        )  # fmt: skip
    if spec.world % target["nodes"]:
        yield words(
            "target.nodes", target["nodes"], f"does not divide target.ranks = {spec.world}",
            "use a divisor: every node gets the same number of ranks",
        )  # fmt: skip


def model_problems(spec: EngineSpec, arrivals: Sequence[Arrival], longest: int) -> Iterator[str]:
    """The model, and what the requests ask of it. ``longest``: most tokens, prompt and output together, that the
    engine gives one request without cutting it short."""
    model, engine = spec.model, spec.engine
    if model.get("preset") == "tiny":
        yield words(
            "model.preset", "tiny", f"{spec.target['name']} has no attention kernels for heads so small",
            "use small or lite, or a model.directory",
        )  # fmt: skip
    needed = longest_context(arrivals) if arrivals else 0
    if needed > longest:
        yield words(
            "workload", f"a request of {needed} tokens",
            f"{spec.target['name']} gives one request {longest} tokens at most with engine.kv_tokens = "
            f"{engine['kv_tokens']} and engine.context_tokens = {engine['context_tokens'] or 'none'}",
            "shorten prompts or outputs, or raise these two",
        )  # fmt: skip
    grammars = {arrival.request.grammar for arrival in arrivals} - {None}
    if grammars and not has_tokenizer(model):
        yield words(
            "workload.grammar_share", "above 0",
            f"{spec.target['name']} holds no output to a grammar without a tokenizer, and this model has none",
            "set it to 0, or model.directory to a model with its tokenizer",
        )  # fmt: skip
    if engine["padding"] != "auto":
        yield words(
            "engine.padding", engine["padding"], f"{spec.target['name']} chooses by itself", "leave it out"
        )  # fmt: skip


def argument_problems(spec: EngineSpec, owned: Mapping[str, str], plugins: str) -> Iterator[str]:
    """``target.args`` and ``target.env``. ``owned``: flags that would contradict what hangrig knows of the server,
    each with the word of the scenario that says it instead. ``plugins``: the variable that names the plugins to
    load."""
    for argument in spec.target["args"]:
        flag = argument.split("=", 1)[0]
        if flag in owned:
            yield words(
                "target.args", argument, "hangrig would watch another server than the one it starts",
                owned[flag],
            )  # fmt: skip
    chosen = spec.target["env"].get(plugins)
    if chosen is not None and has_probe(spec) and PROBE_PLUGIN not in chosen.split(","):
        yield words(
            f"target.env.{plugins}", chosen, f"leaves out {PROBE_PLUGIN} while the toggle probe is on",
            f"add {PROBE_PLUGIN}, or set toggles.probe = off",
        )  # fmt: skip


def fault_problems(spec: EngineSpec, roles: Collection[str], groups: int) -> Iterator[str]:
    """``[[faults]]``: ``roles`` are those that this engine has processes for."""
    for index, fault in enumerate(spec.faults):
        name, role, key = fault["name"], fault["role"], f"faults.{index}"
        if name not in _FROM_OUTSIDE and not has_probe(spec):
            yield words(
                f"{key}.name", name, "is made by the probe, and the toggle probe is off in this arm",
                f"set toggles.probe = on, or use {' or '.join(_FROM_OUTSIDE)}, which come from outside",
            )  # fmt: skip
        if role not in roles:
            yield words(
                f"{key}.role", role, f"{spec.target['name']} has no such process here",
                f"use one of: {', '.join(roles)}",
            )  # fmt: skip
        elif name in _IN_A_STEP and role != "rank":
            yield words(f"{key}.role", role, f"{name} happens in a step of a rank", "use role = rank")
        elif name == "block" and role not in _SEEN_INSIDE:
            yield words(
                f"{key}.role", role, "the probe does not follow its main loop",
                f"use one of: {', '.join(r for r in roles if r in _SEEN_INSIDE)}; or the fault stop",
            )  # fmt: skip
        outside = [rank for rank in fault["ranks"] if rank >= spec.world]
        if outside:
            yield words(
                f"{key}.ranks", list(fault["ranks"]), f"there is no rank {outside[0]}",
                f"use ranks 0 to {spec.world - 1}",
            )  # fmt: skip
        if fault["ranks"] and role != "rank":
            yield words(f"{key}.ranks", list(fault["ranks"]), f"a {role} is no rank", "leave ranks out")
        if fault.get("mode") == "idle" and groups == 1:
            yield words(
                f"{key}.mode", "idle", "no rank is ever idle while others run: target.dp is 1",
                "set target.dp to 2 or more, or use mode = any",
            )  # fmt: skip


def has_probe(spec: EngineSpec) -> bool:
    return spec.toggles.get("probe", "on") == "on"
