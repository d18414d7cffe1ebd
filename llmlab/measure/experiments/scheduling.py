"""Scheduling policies side by side. What decides between them is mostly counted, with the real scheduler and no model at all.

Request-level ("static") batching against continuous batching (Yu et al. 2022, "Orca", section 3), and what happens around a
preemption: the engine's rule against two that look just as reasonable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.plan import StepPlan
from llmlab.engine.request import Request, RequestStatus
from llmlab.engine.scheduler import Scheduler
from llmlab.sampling.params import SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.engine.engine import LLMEngine
    from llmlab.engine.llm import LLM

VOCAB_SIZE = 32_000
MAX_STEPS = 1_000_000


class AdmitAtOnce(Scheduler):
    """The engine's scheduler, but waiting requests are admitted in a step that preempted, too."""

    def _schedule_running(self, plan: StepPlan) -> None:
        super()._schedule_running(plan)
        if plan.preempted:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
            self._schedule_waiting(plan)


class WaitingFirst(Scheduler):
    """The engine's scheduler, but waiting requests are admitted before running ones get their tokens."""

    def _schedule_running(self, plan: StepPlan) -> None:
        self._schedule_waiting(plan)
        super()._schedule_running(plan)


POLICIES = MappingProxyType({"engine": Scheduler, "admit at once": AdmitAtOnce, "waiting first": WaitingFirst})
"""``engine`` is the project's own rule: running requests first, and none admitted in a step that preempted."""


