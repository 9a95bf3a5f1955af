"""For which devices a piece of code can be meant: by path, imports and the names it uses. Pure.

A guess that errs towards silence: code that names CUDA itself, or lives among CUDA kernels, never meets a
platform that answers otherwise.
"""

from __future__ import annotations

import ast
import re

from harness.audit.module import Module

_CUDA_PATH = re.compile(
    r"cuda|nvidia|flash_?infer|flash_?attn|flash_?attention|flash_?mla|cutlass|cute_?dsl|deep_?gemm|deep_?ep|nvlink|"
    r"nvshmem|nccl|trt_?llm|tensorrt|cublas|cudnn|nvfp4|rocm|aiter|marlin|[/_]hip([/_.]|$)|[/_]sm\d\d|(^|/)(fa3|fa4)",
    re.IGNORECASE,
)
_NPU_PATH = re.compile(r"npu|ascend|cann|hccl|910|310p", re.IGNORECASE)
_OTHER_PATH = re.compile(r"[/_](xpu|hpu|tpu|mps|mlx|cpu|musa|gaudi)([/_.]|$)", re.IGNORECASE)
_CUDA_PACKAGES = frozenset(
    {
        "aiter", "cuda", "cupy", "cutlass", "deep_ep", "deep_gemm", "flash_attn", "flash_mla", "flashinfer",
        "nvidia", "pynvml", "tensorrt", "tensorrt_llm",
    }
)  # fmt: skip
_CUDA_WORDS = re.compile(r"\.cuda\(|torch\.cuda\.|['\"]cuda(:\d+)?['\"]|torch\.version\.(cuda|hip)")
_NPU_WORDS = re.compile(r"torch_npu|torch\.npu|['\"]npu(:\d+)?['\"]|is_npu|_npu\b")


def names_npu(module: Module) -> bool:
    """Made for Ascend, or at least thinking of it."""
    return bool(_NPU_PATH.search(module.path) or _NPU_WORDS.search(module.text))


def only_cuda(module: Module) -> bool:
    """By its path or by what it imports whatever the device."""
    if _NPU_PATH.search(module.path):
        return False
    if _CUDA_PATH.search(module.path):
        return True
    imported: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").partition(".")[0])
    return bool(imported & _CUDA_PACKAGES)


def other_device(module: Module) -> bool:
    """For a device that is neither CUDA nor Ascend, by its path."""
    return bool(_OTHER_PATH.search(module.path)) and not _NPU_PATH.search(module.path)


def calls_cuda_by_name(node: ast.AST) -> bool:
    """A function (or any piece) that names the CUDA device, so can run nowhere else."""
    return bool(_CUDA_WORDS.search(ast.unparse(node)))
