"""What the ledgers of all ranks prove at one moment, and who keeps all others waiting without doing anything. Pure.

One function a proof: it takes the scene and gives a finding, or nothing. What ranks owe and how long they stand is
in their tracks; what a finding leads to, and the budgets, are the watchdog's. The facts behind the proofs are read
in ``waits.py``, ``blocked.py``, ``knots.py`` and ``lost_records.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.blocked import blocked
from harness.budgets import WatchdogSettings
from harness.held import host_is_held
from harness.knots import registration, standing_in
from harness.ledger_snapshot import Snapshot
from harness.lost_records import Hosts, LostRecord, lost_record
from harness.seats import Seat, seats_words
from harness.standing import Reason, Road
from harness.stillness import STALE_STAMP_S, streams_unknown
from harness.track import Quiet, Track
from harness.waits import GRAPH_PREFIX, Wait, cycle_in, entered, waits

_TO_GO_ON_S = 0.2
"""What a stream's thread may need to see an event, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``ranks`` do not move, which is no blame. ``proof``: facts in order."""

    reason: Reason
    road: Road
    ranks: tuple[Seat, ...]
    proof: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """All ranks as they were followed until now. ``widening``: by how much budgets widen, because the observer
    starves; ``budget_s``: what a rank may stand still where it stands."""

    tracks: Mapping[int, Track]
    settings: WatchdogSettings
    world: int
    now_ns: int
    widening: float
    budget_s: Callable[[int], float]

    def waits(self) -> tuple[Wait, ...]:
        return waits({rank: t.snapshot for rank, t in self.tracks.items() if t.snapshot is not None})

    def ended(self) -> frozenset[int]:
        """Ranks whose task is over and that do not move."""
        return frozenset(rank for rank, track in self.tracks.items() if track.done and self.stands(rank))

    def stands(self, rank: int) -> bool:
        """Its ledger has not moved for as long as a proof takes, whether or not it still owes anything."""
        unmoved_s = (self.now_ns - self.tracks[rank].moved_ns) / 1e9
        return unmoved_s >= self.settings.proof_still_s * self.widening

    def standing_still(self) -> dict[int, Snapshot]:
        """Of ranks that owe something and have not moved for as long as a proof takes; those are out whose
        processes do not run, or whose streams have work left that nobody has looked at lately."""
        return {
            rank: track.snapshot
            for rank, track in sorted(self.tracks.items())
            if track.snapshot is not None
            and not track.excused
            and track.still_s >= self.settings.proof_still_s
            and track.state in ("running", "sleeping")
            and not (has_work(track.snapshot) and not _looked_since(track.snapshot, track.still_s))
        }


def by_ledgers(scene: Scene) -> Finding | None:
    """The first proof that the ledgers give, if they give one."""
    found = scene.waits()
    for wait in found:
        finding = _never_comes(scene, wait) or _mismatch(scene, wait)
        if finding is not None:
            return finding
    return (
        _registration(scene, found)
        or _blocked(scene, found)
        or _cycle(scene, found)
        or _side_streams(scene, found)
        or _lost_record(scene, found)
        or next((finding for wait in found if (finding := _left_queued(scene, wait)) is not None), None)
    )


def _never_comes(scene: Scene, wait: Wait) -> Finding | None:
    """A member that will not enter: its task is over, or it waits for the driver."""
    settings = scene.settings
    still_s = min((scene.tracks[rank].still_s for rank in wait.waiting), default=0.0)
    over = [rank for rank in wait.missing if scene.tracks[rank].done]
    # The driver starts the ranks one after the other, so parked peers are normal for a moment; a longer one
    # where it starves as the observer does.
    patience_s = settings.floor_s * scene.widening
    parked = [rank for rank in wait.missing if scene.tracks[rank].parked_s >= patience_s]
    if over and still_s >= settings.proof_still_s:
        absent, why = over, "its task is over"
    elif parked and still_s >= patience_s:
        absent, why = parked, "its host is parked"
    else:
        return None
    facts = (
        f"{seats_words(wait.waiting)} in {wait.operation} {wait.sequence} of group {wait.group}",
        *(f"rank {rank} never entered it and {why}" for rank in absent),
    )
    return Finding("collective", "proof", wait.waiting, facts)


