"""The ledger of this process's seat: phases, steps, decisions and collectives, from any thread.

A ledger's sections have one writer thread each, an engine has several: every write goes under one lock, held
for microseconds. Until a seat is taken, and after a failure of its own, nothing is recorded and every method
may be called all the same. Not here: which function of an engine means what (the hooks).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.ledger import LedgerError, LedgerWriter

from .measure import Measure, measure
from .status import Status


class Place:
    """A group of the ledger, and how many of its collectives were enqueued."""

    __slots__ = ("count", "handle", "name", "ranks")

    def __init__(self, name: str, ranks: tuple[int, ...], handle: int) -> None:
        self.name = name
        self.ranks = ranks
        self.handle = handle
        self.count = 0


Token = tuple[Place, int]
"""A collective under way: its group and its sequence."""


class _Thread(threading.local):
    inside = False
    """Is this thread in a collective that is recorded? What it calls in there is part of it."""
    naming: str | None = None
    named = 0


class Recorder:
    """Writes one ledger. Any thread."""

    def __init__(self, status: Status, new_step: Callable[[], None]) -> None:
        self._status = status
        self._on_new_step = new_step
        self.thread = _Thread()
        self.ledger: LedgerWriter | None = None
        self.forked()

    def forked(self) -> None:
        """In a child: the ledger is the parent's."""
        self.ledger = None
        self.measure: Measure | None = None
        self.step = 0
        self.phase_name = ""
        self.dp = 0
        """The rank's data-parallel group: its members run the same batch."""
        self._seat: int | str | None = None
        # A signal handler of the engine may come in between and call what is recorded: it must not wait for itself.
        self._lock = threading.RLock()
        self._keys: dict[Hashable, tuple[str, tuple[int, ...] | None]] = {}
        self._names: dict[str, int] = {}
        self._places: dict[Hashable, Place | None] = {}
        self._registered: list[Place] = []
        self._deferred: list[Token] = []
        self.captured: dict[Place, int] | None = None
        """While a graph is captured: what it will enqueue with each replay."""
        self.thread.inside = False

    def seated(self, seat: int | str, folder: Path, *, world: int, node: str, device: str) -> None:
        """Makes the ledger of ``seat``. Raises LedgerError."""
        rank = seat if isinstance(seat, int) else 0
        stem = f"rank{seat}" if isinstance(seat, int) else seat
        self._seat = seat
        self.ledger = LedgerWriter.create(
            folder / f"{stem}.ledger",
            rank=rank,
            world=world,
            node=node,
            device=device if isinstance(seat, int) else seat,
            decisions_path=folder / f"{stem}.decisions.jsonl",
        )
        self.phase("startup", 0)
        if isinstance(seat, int):
            self.measure = measure(self, self._status)

    # --- the host

    def phase(self, name: str, step: int | None = None) -> None:
        """The host entered ``name``; the same again is a heartbeat."""
        ledger = self.ledger
        if ledger is not None:
            with self._lock:
                self.phase_name = name
                ledger.phase(name, self.step if step is None else step)

    def heartbeat(self) -> None:
        ledger = self.ledger
        if ledger is not None:
            with self._lock:
                ledger.heartbeat()

    def new_step(self) -> int:
        """One more batch begins, an idle one too. Returns its number."""
        self.set_step(self.step + 1)
        return self.step

    def set_step(self, step: int) -> None:
        """As ``new_step``, where the engine counts itself."""
        self.step = step
        if self.measure is not None:
            self.measure.step(step)
        if self.ledger is not None:
            self._on_new_step()

    def decision(self, record: Mapping[str, Any]) -> None:
        """What this step does. The step and the counts of collectives are added; lists of ids go last, because the
        ring drops from the end what it has no room for."""
        ledger = self.ledger
        if ledger is None:
            return
        whole: dict[str, Any] = {"step": self.step, "dp": self.dp}
        ids: dict[str, Any] = {}
        for key, value in record.items():
            listed = isinstance(value, list | tuple) and value and isinstance(value[0], str)
            (ids if listed else whole)[key] = value
        with self._lock:
            whole["collectives"] = {place.name: place.count for place in self._registered}
            whole.update(ids)
            ledger.decision(whole)

    # --- groups

    def name_group(self, key: Hashable, name: str, ranks: Sequence[int] | None = None) -> None:
        """Process group ``key`` (or any word for it) is called ``name`` from its first collective on.

        A name that is taken gets a number: the same on all ranks, if they name their groups in one order.
        Without ``ranks`` torch is asked for them.
        """
        if key in self._keys:
            return
        taken = self._names.get(name, 0)
        self._names[name] = taken + 1
        unique = f"{name}-{taken}" if taken else name
        self._keys[key] = (unique, None if ranks is None else tuple(ranks))

    def naming(self, name: str | None) -> None:
        """Until it is called with None, process groups that this thread makes are called ``name``, the second one
        ``name.cpu``: engines make one for the device and one for the host."""
        self.thread.naming = name
        self.thread.named = 0

    def made_group(self, process_group: Any) -> None:
        """torch made ``process_group``, with this rank in it."""
        thread = self.thread
        if thread.naming is not None:
            self.name_group(process_group, thread.naming + (".cpu" if thread.named else ""))
            thread.named += 1

    def place(self, key: Hashable) -> Place | None:
        """The ledger's group for a process group (None: torch's default one). None: not recorded."""
        try:
            return self._places[key]
        except KeyError:
            return self._register(key)

    def pair(self, key: Hashable, source: int, target: int) -> Place | None:
        """As ``place``, for what ``source`` sends to ``target`` (global ranks): a sequence of its own."""
        between = (key, source, target)
        if between not in self._places:
            place = self.place(key)
            if place is None:
                return None
            self.name_group(between, f"{place.name}:{source}>{target}", (source, target))
        return self.place(between)

    def _register(self, key: Hashable) -> Place | None:
        ledger = self.ledger
        if ledger is None:
            return None
        if key is None:
            default = _default_group()
            return None if default is None else self._places.setdefault(None, self.place(default))
        name, ranks = self._keys.get(key, (None, None))
        if ranks is None:
            found = _members(key, self._seat)
            if found is None:
                return None
            ranks = found
        if name is None:
            name = _own_name(key)
            self.name_group(key, name, ranks)
            name = self._keys[key][0]
        place = None
        with self._lock:
            if key not in self._places and len(ranks) > 1:
                try:
                    place = Place(name, ranks, ledger.group(name, ranks))
                    self._registered.append(place)
                except LedgerError as error:
                    self._status.error(f"group {name} is not recorded: {error}")
            return self._places.setdefault(key, place)

    # --- collectives

    def begin(
        self, key: Hashable, operation: str, shape: Sequence[int] = (), dtype: str = ""
    ) -> Token | None:
        """This thread enters a collective. None: it is not recorded, or part of one that is."""
        if self.thread.inside:
            return None
        place = self.place(key)
        return None if place is None else self.enter(place, operation, shape, dtype)

    def enter(self, place: Place, operation: str, shape: Sequence[int], dtype: str) -> Token | None:
        """As ``begin``, where the place is known and the thread is in no other collective."""
        ledger = self.ledger
        if ledger is None:
            return None
        if self.captured is not None:
            self.captured[place] = self.captured.get(place, 0) + 1
            return None
        with self._lock:
            sequence = place.count = ledger.collective_enter(place.handle, operation, shape, dtype)
        self.thread.inside = True
        return place, sequence

    def replayed(self, place: Place, count: int) -> None:
        """A replay of a graph enqueued ``count`` collectives of ``place``."""
        ledger = self.ledger
        if ledger is not None:
            with self._lock:
                place.count = ledger.collective_enqueue(place.handle, "graph", (count,), "", count)
                ledger.collective_start(place.handle, place.count)
                self._deferred.append((place, place.count))

    def leave(self) -> None:
        """This thread left the collective that it entered, done or not."""
        self.thread.inside = False

    def complete(self, token: Token) -> None:
        """The collective is done. Any thread."""
        ledger = self.ledger
        if ledger is not None:
            with self._lock:
                ledger.collective_complete(token[0].handle, token[1])

    def end(self, token: Token | None) -> None:
        """``leave`` and ``complete``."""
        if token is not None:
            self.thread.inside = False
            self.complete(token)

    def defer(self, token: Token) -> None:
        """The device still works on it: it is done when what is recorded next on the device has passed."""
        with self._lock:
            self._deferred.append(token)

    def take_deferred(self) -> list[Token]:
        with self._lock:
            taken, self._deferred = self._deferred, []
            return taken

    # --- streams

    def enqueue(self, stream: str, label: str, site: str) -> int:
        """0 without a ledger."""
        ledger = self.ledger
        if ledger is None:
            return 0
        with self._lock:
            return ledger.enqueue(stream, label, site)

    def completed(self, stream: str, sequence: int) -> None:
        ledger = self.ledger
        if ledger is not None:
            with self._lock:
                ledger.complete(stream, sequence)

    def stamp(self, stream: str) -> None:
        ledger = self.ledger
        if ledger is not None:
            with self._lock:
                ledger.stamp(stream)


def _members(key: Hashable, seat: int | str | None) -> tuple[int, ...] | None:
    """Global ranks of a process group; None: not known (yet), () : this rank is not in it.

    An engine may run several worlds of torch side by side; ranks are then counted on from this one's seat.
    """
    import torch.distributed as dist

    if isinstance(key, str | tuple) or not dist.is_initialized():
        return None
    if key is dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    group: Any = key
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return ()
    offset = seat - dist.get_rank() if isinstance(seat, int) else 0
    return tuple(rank + offset for rank in ranks)


def _default_group() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def _own_name(key: Any) -> str:
    return "default" if key is _default_group() else f"pg.{key.group_name}"
