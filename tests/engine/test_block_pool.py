"""The block pool: its four verbs, the order of reuse, and what must never happen to it."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmlab.engine.block_pool import Block, BlockPool, FreeBlockQueue


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def filled(pool: BlockPool, names: str) -> list[Block]:
    """Take one block a letter and publish it under that letter."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names):
        pool.publish(block, name.encode())
    return blocks


def found(pool: BlockPool, names: str) -> int:
    """Length of the prefix of ``names`` that can be found."""
    for i, name in enumerate(names):
        if pool.lookup(name.encode()) is None:
            return i
    return len(names)


# ---- the queue


def test_queue_removes_from_the_middle():
    blocks = [Block(i) for i in range(5)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[2])
    queue.remove(blocks[0])
    queue.remove(blocks[4])
    assert ids(queue) == [1, 3] and ids(reversed(queue)) == [3, 1] and queue.num_free == 2
    queue.append(blocks[0])
    queue.appendleft(blocks[4])
    assert ids(queue) == [4, 1, 3, 0]
    assert [queue.popleft().block_id for _ in range(4)] == [4, 1, 3, 0]


def test_queue_refuses_what_would_corrupt_it():
    blocks = [Block(0), Block(1)]
    queue = FreeBlockQueue(blocks)
    with pytest.raises(RuntimeError, match="already"):
        queue.append(blocks[0])
    with pytest.raises(RuntimeError, match="already"):
        queue.appendleft(blocks[1])
    queue.remove(blocks[0])
    with pytest.raises(RuntimeError, match="not in"):
        queue.remove(blocks[0])
    queue.popleft()
    with pytest.raises(RuntimeError, match="empty"):
        queue.popleft()
    assert queue.num_free == 0 and ids(queue) == []


# ---- the pool


def test_every_block_is_usable():
    pool = BlockPool(3)
    assert sorted(ids(pool.take(3))) == [0, 1, 2]
    assert pool.num_free == 0
    pool.check()


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks):
    with pytest.raises(ValueError, match=str(num_blocks)):
        BlockPool(num_blocks)


def test_taking_too_many_changes_nothing():
    pool = BlockPool(3)
    pool.release(filled(pool, "ab"))
    before = ids(pool.free_queue)
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 free"):
        pool.take(4)
    assert ids(pool.free_queue) == before and found(pool, "ab") == 2
    pool.check()


def test_a_block_taken_for_new_content_forgets_the_old():
    pool = BlockPool(4)
    pool.release(filled(pool, "ab"))
    pool.take(4)
    assert found(pool, "ab") == 0 and pool.lookup(b"b") is None
    assert all(block.block_hash is None for block in pool.blocks)
    pool.check()


def test_a_hit_on_a_free_block_keeps_hash_and_content():
    pool = BlockPool(4)
    a, b = filled(pool, "ab")
    for _ in range(3):  # the first hit must not cost the second
        pool.release([a, b])
        hits = [pool.lookup(b"a"), pool.lookup(b"b")]
        assert hits == [a, b]
        pool.claim(hits)
        assert (a.ref_count, b.ref_count, pool.num_free) == (1, 1, 2)
        pool.check()


def test_claim_counts_holders():
    pool = BlockPool(2)
    (a,) = filled(pool, "a")
    pool.claim([a])
    assert a.ref_count == 2 and pool.num_free == 1
    pool.release([a])
    assert a.ref_count == 1 and pool.num_free == 1
    pool.release([a])
    assert a.ref_count == 0 and pool.num_free == 2


def test_the_tail_of_a_prefix_is_reused_before_its_head():
    pool = BlockPool(3)
    pool.release(filled(pool, "abc"))
    pool.take(1)
    assert found(pool, "abc") == 2
    pool.take(1)
    assert found(pool, "abc") == 1


def test_least_recently_freed_goes_first_and_unhashed_before_hashed():
    pool = BlockPool(6)
    first, second, partial = filled(pool, "ab"), filled(pool, "cd"), pool.take(2)
    pool.release(first)
    pool.release(second)
    pool.release(partial)
    order = ids(pool.take(6))
    assert sorted(order[:2]) == sorted(ids(partial))
    assert order[2:] == [first[1].block_id, first[0].block_id, second[1].block_id, second[0].block_id]


def test_copies_are_found_as_long_as_one_lasts():
    pool = BlockPool(3)
    (one,), (other,) = filled(pool, "a"), filled(pool, "a")
    assert one is not other
    pool.release([one])
    pool.take(2)  # takes the free block and ``one``
    assert one.block_hash is None and pool.lookup(b"a") is other
    pool.check()


