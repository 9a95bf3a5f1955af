"""The tensors of a DeepSeek-V2 by their Hugging Face names: which there are, from a file or from a seed.

Here: names, shapes, reading and checking. Not here: how they are packed for computing (``deepseek_v2.py``).

A checkpoint is checked whole from the headers of its files before a number is read; the numbers are read
tensor by tensor when asked for, so a rank reads only what it keeps and holds two copies of one layer at most.
The router's matrix is float32 whatever the model's type, as in transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from serving.model_config import CONFIG_FILE, ModelConfig, ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_ROUTER = ".mlp.gate.weight"
_DERIVED = ".rotary_emb.inv_freq"  # saved by old releases of transformers; computed from the config instead
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})


def expert_range(config: ModelConfig, rank: int, world: int) -> range:
    """The routed experts of one rank."""
    return even_share(config.n_routed_experts, rank, world)


def even_share(count: int, rank: int, world: int) -> range:
    """One rank's part of ``count`` things: contiguous, sizes differing by one at most, some perhaps empty."""
    return range(rank * count // world, (rank + 1) * count // world)


def head_range(config: ModelConfig, member: int, size: int) -> range:
    """The heads of one of ``size`` ranks that share an attention. Raises ModelError where they cannot be shared."""
    count = config.num_attention_heads
    if count % size:
        raise ModelError(
            f"num_attention_heads {count} cannot be shared by {size} ranks of one attention group; use a divisor"
        )
    return even_share(count, member, size)


def tensor_shapes(config: ModelConfig, experts: range | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, of the routed experts only those in ``experts`` (None: all)."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        query_rows = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            shapes[attention + "q_proj.weight"] = (query_rows, hidden)
        else:
            shapes[attention + "q_a_proj.weight"] = (config.q_lora_rank, hidden)
            shapes[attention + "q_a_layernorm.weight"] = (config.q_lora_rank,)
            shapes[attention + "q_b_proj.weight"] = (query_rows, config.q_lora_rank)
        shapes[attention + "kv_a_proj_with_mqa.weight"] = (config.latent_dim, hidden)
        shapes[attention + "kv_a_layernorm.weight"] = (rank,)
        shapes[attention + "kv_b_proj.weight"] = (heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
        shapes[attention + "o_proj.weight"] = (hidden, heads * config.v_head_dim)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if not config.is_moe(layer):
            shapes |= _mlp_shapes(prefix + "mlp.", hidden, config.intermediate_size)
            continue
        shapes[prefix + "mlp.gate.weight"] = (config.n_routed_experts, hidden)
        shared = config.moe_intermediate_size * config.n_shared_experts
        shapes |= _mlp_shapes(prefix + "mlp.shared_experts.", hidden, shared)
        for expert in range(config.n_routed_experts) if experts is None else experts:
            shapes |= _mlp_shapes(f"{prefix}mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def _stored_type(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(_ROUTER) else dtype


class SeededWeights(Mapping[str, torch.Tensor]):
    """Weights from a seed, each made on ``device`` when it is asked for; ``experts`` leaves some routed ones out
    and changes none (None: all). The numbers are those of the device's own generator: another kind of device
    makes others from the same seed.

    Scaled so that a model of them behaves like one that has learned something (see ``_spread``): attention is
    sharp, each token depends on its whole context, and the best two logits lie apart by far more than float32
    rounding.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype = torch.float32,
        *,
        experts: range | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = tensor_shapes(config, experts)
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(shape, generator=generator, device=self._device) * _spread(name, shape)
        if len(shape) == 1:
            values += 1.0  # norms
        return values.to(_stored_type(name, self._dtype))

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def stored_dtype(directory: Path) -> torch.dtype:
    """The type that ``config.json`` names for the weights: ``dtype`` (transformers 5) or ``torch_dtype`` (4);
    bfloat16 where it names none. Raises ModelError for one that the engine does not compute in."""
    fields = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    name = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise ModelError(
            f"{directory / CONFIG_FILE}: key 'dtype' is {json.dumps(name)}; allowed: {', '.join(sorted(_DTYPES))}"
        )
    return _DTYPES[name]


def random_weights(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    experts: range | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """All of ``SeededWeights`` at once."""
    return dict(SeededWeights(config, seed, dtype, experts=experts, device=device))


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a random tensor.

    One over the square root of the fan-in keeps sizes equal through a matrix. On top of it queries are
    enlarged, since scores near zero make attention the mean of its context, which hardly depends on any one
    token; and what is added to the residual stream is enlarged, since the last token's own
    embedding would otherwise decide everything.
    """
    if len(shape) == 1:
        return 0.1
    if name.endswith("embed_tokens.weight"):
        return 1.0
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    return gain / math.sqrt(shape[-1])


_GAINS = {"q_proj": 2.0, "q_b_proj": 2.0, "kv_a_proj": 1.0, "o_proj": 2.0, "down_proj": 2.0, "mlp.gate.": 2.0}


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a directory, each read when it is asked for, onto ``device``. Made by ``load_weights``. A file
    stays open (mapped) as long as this lives: its header lists thousands of tensors."""

    def __init__(self, files: Mapping[str, Path], dtype: torch.dtype, device: torch.device | str) -> None:
        self._files = dict(files)
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, safe_open] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path, self._device)
        file: Any = self._open[path]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor.to(device=self._device, dtype=_stored_type(name, self._dtype))

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_weights(
    config: ModelConfig,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    experts: range | None = None,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """The tensors in ``model.safetensors``, or in the shards that ``model.safetensors.index.json`` lists.

    All of them are checked against ``config``; of the routed experts only ``experts`` are offered (None:
    all). Raises ModelError naming file and tensor.
    """
    listing, files = _find_files(directory)
    expected = tensor_shapes(config)
    missing = [name for name in expected if name not in files]
    if missing:
        raise ModelError(
            f"{listing}: has no tensor '{missing[0]}'{_and_more(missing)}; expected shape "
            f"{list(expected[missing[0]])} from config.json; download or save the model again"
        )
    tied_copy = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = [name for name in files if name not in expected | dict.fromkeys(tied_copy, ())]
    extra = [name for name in extra if not name.endswith(_DERIVED)]
    if extra:
        raise ModelError(
            f"{files[extra[0]]}: tensor '{extra[0]}'{_and_more(extra)} has no place in the model that "
            "config.json describes; take config.json and weights from one model"
        )
    by_file: dict[Path, list[str]] = {}
    for name in expected:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        _check_headers(path, {name: expected[name] for name in names})
    return Checkpoint({name: files[name] for name in tensor_shapes(config, experts)}, dtype, device)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _opened(path: Path, device: torch.device | str = "cpu") -> safe_open:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); download it again") from error


def _find_files(directory: Path) -> tuple[Path, dict[str, Path]]:
    """The file that lists the tensors, and the file that holds each of them."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        with _opened(single) as file:
            return single, dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise ModelError(
            f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}; download the model in safetensors "
            "form (pickled weights are not read), or use random weights"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): directory / Path(str(shard)).name for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index}: not an index of shards ({type(error).__name__}: {error}); expected an object with "
            "'weight_map', tensor name to file name; download it again"
        ) from error
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise ModelError(f"{path}: is missing, though {INDEX_FILE} lists it; download this shard")
    return index, files


def _check_headers(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    with _opened(path) as file:
        present = set(file.keys())
        for name, shape in expected.items():
            if name not in present:
                raise ModelError(f"{path}: has no tensor '{name}', though {INDEX_FILE} says so; get it again")
            entry = file.get_slice(name)
            if tuple(entry.get_shape()) != shape:
                raise ModelError(
                    f"{path}: tensor '{name}' has shape {list(entry.get_shape())}; expected {list(shape)} "
                    "from config.json; take both from one model"
                )
            if entry.get_dtype() not in _FLOAT_TYPES:
                raise ModelError(
                    f"{path}: tensor '{name}' is {entry.get_dtype()}; expected one of "
                    f"{', '.join(sorted(_FLOAT_TYPES))}: quantized ones are not read, take the original"
                )
