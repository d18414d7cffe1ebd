"""The campaign's clocks on the engine: prefill and decode steps of models with random weights, over batch and context."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llmlab import ops
from llmlab.config import ModelConfig
from llmlab.measure import roofline
from llmlab.measure.cost import kv_bytes_per_token, parameters
from llmlab.measure.hardware import Ceilings
from llmlab.measure.known_models import known_config
from llmlab.measure.system import LoadMeter, available_bytes
from llmlab.measure.timer import measure
from llmlab.model.llama import LlamaForCausalLM
from llmlab.model.weights import random_weights

MAX_MODEL_LEN = 8192
Shape = tuple[int, int, int]
"""Requests, new tokens of each, context."""

SHAPES: dict[str, tuple[Shape, ...]] = {
    # The most telling first: a run may be cut off anywhere.
    "llama-3-8b": (
        (1, 1, 512), (1, 2048, 2048), (64, 1, 2048), (16, 1, 2048), (1, 1, 8192), (256, 1, 512), (1, 512, 512), (1, 8192, 8192),
        (64, 1, 512), (16, 1, 512), (4, 1, 2048), (1, 128, 128), (1, 1, 2048), (64, 1, 4096), (128, 1, 1024), (16, 1, 8192),
    ),
    "smollm2-135m-instruct": (
        (1, 1, 512), (1, 512, 512), (32, 1, 512), (8, 1, 512), (1, 2048, 2048), (1, 1, 2048), (32, 1, 2048), (1, 1, 128),
        (32, 1, 128), (2, 1, 512), (4, 1, 512), (16, 1, 512), (1, 64, 64), (8, 1, 2048), (128, 1, 512),
    ),
    "two layers of smollm2-135m-instruct": ((1, 1, 64), (4, 1, 64), (1, 32, 32)),
}  # fmt: skip


def model_config(name: str) -> ModelConfig:
    """A known model, or a few layers of one."""
    if name.startswith("two layers of "):
        config = known_config(name.removeprefix("two layers of "))
        return dataclasses.replace(config, num_layers=2, sliding_windows=config.sliding_windows[:2])
    return known_config(name)


def make_driver(name: str, device: torch.device, shapes: Sequence[Shape]) -> roofline.StepDriver:
    """A model in bf16 with a cache for the largest of the shapes that memory allows. ValueError if not even the weights fit."""
    config, dtype = model_config(name), torch.bfloat16
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    weights = sum(parameters(config).values()) * dtype.itemsize
    room = int((0.8 * free - weights) // kv_bytes_per_token(config, dtype))
    smallest = min(r * context for r, _, context in shapes)
    if room < smallest:
        raise ValueError(f"{name} needs {weights / 1e9:.1f} GB for its weights; {free / 1e9:.1f} GB are free")
    tokens = min(max(r * context for r, _, context in shapes), room)
    longest = max(context for _, _, context in shapes)
    backend = "triton" if device.type == "cuda" else "torch"
    model = LlamaForCausalLM(
        config, random_weights(config, dtype, device), ops.bind(backend, device), min(MAX_MODEL_LEN, longest)
    )
    return roofline.StepDriver(model, dtype, tokens + 16 * max(r for r, _, _ in shapes))


def steps(
    name: str, driver: roofline.StepDriver, ceilings: Ceilings, shapes: Sequence[Shape], seconds: float
) -> Iterator[dict[str, Any]]:
    """Rows of the table ``engine``, one a shape that the driver's cache has room for."""
    for reqs, new, context in shapes:
        if reqs * -(-context // driver.block_size) > driver.num_blocks or context > driver.max_model_len:
            continue
        meter = LoadMeter()
        if new == 1:
            row = roofline.sweep_decode(driver, ceilings, [reqs], [context], max_seconds=seconds)
        else:
            row = roofline.sweep_prefill(driver, ceilings, [new], max_seconds=seconds)
        played = driver.runner.plays_graphs
        measured = row.iloc[0].to_dict()
        graph = {"graph": "engine", "graph_seconds": measured["seconds"]} if played else {"graph": "none"}
        if not played and new == 1 and driver.model.ops.device.type == "cuda":
            graph = captured(driver, reqs, context)
        rest = {"graph_seconds": None, "graph_error": "", "load": round(meter.share, 2)}
        yield {"model": name, "dtype": "bfloat16"} | measured | rest | graph


def captured(driver: roofline.StepDriver, num_reqs: int, context: int) -> dict[str, Any]:
    """What a decode step takes that is played from a CUDA graph around the whole of it, where the engine has none of its own.

    No kernel reads anything on the host, and a graph's batch stays the same: so this is what graphs could save, and no more.
    """
    batch = driver.batch([1] * num_reqs, [context] * num_reqs)
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                driver.run_eagerly(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            driver.run_eagerly(batch)
        seconds = measure(graph.replay, device="cuda", repeats=15, max_seconds=0.3).median
    except Exception as error:
        return {"graph": "none", "graph_error": f"{type(error).__name__}: {error}"[:500]}
    return {"graph": "captured", "graph_seconds": seconds}
