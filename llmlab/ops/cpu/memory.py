"""Memory that streams fast, and memory that stays."""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

_PAGE = 2 << 20
_LINE = 64
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # what is never touched may be more than the machine has


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in pages of their own, taken as they are touched, and back with the system as soon as the tensor has died.

    For what is large and dies young: the C library would keep its memory, and not use it for the next one of that size once
    anything small lies in it.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE} if hasattr(mmap, "MAP_PRIVATE") else {}
    area = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)  # Python's default, shared, gets no large pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(tuple(shape))


def large_pages(size: int) -> Tensor:
    """``size`` zero bytes in pages of 2 MB where the system has them (Linux), taken as they are touched.

    Reading memory once, from front to back, runs at twice the speed that it has in pages of 4 KB: fewer addresses to translate.
    """
    data = own_pages((size + _PAGE,), torch.uint8)
    return data[-data.data_ptr() % _PAGE :][:size]


class Arena:
    """Memory for the results of kernels that stays: a block is used again when the tensor in it has died, as a step's tensors
    do in the order of its ops, and none goes back to the system.

    So a recorded step can be played again in the same memory. And a long prompt's results, megabytes each, are not taken from
    the system page by page in every layer, which costs more than to compute them.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []  # all, so that none goes, whatever is interrupted where
        self._free: list[tuple[int, int, np.ndarray]] = []  # size, a number of its own, block; sorted
        self._count = itertools.count()
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}  # by the identity of the reference
        self._zeros = [np.zeros(0, np.uint8)]  # the last is the largest; recorded steps may still use the others

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        block = self._take(max(count, 1) * dtype.itemsize)
        array = block[:]  # a new object, which lives exactly as long as the tensor made from it
        reference = weakref.ref(array, self._give_back)  # weakref.finalize does as much, five times slower
        self._lent[id(reference)] = reference, block
        flat = torch.frombuffer(array, dtype=dtype, count=max(count, 1))  # it refuses a count of 0
        return (flat if count else flat[:0]).view(shape)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros for kernels that leave zeros behind, and run one after the other: the same memory for all of them."""
        used = math.prod(shape) * dtype.itemsize
        if used > len(self._zeros[-1]):
            self._zeros.append(np.zeros(2 * used, np.uint8))
        return torch.from_numpy(self._zeros[-1])[:used].view(dtype).view(tuple(shape))

    def _take(self, size: int) -> np.ndarray:
        at = bisect.bisect_left(self._free, (size,))
        if at < len(self._free) and self._free[at][0] <= max(2 * size, 4096):  # the smallest that is not far too large
            return self._free.pop(at)[2]
        if size >= _PAGE // 2:
            block = large_pages(size).numpy()
        else:
            size = -(-size // _LINE) * _LINE
            area = np.empty(size + _LINE, np.uint8)
            block = area[-area.ctypes.data % _LINE :][:size]
        self._blocks.append(block)
        return block

    def _give_back(self, reference: weakref.ref) -> None:
        _, block = self._lent.pop(id(reference))
        bisect.insort(self._free, (len(block), next(self._count), block))


_arena: ContextVar[Arena | None] = ContextVar("arena", default=None)


@contextmanager
def allocate_in(arena: Arena) -> Iterator[None]:
    """Let :func:`empty` take its tensors from ``arena``."""
    token = _arena.set(arena)
    try:
        yield
    finally:
        _arena.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A kernel's result: ``torch.empty``, or memory of the arena that is in use."""
    arena = _arena.get()
    return torch.empty(shape, dtype=dtype) if arena is None else arena.empty(shape, dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros for a kernel that leaves zeros behind, as it must for the next run of a recorded step."""
    arena = _arena.get()
    return torch.zeros(shape, dtype=dtype) if arena is None else arena.zeros(shape, dtype)
