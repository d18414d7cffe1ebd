"""Prefix caching and block tables, through the manager alone: no scheduler, no model."""

from __future__ import annotations

import hashlib
import random
import struct
from itertools import count

import pytest

from llmlab.config import CacheConfig
from llmlab.engine.kv_cache import NONE_HASH, KVCacheManager, hash_block
from llmlab.engine.request import Request
from llmlab.sampling.params import SamplingParams

_numbers = count()


def make_manager(num_blocks: int, block_size: int = 4, **kwargs) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, **kwargs))


def make_request(prompt, *, cache_salt: str | None = None, **params) -> Request:
    return Request(f"r{next(_numbers)}", prompt, SamplingParams(**params), cache_salt=cache_salt)


def num_hit_tokens(manager: KVCacheManager, prompt, **kwargs) -> int:
    return len(manager.get_computed_blocks(make_request(prompt, **kwargs))) * manager.block_size


def run(manager: KVCacheManager, prompt, **kwargs) -> tuple[Request, int]:
    """Admit and compute a whole prompt: the request, still holding its blocks, and how many tokens it hit."""
    request = make_request(prompt, **kwargs)
    hits = manager.get_computed_blocks(request)
    num_hits = len(hits) * manager.block_size
    assert manager.allocate_slots(request, request.num_tokens - num_hits, hits)
    request.num_computed_tokens = request.num_tokens
    manager.block_pool.check()
    return request, num_hits


def run_and_free(manager: KVCacheManager, prompt, **kwargs) -> int:
    request, num_hits = run(manager, prompt, **kwargs)
    manager.free(request)
    manager.block_pool.check()
    return num_hits


# ---- hashes


def test_a_hash_is_sha256_over_parent_tokens_and_tagged_keys():
    expected = hashlib.sha256(NONE_HASH + struct.pack("4i", 1, 2, 3, 70000)).digest()
    assert hash_block(NONE_HASH, [1, 2, 3, 70000]) == expected
    assert (
        hash_block(expected, [1, 2, 3, 70000]) == hashlib.sha256(expected + struct.pack("4i", 1, 2, 3, 70000)).digest()
    )


def test_hashes_differ_by_parent_tokens_order_and_kind_of_key():
    keys = [(), (("cache_salt", "a"),), (("lora_name", "a"),), (("cache_salt", "b"),)]
    keys += [(("cache_salt", "a"), ("lora_name", "b")), (("cache_salt", "a', 'b"),)]
    tokens = [(10, 40), (9, 71), (40, 10), (10, 41)]  # the first two are equal under a base-31 rolling hash
    hashes = {hash_block(p, t, k) for p in (NONE_HASH, bytes(31) + b"\1") for t in tokens for k in keys}
    assert len(hashes) == 2 * len(tokens) * len(keys)


# ---- what is hit


def test_an_old_entry_does_not_survive_new_content():
    manager = make_manager(4)
    run_and_free(manager, range(1, 9))
    run_and_free(manager, range(101, 117))  # takes all four blocks
    assert num_hit_tokens(manager, list(range(1, 9)) + [0]) == 0


def test_hits_can_be_hit_again():
    manager = make_manager(8)
    assert [run_and_free(manager, range(1, 10)) for _ in range(4)] == [0, 8, 8, 8]


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_always_computed(length, hit):
    manager = make_manager(8)
    assert [run_and_free(manager, range(length)) for _ in range(3)] == [0, hit, hit]


def test_the_same_block_after_another_prefix_is_no_hit():
    manager = make_manager(16, block_size=2)
    run_and_free(manager, [1, 2, 9, 9, 5])
    assert num_hit_tokens(manager, [3, 4, 9, 9, 5]) == 0
    assert num_hit_tokens(manager, [9, 9, 5]) == 0
    assert num_hit_tokens(manager, [1, 2, 9, 9, 5]) == 4


