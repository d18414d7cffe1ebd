"""Prefix caching: the chain of block hashes as a table, the state of the pool, and the prefill time that is saved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmlab.engine.kv_cache import NONE_HASH, hash_block
from llmlab.sampling.params import SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.engine.llm import LLM
    from llmlab.engine.scheduler import Scheduler


def hash_chain(requests: Mapping[str, Sequence[int]], block_size: int) -> pd.DataFrame:
    """The blocks of some sequences and their chained hashes. One row a request and block:

    request, index, tokens, hash, parent (eight hexadecimal digits; a block that is not full has no hash).
    """
    import pandas as pd

    rows = []
    for request, token_ids in requests.items():
        parent = NONE_HASH
        for index, start in enumerate(range(0, len(token_ids), block_size)):
            tokens = list(token_ids[start : start + block_size])
            digest = hash_block(parent, tokens) if len(tokens) == block_size else None
            rows.append((request, index, tokens, digest.hex()[:8] if digest else "", parent.hex()[:8]))
            parent = digest or parent
    return pd.DataFrame(rows, columns=["request", "index", "tokens", "hash", "parent"])


def pool_state(scheduler: Scheduler, names: Mapping[bytes, str]) -> list[tuple[int, str, str]]:
    """``(block id, content, state)`` of every block: those in use by id, then the free ones in the order of reuse.

    Args:
        names: hash → what to call a block of that content; blocks without a known hash are called "".
    """
    pool = scheduler.kv_cache_manager.block_pool
    held = [block for block in pool.blocks if block.ref_count]
    ordered = [(block, "held") for block in held] + [(block, "free") for block in pool.free_queue]
    return [(block.block_id, names.get(block.block_hash, ""), state) for block, state in ordered]


def first_token_by_shared(
    llm: LLM, prompt_len: int, shared_lens: Sequence[int], repeats: int = 5, seed: int = 0
) -> pd.DataFrame:
    """Time to first token of prompts of one length whose beginnings are in the cache, the rest not. One row a prompt:

    repeat, shared (tokens in common with a prompt that was computed before), cached (tokens found), seconds.
    Every repeat has new random tokens; its first prompt is cold (shared 0) and is what the others share with.

    Raises ValueError if prompts do not fit one step, or have no room to stay cached.
    """
    import pandas as pd

    config, pool = llm.engine.scheduler.config, llm.engine.scheduler.kv_cache_manager.block_pool
    blocks = (len(shared_lens) + 1) * (-(-prompt_len // llm.engine.runner.block_size) + 1)
    if prompt_len > config.max_num_batched_tokens or blocks > pool.num_blocks:
        raise ValueError(
            f"a prompt of {prompt_len} tokens must fit one step (max_num_batched_tokens={config.max_num_batched_tokens}) "
            f"and {len(shared_lens) + 1} of them the cache ({blocks} blocks of {pool.num_blocks})"
        )
    rng, rows = np.random.default_rng(seed), []
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for repeat in range(-1, repeats):  # the first one compiles, packs and touches what only the first step has to
        base = rng.integers(llm.config.vocab_size, size=prompt_len).tolist()
        for shared in (0, *shared_lens):
            rest = rng.integers(llm.config.vocab_size, size=prompt_len - shared).tolist()
            prompt = base[:shared] + rest if shared else base
            llm.engine.add_request("prompt", prompt, params)
            start = time.perf_counter()
            (output,) = llm.engine.step()
            seconds = time.perf_counter() - start
            if repeat >= 0:
                rows.append((repeat, shared, output.num_cached_tokens, seconds))
        llm.reset_prefix_cache()
    return pd.DataFrame(rows, columns=["repeat", "shared", "cached", "seconds"])


def savings(table: pd.DataFrame, prompt_len: int) -> pd.DataFrame:
    """By number of cached tokens: cached, seconds (median; low, high: 10th and 90th percentile), cached_share of the prompt,

    saved_share of the cold prompt's time: the median over repeats, each against its own cold prompt.
    """
    import pandas as pd

    cold = table[table["cached"] == 0].set_index("repeat")["seconds"]
    rows = []
    for cached, part in table.groupby("cached"):
        low, median, high = np.percentile(part["seconds"], (10, 50, 90))
        saved = 1 - part.set_index("repeat")["seconds"] / cold
        rows.append((cached, median, low, high, cached / prompt_len, float(saved.median())))
    return pd.DataFrame(rows, columns=["cached", "seconds", "low", "high", "cached_share", "saved_share"])
