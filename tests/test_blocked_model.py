"""What ``blocked`` claims, held against a small model of ranks that run: whoever it names never moves again, and
when nothing can move any more it names every host that is not through."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

import pytest
from ledger_builder import Group, Rank, Stream

from harness.blocked import Blocked, blocked
from harness.waits import waits

Action: TypeAlias = tuple[str, str]
"""``kernel STREAM``, ``collective GROUP`` (on comm, with events before and after it), ``copy``, ``sync STREAM``,
``meet GROUP`` (on the host)."""
Operation: TypeAlias = tuple[str, str, int]
"""``kernel``, ``event STREAM SEQUENCE`` or ``collective GROUP NUMBER``."""

DEVICE_GROUPS, HOST_GROUPS = ("experts", "stats"), ("agree",)


@dataclass
class Process:
    program: list[Action]
    at: int = 0
    streams: dict[str, list[Operation]] = field(
        default_factory=lambda: {name: [] for name in ("compute", "copy", "comm")}
    )
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("compute", "copy", "comm"), 0))
    enqueued: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*DEVICE_GROUPS, *HOST_GROUPS), 0))
    completed: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((*DEVICE_GROUPS, *HOST_GROUPS), 0)
    )
    waits_for: tuple[str, int] | None = None
    meets: str = ""

    @property
    def over(self) -> bool:
        return self.at == len(self.program) and all(len(s) == self.done[n] for n, s in self.streams.items())

    def head(self, stream: str) -> Operation | None:
        queue = self.streams[stream]
        return queue[self.done[stream]] if self.done[stream] < len(queue) else None

    def put(self, stream: str, *operation: str | int) -> None:
        name, what, number = (*operation, "", 0)[:3]
        self.streams[stream].append((str(name), str(what), int(number)))

    def inside(self, group: str) -> int:
        """The highest collective of the group that it has entered."""
        if group in HOST_GROUPS:
            return self.enqueued[group]
        head = self.head("comm")
        within = head is not None and head[:2] == ("collective", group)
        return self.completed[group] + within


class World:
    def __init__(self, programs: list[list[Action]], random: Random) -> None:
        self.processes = [Process(program) for program in programs]
        self._random = random

    def step(self) -> bool:
        """One thing happens, if anything can."""
        able = [(rank, what) for rank in range(len(self.processes)) for what in self._able(rank)]
        if not able:
            return False
        rank, what = self._random.choice(able)
        if what == "host":
            self._host(self.processes[rank])
        else:
            self._complete(self.processes[rank], what)
        return True

    def _able(self, rank: int) -> list[str]:
        process = self.processes[rank]
        found = ["host"] if self._host_can(process) else []
        return found + [name for name in process.streams if self._stream_can(process, name)]

    def _host_can(self, process: Process) -> bool:
        if process.waits_for is not None:
            stream, sequence = process.waits_for
            return process.done[stream] >= sequence
        if process.meets:
            number = process.enqueued[process.meets]
            return all(other.enqueued[process.meets] >= number for other in self.processes)
        return process.at < len(process.program)

    def _stream_can(self, process: Process, name: str) -> bool:
        head = process.head(name)
        if head is None:
            return False
        kind, what, number = head
        if kind == "event":
            return process.done[what] >= number
        if kind == "collective":
            return all(other.inside(what) >= number for other in self.processes)
        return True

    def _host(self, process: Process) -> None:
        if process.waits_for is not None or process.meets:
            if process.meets:
                process.completed[process.meets] += 1
            process.waits_for, process.meets = None, ""
            process.at += 1
            return
        kind, what = process.program[process.at]
        if kind == "sync":
            process.waits_for = (what, len(process.streams[what]))
            return
        if kind == "meet":
            process.enqueued[what] += 1
            process.meets = what
            return
        process.at += 1
        if kind == "kernel":
            process.put(what, "kernel")
        elif kind == "copy":
            process.put("copy", "event", "compute", len(process.streams["compute"]))
            process.put("copy", "kernel")
        else:
            process.enqueued[what] += 1
            process.put("comm", "event", "compute", len(process.streams["compute"]))
            process.put("comm", "collective", what, process.enqueued[what])
            process.put("compute", "event", "comm", len(process.streams["comm"]))

    def _complete(self, process: Process, name: str) -> None:
        head = process.head(name)
        assert head is not None
        process.done[name] += 1
        if head[0] == "collective":
            process.completed[head[1]] += 1

    @property
    def settled(self) -> bool:
        """No stream stands in a wait for an event that has come: it takes no time to go on, and ranks are judged
        only when they were seen to stand still. Kernels and hosts may take any."""
        heads = ((one, name, one.head(name)) for one in self.processes for name in one.streams)
        return not any(
            head is not None and head[0] == "event" and self._stream_can(one, name)
            for one, name, head in heads
        )

    def look(self) -> Blocked | None:
        ranks = [self._rank(number) for number in range(len(self.processes))]
        snapshots = {rank.rank: rank.snapshot() for rank in ranks}
        ended = [number for number, process in enumerate(self.processes) if process.over]
        still = {number: one for number, one in snapshots.items() if number not in ended}
        return blocked(still, waits(snapshots), ended=ended)

    def _rank(self, number: int) -> Rank:
        process, everybody = self.processes[number], tuple(range(len(self.processes)))
        rank = Rank(number, len(everybody), phase="launch", host_wait=process.waits_for)
        for name, queue in process.streams.items():
            labels = [_label(operation) for operation in queue]
            rank.streams[name] = Stream([(label, 1) for label in labels], done=process.done[name])
        for group, count in process.enqueued.items():
            state = rank.groups[group] = Group(everybody, host=group in HOST_GROUPS)
            for _ in range(count):
                state.add("all_reduce")
            state.done, state.started = process.completed[group], process.inside(group)
        return rank


def _label(operation: Operation) -> str:
    kind, what, _ = operation
    return {"event": "event.wait", "collective": f"all_reduce {what}"}.get(kind, "gemm")


def programs(random: Random, world: int) -> list[list[Action]]:
    """All ranks do the same; in three cases of four one of them leaves something out, doubles or moves it."""
    kinds: list[Action] = [
        ("kernel", "compute"), ("kernel", "copy"), ("copy", ""), ("collective", "experts"),
        ("collective", "experts"), ("collective", "stats"), ("sync", "compute"), ("sync", "copy"),
        ("meet", "agree"),
    ]  # fmt: skip
    common = [random.choice(kinds) for _ in range(random.randint(3, 24))]
    common.append(("sync", "comm"))
    each = [list(common) for _ in range(world)]
    odd, how = random.choice(each), random.choice(("well", "leave out", "double", "move"))
    together = [at for at, (kind, _) in enumerate(odd) if kind in ("collective", "meet")]
    if how != "well" and together:
        at = random.choice(together)
        action = odd[at] if how == "double" else odd.pop(at)
        if how != "leave out":
            odd.insert(random.randint(0, len(odd)), action)
    return each


@pytest.mark.parametrize("world", [2, 3, 4])
def test_whoever_is_named_never_moves_again_and_in_the_end_all_are_named(world: int) -> None:
    hung = named_before_the_end = 0
    for seed in range(150):
        random = Random(f"{world} {seed}")
        run = World(programs(random, world), random)
        claims: list[tuple[int, int, bool]] = []  # rank, where its host stood, at the end
        moving = True
        while moving:
            stuck = run.look() if run.settled else None
            moving = run.step()
            for rank in stuck.hosts if stuck is not None else ():
                claims.append((rank, run.processes[rank].at, not moving))
        unfinished = {rank for rank, one in enumerate(run.processes) if one.at < len(one.program)}
        for rank, at, _ in claims:
            assert run.processes[rank].at == at, f"seed {seed}: rank {rank} was said to stand and went on"
        named = {rank for rank, _, at_the_end in claims if at_the_end}
        assert named == unfinished, f"seed {seed}"
        hung += bool(unfinished)
        named_before_the_end += any(not at_the_end for *_, at_the_end in claims)
    assert 30 < hung < 145 and named_before_the_end > 10
