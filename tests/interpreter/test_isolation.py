"""The interpreter leaves no trace: nothing patched, nothing shared between runs, threads or versions."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmlab.interpreter import SUPPORTED_TRITON, Checks, KernelError, UnsupportedTritonError, checked, run
from llmlab.interpreter.versions import require_supported_triton


@triton.jit
def _softplus(x):
    return tl.where(x > 20, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _rows(x, o, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(x + i).to(tl.float32)
    a = _softplus(a) - tl.max(a, 0) + tl.cdiv(N, 3)
    tl.store(o + i, (a / tl.sum(tl.abs(a), 0)).to(o.dtype.element_ty))


@triton.jit
def _fails(x, o, N: tl.constexpr):
    tl.store(o + tl.arange(0, N), tl.load(x + tl.arange(0, N)))
    tl.device_assert(tl.program_id(0) > 5, "always")


def _operands(n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, generator=torch.Generator().manual_seed(0)), torch.zeros(n)


def _state() -> dict[str, dict[str, Any]]:
    """Every attribute of Triton's language and run time, and of this module, by identity."""
    owners = {
        "language": tl,
        "core": tl.core,
        "math": tl.math,
        "standard": tl.standard,
        "tensor": tl.tensor,
        "dtype": tl.dtype,
        "descriptor": tl.core.tensor_descriptor_base,
        "jit": triton.runtime.jit,
        "JITFunction": triton.runtime.jit.JITFunction,
        "interpreter": triton.runtime.interpreter,
        "builder": triton.runtime.interpreter.InterpreterBuilder,
        "here": sys.modules[__name__],
    }
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def _compile() -> bytes:
    signature = {"x": "*bf16", "o": "*bf16", "N": "constexpr"}
    source = ASTSource(_rows, signature=signature, constexprs={"N": 64}, attrs={(0,): [["tt.divisibility", 16]]})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_nothing_is_patched_not_even_after_a_failure() -> None:
    import triton.runtime.interpreter

    x, out = _operands()
    before = _state()
    run(_rows, (2,), x, out, N=32)
    run(_rows, (2,), x, out, N=32, checks=Checks())
    with pytest.raises(KernelError, match="always"):
        run(_fails, (1,), x, out, N=32)
    with pytest.raises(KernelError, match="always"), checked():
        run(_fails, (1,), x, out, N=32)
    after = _state()
    for name, attributes in before.items():
        assert attributes.keys() == after[name].keys(), name
        changed = [key for key, value in attributes.items() if after[name][key] is not value]
        assert not changed, f"{name}: {changed}"
    assert run(_rows, (2,), x, out, N=32, checks=Checks()) == []  # and a failure did not leave checks on or off
    assert not triton.knobs.runtime.interpret and "TRITON_INTERPRET" not in os.environ


def test_interpret_compile_interpret_in_one_process() -> None:
    x, first = _operands()
    second = torch.zeros_like(first)
    run(_rows, (1,), x, first, N=64)
    cubin = _compile()
    run(_rows, (1,), x, second, N=64, checks=Checks())
    assert torch.equal(first, second)
    assert _compile() == cubin
    expected = torch.nn.functional.softplus(x.double()) - x.double().max() + 22
    torch.testing.assert_close(second.double(), expected / expected.abs().sum(), rtol=1e-5, atol=1e-7)


def test_a_kernel_runs_inside_another_run() -> None:
    """From a grid function, the one place where a run calls back into Python."""
    x, out = _operands()
    inner = torch.zeros_like(out)

    def grid(arguments: dict[str, Any]) -> tuple[int]:
        run(_rows, (1,), x, inner, N=64)
        return (64 // arguments["N"],)

    run(_rows, grid, x, out, N=64, checks=Checks())
    assert torch.equal(out, inner)


def test_threads_run_at_once_each_with_its_own_checks() -> None:
    x, expected = _operands(512)
    run(_rows, (16,), x, expected, N=32)
    bad = torch.zeros(500)  # the last program stores past it
    results: dict[int, tuple[torch.Tensor, int]] = {}
    start = threading.Barrier(4)

    def work(number: int) -> None:
        out = torch.zeros(512)
        start.wait()
        if number % 2:
            with checked() as findings:
                for _ in range(3):
                    run(_rows, (16,), x, out, N=32)
                run(_rows, (16,), x, bad, N=32)
            results[number] = (out, len(findings))
        else:
            for _ in range(3):
                run(_rows, (16,), x, out, N=32)
            results[number] = (out, 0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: count for number, (_, count) in results.items()} == {0: 0, 1: 1, 2: 0, 3: 1}
    assert all(torch.equal(out, expected) for out, _ in results.values())


def test_tensors_are_not_kept() -> None:
    x, out = _operands()
    run(_rows, (1,), x, out, N=64, checks=Checks())
    alive = weakref.ref(x.untyped_storage()), weakref.ref(x)
    del x
    gc.collect()
    assert alive[1]() is None


def test_unknown_versions_are_refused_by_name() -> None:
    for version in SUPPORTED_TRITON:
        require_supported_triton(f"{version}.7")
    for version in ("3.5.1", "3.10.0", "4.0.0"):
        with pytest.raises(UnsupportedTritonError, match=version.replace(".", r"\.")) as caught:
            require_supported_triton(version)
        assert all(known in str(caught.value) for known in SUPPORTED_TRITON)


def test_an_unknown_version_stops_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.11.0")
    x, out = _operands()
    with pytest.raises(UnsupportedTritonError, match="3.11.0"):
        run(_rows, (1,), x, out, N=64)
    with pytest.raises(UnsupportedTritonError, match="3.11.0"):
        run(_rows, (1,), x, out, N=64, checks=Checks())


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("LLMLAB_TRITON_PATHS"), reason="LLMLAB_TRITON_PATHS names no other Triton")
@pytest.mark.parametrize(
    "path", os.environ.get("LLMLAB_TRITON_PATHS", "").split(os.pathsep), ids=lambda path: Path(path).name
)
def test_every_other_version_passes_these_tests(path: str) -> None:
    """``pip install --target DIR --no-deps triton==3.6.0`` and so on, and the folders in LLMLAB_TRITON_PATHS."""
    environment = os.environ | {"PYTHONPATH": path, "LLMLAB_TRITON_PATHS": "", "OMP_NUM_THREADS": "1"}
    seen = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__file__)"], capture_output=True, text=True, env=environment
    )
    assert seen.stdout.startswith(str(Path(path).resolve())), seen.stdout + seen.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:]
