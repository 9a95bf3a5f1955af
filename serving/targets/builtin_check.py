"""What can be wrong with a model or a workload for the built-in engine, told before any rank starts.

Not here: keys and values of a scenario file, which the harness has checked before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.model_config import ModelConfig, ModelError, load_config, preset
from serving.sampling import GrammarError, grammar_text, vocabulary
from serving.weights import load_weights, tensor_shapes
from serving.workload import generate, longest_context, workload

_FLOAT32_BYTES = 4
_GIB = 2**30


def problem(
    model: Mapping[str, Any],
    requests: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    world: int = 1,
    dp: int = 1,
    on_host: bool = True,
) -> str | None:
    """One sentence that names what is wrong and what to do; None when all is well. ``world`` ranks are ``dp``
    attention groups. ``on_host``: the weights will lie in this machine's own memory."""
    try:
        config = _config(model)
    except ModelError as error:
        return f"model: {error}"
    if config.num_attention_heads % (world // dp):
        return (
            f"target.dp={dp}: {world // dp} ranks of an attention group cannot share the model's "
            f"{config.num_attention_heads} heads; choose target.ranks and target.dp so that their quotient "
            "divides that number"
        )
    needed = sum(math.prod(shape) for shape in tensor_shapes(config).values()) * _FLOAT32_BYTES
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if on_host and needed > there:
        return (
            f"model: its weights take {needed / _GIB:.1f} GiB in float32, this machine has "
            f"{there / _GIB:.1f} GiB free; use a smaller model (model.preset = tiny)"
        )
    kind = workload(requests)
    if kind.grammar_share > 0:
        try:
            vocabulary(config.vocab_size)
            grammar_text(kind.grammar)
        except GrammarError as error:
            return f"workload: {error}"
    for seed in seeds:
        arrivals = generate(kind, seed=seed, vocab_size=config.vocab_size)
        longest = longest_context(arrivals)
        if longest > config.max_position_embeddings:
            return (
                f"workload: with seed {seed} a request comes to {longest} tokens, the model has "
                f"max_position_embeddings {config.max_position_embeddings}; shorten prompts or outputs"
            )
    return None


def _config(model: Mapping[str, Any]) -> ModelConfig:
    directory = model.get("directory")
    if not directory:
        return preset(model.get("preset") or "tiny")
    config = load_config(Path(directory))
    load_weights(config, Path(directory))  # checks all headers; reads no tensor
    return config
