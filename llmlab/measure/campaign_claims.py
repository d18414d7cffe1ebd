"""The campaign's claims: the numbers that their rules read, from the experiments that the notebooks run too.

Each entry of :data:`EXPERIMENTS` gives numbers for one claim on one device. One that cannot run says why, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd
import torch

from llmlab.measure import roofline
from llmlab.measure.campaign_correctness import paged_batch
from llmlab.measure.campaign_engine import model_config
from llmlab.measure.experiments import roofline as steps
from llmlab.measure.hardware import Ceilings
from llmlab.measure.timer import compare, measure_in_turns

Numbers = dict[str, float]


def norms(device: torch.device) -> Numbers:
    """C08: the engine's RMSNorm against LayerNorm written likewise, at its least sure value over the shapes."""
    from llmlab.measure.experiments.norm import norm_errors, rms_against_layer

    table = rms_against_layer(device=device, max_seconds=0.3)
    errors = norm_errors()
    own = table[table["implementation"] == table["implementation"].iloc[-1]]
    return {"speedup": float(own["sure_low"].min()), "error_ratio": float(errors["ratio"].max())}


def fused_norm(device: torch.device) -> Numbers:
    """C17: at the largest shape, where traffic and not the launch is what takes time."""
    from llmlab.measure.experiments.norm import fused_against_apart

    largest = fused_against_apart(device=device, max_seconds=0.3).sort_values("working_set").iloc[-1]
    return {"bytes_ratio": float(largest["bytes_ratio"]), "time_ratio": float(largest["ratio"])}


def rope_table(device: torch.device) -> Numbers:
    """C10: the engine's own way, at its least sure value over orders and sizes."""
    from llmlab.measure.experiments.rope import table_against_computing

    table = table_against_computing(device=device, max_seconds=0.3)
    own = table[table["implementation"] == table["implementation"].iloc[-1]]
    return {"speedup": float(own["sure_low"].min())}


def block_size(device: torch.device) -> Numbers:
    """C06: shuffled blocks of 1 and of 16 tokens against contiguous keys."""
    from llmlab.measure.experiments.paging import sweep_block_size

    table = sweep_block_size((1, 16), device=device, max_seconds=2.0).set_index(["layout", "block_size"])
    return {f"slowdown_block_{n}": float(table.loc[("shuffled", n), "slowdown"]) for n in (1, 16)}


def split_decoding(device: torch.device) -> Numbers:
    """C31: one request of 8191 tokens with Llama-3-8B's heads, its keys in one piece and split as the kernel likes."""
    from llmlab.kernels.flash_decoding import flash_decoding

    args, _, _ = paged_batch(device, torch.bfloat16, [(1, 8191)], (32, 8, 128), 16)
    run = lambda splits: flash_decoding(*args, 128**-0.5, num_splits=splits)
    taken = measure_in_turns({"whole": lambda: run(1), "split": lambda: run(None)}, device=device, max_seconds=1.0)
    error = float((run(1).double() - run(None).double()).abs().max())
    return {"speedup": compare("split", taken["split"], "whole", taken["whole"]).ratio, "max_error": error}


def wide_projections(device: torch.device) -> Numbers:
    """C18: the gain that is sure at every number of tokens, with the weights of a model that suits the device."""
    from llmlab.measure.experiments.mlp import least_gain, wide_against_narrow

    on_gpu = device.type == "cuda"
    config, tokens = model_config("llama-3-8b" if on_gpu else "smollm2-135m-instruct"), (1, 16, 64)
    layers = 2 if on_gpu else 24
    table = wide_against_narrow(config, tokens, torch.bfloat16, device.type, layers=layers, max_seconds=0.4)
    return {"gate_up_gain": least_gain(table, "gate/up"), "qkv_gain": least_gain(table, "QKV")}


def tiles(device: torch.device) -> Numbers:
    """C12: the engine's attention against two passes in float64, and how its memory grows."""
    from llmlab.measure.experiments.attention import growth_exponent, memory_growth

    growth = memory_growth(device=device)
    ours = growth[growth["way"] == "tiles"]
    return {
        "max_error": float(ours["max_error"].max()),
        "memory_exponent": growth_exponent(ours["length"], ours["bytes"]),
    }


