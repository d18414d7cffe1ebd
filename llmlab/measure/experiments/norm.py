"""RMSNorm against LayerNorm, in time and in rounding error; and what joining it with the residual addition saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from llmlab import ops
from llmlab.measure.timer import compare, measure_in_turns

Norm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
SHAPES = ((1, 4096), (16, 4096), (128, 4096), (1024, 4096), (4096, 4096))
"""(tokens, hidden_size) of a large model: from one row, which an L1 cache holds, to more than most caches do."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x − mean) / sqrt(var + eps) · weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    Rounded where our RMSNorm is: when the row is normalised, and when it is scaled and shifted.
    """
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed.to(x.dtype).float() + bias.float()).to(x.dtype)


def norm_pairs(device: torch.device) -> dict[str, tuple[Norm, Norm]]:
    """Name → RMSNorm and LayerNorm written in the same way, each called as ``(x, weight, bias, eps)``.

    "plain torch" is the formula, one op after the other; "torch's own" is what torch.nn.functional has; "compiled" (CPU) is
    the engine's kernel, and that kernel with a mean and a shift (:mod:`.norm_cpu`).
    """
    hidden = lambda x: (x.shape[-1],)
    pairs: dict[str, tuple[Norm, Norm]] = {
        "plain torch": (lambda x, w, b, eps: ops.rms_norm.reference(x, w, eps), layer_norm),
        "torch's own": (
            lambda x, w, b, eps: F.rms_norm(x, hidden(x), w, eps),
            lambda x, w, b, eps: F.layer_norm(x, hidden(x), w, b, eps),
        ),
    }
    if device.type == "cpu" and find_spec("numba") is not None:
        from llmlab.measure.experiments.norm_cpu import layer_norm as compiled

        pairs["compiled"] = (lambda x, w, b, eps: ops.rms_norm.cpu(x, w, eps), compiled)
    return pairs


def rms_against_layer(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_seconds: float = 0.5,
) -> pd.DataFrame:
    """Clock both norms, in turns, for every way of writing them.

    Returns one row a way and shape: implementation, tokens, hidden_size, working_set (bytes of input and result), rms_seconds,
    layer_seconds, ratio (LayerNorm over RMSNorm) with low, high, sure_low and sure_high, load.
    """
    device = torch.device(device)
    rows = []
    for name, (rms, layer) in norm_pairs(device).items():
        for tokens, hidden in shapes:
            x, _, weight, bias = _inputs(tokens, hidden, dtype, device)
            runs = {"RMSNorm": rms, "LayerNorm": layer}
            with _lasting_memory(device):
                taken = measure_in_turns(runs, inputs=[(x, weight, bias, 1e-5)], device=device, max_seconds=max_seconds)
            found = compare("RMSNorm", taken["RMSNorm"], "LayerNorm", taken["LayerNorm"])
            seconds = {"rms_seconds": taken["RMSNorm"].median, "layer_seconds": taken["LayerNorm"].median}
            rows.append({"implementation": name, **_shape(x, 2), **seconds, **_ratio(found)})
    return pd.DataFrame(rows)


def norm_errors(tokens: int = 256, hidden: int = 1024, eps: float = 1e-5) -> pd.DataFrame:
    """Both formulas against themselves in float64, on the same stored inputs.

    Returns one row a dtype and kind of input: dtype, inputs, rms_error, layer_error (largest error over largest result), ratio.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    outlier = normal.clone()
    outlier[:, 7] *= 300  # as the residual streams of trained models have
    inputs = {"normal": normal, "mean 30": normal + 30, "outlier channel": outlier, "tiny (1e-3)": 1e-3 * normal}
    weight = 1 + 0.1 * torch.randn(hidden, generator=generator, dtype=torch.float64)
    bias = 0.1 * torch.randn(hidden, generator=generator, dtype=torch.float64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, values in inputs.items():
            x, w, b = values.to(dtype), weight.to(dtype), bias.to(dtype)
            x64, w64, b64 = x.double(), w.double(), b.double()
            exact_rms = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps) * w64
            exact_layer = F.layer_norm(x64, (hidden,), w64, b64, eps)
            error = lambda got, exact: float((got.double() - exact).abs().max() / exact.abs().max())
            rms, layer = (
                error(ops.rms_norm.reference(x, w, eps), exact_rms),
                error(layer_norm(x, w, b, eps), exact_layer),
            )
            rows.append((str(dtype).removeprefix("torch."), name, rms, layer, rms / layer))
    return pd.DataFrame(rows, columns=["dtype", "inputs", "rms_error", "layer_error", "ratio"])


