"""The seam between launchers and machines, and the compile cases that are read off it."""

import pytest
import torch
import triton
import triton.language as tl
from llmlab.kernels.launch import launch, recording
from llmlab.kernels.spec import CompileCase, Work, capture
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmlab.interpreter import checked


@triton.jit
def _scale(x, o, n, stride, factor, flag, nothing, B: tl.constexpr, TWICE: tl.constexpr = False):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i * stride, mask=i < n, other=0.0) * factor
    if TWICE:
        a *= 2
    if flag:
        a = -a
    if nothing is None:
        tl.store(o + i, a, mask=i < n)


def _launcher(x: torch.Tensor, factor: float = 3.0, flag: bool = False, launches: int = 1) -> torch.Tensor:
    out = torch.empty(x.shape, device=x.device)
    for _ in range(launches):
        grid = (triton.cdiv(x.numel(), 16),)
        launch(_scale, grid, x, out, x.numel(), x.stride(0), factor, flag, None, B=16, num_warps=2, num_stages=1)
    return out


def test_on_a_cpu_a_launch_is_a_run() -> None:
    x = torch.randn(40)
    assert torch.equal(_launcher(x), x * 3)
    assert torch.equal(_launcher(x, flag=True), x * -3)
    with checked() as findings:
        strided = torch.randn(80)[::2]
        assert torch.equal(_launcher(strided), strided * 3)
        launch(_scale, (3,), x, torch.empty(20), 40, 1, 1.0, False, None, B=16)
    assert {finding.kind for finding in findings} == {"out-of-bounds-store"}


def test_on_meta_a_launch_is_recorded_by_the_innermost_recording() -> None:
    x = torch.empty(40, device="meta")
    _launcher(x)  # nobody listens
    with recording() as outer:
        _launcher(x)
        with recording() as inner:
            _launcher(x, factor=4.0, launches=2)
    assert (len(outer), len(inner)) == (1, 2)
    assert inner[0].kernel is _scale and inner[0].grid == (3,) and inner[0].args[4] == 4.0
    assert (inner[0].num_warps, inner[0].num_stages, inner[0].kwargs) == (2, 1, {"B": 16})


def test_on_a_gpu_a_launch_is_tritons() -> None:
    calls: list[tuple] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: calls.append((grid, args, kwargs))

    with FakeTensorMode():
        x = torch.empty(8, device="cuda")
    launch(Kernel(), (2, 3), x, 5, num_warps=8, num_stages=2, B=16)
    assert calls == [((2, 3), (x, 5), {"num_warps": 8, "num_stages": 2, "B": 16})]


def test_launches_without_a_tensor_or_a_device_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        launch(_scale, (1,), 1, 2, B=16)


def test_capture_is_what_the_jit_would_compile() -> None:
    storage = torch.empty(81, dtype=torch.bfloat16, device="meta")
    (case,) = capture("scale", lambda: _launcher(storage[1:]), work=Work(bytes=96, scope="program"))
    assert case.signature == {"x": "*bf16", "o": "*fp32", "n": "i32", "factor": "fp32", "flag": "u1"}
    assert case.constexprs == {"stride": 1, "nothing": None, "B": 16, "TWICE": False}  # 1 and None are folded in
    assert case.divisible_by_16 == ("o", "n")  # x starts two bytes past a boundary; 80 is a multiple of 16
    assert (case.name, case.num_warps, case.num_stages, case.work) == ("scale", 2, 1, Work(bytes=96, scope="program"))
    first, second = capture(
        "twice", lambda: _launcher(torch.empty(2**31, device="meta")[::2], launches=2), targets=("sm_90",)
    )
    assert (first.name, second.name) == ("twice._scale", "twice._scale.2") and first.targets == ("sm_90",)
    assert first.signature["n"] == "i32" and first.signature["stride"] == "i32"
    signature = {name: case.signature.get(name, "constexpr") for name in _scale.arg_names}
    source = ASTSource(_scale, signature=signature, constexprs=dict(case.constexprs))
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2}).asm["cubin"]


def test_integers_have_the_types_that_the_jit_gives_them() -> None:
    def of(value: int) -> CompileCase:
        x = torch.empty(16, device="meta")
        return capture("case", lambda: launch(_scale, (1,), x, x, value, 2, 1.0, False, None, B=16))[0]

    assert [of(value).signature["n"] for value in (0, -5, 2**31 - 1, 2**31, -(2**31) - 1, 2**63)] == [
        "i32", "i32", "i32", "i64", "i64", "u64"
    ]  # fmt: skip
    assert "n" in of(0).divisible_by_16 and "n" not in of(8).divisible_by_16
    with pytest.raises(ValueError, match="64 bits"):
        of(2**64)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"]
)
def test_tensor_types_are_the_jits(dtype: str) -> None:
    x = torch.empty(16, dtype=getattr(torch, dtype), device="meta")
    (case,) = capture("case", lambda: launch(_scale, (1,), x, x, 7, 2, 1.0, False, None, B=16))
    assert case.signature["x"] == triton.runtime.jit.mangle_type(torch.empty(16, dtype=x.dtype))


def test_a_case_names_every_argument_once() -> None:
    complete = {"x": "*fp32", "o": "*fp32", "n": "i32", "stride": "i32", "factor": "fp32", "flag": "u1"}
    constexprs = {"nothing": None, "B": 16, "TWICE": True}
    CompileCase(_scale, "whole", complete, constexprs)
    with pytest.raises(ValueError, match=r"missing \['n'\]"):
        CompileCase(_scale, "part", {k: v for k, v in complete.items() if k != "n"}, constexprs)
    with pytest.raises(ValueError, match=r"unknown \['C'\]"):
        CompileCase(_scale, "more", complete, constexprs | {"C": 1})
    with pytest.raises(ValueError, match="divisible_by_16"):
        CompileCase(_scale, "hint", complete, constexprs, divisible_by_16=("B",))
    with pytest.raises(ValueError, match="launched no kernel"):
        capture("nothing", lambda: None)


@triton.jit
def _declares(x, n: tl.int64, scale: "fp64"):
    tl.store(x, n * scale)


def test_declared_types_are_what_is_compiled() -> None:
    x = torch.empty(16, device="meta")
    for n in (1, 16, 2**40):
        (case,) = capture("case", lambda n=n: launch(_declares, (1,), x, n, 2.0))
        assert case.signature == {"x": "*fp32", "n": "i64", "scale": "fp64"} and case.constexprs == {}
        assert ("n" in case.divisible_by_16) == (n % 16 == 0)
