"""A step recorded once and played again: what CUDA graphs are on a GPU, for the same reason.

A decode step of a small model calls hundreds of kernels, each for a few microseconds of arithmetic; Python needs longer than
that to call one, and longer still when the weights streaming by have thrown it out of the caches. A recorded step is the list
of kernels with their arguments. Played, it runs them one after another without Python, in the memory in which it was
recorded: new input is copied into the old input tensors, the result appears in the old result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmlab.ops.cpu import memory, simd
from llmlab.ops.cpu.parallel import arg, kernel, record_calls
from llmlab.ops.cpu.pool import call_address, pool, run


class NotRecordable(RuntimeError):
    """Something computes in the step that is no kernel of this package, and would not be played again."""


class _OnlyKernels(TorchDispatchMode):
    """Lets torch make views, which are no work, and refuses everything else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; "skip" would import torch's compiler: a second, and 145 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            raise NotRecordable(f"{func} computes outside the kernels")
        result = func(*args, **(kwargs or {}))
        # reshape counts as a view and copies all the same where the strides demand it: the copy would not be played again
        memory_of = lambda tensor: tensor.untyped_storage().data_ptr()
        if any(
            memory_of(view) != memory_of(args[0])
            for view in (result if isinstance(result, (list, tuple)) else [result])
        ):
            raise NotRecordable(f"{func} copies outside the kernels")
        return result


class Graph:
    """The kernels that ``function()`` called, in order, and its result.

    Args:
        function: runs once, while it is recorded; every tensor that it reads or writes must stay where it is.
        arena: where the results of its kernels live; graphs that never run at the same time can share one.
        check: look at every op of torch's, which takes as long as the step. Not needed for a function that does the same as one
            that was checked, on tensors of other sizes.

    Raises:
        NotRecordable: the function computes with torch itself.
    """

    def __init__(self, function: Callable[[], Any], arena: memory.Arena, check: bool = True):
        with memory.allocate_in(arena), record_calls() as calls, _OnlyKernels() if check else nullcontext():
            self.result = function()
        self._calls = calls
        self._rows = torch.frombuffer(bytearray().join(call.row for call in calls) or bytearray(8), dtype=torch.int64)
        starts, at = [], self._rows.data_ptr()
        for call in calls:
            starts.append((call.kernel.address, at, int(call.parallel)))
            at += len(call.row)
        self._table = torch.tensor(starts, dtype=torch.int64).reshape(-1, 3)

    def play(self) -> Any:
        """Run the kernels again: the same result object, with what they compute now."""
        helpers = pool()
        if helpers is None:
            for call in self._calls:
                call.again()
        else:
            _play().serial(self._table.data_ptr(), len(self._calls), helpers.address, helpers.threads())
        return self.result

    def times(self) -> list[tuple[str, float]]:
        """Play it call by call: the name of each kernel and its seconds. The calling itself counts, a microsecond each."""
        times = []
        for call in self._calls:
            begin = time.perf_counter()
            call.again()
            times.append((call.kernel.name, time.perf_counter() - begin))
        return times


@kernel("qqqq")
def _play() -> Callable[[int], None]:
    def body(p: int) -> None:
        table, count, helpers, threads = arg(p, 0), arg(p, 1), arg(p, 2), arg(p, 3)
        for i in range(count):
            address = simd.load_int64(table + 24 * i)
            row = simd.load_int64(table + 24 * i + 8)
            simd.store_int64(row, 0)  # the counter of the work taken
            if simd.load_int64(table + 24 * i + 16):
                run(helpers, address, row, threads)
            else:
                call_address(address, row)

    return body
