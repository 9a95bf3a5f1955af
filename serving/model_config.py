"""The shape of a DeepSeek-V2 model: its fields, three presets, and reading them from a `config.json`.

Here: what the numbers of a model are and whether they make sense together. Not here: tensors (``weights.py``)
and arithmetic (``deepseek_v2.py``, ``attention.py``, ``rope.py``).

Field names are those of the Hugging Face `config.json`. Features that no published DeepSeek-V2 uses, and on
which its implementations disagree, are refused instead of guessed: see ``_FIXED``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ARCHITECTURE = "DeepseekV2ForCausalLM"
MODEL_TYPE = "deepseek_v2"
TOPK_METHODS = ("greedy", "group_limited_greedy")
CONFIG_FILE = "config.json"


class ModelError(ValueError):
    """A model cannot be used: what is wrong, where (file, key or tensor), what was expected, what to do."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): how rotary frequencies are stretched beyond the trained context.

    ``mscale`` and ``mscale_all_dim`` are DeepSeek's: their ratio scales the rotated parts, and the second
    one, squared, the softmax. ``attention_factor`` overrides that ratio.
    """

    factor: float
    original_max_position_embeddings: int  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One DeepSeek-V2. Raises ModelError when the fields contradict each other."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    moe_intermediate_size: int  # of one routed expert
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    q_lora_rank: int | None  # None: queries come from the hidden state by one matrix
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int  # layers before this one have a dense MLP
    max_position_embeddings: int  # tokens
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.0
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def latent_dim(self) -> int:
        """Width of one cached token, and of an absorbed query: compressed key-value and rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head when nothing is absorbed."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` has routed experts instead of a dense MLP."""
        return layer >= self.first_k_dense_replace

    def to_json(self) -> dict[str, Any]:
        """The `config.json` of this model, as ``load_config`` and transformers read it."""
        fields = dataclasses.asdict(self)
        scaling = fields["rope_scaling"]
        if scaling is not None:
            kept = {key: value for key, value in scaling.items() if value is not None}
            fields["rope_scaling"] = {"type": "yarn", **kept}
        eos = list(self.eos_token_id)
        fields["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else eos
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "hidden_act": "silu",
            "num_key_value_heads": self.num_attention_heads,
            **fields,
        }


