"""The one seam between a launcher and the machine: the same call runs a kernel on a GPU, in the interpreter, or only records it.

A launcher ends in ``launch(kernel, grid, *args, num_warps=..., num_stages=..., NAME=constexpr...)``. The device of the first
tensor decides: on a GPU the kernel is launched as ``kernel[grid](...)``; on a CPU it runs in ``llmlab.interpreter`` (checked
when the caller stands inside ``llmlab.interpreter.checked()``); on torch's ``meta`` device nothing is computed, and the
launch is handed to the innermost ``recording()``, which is how ``llmlab.kernels.spec.capture`` learns, from the launcher
itself, what to compile ahead of time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


@dataclass(frozen=True)
class Launch:
    """One recorded launch: what the launcher passed, untouched. ``kwargs`` holds constexprs and any further option."""

    kernel: JITFunction
    grid: Grid
    args: tuple[Any, ...]
    num_warps: int
    num_stages: int
    kwargs: dict[str, Any]


_recorder: ContextVar[list[Launch] | None] = ContextVar("llmlab_launch_recorder", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches on ``meta`` tensors made inside the block by this thread (or task), in order."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def launch(kernel: JITFunction, grid: Grid, *args: Any, num_warps: int = 4, num_stages: int = 3, **kwargs: Any) -> None:
    """Run ``kernel`` over ``grid`` where its first tensor lives.

    ``args`` are the kernel's positional arguments (tensors, tensor descriptors, numbers), ``kwargs`` its constexprs by name and
    further compile options (``maxnreg``, ``waves_per_eu``, ...). Raises ValueError when no argument is a tensor, or when the
    tensors' device is none of cuda, cpu, meta.
    """
    device = _device(args, kwargs)
    if device == "cuda":
        kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **kwargs)
    elif device == "cpu":
        from llmlab.interpreter import run  # here, so that a GPU process never loads the interpreter

        run(kernel, grid, *args, num_warps=num_warps, num_stages=num_stages, **kwargs)
    elif device == "meta":
        launches = _recorder.get()
        if launches is not None:
            launches.append(Launch(kernel, grid, args, num_warps, num_stages, kwargs))
    else:
        raise ValueError(f"a kernel runs on cuda, cpu or meta tensors; the first tensor is on {device!r}")


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):  # the usual case, kept short: this runs before every launch
        return first.device.type
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type
        base = getattr(value, "base", None)  # a host-side TensorDescriptor
        if isinstance(base, torch.Tensor):
            return base.device.type
    raise ValueError("launch needs at least one tensor argument to know the device")
