"""The table behind rotary embedding: frequencies of every Hugging Face rope type, and the cosines and sines by position.

Everything here is float32 (a position in bfloat16 is wrong from 257 on). Two types, "dynamic" and "longrope", let the
frequencies depend on the length of the sequence. Their rule here: a token at position p of a request whose prompt has n
tokens is rotated for length ``max(n, p + 1)``, which is what Hugging Face's generate does, and does not change when the prompt
is computed in chunks, in a crowd, or again after a preemption.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmlab.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, length: int | None = None) -> Tensor:
    """``inv_freq [rotary_dim/2]``, radians a position, for a sequence of ``length`` tokens (None: a short one)."""
    p = rope.parameters
    theta = rope.theta
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.rope_type == "dynamic":
        # NTK-aware scaling: the base grows with the excess over the trained length.
        limit, factor = rope.max_position_embeddings, p["factor"]
        longest = max(length or 0, limit)
        theta *= (factor * longest / limit - (factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    inv_freq = 1.0 / theta**exponents
    if rope.rope_type == "linear":
        return inv_freq / p["factor"]
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, p)
    if rope.rope_type == "yarn":
        return _yarn(inv_freq, rope)
    if rope.rope_type == "longrope":
        is_long = length is not None and length > p["original_max_position_embeddings"]
        return 1.0 / (
            torch.tensor(p["long_factor" if is_long else "short_factor"], dtype=torch.float32) * theta**exponents
        )
    return inv_freq


def attention_scaling(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied with: YaRN's and LongRoPE's attention factor, 1 for the others."""
    p = rope.parameters
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    original = p["original_max_position_embeddings"]
    factor = p["factor"] if p.get("factor") is not None else rope.max_position_embeddings / original
    if rope.rope_type == "longrope":  # Ding et al. 2024, arXiv:2402.13753
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale = lambda weight: 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)  # Peng et al. 2023, arXiv:2309.00071, eq. 22


def _llama3(inv_freq: Tensor, p: dict) -> Tensor:
    """Long wavelengths are slowed by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    original, factor = p["original_max_position_embeddings"], p["factor"]
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    p, dim = rope.parameters, rope.rotary_dim
    original = p["original_max_position_embeddings"]
    factor = p["factor"] if p.get("factor") is not None else rope.max_position_embeddings / original

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * (1 - keep) + inv_freq * keep


class RotaryTable:
    """``cos_sin_cache [max_model_len, rotary_dim]`` float32, rows ``[cos | sin]``, and the rows of a batch.

    Args:
        max_model_len: number of rows; no position may reach it.
    """

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device):
        self.rope = rope
        self.scaling = attention_scaling(rope)
        self.inv_freq = inverse_frequencies(rope)
        self.cos_sin_cache = self._rows(torch.arange(max_model_len), self.inv_freq).to(device)

    def _rows(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        angles = positions[:, None].float() * inv_freq
        return torch.cat((angles.cos() * self.scaling, angles.sin() * self.scaling), dim=-1)

    def lookup(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(row of each token, table)`` for :func:`llmlab.ops.rotary_embedding`.

        Args:
            positions: ``[num_sched_tokens]``.
            lengths: ``[num_sched_tokens]``, the length that each token is rotated for; None where it cannot matter.
        """
        threshold = self.rope.length_threshold
        if threshold is None or lengths is None or int(lengths.max()) <= threshold:
            return positions, self.cos_sin_cache
        rows = self.cos_sin_cache[positions]
        for length in lengths[lengths > threshold].unique().tolist():
            chosen = lengths == length
            inv_freq = inverse_frequencies(self.rope, length)
            rows[chosen] = self._rows(positions[chosen].cpu(), inv_freq).to(rows.device)
        return torch.arange(len(positions), device=positions.device), rows
