"""Two ways to preempt: throw the keys and values away and compute them again, or copy them to host memory and back.

Measured where the engine runs, and worked out on paper from datasheets for GPUs behind a PCIe link. Kwon et al. 2023,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", sections 4.5 and 7.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from llmlab.config import ModelConfig
from llmlab.engine.batch import Batch
from llmlab.measure.claims import claim
from llmlab.measure.cost import decode_costs, kv_bytes_per_token, least_seconds, prefill_costs, step_costs
from llmlab.measure.datasheets import DATASHEETS, Roof
from llmlab.measure.timer import measure_in_turns

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.engine.llm import LLM

PCIE_GENERATION = MappingProxyType({"A100-80GB SXM": 4, "H100 SXM": 5, "H200 SXM": 5, "RTX 4090": 4})
"""By which generation of PCI Express, with 16 lanes, a GPU is connected to its host."""

_TRANSFERS_PER_S = MappingProxyType({3: 8e9, 4: 16e9, 5: 32e9})


def pcie_bandwidth(generation: int, lanes: int = 16) -> float:
    """Bytes/s in one direction: the line rate less its 128b/130b code. Packet headers take a tenth or two more.

    Raises ValueError for a generation that is not listed (PCI-SIG, PCI Express Base Specification, 3.0 to 5.0).
    """
    if generation not in _TRANSFERS_PER_S:
        raise ValueError(f"PCIe generation must be one of {', '.join(map(str, _TRANSFERS_PER_S))}, got {generation!r}")
    return _TRANSFERS_PER_S[generation] * lanes * 128 / 130 / 8


def recompute_and_swap(
    llm: LLM, contexts: Sequence[int], repeats: int = 7, max_seconds: float = 2.0, seed: int = 0
) -> pd.DataFrame:
    """What it takes to bring back a request of so many tokens, by either way, in turns. One row a context:

    context, recompute, swap_out, swap_in, swap (both): medians in seconds; recompute_low/high, swap_low/high: 10th and 90th
    percentile. Recompute is the forward pass that writes all keys and values anew. Blocks lie scattered, as in a used cache.

    Raises ValueError if the engine has no host blocks, has work to do, or a context does not fit.
    """
    import pandas as pd

    runner, engine = llm.engine.runner, llm.engine
    num_blocks = engine.scheduler.cache_config.num_blocks
    num_host_blocks = engine.scheduler.cache_config.num_host_blocks
    most = min(num_blocks, num_host_blocks) * runner.block_size
    if max(contexts) > most:
        raise ValueError(f"a context of {max(contexts)} tokens; device and host blocks both hold at most {most}")
    if engine.has_unfinished_requests():
        raise ValueError("the engine has unfinished requests, whose keys and values would be overwritten")
    llm.reset_prefix_cache()
    rng, rows = np.random.default_rng(seed), []
    for context in contexts:
        count = -(-context // runner.block_size)
        on_device, on_host = (rng.permutation(n)[:count].tolist() for n in (num_blocks, num_host_blocks))
        out, back = list(zip(on_device, on_host)), list(zip(on_host, on_device))
        batch = Batch.single(
            rng.integers(llm.config.vocab_size, size=context).tolist(), runner.block_size, runner.device
        )
        clocked = measure_in_turns(
            {
                "recompute": lambda batch=batch: runner.forward(batch),
                "swap_out": lambda out=out: runner.swap(out),
                "swap_in": lambda back=back: runner.swap((), back),
                "swap": lambda out=out, back=back: runner.swap(out, back),
            },
            device=runner.device,
            warmup=1,
            repeats=repeats,
            max_seconds=max_seconds,
        )
        row = {"context": context} | {way: measured.median for way, measured in clocked.items()}
        for way in ("recompute", "swap"):
            row |= {f"{way}_low": clocked[way].low, f"{way}_high": clocked[way].high}
        rows.append(row)
    return pd.DataFrame(rows)


def recompute_seconds(
    config: ModelConfig, roof: Roof, context: int, decodes: int = 0, decode_context: int = 1
) -> float:
    """The least time that computing a context again adds, by the roofline, to a step of so many decodes.

    In a step of its own (no decodes) it has to read all weights; beside decodes, which read them anyway, it adds what
    arithmetic there is beyond that.
    """
    if not decodes:
        return least_seconds(prefill_costs(config, 1, context), roof)
    others = decode_costs(config, decodes, decode_context)
    both = step_costs(config, [1] * decodes + [context], [decode_context] * decodes + [context])
    return least_seconds(both, roof) - least_seconds(others, roof)


def swap_seconds(config: ModelConfig, link: float, context: int) -> float:
    """The least time to copy a context's keys and values (bfloat16) out and back in, at ``link`` bytes/s in either direction."""
    return 2 * context * kv_bytes_per_token(config) / link


