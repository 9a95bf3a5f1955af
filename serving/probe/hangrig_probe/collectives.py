"""Records torch.distributed's functions: who enters which collective of which group, and who has left it.

Each call is one record, however many others it makes inside. ``async_op=True``: done when its work is done. On
device tensors a call returns before the work is done: it is done when the next heartbeat event has passed
(``streams.py``). ``send`` and ``recv`` count in a group of the two, one for each direction. Under torch.compile
nothing is recorded, as nothing is called. Here also the fault that leaves a collective out. Not here:
collectives that an engine carries out past torch.distributed (the hooks), nor ``isend`` and ``irecv``, which
torch compares by identity.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .faults import Faults
from .patching import rebind_copies
from .recorder import Place, Recorder, Token
from .status import Status

OPERATIONS: dict[str, str | None] = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_single": "input_tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
    "all_to_all": None,
    "all_to_all_single": "input",
    "gather": "tensor",
    "scatter": "tensor",
    "barrier": None,
    "monitored_barrier": None,
    "all_gather_object": None,
    "gather_object": None,
    "broadcast_object_list": None,
    "scatter_object_list": None,
    "send": "tensor",
    "recv": "tensor",
}
"""What is recorded, and the parameter whose shape and type are the same on all ranks of a sound program."""
SAME = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""New names of old functions: one operation, one word."""
PAIRS = ("send", "recv")
NEWER = frozenset(SAME)
"""Not in every torch that engines use."""


class Done:
    """The work of a collective that was left out: over at once."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def result(self) -> list[Any]:
        return []


@dataclass(frozen=True)
class Kind:
    """How one function's calls are read: each part is asked with its arguments."""

    name: str
    operation: str
    place: Callable[[Sequence[Any], Mapping[str, Any]], Place | None]
    describe: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[int], str, bool]]
    """Shape and type, the same on all ranks of a sound program, and whether a device carries it out."""
    skipped: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    """The result of a call that a fault leaves out."""


def install(recorder: Recorder, faults: Faults, status: Status, prefixes: Sequence[str]) -> None:
    """Wraps the functions in ``torch.distributed``, and copies of them in modules whose names begin with one of
    ``prefixes``."""
    import torch.distributed as dist

    missing = []
    for name, tensor in OPERATIONS.items():
        original = getattr(dist, name, None)
        if original is None:
            missing += [] if name in NEWER else [name]
            continue
        wrapper = recorded(original, _kind(original, name, tensor, recorder), recorder, faults, status)
        setattr(dist, name, wrapper)
        for prefix in prefixes:
            rebind_copies(original, wrapper, prefix)
    status.hook("torch.distributed", "missing: " + ", ".join(missing) if missing else "on")
    for name in ("new_group", "split_group"):
        original = getattr(dist, name, None)
        if original is not None:
            setattr(dist, name, _naming(original, recorder, status))


def recorded(
    original: Callable[..., Any], kind: Kind, recorder: Recorder, faults: Faults, status: Status
) -> Callable[..., Any]:
    """``original``, each call of which is one collective. For what an engine carries out past torch.distributed
    too. What ``original`` raises passes; the collective is then entered and not done."""
    thread = recorder.thread
    compiling = _compiling()
    place_of, describe, operation = kind.place, kind.describe, kind.operation
    off = False

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal off
        if compiling() or off or recorder.ledger is None or thread.inside:
            return original(*args, **kwargs)
        token: Token | None = None
        deferred = False
        try:
            place = place_of(args, kwargs)
            if place is not None:
                if faults.skipping and faults.skips(place.name, operation):
                    return kind.skipped(args, kwargs)
                shape, dtype, deferred = describe(args, kwargs)
                token = recorder.enter(place, operation, shape, dtype)
        except Exception as error:
            off = _fail(status, recorder, kind.name, error)
        if token is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        finally:
            thread.inside = False
        try:
            if deferred:
                recorder.defer(token)
            elif hasattr(result, "get_future"):
                _complete_later(recorder, token, result)
            else:
                recorder.complete(token)
        except Exception as error:
            off = _fail(status, recorder, kind.name, error)
        return result

    return wrapper


