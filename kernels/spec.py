"""What to compile ahead of time: each file of kernels exposes ``compile_cases() -> list[CompileCase]``, one for each shipped
configuration.

The surest way to write a case is not to: ``capture("prefill_d128", lambda: paged_attention(*meta_tensors))`` runs the launcher
on ``meta`` tensors of a real model's shapes and turns the launches it makes into cases, with the types, the constexprs, the
divisibility and the specialisation on 1 that Triton's JIT would derive from the same call. What is compiled in the report is
then what is launched, by construction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from llmlab.kernels.launch import Launch, recording
from triton.runtime.jit import JITFunction

ALIGNMENT = 16  # bytes for pointers, multiples for integers: what Triton's JIT specialises on
NEAR = (
    2**31 - 1
)  # bytes of storage up to which its AMD back end addresses a tensor by 32-bit offsets (buffer instructions)

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "u1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint32: "u32",
    torch.uint64: "u64",
}


@dataclass(frozen=True)
class Work:
    """What one trip of the kernel's hot loop (scope "loop"), or one whole program (scope "program"), must do at the least.

    ``flops``: tensor-core FLOPs (2 a multiply-add); ``bytes``: bytes to and from global memory. From these the static report
    states its bound; without them it states none.
    """

    flops: float = 0.0
    bytes: float = 0.0
    scope: Literal["loop", "program"] = "loop"


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one shipped configuration.

    ``signature`` maps every run-time argument to its Triton type ("*bf16", "i32", "fp32", "tensordesc<bf16[64,64]>");
    ``constexprs`` every other argument to its value (a run-time argument that is always 1 or None belongs here, as the JIT
    would have it). ``divisible_by_16``: the arguments that the JIT would find divisible, pointers (by 16 bytes) and integers.
    ``near``: the pointers into storages small enough for AMD's buffer instructions.
    ``options``: further compile options; ``targets``: the only targets it is meant for (None: all).
    """

    kernel: JITFunction
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    work: Work | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = set(self.kernel.arg_names)
        given = [*self.signature, *self.constexprs]
        if len(set(given)) != len(given) or set(given) != names:
            missing, unknown = sorted(names - set(given)), sorted(set(given) - names)
            raise ValueError(
                f"case {self.name!r} of {self.kernel.__name__} must name every argument once: "
                f"missing {missing}, unknown {unknown}"
            )
        for field_name in ("divisible_by_16", "near"):
            strangers = sorted(set(getattr(self, field_name)) - set(self.signature))
            if strangers:
                raise ValueError(f"case {self.name!r}: {field_name} names {strangers}, which are no run-time arguments")


def capture(
    name: str,
    call: Callable[[], Any],
    *,
    work: Work | Mapping[str, Work] | None = None,
    targets: tuple[str, ...] | None = None,
) -> list[CompileCase]:
    """Run a launcher on ``meta`` tensors and return one case for each launch it made.

    With several launches the kernel's name is appended to the case's, and a number where a kernel comes again; ``work`` may
    then map kernel names to their work.
    Raises ValueError when the call launched nothing.
    """
    with recording() as launches:
        call()
    if not launches:
        raise ValueError(f"case {name!r} launched no kernel: are its tensors on the meta device, and not empty?")
    cases: list[CompileCase] = []
    seen: dict[str, int] = {}
    for launch in launches:
        kernel_name = launch.kernel.__name__
        kernel_work = work.get(kernel_name) if isinstance(work, Mapping) else work
        seen[kernel_name] = seen.get(kernel_name, 0) + 1
        case_name = name if len(launches) == 1 else f"{name}.{kernel_name}"
        if seen[kernel_name] > 1:
            case_name += f".{seen[kernel_name]}"
        cases.append(case_from_launch(case_name, launch, work=kernel_work, targets=targets))
    return cases


def case_from_launch(
    name: str, launch: Launch, *, work: Work | None = None, targets: tuple[str, ...] | None = None
) -> CompileCase:
    """The case that Triton's JIT would compile for this launch."""
    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, launch.args)) | {
        key: value for key, value in launch.kwargs.items() if key in kernel.arg_names
    }
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible: list[str] = []
    near: list[str] = []
    for param in kernel.params:
        value = values.get(param.name, param.default)
        if param.is_constexpr:
            constexprs[param.name] = value
            continue
        kind, aligned = _specialise(value)
        if param.annotation_type and not isinstance(value, torch.Tensor):  # what a kernel declares is what it gets
            kind, aligned = param.annotation_type, aligned and param.annotation_type[:2] not in ("u1", "fp", "bf")
        if kind == "constexpr" and not param.do_not_specialize:
            constexprs[param.name] = value
            continue
        signature[param.name] = "i32" if kind == "constexpr" else kind
        if aligned and not param.do_not_specialize:
            divisible.append(param.name)
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() <= NEAR and not param.do_not_specialize:
            near.append(param.name)
    return CompileCase(
        kernel,
        name,
        signature,
        constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        divisible_by_16=tuple(divisible),
        near=tuple(near),
        work=work,
        options={key: value for key, value in launch.kwargs.items() if key not in kernel.arg_names},
        targets=targets,
    )


def _specialise(value: Any) -> tuple[str, bool]:
    """(Triton type, divisible by 16) of a run-time argument, "constexpr" where the JIT folds the value itself."""
    if isinstance(value, torch.Tensor):
        offset = value.data_ptr() + (value.storage_offset() * value.element_size() if value.is_meta else 0)
        return "*" + _type_name(value.dtype), offset % ALIGNMENT == 0
    if value is None:
        return "constexpr", False
    if isinstance(value, bool):
        return "u1", False
    if isinstance(value, int):
        if value == 1:
            return "constexpr", False
        return _int_type(value), value % ALIGNMENT == 0
    if isinstance(value, float):
        return "fp32", False
    if isinstance(getattr(value, "base", None), torch.Tensor):  # a host-side TensorDescriptor
        block = ", ".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_type_name(value.base.dtype)}[{block}]>", False
    raise ValueError(f"a kernel argument of type {type(value).__name__} has no Triton type: {value!r}")


def _type_name(dtype: torch.dtype) -> str:
    if dtype not in _TYPES:
        raise ValueError(f"{dtype} has no Triton type here")
    return _TYPES[dtype]


def _int_type(value: int) -> str:
    if -(2**31) <= value < 2**31:
        return "i32"
    if -(2**63) <= value < 2**63:
        return "i64"
    if value < 2**64:
        return "u64"
    raise ValueError(f"integer argument {value} does not fit 64 bits")
