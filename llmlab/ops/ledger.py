"""The shape ledger: every tensor of the ops that ran, in order, with its symbolic and concrete shape.

The symbols come from the ops' own contracts (jaxtyping annotations), so a ledger is both a table to read and a check: a
symbol that stands for two sizes in one call is a broken contract.
"""

from __future__ import annotations

import math
import time
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.ops.registry import Cost, Op


@dataclass(frozen=True)
class TensorRecord:
    """One argument or result of one call."""

    role: str  # "in" or "out"
    name: str
    symbolic: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class OpRecord:
    """One call of one op: what went in and came out, its cost, and the seconds it took."""

    step: int
    layer: int | None
    stage: str
    op: str
    tensors: tuple[TensorRecord, ...]
    cost: Cost
    seconds: float
    arguments: tuple[tuple, dict] | None = None
    result: Any = None


@dataclass
class Ledger:
    """What :func:`llmlab.ops.record_ops` yields. ``records`` holds one entry a call; :meth:`table` one row a tensor."""

    check: bool = True
    keep_tensors: bool = False
    repeat: int = 1
    records: list[OpRecord] = field(default_factory=list)
    step: int = 0
    layer: int | None = None
    stage: str = ""

    def run(self, one: Op, implementation: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        bound = one.signature.bind(*args, **kwargs)
        seconds, result = self._timed(one, implementation, args, kwargs)
        tensors = tuple(_describe(one, bound.arguments, result, self.check))
        cost = one.cost(*args, **kwargs)
        kept = ((args, kwargs), result) if self.keep_tensors else (None, None)
        self.records.append(OpRecord(self.step, self.layer, self.stage, one.name, tensors, cost, seconds, *kept))
        return result

    def _timed(self, one: Op, implementation: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[float, Any]:
        on_gpu = any(isinstance(a, Tensor) and a.is_cuda for a in args)
        best = float("inf")
        for _ in range(self.repeat):
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            result = implementation(*args, **kwargs)
            if on_gpu:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best, result

    def table(self) -> pd.DataFrame:
        """One row a tensor: step, layer, stage, op, role, name, symbolic and concrete shape, dtype, bytes."""
        import pandas as pd

        rows = [
            {
                "step": record.step,
                "layer": record.layer,
                "stage": record.stage,
                "op": record.op,
                "role": tensor.role,
                "tensor": tensor.name,
                "symbolic": tensor.symbolic,
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "bytes": tensor.nbytes,
            }
            for record in self.records
            for tensor in record.tensors
        ]
        frame = pd.DataFrame(
            rows, columns=["step", "layer", "stage", "op", "role", "tensor", "symbolic", "shape", "dtype", "bytes"]
        )
        return frame.astype({"layer": "Int64"})

    def costs(self) -> pd.DataFrame:
        """One row a call: step, layer, stage, op, flops, bytes, intensity (FLOP/byte), seconds."""
        import pandas as pd

        rows = [
            {
                "step": r.step,
                "layer": r.layer,
                "stage": r.stage,
                "op": r.op,
                "flops": r.cost.flops,
                "bytes": r.cost.bytes,
                "intensity": r.cost.intensity,
                "seconds": r.seconds,
            }
            for r in self.records
        ]
        frame = pd.DataFrame(rows, columns=["step", "layer", "stage", "op", "flops", "bytes", "intensity", "seconds"])
        return frame.astype({"layer": "Int64"})


@cache
def _hints(reference: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(reference, include_extras=True)


def _array_hint(hint: Any) -> Any:
    """The jaxtyping annotation inside ``X | None``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next((inner for inner in map(_array_hint, typing.get_args(hint)) if inner is not None), None)
    return hint if hasattr(hint, "dim_str") else None


def _result_hints(hint: Any, result: Any) -> list[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        wants_tuple = isinstance(result, tuple)
        options = typing.get_args(hint)
        hint = next(o for o in options if (typing.get_origin(o) is tuple) == wants_tuple)
    return list(typing.get_args(hint)) if typing.get_origin(hint) is tuple else [hint]


def _describe(one: Op, arguments: dict[str, Any], result: Any, check: bool) -> list[TensorRecord]:
    hints = _hints(one.reference)
    sizes: dict[str, int] = {}
    records = []
    for name, value in arguments.items():
        hint = _array_hint(hints.get(name))
        if hint is not None and value is not None:
            records.append(_record(one, "in", name, value, hint, sizes, check))
    results = result if isinstance(result, tuple) else (result,)
    if result is not None:
        for i, (value, hint) in enumerate(zip(results, _result_hints(hints["return"], result), strict=True)):
            name = "out" if len(results) == 1 else f"out{i}"
            records.append(_record(one, "out", name, value, _array_hint(hint), sizes, check))
    return records


def _record(one: Op, role: str, name: str, value: Any, hint: Any, sizes: dict[str, int], check: bool) -> TensorRecord:
    symbols = hint.dim_str.split()
    shape = tuple(value.shape)
    if check:
        where = f"{one.name}: {name}[{', '.join(symbols)}]"
        dtype = str(value.dtype).removeprefix("torch.")
        if hint.dtypes and not any(dtype == d or dtype.startswith(d) for d in hint.dtypes):
            raise ValueError(f"{where} has dtype {dtype}, must be one of {', '.join(hint.dtypes)}")
        if len(symbols) != len(shape):
            raise ValueError(f"{where} has shape {shape}: {len(shape)} dimensions instead of {len(symbols)}")
        for symbol, size in zip(symbols, shape, strict=True):
            symbol, size = _solve(symbol, size, where)
            if sizes.setdefault(symbol, size) != size:
                raise ValueError(f"{where} has shape {shape}: {symbol} is {size} here and {sizes[symbol]} before")
    nbytes = math.prod(shape) * value.dtype.itemsize  # of a packed weight too, which is a tensor in another layout
    return TensorRecord(role, name, f"[{', '.join(symbols)}]", shape, value.dtype, nbytes)


def _solve(symbol: str, size: int, where: str) -> tuple[str, int]:
    """``num_reqs+1`` of size 5 says that ``num_reqs`` is 4; ``2*intermediate_size`` of size 6, that it is 3."""
    if "+" in symbol:
        base, offset = symbol.split("+")
        return base, size - int(offset)
    if "*" in symbol:
        factor, base = symbol.split("*")
        if size % int(factor):
            raise ValueError(f"{where}: {size} is not a multiple of {factor}")
        return base, size // int(factor)
    return symbol, size