def _check(config: ModelConfig) -> None:
    """Raises ModelError for values that are out of range or do not fit each other."""
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "n_shared_experts", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings",
    ):  # fmt: skip
        if getattr(config, name) < 1:
            raise ModelError(f"key '{name}' is {getattr(config, name)}; expected at least 1")
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        raise ModelError(f"key 'q_lora_rank' is {config.q_lora_rank}; expected null or at least 1")
    if config.qk_rope_head_dim % 2:
        raise ModelError(
            f"key 'qk_rope_head_dim' is {config.qk_rope_head_dim}; rotation needs an even number"
        )
    if not 0 <= config.first_k_dense_replace <= config.num_hidden_layers:
        raise ModelError(
            f"key 'first_k_dense_replace' is {config.first_k_dense_replace}; expected 0 to "
            f"num_hidden_layers ({config.num_hidden_layers})"
        )
    if config.topk_method not in TOPK_METHODS:
        raise ModelError(
            f"key 'topk_method' is '{config.topk_method}'; expected one of {', '.join(TOPK_METHODS)} "
            "(others belong to later DeepSeek models)"
        )
    for name, wanted in _FIXED.items():
        if hasattr(config, name) and getattr(config, name) != wanted:
            raise ModelError(_unsupported(name, getattr(config, name)))
    candidates = config.n_routed_experts
    if config.topk_method == "group_limited_greedy":
        groups, kept = config.n_group, config.topk_group
        if groups is None or kept is None or groups < 1 or config.n_routed_experts % groups:
            raise ModelError(
                f"keys 'n_group' ({groups}) and 'topk_group' ({kept}): group_limited_greedy needs both, and "
                f"n_group must divide n_routed_experts ({config.n_routed_experts})"
            )
        if not 1 <= kept <= groups:
            raise ModelError(f"key 'topk_group' is {kept}; expected 1 to n_group ({groups})")
        candidates = kept * (config.n_routed_experts // groups)
    if config.num_experts_per_tok > candidates:
        raise ModelError(
            f"key 'num_experts_per_tok' is {config.num_experts_per_tok}; the routing leaves only "
            f"{candidates} experts to choose from"
        )
    if config.rope_theta <= 1:
        raise ModelError(f"key 'rope_theta' is {config.rope_theta}; expected more than 1")
    scaling = config.rope_scaling
    if scaling is not None and (scaling.factor < 1 or scaling.original_max_position_embeddings < 1):
        raise ModelError(
            f"key 'rope_scaling': factor {scaling.factor} and original_max_position_embeddings "
            f"{scaling.original_max_position_embeddings}; expected at least 1 each"
        )


# What every published DeepSeek-V2 has. transformers ignores norm_topk_prob, moe_layer_freq and scoring_func
# (5.24, modeling_deepseek_v2.py) and DeepSeek's own code obeys them: other values have no agreed meaning.
_FIXED: Mapping[str, object] = MappingProxyType(
    {
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": None,
    }
)


def _unsupported(key: str, value: object) -> str:
    return (
        f"key '{key}' is {json.dumps(value)}; only {json.dumps(_FIXED[key])} is supported, as in every "
        "published DeepSeek-V2; use such a model, or serve this one with another target"
    )


TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    first_k_dense_replace=1,
    max_position_embeddings=8192,
    bos_token_id=1,
    eos_token_id=(2,),
)
"""For tests and the simulation: the whole structure of DeepSeek-V2 in 0.2 million parameters."""

SMALL = ModelConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    max_position_embeddings=4096,
    n_group=1,
    topk_group=1,
    rope_scaling=YarnScaling(
        factor=2.0,
        original_max_position_embeddings=2048,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=0.707,
        mscale_all_dim=0.707,
    ),
    bos_token_id=1,
    eos_token_id=(2,),
)
"""DeepSeek-V2's own head sizes, which the kernels of sglang and vllm want, and little of anything else."""

LITE = ModelConfig(
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    n_shared_experts=2,
    n_routed_experts=64,
    num_experts_per_tok=6,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    max_position_embeddings=163840,
    n_group=1,
    topk_group=1,
    rope_scaling=YarnScaling(
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=0.707,
        mscale_all_dim=0.707,
    ),
    bos_token_id=100000,
    eos_token_id=(100001,),
)
"""DeepSeek-V2-Lite, from the published config.json: 15.7 billion parameters."""

PRESETS: Mapping[str, ModelConfig] = MappingProxyType({"tiny": TINY, "small": SMALL, "lite": LITE})


def preset(name: str) -> ModelConfig:
    """The preset of that name. Raises ModelError naming the known ones."""
    if name not in PRESETS:
        raise ModelError(f"model preset '{name}' is unknown; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def load_config(directory: Path) -> ModelConfig:
    """Reads ``directory/config.json``, in the layout of transformers 4 (rope_scaling) or 5 (rope_parameters).

    Keys that say nothing about the arithmetic are ignored. Raises ModelError.
    """
    path = directory / CONFIG_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{directory}: has no {CONFIG_FILE}; give the directory of a saved DeepSeek-V2 model, or a "
            f"preset ({', '.join(sorted(PRESETS))})"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); copy the model again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: holds a JSON {type(fields).__name__}; expected an object")
    try:
        return _from_json(fields)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


_INTEGERS = frozenset(f.name for f in dataclasses.fields(ModelConfig) if f.type in {"int", "int | None"})
_FLOATS = frozenset({"rms_norm_eps", "routed_scaling_factor"})
_REQUIRED = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING)


