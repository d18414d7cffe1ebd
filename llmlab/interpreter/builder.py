"""Triton's IR builder, replaced: where the compiler's builder appends an operation, this one computes it with numpy.

The front end (``TritonSemantic``) is Triton's own, so type promotion and broadcasting are those of the installed version; only
the arithmetic is here. It is the same on every supported version, whose stock interpreters differ (and are wrong for bfloat16).
Scalars are arrays of shape (1,), blocks have their own shape, bfloat16 is held in float32 arrays (see ``rounding``).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions

from llmlab.interpreter import rounding
from llmlab.interpreter.access import Accesses
from llmlab.interpreter.arithmetic import Arithmetic
from llmlab.interpreter.handle import BF16, INT1, INT32, Handle, common_region, shape_of
from llmlab.interpreter.memory import REGISTER_TYPE, Region


def _getter(dtype: tl.dtype) -> Callable[["NumpyBuilder", Any], Handle]:
    return lambda self, value: self.create_constant(value, dtype)


class NumpyBuilder(Arithmetic, Accesses, InterpreterBuilder):
    """Computes. One per kernel run; it holds the grid position and nothing else that changes."""

    def __init__(self) -> None:
        super().__init__()
        # The front end's own overflow test widens every integer operation, and reports nothing without a device.
        self.options = dataclasses.replace(InterpreterOptions(), sanitize_overflow=False)
        self.regions: list[Region] = []
        self.grid_dim: tuple[int, int, int] = (1, 1, 1)
        self.grid_idx: tuple[int, int, int] = (0, 0, 0)

    # -- constants

    def get_null_value(self, type: tl.dtype) -> Handle:
        return self.create_constant(0, type.scalar)

    def get_all_ones_value(self, type: tl.dtype) -> Handle:
        kind = REGISTER_TYPE[type.scalar.name]
        return Handle(
            np.full(1, True) if kind == np.bool_ else np.full(1, -1, f"i{kind.itemsize}").view(kind), type.scalar
        )

    def create_constant(self, value: float, dtype: tl.dtype) -> Handle:
        """A scalar constant of ``dtype``, rounded to it."""
        if dtype.name.startswith("fp8"):
            return Handle(rounding.fp8_encode(np.array([value], np.float32), dtype), dtype)
        if dtype.name == "bf16":
            return Handle(rounding.round_double_to_bf16(np.array([value], np.float64)), dtype)
        if dtype.is_ptr():
            return Handle(np.array([value], np.uint64), dtype)
        return Handle(np.array([value], REGISTER_TYPE[dtype.name]), dtype)

    get_int1, get_int8, get_int16, get_int32, get_int64 = map(_getter, (INT1, tl.int8, tl.int16, INT32, tl.int64))
    get_uint8, get_uint16, get_uint32, get_uint64 = map(_getter, (tl.uint8, tl.uint16, tl.uint32, tl.uint64))
    get_fp16, get_bf16, get_fp32, get_fp64 = map(_getter, (tl.float16, BF16, tl.float32, tl.float64))

    # -- program

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(np.array([self.grid_idx[axis]], np.int32), INT32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.grid_dim[axis]], np.int32), INT32)

    def create_barrier(self, *_: Any) -> None:
        """Nothing: one thread runs a program here."""

    # -- shapes

    def create_make_range(self, _: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), INT32)

    def create_splat(self, type: Any, arg: Handle) -> Handle:
        """``type``: the block type, or its shape as a tuple (what a recorded call holds)."""
        shape = type if isinstance(type, tuple) else shape_of(type)
        data = np.empty(shape, arg.data.dtype)
        # Filled, not broadcast: np.broadcast_to takes longer than filling blocks of this size does.
        data.fill(arg.data.reshape(-1)[0])
        return Handle(data, arg.dtype, arg.region)

    def create_unsplat(self, arg: Handle) -> Handle:
        return Handle(arg.data.reshape(-1)[:1], arg.dtype, arg.region)

    def create_reshape(self, arg: Handle, shape: Sequence[int], *_: Any) -> Handle:
        return Handle(arg.data.reshape([int(s) for s in shape]), arg.dtype, arg.region)

    def create_trans(self, arg: Handle, dims: Sequence[int]) -> Handle:
        return Handle(np.transpose(arg.data, [int(d) for d in dims]), arg.dtype, arg.region)

    def create_expand_dims(self, arg: Handle, axis: int) -> Handle:
        shape = arg.data.shape
        return Handle(arg.data.reshape((*shape[:axis], 1, *shape[axis:])), arg.dtype, arg.region)

    def create_broadcast(self, arg: Handle, shape: Sequence[int]) -> Handle:
        data = np.empty([int(size) for size in shape], arg.data.dtype)
        data[...] = arg.data
        return Handle(data, arg.dtype, arg.region)

    def create_cat(self, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.concatenate([lhs.data, rhs.data]), lhs.dtype, common_region(lhs, rhs))

    def create_join(self, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.stack([lhs.data, rhs.data], axis=-1), lhs.dtype, common_region(lhs, rhs))

    def create_split(self, arg: Handle) -> tuple[Handle, Handle]:
        return tuple(Handle(arg.data[..., i], arg.dtype, arg.region) for i in range(2))

    def create_gather(self, src: Handle, indices: Handle, axis: int) -> Handle:
        return Handle(np.take_along_axis(src.data, indices.data.astype(np.int64), axis=axis), src.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        kept = data.data if mask is None else data.data[mask.data]
        kept = kept[(kept >= 0) & (kept < bins)].astype(np.int64)
        return Handle(np.bincount(kept, minlength=bins).astype(np.int32), INT32)

    def create_dot_scaled(self, *_: Any) -> None:
        raise NotImplementedError("the interpreter has no tl.dot_scaled")

    def create_atomic_poll(self, *_: Any) -> None:
        raise NotImplementedError("tl.atomic_poll waits for another program; here they run one after the other")

    def create_inline_asm(self, *_: Any) -> None:
        raise NotImplementedError("inline assembly runs on a GPU only")

    def create_extern_elementwise(self, _: Any, __: Any, symbol: str, *___: Any) -> None:
        raise NotImplementedError(f"the device function {symbol!r} exists on a GPU only; tl.math has portable ones")

    def create_make_block_ptr(self, *_: Any) -> None:
        raise NotImplementedError("block pointers are gone from triton 3.8 on; use pointers or a tensor descriptor")
