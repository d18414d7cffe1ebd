"""Runs a kernel over its grid: arguments in, one program after another."""

import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from llmlab.interpreter.builder import NumpyBuilder
from llmlab.interpreter.checks import Finding
from llmlab.interpreter.handle import Handle
from llmlab.interpreter.memory import Region, triton_type
from llmlab.interpreter.runtime import Runtime, unwrap
from llmlab.interpreter.semantic import Tensor
from llmlab.interpreter.trace import own
from llmlab.interpreter.versions import require_supported_triton

# What a launch may say to the compiler and the interpreter has no use for.
COMPILE_OPTIONS = frozenset(
    "num_warps num_stages num_ctas maxnreg waves_per_eu matrix_instr_nonkdim kpack enable_fp_fusion launch_pdl "
    "launch_cooperative_grid ir_override debug sanitize_overflow arch".split()
)

GRID_LIMITS = (2**31 - 1, 65535, 65535)  # CUDA programming guide, technical specifications of every compute capability


class KernelError(RuntimeError):
    """A kernel failed in the interpreter; the message says where (source line and program), ``__cause__`` says why.

    ``findings`` holds what the checks had found by then: often the cause of the failure.
    """

    findings: tuple[Finding, ...] = ()

    def after(self, findings: Iterable[Finding]) -> None:
        """Note what had been found before the failure."""
        self.findings = tuple(findings)
        for finding in self.findings:
            self.add_note(f"found before: {finding}")