def _from_json(fields: Mapping[str, Any]) -> ModelConfig:
    found, architectures = fields.get("model_type"), fields.get("architectures")
    if found != MODEL_TYPE or architectures not in (None, [ARCHITECTURE]):
        raise ModelError(
            f"keys 'model_type' and 'architectures' are {json.dumps(found)} and {json.dumps(architectures)}; "
            f'expected "{MODEL_TYPE}" and ["{ARCHITECTURE}"]: this engine runs no other model'
        )
    for key in _REQUIRED:
        if key not in fields:
            raise ModelError(f"key '{key}' is missing; take the config.json that belongs to the weights")
    for key in _FIXED:
        if fields.get(key) not in (None, _FIXED[key]):
            raise ModelError(_unsupported(key, fields[key]))
    heads = fields["num_attention_heads"]
    if fields.get("num_key_value_heads") not in (None, heads):
        raise ModelError(
            f"key 'num_key_value_heads' is {fields['num_key_value_heads']}; latent attention has one per "
            f"head (num_attention_heads is {heads})"
        )
    values: dict[str, Any] = {key: _number(fields, key, int) for key in _INTEGERS if key in fields}
    values |= {key: _number(fields, key, float) for key in _FLOATS if key in fields}
    if fields.get("topk_method") is not None:
        values["topk_method"] = fields["topk_method"]
    values["tie_word_embeddings"] = bool(fields.get("tie_word_embeddings", False))
    eos = fields.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    values["eos_token_id"] = tuple(_number({"eos_token_id": end}, "eos_token_id", int) for end in ends)
    values["rope_theta"], values["rope_scaling"] = _rope(fields)
    return ModelConfig(**values)


_NULLABLE = frozenset({"q_lora_rank", "n_group", "topk_group", "bos_token_id"})


def _number(fields: Mapping[str, Any], key: str, kind: type[int] | type[float]) -> float | None:
    value: Any = fields[key]
    if value is None and key in _NULLABLE:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is int and whole:
        return int(value)
    if kind is float and (whole or isinstance(value, float)):
        return float(value)
    noun = "a whole number" if kind is int else "a number"
    raise ModelError(f"key '{key}' is {json.dumps(value)}; expected {noun}")


_ROPE_TYPES = ("default", "yarn")
_ROPE_KEYS = frozenset(f.name for f in dataclasses.fields(YarnScaling))


def _rope(fields: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """Rotary base and scaling. transformers 5 keeps both in 'rope_parameters', 4 in two places."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    found = fields.get(key) or {}
    if not isinstance(found, dict):
        raise ModelError(f"key '{key}' is {json.dumps(found)}; expected an object or null")
    parameters = dict(found)
    old_name = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", old_name)
    if kind not in _ROPE_TYPES:
        raise ModelError(
            f"key '{key}' has type {json.dumps(kind)}; supported: {', '.join(_ROPE_TYPES)}; use a model with "
            "one of these"
        )
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = fields.get("rope_theta", 10000.0)
    theta = float(_number(parameters, "rope_theta", float) or 0.0)
    del parameters["rope_theta"]
    if kind == "default":
        return theta, None
    unknown = sorted(set(parameters) - _ROPE_KEYS)
    if unknown:
        raise ModelError(f"key '{key}' has '{unknown[0]}'; known: {', '.join(sorted(_ROPE_KEYS))}")
    if "factor" not in parameters:
        raise ModelError(f"key '{key}' has no 'factor'; YaRN needs the factor of the longer context")
    parameters.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    original = _number(parameters, "original_max_position_embeddings", int)
    truncate = bool(parameters.pop("truncate", True))
    numbers = {
        name: _number(parameters, name, float)
        for name in _ROPE_KEYS - {"truncate", "original_max_position_embeddings"}
        if parameters.get(name) is not None
    }
    return theta, YarnScaling(original_max_position_embeddings=original, truncate=truncate, **numbers)  # type: ignore[arg-type]