def _naming(original: Callable[..., Any], recorder: Recorder, status: Status) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        try:
            import torch.distributed as dist

            if made is not None and made is not dist.GroupMember.NON_GROUP_MEMBER:
                recorder.made_group(made)
        except Exception as error:
            status.failed("a new process group keeps torch's name", error)
        return made

    return wrapper


def _fail(status: Status, recorder: Recorder, name: str, error: Exception) -> bool:
    recorder.leave()
    status.failed(f"{name} is no longer recorded", error)
    status.hook(name, f"off: {error}")
    return True


def _complete_later(recorder: Recorder, token: Token, work: Any) -> None:
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError):
        # A backend whose work has no future: nobody says when it is done, so it is when it was begun.
        recorder.complete(token)
        return
    future.add_done_callback(lambda _: recorder.complete(token))


class Describe:
    """A ``Kind``'s description, by the tensor that stands at one place; none where ``at`` is negative."""

    def __init__(self, at: int, parameters: Sequence[str] = ()) -> None:
        self._at = at
        self._name = parameters[at] if at >= 0 and parameters else ""
        # Each rank may split what it sends as it likes.
        self._unequal = [(at, one) for at, one in enumerate(parameters) if one.endswith("_split_sizes")]
        self._list = parameters[0] if "tensor_list" in parameters else ""
        self._dtypes: dict[Any, str] = {}

    def tensor(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._at < 0:
            return None
        return args[self._at] if len(args) > self._at else kwargs.get(self._name)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[int], str, bool]:
        tensor = self.tensor(args, kwargs)
        if tensor is None:
            return (), "", False
        dtype = self._dtypes.get(tensor.dtype)
        if dtype is None:
            dtype = self._dtypes[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
        shape = tensor.shape
        for at, name in self._unequal:
            if (args[at] if len(args) > at else kwargs.get(name)) is not None:
                shape = ()
        if self._list:
            parts = args[0] if args else kwargs.get(self._list)
            if parts is not None and any(part.shape != shape for part in parts):
                shape = (sum(part.numel() for part in parts),)
        return shape, dtype, not tensor.is_cpu


def _kind(original: Callable[..., Any], name: str, tensor_name: str | None, recorder: Recorder) -> Kind:
    """Of a function of torch.distributed."""
    parameters = list(inspect.signature(original).parameters)
    group_at = parameters.index("group")
    async_at = parameters.index("async_op") if "async_op" in parameters else None

    pair = _pair(name) if name in PAIRS else None

    def place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Place | None:
        key = args[group_at] if len(args) > group_at else kwargs.get("group")
        return recorder.place(key) if pair is None else pair(recorder, key, args, kwargs)

    def skipped(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if async_at is not None and (
            args[async_at] if len(args) > async_at else kwargs.get("async_op", False)
        ):
            return Done()
        return -1 if name == "recv" else None

    return Kind(
        name=f"torch.distributed.{name}",
        operation="send" if name in PAIRS else SAME.get(name, name),
        place=place,
        describe=Describe(parameters.index(tensor_name) if tensor_name in parameters else -1, parameters),
        skipped=skipped,
    )


def _pair(name: str) -> Callable[..., Place | None]:
    """Finds the two of a ``send`` or ``recv``."""

    def where(recorder: Recorder, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Place | None:
        import torch.distributed as dist

        place = recorder.place(key)
        if place is None:
            return None
        word = "dst" if name == "send" else "src"
        peer: Any = args[1] if len(args) > 1 else kwargs.get(word)
        within: Any = kwargs.get(f"group_{word}", args[4] if len(args) > 4 else None)
        if within is None and peer is None:
            return None  # From whoever comes first.
        group: Any = dist.group.WORLD if key is None else key
        members = dist.get_process_group_ranks(group)
        # The place knows the ranks as hangrig counts them, in the order of the group.
        theirs = place.ranks[within if within is not None else members.index(peer)]
        mine = place.ranks[dist.get_rank(group)]
        return recorder.pair(key, *((mine, theirs) if name == "send" else (theirs, mine)))

    return where


def _compiling() -> Callable[[], bool]:
    import torch

    found = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return found if found is not None else lambda: False
