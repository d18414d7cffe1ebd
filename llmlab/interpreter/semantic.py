"""Triton's front end on the numpy builder: the installed version's rules for types and shapes, over values that exist."""

from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic

from llmlab.interpreter.builder import NumpyBuilder
from llmlab.interpreter.handle import Handle

_ROUNDING = {None: None, "rtne": ir.ROUNDING_MODE.RTNE, "rtz": ir.ROUNDING_MODE.RTZ}


class _AnyTensor(type):
    """Makes every ``tl.tensor`` an instance of ``Tensor``: parts of Triton's front end build the base class by name."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, tl.tensor)


class Tensor(tl.tensor, metaclass=_AnyTensor):
    """A ``tl.tensor`` whose shape is worked out only when asked for."""

    def __init__(self, handle: Handle | None, type: tl.dtype) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    @property
    def shape(self) -> tl.core.tuple:
        shape = self.type.shape if self.type.is_block() else ()
        return tl.core.tuple([tl.constexpr(tl.core._unwrap_if_constexpr(size)) for size in shape])

    @property
    def numel(self) -> tl.constexpr:
        count = 1
        for size in self.type.shape if self.type.is_block() else ():
            count *= tl.core._unwrap_if_constexpr(size)
        return tl.constexpr(count)


class Semantic(TritonSemantic):
    """``TritonSemantic`` with the conversions done here, where the sign of an integer type is not lost on the way."""

    tensor = Tensor
    builder: NumpyBuilder

    def scalar_constant(self, value: Any, dtype: tl.dtype | None) -> Tensor:
        if dtype is None:
            raise ValueError("dtype must be specified when value is not a tensor")
        return Tensor(self.builder.create_constant(value, dtype), dtype)

    def cast(self, input: Tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> Tensor:
        src, dst = input.dtype, dst_ty.scalar
        if src is dst or src == dst:
            return input
        fp_downcast_rounding = tl.core._unwrap_if_constexpr(fp_downcast_rounding)
        narrowing = src.is_floating() and dst.is_floating() and dst.primitive_bitwidth < src.primitive_bitwidth
        if fp_downcast_rounding not in _ROUNDING or (fp_downcast_rounding is not None and not narrowing):
            raise ValueError(
                f"fp_downcast_rounding={fp_downcast_rounding!r} from {src} to {dst}: only truncating conversions have one"
            )
        result = input.type.with_element_ty(dst) if input.type.is_block() else dst
        handle = input.handle
        if src.is_ptr() or dst.is_ptr():
            if dst.is_bool():
                return self.not_equal(self.cast(input, tl.int64), self.scalar_constant(0, tl.int64))
            return Tensor(self.builder.create_bitcast(handle, dst), result)
        return Tensor(self.builder.create_cast(handle, src, dst, _ROUNDING[fp_downcast_rounding]), result)

    def bitcast(self, input: Tensor, dst_ty: tl.dtype) -> Tensor:
        src, dst = input.dtype, dst_ty.scalar
        if src == dst:
            return input
        if src.is_ptr() or dst.is_ptr():
            return self.cast(input, dst_ty)
        if src.primitive_bitwidth != dst.primitive_bitwidth:
            raise ValueError(f"cannot bitcast {src} to {dst}: their sizes differ")
        result = input.type.with_element_ty(dst) if input.type.is_block() else dst
        return Tensor(self.builder.create_bitcast(input.handle, dst), result)

    def reduction(self, *_: Any) -> Any:
        raise NotImplementedError("this reduction is not reached through tl.reduce; the interpreter does not know it")

    associative_scan = map_elementwise = reduction
