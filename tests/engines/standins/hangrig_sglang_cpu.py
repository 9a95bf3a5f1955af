"""SGLang plugin: what its torch-native attention lacks to serve DeepSeek-V2 on a CPU (SGLang 0.5.23).

Two gaps. The backend has no ``get_cpu_graph_seq_len_fill_value``, which padding a batch asks every CPU backend
for. And no attention method is registered under its name, so the dispatch falls to Triton's, whose prefill
takes a path that this backend does not have. Both go when SGLang closes them.

Imported inside the engine's environment: standard library and sglang only.
"""

from __future__ import annotations

from typing import Any

BACKEND = "torch_native"


def close_gaps() -> None:
    """Called by SGLang in each of its processes (entry point in group ``sglang.srt.plugins``)."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = _one
    handler.AttentionBackendRegistry.register(BACKEND, handler._dispatch_mla_subtype)


def _one(_: Any) -> int:
    """The length given to a padded row: what the other CPU backend (intel_amx) answers."""
    return 1