def fused_traffic(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> pd.DataFrame:
    """What addition and norm read and write, apart and joined: one row a pass over a tensor.

    Columns: form, op, tensor, direction ("read" or "write"), bytes. The sums agree with the ops' own costs.
    """
    row, vector = tokens * hidden * dtype.itemsize, hidden * dtype.itemsize
    passes = {
        "apart": {"add": (["x", "residual"], ["sum"]), "norm": (["sum", "weight"], ["normed"])},
        "fused": {"add + norm": (["x", "residual", "weight"], ["sum", "normed"])},
    }
    rows = [
        (form, op, tensor, direction, vector if tensor == "weight" else row)
        for form, steps in passes.items()
        for op, ends in steps.items()
        for direction, tensors in zip(("read", "write"), ends, strict=True)
        for tensor in tensors
    ]
    return pd.DataFrame(rows, columns=["form", "op", "tensor", "direction", "bytes"])


def fused_against_apart(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_seconds: float = 0.6,
) -> pd.DataFrame:
    """Clock the fused op against an addition followed by the norm, by the engine's own kernels, in turns.

    Returns one row a shape: tokens, hidden_size, working_set (bytes of the four tensors), apart_seconds, fused_seconds, ratio
    (fused over apart) with low, high, sure_low and sure_high, bytes_ratio, load.
    """
    device = torch.device(device)
    bound, add = ops.bind("triton" if device.type == "cuda" else "torch", device), _addition(device)
    rows = []
    for tokens, hidden in shapes:
        x, residual, weight, _ = _inputs(tokens, hidden, dtype, device)

        def apart(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            summed = add(x, residual)
            return bound.rms_norm(summed, weight, 1e-5), summed

        runs = {
            "apart": apart,
            "fused": lambda x, residual, weight: bound.fused_add_rms_norm(x, residual, weight, 1e-5),
        }
        with _lasting_memory(device):
            taken = measure_in_turns(runs, inputs=[(x, residual, weight)], device=device, max_seconds=max_seconds)
        found = compare("apart", taken["apart"], "fused", taken["fused"])
        sums = fused_traffic(tokens, hidden, dtype).groupby("form")["bytes"].sum()
        seconds = {"apart_seconds": taken["apart"].median, "fused_seconds": taken["fused"].median}
        rows.append({**_shape(x, 4), **seconds, **_ratio(found), "bytes_ratio": sums["fused"] / sums["apart"]})
    return pd.DataFrame(rows)


def _inputs(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, residual [tokens, hidden], weight, bias [hidden]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, hidden), (tokens, hidden), (hidden,), (hidden,))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _lasting_memory(device: torch.device):
    """On a CPU results go where the engine has them go: into memory that is used again, not into fresh pages."""
    if device.type == "cpu" and find_spec("numba") is not None:
        from llmlab.ops.cpu.memory import Arena, allocate_in

        return allocate_in(Arena())
    return nullcontext()


def _addition(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """An addition written as the norm is: torch's own on a GPU, where it streams as well as any kernel."""
    if device.type == "cpu" and find_spec("numba") is not None:
        from llmlab.measure.experiments.norm_cpu import add

        return add
    return torch.add


def _shape(x: Tensor, tensors: int) -> dict[str, int]:
    return {"tokens": x.shape[0], "hidden_size": x.shape[1], "working_set": tensors * x.nbytes}


def _ratio(found) -> dict[str, float]:
    return {key: getattr(found, key) for key in ("ratio", "low", "high", "sure_low", "sure_high", "load")}
