"""What the flight recorders of the ranks show together: who waits, who never came, what differs. Pure.

Collectives are matched by process group and sequence number, point-to-point calls by their ends and number. Nearest
to the cause first: the ranks brought different things to one number; two groups were entered in two orders; some
ranks never entered what others wait in; all whose dump is there entered it, and a member has no dump; a rank has
enqueued it and its device does not come to it; everybody is inside, and nobody can be named.

A dump shows one moment, not necessarily the same one on every rank: a rank that comes late looks like one that
never comes, so what only counts show is supported at most. A rank whose dump is missing is suspected at most. What
one dump says is ``offline/flight_recorder.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.diagnosis_model import Cause, Collective, Confidence, Fact, Mechanism, Mismatch, Operation
from harness.offline.flight_groups import (
    Call,
    Party,
    calls_of,
    first_difference,
    jumped_ahead,
    kind_of,
    left_out,
    minority,
    off_pattern,
    parties_of,
    shown,
    sides_of,
    wait_of,
)
from harness.offline.flight_recorder import FlightDump, FlightEntry
from harness.waits import Wait, cycle_in


@dataclass(frozen=True, slots=True)
class FlightFinding:
    """``cause`` None: every collective that was entered is done, as far as the dumps go; then ``facts`` say so.
    ``pending_s``: for how long the oldest one is open, at least (until the newest time in any dump)."""

    cause: Cause | None
    facts: tuple[Fact, ...]
    pending_s: float


def flight_finding(
    dumps: Mapping[int, FlightDump], world: int, unreadable: frozenset[int] = frozenset()
) -> FlightFinding:
    """``dumps`` by rank. ``world``: how many ranks there are at least, by whatever else is known. ``unreadable``:
    ranks whose dump is there and damaged; that they have none says nothing of them."""
    parties = parties_of(dumps, world)
    found = tuple(wait for party in parties if (wait := wait_of(party, dumps)) is not None)
    calls = calls_of(parties, dumps)
    newest_ns = max((dump.newest_ns for dump in dumps.values()), default=0)
    scene = _Scene(dumps, parties, found, calls, newest_ns, unreadable)
    cause = (
        scene.mismatch()
        or scene.order()
        or scene.missing()
        or scene.absent()
        or scene.late()
        or scene.stuck()
        or scene.timed_out()
    )
    return FlightFinding(cause, scene.healthy_facts() if cause is None else (), scene.pending_s())


@dataclass(frozen=True, slots=True)
class _Scene:
    dumps: Mapping[int, FlightDump]
    parties: tuple[Party, ...]
    found: tuple[Wait, ...]
    calls: tuple[Call, ...]
    newest_ns: int
    unreadable: frozenset[int]

    # Rules -----------------------------------------------------------------------------------------------

    def mismatch(self) -> Cause | None:
        for wait in self.found:
            party = self._party(wait)
            sequence = first_difference(party, wait.sequence)
            if sequence is None:
                continue
            sides = sides_of(party, sequence)
            # A log has no history: a rank that left something out looks like one that brought another thing.
            complete = not (wait.unknown or self._logged(party))
            left = left_out(party, sequence)
            odd = left or off_pattern(party, sequence) or minority(sides)
            left = left or tuple(rank for rank in odd if jumped_ahead(party, rank, sequence))
            facts = [Fact(side.words(), self._path(side.ranks[0])) for side in sides]
            if sequence < wait.sequence:
                facts.append(
                    Fact(
                        f"collective {sequence} of group {party.words} is the first that differs, and it was "
                        "finished: what came after it is shifted, or its result is wrong",
                        self._path(sides[0].ranks[0]),
                    )
                )
            for rank in left:
                other = next(side for side in sides if rank not in side.ranks)
                said = (
                    f"rank {rank} brought to {sequence} what comes after {other.operation}: it left that out"
                )
                facts.append(Fact(said, self._path(rank)))
            kind = kind_of(sides)
            certain: Confidence = (
                "proven" if sequence == wait.sequence and complete and not left else "supported"
            )
            return Cause(
                kind="hang",
                mechanism="collective-skipped" if left else "collective-mismatch",
                ranks=odd,
                facts=(*facts, *self.wait_facts(wait)),
                confidence=certain if complete and len(odd) < len(party.states) else "supported",
                stream="comm",
                operation=self._operation(wait),
                collective=Collective(
                    party.words,
                    sequence,
                    sides[0].operation,
                    wait.waiting,
                    wait.missing,
                    Mismatch(kind, shown(sides)),
                ),
                family=kind,
                group=party.words,
            )  # fmt: skip
        return None

    def order(self) -> Cause | None:
        links = cycle_in(self.found)
        if not links:
            return None
        facts = [
            Fact(
                f"rank {link.rank} waits in {link.wait.operation} {link.wait.sequence} of group "
                f"{self._party(link.wait).words} for rank {link.following}, which "
                f"{'queued it behind another' if link.following in link.wait.late else 'has not come to it'}",
                self._path(link.rank),
            )
            for link in links
        ]
        first = links[0].wait
        sides = tuple(
            {
                "rank": link.rank,
                "group": self._party(link.wait).words,
                "sequence": link.wait.sequence,
                "operation": link.wait.operation,
            }
            for link in links
        )
        return self._hang_in(
            first,
            "collective-order",
            tuple(sorted(link.rank for link in links)),
            facts,
            "supported",
            Mismatch("order", sides),
        )

    def missing(self) -> Cause | None:
        """The ranks for which others wait, and that wait for nobody themselves."""
        behind = {rank for wait in self.found if wait.missing for rank in wait.waiting}
        behind_the_lost = {
            rank for wait in self.found if wait.unknown and not wait.missing for rank in wait.waiting
        }
        waiting = {*behind, *behind_the_lost, *(call.rank for call in self.calls)}
        for wait in sorted(self.found, key=lambda wait: len(wait.missing), reverse=True):
            roots = tuple(rank for rank in wait.missing if rank not in waiting)
            if not roots:
                continue
            # Who has no dump may be what those wait for that are behind; but these are seen to be behind.
            return self._hang_in(
                wait,
                "collective-skipped",
                roots,
                self.wait_facts(wait),
                "suspected" if wait.unknown else "supported",
            )
        return self._missing_peer(waiting)

    def _missing_peer(self, waiting: set[int]) -> Cause | None:
        for call in self.calls:
            if not call.known or call.peer in waiting:
                continue
            what = f"{call.entry.operation} {call.entry.sequence} of group {call.party.words}"
            other = "recv" if call.entry.operation == "send" else "send"
            return Cause(
                kind="hang",
                mechanism="collective-skipped",
                ranks=(call.peer,),
                facts=(
                    Fact(f"rank {call.rank} is in {what}, with rank {call.peer}", self._path(call.rank)),
                    Fact(f"rank {call.peer} has no {other} of that number", self._path(call.peer)),
                ),
                confidence="supported",
                stream="comm",
                operation=Operation(call.entry.operation, call.entry.sequence, call.entry.site, self.pending_s()),
                collective=Collective(
                    call.party.words, call.entry.sequence, call.entry.operation, (call.rank,), (call.peer,)
                ),
                family=call.entry.operation,
                group=call.party.words,
            )  # fmt: skip
        return None

    def absent(self) -> Cause | None:
        """A member of a group in which the others wait has left no dump."""
        lost = next((wait for wait in self.found if wait.unknown and not wait.late), None)
        if lost is None:
            return self._absent_peer()
        facts = self.wait_facts(lost)
        ranks = tuple(rank for rank in lost.unknown if rank not in self.unreadable)
        return self._hang_in(lost, "unknown", ranks, facts, "suspected")

    def _absent_peer(self) -> Cause | None:
        call = next((call for call in self.calls if not call.known), None)
        if call is None:
            return None
        what = f"{call.entry.operation} {call.entry.sequence} of group {call.party.words}"
        return Cause(
            kind="hang",
            mechanism="unknown",
            ranks=() if call.peer in self.unreadable else (call.peer,),
            facts=(
                Fact(f"rank {call.rank} is in {what}, with rank {call.peer}", self._path(call.rank)),
                Fact(self._no_dump(call.peer), ""),
            ),
            confidence="suspected",
            stream="comm",
            collective=Collective(
                call.party.words, call.entry.sequence, call.entry.operation, (call.rank,), ()
            ),
            family=call.entry.operation,
            group=call.party.words,
        )

    def late(self) -> Cause | None:
        """A device has not come to what the other devices are in: something before it is not done there."""
        for wait in self.found:
            if wait.late and wait.waiting:
                return self._hang_in(wait, "unknown", wait.late, self.wait_facts(wait), "suspected")
        return None

    def stuck(self) -> Cause | None:
        """All are inside, or one that is behind waits for others: nobody can be named."""
        if not self.found:
            return None
        wait = self.found[0]
        party = self._party(wait)
        facts = self.wait_facts(wait)
        if not wait.missing and self._logged(party) and party.words != "default_pg":
            said = (
                f"of the ranks whose word is here all entered {wait.operation} {wait.sequence}; a log does not say "
                f"who else is in group {party.words}"
            )
            facts.append(Fact(said, self._path(wait.waiting[0])))
        elif not wait.missing:
            facts.append(
                Fact(
                    f"every rank of group {party.words} entered {wait.operation} {wait.sequence}, and "
                    "it is not finished: nobody is missing, so who holds it up is not in the recorders",
                    self._path(wait.waiting[0]),
                )
            )
        return self._hang_in(wait, "unknown", (), facts, "suspected")

    def timed_out(self) -> Cause | None:
        """A log says that something timed out, and not what."""
        facts = [Fact(said, dump.path) for dump in self.dumps.values() for said in dump.said]
        return Cause("hang", "unknown", (), tuple(facts), "suspected", stream="comm") if facts else None

    def _hang_in(
        self,
        wait: Wait,
        mechanism: Mechanism,
        ranks: tuple[int, ...],
        facts: Sequence[Fact],
        confidence: Confidence,
        mismatch: Mismatch | None = None,
    ) -> Cause:
        """A hang that shows in ``wait``, whoever made it."""
        return Cause(
            kind="hang",
            mechanism=mechanism,
            ranks=ranks,
            facts=tuple(facts),
            confidence=confidence,
            stream="comm",
            operation=self._operation(wait),
            collective=self._collective(wait, mismatch),
            family=wait.operation,
            group=self._party(wait).words,
        )

    def _no_dump(self, rank: int) -> str:
        found = f"no dump from rank {rank}"
        return f"{found} that can be read" if rank in self.unreadable else found

    def _logged(self, party: Party) -> bool:
        return any(self.dumps[rank].by_log for rank in party.states)

    # Words -----------------------------------------------------------------------------------------------

    def wait_facts(self, wait: Wait) -> list[Fact]:
        party = self._party(wait)
        what = f"{wait.operation} {wait.sequence} of group {party.words}"
        facts = []
        for rank in wait.waiting:
            entry = party.entry(rank, wait.sequence)
            site = f", called at {entry.site}" if entry is not None and entry.site else ""
            since_s = self._since_s(entry)
            open_ = f" and has not finished it, for {since_s:.1f} s or more" if since_s >= 0.1 else ""
            facts.append(
                Fact(
                    f"rank {rank} entered {what}{open_ or ' and has not finished it'}{site}", self._path(rank)
                )
            )
        for rank in wait.missing:
            last = party.states[rank].enqueued if rank in party.states else 0
            said = f"its last one there is {last}" if last else "it has entered none there"
            facts.append(Fact(f"rank {rank} never entered {what}: {said}", self._path(rank)))
        facts += [
            Fact(f"rank {rank} has enqueued {what}, and its device has not started it", self._path(rank))
            for rank in wait.late
        ]
        facts += [
            Fact(f"{self._no_dump(rank)}, a member of group {party.words}", "") for rank in wait.unknown
        ]
        return facts

    def healthy_facts(self) -> tuple[Fact, ...]:
        facts = []
        for party in self.parties:
            counts = ", ".join(
                f"rank {rank} {state.completed}" for rank, state in sorted(party.states.items())
            )
            first = next(iter(sorted(party.states)))
            said = f"group {party.words}: every collective that was entered is finished (last: {counts})"
            facts.append(Fact(said, self._path(first)))
        return tuple(facts)

    def pending_s(self) -> float:
        open_ = [
            self._since_s(self._party(wait).entry(rank, wait.sequence))
            for wait in self.found
            for rank in wait.waiting
        ]
        open_ += [self._since_s(call.entry) for call in self.calls]
        return round(max(open_, default=0.0), 3)

    def _since_s(self, entry: FlightEntry | None) -> float:
        if entry is not None and entry.lasted_s:
            return entry.lasted_s
        if entry is None or not entry.created_ns or self.newest_ns <= entry.created_ns:
            return 0.0
        return (self.newest_ns - entry.created_ns) / 1e9

    def _operation(self, wait: Wait) -> Operation:
        party = self._party(wait)
        entries = [entry for rank in wait.waiting if (entry := party.entry(rank, wait.sequence)) is not None]
        site = next((entry.site for entry in entries if entry.site), "")
        pending_s = max((self._since_s(entry) for entry in entries), default=0.0)
        return Operation(wait.operation, wait.sequence, site, round(pending_s, 3))

    def _collective(self, wait: Wait, mismatch: Mismatch | None = None) -> Collective:
        words = self._party(wait).words
        return Collective(words, wait.sequence, wait.operation, wait.waiting, wait.missing, mismatch)

    def _party(self, wait: Wait) -> Party:
        return next(
            party
            for party in self.parties
            if party.name == wait.group and set(party.states) & set(wait.waiting)
        )

    def _path(self, rank: int) -> str:
        return self.dumps[rank].path if rank in self.dumps else ""