def test_double_release_raises_at_once():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.release(blocks)
    pool.check()


def test_publishing_twice_raises():
    pool = BlockPool(2)
    (a,) = filled(pool, "a")
    with pytest.raises(RuntimeError, match="published already"):
        pool.publish(a, b"b")
    pool.check()


def test_forget_all_only_while_nobody_holds_a_block():
    pool = BlockPool(3)
    blocks = filled(pool, "ab")
    assert not pool.forget_all() and found(pool, "ab") == 2
    pool.release(blocks)
    assert pool.forget_all() and found(pool, "ab") == 0
    assert sorted(ids(pool.free_queue)) == [0, 1, 2]
    pool.check()


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda pool: setattr(pool.blocks[0], "ref_count", 1), "only if nobody holds it"),
        (lambda pool: setattr(pool.blocks[2], "ref_count", -1), "ref_count is negative|nobody holds it"),
        (lambda pool: setattr(pool.blocks[1], "prev", pool.blocks[2]), "same both ways"),
        (lambda pool: setattr(pool.free_queue, "num_free", 2), "free count"),
        (lambda pool: setattr(pool.blocks[0], "block_hash", b"x"), "agree on every hash"),
    ],
)
def test_check_notices(damage, rule):
    pool = BlockPool(3)
    pool.check()
    damage(pool)
    with pytest.raises(RuntimeError, match=rule):
        pool.check()


# ---- the pool as a state machine


class PoolMachine(RuleBasedStateMachine):
    """Chains of content come, share prefixes, and go, in any order, beside a model of the pool in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.held: list[list[Block]] = []  # one table a holder
        self.content: dict[int, tuple[str, ...]] = {}  # block id → the chain that it ends, for published blocks

    @rule(chain=st.text("ab", min_size=1, max_size=5), num_partial=st.integers(0, 1))
    def admit(self, chain: str, num_partial: int) -> None:
        hits = []
        for end in range(1, len(chain) + 1):
            block = self.pool.lookup(chain[:end].encode())
            if block is None:
                break
            assert self.content[block.block_id] == tuple(chain[:end]), "a hit on other content"
            hits.append(block)
        num_new = len(chain) - len(hits) + num_partial
        if num_new + sum(b.ref_count == 0 for b in hits) > self.pool.num_free:
            return
        self.pool.claim(hits)
        new = self.pool.take(num_new)
        for block in new:
            self.content.pop(block.block_id, None)
        for end, block in zip(range(len(hits) + 1, len(chain) + 1), new):
            self.pool.publish(block, chain[:end].encode())
            self.content[block.block_id] = tuple(chain[:end])
        self.held.append(hits + new)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def reset(self) -> None:
        assert self.pool.forget_all() == (not self.held)
        if not self.held:
            self.content.clear()

    @invariant()
    def is_sound(self) -> None:
        self.pool.check()
        for block in self.pool.blocks:
            assert block.ref_count == sum(table.count(block) for table in self.held)
        assert self.pool.num_free + len({b.block_id for table in self.held for b in table}) == self.pool.num_blocks

    @invariant()
    def everything_published_is_found_and_nothing_else(self) -> None:
        published = {b.block_id: b.block_hash for b in self.pool.blocks if b.block_hash is not None}
        assert published == {i: "".join(chain).encode() for i, chain in self.content.items()}

    @invariant()
    def no_block_outlives_all_copies_of_its_parent(self) -> None:
        """Else it could never be hit again, and yet would fill the cache."""
        place = {b.block_id: i for i, b in enumerate(self.pool.free_queue)}  # held blocks: never reused before it
        for block_id, chain in self.content.items():
            if len(chain) > 1 and block_id in place:
                parents = [i for i, other in self.content.items() if other == chain[:-1]]
                assert any(place.get(i, len(place)) > place[block_id] for i in parents)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_ten_thousand_random_operations_leak_nothing():
    random_ = random.Random(0)
    pool, held, taken = BlockPool(64), [], 0
    for i in range(10_000):
        if held and (random_.random() < 0.5 or pool.num_free < 8):
            pool.release(held.pop(random_.randrange(len(held))))
        elif held and random_.random() < 0.2:
            shared = random_.choice(held)
            pool.claim(shared)
            held.append(list(shared))
        else:
            blocks = pool.take(random_.randint(0, 8))
            for block in blocks[: random_.randint(0, len(blocks))]:
                pool.publish(block, str(i).encode() + bytes([block.block_id]))
            held.append(blocks)
            taken += len(blocks)
        pool.check()
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.num_free == pool.num_blocks and taken > 5_000
