"""The op registry: an op is one idea with four faces, declared once.

1. **Contract**: the signature of the reference, with shapes and dtypes by name (jaxtyping annotations).
2. **Reference**: the decorated function itself, plain torch, reading like the formula.
3. **Kernel**: the Triton launcher ``llmlab.kernels.<family>.<name>``, with the same signature.
4. **Cost**: FLOPs and the fewest bytes the op must move, a function of the same arguments (meta tensors will do).

An op may have a fast CPU twin, ``llmlab.ops.cpu.<family>.<name>``, the reference's equal that streams memory as fast as
the machine can. :class:`OpSet` binds every op to one implementation, once per engine; :func:`record_ops` watches them run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from llmlab.ops.ledger import Ledger

BACKENDS = ("torch", "triton", "reference")


class Cost(NamedTuple):
    """Work of one call: ``flops`` (a multiply-add is two) and ``bytes``, each operand moved once."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


class Op:
    """One op. Call it and it runs on the device of its tensors: the Triton kernel on a GPU, the reference on a CPU."""

    def __init__(self, reference: Callable[..., Any], cost: Callable[..., Cost], has_kernel: bool = True):
        self.name = reference.__name__
        self.family = reference.__module__.rsplit(".", 1)[-1]
        self.reference = reference
        self.cost = cost
        self.has_kernel = has_kernel
        self.signature = inspect.signature(reference)
        self.__doc__ = reference.__doc__
        self.__name__ = self.name
        self.__wrapped__ = reference

    @cached_property
    def kernel(self) -> Callable[..., Any]:
        """The Triton launcher. Raises ImportError where Triton is not installed."""
        return getattr(importlib.import_module(f"llmlab.kernels.{self.family}"), self.name)

    @cached_property
    def cpu(self) -> Callable[..., Any]:
        """The fast CPU twin; the reference itself where the op has none or numba is not installed."""
        try:
            module = importlib.import_module(f"llmlab.ops.cpu.{self.family}")
        except ModuleNotFoundError as error:
            if error.name not in ("numba", "llvmlite", f"llmlab.ops.cpu.{self.family}"):  # two that come together
                raise
            return self.reference
        return getattr(module, self.name, self.reference)

    def implementation(self, backend: str, device: torch.device) -> Callable[..., Any]:
        """The face that ``backend`` means on ``device``: "torch" is the CPU twin on a CPU, the reference elsewhere."""
        if backend == "triton" and self.has_kernel:
            return self.kernel
        if backend == "torch" and device.type == "cpu":
            return self.cpu
        return self.reference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*args, *kwargs.values()))
        return _call(self, self.kernel if on_gpu and self.has_kernel else self.reference, args, kwargs)

    def __repr__(self) -> str:
        return f"Op({self.name}{self.signature})"


def op(cost: Callable[..., Cost], has_kernel: bool = True) -> Callable[[Callable[..., Any]], Op]:
    """Declare the decorated reference as an op. ``cost`` takes the op's arguments and returns a :class:`Cost`."""
    return lambda reference: Op(reference, cost, has_kernel)


class OpSet:
    """Every op as an attribute, bound to one backend on one device: what a model's forward pass calls.

    Args:
        ops: the ops by name (``llmlab.ops.ALL``).
        backend: "torch", "triton" or "reference".
    """

    def __init__(self, ops: dict[str, Op], backend: str, device: torch.device):
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.backend = backend
        self.device = device
        for name, one in ops.items():
            setattr(self, name, _bind(one, one.implementation(backend, device)))

    @property
    def has_cpu_kernels(self) -> bool:
        """Whether the ops are the fast CPU twins."""
        return self.backend == "torch" and self.device.type == "cpu" and find_spec("numba") is not None

    def linear_packer(self, quantization: str | None = None) -> Callable[[torch.Tensor], Any]:
        """A function from a weight ``[out_features, in_features]`` to the form in which this set's ``linear`` reads it fastest.

        On a CPU each weight is laid out once, one behind the other; elsewhere it is the tensor itself. Use one packer a model.

        Args:
            quantization: "int8" for 8-bit integers with a scale an output feature; None for weights as they are.

        Raises ValueError for a quantization that is unknown, or that this set's ``linear`` has no kernel for.
        """
        from llmlab.ops.quantization import METHODS, quantize_int8

        if quantization not in (None, *METHODS):
            raise ValueError(f"quantization must be None or one of {', '.join(METHODS)}, got {quantization!r}")
        if quantization and self.backend == "triton":
            raise ValueError(f"quantization {quantization!r} has no Triton kernel; use backend 'torch' or 'reference'")
        if self.has_cpu_kernels:
            from llmlab.ops.cpu.linear import Int8Packer, LinearPacker

            return Int8Packer() if quantization else LinearPacker()
        return quantize_int8 if quantization else lambda weight: weight

    def __getattr__(self, name: str) -> Callable[..., Any]:  # only reached for a name that is no op
        raise AttributeError(f"no op is called {name!r}")


_ledger: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


def _bind(one: Op, implementation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _ledger.get() is None:
            return implementation(*args, **kwargs)
        return _call(one, implementation, args, kwargs)

    call.__name__ = one.name
    call.__doc__ = one.__doc__
    return call


def _call(one: Op, implementation: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    ledger = _ledger.get()
    if ledger is None:
        return implementation(*args, **kwargs)
    return ledger.run(one, implementation, args, kwargs)


def recording() -> bool:
    """Whether a ledger is watching the ops."""
    return _ledger.get() is not None


def annotate(layer: int | None = None, stage: str = "") -> None:
    """Tell the ledger, if one is recording, where in the model the next ops run."""
    ledger = _ledger.get()
    if ledger is not None:
        ledger.layer, ledger.stage = layer, stage


@contextmanager
def record_ops(check: bool = True, keep_tensors: bool = False, repeat: int = 1) -> Iterator[Ledger]:
    """Record every op that runs inside the block, in order: ``with record_ops() as ledger: llm.generate(...)``.

    Args:
        check: hold every call to its contract (shapes, dtypes); a breach raises ValueError naming op and tensor.
        keep_tensors: keep references to arguments and results (for looking at values; costs memory).
        repeat: run each pure op this many times and keep the fastest, for timing one real step.
    """
    from llmlab.ops.ledger import Ledger

    ledger = Ledger(check=check, keep_tensors=keep_tensors, repeat=repeat)
    token = _ledger.set(ledger)
    try:
        yield ledger
    finally:
        _ledger.reset(token)