def test_a_collision_of_weak_hashes_is_no_hit():
    manager = make_manager(16, block_size=2)
    run_and_free(manager, [10, 40, 1])
    assert num_hit_tokens(manager, [9, 71, 1]) == 0


def test_a_salt_separates_and_nothing_else_does():
    manager = make_manager(32)
    prompt = list(range(13))
    assert run_and_free(manager, prompt, cache_salt="a") == 0
    assert run_and_free(manager, prompt, cache_salt="b") == 0
    assert run_and_free(manager, prompt) == 0
    assert run_and_free(manager, prompt, cache_salt="") == 0
    for salt in ("a", "b", None, ""):
        assert run_and_free(manager, prompt, cache_salt=salt) == 12
        assert run_and_free(manager, prompt, cache_salt=salt, temperature=0.3, seed=5) == 12


def test_an_adapter_is_not_a_salt_of_the_same_name():
    manager = make_manager(32)
    prompt = list(range(13))
    run_and_free(manager, prompt, cache_salt="a")
    request = Request("adapted", prompt, SamplingParams(), cache_tags=(("lora_name", "a"),))
    assert manager.get_computed_blocks(request) == []


def test_tags_separate_like_salts_and_beside_them():
    manager = make_manager(64)
    keys = [
        {},
        {"cache_salt": "a"},
        {"cache_tags": (("rope_length", "long"),)},
        {"cache_tags": (("rope_length", "9"),)},
    ]
    keys += [{"cache_salt": "a", "cache_tags": (("rope_length", "long"),)}]
    for expected in (0, 8):
        for kwargs in keys:
            request = Request("r", range(9), SamplingParams(), **kwargs)
            hits = manager.get_computed_blocks(request)
            assert len(hits) * 4 == expected
            assert manager.allocate_slots(request, 9 - expected, hits)
            manager.free(request)


def test_the_salt_enters_the_first_block_only_and_so_the_chain():
    manager = make_manager(32)
    salted, plain = (run(manager, range(12), cache_salt=salt)[0] for salt in ("a", None))
    assert not set(salted.block_hashes) & set(plain.block_hashes)
    assert salted.block_hashes[1] == hash_block(salted.block_hashes[0], range(4, 8))


def test_walks_stop_at_the_first_miss():
    manager = make_manager(3)
    run_and_free(manager, range(12))
    manager.block_pool.forget(manager.block_pool.lookup(make_hashes(manager, range(12))[1]))
    assert num_hit_tokens(manager, range(13)) == 4


def make_hashes(manager: KVCacheManager, tokens) -> list[bytes]:
    tokens, hashes = list(tokens), [NONE_HASH]
    for i in range(0, len(tokens), manager.block_size):
        hashes.append(hash_block(hashes[-1], tokens[i : i + manager.block_size]))
    return hashes[1:]


def test_the_head_of_a_freed_prefix_outlives_its_tail():
    manager = make_manager(3)
    run_and_free(manager, range(1, 13))
    manager.block_pool.take(1)
    assert num_hit_tokens(manager, range(1, 14)) == 8
    manager.block_pool.take(1)
    assert num_hit_tokens(manager, range(1, 14)) == 4


def test_prompt_logprobs_write_the_cache_and_do_not_read_it():
    manager = make_manager(16)
    assert run_and_free(manager, range(9), prompt_logprobs=0) == 0
    assert run_and_free(manager, range(9), prompt_logprobs=2) == 0
    assert run_and_free(manager, range(9)) == 8


def test_caching_off_never_hits_and_reuses_the_latest_blocks_first():
    manager = make_manager(8, enable_prefix_caching=False)
    request, _ = run(manager, range(9))
    block_ids = set(request.block_ids)
    manager.free(request)
    assert run_and_free(manager, range(9)) == 0
    request, _ = run(manager, range(9))
    assert set(request.block_ids) == block_ids
    assert all(block.block_hash is None for block in manager.block_pool.blocks)


