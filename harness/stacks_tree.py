"""Stacks of many ranks and samples as one prefix tree, and ranks grouped by what they do.

Pure. Identical stacks printed once a rank hide the one that differs; merged, the odd rank is a branch of its
own. Frames are merged by place, so a polling thread stays on one branch; the lines it was seen on are listed. A
thread that was elsewhere in another sample is on two branches, and each says in which samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.stacks import Frame, Place, ProcessStacks, ThreadStack

TREE_SCHEMA = 1


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A thread of a rank, or, with rank -1, of the process that ``other`` names."""

    rank: int
    role: str
    other: str = ""

    def words(self) -> str:
        return f"rank {self.rank} {self.role}" if self.rank >= 0 else f"{self.other} {self.role}"


@dataclass(frozen=True, slots=True)
class MergedFrame:
    """A place and the lines it was seen on, ascending."""

    name: str
    short_file: str
    lines: tuple[int, ...]

    def words(self) -> str:
        lines = ",".join(str(line) for line in self.lines if line)
        return f"{self.name} ({self.short_file}:{lines})" if lines else f"{self.name} ({self.short_file})"


@dataclass(frozen=True, slots=True)
class StackNode:
    """A chain of frames, outermost first, that all ``members`` share; ``children`` part there.

    The members of the children may be fewer: the others ended here. ``only_in``: members that were seen in
    further samples, but not here; and the samples in which they were here.
    """

    frames: tuple[MergedFrame, ...]
    members: frozenset[Member]
    children: tuple[StackNode, ...]
    only_in: Mapping[Member, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose threads of one role stand in the same place; ``frames`` of the lowest, innermost first."""

    role: str
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


class _Building:
    __slots__ = ("children", "lines", "name", "seen", "short_file")

    def __init__(self, name: str, short_file: str) -> None:
        self.name = name
        self.short_file = short_file
        self.lines: set[int] = set()
        self.seen: set[tuple[Member, int]] = set()
        self.children: dict[Place, _Building] = {}

    @property
    def members(self) -> frozenset[Member]:
        return frozenset(member for member, _ in self.seen)


def merge(*samples: Iterable[ProcessStacks]) -> tuple[StackNode, ...]:
    """One tree a starting frame, the most members first. Each argument is a sample of all processes."""
    root = _Building("", "")
    for number, processes in enumerate(samples):
        for process in processes:
            for thread in process.threads:
                member = _member(process, thread)
                at = root
                if thread.frames:
                    at.seen.add((member, number))
                for frame in reversed(thread.frames):
                    at = at.children.setdefault(frame.place, _Building(frame.name, frame.short_file()))
                    at.lines.add(frame.line)
                    at.seen.add((member, number))
    return _children(root, _samples_by_member(root))


def _samples_by_member(building: _Building) -> dict[Member, tuple[int, ...]]:
    found: dict[Member, list[int]] = {}
    for member, number in sorted(building.seen):
        found.setdefault(member, []).append(number)
    return {member: tuple(numbers) for member, numbers in found.items()}


def _member(process: ProcessStacks, thread: ThreadStack) -> Member:
    if isinstance(process.rank, int):
        return Member(process.rank, thread.role)
    return Member(-1, thread.role, process.rank or f"pid {process.pid}")


def _children(building: _Building, everywhere: Mapping[Member, tuple[int, ...]]) -> tuple[StackNode, ...]:
    nodes = (_node(child, everywhere) for child in building.children.values())
    return tuple(
        sorted(nodes, key=lambda node: (-len(node.members), sorted(node.members), node.frames[0].words()))
    )


def _node(building: _Building, everywhere: Mapping[Member, tuple[int, ...]]) -> StackNode:
    frames = []
    at = building
    while True:
        frames.append(MergedFrame(at.name, at.short_file, tuple(sorted(at.lines))))
        following = next(iter(at.children.values()), None)
        if following is None or len(at.children) > 1 or following.seen != at.seen:
            here = _samples_by_member(at)
            only_in = {member: numbers for member, numbers in here.items() if numbers != everywhere[member]}
            return StackNode(tuple(frames), at.members, _children(at, everywhere), only_in)
        at = following


def tree_to_json(roots: Iterable[StackNode]) -> dict[str, Any]:
    """The document ``evidence/merged.json``: one object a frame, chains spelt out. ``only_in`` is there where a
    thread was elsewhere in another sample."""
    return {"schema": TREE_SCHEMA, "roots": [_node_to_json(root) for root in roots]}


def _node_to_json(node: StackNode) -> dict[str, Any]:
    members = [member.words() for member in sorted(node.members)]
    children = [_node_to_json(child) for child in node.children]
    only_in = {member.words(): list(numbers) for member, numbers in sorted(node.only_in.items())}
    moved = {"only_in": only_in} if only_in else {}
    for frame in reversed(node.frames):
        children = [{"frame": frame.words(), "members": members, "children": children, **moved}]
    return children[0]


def groups(processes: Iterable[ProcessStacks]) -> tuple[StackGroup, ...]:
    """Per thread role, the ranks that stand in the same place: largest group first, the odd one last."""
    found: dict[tuple[str, tuple[Place, ...]], list[tuple[int, ThreadStack]]] = {}
    for rank, thread in _threads_of_ranks(processes):
        found.setdefault((thread.role, thread.place()), []).append((rank, thread))
    made = [
        StackGroup(
            role=role,
            ranks=tuple(sorted({rank for rank, _ in threads})),
            frames=min(threads, key=lambda one: one[0])[1].frames,
        )
        for (role, _), threads in found.items()
    ]
    return tuple(
        sorted(made, key=lambda group: (group.role != "host", group.role, -len(group.ranks), group.ranks))
    )


def _threads_of_ranks(processes: Iterable[ProcessStacks]) -> Iterator[tuple[int, ThreadStack]]:
    for process in processes:
        if isinstance(process.rank, int):
            for thread in process.threads:
                yield process.rank, thread
