"""Rotary positions as DeepSeek-V2 has them: adjacent pairs are rotated, with optional YaRN stretching.

Here: frequencies, the rotation, and what YaRN does to the softmax scale. Numerics follow transformers 5.24
(`modeling_rope_utils.py`, `models/deepseek_v2`).

Shapes: T tokens, H heads, P rotated width, F = P/2 frequencies.
"""

from __future__ import annotations

import math

import torch

from serving.model_config import ModelConfig, YarnScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per token of each pair, float32, shape (F,), on the CPU."""
    width = config.qk_rope_head_dim
    periods_F = config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / periods_F
    # Pairs that turn often within the trained context keep their speed, slow ones are stretched, with a
    # linear ramp between (YaRN, section 3.2).
    first = _pair_with_turns(scaling.beta_fast, scaling, config)
    last = _pair_with_turns(scaling.beta_slow, scaling, config)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a ramp of no width would divide by zero
    stretched_F = ((torch.arange(width // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return stretched_F / (scaling.factor * periods_F) + (1 - stretched_F) / periods_F


def _pair_with_turns(turns: float, scaling: YarnScaling, config: ModelConfig) -> float:
    """The (fractional) index of the pair that makes ``turns`` full turns over the trained context."""
    period = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    index: float = config.qk_rope_head_dim * math.log(period) / (2 * math.log(config.rope_theta))
    return index


def _magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rotation_scale(config: ModelConfig) -> float:
    """What rotated vectors are multiplied by."""
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor)


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied by before the softmax."""
    scale: float = config.qk_head_dim**-0.5
    scaling = config.rope_scaling
    if scaling is not None and scaling.mscale_all_dim:
        scale *= _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def angles(
    positions_T: torch.Tensor, frequencies_F: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every token's rotation, already scaled: two float32 tensors (T, F)."""
    angles_TF = positions_T.unsqueeze(-1).float() * frequencies_F
    return angles_TF.cos() * scale, angles_TF.sin() * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of the last axis; computes in float32, keeps the type of ``x``.

    ``x`` is (..., P); ``cos`` and ``sin`` broadcast to (..., F).
    """
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
