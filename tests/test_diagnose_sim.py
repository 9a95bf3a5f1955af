"""The diagnosis of stream order on ledgers that a simulated device wrote, with the defect and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_rig import LONG_S, Gate, opened

from harness.devices.base import Event
from harness.devices.sim import SimDevice
from harness.diagnose import Evidence, EvidenceSample, RankEvidence, diagnose
from harness.ledger import LedgerReader, LedgerWriter
from harness.lost_records import lost_record


def decode_then_prefill(device: SimDevice, ledger: LedgerWriter, earlier: Gate) -> Event:
    """Two decode steps, the host ahead of the device, then a prefill, which brings no update.

    Gives the event of the first replay's end.
    """
    with device.capture("decode.4") as graph:
        for layer in range(2):
            flag = device.external_event(f"layer {layer}")
            device.host_op(lambda args: None, (0,), flag, "attention")
    device.compute.run(earlier, "earlier work")
    fence, first = device.event(), device.event()
    for step in (1, 2):
        ledger.phase("launch", step)
        device.graph_update(graph, [(step,)] * 2, fence)
        device.replay(graph)
        device.compute.record(fence)
        if step == 1:
            device.compute.record(first)
    ledger.phase("launch", 3)
    device.compute.run(lambda: None, "prefill")
    ledger.phase("wait-result", 3)
    return first


@pytest.mark.parametrize("defect", [True, False], ids=["unfenced", "fenced"])
def test_a_real_ledger_tells_the_lost_record(tmp_path: Path, defect: bool) -> None:
    ledger = LedgerWriter.create(tmp_path / "rank0.ledger", rank=0, world=1, node="here", device="sim")
    defects = frozenset({"D1"} if defect else ())
    earlier, last = Gate(), Gate()
    with opened(ledger=ledger, defects=defects) as device:
        reader = LedgerReader.open(tmp_path / "rank0.ledger")
        first_replay = decode_then_prefill(device, ledger, earlier)
        if defect:
            device.update.synchronize(LONG_S)
        before = reader.snapshot()
        earlier.open()
        if defect:
            first_replay.synchronize(LONG_S)
            first = second = reader.snapshot()
        else:
            device.compute.run(last, "last")
            last.await_reached()
            first, second = before, reader.snapshot()
            last.open()
        samples = tuple(
            EvidenceSample(float(at), {0: RankEvidence(snapshot, state="S", pid=7)})
            for at, snapshot in enumerate((first, second))
        )
        found = diagnose(Evidence(1, samples, device_is_simulation=True))
        reader.close()
    ledger.close()
    lost = lost_record(second)
    if defect:
        assert lost is not None and not lost.doubt
        assert (lost.graph, len(lost.events)) == ("decode.4", 2)
        assert (found.kind, found.mechanism, found.confidence) == ("hang", "stream-order", "proven")
        assert [culprit.rank for culprit in found.culprits] == [0]
        assert found.operation is not None
        assert found.operation.label == "graph.replay decode.4"
        assert found.operation.site.startswith("tests/test_diagnose_sim.py:")
        assert found.simulation
    else:
        assert lost is None
        assert (found.kind, found.culprits) == ("none", ())
