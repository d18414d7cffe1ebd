"""From a Python function to a C function, by numba, kept on disk for the next process."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, types


def compiled(body: Callable[..., None], arguments: int = 1) -> Any:
    """A function of int64 as machine code: ``.address`` is that of a C function, for as long as this object lives.

    numba keeps it on disk (``NUMBA_CACHE_DIR``, or ``__pycache__`` beside the source).
    """
    # numba recompiles when the body's own file changes, but does not see the files that it is built from: their state is
    # made part of the name that the machine code is kept under.
    body.__qualname__ += f".{_sources():x}"
    signature = types.void(*[types.int64] * arguments)
    compiler = functools.partial(cfunc, signature, error_model="numpy")  # no checks of divisors
    try:
        return compiler(cache=True)(body)
    except RuntimeError:  # nowhere to keep it: the body was typed in, or nothing can be written
        return compiler()(body)


@functools.cache
def _sources() -> int:
    folder = Path(__file__).parent
    stamps = [
        (folder / name).stat().st_mtime_ns for name in ("pool.py", "parallel.py", "simd.py", "tiles.py", "amx.py")
    ]
    return zlib.crc32(repr(stamps).encode())
