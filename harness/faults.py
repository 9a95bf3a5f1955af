"""Fault sites, and what passes them: the seam at which the engine, the device and the comm layer can be broken.

A site is a name. Code that passes one asks ``if faults.ACTIVE is not None`` and, only then, visits it: with
no fault active a site costs one attribute test. A visit makes a ``Passing``: what the code is about to do, in named
values, some of which the visitor may change; where the site allows it, the visitor may also have the code leave it
out. ``SITES`` says what each site offers. Visitors are faults (``fault_model.py``) and jitter (``jitter.py``).

Not here: the faults themselves (``fault_library.py``), which of them a scenario chooses, and the defects of the
simulated device (``devices/sim.py``), which model a platform and not a mistake of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class FaultError(ValueError):
    """A site that does not exist, a value that a site does not offer, or a parameter out of range."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a pass offers. ``thread``: which one passes it: the host, a stream's, or the one that carries a
    collective."""

    what: str
    thread: Literal["host", "stream"]
    keys: tuple[str, ...] = ()
    """Values that a fault may look at, and that ``where`` may ask for."""
    changes: tuple[str, ...] = ()
    """Those of them that a fault may change."""
    skip: str = ""
    """What leaving it out means; empty: it cannot be left out."""


OF_THE_STEP = ("mode", "tokens", "idle", "grammar")
"""What a pass within a launch also offers: this rank's part of the step that is being launched."""

SITES: Mapping[str, Site] = {
    # The rank, on its host thread.
    "rank.step": Site("a step begins", "host", ("step", "engine"), (), ""),
    "rank.batch": Site(
        "the rank has its batch and tells the others of it",
        "host", ("step", "mode", "tokens", "grammar", "batch", "engine"), (),
        "the agreement: the rank goes by what it knows itself",
    ),
    "rank.plan": Site(
        "all ranks have agreed on the step",
        "host", ("step", "mode", "tokens", "idle", "plan", "buckets"), ("plan",), "",
    ),
    "rank.launch": Site(
        "the forward pass is about to be enqueued",
        "host", ("step", "mode", "tokens", "idle", "graph", "bucket", "grammar"), (),
        "the whole forward pass",
    ),
    "rank.layer": Site(
        "an eager step is about to enqueue one part of a layer, with its collectives",
        "host", ("part", "layer", "tokens", "idle"), (), "that part",
    ),
    "rank.result": Site(
        "the host waits for the tokens of a step", "host", ("step", "sampled", "grammar"), (), "the wait",
    ),
    "rank.token": Site(
        "the host takes a sampled token of a request",
        "host", ("step", "request", "token", "grammar", "engine"), ("token",), "",
    ),
    "rank.log": Site("the rank writes its journal", "host", ("step", "descriptor"), (), ""),
    "rank.exit": Site("the rank's work and streams are done, it is about to leave", "host", ("engine",), (), ""),
    "scheduler.victims": Site(
        "requests may be retracted, the first one first; ``needed``: one will be",
        "host", ("victims", "forced", "needed"), ("victims",), "",
    ),
    "scheduler.prefill": Site(
        "a request in the middle of its prefill is about to go on, while others wait",
        "host", ("request", "computed", "waiting"), (),
        "going on: it starts again, behind those that wait",
    ),
    "scheduler.abort": Site(
        "a request that can never fit is given up", "host", ("request", "reason"), (),
        "giving it up: it waits on",
    ),
    # Collectives.
    "comm.enqueue": Site(
        "a collective on device tensors is about to be enqueued",
        "host",
        ("group", "operation", "shape", "dtype", "tensor", "stream", "enqueue", "capturing", *OF_THE_STEP),
        ("tensor", "stream"), "the collective; ``enqueue()`` makes it later",
    ),
    "comm.host": Site(
        "a collective of the control plane is about to be entered",
        "host", ("group", "operation", "values", "root"), ("group", "values", "root"),
        "the collective; the rank goes on with its own values",
    ),
    "comm.create": Site("a communicator is about to be made", "host", ("group",), (), ""),
    "comm.before": Site(
        "the stream is about to carry a collective", "stream",
        ("group", "operation", "sequence", "heap"), (), "",
    ),
    "comm.after": Site("a collective is done", "stream", ("group", "operation", "sequence"), (), ""),
    "symm.reserve": Site(
        "the host is about to make room in the symmetric heap, together with the others",
        "host", ("group", "nbytes"), (), "",
    ),
    "symm.register": Site(
        "the symmetric heap is too small and is about to grow, together with the others'",
        "stream", ("group", "nbytes", "heap"), ("nbytes",), "",
    ),
    # The device.
    "copy.h2d": Site("a copy to the device begins", "stream", ("stream", "label"), (), ""),
    "copy.d2h": Site("a copy to the host begins", "stream", ("stream", "label"), (), ""),
    "event.record": Site(
        "an event is recorded", "stream", ("stream", "event", "record"), (),
        "the record: it is lost; ``record()`` makes it",
    ),
    "event.wait": Site("a stream waits for an event", "stream", ("stream", "event"), (), "the wait"),
    "graph.update": Site(
        "new host arguments are bound to one operation of a graph", "stream", ("graph", "layer", "args"),
        ("args",), "",
    ),
    "graph.replay": Site("a graph's replay begins", "stream", ("graph",), (), ""),
    "device.operation": Site("an operation of a stream begins", "stream", ("stream", "label"), (), ""),
    "device.cores": Site(
        "a cooperative kernel is about to take the cores of the device",
        "stream", ("stream", "label", "whole"), ("whole",), "",
    ),
    "host.reuse": Site(
        "a host block is handed out again", "host", ("pinned", "nbytes"), (), ""
    ),
    "host.fence": Site(
        "a host block is wanted whose last copy may be pending", "host", ("pinned", "nbytes"), (),
        "the look at that copy: the block is handed out while it is read",
    ),
}  # fmt: skip
"""Every site. A value that cannot be written in TOML (a plan, an engine, a tensor) is for faults only."""

