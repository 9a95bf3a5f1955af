"""Which backend carries data on which device, and the collectives that are not a stream thread's: those that are
enqueued (nccl, hccl), with kernels of the fake accelerator in their place, and those that the host carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from fake_accelerator import FakeAccelerator
from fake_rig import LONG_S, opened_fake

from harness.devices.base import DeviceError
from harness.ledger import LedgerReader, LedgerWriter
from serving import collectives
from serving.carriers import Carrier, CarrierError, GroupData, carrier_for
from serving.comm import Comm, CommError, CommOptions

if TYPE_CHECKING:
    from local_ranks import LocalRanks, Seat

    from harness.devices.accelerator import AcceleratorDevice

STAGED = Carrier("gloo", staged=True)


@pytest.mark.parametrize(
    ("kind", "ranks", "carrier"),
    [
        ("sim", 1, Carrier("gloo")),
        ("sim", 2, Carrier("gloo")),
        ("cuda", 1, Carrier("nccl")),
        ("cuda", 2, STAGED),
        ("npu", 1, Carrier("hccl")),
    ],
)
def test_the_backend_of_each_device(kind: str, ranks: int, carrier: Carrier) -> None:
    assert carrier_for(kind, ranks) == carrier
    assert carrier.enqueues == (carrier.backend != "gloo")


@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [("npu", 2, "2 ranks cannot share one npu"), ("tpu", 1, "known: sim, cuda, npu")],
)
def test_what_cannot_be_carried_is_refused(kind: str, ranks: int, said: str) -> None:
    with pytest.raises(CarrierError, match=said):
        carrier_for(kind, ranks)


class Kernels(GroupData):
    """nccl as the fake has it: a kernel on the current stream that ends when all ranks' kernels have met."""

    fake: FakeAccelerator

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        self.fake.launch(lambda: GroupData.all_gather(self, out, part))

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        self.fake.launch(lambda: GroupData.reduce_scatter(self, out, whole))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.fake.launch(lambda: GroupData.all_reduce(self, tensor))


@contextmanager
def comm_of(
    seat: Seat, kind: str, carrier: Carrier, ledger: LedgerWriter | None = None
) -> Iterator[tuple[AcceleratorDevice, Comm]]:
    """A fake device of this rank and its groups, whose process groups are gloo's in any case."""
    with opened_fake(kind, ledger, watch_interval_s=1e-4) as (device, fake):
        data = type("Data", (Kernels,), {"fake": fake}) if carrier.enqueues else GroupData
        options = CommOptions(
            rank=seat.rank, world=seat.world, shared=seat.place.directory, timeout_s=LONG_S, carrier=carrier
        )
        with patch.object(collectives, "GroupData", data):
            comm = Comm(options, device, ledger, seat.groups, f"{kind}-{carrier}.{seat.jobs}")
            try:
                yield device, comm
                for stream in (device.compute, device.comm):
                    stream.synchronize(LONG_S)
            finally:
                comm.shut()
                comm.close()


def sums(seat: Seat, kind: str, carrier: Carrier, path: str) -> dict[str, Any]:
    """Each collective on tensors that earlier and later operations use, and what the ledger has of them."""
    rank, world = seat.rank, seat.world
    ledger_path = Path(path) / f"ledger-{kind}-{carrier.staged}-{rank}"
    ledger = LedgerWriter.create(ledger_path, rank=rank, world=world, node="here", device=kind)
    with closing(ledger):
        with comm_of(seat, kind, carrier, ledger) as (device, comm):
            group = comm.group("experts")
            values, gathered, part = (device.empty((size,), torch.float32) for size in (4, 4 * world, 4))
            for step in range(3):
                device.compute.run(lambda step=step: values.fill_(rank + step), "fill")  # type: ignore[misc]
                group.all_gather(gathered, values)
                group.reduce_scatter(part, gathered)
                group.all_reduce(part)
            device.compute.synchronize(LONG_S)
            total, gathered_now, counts = part.tolist(), gathered.tolist(), comm.counts()["experts"]
        with closing(LedgerReader.open(ledger_path)) as reader:
            snapshot = reader.snapshot()
    found = snapshot.groups["experts"]
    return {
        "total": total,
        "gathered": gathered_now,
        "counts": counts,
        "ledger": (found.enqueued, found.started, found.completed),
    }


@pytest.mark.parametrize(
    ("kind", "carrier"), [("cuda", Carrier("nccl")), ("npu", Carrier("hccl")), ("cuda", STAGED)]
)
def test_collectives_on_an_accelerator_give_the_sums_and_are_counted(
    ranks: LocalRanks, tmp_path: Path, kind: str, carrier: Carrier
) -> None:
    first = int(carrier.enqueues)  # the one that connects, in a process that has not used the group before
    for found in ranks.run(2, sums, kind, carrier, str(tmp_path)):
        assert found["gathered"] == [2.0] * 4 + [3.0] * 4
        # Each part is rank 0's plus rank 1's rows of the gathered ones, and both parts are added up.
        assert found["total"] == [2 * 2.0 + 2 * 3.0] * 4
        assert found["counts"] in (9, 9 + first)
        assert set(found["ledger"]) == {found["counts"]}


def host_goes_on(seat: Seat, carrier: Carrier) -> bool:
    """Whether the host comes back from a collective while the stream before it is still busy."""
    with comm_of(seat, "cuda", carrier) as (device, comm):
        group = comm.group("experts")
        values = device.empty((4,), torch.float32)
        device.delay(device.compute, 0.2, "busy")
        busy = device.event()
        device.compute.record(busy)
        group.all_reduce(values)
        return not busy.query()


def test_only_a_staged_collective_holds_the_host(ranks: LocalRanks) -> None:
    assert ranks.run(2, host_goes_on, Carrier("nccl")) == [True, True]
    assert ranks.run(2, host_goes_on, STAGED) == [False, False]


def captured(seat: Seat, carrier: Carrier) -> str | list[float]:
    """What a captured sum gives after three replays, or why it cannot be captured."""
    with comm_of(seat, "cuda", carrier) as (device, comm):
        group = comm.group("experts")
        values = device.empty((2,), torch.float32)
        device.compute.run(lambda: values.fill_(0.5), "fill")
        comm.capture_begins()
        try:
            with device.capture("graph") as graph:
                group.all_reduce(values)
        except (CommError, DeviceError) as error:
            return str(error)
        comm.capture_ended(graph)
        before = group.count
        for _ in range(3):
            device.replay(graph)
            comm.replayed(graph)
        device.compute.synchronize(LONG_S)
        assert group.count == before + 3
        return list(values.tolist())


def test_a_graph_holds_enqueued_collectives_and_refuses_staged_ones(ranks: LocalRanks) -> None:
    assert ranks.run(2, captured, Carrier("nccl")) == [[8.0, 8.0]] * 2, "the warm-up and three replays"
    for said in ranks.run(2, captured, STAGED):
        assert "graph = off" in said
