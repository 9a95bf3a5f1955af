"""Nothing that the engine enqueues makes the host wait for a device.

On the simulated device a look at a value costs nothing, on a real one it is a barrier: the engine would hide the
very hang that it is to show, and its latencies would be those of the barrier. So a whole trial runs with every
stream operation under modes that refuse what would synchronise. Captured operations are refused by the capture
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from local_ranks import Seat, Trials, run_trial
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.devices.sim_capture import TO_HOST, obstacle
from harness.devices.sim_streams import SimStream
from harness.target import RankResult, TrialSpec
from serving import attention
from serving.sampling import sample

if TYPE_CHECKING:
    from local_ranks import LocalRanks


class Synchronises(RuntimeError):
    """An operation would make the host wait for the device."""


class Calls(TorchDispatchMode):
    """Refuses aten calls that look at a value or bring one from the host; counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen += 1
        found = obstacle(func, args, kwargs or {})
        if found is not None:
            raise Synchronises(" ".join(found))
        if func.overloadpacket.__name__ == "lift_fresh":
            raise Synchronises("a tensor made from a Python value is a copy from the host")
        return func(*args, **(kwargs or {}))


class Looks(TorchFunctionMode):
    """Refuses the ways to the host that no aten call shows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in TO_HOST:
            raise Synchronises(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def forbidden() -> Iterator[Calls]:
    with Looks(), Calls() as calls:
        yield calls


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.numpy(),
        lambda x: bool(x[0] > 0),
        lambda x: torch.tensor([1.0, 2.0]) + x,
        lambda x: torch.tensor(1.0) + x,
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.repeat_interleave(x, torch.ones(2, dtype=torch.int64)),
    ],
)
def test_what_synchronises_is_refused(op: Callable[[torch.Tensor], object]) -> None:
    values = torch.ones(2)
    with pytest.raises(Synchronises), forbidden():
        op(values)


def no_sync_trial(seat: Seat, spec: TrialSpec) -> tuple[RankResult, int]:
    """The trial with every stream operation under the modes; and how many calls they saw."""
    carry, seen = SimStream.carry, []

    def watched(stream: SimStream, op: Callable[[], None], label: str) -> None:
        with forbidden() as calls:
            carry(stream, op, label)
        seen.append(calls.seen)

    # As on an accelerator: lengths from the host go by value.
    with patch.object(SimStream, "carry", watched), patch.object(attention, "on_device", attention.by_value):
        return run_trial(seat, spec), sum(seen)


WORKLOAD = {
    "kind": "prefix_tree",
    "requests": 8,
    "root_tokens": 12,
    "child_tokens": (0, 24),
    "decode_tokens": (2, 8),
    "grammar_share": 0.4,
}


@pytest.mark.parametrize(
    ("world", "tables"),
    [
        (2, {"toggles": {"graph": "off"}}),
        (2, {"toggles": {"graph": "on", "pinned": "pinned"}, "engine": {"expert_stats": True}}),
        (1, {"toggles": {"graph": "off", "pinned": "pinned_sync"}, "engine": {"sample_ahead": True}}),
    ],
)
def test_a_whole_trial_enqueues_nothing_that_synchronises(
    ranks: LocalRanks, tmp_path: Path, world: int, tables: dict[str, Any]
) -> None:
    trials = Trials(tmp_path, WORKLOAD, world)
    found = ranks.stressed(world, trials.spec(**tables), no_sync_trial)
    assert [one.error for one in found.outcomes] == [None] * world
    for result, calls in (one.value for one in found.outcomes):
        assert calls > 1000 and result.steps > 5


def test_masking_on_an_accelerator_synchronises_nothing() -> None:
    """The kernel that xgrammar has for NPU, in plain torch, gives what its CPU kernel gives."""
    import xgrammar

    generator = torch.Generator().manual_seed(0)
    logits_SV = torch.randn(5, 70, generator=generator)
    mask_SW = torch.randint(-(2**31), 2**31, (5, 3), generator=generator).to(torch.int32)
    wanted = sample(logits_SV.clone(), mask_SW)
    with forbidden():
        masked_SV = logits_SV.clone()
        xgrammar.apply_token_bitmask_inplace(masked_SV, mask_SW, backend="torch_native")
        found = masked_SV.argmax(dim=-1)
    assert torch.equal(found, wanted)
