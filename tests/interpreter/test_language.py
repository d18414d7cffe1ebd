"""The language, feature by feature, against Triton's own interpreter in another process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from llmlab.interpreter import Checks, KernelError, UnboundedLoopError, run

CORPUS = Path(__file__).with_name("corpus.py")


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interpreter_corpus", CORPUS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What Triton's interpreter makes of the corpus."""
    target = tmp_path_factory.mktemp("stock") / "results.npz"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(CORPUS), str(target)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(target) as results:
        return dict(results)


NAMES = (
    "elementwise integers control_flow early_return reductions scans products shapes atomics "
    "random_numbers conversions descriptors"
).split()


@pytest.mark.parametrize("checks", [None, Checks(order_seed=None)], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_tritons_own_interpreter(
    name: str, checks: Checks | None, corpus: ModuleType, stock: dict[str, np.ndarray]
) -> None:
    if f"{name}/error" in stock:
        pytest.skip(f"Triton's interpreter cannot run it: {stock[f'{name}/error']}")
    ours = corpus.results(lambda *args, **kwargs: run(*args, checks=checks, **kwargs), [name])
    assert ours
    for key, values in ours.items():
        # The same numpy functions on the same numbers; only float32 sums and products may be added up in another order.
        rtol = 1e-6 if values.dtype.kind == "f" else 0
        np.testing.assert_allclose(values, stock[key], rtol=rtol, atol=rtol, err_msg=key)


def test_the_comparison_compares(corpus: ModuleType, stock: dict[str, np.ndarray]) -> None:
    assert sorted(corpus.cases()) == sorted(NAMES)
    assert sum(key.endswith("/error") for key in stock) <= 2, "Triton's interpreter runs nearly all of it"


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_every_version(name: str, corpus: ModuleType) -> None:
    assert all(np.isfinite(values.astype(float)).all() for values in corpus.results(run, [name]).values())


@triton.jit
def _branch_on_block(o):
    i = tl.arange(0, 4)
    if i > 1:
        tl.store(o + i, i)


@triton.jit
def _stride_one(o, stride):
    tl.store(o + stride.to(tl.int64), 1.0)


@triton.jit
def _waits(o):
    while tl.load(o) == 0:
        pass


@triton.jit
def _loop_variable(o, n):
    for i in range(n):
        tl.store(o + i, (i * 2147483647 + i).to(tl.int64))


@triton.jit
def _float_argument(x, o, scale):
    tl.store(o + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)) * scale)


@triton.jit
def _static_failure(o, N: tl.constexpr):
    tl.static_assert(N % 3 == 0, "N must be a multiple of three")
    tl.store(o, 1.0)


def test_a_block_has_no_truth_and_the_error_names_the_line() -> None:
    with pytest.raises(KernelError, match=r"program \(0, 0, 0\).*test_language\.py:\d+.*truth of a block") as caught:
        run(_branch_on_block, (1,), torch.zeros(4))
    line = _branch_on_block.starting_line_number + 3
    assert f":{line}:" in str(caught.value)


def test_an_integer_argument_that_is_one_is_a_constant_as_on_a_gpu() -> None:
    out = torch.zeros(4)
    run(_stride_one, (1,), out, 2)
    assert out.tolist() == [0, 0, 1, 0]
    with pytest.raises(KernelError, match="'int' object has no attribute 'to'"):  # what the compiler says, too
        run(_stride_one, (1,), out, 1)


def test_a_program_that_waits_for_another_is_stopped() -> None:
    with pytest.raises(KernelError) as caught:
        run(_waits, (2,), torch.zeros(1), checks=Checks(max_trips=100))
    assert isinstance(caught.value.__cause__, UnboundedLoopError)


def test_a_loop_variable_is_a_32_bit_integer() -> None:
    out = torch.zeros(3, dtype=torch.int64)
    findings = run(_loop_variable, (1,), out, 3, checks=Checks())
    assert [finding.kind for finding in findings] == ["int-overflow"]
    assert out.tolist() == [0, -(2**31), 0]


def test_a_float_argument_is_float32_and_promotes_float16() -> None:
    x = torch.tensor([1.0, 0.1, 3.0, 1000.0], dtype=torch.float16)
    out = torch.zeros(4)
    run(_float_argument, (1,), x, out, 0.1)
    assert torch.equal(out, x.float() * torch.tensor(0.1))  # not rounded to float16 in between


@triton.jit
def _named(a, b, SCALE: tl.constexpr = 2):
    return a - b * SCALE


@triton.jit
def _calls(o, HOW: tl.constexpr):
    if HOW == "names":
        tl.store(o, _named(b=1.0, a=5.0))
    elif HOW == "mixed":
        tl.store(o, _named(5.0, SCALE=3, b=1.0))
    elif HOW == "missing":
        tl.store(o, _named(5.0))
    elif HOW == "twice":
        tl.store(o, _named(5.0, 1.0, a=2.0))
    elif HOW == "unknown":
        tl.store(o, _named(5.0, 1.0, C=2))
    else:
        tl.store(o, _named(5.0, 1.0, 4, 4))


