"""Threads for the kernels, which nobody waits for unless they have come.

An OpenMP region ends when every thread has been through it. Where other programs use the cores too, a thread may have to wait
milliseconds for the system to let it run, and so does the region, although the others have long done all the work; a step has
three hundred regions. Here the calling thread opens a gate, works, and when no work is left shuts the gate: it waits for those
that went in, and for no others.

A helper that has nothing to do looks for work a while, and then sleeps on a semaphore of its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from llmlab.ops.cpu import simd
from llmlab.ops.cpu.machine_code import compiled

_LINE = 64  # bytes: what different threads write stands in different cache lines
# The pool's words, in bytes from its start. The gate, from its lowest bit: 16 bits how many helpers are in, 15 how many may be,
# 1 whether it is open, and above a number that is new each time.
_GATE, _KERNEL, _ROW, _DONE, _POST, _WAIT, _YIELD, _HELPERS = 0, 64, 72, 128, 192, 200, 208, 256
_MAY, _OPEN, _NUMBER = 16, 31, 32
# A helper's words: whether it sleeps, the pool's address, which helper it is, the semaphore that it sleeps on.
_ASLEEP, _POOL, _INDEX, _SEMAPHORE, _HELPER_BYTES = 0, 8, 16, 64, 128
MOST_HELPERS = 255
_LOOKS = 5_000  # of a helper for work, some 40 ns each, before it sleeps: longer than from one kernel to the next
_PATIENCE = 1_000  # looks of the caller for helpers to come out, before it offers them its core


def _word(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return simd.pointer(b, address, simd.I64)


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    code = lambda context, b, sig, args: b.load_atomic(_word(b, args[0]), "seq_cst", 8)
    return types.int64(types.int64), code


@intrinsic
def _exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Store, and return what was there."""
    code = lambda context, b, sig, args: b.atomic_rmw("xchg", _word(b, args[0]), args[1], "seq_cst")
    return types.int64(types.int64, types.int64), code


@intrinsic
def _replace(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Store ``new`` if ``old`` is there; whether it was."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        result = b.cmpxchg(_word(b, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return b.zext(b.extract_value(result, 1), simd.I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if simd.cpu_has("sse2"):
            simd.call(b, "llvm.x86.sse2.pause", simd.VOID)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_address(typingctx: Any, address: Any, row: Any) -> Any:
    """``call_address(address, row)``: call a C function of one pointer, given its address."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address, row = args
        b.call(simd.pointer(b, address, ir.FunctionType(simd.VOID, [simd.I64])), [row])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit
def run(pool, kernel, row, threads):  # type: ignore[no-untyped-def]
    """Run a kernel on this thread, and with it on those of the first ``threads − 1`` helpers that come before the work is done.

    Args:
        pool: address of a :class:`Pool`'s words. kernel: address of its code. row: address of its arguments.
    """
    if threads < 2:
        call_address(kernel, row)
        return
    number = (_load(pool + _GATE) >> _NUMBER) + 1
    simd.store_int64(pool + _KERNEL, kernel)
    simd.store_int64(pool + _ROW, row)
    simd.store_int64(pool + _DONE, 0)
    _exchange(pool + _GATE, number << _NUMBER | 1 << _OPEN | (threads - 1) << _MAY)
    for i in range(threads - 1):
        helper = pool + _HELPERS + i * _HELPER_BYTES
        if _load(helper + _ASLEEP) and _exchange(helper + _ASLEEP, 0):
            call_address(_load(pool + _POST), helper + _SEMAPHORE)
    call_address(kernel, row)
    went_in = _exchange(pool + _GATE, number << _NUMBER) & ((1 << _MAY) - 1)
    looks = 0
    while _load(pool + _DONE) != went_in:
        looks += 1
        _pause()
        if looks > _PATIENCE:
            call_address(_load(pool + _YIELD), 0)


def _helping() -> Callable[[int], None]:
    def help_along(helper: int) -> None:
        """What a helper does all its life."""
        pool, index = _load(helper + _POOL), _load(helper + _INDEX)
        seen, looks = 0, 0
        while True:
            gate = _load(pool + _GATE)
            number, mine = gate >> _NUMBER, index < (gate >> _MAY & ((1 << (_OPEN - _MAY)) - 1))
            if gate >> _OPEN & 1 and mine and number != seen:
                if _replace(pool + _GATE, gate, gate + 1):
                    seen, looks = number, 0
                    call_address(_load(pool + _KERNEL), _load(pool + _ROW))
                    simd.fetch_add(pool + _DONE, 1)
                continue
            looks += 1
            _pause()
            if looks > _LOOKS:
                looks = 0
                _exchange(helper + _ASLEEP, 1)
                # The caller opens the gate, then looks who sleeps; we say so, then look at the gate: one sees the other.
                if _load(pool + _GATE) == gate or not _exchange(helper + _ASLEEP, 0):
                    call_address(_load(pool + _WAIT), helper + _SEMAPHORE)

    return help_along


def _running() -> Callable[[int, int, int, int], None]:
    def run_in_pool(pool: int, kernel: int, row: int, threads: int) -> None:
        run(pool, kernel, row, threads)

    return run_in_pool


class Pool:
    """The helpers of a process: as many as were ever asked for.

    Attributes:
        address: of the words that they share.
        launch: ``launch(address, kernel, row, threads)``, :func:`run` for Python. It keeps the interpreter lock, so that
            launches come one after the other.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._init = libc.sem_init
        self._words = np.zeros((_HELPERS + MOST_HELPERS * _HELPER_BYTES + _LINE) // 8, np.int64)
        self.address = -(-self._words.ctypes.data // _LINE) * _LINE
        for offset, name in ((_POST, "sem_post"), (_WAIT, "sem_wait"), (_YIELD, "sched_yield")):
            self._store(self.address + offset, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value)
        self._code = [compiled(_helping()), compiled(_running(), 4)]
        self._help = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._code[0].address)
        kind = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
        self.launch: Callable[[int, int, bytes, int], None] = kind(self._code[1].address)
        self._helpers = 0
        self._starting = threading.Lock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # helpers may look at its words until the process has gone

    def threads(self) -> int:
        """As many as torch uses now (``torch.set_num_threads``), ready to work."""
        threads = min(torch.get_num_threads(), MOST_HELPERS + 1)
        if self._helpers < threads - 1:
            with self._starting:
                for index in range(self._helpers, threads - 1):
                    self._start(index)
        return threads

    def _start(self, index: int) -> None:
        helper = self.address + _HELPERS + index * _HELPER_BYTES
        self._store(helper + _POOL, self.address)
        self._store(helper + _INDEX, index)
        self._init(ctypes.c_void_p(helper + _SEMAPHORE), 0, 0)
        threading.Thread(target=self._help, args=(helper,), daemon=True, name="llmlab-kernels").start()
        self._helpers = index + 1

    @staticmethod
    def _store(address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value


@functools.cache
def pool() -> Pool | None:
    """The process's pool; None where there are no such semaphores."""
    return Pool() if sys.platform == "linux" else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # threads do not come along
