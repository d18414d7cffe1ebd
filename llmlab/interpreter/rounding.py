"""Exact roundings that numpy lacks: to bfloat16 and TF32 (kept in float32 arrays) and to the fp8 formats (kept as codes).

A bfloat16 value is held as the float32 number it equals, so that arithmetic is numpy's float32 arithmetic followed by one
rounding. That is exact: float32 has more than twice bfloat16's significand plus two bits, so rounding a float32 result of
+, -, *, / or sqrt again to bfloat16 is what rounding the exact result would give (Figueroa, "When is double rounding
innocuous?", 1995).
"""

import numpy as np
import torch
import triton.language as tl

_FP8 = {
    "fp8e4nv": (torch.float8_e4m3fn, 448.0),
    "fp8e5": (torch.float8_e5m2, 57344.0),
    "fp8e4b8": (torch.float8_e4m3fnuz, 240.0),
    "fp8e5b16": (torch.float8_e5m2fnuz, 57344.0),
}


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> the nearest bfloat16 (ties to even), as float32. NaN stays NaN; past the largest finite it is infinity."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    rounded &= np.uint32(0xFFFF0000)
    out = rounded.view(np.float32).reshape(x.shape)
    nan = x != x
    if nan.any():
        out = np.where(nan, np.float32(np.nan), out)
    return out


def truncate_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 towards zero, as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(x != x, np.float32(np.nan), bits.view(np.float32).reshape(x.shape))


def round_double_to_bf16(x: np.ndarray) -> np.ndarray:
    """float64 -> the nearest bfloat16, as float32, with one rounding only.

    Through float32 a value just beside a bfloat16 tie would become the tie; such values are moved back by one float32 ulp.
    """
    single = x.astype(np.float32)
    tie = (single.view(np.uint32) & np.uint32(0xFFFF)) == np.uint32(0x8000)
    if tie.any():
        back = np.where(
            np.abs(single.astype(np.float64)) > np.abs(x), np.float32(0), np.float32(np.copysign(np.inf, x))
        )
        single = np.where(tie & (single.astype(np.float64) != x), np.nextafter(single, back), single)
    return round_to_bf16(single)


def bf16_from_bits(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns -> float32 values."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_to_bits(x: np.ndarray) -> np.ndarray:
    """float32 values that are bfloat16 already -> uint16 bit patterns."""
    return (np.ascontiguousarray(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(x.shape)


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 -> TF32 (10 bits of significand, ties away from zero, as ``cvt.rna.tf32.f32``), as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32).reshape(x.shape), x)


def fp8_decode(codes: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """uint8 codes of an fp8 format -> float32."""
    torch_dtype, _ = _fp8_format(dtype)
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch_dtype).float().numpy()


def fp8_encode(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 -> uint8 codes, nearest even, saturating at the largest finite value as ``cvt.rn.satfinite`` does."""
    torch_dtype, largest = _fp8_format(dtype)
    clipped = np.clip(np.ascontiguousarray(x, dtype=np.float32), -largest, largest)  # NaN passes
    return torch.from_numpy(clipped).to(torch_dtype).view(torch.uint8).numpy()


def _fp8_format(dtype: tl.dtype) -> tuple[torch.dtype, float]:
    if dtype.name not in _FP8:
        raise NotImplementedError(f"the interpreter has no {dtype.name} arithmetic")
    return _FP8[dtype.name]
