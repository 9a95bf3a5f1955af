"""The probe of one process: its parts, made once, and the seat it takes.

An engine's hooks call ``take_seat`` as soon as they know which seat the process has; before, everything may be
called and nothing is recorded. A forked child starts anew, with the same hooks. Not here: anything about an
engine.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from . import collectives, graphs
from .config import VARIABLE, Config, ConfigError, load
from .copies import Copies
from .faults import Faults
from .patching import Patches
from .pinned import Pinned
from .recorder import Recorder
from .status import Status
from .streams import Streams

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h

_dumps: list[IO[str]] = []
"""faulthandler keeps a descriptor, not the file: a collected file would close it."""
_started: list[Probe] = []
"""The probe of this process: at most one."""


def start(engine: str) -> Probe | None:
    """The probe of this process. None where it was started before, is off, or its configuration is damaged: then
    the status says so beside the file that the variable names, or else the log does."""
    if _started:
        return None
    status = Status(f"{engine} {getattr(sys.modules.get(engine), '__version__', '')}".strip())
    try:
        config = load(os.environ)
    except ConfigError as error:
        status.error(str(error))
        status.seated(Path(os.environ[VARIABLE]).parent, f"pid{os.getpid()}")
        return None
    if config is None:
        return None
    probe = Probe(engine, config, status)
    _started.append(probe)
    os.register_at_fork(after_in_child=probe.forked)
    atexit.register(status.write)
    return probe


class Probe:
    """What an engine's hooks have in hand."""

    def __init__(self, engine: str, config: Config, status: Status) -> None:
        self.name = engine
        self.config = config
        self.status = status
        self.patches = Patches(status)
        self.recorder = Recorder(status, self._new_step)
        self.faults = Faults(config, status, lambda: self.recorder.step)
        self.streams = Streams(self.recorder, status)
        self.pinned = Pinned(config, self.patches, status)
        self.copies = Copies(self.recorder, self.streams, self.pinned, status)
        self.seat: int | str | None = None
        self._watching_torch = False
        self._settled = False

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """What fails inside goes to the status, not further."""
        try:
            yield
        except Exception as error:
            self.status.failed(f"{what} failed", error)

    def forked(self) -> None:
        """In a child of a fork: another process, without a seat."""
        self.seat = None
        self._settled = False
        self.status.forked()
        self.recorder.forked()
        self.faults.forked()
        self.streams.forked()

    def take_seat(
        self,
        seat: int | str,
        *,
        role: str,
        device: str = "cpu",
        dp_rank: int | None = None,
        tp_rank: int | None = None,
    ) -> None:
        """This process is ``seat``: makes its ledger and status, arms its faults, starts to record. Never raises.

        ``role``: rank, server, controller, detokenizer or engine_core. A second call does nothing.
        """
        if self.seat is not None:
            return
        self.seat = seat
        stem = f"rank{seat}" if isinstance(seat, int) else seat
        folder = self.config.folder
        with self.guard(f"the seat {stem}"):
            self.faults.seated(seat, role)
            self.status.seated(
                folder, stem, seat=seat, role=role, device=device, dp_rank=dp_rank, tp_rank=tp_rank
            )
        with self.guard("being seen from outside"):
            _allow_dumps(folder / f"{stem}.dump.txt", self.config.tracer_pid)
        with self.guard(f"the ledger of {stem}"):
            self.recorder.dp = dp_rank or 0
            self.recorder.seated(seat, folder, world=self.config.world, node=self.config.node, device=device)
        if role == "rank" and not self._watching_torch:
            self._watching_torch = True
            with self.guard("recording torch.distributed"):
                collectives.install(self.recorder, self.faults, self.status, (f"{self.name}.",))
        if role == "rank" and self.config.device != "cpu":
            with self.guard(f"watching the device {device}"):
                self._watch_device(device)
        self.status.write()

    def _watch_device(self, device: str) -> None:
        import torch

        kind, _, index = device.partition(":")
        module: Any = torch.get_device_module(kind)
        self.streams.use(module, int(index or 0))
        self.pinned.install(torch.Tensor, torch.empty_like)
        self.copies.install(module, torch.Tensor)
        graphs.install(module, self.recorder, self.streams, self.status)

    def _new_step(self) -> None:
        self.faults.look()
        self.status.flush()
        if not self._settled:
            self._settled = True
            self.status.settle()


def _allow_dumps(path: Path, tracer_pid: int | None) -> None:
    """SIGUSR2 appends the stacks of all threads to ``path``; ``tracer_pid`` and its children may attach."""
    file = path.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _dumps.append(file)
    if tracer_pid is not None:
        # Where the kernel has no such rule, nothing forbids it in the first place: the answer does not matter.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(tracer_pid), 0, 0, 0)
