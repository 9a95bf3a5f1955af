"""SGLang's process groups by the engine's names, and the collectives that go past torch.distributed.

A GroupCoordinator holds two process groups over the same ranks: one for the device (``tp``) and one for the host
(``tp.cpu``); each counts its own collectives. On a CPU and on an NPU the engine calls torch.distributed, where the
core counts. On CUDA it may hand a tensor to a communicator of its own instead (pynccl, custom all-reduce,
symmetric memory): those are hooked here, as they are built. A call inside a captured graph is seen once, at
capture; its replays are not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .probe import Probe

COORDINATOR = "sglang.srt.distributed.parallel_state:GroupCoordinator."
SHORT = {"attention_tp": "attn_tp"}
"""The engine calls this group ``attn_tp`` everywhere but where it is made."""
COMMUNICATORS: dict[str, dict[str, str]] = {
    "pynccl_comm": {
        "all_reduce": "all_reduce",
        "outplace_all_reduce": "all_reduce",
        "all_gather": "all_gather_into_tensor",
        "reduce_scatter": "reduce_scatter_tensor",
        "all_to_all_single": "all_to_all_single",
        "broadcast": "broadcast",
    },
    "ca_comm": {"custom_all_reduce": "all_reduce"},
    "qr_comm": {"quick_all_reduce": "all_reduce"},
    "pymscclpp_comm": {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor"},
    "torch_symm_mem_comm": {"all_reduce": "all_reduce"},
    "pcie_ipc_comm": {"pcie_ipc_all_reduce": "all_reduce"},
}
"""Attributes of a GroupCoordinator, the methods of what they hold, and what torch.distributed calls the same."""


class GroupHooks:
    """Names each group while it is made: some talk to their peers at once."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._groups: dict[int, Any] = {}
        self._hooked: set[str] = set()

    def install(self) -> None:
        self._probe.patches.wrap(COORDINATOR + "__init__", before=self.naming, after=self.made)

    def naming(self, coordinator: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(type(coordinator).__init__).bind(coordinator, *args, **kwargs).arguments
        name = given.get("group_name") or "anonymous"
        self._probe.recorder.naming(SHORT.get(name, name))

    def made(self, _: Any, coordinator: Any, *__: Any, **___: Any) -> None:
        self._probe.recorder.naming(None)
        if self._probe.config.device == "cpu":
            return
        for attribute, methods in COMMUNICATORS.items():
            communicator = getattr(coordinator, attribute, None)
            if communicator is not None:
                self._groups[id(communicator)] = coordinator.device_group
                self._hook(type(communicator), methods)

    def _hook(self, kind: type, methods: dict[str, str]) -> None:
        for method, operation in methods.items():
            target = f"{kind.__module__}:{kind.__qualname__}.{method}"
            if target not in self._hooked and hasattr(kind, method):
                self._hooked.add(target)
                self._probe.patches.wrap(target, around=self._recording(operation))

    def _recording(self, operation: str) -> Callable[..., Any]:
        recorder = self._probe.recorder

        def around(call: Any, communicator: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            group = self._groups.get(id(communicator))
            if group is None or getattr(communicator, "disabled", False):
                return call(communicator, tensor, *args, **kwargs)
            dtype = str(tensor.dtype).removeprefix("torch.")
            token = recorder.begin(group, operation, tuple(tensor.shape), dtype)
            try:
                result = call(communicator, tensor, *args, **kwargs)
            finally:
                if token is not None:
                    recorder.leave()
            if token is not None:
                recorder.defer(token)
            return result

        return around