def on_paper(
    config: ModelConfig,
    roof: Roof,
    link: float,
    contexts: Sequence[int],
    *,
    decodes: int = 0,
    decode_context: int = 1,
    mfu: float = 1.0,
    link_share: float = 1.0,
) -> pd.DataFrame:
    """Columns context, recompute, swap: least seconds, at so much of the peak FLOP/s and of the link's bandwidth."""
    import pandas as pd

    roof = replace(roof, flops=roof.flops * mfu)
    rows = [
        (
            context,
            recompute_seconds(config, roof, context, decodes, decode_context),
            swap_seconds(config, link * link_share, context),
        )
        for context in contexts
    ]
    return pd.DataFrame(rows, columns=["context", "recompute", "swap"])


def by_gpu(
    config: ModelConfig, contexts: Sequence[int], decodes: Sequence[int], *, decode_context: int = 2048
) -> pd.DataFrame:
    """On paper, at full rates, for every GPU whose link is known. One row a GPU and number of decodes that recompute rides with:

    gpu, link (bytes/s), decodes, recompute and swap (seconds, at the middle of the contexts), crossover (tokens from which on
    swapping is faster), verdict (of claim C28, if the contexts were the usual range).
    """
    import pandas as pd

    rows = []
    for gpu, generation in PCIE_GENERATION.items():
        link = pcie_bandwidth(generation)
        for count in decodes:
            table = on_paper(
                config, DATASHEETS[gpu].roof(), link, contexts, decodes=count, decode_context=decode_context
            )
            n = claim_numbers(table)
            seconds = n["recompute_seconds"], n["swap_seconds"]
            rows.append((gpu, link, count, *seconds, n["crossover_context"], str(claim("C28").decide(n))))
    return pd.DataFrame(rows, columns=["gpu", "link", "decodes", "recompute", "swap", "crossover", "verdict"])


def crossover(table: pd.DataFrame) -> float:
    """The context from which on swapping is faster, in the table's log-log interpolation.

    0 if it is faster from the first context on, inf if recomputing is faster at the last one.
    """
    slower = np.log(table["recompute"] / table["swap"]).to_numpy()  # of recomputing; negative while it is faster
    contexts = np.log(table["context"]).to_numpy()
    recompute_wins = np.flatnonzero(slower < 0)
    if not len(recompute_wins):
        return 0.0
    last = recompute_wins[-1]
    if last == len(slower) - 1:
        return math.inf
    share = slower[last] / (slower[last] - slower[last + 1])
    return float(np.exp(contexts[last] + share * (contexts[last + 1] - contexts[last])))


def claim_numbers(table: pd.DataFrame) -> dict[str, float]:
    """What claim C28's rule reads, from a table with columns context, recompute, swap."""
    middle = table.iloc[len(table) // 2]
    return {
        "recompute_seconds": float(middle["recompute"]),
        "swap_seconds": float(middle["swap"]),
        "crossover_context": crossover(table),
        "smallest_context": float(table["context"].min()),
        "largest_context": float(table["context"].max()),
    }


def break_even_link(config: ModelConfig, seconds: Callable[[int], float], context: int) -> float:
    """Bytes/s of a link over which swapping a context takes as long as ``seconds(context)``: on a slower one, recompute."""
    return 2 * context * kv_bytes_per_token(config) / seconds(context)