def test_output_tokens_are_cached_too():
    manager = make_manager(8)
    request, _ = run(manager, [1, 2, 3])
    for token_id in range(4, 10):
        request.append_output_token_id(token_id)
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    assert num_hit_tokens(manager, range(1, 10)) == 8  # still running
    manager.free(request)
    assert num_hit_tokens(manager, range(1, 10)) == 8


def test_only_scheduled_tokens_are_published():
    manager = make_manager(8)
    request = make_request(range(16))
    assert manager.allocate_slots(request, 6, num_reserved_tokens=16)
    assert len(request.block_ids) == 4
    request.num_computed_tokens = 6
    assert num_hit_tokens(manager, range(17)) == 4
    assert manager.allocate_slots(request, 7)
    assert num_hit_tokens(manager, range(17)) == 12
    manager.block_pool.check()


def test_reset_needs_an_idle_pool():
    manager = make_manager(8)
    request, _ = run(manager, range(9))
    assert not manager.reset_prefix_cache() and num_hit_tokens(manager, range(9)) == 8
    manager.free(request)
    assert manager.reset_prefix_cache() and num_hit_tokens(manager, range(9)) == 0
    assert run_and_free(manager, range(9)) == 0 and run_and_free(manager, range(9)) == 8


# ---- what is allocated


def test_hits_on_free_blocks_count_against_the_free_ones_and_failure_changes_nothing():
    manager = make_manager(5)
    holder, _ = run(manager, range(100, 108))  # two blocks in use: three are free
    run_and_free(manager, range(8))  # two of these hold a prefix now
    pool = manager.block_pool
    request = make_request(range(16))
    hits = manager.get_computed_blocks(request)
    assert len(hits) == 2 and pool.num_free == 3
    order, refs = [b.block_id for b in pool.free_queue], [b.ref_count for b in pool.blocks]

    assert not manager.allocate_slots(request, 8, hits)  # 2 new + 2 hits = 4 > 3

    assert pool.num_free == 3 and [b.block_id for b in pool.free_queue] == order
    assert [b.ref_count for b in pool.blocks] == refs and request.block_ids == []
    assert num_hit_tokens(manager, range(16)) == 8
    pool.check()
    assert manager.allocate_slots(request, 4, hits)  # 1 + 2 = 3
    assert pool.num_free == 0 and len(request.block_ids) == 3
    manager.free(holder)


def test_hits_in_use_cost_nothing():
    manager = make_manager(3)
    first, _ = run(manager, range(9))  # all three blocks: two full, one partial
    manager.block_pool.release([manager.block_pool.blocks[first.block_ids.pop()]])
    second = make_request(range(9))
    hits = manager.get_computed_blocks(second)
    assert manager.block_pool.num_free == 1 and manager.allocate_slots(second, 1, hits)
    assert second.block_ids[:2] == first.block_ids and manager.block_pool.num_free == 0


def test_tables_are_append_only_and_replaced_when_freed():
    manager = make_manager(8)
    request, _ = run(manager, range(6))
    kept, before = request.block_ids, list(request.block_ids)
    request.append_output_token_id(6)
    request.num_computed_tokens = 6
    assert manager.allocate_slots(request, 3)
    assert kept is request.block_ids and kept[:2] == before and len(kept) == 3
    manager.free(request)
    assert request.block_ids == [] and len(kept) == 3


def test_free_is_idempotent():
    manager = make_manager(8, num_host_blocks=4)
    request, _ = run(manager, range(6))
    for _ in range(2):
        manager.free(request)
        assert manager.block_pool.num_free == 8 and len(manager.free_host_blocks) == 4
        manager.block_pool.check()


def test_usage_is_the_share_of_blocks_held():
    manager = make_manager(8)
    request, _ = run(manager, range(6))
    assert manager.usage == 0.25
    manager.free(request)
    assert manager.usage == 0.0


