"""The pool of KV-cache blocks: who uses which block, which are free, and which content can be found again.

A free block keeps its content until it is taken for something else, so freeing costs nothing and a later request with
the same prefix can claim it back. Four verbs change the pool:

- ``lookup``  find a block by the hash of its content; changes nothing;
- ``claim``   use blocks that were found: one reference more, content and hash stay;
- ``take``    get blocks for new content: least recently used first, their old hash is forgotten;
- ``release`` give blocks back: one reference less, free at zero.

At every moment: a block is in the free queue if and only if its ref_count is 0. All ``num_blocks`` blocks, ids 0 to
num_blocks - 1, are usable. (vLLM reserves block 0 as a null block to pad tables with; here no kernel reads the unused
end of a table, so nothing has to be pointed at.) Follows ``vllm/v1/core/block_pool.py``. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice


class Block:
    """One block's bookkeeping. ``prev`` and ``next`` link it into the free queue and are None outside of it."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0  # requests that hold it
        self.block_hash: bytes | None = None  # of its content, once it is full and published
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        content = "no hash" if self.block_hash is None else self.block_hash.hex()[:8]
        return f"Block({self.block_id}, ref {self.ref_count}, {content})"


class FreeBlockQueue:
    """Free blocks in the order in which they will be reused; a doubly linked list, so any block leaves in O(1)."""

    __slots__ = ("_head", "_tail", "num_free")

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self._head, self._tail = Block(-1), Block(-1)  # sentinels: no end needs a special case
        self._head.next, self._tail.prev = self._tail, self._head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> Block:
        """Take the block that is to be reused first. Raises RuntimeError if there is none."""
        block = self._head.next
        if block is self._tail:
            raise RuntimeError("the free block queue is empty")
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        """Put a block where it will be reused last."""
        self._insert(self._tail.prev, block, self._tail)

    def appendleft(self, block: Block) -> None:
        """Put a block where it will be reused first."""
        self._insert(self._head, block, self._head.next)

    def remove(self, block: Block) -> None:
        """Take a block out of the middle. Raises RuntimeError if it is not in the queue."""
        before, after = block.prev, block.next
        if before is None or after is None:
            raise RuntimeError(f"{block} is not in the free block queue")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self.num_free -= 1

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        if block.prev is not None or block.next is not None:
            raise RuntimeError(f"{block} is in the free block queue already")
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.num_free += 1

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not self._tail:
            yield block
            block = block.next

    def __reversed__(self) -> Iterator[Block]:
        block = self._tail.prev
        while block is not self._head:
            yield block
            block = block.prev


class BlockPool:
    """All blocks of the KV cache, the queue of the free ones, and the index from content hash to blocks.

    Equal blocks are not merged: two requests that compute the same content each keep their copy, and the index knows
    both, so that the content can be found as long as one of them lasts.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self._index: dict[bytes, dict[int, Block]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that ``take`` can hand out now, those with reusable content included."""
        return self.free_queue.num_free

    def lookup(self, block_hash: bytes) -> Block | None:
        """A block that holds this content, in use or free, or None."""
        copies = self._index.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def claim(self, blocks: Sequence[Block]) -> None:
        """Hold blocks that ``lookup`` found. Each of them that was free lowers ``num_free`` by one."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def take(self, num_blocks: int) -> list[Block]:
        """Hold ``num_blocks`` blocks for new content. RuntimeError, and nothing changed, if fewer are free."""
        if num_blocks > self.num_free:
            raise RuntimeError(f"{num_blocks} blocks wanted, {self.num_free} free: check num_free before taking")
        taken = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            self.forget(block)
            block.ref_count = 1
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Let go of one request's blocks, given in the order of its table.

        They are freed from the tail: a block can only be hit when all blocks before it are hit too, so the head of a
        prefix must outlive its tail. Blocks without a hash can never be hit and are reused before any other.
        Raises RuntimeError for a block that nobody holds (a double free).
        """
        for block in reversed(blocks):
            if block.ref_count <= 0:
                raise RuntimeError(f"{block} is released, but nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self.free_queue.appendleft(block)
                else:
                    self.free_queue.append(block)

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Let a full block be found by the hash of its content. Raises RuntimeError if it has a hash already."""
        if block.block_hash is not None:
            raise RuntimeError(f"{block} is published already")
        block.block_hash = block_hash
        self._index.setdefault(block_hash, {})[block.block_id] = block

    def forget(self, block: Block) -> None:
        """Make a block's content unfindable. The one place where a hash goes: in the block and in the index at once."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        block.block_hash = None
        copies = self._index[block_hash]
        del copies[block.block_id]
        if not copies:
            del self._index[block_hash]

    def forget_all(self) -> bool:
        """Empty the index. Only while no block is in use: returns False, and changes nothing, otherwise."""
        if self.num_free != self.num_blocks:
            return False
        for block in self.blocks:
            self.forget(block)
        return True

    def check(self) -> None:
        """Walk everything and raise RuntimeError at the first broken invariant. For tests and for debugging: O(n)."""
        at_most = self.num_blocks + 1  # broken links may run in a circle
        forwards = list(islice(self.free_queue, at_most))
        backwards = list(islice(reversed(self.free_queue), at_most))
        published = {(b.block_hash, b.block_id) for b in self.blocks if b.block_hash is not None}
        indexed = {(h, i) for h, copies in self._index.items() for i in copies}
        in_queue = {b.block_id for b in forwards}
        rules = {
            "the queue's links read the same both ways": forwards == backwards[::-1],
            "the queue's length is the free count": len(forwards) == len(in_queue) == self.num_free,
            "a block is in the queue if and only if nobody holds it": all(
                (b.ref_count == 0) == (b.block_id in in_queue) for b in self.blocks
            ),
            "no ref_count is negative": all(b.ref_count >= 0 for b in self.blocks),
            "the index and the blocks agree on every hash": published == indexed and all(self._index.values()),
        }
        for rule, holds in rules.items():
            if not holds:
                raise RuntimeError(f"block pool corrupt: not true that {rule}")
