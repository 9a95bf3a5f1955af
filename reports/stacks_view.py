"""The merged stack tree (evidence/merged.json) arranged for reading: what all share first, then who differs.

Pure, no markup. Threads of one role are compared over ranks: the hosts with the hosts, a stream's threads with its
own kind; the engine's further threads and the processes that ranks started follow. Where a thread moved between the
samples it stands in both places, each with its sample.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from reports import fields
from reports.fields import Document
from reports.words import ranges

MAX_DEPTH = 60
"""Levels at which threads part; a stack's own length does not count. Templates nest no deeper than this."""

HOST = "host"
_ROLES = (HOST, "compute", "copy", "comm", "update")
_OTHER_THREADS = "other threads"
_CHILDREN = "processes that ranks started"
_MEMBER = re.compile(
    r"(?P<name>rank (?P<rank>\d+)|child \d+ of (?:rank \d+|\S+)|pid \d+|\S+) (?P<role>.*)", re.DOTALL
)
_SHOWN_ABOVE = 3
"""Frames shown of a part that threads share before they part; those further out are folded."""
_SHOWN_LAST = 8
_LIBRARY = re.compile(r"\((?:[^/()]*|(?:multiprocessing|concurrent|asyncio|importlib)/.*)\)$")
_WHEN = ("in the first sample", "in the second sample")


@dataclass(frozen=True, slots=True)
class Where:
    """One place in which threads stand. ``when`` is empty for those that stayed. ``odd``: others of their kind are
    more."""

    who: str
    frame: str
    when: str
    odd: bool
    culprit: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """Frames that ``who`` share, outermost first; ``outer`` are those further out. They part in ``children``;
    ``end`` are those that end here while others go on."""

    who: str
    when: str
    outer: tuple[str, ...]
    frames: tuple[str, ...]
    odd: bool
    culprit: bool
    children: tuple[Branch, ...]
    end: str


@dataclass(frozen=True, slots=True)
class Section:
    """All threads of one kind. ``differ``: not all stand in one place; ``moved``: who left it meanwhile."""

    title: str
    who: str
    places: tuple[Where, ...]
    branches: tuple[Branch, ...]
    differ: bool
    moved: str

    @property
    def plain(self) -> bool:
        """The same thread of each rank, so that their places can be compared."""
        return self.title in _ROLES


@dataclass(frozen=True, slots=True)
class _Member:
    words: str
    name: str
    rank: int | None
    role: str

    @property
    def section(self) -> str:
        if self.name.startswith("child "):
            return _CHILDREN
        return self.role if self.role in _ROLES else _OTHER_THREADS


@dataclass(frozen=True, slots=True)
class _Node:
    """As the document has it, chains joined, of one section's members. ``here``: members in which samples; no entry
    for those that did not move."""

    frames: tuple[str, ...]
    members: frozenset[_Member]
    here: frozenset[tuple[_Member, tuple[int, ...]]]
    children: tuple[_Node, ...]


def sections(merged: Document, culprits: Collection[int | str] = ()) -> tuple[Section, ...]:
    """``culprits``: ranks and names of the processes that the diagnosis blames."""
    roots = fields.rows(merged, "roots")
    everyone = {_member(words) for root in roots for words in fields.texts(root, "members")}
    found = []
    for title in (*_ROLES, _OTHER_THREADS, _CHILDREN):
        members = frozenset(member for member in everyone if member.section == title)
        if members:
            found.append(_section(title, members, roots, culprits))
    return tuple(found)


def members_text(members: Iterable[str]) -> str:
    """``("rank 0 compute", "rank 1 compute")`` as ``compute of ranks 0, 1``; others as they are named."""
    threads: dict[str, set[int]] = {}
    named: list[str] = []
    for member in map(_member, members):
        if member.rank is None:
            named.append(member.words)
        else:
            threads.setdefault(member.role, set()).add(member.rank)
    named += [f"{thread} of {ranges(numbers)}" for thread, numbers in threads.items()]
    return "; ".join(named)


def _member(words: str) -> _Member:
    match = _MEMBER.fullmatch(words)
    if match is None:
        return _Member(words, words, None, "")
    rank = match["rank"]
    return _Member(words, match["name"], None if rank is None else int(rank), match["role"])


def _section(
    title: str, members: frozenset[_Member], roots: Iterable[Document], culprits: Collection[int | str]
) -> Section:
    nodes = tuple(node for root in roots if (node := _node(root, members, MAX_DEPTH)) is not None)
    plain = title in _ROLES
    places = _places(nodes, (), culprits, plain)
    moved = {member for node in _all_nodes(nodes) for member, _ in node.here}
    return Section(
        title=title,
        who=_who(members, plain),
        places=places,
        branches=_branches(nodes, culprits, plain),
        differ=len(places) > 1,
        moved=_who(frozenset(moved), plain) if moved else "",
    )


