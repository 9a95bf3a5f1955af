"""Page accounting and the prefix cache, rule by rule and under random use."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.kv_cache import IntegrityError, KVPool, PoolExhausted, Prefix


def cache(pool: KVPool, tokens: Sequence[int]) -> list[int]:
    """Computes and caches ``tokens`` as one request would; returns the slots of what is cached then."""
    prefix = pool.match_prefix(tokens)
    slots = [*prefix.slots, *pool.allocate(pool.round_up(len(tokens)) - len(prefix))]
    cached = pool.insert(tokens, slots, prefix, ended=True)
    pool.free(slots[len(cached) :])
    pool.release(cached)
    return list(cached.slots)


def hit(pool: KVPool, tokens: Sequence[int]) -> int:
    prefix = pool.match_prefix(tokens)
    pool.release(prefix)
    return len(prefix)


# Pages


def test_slots_are_whole_pages_and_never_the_dump_page() -> None:
    pool = KVPool(11, page_size=4)
    assert (pool.num_pages, pool.size, pool.available(), pool.round_up(5)) == (2, 8, 8, 8)
    assert pool.allocate(8) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="not whole pages of 4"):
        pool.allocate(3)


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        KVPool(3, page_size=4)
    with pytest.raises(ValueError, match="page size must be at least 1"):
        KVPool(3, page_size=0)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = KVPool(4)
    slots = pool.allocate(3)
    with pytest.raises(PoolExhausted, match="2 KV slots asked for, 1 of 4 available"):
        pool.allocate(2)
    pool.check_integrity({"owner": slots})


def test_the_page_freed_last_is_handed_out_first() -> None:
    pool = KVPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(2) == [*second, *first]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3], "page 3 was freed while free"),
        ([0], "page 0 was freed while the dump page"),
        ([9], "page 9 was freed while outside the pool"),
        ([1, 1], "page 1 was freed twice in one call"),
    ],
)
def test_a_wrong_free_names_the_page_and_frees_nothing(slots: list[int], message: str) -> None:
    pool = KVPool(4)
    owned = pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        pool.free([owned[1], *slots] if slots != [1, 1] else slots)
    pool.check_integrity({"owner": owned})


def test_a_cached_page_cannot_be_freed_by_its_former_owner() -> None:
    pool = KVPool(4)
    slots = cache(pool, [7, 8])
    with pytest.raises(IntegrityError, match=f"page {slots[0]} was freed while cached"):
        pool.free(slots)


# The check


def test_the_check_names_lost_doubly_held_and_foreign_pages() -> None:
    pool = KVPool(6)
    slots = pool.allocate(4)
    pool.check_integrity({"a": slots[:2], "b": slots[2:]})
    with pytest.raises(IntegrityError, match="page 2 has several holders: a, b; page 4 is lost") as caught:
        pool.check_integrity({"a": [1, 2], "b": [2, 3]})
    assert caught.value.pages == (2, 4)
    with pytest.raises(IntegrityError, match="page 5 has several holders: free, a"):
        pool.check_integrity({"a": [*slots, 5]})
    with pytest.raises(IntegrityError, match="page 7 claimed by a does not exist"):
        pool.check_integrity({"a": [*slots, 7]})
    with pytest.raises(IntegrityError, match="page 0 claimed by a does not exist"):
        pool.check_integrity({"a": [*slots, 0]})


def test_the_check_spells_out_a_few_pages_and_counts_the_rest() -> None:
    pool = KVPool(20)
    pool.allocate(20)
    with pytest.raises(
        IntegrityError, match="page 8 is lost: held by nobody, marked owned; and 12 more"
    ) as caught:
        pool.check_integrity({})
    assert len(caught.value.pages) == 20


def test_the_check_compares_the_counts_with_the_tree() -> None:
    pool = KVPool(4)
    (slot,) = cache(pool, [5])
    node = pool._root.children[(5,)]
    node.pins += 1
    with pytest.raises(IntegrityError, match=f"page {slot} has 1 pins in the prefix tree, 0 expected"):
        pool.check_integrity({})
    node.pins -= 1
    pool.locks += 1
    with pytest.raises(IntegrityError, match="lock counts are 1, 1, 1 where the tree has 1, 1, 0"):
        pool.check_integrity({})


# Prefix cache


def test_the_longest_cached_prefix_is_found_in_whole_pages() -> None:
    pool = KVPool(32, page_size=4)
    slots = cache(pool, range(10))
    assert len(slots) == 8 and pool.cached() == 8 and pool.available() == 32
    assert pool.match_prefix([*range(6), 99, 99]).slots == tuple(slots[:4])
    assert hit(pool, range(8)) == hit(pool, range(12)) == 8
    assert hit(pool, range(7)) == 4 and hit(pool, [1, 2, 3, 4]) == 0


def test_locked_pages_and_those_before_them_are_not_available() -> None:
    pool = KVPool(8)
    cache(pool, [1, 2, 3])
    cache(pool, [1, 2, 9])
    locked = pool.match_prefix([1, 2, 3])
    assert pool.available() == 8 - 3
    pool.allocate(5)
    assert pool.evicted_pages == 1 and len(locked) == 3
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.release(locked)
    assert pool.available() == 3


def test_leaves_are_evicted_least_recently_used_first() -> None:
    pool = KVPool(6)
    cache(pool, [1, 2])
    cache(pool, [3, 4])
    cache(pool, [5, 6])
    assert hit(pool, [1, 2]) == 2
    pool.allocate(1)
    assert (hit(pool, [3, 4]), hit(pool, [5, 6]), hit(pool, [1, 2])) == (1, 2, 2)
    pool.allocate(1)  # each look is a use, and 3 was looked at first
    assert (hit(pool, [3, 4]), hit(pool, [5, 6]), hit(pool, [1, 2])) == (0, 2, 2)
    pool.allocate(2)
    assert (hit(pool, [5, 6]), hit(pool, [1, 2])) == (0, 2)
    assert pool.evicted_pages == 4


def test_a_live_table_stays_when_somebody_else_cached_the_same_tokens_first() -> None:
    pool = KVPool(8)
    mine, other = pool.match_prefix([1, 2]), pool.match_prefix([1, 2])
    my_slots, other_slots = pool.allocate(2), pool.allocate(2)
    first = pool.insert([1, 2], other_slots, other)
    assert first.slots == tuple(other_slots)
    second = pool.insert([1, 2], my_slots, mine)
    assert second.slots == ()
    pool.check_integrity({"me": my_slots})
    # At its end the copies go, and what it computed behind them is cached.
    my_slots += pool.allocate(1)
    last = pool.insert([1, 2, 3], my_slots, second, ended=True)
    assert last.slots == (*other_slots, my_slots[2])
    pool.check_integrity({})
    assert pool.available() == 8 - 3


def test_a_lock_is_released_once() -> None:
    pool = KVPool(4)
    prefix = pool.match_prefix([1])
    pool.release(prefix)
    with pytest.raises(IntegrityError, match="lock released twice"):
        pool.release(prefix)


def test_switched_off_nothing_is_cached() -> None:
    pool = KVPool(4, prefix_cache=False)
    assert cache(pool, [1, 2]) == [] and hit(pool, [1, 2]) == 0
    assert pool.cached() == 0 and pool.available() == 4
    pool.check_integrity({})


def test_only_owned_pages_can_be_cached() -> None:
    pool = KVPool(4)
    with pytest.raises(IntegrityError, match="page 2 was put into the prefix cache while free"):
        pool.insert([5], [2], pool.match_prefix([5]))


def test_old_eviction_entries_do_not_pile_up() -> None:
    pool = KVPool(4)
    cache(pool, [1, 2, 3, 4])
    for _ in range(100):
        assert hit(pool, [1, 2, 3, 4]) == 4
    assert len(pool._heap) <= 4 * pool.num_pages
    assert pool.allocate(4) and pool.evicted_pages == 4


# Random use


class Owner:
    def __init__(self, tokens: list[int], slots: list[int], prefix: Prefix) -> None:
        self.tokens, self.slots, self.prefix = tokens, slots, prefix


class PoolMachine(RuleBasedStateMachine):
    """Owners that match, grow, share and leave. ``content`` is what a device would hold in each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(12, page_size=2)
        self.owners: dict[str, Owner] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.made = 0

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.owners)))

    def write(self, owner: Owner, start: int) -> None:
        for position in range(start, len(owner.tokens)):
            self.content[owner.slots[position]] = tuple(owner.tokens[: position + 1])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def arrive(self, tokens: list[int]) -> None:
        prefix = self.pool.match_prefix(tokens)
        need = self.pool.round_up(len(tokens)) - len(prefix)
        if need > self.pool.available():
            with pytest.raises(PoolExhausted):
                self.pool.allocate(need)
            self.pool.release(prefix)
            return
        owner = Owner(tokens, [*prefix.slots, *self.pool.allocate(need)], prefix)
        self.write(owner, len(prefix))
        self.owners[f"o{self.made}"] = owner
        self.made += 1

    @precondition(lambda self: self.owners and self.pool.available() >= 2)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        owner = self.owners[self.pick(data)]
        owner.tokens.append(token)
        owner.slots += self.pool.allocate(self.pool.round_up(len(owner.tokens)) - len(owner.slots))
        self.write(owner, len(owner.tokens) - 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner = self.owners[self.pick(data)]
        owner.prefix = self.pool.insert(owner.tokens, owner.slots, owner.prefix)
        assert owner.slots[: len(owner.prefix)] == list(owner.prefix.slots)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data: st.DataObject, keep: bool) -> None:
        owner = self.owners.pop(self.pick(data))
        if keep:
            owner.prefix = self.pool.insert(owner.tokens, owner.slots, owner.prefix, ended=True)
            assert len(owner.prefix) == len(owner.tokens) // 2 * 2
        self.pool.free(owner.slots[len(owner.prefix) :])
        self.pool.release(owner.prefix)
        if keep:
            assert hit(self.pool, owner.tokens) == len(owner.tokens) // 2 * 2

    @invariant()
    def every_page_has_one_holder(self) -> None:
        own = {name: owner.slots[len(owner.prefix) :] for name, owner in self.owners.items()}
        self.pool.check_integrity(own)
        assert self.pool.locks == len(self.owners)
        held = {slot // 2 for owner in self.owners.values() for slot in owner.slots}
        assert self.pool.available() == self.pool.size - 2 * len(held)

    @invariant()
    def every_table_holds_its_own_tokens(self) -> None:
        for owner in self.owners.values():
            for position in range(len(owner.tokens)):
                assert self.content[owner.slots[position]] == tuple(owner.tokens[: position + 1])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
