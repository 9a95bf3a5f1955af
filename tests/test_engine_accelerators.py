"""The whole engine on the accelerator devices, over the fake of their modules: its tokens are those of the
simulated device, whatever is switched on and however ranks and devices go together.

One source runs everywhere; what differs is when things happen. Here kernels run when their stream comes to them,
a collective is a kernel that waits for its peers, and the host is steps ahead of all of it. A missing event shows
as other tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import ON_DEVICE, FakeAccelerator
from fake_rig import CLASSES
from local_ranks import Seat, Trial, Trials, run_trial
from test_carriers import Kernels

from harness.devices.accelerator import AcceleratorDevice, Platform
from harness.ledger import LedgerReader, LedgerWriter
from harness.target import RankResult, TrialSpec
from harness.toggles import VALUES
from serving import attention, collectives, copy_witness, sampling, symmetric_cuda
from serving.carriers import carrier_for
from serving.targets import builtin_device
from serving.targets.builtin_device import Leftovers, RankDevice
from serving.targets.builtin_rank import load_model

if TYPE_CHECKING:
    from local_ranks import LocalRanks

WORKLOAD = {
    "kind": "prefix_tree",
    "requests": 8,
    "root_tokens": 12,
    "child_tokens": (0, 20),
    "decode_tokens": (3, 8),
    "grammar_share": 0.4,
}
PLAIN: dict[str, Any] = {"toggles": {"overlap": "off", "graph": "off"}}


@contextmanager
def fake_platform(kind: str) -> Iterator[FakeAccelerator]:
    """This process with a device of that kind: torch's module of it and the library of its collectives are fakes,
    everything of ours is real."""
    fake = FakeAccelerator(kind)

    def opened(
        kind: str, index: int, *, rank: int, ledger: LedgerWriter | None, host_timeout_s: float
    ) -> AcceleratorDevice:
        platform = Platform(kind, fake, index, ON_DEVICE, fake.pinned)
        return CLASSES[kind](platform, ledger, host_timeout_s=host_timeout_s)

    with ExitStack() as patches:
        patches.enter_context(patch.object(builtin_device, "open_device", opened))
        patches.enter_context(patch.object(builtin_device, "device_module", lambda kind: fake))
        patches.enter_context(patch.object(builtin_device.RankDevice, "dtype", lambda *_: torch.float32))
        # The fake's tensors are the CPU's: lengths go by value and masks by torch's own operations, as on an NPU.
        native = functools.partial(sampling.xgr.apply_token_bitmask_inplace, backend="torch_native")
        patches.enter_context(patch.object(sampling.xgr, "apply_token_bitmask_inplace", native))
        patches.enter_context(patch.object(attention, "on_device", attention.by_value))
        patches.enter_context(patch.object(copy_witness, "off_host", fake.on_device))
        patches.enter_context(fake.host())
        try:
            yield fake
        finally:
            fake.end()


class SharedMemory:
    """torch's symmetric memory between processes: files, and barriers that are kernels."""

    def __init__(self, fake: FakeAccelerator, path: Path, rank: int) -> None:
        self._fake = fake
        self._path = path
        self._rank = rank
        self.registered = 0

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.registered += 1
        return self._segment(self._rank, nbytes)

    def _segment(self, rank: int, nbytes: int) -> torch.Tensor:
        path = f"{self._path}-{rank}-{self.registered}"
        segment = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._fake.made_on_device(segment)
        return segment

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        dist.barrier(group=group)
        segments = [self._segment(rank, tensor.numel()) for rank in range(group.size())]

        def get_buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nbytes = torch.Size(sizes).numel() * dtype.itemsize
            return segments[rank][:nbytes].view(dtype).view(sizes)

        def barrier(channel: int = 0) -> None:
            self._fake.launch(lambda: dist.barrier(group=group))

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)


def on_fake(seat: Seat, spec: TrialSpec, kind: str, ranks_per_device: int) -> RankResult:
    """The trial with the rank's device, weights and way to carry data as on an accelerator."""
    actor, device = seat.actor, RankDevice(kind, f"{kind}:0", 0, ON_DEVICE)
    carrier = carrier_for(kind, ranks_per_device)
    with fake_platform(kind) as fake, ExitStack() as patches:
        if carrier.enqueues:
            data = type("Data", (Kernels,), {"fake": fake})
            patches.enter_context(patch.object(collectives, "GroupData", data))
        memory = SharedMemory(fake, seat.place.directory / spec.id, seat.rank)
        patches.enter_context(patch.object(symmetric_cuda, "torch_memory", lambda: memory))
        model = load_model({"preset": "tiny", "seed": 0}, actor._topology, device)
        for name, value in (
            ("_device", device), ("_carrier", carrier), ("_model", model), ("_leftovers", Leftovers()),
        ):  # fmt: skip
            patches.enter_context(patch.object(actor, name, value))
        patches.enter_context(patch.object(actor._groups, "_connected", set()))
        return run_trial(seat, spec)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("accelerators"), WORKLOAD)


