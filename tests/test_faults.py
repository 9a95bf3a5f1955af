"""Fault sites and jitter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness import faults
from harness.devices.base import STREAM_NAMES
from harness.faults import SITES, Active, FaultError, Passing
from harness.jitter import Jitter, JitterOptions

LEDGERED = {"device.operation", "host.fence", "device.cores"}
"""Sites that are passed only with a ledger, where a copy is pending, or on a device with counted cores."""
ALWAYS = JitterOptions(probability=1.0, low_us=5.0, high_us=50.0, longest_share=1.0)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    faults.activate()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Delays asked for, in seconds; nothing is waited."""
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    return delays


class Recorder:
    def __init__(self) -> None:
        self.visits: list[tuple[str, dict[str, Any]]] = []

    def visit(self, passing: Passing) -> None:
        self.visits.append((passing.site, passing.values))


def passing(site: str, **values: Any) -> Passing:
    return Passing(site, 0, 0, values)


def delays_of(
    options: JitterOptions, seed: int, rank: int, sites: list[str], slept: list[float]
) -> list[float]:
    slept.clear()
    jitter = Jitter(options, seed, rank)
    for site in sites:
        jitter.visit(passing(site))
    return list(slept)


def test_a_seed_fixes_every_delay(slept: list[float]) -> None:
    sites = ["copy.h2d", "event.wait", "copy.h2d", "comm.before"] * 25
    first = delays_of(ALWAYS, 3, 0, sites, slept)
    assert len(first) == len(sites)
    assert delays_of(ALWAYS, 3, 0, sites, slept) == first
    assert delays_of(ALWAYS, 4, 0, sites, slept) != first
    assert delays_of(ALWAYS, 3, 1, sites, slept) != first


def test_the_passes_of_one_site_do_not_depend_on_those_of_another(slept: list[float]) -> None:
    alone = delays_of(ALWAYS, 3, 0, ["copy.h2d"] * 20, slept)
    mixed = delays_of(ALWAYS, 3, 0, ["copy.h2d", "event.wait"] * 20, slept)
    assert mixed[::2] == alone


def test_delays_lie_within_their_bounds_short_ones_oftener(slept: list[float]) -> None:
    options = JitterOptions(probability=1.0, low_us=1.0, high_us=1e6, longest_share=1.0)
    jitter = Jitter(options, 1, 0, _started_s=time.monotonic() - 1e9)
    for _ in range(2000):
        jitter.visit(passing("copy.h2d"))
    assert all(1e-6 <= delay <= 1.0 for delay in slept)
    below = sum(delay < 1e-3 for delay in slept)  # half of them, log-uniform
    assert 900 < below < 1100


def test_about_the_asked_share_of_passes_is_delayed(slept: list[float]) -> None:
    options = JitterOptions(probability=0.25, high_us=2.0, longest_share=1.0)
    delays_of(options, 1, 0, ["copy.h2d"] * 2000, slept)
    assert 400 < len(slept) < 600


def test_delays_together_stay_below_their_share_of_the_time(slept: list[float]) -> None:
    options = JitterOptions(probability=1.0, low_us=1e4, high_us=1e5, longest_share=0.2)
    started_s = time.monotonic()
    jitter = Jitter(options, 1, 0)
    for _ in range(1000):
        jitter.visit(passing("copy.h2d"))
    allowed_s = 0.2 * (time.monotonic() - started_s + 1.0)
    assert 0.0 < sum(slept) <= allowed_s
    assert jitter.delayed == len(slept) < 1000


def test_only_the_chosen_sites_are_delayed(slept: list[float]) -> None:
    options = JitterOptions(probability=1.0, sites=("graph.update",), longest_share=1.0)
    jitter = Jitter(options, 1, 0)
    for site in SITES:
        jitter.visit(passing(site))
    assert len(slept) == jitter.delayed == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"sites": ("copy.h2d", "copy.up")}, r"'copy.up'.*allowed: rank.step, .*copy.h2d"),
        ({"probability": 1.5}, "probability: 1.5"),
        ({"probability": -0.1}, "probability"),
        ({"low_us": 0.0}, "low_us 0.0 must be above 0"),
        ({"low_us": 9.0, "high_us": 3.0}, "not above high_us 3.0"),
        ({"longest_share": 1.2}, "longest_share: 1.2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], told: str) -> None:
    with pytest.raises(FaultError, match=told):
        JitterOptions(**values)


def test_activate_replaces_chains_and_switches_off() -> None:
    assert faults.ACTIVE is None
    one, other = Recorder(), Recorder()
    faults.activate(one)
    assert isinstance(faults.ACTIVE, Active)
    faults.activate(one, other, rank=1)
    faults.ACTIVE.visit("rank.step", step=2, engine=None)
    assert one.visits == other.visits == [("rank.step", {"step": 2, "engine": None})]
    later = faults.ACTIVE.visit("comm.after", group="experts", operation="all_reduce", sequence=3)
    assert (later.rank, later.step, later["group"], later.skipped) == (1, 2, "experts", False)
    faults.activate()
    assert faults.ACTIVE is None


def test_the_device_passes_every_site_that_is_its_own() -> None:
    import torch
    from sim_rig import LONG_S, opened

    seen = Recorder()
    faults.activate(seen)
    with opened() as device:
        with device.capture("g") as graph:
            flag = device.external_event("layer")
            device.host_op(lambda args: None, (0,), flag, "attention")
        source = device.host_staging([1], torch.int64, pinned=True)
        target = device.empty([1], torch.int64)
        event = device.event()
        device.copy_h2d(target, source, device.compute, "in")
        device.compute.record(event)
        device.copy.wait(event)
        result = device.host_empty([1], torch.int64, pinned=True)
        device.copy_d2h(result, target, device.copy, "out")
        device.graph_update(graph, [(1,)], None)
        device.replay(graph)
        for name in STREAM_NAMES:
            getattr(device, name).synchronize(LONG_S)
        device.host_free(source)
        device.host_staging([1], torch.int64, pinned=True)
    passed = {site for site, _ in seen.visits}
    others = ("comm.", "rank.", "scheduler.", "symm.")
    assert passed == {site for site in SITES if not site.startswith(others)} - LEDGERED
