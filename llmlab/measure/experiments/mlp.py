"""The feed-forward half of a layer: where a model's parameters and FLOPs are, wide products against narrow ones, SiLU·mul in
one pass and in two. Shapes on paper, times on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmlab import ops
from llmlab.config import ModelConfig
from llmlab.measure.cost import cost_table, decode_costs, parameters
from llmlab.measure.known_models import known_config
from llmlab.measure.timer import compare, measure_in_turns

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("MLP", "attention", "embedding and head", "norms")
"""Where parameters are; FLOPs are also spent in attention's own products, which have none."""


def shares(names: Sequence[str], context: int = 2048) -> pd.DataFrame:
    """One row a known model and part: its parameters and their share, and its share of a decode step's FLOPs.

    Args:
        context: tokens that the decoded one sees; attention's FLOPs (products with the cache included) grow with it.
    """
    import pandas as pd

    rows = []
    for name in names:
        config = known_config(name)
        counted = parameters(config)
        flops = cost_table(decode_costs(config, 1, context))["flops_share"]
        of_part = {
            "MLP": (counted["gate+up"] + counted["down"], flops["gate+up"] + flops["down"]),
            "attention": (counted["QKV"] + counted["O"], flops["QKV"] + flops["O"] + flops["attention"]),
            "embedding and head": (counted["embedding"] + counted["head"], flops["head"]),
            "norms": (counted["norms"], flops["rest"]),
        }
        everything = sum(counted.values())
        rows += [
            {"model": name, "part": part, "parameters": count, "share": count / everything, "flops_share": flop_share}
            for part, (count, flop_share) in of_part.items()
        ]
    return pd.DataFrame(rows)


def wide_against_narrow(
    config: ModelConfig,
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    layers: int = 24,
    repeats: int = 25,
    max_seconds: float = 1.0,
) -> pd.DataFrame:
    """One row a projection and number of tokens: one joined product against its parts', as the engine's own ``linear`` does them.

    The weights of several layers are used in turn, so that none is found in a cache where a real step would not find it.
    Columns: projection, tokens, wide_seconds, narrow_seconds, gain (narrow over wide) with p10, p90, sure_low and sure_high.
    """
    import pandas as pd

    bound = ops.bind("torch" if device == "cpu" else "triton", device)
    head = config.head_dim
    splits = {
        "gate/up": [config.intermediate_size] * 2,
        "QKV": [config.num_heads * head, config.num_kv_heads * head, config.num_kv_heads * head],
    }
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)
    rows = []
    for projection, sizes in splits.items():
        pack = bound.linear_packer()
        weights = [random(sum(sizes), config.hidden_size) for _ in range(layers)]
        wide = [pack(weight) for weight in weights]
        narrow = [[pack(part.contiguous()) for part in weight.split(sizes)] for weight in weights]
        for count in tokens:
            x = random(count, config.hidden_size)
            taken = measure_in_turns(
                {
                    "wide": lambda i, x=x, wide=wide: bound.linear(x, wide[i]),
                    "narrow": lambda i, x=x, narrow=narrow: [bound.linear(x, part) for part in narrow[i]],
                },
                inputs=[(i,) for i in range(layers)],
                device=device,
                repeats=repeats,
                max_seconds=max_seconds,
            )
            gain = compare("wide", taken["wide"], "narrow", taken["narrow"])
            rows.append(
                {
                    "projection": projection,
                    "tokens": count,
                    "wide_seconds": taken["wide"].median,
                    "narrow_seconds": taken["narrow"].median,
                    "gain": gain.ratio,
                    "p10": gain.low,
                    "p90": gain.high,
                    "sure_low": gain.sure_low,
                    "sure_high": gain.sure_high,
                }
            )
    return pd.DataFrame(rows)


def least_gain(table: pd.DataFrame, projection: str) -> float:
    """The gain of a projection that is sure at every number of tokens measured."""
    return float(table.query("projection == @projection")["sure_low"].min())


def silu_traffic(tokens: int, intermediate_size: int, itemsize: int = 2) -> pd.DataFrame:
    """Every tensor that either form of SiLU·mul moves, in order: form, step, tensor, role (read or write), elements, bytes."""
    import pandas as pd

    moves = [
        ("two steps", "SiLU", "gate", "read"),
        ("two steps", "SiLU", "silu(gate)", "write"),
        ("two steps", "product", "silu(gate)", "read"),
        ("two steps", "product", "up", "read"),
        ("two steps", "product", "out", "write"),
        ("fused", "SiLU·mul", "gate", "read"),
        ("fused", "SiLU·mul", "up", "read"),
        ("fused", "SiLU·mul", "out", "write"),
    ]
    elements = tokens * intermediate_size
    return pd.DataFrame(
        [
            {
                "form": form,
                "step": step,
                "tensor": name,
                "role": role,
                "elements": elements,
                "bytes": elements * itemsize,
            }
            for form, step, name, role in moves
        ]
    )


def two_step_silu(gate_up: Tensor) -> Tensor:
    """``silu(gate)·up`` of ``gate_up`` [tokens, 2·intermediate_size] as two torch ops with a tensor between them."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_times(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: str = "cpu", max_seconds: float = 1.0
) -> pd.DataFrame:
    """One row a shape ``(tokens, intermediate_size)``: both forms clocked, the bytes they move, how many times as fast fused is.

    Columns: tokens, inner, fused_seconds, two_step_seconds, fused_bandwidth (B/s), two_step_bandwidth, gain, p10, p90.
    """
    import pandas as pd

    bound = ops.bind("torch" if device == "cpu" else "triton", device)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for tokens, inner in shapes:
        sets = [(torch.randn(tokens, 2 * inner, generator=generator).to(device, dtype),) for _ in range(3)]
        taken = measure_in_turns(
            {"fused": bound.silu_and_mul, "two": two_step_silu}, inputs=sets, device=device, max_seconds=max_seconds
        )
        gain = compare("fused", taken["fused"], "two", taken["two"])
        moved = silu_traffic(tokens, inner, dtype.itemsize).groupby("form")["bytes"].sum()
        rows.append(
            {
                "tokens": tokens,
                "inner": inner,
                "fused_seconds": taken["fused"].median,
                "two_step_seconds": taken["two"].median,
                "fused_bandwidth": moved["fused"] / taken["fused"].median,
                "two_step_bandwidth": moved["two steps"] / taken["two"].median,
                "gain": gain.ratio,
                "p10": gain.low,
                "p90": gain.high,
            }
        )
    return pd.DataFrame(rows)
