"""``llmlab bench``: throughput on the standard workloads, beside peers, as ratios and as shares of what the machine allows."""

from llmlab.bench.result import BenchResult
from llmlab.bench.run import run_bench

__all__ = ["BenchResult", "run_bench"]
