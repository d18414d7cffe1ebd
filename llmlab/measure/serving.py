"""What serving a workload leaves behind, simulated or real: a row a request, a row a step, every inter-token latency."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmlab.engine.plan import SchedulerOutput
    from llmlab.engine.request import Request
    from llmlab.workload import Workload

REQUEST_COLUMNS = (
    "request", "arrival", "first_scheduled", "first_token", "finished", "prompt_len", "output_len", "cached_tokens",
    "preemptions",
)  # fmt: skip
STEP_COLUMNS = (
    "time", "seconds", "num_running", "num_waiting", "num_scheduled_tokens", "num_generated_tokens",
    "num_recomputed_tokens", "num_preemptions", "kv_cache_usage",
)  # fmt: skip


@dataclass(frozen=True)
class ServingRun:
    """The record of one run. All times are seconds; those of ``requests`` and ``steps`` since the start.

    Attributes:
        requests: a row each, in order of arrival: times, lengths, tokens found in the prefix cache, preemptions; ``ttft``
            (arrival to first token), ``tpot`` (mean time of the other tokens; NaN for one token), ``latency`` (arrival to
            last token), ``replica``.
        steps: a row each: when it ended, how long it took, requests running and waiting, tokens scheduled and generated,
            tokens computed again, preemptions, share of KV blocks held; ``replica``.
        itl, itl_counts: distinct inter-token latencies, ascending, and how many tokens had each.
    """

    requests: pd.DataFrame
    steps: pd.DataFrame
    itl: NDArray[np.float64]
    itl_counts: NDArray[np.int64]

    def itl_quantile(self, q: float | Sequence[float]) -> NDArray[np.float64]:
        """Inter-token latency that a share ``q`` of all tokens (but the requests' first) did not exceed; NaN without any."""
        if not len(self.itl):
            return np.full(np.shape(q), np.nan)
        cumulative = np.cumsum(self.itl_counts)
        rank = np.ceil(np.asarray(q) * cumulative[-1]).clip(1)
        return self.itl[np.searchsorted(cumulative, rank)]

    def summary(self) -> dict[str, float]:
        """The figures that people compare: rates between the first arrival and the last token, latencies in seconds."""
        requests, steps = self.requests, self.steps
        span = float(requests["finished"].max() - requests["arrival"].min())
        busy = steps["seconds"].sum()
        p50, p99 = self.itl_quantile([0.5, 0.99])
        return {
            "num_requests": len(requests),
            "num_steps": len(steps),
            "seconds": span,
            "requests_per_s": len(requests) / span,
            "prompt_tokens_per_s": int(requests["prompt_len"].sum()) / span,
            "output_tokens_per_s": int(requests["output_len"].sum()) / span,
            "ttft_p50": float(requests["ttft"].median()),
            "ttft_p99": float(requests["ttft"].quantile(0.99)),
            "itl_p50": float(p50),
            "itl_p99": float(p99),
            "latency_p50": float(requests["latency"].median()),
            "latency_p99": float(requests["latency"].quantile(0.99)),
            "mean_running": float((steps["num_running"] * steps["seconds"]).sum() / busy),
            "kv_usage_mean": float((steps["kv_cache_usage"] * steps["seconds"]).sum() / busy),
            "kv_usage_max": float(steps["kv_cache_usage"].max()),
            "preemptions": int(requests["preemptions"].sum()),
            "recomputed_tokens": int(steps["num_recomputed_tokens"].sum()),
            "cached_share": float(requests["cached_tokens"].sum() / requests["prompt_len"].sum()),
        }

    def within(self, ttft: float, tpot: float) -> float:
        """Share of requests that met both objectives: first token within ``ttft``, the others ``tpot`` apart on average."""
        met = (self.requests["ttft"] <= ttft) & ~(self.requests["tpot"] > tpot)
        return float(met.mean())


class Log:
    """A run in the making: adding a step costs microseconds."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._requests: list[tuple[float, ...]] = []
        self._steps: list[tuple[float, ...]] = []
        self._itl, self._itl_counts = array("d"), array("q")

    def step(
        self,
        time: float,
        seconds: float,
        output: SchedulerOutput,
        num_running: int,
        num_waiting: int,
        usage: float,
        last_token_times: Counter[float | None],
    ) -> None:
        """A step that ended at ``time``; ``last_token_times`` counts its tokens by the time of their request's token before."""
        for before, count in last_token_times.items():
            if before is not None:
                self._itl.append(time - before)
                self._itl_counts.append(count)
        self._steps.append(
            (
                time,
                seconds,
                num_running,
                num_waiting,
                output.total_num_scheduled_tokens,
                last_token_times.total(),
                output.num_recomputed_tokens,
                len(output.preempted_req_ids),
                usage,
            )
        )

    def finish(self, request: Request) -> None:
        self._requests.append(
            (
                int(request.request_id),
                request.arrival_time,
                request.first_scheduled_time,
                request.first_token_time,
                request.finished_time,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.num_cached_tokens,
                request.num_preemptions,
            )
        )

    def close(self) -> ServingRun:
        """Raises RuntimeError if a request did not get exactly its tokens."""
        requests = request_table(self._requests)
        wanted = self._workload.prompt_lens.tolist(), self._workload.output_lens.tolist()
        if (requests["prompt_len"].tolist(), requests["output_len"].tolist()) != wanted:
            raise RuntimeError("requests were lost, or did not get exactly their tokens")
        steps = pd.DataFrame(self._steps, columns=list(STEP_COLUMNS)).assign(replica=0)
        return ServingRun(requests, steps, *histogram(self._itl, self._itl_counts))


def request_table(rows: Sequence[tuple[float, ...]]) -> pd.DataFrame:
    """:attr:`ServingRun.requests` from rows of :data:`REQUEST_COLUMNS` in any order."""
    table = pd.DataFrame(rows, columns=list(REQUEST_COLUMNS)).sort_values("request", ignore_index=True)
    return table.assign(
        ttft=table["first_token"] - table["arrival"],
        tpot=(table["finished"] - table["first_token"]) / (table["output_len"] - 1).where(table["output_len"] > 1),
        latency=table["finished"] - table["arrival"],
        replica=0,
    )


def histogram(values: Sequence[float], counts: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Distinct values, ascending, and the sum of their counts."""
    distinct, index = np.unique(np.asarray(values, np.float64), return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(counts, np.float64), minlength=len(distinct))
    return distinct, np.rint(sums).astype(np.int64)


def merge(copies: Sequence[ServingRun]) -> ServingRun:
    """Data-parallel copies that were fed in turn, as one run: request ``i`` ran on copy ``i mod len(copies)``."""
    if len(copies) == 1:
        return copies[0]
    requests = [
        copy.requests.assign(request=copy.requests["request"] * len(copies) + rank, replica=rank)
        for rank, copy in enumerate(copies)
    ]
    steps = [copy.steps.assign(replica=rank) for rank, copy in enumerate(copies)]
    return ServingRun(
        pd.concat(requests).sort_values("request", ignore_index=True),
        pd.concat(steps).sort_values("time", ignore_index=True, kind="stable"),
        *histogram(np.concatenate([c.itl for c in copies]), np.concatenate([c.itl_counts for c in copies])),
    )