ONLY_ON_SIM: Mapping[str, str] = {
    "device.cores": "how a kernel takes the cores of a real device is the platform's own affair",
}
"""Sites that no real accelerator passes, and why."""


@dataclass(slots=True)
class Passing:
    """One pass of a site. Visitors look at ``values``, change those that the site lets them, or ``skip``."""

    site: str
    rank: int
    step: int
    """The host's step at that moment; on a stream's thread the host may be a step ahead."""
    values: dict[str, Any]
    skipped: bool = False
    stall: Callable[[float | None], None] | None = None
    """On a real accelerator, at a site of a stream: the host passes it there, and this keeps the stream busy for so
    many seconds, None: for ever. Where it is None the thread that passes the site is the one to hold up."""

    def __getitem__(self, key: str) -> Any:
        try:
            return self.values[key]
        except KeyError:
            offered = ", ".join(SITES[self.site].keys) or "nothing"
            raise FaultError(f"{self.site} has no value {key!r}; it offers {offered}") from None

    def change(self, key: str, value: Any) -> None:
        """The code goes on with ``value`` instead. Raises FaultError for one that the site does not let change."""
        if key not in SITES[self.site].changes:
            may = ", ".join(SITES[self.site].changes) or "nothing"
            raise FaultError(f"{self.site} does not let {key!r} be changed, only {may}")
        self.values[key] = value

    def skip(self) -> None:
        """The code leaves out what ``SITES`` says of this site. Raises FaultError where it cannot."""
        if not SITES[self.site].skip:
            raise FaultError(f"{self.site} cannot be left out")
        self.skipped = True


class Visitor(Protocol):
    """Something that acts where a site is passed, on the thread that passes it."""

    def visit(self, passing: Passing) -> None: ...


@dataclass(slots=True)
class Active:
    """The visitors of this process, in order, and the step that its host has begun."""

    visitors: tuple[Visitor, ...]
    rank: int = 0
    step: int = field(default=0, init=False)
    _launched: dict[str, Any] = field(default_factory=dict, init=False)
    """``OF_THE_STEP`` of the newest launch."""

    def visit(
        self, site: str, *, stall: Callable[[float | None], None] | None = None, **values: Any
    ) -> Passing:
        """Raises what a visitor raises: that is what the code at the site then sees."""
        if site == "rank.step":
            self.step = values["step"]
        elif site == "rank.launch":
            self._launched = {key: values[key] for key in OF_THE_STEP if key in values}
        elif site == "comm.enqueue":
            values |= self._launched
        passing = Passing(site, self.rank, self.step, values, stall=stall)
        for visitor in self.visitors:
            visitor.visit(passing)
        return passing


ACTIVE: Active | None = None
"""What is visited now in this process; None (the usual case) costs one attribute test at each site."""


def activate(*visitors: Visitor, rank: int = 0) -> None:
    """Makes the visitors active in this process, replacing those before; none at all switches them off."""
    global ACTIVE  # noqa: PLW0603 - one attribute test per site is the point
    ACTIVE = Active(visitors, rank) if visitors else None
