"""Memory that streams fast, and memory that stays where it is while a step is recorded."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

_PAGE = 2 << 20
_LINE = 64


def large_pages(size: int) -> Tensor:
    """``size`` zero bytes in pages of 2 MB where the system has them (Linux), taken as they are touched.

    Reading memory once, from front to back, runs at twice the speed that it has in pages of 4 KB: fewer addresses to translate.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    area = mmap.mmap(-1, size + _PAGE, **private)  # a shared mapping, Python's default, gets no large pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(area, dtype=torch.uint8)
    return data[-data.data_ptr() % _PAGE :][:size]


class Arena:
    """Tensors for a recorded step, which will be played again in the same memory.

    A block is given out again when the tensor in it has died, as a step's tensors do in the order of its ops; but none goes
    back to the system, so that nothing else can come to stand there.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._kept: list[np.ndarray] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = max(-(-math.prod(shape) * dtype.itemsize // _LINE), 1) * _LINE
        free = self._free[size]
        block = free.pop() if free else _aligned(size)
        array = block[:]  # a new object, which lives exactly as long as the tensor made from it
        weakref.finalize(array, free.append, block).atexit = False
        return torch.from_numpy(array)[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zero now, and not used again for anything else: for a kernel that leaves zeros behind."""
        array = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        self._kept.append(array)
        return torch.from_numpy(array).view(dtype).view(tuple(shape))


def _aligned(size: int) -> np.ndarray:
    block = np.empty(size + _LINE, np.uint8)
    return block[-block.ctypes.data % _LINE :][:size]


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
    """A kernel's result: ``torch.empty``, or memory of the arena that a step is being recorded in."""
    arena = _arena.get()
    return torch.empty(shape, dtype=dtype) if arena is None else arena.empty(shape, dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros for a kernel that leaves zeros behind, as it must where a step is recorded."""
    arena = _arena.get()
    return torch.zeros(shape, dtype=dtype) if arena is None else arena.zeros(shape, dtype)
