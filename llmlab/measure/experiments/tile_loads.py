"""What stays in the smallest cache: AMX products whose inputs are loaded through the L1 cache or past it.

A product of 32 tokens with two panels of weights reads both in tiles. Over a prompt, the panels come again for every 32 tokens,
the inputs do not. Loaded like everything else (``tileloadd``), the inputs push the panels out of the L1 cache as soon as both no
longer fit; loaded with a hint (``tileloaddt1``), they leave it to the panels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pandas as pd
import torch

from llmlab.measure.timer import measure_in_turns
from llmlab.ops.cpu import amx, simd
from llmlab.ops.cpu.memory import large_pages
from llmlab.ops.cpu.parallel import arg, kernel

TOKENS, PANELS = 2 * amx.BLOCK, 2
"""Of one product: two by two tiles of sums."""
WAYS = {"through the L1 cache": 0, "past the L1 cache": 1}


@kernel("qqqqqq")
def _products(once: int) -> Callable[[int], None]:
    """All products of ``tokens`` (a multiple of 32) with ``panels`` (even) by one thread; the sums are thrown away."""

    def body(p: int) -> None:
        x, tokens, w, panels, in_features, config = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5)
        sums = simd.scratch(4096)
        amx.configure(config)
        for n in range(0, panels, 2):
            for t in range(0, tokens, 32):
                xt, wn = x + t * in_features * 2, w + n * in_features * 32
                amx.product(2, 2, 0, once, wn, in_features * 32, xt, in_features * 2, in_features, sums, 128)
        amx.release()

    return body


def operand_bytes(in_features: int) -> tuple[int, int]:
    """Bytes of the inputs and of the panels of one product."""
    return 2 * TOKENS * in_features, 2 * PANELS * simd.LANES * in_features


def tile_loads(
    in_features: Sequence[int] = (128, 256, 384, 512, 640, 1024, 1536),
    tokens: int = 512,
    panels: int = 16,
    *,
    max_seconds: float = 0.4,
) -> pd.DataFrame:
    """Both ways of loading, on one thread, in turns.

    Returns:
        Columns in_features, way, seconds (median), low, high (10th and 90th percentile), flops, bytes (of a product's operands).

    Raises:
        ValueError: this processor has no AMX; or tokens, panels or in_features are not whole tiles.
    """
    if not amx.available():
        raise ValueError("this processor has no AMX tiles")
    if tokens % TOKENS or panels % PANELS or any(n % amx.STEP for n in in_features):
        raise ValueError(
            f"needs multiples of {TOKENS} tokens, {PANELS} panels, {amx.STEP} inputs, not {tokens}, {panels}, {in_features}"
        )
    config = amx.config_for((amx.BLOCK, amx.BLOCK), PANELS)
    rows = []
    for features in in_features:
        x, w = _random(tokens, features), _random(panels * simd.LANES, features)
        arguments = (x.data_ptr(), tokens, w.data_ptr(), panels, features, config.ctypes.data)
        runs = {way: functools.partial(_products(once).serial, *arguments) for way, once in WAYS.items()}
        for way, clocked in measure_in_turns(runs, warmup=2, max_seconds=max_seconds).items():
            times = {"seconds": clocked.median, "low": clocked.low, "high": clocked.high}
            work = {"flops": 2 * tokens * panels * simd.LANES * features, "bytes": sum(operand_bytes(features))}
            rows.append({"in_features": features, "way": way} | times | work)
    return pd.DataFrame(rows)


def _random(rows: int, columns: int) -> torch.Tensor:
    """bfloat16 in large pages: 4 KB pages would add a limit of their own."""
    area = large_pages(2 * rows * columns).view(torch.bfloat16).view(rows, columns)
    return area.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)))