def _left_queued(scene: Scene, wait: Wait) -> Finding | None:
    """What a rank left queued when its task ended may still be carried out, but not once it stands as those do
    that wait there."""
    waiting = tuple(rank for rank in wait.waiting if not scene.tracks[rank].done)
    left = [rank for rank in (*wait.late, *wait.waiting) if scene.tracks[rank].done and scene.stands(rank)]
    if not waiting or not left:
        return None
    if min(scene.tracks[rank].still_s for rank in waiting) < scene.settings.proof_still_s:
        return None
    facts = (
        f"{seats_words(waiting)} in {wait.operation} {wait.sequence} of group {wait.group}",
        *(f"rank {rank} left it queued, its task is over and it does not move" for rank in left),
    )
    return Finding("collective", "proof", waiting, facts)


def _mismatch(scene: Scene, wait: Wait) -> Finding | None:
    if not wait.mismatched:
        return None
    if min(scene.tracks[rank].still_s for rank in wait.waiting) < scene.settings.proof_still_s:
        return None
    facts = (
        f"group {wait.group}, collective {wait.sequence}: the ranks brought a different "
        f"{wait.mismatch_kind()}",
        *(side.words() for side in wait.sides),
    )
    return Finding("mismatch", "proof", wait.waiting, facts)


def _cycle(scene: Scene, found: tuple[Wait, ...]) -> Finding | None:
    links = cycle_in(found)
    if not links:
        return None
    facts = []
    for link in links:
        wait, following = link.wait, link.following
        # A peer that has not even enqueued may still compute and come: it is owed its own budget.
        snapshot = scene.tracks[following].snapshot
        may_come = following in wait.missing and not (
            snapshot is not None and host_is_held(following, snapshot, found)
        )
        needed_s = scene.budget_s(following) if may_come else scene.settings.proof_still_s
        if scene.tracks[following].still_s < needed_s:
            return None
        facts.append(f"rank {link.rank} waits in {wait.group} {wait.sequence} for rank {following}")
    return Finding("cycle", "proof", tuple(sorted(link.rank for link in links)), tuple(facts))


def _blocked(scene: Scene, found: tuple[Wait, ...]) -> Finding | None:
    """Hosts inside synchronisations or collectives, behind streams that need each other's hosts."""
    if not any(wait.missing or wait.late for wait in found):
        return None
    still = scene.standing_still()
    if not still:
        return None
    stuck = blocked(still, found, ended=scene.ended())
    return None if stuck is None else Finding("cycle", "proof", stuck.hosts, stuck.facts)


def _registration(scene: Scene, found: tuple[Wait, ...]) -> Finding | None:
    """Ranks register memory, and those that they wait for stand in a collective that needs the registering."""
    knot = registration(found)
    if knot is None:
        return None
    proof_s = scene.settings.proof_still_s
    for held in knot.held:
        # Inside a replay a peer may still be on its way to the registration.
        needed_s = proof_s if held.certain else scene.budget_s(held.rank)
        if scene.tracks[held.rank].still_s < needed_s:
            return None
    if any(scene.tracks[rank].still_s < proof_s for rank in knot.wait.waiting):
        return None
    facts = (
        f"{seats_words(knot.wait.waiting)} in {knot.wait.operation} {knot.wait.sequence} of group "
        f"{knot.wait.group}",
        *(
            f"rank {held.rank} is not: it waits in {held.behind.operation} {held.behind.sequence} of group "
            f"{held.behind.group} for rank {held.needed}"
            for held in knot.held
        ),
    )
    ranks = (*knot.wait.waiting, *(held.rank for held in knot.held))
    return Finding("registration", "proof", tuple(sorted(ranks)), facts)


def _side_streams(scene: Scene, found: tuple[Wait, ...]) -> Finding | None:
    """All members stand in the group, and a rank has its collectives on two streams."""
    for wait in found:
        if wait.missing or wait.late or wait.unknown:
            continue
        if any(scene.tracks[rank].still_s < scene.settings.proof_still_s for rank in wait.waiting):
            continue
        snapshots = {rank: scene.tracks[rank].snapshot for rank in wait.waiting}
        beside = standing_in({r: s for r, s in snapshots.items() if s is not None}, wait.group)
        if beside:
            facts = tuple(
                f"rank {rank}: unfinished collectives of group {wait.group} on {' and '.join(streams)}"
                for rank, streams in beside.items()
            )
            return Finding("side-streams", "proof", wait.waiting, facts)
    return None


