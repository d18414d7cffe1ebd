"""How a CPU kernel is compiled, called and spread over the cores.

A kernel is a function of one address: that of a row of 64-bit arguments. Compiled by numba to a plain C function, it is
called through ctypes in half a microsecond, which counts when a decode step calls three hundred of them. In parallel, the
same function runs once on every thread that comes (:mod:`llmlab.ops.cpu.pool`), and the threads take pieces of the work from a
counter that stands before the arguments, so that a thread that was put aside by the operating system holds up one piece only.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.machine_code import compiled
from llmlab.ops.cpu.pool import call_address, pool

INPUTS_IN_CACHE = 512 << 10  # bytes of one operand that a kernel goes over again and again: half of a small L2 cache
_STATUS = struct.Struct("q").unpack_from


class Call(NamedTuple):
    """A kernel with its arguments, ready to run again."""

    kernel: Kernel
    row: bytes
    parallel: bool

    def again(self) -> None:
        self.kernel.run(bytes(bytearray(self.row)), self.parallel)  # a copy, for the kernel to write into


_calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """The kernels that are called inside the block, in order; they run as well."""
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


class Kernel:
    """A compiled kernel.

    Args:
        body: the function of one int64, the address of its arguments. Word 0 is the shared counter, word 1 a status that
            the kernel may set (:func:`report`), the arguments follow.
        layout: the arguments, for :mod:`struct`: q for a pointer or an integer, d for a float.

    Attributes:
        name: that of the function which made the body.
    """

    def __init__(self, body: Callable[[int], None], layout: str):
        self.name = body.__qualname__.partition(".")[0].lstrip("_")
        self._compiled = compiled(body)  # owns the machine code
        self.address = self._compiled.address
        self._pack = struct.Struct("qq" + layout).pack
        self._call = ctypes.PYFUNCTYPE(None, ctypes.c_char_p)(self.address)

    def serial(self, *args: Any) -> int:
        """Run on the calling thread; returns the status, 0 unless the kernel reported something."""
        return self.run(self._pack(0, 0, *args), False)

    def parallel(self, *args: Any) -> int:
        """Run on as many threads as torch uses (``torch.set_num_threads``), or on those that come; returns the status."""
        return self.run(self._pack(0, 0, *args), True)

    def run(self, row: bytes, parallel: bool) -> int:
        """Run with a row of arguments that nobody else holds; it is written to."""
        calls = _calls.get()
        if calls is not None:
            calls.append(Call(self, bytes(bytearray(row)), parallel))
        # The row is this call's own, so that the kernel may write into it, although Python calls it immutable.
        if parallel:
            if (helpers := pool()) is None:
                _launch_by_numba(self.address, row, torch.get_num_threads())
            else:
                helpers.launch(helpers.address, self.address, row, helpers.threads())
        else:
            self._call(row)
        return _STATUS(row, 8)[0]

    @property
    def assembly(self) -> str:
        """What LLVM made of it."""
        return self._compiled._library.get_asm_str()


def kernel(layout: str) -> Callable[[Callable[..., Callable[[int], None]]], Callable[..., Kernel]]:
    """Decorate a maker of kernel bodies: ``make(*specialisation) -> body`` becomes ``make(*specialisation) -> Kernel``.

    Each specialisation is compiled when it is first asked for, once a process.
    """

    def decorate(make: Callable[..., Callable[[int], None]]) -> Callable[..., Kernel]:
        @functools.cache
        @functools.wraps(make)
        def build(*specialisation: Any) -> Kernel:
            return Kernel(make(*specialisation), layout)

        return build

    return decorate


@functools.cache
def _numba_pool() -> Callable[[int, int, int], None]:
    """Where there is no pool of ours."""

    @njit("void(int64, int64, int64)", parallel=True, nogil=True)
    def run(address: int, row: int, threads: int) -> None:
        for _ in prange(threads):
            call_address(address, row)

    return run


def _launch_by_numba(address: int, row: bytes, threads: int) -> None:
    _numba_pool()(address, ctypes.cast(row, ctypes.c_void_p).value, threads)


# ---- inside a kernel -------------------------------------------------------------------------------------------------------

# Intrinsics rather than small functions, because numba takes half a second to inline a dozen of those into a kernel.


def _word(b: ir.IRBuilder, row: ir.Value, offset: int, kind: ir.Type, index: ir.Value | None = None) -> ir.Value:
    address = b.add(row, simd.int64(offset))
    return simd.pointer(b, address if index is None else b.add(address, b.shl(index, simd.int64(3))), kind)


@intrinsic
def arg(typingctx: Any, p: Any, index: Any) -> Any:
    """``arg(p, index) -> int64``: an argument (from 0), an integer or a pointer."""
    code = lambda context, b, sig, args: b.load(_word(b, args[0], 16, simd.I64, args[1]))
    return types.int64(types.int64, types.int64), code


@intrinsic
def number(typingctx: Any, p: Any, index: Any) -> Any:
    """``number(p, index) -> float64``: an argument that is a float."""
    code = lambda context, b, sig, args: b.load(_word(b, args[0], 16, ir.DoubleType(), args[1]))
    return types.float64(types.int64, types.int64), code


@intrinsic
def take(typingctx: Any, p: Any, count: Any) -> Any:
    """``take(p, count) -> int64``: the first of the next ``count`` pieces of work that no thread has taken yet."""
    code = lambda context, b, sig, args: b.atomic_rmw("add", _word(b, args[0], 0, simd.I64), args[1], "acq_rel")
    return types.int64(types.int64, types.int64), code


@intrinsic
def report(typingctx: Any, p: Any, status: Any) -> Any:
    """``report(p, status)``: hand a number back to the caller; something in the arguments is wrong."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        b.store(args[1], _word(b, args[0], 8, simd.I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit
def piece(index: int, count: int, threads: int) -> tuple[int, int]:
    """Piece ``index`` of ``count`` units: three quarters are dealt out, one long run a thread, which memory likes best; the
    rest goes in short runs to whoever is free, so that a thread that was interrupted does not hold up the others."""
    long = count * 3 // (4 * threads)
    dealt = threads if long else 0
    short = max((count - long * dealt) // (4 * threads), 1)
    first = long * min(index, dealt) + short * max(index - dealt, 0)
    return min(first, count), min(first + (long if index < dealt else short), count)
