"""Who holds which slot of the KV cache: pages, the prefix cache over them, and the check that nothing leaks.

Here: page accounting of one rank. Not here: the tensors behind the slots (the model's), and when a request
gets or loses its pages (the scheduler's).

A *slot* is one token's place; a *page* is ``page_size`` neighbouring slots, page p being the slots from
``p * page_size`` on. Page 0 is the dump page: padding is written there and it is never handed out. Callers
speak in slots, always of whole pages; each other page is at any time exactly one of

* free     on the free list,
* cached   in the prefix tree, shared by every request that matched it, read only,
* owned    held by the one caller that allocated it.

The prefix tree has one page of tokens on each edge. A caller locks the deepest node it uses; a node is pinned
while it or a descendant is locked. What is not pinned is evicted, least recently used leaf first, when the
free list runs short. Every order here is a function of the calls made, never of time or of hashing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

_FREE, _CACHED, _OWNED, _DUMP = range(4)
_STATE_NAMES = ("free", "cached", "owned", "the dump page")
_NAMED_PAGES = 8
"""How many pages an error spells out; a pool gone wrong may have thousands."""


class PoolExhausted(RuntimeError):
    """More slots were asked for than are free or evictable. The scheduler must ask ``available()`` first."""


class IntegrityError(AssertionError):
    """The page accounting is broken: a defect of the caller or of the pool, never of the load."""

    def __init__(self, problems: Mapping[int, str], what: str = "KV pages") -> None:
        self.pages = tuple(sorted(problems))
        named = "; ".join(f"page {page} {problems[page]}" for page in self.pages[:_NAMED_PAGES])
        more = f"; and {len(self.pages) - _NAMED_PAGES} more" if len(self.pages) > _NAMED_PAGES else ""
        super().__init__(f"{what}: {named}{more}")


class _Node:
    """One cached page, below the page that holds the tokens before it."""

    __slots__ = ("children", "entry", "key", "last_used", "locks", "page", "parent", "pins")

    def __init__(self, page: int, key: tuple[int, ...], parent: _Node | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.locks = 0  # prefixes that end here
        self.pins = 0  # own locks + children with pins; 0 means evictable, once it is a leaf
        self.last_used = 0  # when it was unpinned, in releases
        self.entry = 0  # serial of its valid entry in the eviction heap, 0 = none


class Prefix:
    """A locked path of the tree. Its slots stay where they are until ``KVPool.release``."""

    __slots__ = ("_node", "held", "slots")

    def __init__(self, slots: tuple[int, ...], node: _Node) -> None:
        self.slots = slots
        self.held = True
        self._node = node

    def __len__(self) -> int:
        """Number of tokens covered, a multiple of the page size."""
        return len(self.slots)


class KVPool:
    """Pages of one rank. ``num_tokens`` is rounded down to whole pages; the dump page comes on top."""

    def __init__(self, num_tokens: int, page_size: int = 1, *, prefix_cache: bool = True) -> None:
        if page_size < 1 or num_tokens < page_size:
            raise ValueError(
                f"KV pool of {num_tokens} tokens in pages of {page_size}: "
                "the page size must be at least 1 and the pool at least one page"
            )
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self.prefix_cache = prefix_cache
        self.evicted_pages = 0
        """Pages taken back from the prefix cache so far."""
        self.inserted_pages = 0
        """Pages put into the prefix cache so far."""
        self.locks = 0
        """Prefixes handed out and not yet released."""
        self._state = bytearray([_DUMP] + [_FREE] * self.num_pages)
        # A stack: the page freed last is handed out first, so a read through a stale table meets foreign
        # data at once instead of an old copy of its own.
        self._free = list(range(self.num_pages, 0, -1))
        self._root = _Node(0, (), None)
        self._cached_pages = 0
        self._evictable_pages = 0
        self._clock = 0
        self._entries = 0
        self._heap: list[tuple[int, int, _Node]] = []  # (last_used, entry, leaf); stale ones are skipped

    # Sizes, all in slots

    @property
    def size(self) -> int:
        """Slots that requests may hold in all."""
        return self.num_pages * self.page_size

    def available(self) -> int:
        """Slots that ``allocate`` can give now: free ones and those that an eviction would free."""
        return (len(self._free) + self._evictable_pages) * self.page_size

    def cached(self) -> int:
        """Slots in the prefix cache, pinned or not."""
        return self._cached_pages * self.page_size

    def round_up(self, tokens: int) -> int:
        """Slots of the whole pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size) * self.page_size

    # Pages

    def allocate(self, slots: int) -> list[int]:
        """Hands out whole pages, evicting cached ones as needed. Raises PoolExhausted and takes nothing."""
        pages = self._whole_pages(slots)
        if slots > self.available():
            raise PoolExhausted(f"{slots} KV slots asked for, {self.available()} of {self.size} available")
        while len(self._free) < pages:
            self._evict_one()
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._state[page] = _OWNED
        return [page * self.page_size + offset for page in taken for offset in range(self.page_size)]

    def free(self, slots: Sequence[int]) -> None:
        """Takes back owned pages. Raises IntegrityError, and takes none, if one of them is not owned."""
        self._whole_pages(len(slots))
        pages = [slot // self.page_size for slot in slots[:: self.page_size]]
        problems = {
            page: f"was freed while {self._describe(page)}" for page in pages if not self._owned(page)
        }
        if len(set(pages)) < len(pages):
            problems |= {page: "was freed twice in one call" for page in pages if pages.count(page) > 1}
        if problems:
            raise IntegrityError(problems)
        for page in reversed(pages):
            self._state[page] = _FREE
            self._free.append(page)

    # Prefix cache

    def match_prefix(self, tokens: Sequence[int]) -> Prefix:
        """The longest cached prefix of ``tokens`` in whole pages, locked. Release it exactly once."""
        node = self._root
        slots: list[int] = []
        if self.prefix_cache:
            for key in self._page_keys(tokens):
                child = node.children.get(key)
                if child is None:
                    break
                slots.extend(self._slots_of(child.page))
                node = child
        return self._lock(tuple(slots), node)

    def insert(
        self, tokens: Sequence[int], slots: Sequence[int], prefix: Prefix, *, ended: bool = False
    ) -> Prefix:
        """Moves the pages that ``tokens`` fill from their owner into the cache; returns them locked.

        ``slots`` is the owner's table, beginning with ``prefix.slots``; ``prefix`` is released unless it is
        what comes back. Pages behind the prefix returned stay owned. The table stays as it is: where another
        owner has cached the same tokens already, nothing moves. With ``ended`` this owner gives its table up:
        its copies of cached pages are freed, and what lies behind them is cached. No cache: nothing moves.
        """
        if not self.prefix_cache:
            return prefix
        node = self._root
        kept: list[int] = []
        for index, key in enumerate(self._page_keys(tokens)):
            page = slots[index * self.page_size] // self.page_size
            child = node.children.get(key)
            if child is None:
                child = self._adopt(page, key, node)
            elif child.page != page:
                if not ended:
                    break
                self.free(slots[index * self.page_size : (index + 1) * self.page_size])
            kept.extend(self._slots_of(child.page))
            node = child
        longer = self._lock(tuple(kept), node)
        self.release(prefix)
        return longer

    def release(self, prefix: Prefix) -> None:
        """Unlocks; the pages stay cached until evicted. Raises IntegrityError on a second release."""
        if not prefix.held:
            raise IntegrityError({prefix._node.page: "had its lock released twice"}, "prefix cache")
        prefix.held = False
        self.locks -= 1
        self._clock += 1
        prefix._node.locks -= 1
        node: _Node | None = prefix._node
        while node is not None:
            node.pins -= 1
            if node.pins or node is self._root:
                break
            node.last_used = self._clock
            self._evictable_pages += 1
            self._offer(node)
            node = node.parent

    # The check

    def check_integrity(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Every page is exactly one of free, cached or owned; ``owners`` gives the slots each one owns alone.

        Raises IntegrityError naming the pages. Walks the whole pool: for tests, teardown and idle steps.
        """
        holders: dict[int, list[str]] = {page: [] for page in range(1, self.num_pages + 1)}
        expected = {"free": _FREE, "cached": _CACHED}
        claims = [("free", self._free), ("cached", [node.page for node in self._nodes()])]
        claims += [
            (name, [slot // self.page_size for slot in slots[:: self.page_size]])
            for name, slots in owners.items()
        ]
        problems: dict[int, str] = {}
        for name, pages in claims:
            for page in pages:
                if page not in holders:
                    problems[page] = f"claimed by {name} does not exist"
                else:
                    holders[page].append(name)
        for page, names in holders.items():
            if not names:
                problems[page] = f"is lost: held by nobody, marked {self._describe(page)}"
            elif len(names) > 1:
                problems[page] = f"has several holders: {', '.join(names)}"
            elif self._state[page] != expected.get(names[0], _OWNED):
                problems[page] = f"held by {names[0]} is marked {self._describe(page)}"
        problems |= self._tree_problems()
        if problems:
            raise IntegrityError(problems)

    def _tree_problems(self) -> dict[int, str]:
        problems: dict[int, str] = {}
        nodes = list(self._nodes())
        for node in [self._root, *nodes]:
            pins = node.locks + sum(1 for child in node.children.values() if child.pins)
            if node.pins != pins:
                problems[node.page] = f"has {node.pins} pins in the prefix tree, {pins} expected"
        evictable = sum(1 for node in nodes if not node.pins)
        locks = sum(node.locks for node in [self._root, *nodes])
        if (len(nodes), evictable, locks) != (self._cached_pages, self._evictable_pages, self.locks):
            problems[0] = (
                f"stands for the prefix tree, whose cached, evictable and lock counts are "
                f"{self._cached_pages}, {self._evictable_pages}, {self.locks} "
                f"where the tree has {len(nodes)}, {evictable}, {locks}"
            )
        return problems

    # Inside

    def _whole_pages(self, slots: int) -> int:
        pages, rest = divmod(slots, self.page_size)
        if rest or slots < 0:
            raise ValueError(f"{slots} slots are not whole pages of {self.page_size}; use round_up()")
        return pages

    def _page_keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            yield tuple(tokens[start : start + self.page_size])

    def _slots_of(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)

    def _owned(self, page: int) -> bool:
        return 0 <= page <= self.num_pages and self._state[page] == _OWNED

    def _describe(self, page: int) -> str:
        return _STATE_NAMES[self._state[page]] if 0 <= page <= self.num_pages else "outside the pool"

    def _nodes(self) -> Iterator[_Node]:
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def _lock(self, slots: tuple[int, ...], end: _Node) -> Prefix:
        end.locks += 1
        self.locks += 1
        node: _Node | None = end
        while node is not None:
            node.pins += 1
            if node.pins > 1 or node is self._root:
                break
            self._evictable_pages -= 1
            node = node.parent
        return Prefix(slots, end)

    def _adopt(self, page: int, key: tuple[int, ...], parent: _Node) -> _Node:
        if not self._owned(page):
            raise IntegrityError({page: f"was put into the prefix cache while {self._describe(page)}"})
        self._state[page] = _CACHED
        self._cached_pages += 1
        self.inserted_pages += 1
        self._evictable_pages += 1  # until the insertion's own lock pins it
        child = parent.children[key] = _Node(page, key, parent)
        return child

    def _offer(self, node: _Node) -> None:
        """Makes an unpinned leaf a candidate for eviction. One entry of a node is valid, its newest."""
        if node.children or node.pins or node is self._root:
            return
        self._entries += 1
        node.entry = self._entries
        heapq.heappush(self._heap, (node.last_used, node.entry, node))
        if len(self._heap) > 4 * self.num_pages:
            self._heap = [item for item in self._heap if self._valid(item)]
            heapq.heapify(self._heap)

    @staticmethod
    def _valid(item: tuple[int, int, _Node]) -> bool:
        _, entry, node = item
        return node.entry == entry and not node.children and not node.pins

    def _evict_one(self) -> None:
        while not self._valid(item := heapq.heappop(self._heap)):
            pass
        node = item[2]
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.entry = 0
        self._state[node.page] = _FREE
        self._free.append(node.page)
        self._cached_pages -= 1
        self._evictable_pages -= 1
        self.evicted_pages += 1
        self._offer(parent)