def _lost_record(scene: Scene, found: tuple[Wait, ...]) -> Finding | None:
    """A replay is short of a record, and every host of the trial waits for what only it can bring."""
    owing = {rank: track for rank, track in sorted(scene.tracks.items()) if not track.excused}
    snapshots = {rank: track.snapshot for rank, track in owing.items() if track.snapshot is not None}
    if len(scene.tracks) < scene.world or len(snapshots) < len(owing):
        return None
    if any(wait.operation.startswith(GRAPH_PREFIX) and wait.missing for wait in found):
        return None  # the replay may stand for want of that member
    if any(
        track.still_s < scene.settings.proof_still_s or track.state not in ("running", "sleeping")
        for track in owing.values()
    ) or any(streams_unknown(snapshot) for snapshot in snapshots.values()):
        return None
    hosts = Hosts.of(snapshots)
    for rank, snapshot in snapshots.items():
        lost = lost_record(snapshot)
        if lost is not None and not lost.doubt and hosts.bring_no_update(rank, lost):
            facts = (*_lost_facts(rank, lost), *(_host_words(r, s) for r, s in snapshots.items()))
            return Finding("lost-record", "proof", tuple(snapshots), facts)
    return None


def _lost_facts(rank: int, lost: LostRecord) -> tuple[str, ...]:
    event = lost.events[0]
    which = f", number {lost.number} of that graph" if lost.number else ""
    return (
        f"rank {rank}: compute stands in {lost.replay.label}{which}",
        f"rank {rank}: external event {event.name!r} has {event.records} records, {event.overtaken} of them "
        f"made before the one before was consumed (first: {event.first_overtaken}), and {event.waits} waits by "
        "completed replays; no update is queued",
    )


def _host_words(rank: int, snapshot: Snapshot) -> str:
    host = snapshot.host
    return (
        f"rank {rank}: the host waits in phase {host.phase!r} of step {host.step} and cannot queue an update"
    )


def by_idleness(scene: Scene) -> Finding | None:
    """All ranks wait for some that do nothing at all: no budget of theirs need be known for that."""
    settings = scene.settings
    needed_s = max(settings.idle_s, settings.floor_s) * scene.widening
    idle = [
        rank
        for rank, track in sorted(scene.tracks.items())
        if _quiet(track).seconds >= needed_s and not track.excused and _could_go_on(scene, track)
    ]
    if not idle or len(scene.tracks) < scene.world:
        return None
    frozen = [rank for rank in idle if _frozen(scene.tracks[rank].snapshot)]
    stuck = blocked(scene.standing_still(), scene.waits(), ended=scene.ended(), assumed=idle, frozen=frozen)
    owing = {rank for rank, track in scene.tracks.items() if not track.excused}
    if stuck is None or not owing <= set(stuck.hosts):
        return None
    facts = (_idle_words(rank, scene.tracks[rank]) for rank in idle)
    return Finding("stalled", "budget", tuple(sorted(owing)), (*facts, *stuck.facts))


def _could_go_on(scene: Scene, track: Track) -> bool:
    """By its ledger the host waits for nobody and its streams have nothing left, as far as that is known; and it is
    in no phase of patience."""
    snapshot = track.snapshot
    if snapshot is None or track.phase in scene.settings.patient_phases:
        return False
    if _frozen(snapshot):
        return True
    inside = any(entered(snapshot, state) for state in snapshot.groups.values())
    return not inside and not has_work(snapshot)


def _frozen(snapshot: Snapshot | None) -> bool:
    """Its streams had somebody who looked at them, and have not any more: no thread of the process runs, so what
    the ledger says of its streams and collectives is old."""
    if snapshot is None or not has_work(snapshot) or not streams_unknown(snapshot):
        return False
    return any(stream.stamp_ns for stream in snapshot.streams.values())


def has_work(snapshot: Snapshot) -> bool:
    """Something is left on its streams, as far as anybody has looked."""
    return any(stream.busy for stream in snapshot.streams.values())


def _looked_since(snapshot: Snapshot, still_s: float) -> bool:
    """Somebody has looked at its streams well after the rank last moved: its threads run, and what they could do by
    then is done. Where the interpreter's lock is kept, a stream may not even go on from an event that has come."""
    newest_ns = max((stream.stamp_ns for stream in snapshot.streams.values()), default=snapshot.taken_ns)
    return snapshot.taken_ns - newest_ns <= min(STALE_STAMP_S, still_s - _TO_GO_ON_S) * 1e9


def _quiet(track: Track) -> Quiet:
    return track.host_quiet if _frozen(track.snapshot) else track.quiet


def _idle_words(rank: int, track: Track) -> str:
    if _frozen(track.snapshot):
        streams, whose = "nobody looks at its streams", "it"
    else:
        streams, whose = "nothing is left on its streams", "its processes"
    return (
        f"rank {rank}: nothing moved for {track.still_s:.1f} s in phase {track.phase!r}; {streams}, its host "
        f"sleeps, and {whose} got {_quiet(track).cpu_s:.2f} s of a processor meanwhile"
    )
