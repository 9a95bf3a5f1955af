"""Where a program is shot: the device, its buffers, the values of a shot, and seeded stress around it.

Stress: the stream that carries a copy is kept busy for a while first (``lead``), the host pauses between two
calls (``pause``), and before the body other streams copy and the host allocator hands blocks out and takes them
back (``side_work``). All of it is drawn from the seed, the program and the shot's number, so it can be repeated;
what the threads and engines of the device make of it cannot.

Not here: how long to keep a stream busy, which is tuned per device (``tuning.py``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.devices.base import Device, DeviceTimeout, Event, HostBuffer, Stream

_ITEM_BYTES = 4  # int32


@dataclass(frozen=True, slots=True)
class Stress:
    """``delay_us``: about how long a stream is kept busy before a copy. ``nbytes``: of one copy."""

    delay_us: float
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """The device as programs see it. ``space`` and ``seed`` give each shot its own random numbers."""

    def __init__(
        self,
        device: Device,
        stress: Stress,
        *,
        seed: int,
        space: str,
        deadline_s: float,
        rank: int = 0,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """``meet``: returns when the other member of a pair is there too."""
        self.device = device
        self.stress = stress
        self.rank = rank
        self.meet = meet
        self.old, self.new, self.later = 1, 2, 3
        """What a shot's memory holds before, what the program writes, and what is written over it."""
        self._deadline_s = deadline_s
        self._until_s = time.monotonic() + deadline_s
        self._seed = seed
        self._space = space
        self.rng = random.Random(0)
        self._side_source = self.host(pinned=True)
        self._side_target = self.on_device()
        device.delay(device.compute, 1e-6, "calibration")  # a device may have to measure how, and wait for it

    @property
    def streams(self) -> tuple[Stream, ...]:
        return (self.device.compute, self.device.copy, self.device.comm, self.device.update)

    @property
    def count(self) -> int:
        """Elements of a buffer."""
        return max(1, self.stress.nbytes // _ITEM_BYTES)

    def host(self, *, pinned: bool) -> HostBuffer:
        return self.device.host_empty([self.count], torch.int32, pinned=pinned)

    def on_device(self, count: int | None = None) -> torch.Tensor:
        return self.device.empty([self.count if count is None else count], torch.int32)

    # --- one shot ---------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """A new shot: its values, its random numbers, its deadline."""
        self.old, self.new, self.later = 4 * number + 1, 4 * number + 2, 4 * number + 3
        # The members of a pair draw the same numbers, so that they agree on what to do.
        self.rng = random.Random(f"{self._seed}/{self._space}/{number}")
        self._until_s = time.monotonic() + self._deadline_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def settle(self) -> None:
        """Waits until all streams are idle. Raises DeviceTimeout at the shot's deadline."""
        for stream in self.streams:
            stream.synchronize(self.left_s)

    def await_event(self, event: Event) -> None:
        """Waits on the host, one time by asking, another by a wait of the platform."""
        if self.rng.random() < 0.5:
            event.synchronize(self.left_s)
            return
        while not event.query():
            if self.left_s <= 0.0:
                raise DeviceTimeout("an event did not come before the shot's deadline")
            time.sleep(0.0)

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """On ``compute``."""
        self.device.compute.run(lambda: _fill(tensor, value), "fill")

    @staticmethod
    def told(tensor: torch.Tensor, names: Mapping[int, str]) -> str:
        """The name of the one value that ``tensor`` holds; ``torn`` for several known ones, else ``other``."""
        host = tensor.cpu()
        low, high = int(host.min()), int(host.max())
        if low not in names or high not in names:
            return "other"
        return names[low] if low == high else "torn"

    # --- stress -----------------------------------------------------------------------------------------------

    def lead(self, stream: Stream) -> None:
        """Keeps ``stream`` busy for about ``delay_us``; one shot in eight goes without."""
        scale = self.rng.uniform(0.25, 1.75)
        if self.rng.random() < 0.875 and self.stress.delay_us > 0.0:
            self.device.delay(stream, self.stress.delay_us * scale * 1e-6, "stress")

    def pause(self) -> None:
        """One time in three the host waits for up to 100 µs."""
        if self.rng.random() < 1 / 3:
            time.sleep(self.rng.uniform(0.0, 100e-6))

    def side_work(self) -> None:
        """Copies on any stream, and blocks of the programs' sizes that come and go."""
        for _ in range(self.rng.randrange(3)):
            stream = self.rng.choice(self.streams)
            self.device.copy_h2d(self._side_target, self._side_source, stream, "side traffic")
        for _ in range(self.rng.randrange(3)):
            pinned = self.rng.random() < 0.75
            block = self.host(pinned=pinned)
            block.tensor.fill_(0)
            if pinned and self.rng.random() < 0.5:
                self.device.copy_h2d(self._side_target, block, self.rng.choice(self.streams), "side traffic")
            self.device.host_free(block)


def _fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)