@pytest.fixture(scope="module")
def reference(ranks: LocalRanks, trials: Trials) -> Trial:
    """The simulated device, one rank, nothing ahead and nothing captured."""
    trial = ranks.trial(1, trials.of(1).spec(**PLAIN))
    assert len(trial.tokens) == WORKLOAD["requests"]
    return trial


def toggles(**values: str) -> dict[str, Any]:
    return {"toggles": values}


CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "cuda, one rank": ("cuda", 1, 1, toggles(graph="off", pinned="pinned")),
    "cuda, one rank, graph": ("cuda", 1, 1, toggles(pinned="pinned")),
    "npu, one rank, graph": ("npu", 1, 1, toggles(pinned="pageable")),
    "cuda, two ranks": ("cuda", 2, 1, toggles(graph="off", pinned="pinned")),
    "cuda, two ranks, graph": ("cuda", 2, 1, toggles(pinned="pinned")),
    "npu, two ranks, graph": ("npu", 2, 1, toggles(pinned="pinned")),
    "cuda, two ranks share it": ("cuda", 2, 2, toggles(graph="off", pinned="pinned")),
    "cuda, nothing ahead": ("cuda", 2, 1, toggles(graph="off", overlap="off")),
    "npu, samples ahead": ("npu", 1, 1, {**toggles(pinned="pinned"), "engine": {"sample_ahead": True}}),
    "npu, the witness looks": ("npu", 1, 1, {**toggles(pinned="pinned"), "engine": {"check_copies": True}}),
    "cuda, experts counted": (
        "cuda", 2, 1, {**toggles(pinned="pinned"), "engine": {"expert_stats": True, "retract_every": 5}},
    ),
    "cuda, symmetric memory": ("cuda", 2, 1, toggles(graph="off", pinned="pinned", symm_mem="on")),
    "cuda, symmetric memory, graph": ("cuda", 2, 1, toggles(pinned="pinned", symm_mem="on")),
    "npu, sum_len": ("npu", 2, 1, {**toggles(graph="off"), "engine": {"padding": "sum_len"}}),
    **{
        f"{kind}, {value}": (kind, 1, 1, toggles(pinned=value))
        for kind in ("cuda", "npu")
        for value in VALUES["pinned"]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_simulated_device(
    ranks: LocalRanks, trials: Trials, reference: Trial, case: str
) -> None:
    kind, world, ranks_per_device, tables = CASES[case]
    job = functools.partial(on_fake, kind=kind, ranks_per_device=ranks_per_device)
    trial = ranks.trial(world, trials.of(world).spec(**tables), job)
    assert trial.tokens == reference.tokens
    assert trial.finish == reference.finish
    assert [list(result.leaks) for result in trial.results] == [[]] * world
    graphs = {
        json.loads(line)["graph"] for line in Path(trial.spec.decisions_paths[0]).read_text().splitlines()
    }
    assert (True in graphs) == (trial.spec.toggles["graph"] == "on")


STALL_S = 3.0


def stalled(seat: Seat, spec: TrialSpec) -> RankResult:
    """What keeps a stream busy for ever ends a while after the hosts have given up, so that the peer can leave."""
    with patch("fake_accelerator.LONG_S", 1.5 * STALL_S):
        return on_fake(seat, spec, "cuda", 1)


def test_a_stream_that_stands_still_is_in_both_ledgers(ranks: LocalRanks, trials: Trials) -> None:
    """Rank 1's ``comm`` never comes past the start of one collective. Hosts give up at their deadline; what the
    monitors saw by then is what a watchdog reads."""
    stuck = {
        "name": "block",
        "site": "comm.before",
        "ranks": [1],
        "steps": [3, 1000],
        "where": {"group": "experts"},
    }
    spec = trials.spec(timeout_s=STALL_S, faults=[stuck], toggles={"graph": "off", "pinned": "pinned"})
    trial = ranks.stressed(2, spec, stalled)
    errors = [outcome.error or "" for outcome in trial.outcomes]
    assert all(errors) and any(
        error.startswith(f"DeviceTimeout: an event was not done after {STALL_S:g} s") for error in errors
    ), "one gives up, and the other does or finds it gone"
    seen = []
    for rank in range(2):
        with closing(LedgerReader.open(Path(spec.ledger_paths[rank]))) as reader:
            seen.append(reader.snapshot())
    experts = [snapshot.groups["experts"] for snapshot in seen]
    assert experts[0].completed == experts[1].completed > 0
    for group in experts:
        assert group.started == group.completed + 1 <= group.enqueued
    for snapshot in seen:
        assert snapshot.host.phase in ("wait-result", "agree")
        comm, compute = snapshot.streams["comm"], snapshot.streams["compute"]
        assert comm.oldest is not None and comm.oldest.label.endswith(" experts")
        assert comm.oldest.site.startswith("serving/")
        assert compute.completed < compute.enqueued, "it waits for the collective"