def _node(document: Document, members: frozenset[_Member], depth: int) -> _Node | None:
    """None where nobody of ``members`` came."""
    frames: list[str] = []
    at = document
    while True:
        frames.append(fields.text(at, "frame", "?"))
        own = frozenset(map(_member, fields.texts(at, "members"))) & members
        only = fields.table(at, "only_in")
        here = frozenset(
            (member, fields.integers(only, member.words)) for member in own if member.words in only
        )
        below = [child for child in fields.rows(at, "children") if _reaches(child, members)]
        if not own:
            return None
        if len(below) == 1 and frozenset(map(_member, fields.texts(below[0], "members"))) & members == own:
            following = fields.table(below[0], "only_in")
            if {member.words for member in own} & set(following) == {member.words for member, _ in here}:
                at = below[0]
                continue
        break
    if depth == 0:
        return _Node((*frames, "... deeper frames left out"), own, here, ())
    children = tuple(node for child in below if (node := _node(child, members, depth - 1)) is not None)
    return _Node(tuple(frames), own, here, children)


def _reaches(document: Document, members: frozenset[_Member]) -> bool:
    return any(_member(words) in members for words in fields.texts(document, "members"))


def _all_nodes(nodes: Iterable[_Node]) -> Iterable[_Node]:
    for node in nodes:
        yield node
        yield from _all_nodes(node.children)


def _places(
    nodes: tuple[_Node, ...], above: tuple[str, ...], culprits: Collection[int | str], plain: bool
) -> tuple[Where, ...]:
    """Where the threads end, the place of most threads first."""
    ends: dict[tuple[str, tuple[int, ...]], set[_Member]] = {}
    for frame, when, member in _ends(nodes, above):
        ends.setdefault((frame, when), set()).add(member)
    most = max((len(members) for members in ends.values()), default=0)
    rows = sorted(ends.items(), key=lambda row: (-len(row[1]), row[0][1], row[0][0]))
    return tuple(
        Where(
            _who(frozenset(members), plain),
            frame,
            _when(when),
            odd=len(members) < most,
            culprit=len(rows) > 1 and _guilty(members, culprits),
        )
        for (frame, when), members in rows
    )


def _ends(nodes: Iterable[_Node], above: tuple[str, ...]) -> Iterable[tuple[str, tuple[int, ...], _Member]]:
    for node in nodes:
        path = (*above, *node.frames)
        when = dict(node.here)
        deeper: dict[_Member, set[int] | None] = {}
        for child in node.children:
            seen = dict(child.here)
            for member in child.members:
                known = deeper.get(member, set())
                numbers = seen.get(member)
                deeper[member] = None if numbers is None or known is None else known | set(numbers)
        for member in node.members:
            if member not in deeper:
                yield _telling(path), when.get(member, ()), member
        yield from _ends(node.children, path)


def _telling(path: tuple[str, ...]) -> str:
    """The innermost frame that is not of Python's own library, where there is one, and what that is in."""
    frame = next((frame for frame in reversed(path) if not _LIBRARY.search(frame)), path[-1])
    inner = path[-1].partition(" (")[0]
    return frame if frame == path[-1] else f"{frame}, in {inner}"


def _branches(nodes: tuple[_Node, ...], culprits: Collection[int | str], plain: bool) -> tuple[Branch, ...]:
    most = max((len(node.members) for node in nodes), default=0)
    found = []
    for node in sorted(nodes, key=lambda node: (-len(node.members), _whens(node))):
        shown = _SHOWN_ABOVE if node.children else _SHOWN_LAST
        cut = max(0, len(node.frames) - shown)
        gone_on = frozenset(member for child in node.children for member in child.members)
        ended = node.members - gone_on if node.children else frozenset()
        found.append(
            Branch(
                who=_who(node.members, plain),
                when=_whens(node),
                outer=node.frames[:cut],
                frames=node.frames[cut:],
                odd=len(node.members) < most,
                culprit=len(nodes) > 1 and _guilty(node.members, culprits),
                children=_branches(node.children, culprits, plain),
                end=_who(ended, plain) if ended else "",
            )
        )
    return tuple(found)


def _whens(node: _Node) -> str:
    """Of a branch on which threads were only in some samples."""
    if not node.here:
        return ""
    if len(node.here) == len(node.members) and len({numbers for _, numbers in node.here}) == 1:
        return _when(next(iter(node.here))[1])
    return "; ".join(
        f"{member.name} {_when(numbers)}"
        for member, numbers in sorted(node.here, key=lambda pair: (pair[0].rank or 0, pair[0].words))
    )


def _when(numbers: tuple[int, ...]) -> str:
    named = [_WHEN[number] if number < len(_WHEN) else f"in sample {number + 1}" for number in numbers]
    return " and ".join(named)


def _who(members: frozenset[_Member], plain: bool) -> str:
    """``ranks 0 to 3; controller``; with the threads' names where they are of several kinds."""
    if not plain:
        return members_text(member.words for member in sorted(members, key=lambda m: (m.rank or 0, m.words)))
    ranks = {member.rank for member in members if member.rank is not None}
    named = sorted(member.name for member in members if member.rank is None)
    return "; ".join([*([ranges(ranks)] if ranks else []), *named])


def _guilty(members: Iterable[_Member], culprits: Collection[int | str]) -> bool:
    return all((member.name if member.rank is None else member.rank) in culprits for member in members)