def test_blocks_of_a_step_that_is_not_run_can_be_withdrawn():
    manager = make_manager(8)
    request = make_request(range(10))
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    manager.allocate_slots(request, 5)
    assert num_hit_tokens(manager, range(10)) == 8
    manager.withdraw(request.block_ids, 5)
    assert num_hit_tokens(manager, range(10)) == 4
    manager.free(request)
    assert num_hit_tokens(manager, range(10)) == 4


# ---- swapping


def test_swap_out_and_in_name_the_blocks_to_copy():
    manager = make_manager(6, num_host_blocks=4, enable_prefix_caching=False)
    request, _ = run(manager, range(9))
    device = list(request.block_ids)
    out = manager.swap_out(request)
    assert [source for source, _ in out] == device and request.block_ids == []
    assert request.host_block_ids == [target for _, target in out]
    assert len(set(request.host_block_ids)) == 3 and len(manager.free_host_blocks) == 1
    assert manager.block_pool.num_free == 6

    host = list(request.host_block_ids)
    assert manager.allocate_slots(request, 1)
    back = manager.swap_in(request, 0)
    assert [source for source, _ in back] == host and [target for _, target in back] == request.block_ids
    assert request.host_block_ids == [] and len(manager.free_host_blocks) == 4


def test_only_computed_blocks_are_swapped():
    manager = make_manager(8, num_host_blocks=8)
    request = make_request(range(20))
    manager.allocate_slots(request, 5, num_reserved_tokens=20)
    request.num_computed_tokens = 5
    assert len(manager.swap_out(request)) == 2
    assert manager.block_pool.num_free == 8


def test_a_full_host_refuses_and_nothing_changes():
    manager = make_manager(8, num_host_blocks=2)
    request, _ = run(manager, range(9))
    table = list(request.block_ids)
    assert manager.swap_out(request) is None
    assert request.block_ids == table and request.host_block_ids == [] and len(manager.free_host_blocks) == 2


def test_what_is_still_on_the_device_is_not_copied_back():
    manager = make_manager(6, num_host_blocks=6)
    request, _ = run(manager, range(9))
    host = [target for _, target in manager.swap_out(request)]
    hits = manager.get_computed_blocks(request)
    assert len(hits) == 2 and manager.allocate_slots(request, 1, hits)
    assert manager.swap_in(request, len(hits)) == [(host[2], request.block_ids[2])]


def test_swapped_in_blocks_can_be_hit_again():
    manager = make_manager(3, num_host_blocks=3)
    request, _ = run(manager, range(9))
    manager.swap_out(request)
    run_and_free(manager, range(50, 61))  # overwrites everything
    assert manager.get_computed_blocks(request) == []
    assert manager.allocate_slots(request, 1)
    manager.swap_in(request, 0)
    assert num_hit_tokens(manager, range(9)) == 8
    manager.block_pool.check()


# ---- everything at random


def test_random_requests_hit_exactly_what_the_pool_still_holds():
    """Against a model that knows, for every block, which tokens were last written to it from the sequence's start."""
    random_ = random.Random(1)
    manager = make_manager(24, block_size=2)
    content: dict[int, tuple[int, ...]] = {}
    live: list[Request] = []
    num_hits = 0
    for _ in range(3_000):
        if live and random_.random() < 0.45:
            manager.free(live.pop(random_.randrange(len(live))))
        else:
            request = make_request([random_.randint(0, 1) for _ in range(random_.randint(1, 14))])
            hits = manager.get_computed_blocks(request)
            for i, block in enumerate(hits):
                assert content[block.block_id] == tuple(request.prompt_token_ids[: 2 * (i + 1)])
            if not manager.allocate_slots(request, request.num_tokens - 2 * len(hits), hits):
                continue
            num_hits += len(hits)
            request.num_computed_tokens = request.num_tokens
            for i, block_id in enumerate(request.block_ids):
                content[block_id] = tuple(request.prompt_token_ids[: 2 * (i + 1)])
            live.append(request)
        manager.block_pool.check()
        held = {i for request in live for i in request.block_ids}
        assert manager.block_pool.num_free + len(held) == 24
    assert num_hits > 1_000