def test_calls_by_position_and_name() -> None:
    out = torch.zeros(1)
    for how, expected in {"names": 3.0, "mixed": 2.0}.items():
        run(_calls, (1,), out, HOW=how)
        assert out.item() == expected
    for how, message in {
        "missing": "missing",
        "twice": "multiple values",
        "unknown": "unexpected",
        "many": "too many",
    }.items():
        with pytest.raises(KernelError, match=f"TypeError.*{message}"):
            run(_calls, (1,), out, HOW=how)


def test_static_assert() -> None:
    out = torch.zeros(1)
    run(_static_failure, (1,), out, N=6)
    assert out.item() == 1
    with pytest.raises(KernelError, match="multiple of three"):
        run(_static_failure, (1,), out, N=4)


def test_bad_arguments_are_refused() -> None:
    out = torch.zeros(4)
    with pytest.raises(ValueError, match="WIDTH"):
        run(_static_failure, (1,), out, N=6, WIDTH=3)
    with pytest.raises(ValueError, match="missing a required argument"):
        run(_static_failure, (1,), out)
    for value in (np.int64(5), "five", [5]):
        with pytest.raises(ValueError, match=f"'n' = .*takes no {type(value).__name__}"):
            run(_product, (1,), out, value)
    with pytest.raises(ValueError, match="grid"):
        run(_static_failure, (1, 1, 1, 1), out, N=6)
    with pytest.raises(ValueError, match="CPU tensors"):
        run(_static_failure, (1,), torch.zeros(4, device="meta"), N=6)
    with pytest.raises(ValueError, match="no Triton kernel"):
        run(print, (1,), out)
    with pytest.raises(ValueError, match="complex64"):
        run(_static_failure, (1,), torch.zeros(4, dtype=torch.complex64), N=6)
    run(_static_failure, (1,), out, N=6, num_warps=8, num_stages=2)  # compile options mean nothing here


def test_grids_functions_and_empty_ones() -> None:
    x, out = torch.randn(5), torch.zeros(5)
    kernel = triton.heuristics({"N": lambda arguments: 6})(_static_failure)
    run(kernel, lambda meta: (1,), out)
    assert out[0] == 1
    run(_float_argument, (0,), x, out, 2.0)  # an empty batch launches nothing
    assert out[1:].tolist() == [0] * 4


@triton.jit
def _product(o, n):
    tl.store(o, (tl.program_id(0) + 3) * n)


@triton.jit
def _declared(o, n: tl.int64, m: "u32", x: "fp64"):
    tl.store(o, n * n)
    tl.store(o + 1, (m * 2).to(tl.int64))
    tl.store(o + 2, (x * 1e17).to(tl.int64))


def test_integer_arguments_have_the_launchers_types() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    for n in (2**31 + 5, 2**32 - 1, -(2**31) - 1):  # from 2^31 on int64, not uint32
        assert run(_product, (1,), out, n, checks=Checks()) == [] and out.item() == 3 * n
    (finding,) = run(_product, (1,), out, 2**31 - 1, checks=Checks())
    assert finding.kind == "int-overflow"
    with pytest.raises(ValueError, match="does not fit"):
        run(_product, (1,), out, 2**64)


def test_declared_types_of_arguments_hold() -> None:
    out = torch.zeros(3, dtype=torch.int64)
    assert run(_declared, (1,), out, 100_000, 2**31 - 1, 0.1, checks=Checks()) == []
    assert out.tolist() == [10**10, 2**32 - 2, 10**16]
    run(_declared, (1,), out, 1, 1, 1.0)
    assert out.tolist() == [1, 2, 10**17]
    with pytest.raises(ValueError, match="does not fit uint32"):
        run(_declared, (1,), out, 1, 2**32, 0.1)
    with pytest.raises(ValueError, match="declared int64"):
        run(_declared, (1,), out, 0.5, 1, 0.1)


def test_grids_that_a_gpu_refuses() -> None:
    with pytest.raises(ValueError, match="65535"):
        run(_product, (1, 65536), torch.zeros(1, dtype=torch.int64), 3)


@triton.jit
def _device_function(x, o):
    tl.store(o, libdevice.tanh(tl.load(x)))


@triton.jit
def _assembly(x, o):
    value = tl.load(x)
    tl.store(o, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.float32, is_pure=True, pack=1))


def test_what_only_a_gpu_has_is_named() -> None:
    with pytest.raises(KernelError, match=r"libdevice.tanh exists on a GPU only"):
        run(_device_function, (1,), torch.ones(1), torch.zeros(1))
    with pytest.raises(KernelError, match="inline assembly"):
        run(_assembly, (1,), torch.ones(1), torch.zeros(1))


@triton.jit
def _unrolls(o, n):
    for i in tl.static_range(n):
        tl.store(o + i, i)


def test_an_unrolled_loop_has_constant_bounds() -> None:
    with pytest.raises(KernelError, match="static_range must be known at compile time"):
        run(_unrolls, (1,), torch.zeros(4), 3)
