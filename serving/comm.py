"""The groups of one rank for one trial, each made when it is first used.

All communication of the engine passes here, so that every collective has a group, a sequence number, an
operation, a shape and a dtype in the ledger. Control messages (the agreement of the ranks) use groups of their own.

Not here: who is in which group (``groups.py``), what a group does (``collectives.py``).
"""

from __future__ import annotations

from harness import faults
from harness.devices.base import Device, Graph
from harness.ledger import LedgerWriter
from serving.collectives import CommError, CommOptions, Group
from serving.groups import REGISTRATION, ProcessGroups, of_the_device

__all__ = ["Comm", "CommError", "CommOptions", "Group"]


class Comm:
    """The groups of one rank for one trial. ``token`` keeps the shared files of trials apart."""

    def __init__(
        self,
        options: CommOptions,
        device: Device,
        ledger: LedgerWriter | None,
        backends: ProcessGroups,
        token: str,
    ) -> None:
        self.options = options
        self.topology = options.topology
        self._device = device
        self._ledger = ledger
        self._backends = backends
        self._token = token
        self._closed = False
        self._groups: dict[str, Group] = {}
        for name in ("agree", "experts"):
            self.group(name)

    def group(self, name: str) -> Group:
        """The group of that name, made at its first use: the ledger lists the groups that a trial uses. Host
        thread. Raises GroupError for a name that ``groups.py`` does not have."""
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = self._create_communicator(name)
        return found

    def _create_communicator(self, name: str) -> Group:
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.create", group=name)
        members = self.topology.members(name)
        symmetric = self.options.symmetric and name == "experts" and len(members) > 1
        group = Group(
            name,
            members,
            self.options,
            self._device,
            self._ledger,
            self._backends.get(name),
            self._token,
            self.closed,
            self.group,
            self.group(REGISTRATION) if symmetric else None,
        )
        moves_data = of_the_device(name) and len(members) > 1 and not symmetric
        if moves_data and self.options.carrier.enqueues and self._backends.first_use(name):
            group.connect()
        return group

    def closed(self) -> bool:
        return self._closed

    def counts(self) -> dict[str, int]:
        """How many collectives this rank has enqueued or entered in each group that it uses. Host thread; without
        registrations, which come when a stream needs them."""
        return {name: group.count for name, group in self._groups.items() if name != REGISTRATION}

    def capture_begins(self) -> None:
        """Call before a capture: what every group enqueues from now on belongs to the graph."""
        for group in self._groups.values():
            group.capture_begins()

    def capture_ended(self, graph: Graph) -> None:
        for group in self._groups.values():
            group.capture_ended(graph)

    def replayed(self, graph: Graph) -> None:
        """Call right after ``device.replay(graph)``: advances each group by what the graph captured."""
        for group in self._groups.values():
            group.replayed(graph)

    def shut(self) -> None:
        """Makes every wait for a peer give up, so that stream threads can be joined."""
        self._closed = True

    def close(self) -> None:
        self._closed = True
        for group in self._groups.values():
            group.close()
