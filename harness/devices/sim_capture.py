"""Capture for the simulated device: what an operation does once, as calls that do it again.

While a capture is open, operations run once, on the host thread, under a dispatch mode that sees every aten
call. A call that makes new tensors is kept with those tensors and fills them again on replay; one that
writes in place is kept as it is; a view is not kept, because it shares memory. Weights and other inputs are
referenced, not copied. As on a GPU, an operation that needs a value on the host, whose shape depends on
data, or that draws random numbers ends the capture. What the one run wrote into memory from before the
capture is put back at its end, so that a capture changes nothing, as there. Operations marked opaque and
operations with a host argument are kept whole and are not run while capturing.

Not here: what a replay does (``sim_graph.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from functools import lru_cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.devices.base import DeviceError, HostArgs, HostOp, Op
from harness.devices.sim_graph import HostNode, SimGraph
from harness.devices.sim_streams import Flag

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
_RESIZING = frozenset({"resize_", "resize_as_", "set_", "resize"})
TO_HOST = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""Ways to the host that no aten call shows."""


class Recorder:
    """Fills a graph during one capture. After a refusal the capture cannot be completed any more."""

    def __init__(self, graph: SimGraph) -> None:
        self.graph = graph
        self.refusal: DeviceError | None = None
        self._label = ""
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def take(self, op: Op, label: str, opaque: bool) -> None:
        """The stream's ``run`` while capturing."""
        if opaque:
            self.graph.add(op, label)
            return
        self._label = label
        with ExitStack() as modes:
            modes.enter_context(torch.no_grad())
            modes.enter_context(_FunctionMode(self))
            modes.enter_context(_dispatch_mode()(self))
            op()

    def host_op(self, op: HostOp, args: HostArgs, flag: Flag, label: str) -> None:
        node = HostNode(op, args, flag)
        self.graph.nodes.append(node)
        self.graph.add(node, label)

    def put_back(self) -> None:
        """At the end: the memory that captured operations wrote into holds again what it held before."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def refuse(self, what: str, why: str) -> DeviceError:
        self.refusal = DeviceError(f"capture of {self.graph.name!r}: {what} in {self._label!r} {why}")
        return self.refusal

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one aten call and keeps it if a replay has to do it again."""
        self._admit(func, args, kwargs)
        self._keep_what_is_written(func, args, kwargs)
        result = func(*args, **kwargs)
        inputs = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        outputs = list(_tensors(result))
        fresh = [tensor for tensor in outputs if _memory(tensor) not in inputs]
        name = _name(func)
        self.graph.made += fresh
        self._made.update(map(_memory, fresh))
        if name in _UNINITIALISED:
            for tensor in fresh:
                tensor.zero_()  # garbage could be an index; zeros make a capture the same each time
        elif func._schema.is_mutable:
            self.graph.add(_again(func, args, kwargs, outputs, set(map(id, fresh))), self._label)
        elif fresh:
            if len(fresh) != len(outputs):
                raise self.refuse(str(func), "returns new tensors beside views, which a replay cannot fill")
            self.graph.add(_into_outputs(func, args, kwargs, result, outputs), self._label)
        return result

    def _keep_what_is_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in _tensors(value):
                    memory = _memory(tensor)
                    if memory not in self._made and memory not in self._before:
                        storage = tensor.untyped_storage()
                        self._before[memory] = (storage, copy(storage))

    def _admit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = obstacle(func, args, kwargs)
        if found is not None:
            raise self.refuse(*found)


def obstacle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """What of one aten call no accelerator can capture, and why; None: it can be captured. All but the memory
    changed and the random numbers would also make the host wait."""
    name, tags = _name(func), func.tags
    if name in _RESIZING:
        return str(func), "changes a tensor's memory"
    if torch.Tag.data_dependent_output in tags:
        return str(func), "needs a value on the host, which would synchronise"
    if name == "lift_fresh" and args[0].dim() > 0:
        return "a tensor made from Python values", "is a blocking copy from the host; make it before"
    if torch.Tag.nondeterministic_seeded in tags and kwargs.get("dropout_p", _dropout(func, args)) != 0.0:
        return str(func), "draws random numbers, which a replay would draw again from other state"
    if torch.Tag.dynamic_output_shape in tags and name != "index" and kwargs.get("output_size") is None:
        return str(func), "has a shape that depends on data"
    if _has_mask(name, args):
        return f"{func} with a mask", "has a shape that depends on data"
    return None


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], fresh: set[int]
) -> Callable[[], object]:
    """A call that writes into its arguments; new tensors that it also returns are filled again."""
    if not fresh:
        return partial(func, *args, **kwargs)

    def call() -> None:
        for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
            if id(old) in fresh:
                old.copy_(new)

    return call


def _into_outputs(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, outputs: list[torch.Tensor]
) -> Callable[[], object]:
    """A call that made ``outputs``, as one that fills them: by its ``out`` twin if that gives the same."""
    twin = _out_twin(func, args, kwargs, result, outputs)
    if twin is not None:
        return twin
    if len(outputs) == 1:
        only = outputs[0]

        def fill_one() -> None:
            only.copy_(func(*args, **kwargs))

        return fill_one

    def fill_all() -> None:
        for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    return fill_all


def _out_twin(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, outputs: list[torch.Tensor]
) -> Callable[[], object] | None:
    returned = (result,) if isinstance(result, torch.Tensor) else result
    if len(returned) != len(outputs):
        return None  # it returns lists or numbers too
    names = [argument.name for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        twin = getattr(func.overloadpacket, overload)
        outs = [argument.name for argument in twin._schema.arguments if argument.is_out]
        plain = [argument.name for argument in twin._schema.arguments if not argument.is_out]
        dropped = set(names) - set(plain)
        if (
            len(outs) != len(outputs)
            or not dropped <= _FACTORY_OPTIONS
            or plain != [name for name in names if name not in dropped]
        ):
            continue
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        candidate = partial(twin, *args, **kept, **dict(zip(outs, outputs, strict=True)))
        # A twin is trusted only after it gave the same on other contents of the same memory.
        expected = [tensor.clone() for tensor in outputs]
        for tensor in outputs:
            tensor.zero_()
        try:
            candidate()
            same = all(map(_same, outputs, expected))
        except (RuntimeError, TypeError, NotImplementedError):
            same = False
        for tensor, value in zip(outputs, expected, strict=True):
            tensor.copy_(value)
        if same:
            return candidate
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask: then a shape depends on its contents. Filling with one value needs none."""
    if name == "index" or (name in ("index_put_", "_index_put_impl_") and args[2].dim() > 0):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return False


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _dropout(func: Any, args: tuple[Any, ...]) -> float | None:
    """The value of ``dropout_p`` in a call: fused attention draws nothing at 0. None: no such argument."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else argument.default_value
            return None if value is None else float(value)
    return None


class _FunctionMode(TorchFunctionMode):
    """Sees the ways to the host that no aten call shows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in TO_HOST:
            raise self._recorder.refuse(
                f"Tensor.{func.__name__}", "needs values on the host, which would synchronise"
            )
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=1)
def _dispatch_mode() -> Callable[[Recorder], Any]:
    """The mode's base class has no public name before torch has one for it: looked up at the call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, recorder: Recorder) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._recorder = recorder

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Else torch imports its compiler at a process's first capture, which takes over a second.
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return self._recorder.call(func, args, kwargs or {})

    return DispatchMode
