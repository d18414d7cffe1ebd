"""What every kernel must give, in float64 and by other means than the kernel's: the formulas, written out once more.

Inputs are what a kernel gets, outputs float64 on the same device. They share no code with the references in :mod:`llmlab.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x64 = x.double()
    return x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def rotary(positions: Tensor, heads: Tensor, cos_sin: Tensor) -> Tensor:
    """``heads`` [T, H, D]; as complex numbers: each pair of dimensions is turned by its angle."""
    half = cos_sin.shape[1] // 2
    row = cos_sin.double()[positions]
    turn = torch.complex(row[:, :half], row[:, half:])[:, None]
    pairs = torch.complex(heads[..., :half].double(), heads[..., half : 2 * half].double()) * turn
    return torch.cat((pairs.real, pairs.imag, heads[..., 2 * half :].double()), -1)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """One request: ``q`` [Q, Hq, D] over ``keys``, ``values`` [S, Hkv, D], the last query at the last key: (out, lse [Q, Hq])."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    own = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    seen = torch.arange(len(k), device=q.device)[None, :]
    visible = seen <= own
    if window is not None:
        visible &= seen > own - window
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    weight_a, weight_b = (lse_a.double() - lse).exp()[..., None], (lse_b.double() - lse).exp()[..., None]
    return weight_a * out_a.double() + weight_b * out_b.double(), lse


def penalties(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    result = logits.double().clone()
    for row, token, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        value, factor = float(result[row, token]), float(repetition[row])
        value = value / factor if value > 0 else value * factor
        result[row, token] = value - float(frequency[row]) * count - (float(presence[row]) if count else 0.0)
    return result