def paged_prefill(device: torch.device) -> Numbers:
    """C13: the longest prompt of the sweep, and what a second request with the same beginning finds in the cache."""
    from llmlab import LLM, SamplingParams
    from llmlab.hub import tiny_model_dir
    from llmlab.measure.experiments.attention import paged_against_contiguous

    longest = paged_against_contiguous(device=device, max_seconds=0.6).iloc[-1]
    llm = LLM(str(tiny_model_dir()), device=device.type, dtype="float32", num_kv_blocks=64)
    shared, greedy = [(7 * i) % 250 for i in range(64)], SamplingParams(temperature=0, max_tokens=4)
    outputs = [llm.generate([[*shared, end]], greedy, use_tqdm=False)[0] for end in (5, 11)]
    return {"slowdown": float(longest["slowdown"]), "cached_tokens": outputs[1].num_cached_tokens}


def tile_reuse(device: torch.device) -> Numbers:
    """C37: attention of 512 queries over 8192 keys, against what it could do if each query read its own keys."""
    from llmlab.measure.experiments.attention import SMOLLM2, sweep_queries
    from llmlab.measure.hardware import ceilings

    rates = sweep_queries((512,), device=device).iloc[0]
    limits = ceilings(device)
    roof = limits.roof("bfloat16", limits.level_holding(rates["kv_bytes"]))
    return {
        "rate_over_unamortised": float(
            rates["flops_per_s"] / roof.bandwidth / (SMOLLM2.num_heads / SMOLLM2.num_kv_heads)
        )
    }


EXPERIMENTS: tuple[tuple[str, Callable[[torch.device], Numbers], bool], ...] = (
    ("C31", split_decoding, True),
    ("C06", block_size, False),
    ("C17", fused_norm, False),
    ("C08", norms, False),
    ("C10", rope_table, False),
    ("C12", tiles, False),
    ("C37", tile_reuse, False),
    ("C18", wide_projections, False),
    ("C13", paged_prefill, False),
)
"""Claim, its experiment, whether that runs on a GPU only."""


def from_steps(table: pd.DataFrame, model: str) -> Iterator[tuple[str, Callable[[], Numbers], float]]:
    """Claims that rows of the table ``engine`` decide: claim, a function of the numbers, and the highest load of those rows."""
    decodes = table[(table["model"] == model) & (table["query_len"] == 1)] if len(table) else table
    if decodes.empty:
        return
    context = decodes.groupby("context")["num_reqs"].nunique().idxmax()
    batches = decodes[decodes["context"] == context]
    yield "C01", lambda: steps.batching(batches), batches["load"].max()
    yield "C15", lambda: steps.batch_lifts(batches), batches["load"].max()
    longer = _complete(decodes)
    yield "C16", lambda: steps.decode_attention(longer, model_config(model), torch.bfloat16), longer["load"].max()
    alone = decodes[decodes["num_reqs"] == 1].iloc[0]
    graph = alone.get("graph_seconds")
    has_graph = graph is not None and graph == graph
    played = graph if has_graph else alone["eager_seconds"]
    yield "C38", lambda: steps.recorded_step(alone, played, has_graph), alone["load"]


def _complete(decodes: pd.DataFrame) -> pd.DataFrame:
    """The largest batch of those with most contexts."""
    contexts = decodes.groupby("num_reqs")["context"].nunique()
    return decodes[decodes["num_reqs"] == contexts[contexts == contexts.max()].index.max()]


def bound_by(driver: roofline.StepDriver, ceilings: Ceilings, length: int) -> Numbers:
    """C14: ops of one prefill and one decode step, clocked in their places."""
    points = []
    for phase, new in (("prefill", length), ("decode", 1)):
        batch = driver.batch([new], [length])
        driver.run_eagerly(batch)
        recording = roofline.record_steps(lambda b=batch: driver.run_eagerly(b), 7)
        roof = roofline.roof_for(ceilings, driver.dtype, roofline.working_set(driver.model, length, driver.dtype))
        points.append(roofline.points(recording, roof).reset_index().assign(phase=phase))
    return steps.bound_shares(pd.concat(points))
