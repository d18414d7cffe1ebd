"""Flat batches and the embedding: what padding wastes, where each token of a batch goes, and what a look-up costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from llmlab import ops
from llmlab.config import ModelConfig
from llmlab.engine.batch import Batch
from llmlab.measure.cost import step_costs, total
from llmlab.measure.roofline import StepDriver
from llmlab.measure.timer import Comparison, Measurement, compare, measure_in_turns


def token_table(batch: Batch, block_size: int) -> pd.DataFrame:
    """One row a token of a flat batch: row, request, input_id, position, slot, block, offset; in batch order."""
    counts = batch.query_start_loc.diff().tolist()
    requests = [name for name, count in zip(batch.req_ids, counts, strict=True) for _ in range(count)]
    slots = batch.slot_mapping.tolist()
    return pd.DataFrame(
        {
            "row": range(batch.num_sched_tokens),
            "request": requests,
            "input_id": batch.input_ids.tolist(),
            "position": batch.positions.tolist(),
            "slot": slots,
            "block": [slot // block_size for slot in slots],
            "offset": [slot % block_size for slot in slots],
        }
    )


def length_distributions(num_reqs: int = 32, seed: int = 0) -> dict[str, list[tuple[int, int]]]:
    """Steps to pad: name → ``(query_len, seq_len)`` of each request, the longest query first.

    Prompts of equal, uniform, log-normal (as chats have) and two-peaked lengths; decodes alone, at contexts as unequal; and
    decodes beside a chunk of 512 tokens, which is what chunked prefill makes of every step.
    """
    rng = np.random.default_rng(seed)
    uniform = rng.integers(16, 513, num_reqs)
    chats = np.clip(rng.lognormal(np.log(120), 1.0, num_reqs), 4, 2048).astype(int)
    two = np.where(np.arange(num_reqs) < num_reqs // 8, 1024, 64)
    contexts = rng.integers(64, 2049, num_reqs)
    prompts = lambda lengths: [(int(n), int(n)) for n in lengths]
    decodes = [(1, int(n)) for n in contexts]
    steps = {
        "equal prompts": prompts([256] * num_reqs),
        "uniform, 16 to 512": prompts(uniform),
        "log-normal, median 120": prompts(chats),
        "one in eight of 1024, rest 64": prompts(two),
        "decodes only": decodes,
        "decodes and a chunk of 512": [(512, 512), *decodes[1:]],
    }
    return {name: sorted(step, reverse=True) for name, step in steps.items()}


def padding_waste(config: ModelConfig, query_lens: Sequence[int], seq_lens: Sequence[int]) -> dict[str, float]:
    """One step flat, and as a rectangle in which every request has the longest query and the longest sequence.

    Returns tokens, padded_tokens, flops, padded_flops, and the shares token_waste and flop_waste of the padded step that
    are padding. The padded step, too, sends only the last token of each request through the LM head.
    """
    flat = total(step_costs(config, query_lens, seq_lens)).flops
    many = len(query_lens)
    longest = max(query_lens), max(seq_lens)
    padded = total(step_costs(config, [longest[0]] * many, [longest[1]] * many)).flops
    tokens, rectangle = sum(query_lens), many * longest[0]
    return {
        "requests": many,
        "tokens": tokens,
        "padded_tokens": rectangle,
        "flops": flat,
        "padded_flops": padded,
        "token_waste": 1 - tokens / rectangle,
        "flop_waste": 1 - flat / padded,
    }


def padding_table(config: ModelConfig, steps: Mapping[str, Sequence[tuple[int, int]]]) -> pd.DataFrame:
    """:func:`padding_waste` of each step, by its name."""
    rows = {name: padding_waste(config, *zip(*step)) for name, step in steps.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step").astype({"requests": int, "tokens": int})


def padded_against_flat(
    driver: StepDriver, lengths: Sequence[int], repeats: int = 5, max_seconds: float = 8.0
) -> tuple[dict[str, Measurement], Comparison]:
    """Clock one prefill step of prompts of these lengths, flat and padded to the longest, with the same model and ops."""
    batches = {
        "flat": driver.batch(lengths, lengths),
        "padded": driver.batch([max(lengths)] * len(lengths), [max(lengths)] * len(lengths)),
    }
    runs: dict[str, Callable[[], Tensor]] = {name: lambda b=b: driver.run(b) for name, b in batches.items()}
    taken = measure_in_turns(runs, device=driver.model.ops.device, warmup=1, repeats=repeats, max_seconds=max_seconds)
    return taken, compare("flat", taken["flat"], "padded", taken["padded"])


def one_hot_matmul(token_ids: Tensor, weight: Tensor) -> Tensor:
    """The embedding as a matrix product: ``one_hot(token_ids) [T, V] @ weight [V, H]``. What the look-up replaces."""
    return torch.nn.functional.one_hot(token_ids.long(), weight.shape[0]).to(weight.dtype) @ weight


def lookup_times(
    num_tokens: Sequence[int],
    vocab_size: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_seconds: float = 1.0,
) -> pd.DataFrame:
    """The look-up against the one-hot product, in turns.

    Returns one row a number of tokens: tokens, lookup_bytes, matmul_flops, matmul_bytes, lookup_seconds, matmul_seconds, ratio,
    sure_low, sure_high (product over look-up), load. Ids are random: no two calls look up the same rows.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab_size, hidden_size, generator=generator).to(device, dtype)
    look_up = ops.bind("triton" if device.type == "cuda" else "torch", device).embedding
    rows = []
    for count in num_tokens:
        sets = [(torch.randint(vocab_size, (count,), generator=generator).to(device), weight) for _ in range(8)]
        runs = {"look-up": look_up, "product": one_hot_matmul}
        taken = measure_in_turns(runs, inputs=sets, device=device, max_seconds=max_seconds)
        found = compare("look-up", taken["look-up"], "product", taken["product"])
        one_hot = torch.empty(count, vocab_size, dtype=dtype, device="meta")
        product = ops.linear.cost(one_hot, weight.T)
        rows.append(
            {
                "tokens": count,
                "lookup_bytes": ops.embedding.cost(*sets[0]).bytes,
                "matmul_flops": product.flops,
                "matmul_bytes": product.bytes,
                "lookup_seconds": taken["look-up"].median,
                "matmul_seconds": taken["product"].median,
                "ratio": found.ratio,
                "sure_low": found.sure_low,
                "sure_high": found.sure_high,
                "load": found.load,
            }
        )
    return pd.DataFrame(rows)
