"""The CPU kernels compiled for other processors than this one: the same tests, in a process that is told to have fewer
instructions. What a machine with AVX2 alone runs, and one with AVX-512 but without AMX, is so tested on a machine with all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from numba.core.codegen import get_host_cpu_features

HERE = Path(__file__).parent
FILES = ["test_cpu_simd.py", "test_cpu_elementwise.py", "test_cpu_linear.py", "test_cpu_attention.py"]
WITHOUT = {"AVX2": ("avx512", "amx"), "AVX-512 without AMX": ("amx",)}


@pytest.mark.slow
@pytest.mark.parametrize("target", list(WITHOUT))
def test_fewer_instructions(target, tmp_path):
    features = get_host_cpu_features().split(",")
    fewer = [f"-{f[1:]}" if f[1:].startswith(WITHOUT[target]) else f for f in features]
    if "+avx2" not in fewer or fewer == features:
        pytest.skip(f"this processor has nothing beyond {target}")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": ",".join(fewer),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(str(HERE / name) for name in FILES),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
