"""The process that runs programs: it may hang or die, and its parent ends it.

``python -m harness.litmus.child REQUEST``. Orders come as JSON lines on standard input, answers go as JSON lines to
what standard output was at the start (then it is standard error: libraries print). Each shot is answered by itself,
so that the parent knows which one did not come back. After a stall, an error of the device or the end of its input
the process goes at once: what hangs inside it is not waited for. It also goes when its parent dies.

Not here: who starts it and how long it may take (``crew.py``).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from harness.devices.base import Device, DeviceTimeout
from harness.devices.sim import SimDevice, SimOptions
from harness.litmus.bench import Bench, Stress
from harness.litmus.catalogue import PROGRAMS
from harness.litmus.groups import all_reduce
from harness.litmus.program import ERROR, STALLED, Program
from harness.litmus.request import ChildRequest

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GROUP_DEADLINES = 10


class Child:
    """The programs of one process on one device, each set up when it is first shot under a stress."""

    def __init__(
        self, request: ChildRequest, programs: Mapping[str, type[Program]], say: Callable[..., None]
    ) -> None:
        self._request = request
        self._programs = programs
        self._say = say
        self._device, facts = open_for(request)
        self._meet: Callable[[], None] = lambda: None
        if request.ranks > 1:
            self._meet = join_group(request, self._device)
        self._ready: tuple[str, str, Stress] | None = None
        self._program: Program | None = None
        self._say(ready=facts)

    def obey(self, order: Mapping[str, Any]) -> None:
        """Shoots ``program`` with the numbers from ``first`` on; does not return from what stops it."""
        stress = Stress(**order["stress"])
        for number in range(order["first"], order["first"] + order["count"]):
            try:
                outcome = self._set_up(order["program"], order["space"], stress).shoot(number)
            except DeviceTimeout:
                self._say(shot=number, outcome=STALLED)
                leave(0)
            except Exception as error:
                traceback.print_exc()
                self._say(shot=number, outcome=ERROR, why=f"{type(error).__name__}: {error}"[:500])
                leave(0)
            self._say(shot=number, outcome=outcome)

    def _set_up(self, name: str, space: str, stress: Stress) -> Program:
        if self._program is None or self._ready != (name, space, stress):
            self._program = None
            request = self._request
            bench = Bench(
                self._device,
                stress,
                seed=request.seed,
                space=f"{space}/{name}",
                deadline_s=request.deadline_s,
                rank=request.rank,
                meet=self._meet,
            )
            self._program = self._programs[name](bench)
            self._ready = (name, space, stress)
        return self._program


def open_for(request: ChildRequest) -> tuple[Device, Mapping[str, str | None]]:
    """The device and what is known of its platform."""
    if request.device == "sim":
        options = SimOptions(
            memory_model=request.model,
            defects=frozenset(request.defects),
            host_timeout_s=request.deadline_s,
        )
        return SimDevice(options, rank=request.rank), {"torch": torch.__version__}
    from harness.devices.facts import platform_facts
    from harness.devices.opening import open_device

    index = 0 if request.shared else request.rank
    device = open_device(
        request.device, index, rank=request.rank, ledger=None, host_timeout_s=request.deadline_s
    )
    return device, platform_facts(request.device, index)


def join_group(request: ChildRequest, device: Device) -> Callable[[], None]:
    """Makes the communicator of the pair, and a group of gloo by which its members wait for each other.

    Their own timeout lies behind the deadline of a shot: a stall is to be told as one, not as an error.
    """
    timeout = timedelta(seconds=_GROUP_DEADLINES * request.deadline_s)
    dist.init_process_group(
        request.backend,
        init_method=f"file://{request.rendezvous}",
        rank=request.rank,
        world_size=request.ranks,
        timeout=timeout,
    )
    meeting = dist.new_group(backend="gloo", timeout=timeout)
    first = device.empty([1], torch.int32)
    device.compute.run(all_reduce(first), "all_reduce")  # NCCL and HCCL make their communicator now
    device.compute.synchronize(timeout.total_seconds())

    def meet() -> None:
        dist.barrier(group=meeting)

    return meet


def leave(status: int) -> NoReturn:
    """At once: a thread that hangs in a driver or a collective would hold up an orderly end for ever."""
    sys.stderr.flush()
    os._exit(status)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when ``parent`` is gone, also by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        leave(1)


def main(programs: Mapping[str, type[Program]] = PROGRAMS) -> NoReturn:
    """Until standard input ends."""
    request = ChildRequest.of_text(sys.argv[1])
    die_with(request.parent)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    torch.set_num_threads(1)  # the tensors are small, and a busy host delays its streams
    try:
        child = Child(request, programs, say)
    except Exception as error:
        traceback.print_exc()
        say(failed=f"{type(error).__name__}: {error}"[:500])
        leave(1)
    for line in sys.stdin:
        child.obey(json.loads(line))
    leave(0)


if __name__ == "__main__":
    main()
