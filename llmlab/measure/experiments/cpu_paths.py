"""What makes the CPU path fast, one change at a time: the matrix product in several ways, the whole engine in several settings.

Each measurement stands beside what the roofline predicts for it: weights' bytes by the memory's bandwidth, or FLOPs by the
rate of a large matrix product, whichever takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from llmlab import ops
from llmlab.measure.cost import decode_costs, least_seconds, linear_shapes, prefill_costs
from llmlab.measure.timer import measure_in_turns, torch_threads

if TYPE_CHECKING:
    from llmlab.config import ModelConfig
    from llmlab.engine.llm import LLM
    from llmlab.measure.datasheets import Roof

LAYERS = 8
"""Copies of each projection that take turns, so that none is found in a small cache."""


def linear_paths(
    config: ModelConfig, tokens: Sequence[int] = (1, 8, 32, 512), *, max_seconds: float = 1.5, layers: int = LAYERS
) -> pd.DataFrame:
    """The projections of some decoder layers, bfloat16, in every way that this machine has; random weights and inputs.

    Returns:
        Columns tokens, path, seconds (median), low, high (10th and 90th percentile), flops, weight_bytes (that this path reads).
    """
    shapes = [(o, i) for name, (i, o) in linear_shapes(config).items() if name != "head"] * layers
    generator = torch.Generator().manual_seed(0)
    weights = [torch.empty(shape).normal_(0, 0.02, generator=generator).bfloat16() for shape in shapes]
    with torch.inference_mode():
        paths = {name: make(weights) for name, make in _PATHS.items() if _available(make, weights[0])}
    rows = []
    for count in tokens:
        inputs = {i: torch.randn(count, i, generator=generator).bfloat16() for _, i in set(shapes)}
        calls = {name: _all(products, [inputs[i] for _, i in shapes]) for name, (products, _) in paths.items()}
        with torch.inference_mode():
            measured = measure_in_turns(calls, warmup=1, max_seconds=max_seconds)
        flops = sum(2 * count * o * i for o, i in shapes)
        for name, clocked in measured.items():
            times = {"seconds": clocked.median, "low": clocked.low, "high": clocked.high}
            row = {"tokens": count, "path": name, **times, "flops": flops}
            rows.append(row | {"weight_bytes": sum(o * i for o, i in shapes) * paths[name][1]})
    return pd.DataFrame(rows)


def _all(products: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> Callable[[], None]:
    def run() -> None:
        for product, x in zip(products, inputs, strict=True):
            product(x)

    return run


Products = tuple[list[Callable[[Tensor], Tensor]], int]
"""A function of the inputs for each weight, and bytes a weight."""


def _torch_linear(weights: list[Tensor]) -> Products:
    return [lambda x, w=w: torch.nn.functional.linear(x, w) for w in weights], 2


def _onednn(weights: list[Tensor]) -> Products:
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in weights]
    product = torch.ops.mkldnn._linear_pointwise
    return [lambda x, w=w: product(x, w, None, "none", [], "") for w in packed], 2


def _ours(quantization: str | None) -> Callable[[list[Tensor]], Products]:
    def make(weights: list[Tensor]) -> Products:
        bound = ops.bind("torch", "cpu")
        pack = bound.linear_packer(quantization)
        packed = [pack(w) for w in weights]
        return [lambda x, w=w: bound.linear(x, w) for w in packed], 1 if quantization else 2

    return make


def _torch_int8(weights: list[Tensor]) -> Products:
    from llmlab.ops.quantization import quantize_int8

    quantized = [(q.values, q.scales.bfloat16()) for q in map(quantize_int8, weights)]
    return [lambda x, q=q: torch._weight_int8pack_mm(x, *q) for q in quantized], 1


_PATHS: Mapping[str, Callable[[list[Tensor]], Products]] = {
    "F.linear": _torch_linear,
    "oneDNN, packed": _onednn,
    "llmlab": _ours(None),
    "torch int8": _torch_int8,
    "llmlab int8": _ours("int8"),
}


def _available(make: Callable[[list[Tensor]], Products], weight: Tensor) -> bool:
    """Whether this build of torch has what a path needs."""
    try:
        (product,), _ = make([weight])
        product(torch.zeros(1, weight.shape[1], dtype=weight.dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def engine_variants(
    variants: Mapping[str, LLM],
    roofs: Mapping[str, Roof],
    *,
    threads: Mapping[str, int] | None = None,
    decode: Sequence[int] = (1, 8, 32),
    prefill: Sequence[int] = (512,),
    repeats: int = 3,
    steps: int = 12,
    context: int = 128,
) -> pd.DataFrame:
    """Decode steps and prefills of engines in several settings, in turns.

    Args:
        variants: engines of one model by name. roofs: what each is measured by. threads: torch's, for those that are named.
        decode: numbers of sequences, with ``context`` tokens each. prefill: prompt lengths. steps: decode steps of a turn.

    Returns:
        Columns work, size, variant, seconds (median of the turns), low, high (lowest, highest), predicted (seconds that the
        roof allows, with weights in the variant's own bytes).
    """
    jobs = [("decode", n) for n in decode] + [("prefill", n) for n in prefill]
    samples: dict[tuple[str, int, str], list[float]] = {}
    for repeat in range(repeats + 1):  # the first warms up
        for job in jobs:
            for name, llm in variants.items():
                with torch_threads((threads or {}).get(name)):
                    seconds = (
                        _decode_seconds(llm, job[1], context, steps) if job[0] == "decode" else _prefill(llm, job[1])
                    )
                if repeat:
                    samples.setdefault((*job, name), []).append(seconds)
    rows = []
    for (work, size, name), clocked in samples.items():
        predicted = _predicted(variants[name], roofs[name], work, size, context + steps // 2)
        row = {"work": work, "size": size, "variant": name, "seconds": float(np.median(clocked))}
        rows.append(row | {"low": min(clocked), "high": max(clocked), "predicted": predicted})
    return pd.DataFrame(rows)


def _predicted(llm: LLM, roof: Roof, work: str, size: int, context: int) -> float:
    dtype = getattr(torch, roof.dtype)
    if work == "prefill":
        return least_seconds(prefill_costs(llm.config, 1, size, dtype=dtype), roof)
    stored = llm.model.weights.layers[0].qkv_proj.weight.itemsize
    seconds = 0.0
    for one in decode_costs(llm.config, size, context, dtype=dtype):
        flops, nbytes = one.cost
        if one.op == "linear":  # the weight's bytes as this engine stores them
            in_features, out_features = linear_shapes(llm.config)[one.group]
            nbytes += in_features * out_features * (stored - dtype.itemsize)
        seconds += one.calls * roof.seconds(flops, nbytes)
    return seconds


def _decode_seconds(llm: LLM, num_reqs: int, context: int, steps: int) -> float:
    """Median seconds of an engine's decode step."""
    from llmlab.sampling.params import SamplingParams

    engine = llm.engine
    rng = np.random.default_rng(num_reqs)
    params = SamplingParams(temperature=0.0, max_tokens=3 * steps + 16, ignore_eos=True)
    names = [f"variant-{i}" for i in range(num_reqs)]
    for name in names:
        engine.add_request(name, rng.integers(0, llm.config.vocab_size, context).tolist(), params)
    started: set[str] = set()
    while len(started) < num_reqs:
        started |= {output.request_id for output in engine.step()}
    for _ in range(3):  # the first step of a size is recorded
        engine.step()
    clocked = [_seconds(engine.step) for _ in range(steps)]
    engine.discard_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return float(np.median(clocked))


def _prefill(llm: LLM, length: int) -> float:
    from llmlab.sampling.params import SamplingParams

    prompt = np.random.default_rng().integers(0, llm.config.vocab_size, length).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    return _seconds(lambda: llm.generate([prompt], params, use_tqdm=False))


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def memory_order(out_features: int = 48, in_features: int = 16) -> pd.DataFrame:
    """Where each element of a weight stands in memory, as it is stored and as the packer lays it out.

    Returns:
        Columns layout ("rows", "panels"), out, in, position.
    """
    from llmlab.ops.cpu.panels import LinearPacker

    number = torch.arange(out_features * in_features, dtype=torch.float32).view(out_features, in_features)
    packed = LinearPacker(1 << 16)(number).panels.flatten().long()
    position = torch.empty_like(packed)
    position[packed] = torch.arange(packed.numel())
    tables = []
    for layout, order in (("rows", torch.arange(packed.numel())), ("panels", position)):
        out, features = np.divmod(np.arange(packed.numel()), in_features)
        tables.append(pd.DataFrame({"layout": layout, "out": out, "in": features, "position": order.numpy()}))
    return pd.concat(tables, ignore_index=True)
