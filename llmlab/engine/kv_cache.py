"""Which blocks hold which request's keys and values: prefix hits, growth, freeing, and copies in host memory.

Prefix caching: the hash of a full block covers its tokens, the hash of the block before it and, in the first block,
the request's extra keys. Equal hashes therefore mean equal content from the sequence's very start, and two requests
may share such a block. Nobody ever writes to a full block, so nothing needs to be copied on write.
Follows ``vllm/v1/core/kv_cache_manager.py`` and ``kv_cache_utils.py``. No torch here: blocks are ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from llmlab.config import CacheConfig
from llmlab.engine.block_pool import Block, BlockPool
from llmlab.engine.request import Request

NONE_HASH = bytes(32)
"""The parent of every first block. A constant, so that the same requests meet the same hits in every run."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: tuple[tuple[str, str], ...] = ()) -> bytes:
    """sha256 over (parent hash, token ids, extra keys): the name of a full block's content.

    Cryptographic, because a hit is believed without comparing tokens: whoever can make two prompts collide reads the
    other's cache. Extra keys are (kind, value) pairs, so that a salt never equals an adapter of the same name.
    """
    content = parent + array("i", token_ids).tobytes()
    if extra_keys:
        content += repr((len(token_ids), extra_keys)).encode()
    return sha256(content).digest()


class KVCacheManager:
    """Gives requests their blocks (``request.block_ids``) and takes them back. Checks before it changes anything."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.block_pool = BlockPool(config.num_blocks)
        self.num_host_blocks = config.num_host_blocks
        self.free_host_blocks = list(range(config.num_host_blocks))

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1. Free blocks with reusable content do not count."""
        return 1.0 - self.block_pool.num_free / self.block_pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """The cached blocks that a request without blocks could start from; changes nothing.

        At most num_tokens - 1 tokens: the last one must be computed, since only a computed token has logits. As blocks
        are whole, a full hit computes the whole last block again.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return []
        hits: list[Block] = []
        max_num_hits = (request.num_tokens - 1) // self.block_size
        self._extend_block_hashes(request, max_num_hits)
        for block_hash in request.block_hashes[:max_num_hits]:
            block = self.block_pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: Sequence[Block] = (), num_reserved_tokens: int = 0
    ) -> bool:
        """Extend the request's table so that its next ``num_new_tokens`` have slots; False, and no change, if it can't be.

        ``hits`` come from :meth:`get_computed_blocks`, for a request that has no blocks yet; they count against the
        free blocks where nobody holds them. ``num_reserved_tokens`` asks for blocks beyond this step's tokens.

        Blocks that this step fills are published now, before their content exists. That is safe because every layer
        writes all keys and values of a step before any attention of that layer reads; :meth:`withdraw` takes it back
        for a request that leaves the step after all.
        """
        pool, table = self.block_pool, request.block_ids
        num_tokens = max(request.num_computed_tokens, len(hits) * self.block_size) + num_new_tokens
        num_new_blocks = self.num_blocks_for(max(num_tokens, num_reserved_tokens)) - len(table) - len(hits)
        if num_new_blocks + sum(block.ref_count == 0 for block in hits) > pool.num_free:
            return False
        first_unpublished = request.num_computed_tokens // self.block_size if table else len(hits)
        if hits:
            pool.claim(hits)
            table.extend(block.block_id for block in hits)
        if num_new_blocks > 0:
            table.extend(block.block_id for block in pool.take(num_new_blocks))
        if self.enable_prefix_caching:
            num_full_blocks = num_tokens // self.block_size
            self._extend_block_hashes(request, num_full_blocks)
            for i in range(first_unpublished, num_full_blocks):
                pool.publish(pool.blocks[table[i]], request.block_hashes[i])
        return True

    def withdraw(self, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Unpublish the blocks of a table beyond its first ``num_computed_tokens``: their content will not be computed."""
        for block_id in block_ids[num_computed_tokens // self.block_size :]:
            self.block_pool.forget(self.block_pool.blocks[block_id])

    def free(self, request: Request) -> None:
        """Take back all blocks of a request, on the device and on the host. A second call changes nothing."""
        block_ids, request.block_ids = request.block_ids, []
        self.block_pool.release([self.block_pool.blocks[i] for i in block_ids])
        host_block_ids, request.host_block_ids = request.host_block_ids, []
        self.free_host_blocks.extend(host_block_ids)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Move a request's computed blocks to the host: the (device, host) pairs to copy, or None if they don't fit."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        if num_blocks > len(self.free_host_blocks):
            return None
        host_block_ids = [self.free_host_blocks.pop() for _ in range(num_blocks)]
        pairs = list(zip(request.block_ids, host_block_ids))
        self.free(request)
        request.host_block_ids = host_block_ids
        return pairs

    def swap_in(self, request: Request, num_hits: int) -> list[tuple[int, int]]:
        """Move a request back, into the table that it was just given: the (host, device) pairs to copy.

        Its first ``num_hits`` blocks were still on the device and need no copy.
        """
        host_block_ids, request.host_block_ids = request.host_block_ids, []
        self.free_host_blocks.extend(host_block_ids)
        return list(zip(host_block_ids[num_hits:], request.block_ids[num_hits:]))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, for instance after new weights. False, and no change, while a block is in use."""
        return self.block_pool.forget_all()

    def _extend_block_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, token_ids, size = request.block_hashes, request.all_token_ids, self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else NONE_HASH
            extra_keys = request.extra_keys if i == 0 else ()
            hashes.append(hash_block(parent, token_ids[i * size : (i + 1) * size], extra_keys))