def unwrap_kernel(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[JITFunction, dict[str, Any]]:
    """Down to the plain kernel; heuristics are evaluated and an autotuner's first configuration fills what is not given."""
    while not isinstance(kernel, JITFunction):
        if hasattr(kernel, "configs"):  # Autotuner
            kwargs = {**kernel.configs[0].all_kwargs(), **kwargs} if kernel.configs else kwargs
        elif hasattr(kernel, "values"):  # Heuristics
            for name, heuristic in kernel.values.items():
                kwargs = {**kwargs, name: heuristic({**dict(zip(kernel.arg_names, args)), **kwargs})}
        if not hasattr(kernel, "fn"):
            raise ValueError(f"{kernel!r} is no Triton kernel")
        kernel = kernel.fn
    return kernel, kwargs


def bind(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every parameter's value, by name. Raises ValueError for a name that is neither a parameter nor a compile option."""
    unknown = set(kwargs) - set(kernel.arg_names) - COMPILE_OPTIONS
    if unknown:
        raise ValueError(f"{sorted(unknown)} are neither parameters of {kernel.__name__} nor compile options")
    try:
        bound = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names})
    except TypeError as error:
        raise ValueError(f"{kernel.__name__}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


class Arguments:
    """Host values as kernel values, as Triton's launcher hands them over."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.regions: list[Region] = []

    def convert(self, name: str, value: Any, specialise: bool = True, annotation: str = "") -> Any:
        """``annotation``: the type that the kernel declares for a number ("i64"), which is then the one it gets."""
        if isinstance(value, torch.Tensor):
            return self._pointer(name, value)
        if isinstance(value, (bool, int, float)):
            if annotation and not annotation.startswith("*"):
                return self._number(name, value, _declared_type(annotation))
            if specialise and value == 1 and type(value) is int:
                return 1  # the launcher compiles an integer argument that is 1 into the kernel, as a constant
            return self._number(name, value, _number_type(value))
        if isinstance(value, tuple):
            return tuple(self.convert(f"{name}[{i}]", item, specialise) for i, item in enumerate(value))
        if isinstance(getattr(value, "base", None), torch.Tensor) and hasattr(value, "block_shape"):
            return self._descriptor(name, value)
        if value is None or callable(value) or isinstance(value, (tl.constexpr, tl.dtype)):
            return unwrap(value)
        raise ValueError(f"{name!r} = {value!r}: Triton's launcher takes no {type(value).__name__} but as a constexpr")

    def _number(self, name: str, value: Any, dtype: tl.dtype) -> Tensor:
        if isinstance(value, float) and not dtype.is_floating():
            raise ValueError(f"{name!r} is declared {dtype} and cannot be {value}")
        try:
            return Tensor(self.runtime.builder.create_constant(value, dtype), dtype)
        except OverflowError:
            raise ValueError(f"{name!r} = {value} does not fit {dtype}") from None

    def _pointer(self, name: str, tensor: torch.Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise ValueError(f"the interpreter takes CPU tensors; {name!r} is on {tensor.device}")
        region = Region(name, tensor.detach())
        self.regions.append(region)
        dtype = tl.pointer_type(triton_type(tensor.dtype))
        address = region.base + tensor.storage_offset() * tensor.element_size()
        return Tensor(Handle(np.array([address], np.uint64), dtype, region), dtype)

    def _descriptor(self, name: str, value: Any) -> Any:
        semantic = self.runtime.semantic
        shape = [semantic.to_tensor(int(size)) for size in value.shape]
        strides = [semantic.to_tensor(int(stride)) for stride in value.strides[:-1]] + [tl.constexpr(1)]
        padding = getattr(value, "padding", "zero")
        block_shape = [tl.constexpr(int(size)) for size in value.block_shape]
        return semantic.make_tensor_descriptor(self._pointer(name, value.base), shape, strides, block_shape, padding)


def _number_type(value: Any) -> tl.dtype:
    """What the launcher makes of a number: an integer that needs more than 32 bits is int64, from 2^63 on uint64."""
    if isinstance(value, bool):
        return tl.int1
    if isinstance(value, float):
        return tl.float32
    if -(2**31) <= value < 2**31:
        return tl.int32
    return tl.int64 if value < 2**63 else tl.uint64


def _declared_type(annotation: str) -> tl.dtype:
    """The scalar type of a parameter's annotation as Triton normalises it: "i64", "u32", "fp64", "bf16", "u1"."""
    name = "int1" if annotation in ("u1", "i1") else re.sub(r"^(u?)i?(\d)", r"\1int\2", annotation)
    return tl.dtype(name)


def normalise_grid(grid: Any, values: dict[str, Any]) -> tuple[int, int, int]:
    """A grid (tuple, or function of the arguments) as three sizes; ValueError when there are more, one is negative, or a GPU
    would refuse it."""
    sizes = grid(values) if callable(grid) else grid
    sizes = tuple(int(size) for size in (sizes if isinstance(sizes, (tuple, list)) else (sizes,)))
    if not 1 <= len(sizes) <= 3 or any(size < 0 for size in sizes):
        raise ValueError(f"a grid has one to three sizes of at least 0, not {sizes}")
    if any(size > limit for size, limit in zip(sizes, GRID_LIMITS)):
        raise ValueError(f"a GPU launches grids of up to {GRID_LIMITS} programs, not {sizes}")
    return (*sizes, *(1,) * (3 - len(sizes)))


def execute(
    kernel: JITFunction,
    grid: tuple[int, int, int],
    values: dict[str, Any],
    runtime: Runtime,
    start_program: Callable[[tuple[int, int, int]], None] | None = None,
    order: list[int] | None = None,
) -> None:
    """Run every program, in grid order or in ``order`` (a permutation of the flat program numbers)."""
    builder: NumpyBuilder = runtime.builder
    builder.grid_dim = grid
    function = runtime.jit(kernel)
    arguments = list(values.values())
    total = grid[0] * grid[1] * grid[2]
    with np.errstate(all="ignore"):
        for number in range(total) if order is None else order:
            x, rest = divmod(number, grid[1] * grid[2])
            program = (x, *divmod(rest, grid[2]))
            builder.grid_idx = program
            runtime.start_program()
            if start_program is not None:
                start_program(program)
            try:
                function(*arguments)
            except Exception as error:
                raise KernelError(_where(error, kernel, program, runtime.files)) from error


def _where(error: Exception, kernel: JITFunction, program: tuple[int, int, int], files: set[str]) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else kernel.__name__
    return f"{kernel.__name__}, program {program}, {place}: {type(error).__name__}: {error}"


def run_unchecked(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The fast way: no bookkeeping at all."""
    require_supported_triton()
    plain, kwargs = unwrap_kernel(kernel, args, kwargs)
    values = bind(plain, args, kwargs)
    runtime = Runtime(NumpyBuilder())
    converted, runtime.builder.regions = convert_arguments(plain, values, runtime)
    execute(plain, normalise_grid(grid, values), converted, runtime)


def convert_arguments(
    kernel: JITFunction, values: dict[str, Any], runtime: Runtime
) -> tuple[dict[str, Any], list[Region]]:
    """(kernel values by parameter, the tensor arguments' regions)."""
    arguments = Arguments(runtime)
    converted = {}
    for param in kernel.params:
        value = values[param.name]
        if param.is_constexpr:
            converted[param.name] = unwrap(value)
        else:
            value = arguments.convert(param.name, value, not param.do_not_specialize, param.annotation_type)
            converted[param.name] = own(value)
    return converted, arguments.regions