def make_requests(prompt_lens: Iterable[int], output_lens: Iterable[int], seed: int = 0) -> list[Request]:
    """Requests r0, r1, … of random prompts that share nothing, each ending after exactly its number of output tokens."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"r{i}",
            rng.integers(VOCAB_SIZE, size=prompt).tolist(),
            SamplingParams(max_tokens=output, ignore_eos=True),
            arrival_time=0.0,
        )
        for i, (prompt, output) in enumerate(zip(prompt_lens, output_lens, strict=True))
    ]


def run_continuous(scheduler: Scheduler, requests: Sequence[Request], seed: int = 0) -> int:
    """All requests arrive at once; steps until all have ended, each given random tokens where the model would sample.

    Returns the number of steps. Raises RuntimeError if there is no end to them.
    """
    for request in requests:
        scheduler.add_request(request)
    rng, steps = np.random.default_rng(seed), 0
    while scheduler.has_unfinished_requests():
        if steps == MAX_STEPS:
            raise RuntimeError(f"{scheduler.num_unfinished_requests} requests are unfinished after {steps} steps")
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(output, dict(zip(names, rng.integers(VOCAB_SIZE, size=len(names)).tolist())))
        steps += 1
    return steps


def run_static(scheduler: Scheduler, requests: Sequence[Request], batch_size: int, seed: int = 0) -> int:
    """Request-level batching: ``batch_size`` requests in order of arrival, and the next ones only when all of them have ended.

    Returns the number of steps.
    """
    batches = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    return sum(run_continuous(scheduler, batch, seed + i) for i, batch in enumerate(batches))


def slots_by_spread(
    spreads: Sequence[float], *, num_requests: int = 128, slots: int = 16, mean_length: int = 64, seed: int = 0
) -> pd.DataFrame:
    """What share of slot-steps gives a token, as output lengths get more unequal. One row a spread:

    spread, shortest, longest (tokens), static, continuous. Lengths are uniform within ``mean_length · (1 ± spread)``, at least 1.
    """
    import pandas as pd

    rows = []
    for spread in spreads:
        rng = np.random.default_rng(seed)
        lengths = np.rint(mean_length * (1 + spread * rng.uniform(-1, 1, num_requests))).astype(int).clip(1).tolist()
        row = {"spread": spread, "shortest": min(lengths), "longest": max(lengths)}
        for way in ("static", "continuous"):
            scheduler = Scheduler(
                SchedulerConfig(max_model_len=4096, max_num_seqs=slots), CacheConfig(slots * (max(lengths) // 16 + 2))
            )
            requests = make_requests([4] * num_requests, lengths)
            steps = run_static(scheduler, requests, slots) if way == "static" else run_continuous(scheduler, requests)
            row[way] = sum(lengths) / (slots * steps)
        rows.append(row)
    return pd.DataFrame(rows)


def thrashing(
    pools: Sequence[int],
    budgets: Sequence[int],
    seeds: Sequence[int],
    *,
    policies: Sequence[str] = tuple(POLICIES),
    num_requests: int = 32,
    longest_prompt: int = 256,
    longest_output: int = 256,
    enable_prefix_caching: bool = True,
) -> pd.DataFrame:
    """Work done twice, by policy, pool size (blocks of 16 tokens), token budget and seed. One row a run:

    policy, num_blocks, budget, seed, recomputed (tokens computed again), preemptions, steps, useful (tokens computed once).
    Prompts are uniform in [16, longest_prompt], outputs in [16, longest_output].
    """
    import pandas as pd

    rows = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        prompts = rng.integers(16, longest_prompt + 1, num_requests).tolist()
        outputs = rng.integers(16, longest_output + 1, num_requests).tolist()
        for num_blocks in pools:
            for budget in budgets:
                for policy in policies:
                    scheduler = POLICIES[policy](
                        SchedulerConfig(longest_prompt + longest_output, max_num_batched_tokens=budget),
                        CacheConfig(num_blocks, enable_prefix_caching=enable_prefix_caching),
                    )
                    steps = run_continuous(scheduler, make_requests(prompts, outputs, seed), seed)
                    totals = scheduler.stats.totals
                    rows.append(
                        {
                            "policy": policy,
                            "num_blocks": num_blocks,
                            "budget": budget,
                            "seed": seed,
                            "recomputed": totals.num_recomputed_tokens,
                            "preemptions": totals.num_preemptions,
                            "steps": steps,
                            "useful": totals.num_scheduled_tokens - totals.num_recomputed_tokens,
                        }
                    )
    return pd.DataFrame(rows)


# ---- with a model -----------------------------------------------------------------------------------------------------


def another_engine(
    llm: LLM, *, num_blocks: int | None = None, enable_prefix_caching: bool | None = None, **limits: Any
) -> LLMEngine:
    """A second engine on the same weights and the same KV memory, with other limits and an empty cache.

    Only one of the engines may have unfinished requests at a time, and what one has cached is lost when another one runs.

    Args:
        num_blocks: use only so many blocks of the KV memory.
        limits: fields of :class:`llmlab.config.SchedulerConfig` to be changed.

    Raises ValueError for more blocks than there are, and while ``llm`` has unfinished requests.
    """
    from llmlab.engine.engine import LLMEngine

    engine, old = llm.engine, llm.engine.scheduler
    if engine.has_unfinished_requests():
        raise ValueError(f"{engine.get_num_unfinished_requests()} requests are unfinished: the KV memory is in use")
    cache = old.cache_config
    if num_blocks is not None and num_blocks > cache.num_blocks:
        raise ValueError(f"num_blocks must be at most the {cache.num_blocks} that there are, got {num_blocks}")
    cache = replace(
        cache,
        num_blocks=num_blocks or cache.num_blocks,
        enable_prefix_caching=cache.enable_prefix_caching if enable_prefix_caching is None else enable_prefix_caching,
    )
    llm.reset_prefix_cache()
    scheduler = Scheduler(replace(old.config, **limits), cache, old.eos_token_ids)
    return LLMEngine(engine.runner, scheduler, engine.sampler, engine.tokenizer)


def serve(
    engine: LLMEngine, prompts: Sequence[list[int]], output_lens: Sequence[int], batch_size: int | None = None
) -> pd.DataFrame:
    """Serve requests that all arrive at once, continuously or in whole batches of ``batch_size``. One row a request:

    request_id, num_tokens (output), scheduled, first_token, finished: seconds since they arrived.
    """
    import pandas as pd

    start, rows = time.monotonic(), []
    indices = range(len(prompts))
    size = batch_size or len(prompts)
    for batch in (indices[i : i + size] for i in range(0, len(prompts), size)):
        for i in batch:
            params = SamplingParams(temperature=0, max_tokens=output_lens[i], ignore_eos=True)
            engine.add_request(f"r{i}", prompts[i], params, arrival_time=start)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    times, tokens = output.metrics, len(output.outputs[0].token_ids)
                    moments = (times.first_scheduled_time, times.first_token_time, times.finished_time)
                    rows.append((output.request_id, tokens, *(moment - start for moment in moments)))
    table = pd.DataFrame(rows, columns=["request_id", "num_tokens", "scheduled", "first_token", "finished"])
    return table.set_index("request_id").loc[[f"r{i}" for i in indices]].reset_index()


def throughput_by_batch(
    llm: LLM, batches: Sequence[int], context: int = 64, steps: int = 15, seed: int = 0
) -> pd.DataFrame:
    """Decode steps of the whole engine, scheduler and sampler included, for several numbers of requests. One row a batch:

    num_reqs, seconds a step (median; low, high: 10th and 90th percentile), tokens_per_s, op_seconds (time inside ops of a step
    that runs op by op and is recorded), outside_seconds (the rest of that step, the recorder's own work included).
    """
    import pandas as pd

    from llmlab.ops.registry import record_ops

    def clocked_step() -> float:
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start

    rng, engine, rows = np.random.default_rng(seed), llm.engine, []
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for num_reqs in batches:
        names = [f"batch-{num_reqs}-{r}" for r in range(num_reqs)]
        for name in names:
            engine.add_request(name, rng.integers(llm.config.vocab_size, size=context).tolist(), params)
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        for _ in range(3):  # the engine records a shape when it first meets it
            engine.step()
        whole, by_op, inside = [], [], []
        for _ in range(steps):
            whole.append(clocked_step())
            with record_ops(check=False) as ledger:
                by_op.append(clocked_step())
            inside.append(ledger.costs()["seconds"].sum())
        engine.discard_request(names)
        low, median, high = np.percentile(whole, (10, 50, 90))
        rows.append(
            {
                "num_reqs": num_reqs,
                "seconds": median,
                "low": low,
                "high": high,
                "tokens_per_s": num_reqs / median,
                "op_seconds": np.median(inside),
                "outside_seconds": np.median(np.subtract(by_op, inside)),
            }
        )
    return pd.DataFrame(rows)
