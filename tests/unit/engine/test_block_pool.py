from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twopool.engine.block_pool import BlockPool, Reservation
from twopool.protocol.errors import OverloadedError
from twopool.protocol.ids import BlockId, Epoch
from twopool.protocol.token_hash import HashChain, TokenIds

BLOCK_SIZE = 16


def make_pool(num_blocks: int = 8, *, block_size: int = BLOCK_SIZE, prefix_caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, block_size, epoch=Epoch(7), prefix_caching=prefix_caching)


def ids(*block_values: int, extra: int = 0, block_size: int = BLOCK_SIZE) -> TokenIds:
    """Blocks of one repeated value each, and ``extra`` further tokens."""
    return np.array([value for value in block_values for _ in range(block_size)] + [999] * extra, dtype=np.int32)


def store(pool: BlockPool, token_ids: TokenIds) -> list[BlockId]:
    """Compute and publish a sequence; its blocks are active."""
    blocks = pool.allocate(-(-len(token_ids) // pool.block_size))
    pool.publish(blocks, HashChain(), token_ids, len(token_ids))
    return blocks


def find(pool: BlockPool, token_ids: TokenIds, max_tokens: int | None = None, salt: bytes = b"") -> list[BlockId]:
    return pool.match(HashChain(salt), token_ids, len(token_ids) if max_tokens is None else max_tokens)


def states(pool: BlockPool) -> dict[str, int]:
    counts = pool.counts()
    assert counts.total == pool.num_blocks
    return {name: value for name in counts.__struct_fields__ if (value := getattr(counts, name))}


# --- references, pins, generations -----------------------------------------------------------------------------------


def test_a_block_through_all_of_its_states() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(2)
    assert states(pool) == {"free": 2, "active": 2}
    pool.share(blocks)
    pool.pin(blocks)
    pool.release(blocks)
    pool.release(blocks)
    assert states(pool) == {"free": 2, "pinned": 2}
    generations = pool.generations(blocks).tolist()
    pool.unpin(blocks)
    assert states(pool) == {"free": 4}
    assert pool.generations(blocks).tolist() == [generation + 1 for generation in generations]
    pool.check()


def test_published_blocks_stay_until_they_are_evicted_least_recently_used_first() -> None:
    pool = make_pool(4)
    old, new = ids(1, 2), ids(3, 4)
    old_blocks, new_blocks = store(pool, old), store(pool, new)
    pool.release(old_blocks)
    pool.release(new_blocks)
    before = pool.generations(old_blocks + new_blocks)
    assert states(pool) == {"cached": 4}
    # The tail of the older one goes first: its head is of use without it, but not the other way round.
    assert pool.allocate(1) == [old_blocks[1]]
    assert pool.generation(old_blocks[1]) == before[1] + 1
    assert find(pool, old) == old_blocks[:1]
    assert find(pool, new) == new_blocks
    pool.check()


def test_eviction_moves_the_generation_and_keeps_it_otherwise() -> None:
    pool = make_pool(1)
    (block,) = store(pool, ids(1))
    generation = pool.generation(block)
    pool.release([block])
    assert find(pool, ids(1)) == [block]
    assert pool.generation(block) == generation
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.generation(block) == generation + 1


def test_fetching() -> None:
    pool = make_pool(4)
    arrived, late, dropped = (pool.allocate_for_fetch(1) for _ in range(3))
    assert states(pool) == {"free": 1, "fetching": 3}
    before = pool.generations(arrived + late + dropped)
    pool.fetched(arrived)
    pool.quarantine(late)
    pool.abandon_fetch(dropped)
    assert states(pool) == {"free": 2, "active": 1, "quarantined": 1}
    assert pool.num_obtainable == 2
    pool.end_quarantine(late)
    pool.release(arrived)
    assert states(pool) == {"free": 4}
    assert (pool.generations(arrived + late + dropped) > before).all()
    pool.check()


def test_wrong_use_is_refused_and_changes_nothing() -> None:
    pool = make_pool(4)
    active = pool.allocate(1)
    fetching = pool.allocate_for_fetch(1)
    free = next(BlockId(block) for block in range(4) if block not in active + fetching)
    before = states(pool)
    for wrong in (
        lambda: pool.release([*active, free]),
        lambda: pool.release(active * 2),
        lambda: pool.share([free]),
        lambda: pool.pin([free]),
        lambda: pool.pin(fetching),
        lambda: pool.unpin(active),
        lambda: pool.fetched(active),
        lambda: pool.quarantine([*fetching, *fetching]),
        lambda: pool.end_quarantine(fetching),
        lambda: pool.publish([free], HashChain(), ids(1), BLOCK_SIZE),
        lambda: pool.generation(BlockId(4)),
        lambda: pool.generation(BlockId(-1)),
        lambda: pool.reserve(-1),
    ):
        with pytest.raises(ValueError):
            wrong()
        assert states(pool) == before
        pool.check()


def test_check_notices_an_imbalance() -> None:
    pool = make_pool(4)
    pool._refs[2] = 1
    with pytest.raises(RuntimeError, match="block 2 is both"):
        pool.check()


# --- reservations ----------------------------------------------------------------------------------------------------


def test_a_reservation_keeps_others_out() -> None:
    pool = make_pool(4)
    reservation = pool.reserve(3)
    assert pool.num_obtainable == 1
    with pytest.raises(OverloadedError):
        pool.allocate(2)
    with pytest.raises(OverloadedError):
        pool.reserve(2)
    pool.allocate(2, reservation)
    assert (reservation.remaining, pool.num_obtainable) == (1, 1)
    pool.allocate(2, reservation)  # one of its own, one of everybody's
    assert (reservation.remaining, pool.num_obtainable) == (0, 0)
    with pytest.raises(OverloadedError):
        pool.allocate(1, reservation)
    reservation.release()
    reservation.release()
    pool.check()


def test_releasing_a_reservation_is_idempotent() -> None:
    pool = make_pool(4)
    first, second = pool.reserve(2), pool.reserve(2)
    first.release()
    first.release()
    assert (pool.num_obtainable, second.remaining) == (2, 2)


def test_matching_does_not_take_what_is_reserved() -> None:
    pool = make_pool(4)
    pool.release(store(pool, ids(1, 2, 3, 4)))
    reservation = pool.reserve(3)
    assert len(find(pool, ids(1, 2, 3, 4))) == 1
    matched = pool.match(HashChain(), ids(1, 2, 3, 4), 4 * BLOCK_SIZE, reservation)
    assert (len(matched), reservation.remaining) == (4, 0)  # the first is active by now and costs nothing
    pool.check()


def test_more_can_be_had() -> None:
    pool = make_pool(2)
    calls = Counter[str]()
    pool.on_obtainable = lambda: calls.update(["called"])
    reservation = pool.reserve(1)
    blocks = pool.allocate(1)
    assert not calls
    pool.release(blocks)
    assert calls["called"] == 1
    reservation.release()
    assert calls["called"] == 2


# --- prefix cache ----------------------------------------------------------------------------------------------------


def test_match_ends_where_the_tokens_differ() -> None:
    """PD-24: the same block after another first block is another block."""
    pool = make_pool(8)
    blocks = store(pool, ids(1, 2, 3, extra=5))
    assert find(pool, ids(1, 2, 3, 4)) == blocks[:3]
    assert find(pool, ids(1, 2, 9)) == blocks[:2]
    assert find(pool, ids(9, 2, 3)) == []
    assert find(pool, ids(1, 2, 3), max_tokens=3 * BLOCK_SIZE - 1) == blocks[:2]
    assert find(pool, ids(1, 2, 3), max_tokens=BLOCK_SIZE - 1) == []
    assert find(pool, ids(1, 2, 3), salt=b"another tenant") == []


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    pool = make_pool(4, block_size=block_size)
    blocks = store(pool, ids(1, 2, extra=7, block_size=block_size))
    assert find(pool, ids(1, 2, block_size=block_size)) == blocks[:2]


def test_the_first_publisher_wins() -> None:
    pool = make_pool(8)
    first, second = store(pool, ids(1, 2)), store(pool, ids(1, 2, 3))
    assert find(pool, ids(1, 2, 3)) == [*first, second[2]]
    pool.release([*first, second[2]])
    pool.release(second)
    pool.release(first)
    assert states(pool) == {"free": 5, "cached": 3}
    pool.check()


def test_publishing_block_by_block() -> None:
    pool = make_pool(8)
    token_ids, chain = ids(1, 2, 3), HashChain()
    blocks = pool.allocate(3)
    for num_tokens in range(1, len(token_ids) + 1):
        pool.publish(blocks, chain, token_ids[:num_tokens], num_tokens)
        assert len(pool.match(HashChain(), token_ids, len(token_ids))) == num_tokens // BLOCK_SIZE
    pool.check()


def test_a_child_whose_parent_is_gone_gives_way() -> None:
    pool = make_pool(8)
    first, second = store(pool, ids(1)), store(pool, ids(1, 2))
    pool.release(first)
    pool.retract(first)
    assert find(pool, ids(1, 2)) == []
    third = store(pool, ids(1, 2))
    assert find(pool, ids(1, 2)) == third
    pool.release(second)
    assert second[1] not in find(pool, ids(1, 2))
    pool.check()


def test_retracted_blocks_are_not_found() -> None:
    pool = make_pool(4)
    held, idle = store(pool, ids(1)), store(pool, ids(2))
    pool.release(idle)
    pool.retract(held + idle)
    assert find(pool, ids(1)) == find(pool, ids(2)) == []
    assert states(pool) == {"free": 3, "active": 1}
    pool.clear_cache()
    pool.check()


def test_without_prefix_caching() -> None:
    pool = make_pool(4, prefix_caching=False)
    pool.release(store(pool, ids(1, 2)))
    assert find(pool, ids(1, 2)) == []
    assert states(pool) == {"free": 4}


class WeakChain(HashChain):
    """Every granule of every sequence has one of two hashes."""

    def after_granules(self, count: int) -> bytes:
        return bytes([count % 2])


def test_a_hash_collision_is_a_miss() -> None:
    """PD-24: tokens are compared, those of the blocks before included."""
    pool = make_pool(8)
    blocks = pool.allocate(1)
    pool.publish(blocks, WeakChain(), ids(1), BLOCK_SIZE)
    assert pool.match(WeakChain(), ids(2), BLOCK_SIZE) == []
    assert pool.match(WeakChain(), ids(1), BLOCK_SIZE) == blocks
    others = pool.allocate(2)
    pool.publish(others, WeakChain(), ids(2, 1), 2 * BLOCK_SIZE)  # collides at once: nothing can be published
    assert pool.match(WeakChain(), ids(2, 1), 2 * BLOCK_SIZE) == []
    assert pool.match(WeakChain(), ids(1, 1), 2 * BLOCK_SIZE) == blocks
    pool.check()


# --- the whole interface ---------------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Random use against a plain model: who holds what, and what each block holds."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(self.NUM_BLOCKS)
        self.refs: Counter[BlockId] = Counter()
        self.pins: Counter[BlockId] = Counter()
        self.fetching: set[BlockId] = set()
        self.quarantined: set[BlockId] = set()
        self.content: dict[BlockId, bytes] = {}  # what a published block stands for: all ids up to its end
        self.given: dict[BlockId, int] = {}  # the generation a block had when it was last handed out
        self.reservations: list[Reservation] = []

    def held(self) -> list[BlockId]:
        return sorted({*(+self.refs), *(+self.pins)})

    def handed_out(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            assert not self.refs[block] and not self.pins[block]
            assert block not in self.fetching and block not in self.quarantined
            assert block not in self.given or self.pool.generation(block) > self.given[block]
            self.given[block] = self.pool.generation(block)
            self.content.pop(block, None)

    @rule(count=st.integers(0, 4), data=st.data(), fetch=st.booleans())
    def allocate(self, count: int, data: st.DataObject, fetch: bool) -> None:
        reservation = data.draw(st.sampled_from([None, *self.reservations]))
        remaining = reservation.remaining if reservation else 0
        possible = count <= self.pool.num_obtainable + remaining
        try:
            if fetch:
                blocks = self.pool.allocate_for_fetch(count, reservation)
                self.fetching.update(blocks)
            else:
                blocks = self.pool.allocate(count, reservation)
        except OverloadedError:
            assert not possible
            assert not reservation or reservation.remaining == remaining
            return
        assert possible and len(set(blocks)) == count
        if fetch:
            self.fetching.difference_update(blocks)
        self.handed_out(blocks)
        if fetch:
            self.fetching.update(blocks)
        else:
            self.refs.update(blocks)

    @rule(count=st.integers(0, 4))
    def reserve(self, count: int) -> None:
        obtainable = self.pool.num_obtainable
        try:
            self.reservations.append(self.pool.reserve(count))
        except OverloadedError:
            assert count > obtainable

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def shrink(self, data: st.DataObject, keep: int) -> None:
        reservation = data.draw(st.sampled_from(self.reservations))
        remaining = reservation.remaining
        reservation.shrink_to(keep)
        assert reservation.remaining == min(remaining, keep)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), pin=st.booleans())
    def hold(self, data: st.DataObject, pin: bool) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held()), max_size=3))
        (self.pool.pin if pin else self.pool.share)(blocks)
        (self.pins if pin else self.refs).update(blocks)

    @precondition(lambda self: +self.refs or +self.pins)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        pinned = data.draw(st.booleans()) if +self.refs and +self.pins else bool(+self.pins)
        counts = self.pins if pinned else self.refs
        blocks = data.draw(st.lists(st.sampled_from(sorted(+counts)), unique=True))
        (self.pool.unpin if pinned else self.pool.release)(blocks)
        counts.subtract(blocks)

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), outcome=st.sampled_from(["fetched", "quarantine", "abandon_fetch"]))
    def end_fetch(self, data: st.DataObject, outcome: str) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.fetching)), unique=True))
        getattr(self.pool, outcome)(blocks)
        self.fetching.difference_update(blocks)
        if outcome == "fetched":
            self.refs.update(blocks)
        elif outcome == "quarantine":
            self.quarantined.update(blocks)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.quarantined)), unique=True))
        self.pool.end_quarantine(blocks)
        self.quarantined.difference_update(blocks)

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=4), count=st.integers(0, 4), weak=st.booleans())
    def run_sequence(self, values: list[int], count: int, weak: bool) -> None:
        """What the engine does: match, compute the rest into new blocks, publish."""
        token_ids, chain = ids(*values), WeakChain() if weak else HashChain()
        blocks = self.pool.match(chain, token_ids, len(token_ids))
        for index, block in enumerate(blocks):
            assert self.content[block] == token_ids[: (index + 1) * BLOCK_SIZE].tobytes()
        self.refs.update(blocks)
        try:
            new = self.pool.allocate(len(values) - len(blocks))
        except OverloadedError:
            self.pool.release(blocks)
            self.refs.subtract(blocks)
            return
        self.handed_out(new)
        self.refs.update(new)
        for index in range(len(blocks), len(values)):
            self.content[new[index - len(blocks)]] = token_ids[: (index + 1) * BLOCK_SIZE].tobytes()
        self.pool.publish(blocks + new, chain, token_ids, min(count, len(values)) * BLOCK_SIZE)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        self.pool.retract([data.draw(st.sampled_from(sorted(self.content)))])

    @invariant()
    def balanced(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.active == len(+self.refs)
        assert counts.pinned == len([block for block in +self.pins if not self.refs[block]])
        assert counts.fetching == len(self.fetching)
        assert counts.quarantined == len(self.quarantined)
        assert self.pool.num_reserved == sum(reservation.remaining for reservation in self.reservations)
        for block in self.held():
            assert self.pool.generation(block) == self.given[block]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
