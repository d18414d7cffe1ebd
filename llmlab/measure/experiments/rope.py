"""Rotary embedding: that scores see distances only, what each scaling type does to the wavelengths, and table against sin/cos."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import pandas as pd
import torch
from torch import Tensor

from llmlab import ops
from llmlab.config import RopeConfig
from llmlab.measure.known_models import known_config
from llmlab.measure.timer import compare, measure_in_turns
from llmlab.model.rope import RotaryTable, attention_scaling, inverse_frequencies

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def relative_scores(rope: RopeConfig, num_positions: int, seed: int = 0) -> Tensor:
    """``(R_m q) · (R_n k)`` ``[num_positions, num_positions]`` float32 for one random q and k at every pair of positions."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, rope.rotary_dim, generator=generator) for _ in range(2))
    table = RotaryTable(rope, num_positions, torch.device("cpu")).cos_sin_cache
    everywhere = lambda x: x.expand(num_positions, 1, rope.rotary_dim)
    turned_q, turned_k = ops.rotary_embedding.reference(
        torch.arange(num_positions), everywhere(q), everywhere(k), table
    )
    return turned_q[:, 0] @ turned_k[:, 0].T


def scaling_types(trained: int = 4096, factor: float = 8.0, rotary_dim: int = 128) -> dict[str, RopeConfig]:
    """One config of every Hugging Face rope type that stretches a model trained on ``trained`` tokens by ``factor``.

    LongRoPE's factors are searched for each model; here they rise geometrically from 1 for the fastest pair to ``factor``.
    """
    pairs = rotary_dim // 2
    rising = [factor ** (i / (pairs - 1)) for i in range(pairs)]
    original = {"original_max_position_embeddings": trained}
    parameters = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {"factor": factor, **original},
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        "longrope": {"short_factor": [1.0] * pairs, "long_factor": rising, "factor": factor, **original},
    }
    longest = {"default": trained, "dynamic": trained}
    return {
        name: RopeConfig(name, 10000.0, rotary_dim, longest.get(name, int(trained * factor)), given)
        for name, given in parameters.items()
    }


def wavelengths(types: Mapping[str, RopeConfig], length: int) -> pd.DataFrame:
    """One row a type and pair: type, pair, inv_freq (radians a position), wavelength (positions a turn), scaling of cos and sin.

    Args:
        length: tokens in the sequence; "dynamic" and "longrope" depend on it.
    """
    rows = [
        (name, pair, inv_freq, 2 * math.pi / inv_freq, attention_scaling(rope))
        for name, rope in types.items()
        for pair, inv_freq in enumerate(inverse_frequencies(rope, length).tolist())
    ]
    return pd.DataFrame(rows, columns=["type", "pair", "inv_freq", "wavelength", "scaling"])


def hf_inverse_frequencies(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """``(inv_freq, attention factor)`` by Hugging Face's code: an oracle for :func:`llmlab.model.rope.inverse_frequencies`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": rope.rope_type, "rope_theta": rope.theta, **rope.parameters}
    config = LlamaConfig(
        hidden_size=rope.rotary_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=rope.rotary_dim,
        max_position_embeddings=rope.max_position_embeddings,
        rope_parameters=parameters,
    )
    if rope.rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"), seq_len=length)


def table_sizes() -> pd.DataFrame:
    """The float32 table of some models: model, max_position, rotary_dim, mb. Llama 3.1 is Llama 3 with 131,072 positions."""
    rows = []
    for name in ("smollm2-135m-instruct", "llama-3-8b", "llama-3-70b"):
        config = known_config(name)
        rows.append((name, config.max_position_embeddings, config.rope.rotary_dim))
    rows.append(("llama-3.1-8b", 131072, known_config("llama-3-8b").rope.rotary_dim))
    frame = pd.DataFrame(rows, columns=["model", "max_position", "rotary_dim"])
    frame["mb"] = frame["max_position"] * frame["rotary_dim"] * 4 / 1e6
    return frame


def rotate_computed(positions: Tensor, q: Tensor, k: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """The op's reference without a table: cosines and sines of ``positions · inv_freq`` are computed for the batch."""
    angles = positions[:, None].float() * inv_freq
    rows = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return ops.rotary_embedding.reference(torch.arange(len(positions), device=q.device), q, k, rows)


def rotary_pairs(device: torch.device) -> dict[str, tuple[Rotate, Rotate]]:
    """Name → the rotation with a table, and computing its cosines and sines, written in the same way.

    Called as ``(positions, q, k, cos_sin_cache)`` and ``(positions, q, k, inv_freq)``. "compiled" is the engine's kernel: Triton
    on a GPU; on a CPU that of :mod:`llmlab.ops.cpu.rope`, and its twin with a polynomial for sine and cosine (:mod:`.rope_cpu`).
    """
    pairs = {"plain torch": (ops.rotary_embedding.reference, rotate_computed)}
    if device.type == "cuda":
        from llmlab.kernels.rope import rotary_embedding_computed

        pairs["compiled"] = (ops.rotary_embedding.kernel, rotary_embedding_computed)
    elif find_spec("numba") is not None:
        from llmlab.measure.experiments.rope_cpu import rotary_embedding_computed

        pairs["compiled"] = (ops.rotary_embedding.cpu, rotary_embedding_computed)
    return pairs


def table_against_computing(
    num_tokens: Sequence[int] = (32, 512, 2048),
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    max_position: int = 8192,
    theta: float = 100000.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_seconds: float = 0.5,
) -> pd.DataFrame:
    """Clock both, in turns; positions one after the other, as in a prompt, and scattered over the table, as in a decode step.

    Returns one row a way, order and number of tokens: implementation, order, tokens, table_seconds, computed_seconds, ratio
    (computing over looking up) with low, high, sure_low and sure_high, load.
    """
    device = torch.device(device)
    rope = RopeConfig("default", theta, head_dim, max_position)
    table = RotaryTable(rope, max_position, device).cos_sin_cache
    inv_freq = inverse_frequencies(rope).to(device)
    generator = torch.Generator().manual_seed(0)
    rows = []
    pairs = rotary_pairs(device)
    if device.type == "cpu" and head_dim % 32:  # the CPU's kernels turn sixteen pairs at a time
        pairs.pop("compiled", None)
    for name, (look_up, compute) in pairs.items():
        for count in num_tokens:
            shape = (count, num_heads + 2 * num_kv_heads, head_dim)
            qkv = torch.randn(shape, generator=generator).to(device, dtype)
            q, k, _ = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            orders = {
                "in order": torch.arange(count) % max_position,
                "scattered": torch.randint(max_position, (count,), generator=generator),
            }
            for order, positions in orders.items():
                inputs = [(positions.to(device), q, k)]
                runs = {
                    "table": lambda p, q, k, turn=look_up: turn(p, q, k, table),
                    "computed": lambda p, q, k, turn=compute: turn(p, q, k, inv_freq),
                }
                taken = measure_in_turns(runs, inputs=inputs, device=device, max_seconds=max_seconds)
                found = compare("table", taken["table"], "computed", taken["computed"])
                rows.append(
                    {
                        "implementation": name,
                        "order": order,
                        "tokens": count,
                        "table_seconds": taken["table"].median,
                        "computed_seconds": taken["computed"].median,
                        **{
                            key: getattr(found, key)
                            for key in ("ratio", "low", "high", "sure_low", "sure_high", "load")
                        },
                    }
                )
    return pd.DataFrame(rows)
