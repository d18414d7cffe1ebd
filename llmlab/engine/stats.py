"""What the engine did, step by step: one light record a step, and totals that never forget. No torch, no pandas here."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Token counts are of this step; times are in seconds; latencies are None where no token gave one."""

    step: int
    time: float  # of the scheduler's clock, when the step's tokens were known
    num_running: int  # after scheduling
    num_waiting: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    num_recomputed_tokens: int  # scheduled again, because a preemption had thrown their KV away
    num_preemptions: int
    num_swapped_blocks: int  # copied out or in
    num_finished: int  # requests that ended since the record before
    prefix_cache_queries: int  # tokens of requests admitted for the first time ...
    prefix_cache_hits: int  # ... and those of them that were found
    resumed_cache_queries: int  # the same for requests coming back after a preemption
    resumed_cache_hits: int
    kv_cache_usage: float  # share of blocks held, 0 to 1, while the step ran
    ttft: float | None  # arrival to first token: mean over the requests that got their first token in this step
    itl_mean: float | None  # time since the same request's token before: mean and maximum over this step's tokens
    itl_max: float | None


@dataclass(slots=True)
class EngineTotals:
    """Sums since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    num_finished: int = 0


@dataclass(slots=True)
class EngineStats:
    """The last ``max_records`` steps and the totals of all. Memory stays flat however long the engine runs."""

    max_records: int = 16384
    totals: EngineTotals = field(default_factory=EngineTotals)
    records: deque[StepStats] = field(init=False)

    def __post_init__(self) -> None:
        self.records = deque(maxlen=self.max_records)

    def append(self, record: StepStats) -> None:
        self.records.append(record)
        totals = self.totals
        totals.num_steps += 1
        totals.num_scheduled_tokens += record.num_scheduled_tokens
        totals.num_generated_tokens += record.num_generated_tokens
        totals.num_recomputed_tokens += record.num_recomputed_tokens
        totals.num_preemptions += record.num_preemptions
        totals.num_swapped_blocks += record.num_swapped_blocks
        totals.num_finished += record.num_finished

    def __len__(self) -> int:
        return len(self.records)

    def to_records(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self.records]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a step, indexed by ``step``, one column a field of :class:`StepStats`."""
        import pandas as pd

        columns = list(StepStats.__dataclass_fields__)
        return pd.DataFrame(self.to_records(), columns=columns).set_index("step")
