"""What the engine did, step by step: one light record a step, and totals that never forget. No torch, no pandas here."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.engine.plan import SchedulerOutput
    from llmlab.engine.request import Request


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Token counts are of this step; times are in seconds; latencies are None where no token gave one."""

    step: int
    time: float  # of the scheduler's clock, when the step's tokens were known
    num_running: int  # while the step ran
    num_waiting: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    num_recomputed_tokens: int  # scheduled again, because a preemption had thrown their KV away
    num_preemptions: int
    num_swapped_blocks: int  # copied out or in
    num_finished: int  # requests that ended since the record before
    prefix_cache_queries: int  # tokens of requests admitted for the first time ...
    prefix_cache_hits: int  # ... and those of them that were found
    resumed_cache_queries: int  # the same for requests that came back after a preemption
    resumed_cache_hits: int
    kv_cache_usage: float  # share of blocks held while the step ran, 0 to 1
    ttft: float | None  # arrival to first token: mean over the requests whose first token this step gave
    itl_mean: float | None  # time since the same request's token before: mean and maximum over the step's other tokens
    itl_max: float | None


@dataclass(slots=True)
class EngineTotals:
    """Sums since the start, of all steps."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    num_finished: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    resumed_cache_queries: int = 0
    resumed_cache_hits: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of first-time tokens that were found in the cache; 0 before the first query."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0


class EngineStats:
    """The last ``max_records`` steps and the totals of all. Memory stays flat however long the engine runs.

    A resumed request that finds its own blocks again says nothing about the traffic, so it is counted apart, and every
    request is counted once per admission, not once per attempt.
    """

    def __init__(self, max_records: int = 16384) -> None:
        self.records: deque[StepStats] = deque(maxlen=max_records)
        self.totals = EngineTotals()
        self._since_last_step = EngineTotals()

    def count_admission(self, num_queried_tokens: int, num_hit_tokens: int, resumed: bool) -> None:
        counts = self._since_last_step
        if resumed:
            counts.resumed_cache_queries += num_queried_tokens
            counts.resumed_cache_hits += num_hit_tokens
        else:
            counts.prefix_cache_queries += num_queried_tokens
            counts.prefix_cache_hits += num_hit_tokens

    def count_finished(self) -> None:
        self._since_last_step.num_finished += 1

    def record(
        self,
        output: SchedulerOutput,
        time: float,
        num_running: int,
        num_waiting: int,
        kv_cache_usage: float,
        latencies: TokenLatencies,
    ) -> None:
        """Close a step: turn its plan, and what was counted since the last one, into a record."""
        counts, self._since_last_step = self._since_last_step, EngineTotals()
        counts.num_steps = 1
        counts.num_scheduled_tokens = output.total_num_scheduled_tokens
        counts.num_generated_tokens = latencies.num_first + latencies.num_later
        counts.num_recomputed_tokens = output.num_recomputed_tokens
        counts.num_preemptions = len(output.preempted_req_ids)
        counts.num_swapped_blocks = len(output.swap_out) + len(output.swap_in)
        of_step = {field.name: getattr(counts, field.name) for field in fields(EngineTotals)}
        for name, count in of_step.items():
            setattr(self.totals, name, getattr(self.totals, name) + count)
        del of_step["num_steps"]
        self.records.append(
            StepStats(
                step=output.step,
                time=time,
                num_running=num_running,
                num_waiting=num_waiting,
                kv_cache_usage=kv_cache_usage,
                ttft=latencies.ttft,
                itl_mean=latencies.itl_mean,
                itl_max=latencies.itl_max if latencies.num_later else None,
                **of_step,
            )
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row a step, indexed by ``step``, one column a field of :class:`StepStats`."""
        import pandas as pd

        rows: list[dict[str, Any]] = [asdict(record) for record in self.records]
        return pd.DataFrame(rows, columns=[field.name for field in fields(StepStats)]).set_index("step")


class TokenLatencies:
    """Latencies of one step's tokens, all known at the same moment ``now``."""

    __slots__ = ("itl_max", "now", "num_first", "num_later", "sum_itl", "sum_ttft")

    def __init__(self, now: float) -> None:
        self.now = now
        self.num_first = self.num_later = 0
        self.sum_ttft = self.sum_itl = self.itl_max = 0.0

    def add(self, request: Request) -> None:
        """The request got a token: note the time on it and count how long that took."""
        before, request.last_token_time = request.last_token_time, self.now
        if before is None:
            request.first_token_time = self.now
            self.num_first += 1
            self.sum_ttft += self.now - request.arrival_time
            return
        itl = self.now - before
        self.num_later += 1
        self.sum_itl += itl
        if itl > self.itl_max:
            self.itl_max = itl

    @property
    def ttft(self) -> float | None:
        return self.sum_ttft / self.num_first if self.num_first else None

    @property
    def itl_mean(self) -> float | None:
        return self.sum_itl / self.num_later if self.num_later else None
