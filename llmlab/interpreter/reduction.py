"""``tl.reduce`` and ``tl.associative_scan``: whole-array numpy for the usual functions, a tree of vectorised calls for any other.

The tree halves the axis each time, combining neighbours, as a GPU does, and rounds every partial result to the element type:
the sum of a float16 or bfloat16 block is therefore as inexact here as it is there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from llmlab.interpreter.handle import Handle
from llmlab.interpreter.semantic import Tensor
from llmlab.interpreter.trace import TYPES

Combine = Callable[..., Any]  # takes 2n tensors, returns n (a tensor or a tuple)


class NotVectorisable(Exception):
    """A combine function branches on its arguments, so that it must be called element by element."""


def _known(*names: str) -> set[Any]:
    return {getattr(tl.standard, name) for name in names if hasattr(tl.standard, name)}


SUM, _PROD = _known("_sum_combine"), _known("_prod_combine")
_MAX, _MIN = _known("_elementwise_max"), _known("_elementwise_min")
_XOR, _OR = _known("_xor_combine"), _known("_or_combine")
_ARGMAX = _known("_argmax_combine_tie_break_left", "_argmax_combine_tie_break_fast")
_ARGMIN = _known("_argmin_combine_tie_break_left", "_argmin_combine_tie_break_fast")


def make(data: np.ndarray, dtype: tl.dtype) -> Tensor:
    """A tensor around register data; what has no dimension left is a scalar."""
    dtype = TYPES.intern(dtype)
    if data.ndim == 0:
        return Tensor(Handle(data.reshape(1), dtype), dtype)
    return Tensor(Handle(data, dtype), TYPES.block(dtype, data.shape))


def reduce(
    inputs: tuple[Tensor, ...], axis: int | None, function: Any, combine: Combine, keep_dims: bool
) -> tuple[Tensor, ...]:
    """Reduce along ``axis`` (None: all) with ``function``, which ``combine`` calls in the interpreter."""
    arrays = [tensor.handle.data for tensor in inputs]
    dtypes = [tensor.dtype for tensor in inputs]
    rank = arrays[0].ndim
    if axis is None:
        arrays, axis = [array.reshape(-1) for array in arrays], 0
        kept_shape: tuple[int, ...] | None = (1,) * rank
    else:
        axis = axis + rank if axis < 0 else axis
        if not 0 <= axis < rank:
            raise ValueError(f"axis {axis} of a block with {rank} dimensions")
        kept_shape = None
    results = _reduce_arrays(arrays, dtypes, axis, function, combine)
    if keep_dims:
        results = [r.reshape(kept_shape) if kept_shape is not None else np.expand_dims(r, axis) for r in results]
    return tuple(make(result, dtype) for result, dtype in zip(results, dtypes, strict=True))


def _reduce_arrays(
    arrays: list[np.ndarray], dtypes: list[tl.dtype], axis: int, function: Any, combine: Combine
) -> list[np.ndarray]:
    first, narrow = arrays[0], dtypes[0].name in ("bf16", "fp16")
    if function in SUM and not narrow:
        return [np.asarray(np.sum(first, axis=axis, dtype=first.dtype))]
    if function in _MAX:
        return [np.asarray(np.fmax.reduce(first, axis=axis))]
    if function in _MIN:
        return [np.asarray(np.fmin.reduce(first, axis=axis))]
    if function in _XOR:
        return [np.asarray(np.bitwise_xor.reduce(first, axis=axis))]
    if function in _OR:
        return [np.asarray(np.bitwise_or.reduce(first, axis=axis))]
    if function in _ARGMAX or function in _ARGMIN:
        best = (np.fmax if function in _ARGMAX else np.fmin).reduce(first, axis=axis, keepdims=True)
        ties = first == best
        if ties.any(axis=axis).all():  # else a row of NaN: leave it to the function itself
            index = np.where(ties, arrays[1], np.iinfo(arrays[1].dtype).max).min(axis=axis)
            return [np.asarray(best.squeeze(axis)), np.asarray(index)]
    return _tree(arrays, dtypes, axis, combine)


def _tree(arrays: list[np.ndarray], dtypes: list[tl.dtype], axis: int, combine: Combine) -> list[np.ndarray]:
    arrays = [np.moveaxis(array, axis, -1) for array in arrays]
    while arrays[0].shape[-1] > 1:
        if arrays[0].shape[-1] % 2:
            raise ValueError(f"the reduced axis has {arrays[0].shape[-1]} elements, not a power of two")
        left = [array[..., 0::2] for array in arrays]
        right = [array[..., 1::2] for array in arrays]
        arrays = _combine(left, right, dtypes, combine)
    return [array[..., 0] for array in arrays]


def _combine(
    left: list[np.ndarray], right: list[np.ndarray], dtypes: list[tl.dtype], combine: Combine
) -> list[np.ndarray]:
    shape = left[0].shape
    try:
        return [np.broadcast_to(data, shape) for data in _call(left, right, dtypes, combine)]
    except NotVectorisable:
        outputs = [np.empty(shape, array.dtype) for array in left]
        for position in np.ndindex(shape):
            values = _call([a[position] for a in left], [a[position] for a in right], dtypes, combine)
            for output, value in zip(outputs, values, strict=True):
                output[position] = value.reshape(-1)[0]
        return outputs


def _call(left: list[Any], right: list[Any], dtypes: list[tl.dtype], combine: Combine) -> list[np.ndarray]:
    operands = [make(np.asarray(a), t) for side in (left, right) for a, t in zip(side, dtypes, strict=True)]
    result = combine(*operands)
    results = result if isinstance(result, (tuple, tl.core.tuple)) else (result,)
    return [np.asarray(value.handle.data) for value in results]


def scan(inputs: tuple[Tensor, ...], axis: int, function: Any, combine: Combine, reverse: bool) -> tuple[Tensor, ...]:
    """Inclusive scan along ``axis``."""
    dtypes = [tensor.dtype for tensor in inputs]
    arrays = [np.moveaxis(tensor.handle.data, axis, -1) for tensor in inputs]
    if reverse:
        arrays = [array[..., ::-1] for array in arrays]
    first = arrays[0]
    if function in SUM and dtypes[0].name != "bf16":
        results = [np.cumsum(first, axis=-1, dtype=first.dtype)]
    elif function in _PROD and dtypes[0].name != "bf16":
        results = [np.cumprod(first, axis=-1, dtype=first.dtype)]
    else:
        results = [array.copy() for array in arrays]
        distance = 1
        position = np.arange(first.shape[-1])
        while distance < position.size:  # Hillis and Steele: after step k each element holds its last 2^k
            left = [np.roll(array, distance, axis=-1) for array in results]
            combined = _combine(left, results, dtypes, combine)
            results = [np.where(position >= distance, new, old) for new, old in zip(combined, results, strict=True)]
            distance *= 2
    if reverse:
        results = [array[..., ::-1] for array in results]
    return tuple(make(np.moveaxis(r, -1, axis), dtype) for r, dtype in zip(results, dtypes, strict=True))


def exact_sum(tensor: Tensor, axis: int | None) -> np.ndarray:
    """The sum in float64 (floats) or int64 (integers), to judge a narrow one by."""
    data = tensor.handle.data
    return np.sum(data, axis=axis, dtype=np.float64 if data.dtype.kind == "f" else np.int64)


def exact_cumsum(tensor: Tensor, axis: int, reverse: bool) -> np.ndarray:
    """The inclusive scan of integers in int64."""
    data = np.flip(tensor.handle.data, axis) if reverse else tensor.handle.data
    total = np.cumsum(data, axis=axis, dtype=np.int64)
    return np.flip(total, axis) if reverse else total
