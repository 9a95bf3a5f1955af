"""What a process was published with."""

from __future__ import annotations

import os
from types import SimpleNamespace

VERSION = os.environ.get("FAKE_SGLANG", "0.5.23")
_parallel = SimpleNamespace(tp_size=2, pp_size=1)


def get_parallel() -> SimpleNamespace:
    return _parallel


def get_device() -> SimpleNamespace:
    return SimpleNamespace(gpu_id=0)


def publish(tp_rank: int, dp_rank: int | None, attention: bool) -> None:
    """0.5.20 knows the ranks only as arguments; later versions publish them."""
    if VERSION == "0.5.20":
        _parallel.enable_dp_attention = attention
    else:
        _parallel.attn_dp_enabled = attention
        _parallel.tp_rank, _parallel.pp_rank, _parallel.dp_rank = tp_rank, 0, dp_rank
