"""What a step costs where other programs use the cores too: regions of work that end at a barrier, or when the work is done.

A region of an OpenMP runtime (torch's own ops) ends when each of its threads has been through it. A region of this package's
kernels (:mod:`llmlab.ops.cpu.pool`) ends when all its work is done by whoever came. On idle cores that is the same.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch

from llmlab import ops

REGIONS = 300
"""Kernels of a decode step of a model with 30 layers."""
ROWS, COLUMNS = 64, 2048
_SPIN = "while True: pass"


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """So many processes that want a core each, all the time."""
    running = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        time.sleep(0.2)  # until they have started
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def region_times(busy: Sequence[int] = (0, 1, 2), repeats: int = 7) -> pd.DataFrame:
    """A step's worth of small parallel regions, each some tens of µs of arithmetic, in turns beside ``busy`` other processes.

    Returns:
        Columns busy, way ("barrier": torch's ``silu``; "gate": this package's ``silu_and_mul``), seconds of a region (median
        of the repeats), low, high (lowest, highest).
    """
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    ours = ops.bind("torch", "cpu").silu_and_mul
    ways: dict[str, Callable[[], object]] = {"barrier": lambda: torch.nn.functional.silu(x), "gate": lambda: ours(x)}
    rows = []
    with torch.inference_mode():
        for count in busy:
            samples: dict[str, list[float]] = {way: [] for way in ways}
            with competitors(count):
                for repeat in range(repeats + 1):  # the first warms up
                    for way, run in ways.items():
                        begin = time.perf_counter()
                        for _ in range(REGIONS):
                            run()
                        if repeat:
                            samples[way].append((time.perf_counter() - begin) / REGIONS)
            for way, seconds in samples.items():
                spread = {"seconds": float(np.median(seconds)), "low": min(seconds), "high": max(seconds)}
                rows.append({"busy": count, "way": way} | spread)
    return pd.DataFrame(rows)
