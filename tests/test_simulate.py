"""The simulator against queues that are solved by hand, the real engine's own plans, and what must be conserved."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.plan import SchedulerOutput
from llmlab.measure.clock import ConstantClock
from llmlab.measure.efficiency import Efficiency
from llmlab.measure.known_models import known_config
from llmlab.measure.plan import Hardware, datasheet_hardware
from llmlab.measure.serving import ServingRun
from llmlab.simulate import run, simulate, sweep
from llmlab.workload import Workload, synthetic, trace

ROOMY = CacheConfig(num_blocks=1000, block_size=4)
MODEL = known_config("llama-3-8b")


def scheduler(**options: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options})


def what_it_decided(output: SchedulerOutput) -> tuple[Any, ...]:
    tables = {r: tuple(blocks) for r, blocks in output.block_ids.items()}
    return (
        dict(output.num_scheduled_tokens), list(output.num_scheduled_tokens), dict(output.num_computed_tokens), tables,
        output.scheduled_new_req_ids, output.scheduled_resumed_req_ids, output.preempted_req_ids, output.finished_req_ids,
        dict(output.num_cached_tokens), output.num_recomputed_tokens, output.swap_out, output.swap_in,
    )  # fmt: skip


# ---- queues that can be solved ------------------------------------------------------------------------------------


def test_one_server_with_constant_service_is_lindleys_recursion_and_the_m_d_1_queue() -> None:
    service, load = 0.25, 0.7
    workload = synthetic(6000, rate=load / service, prompt=1, output=1, seed=5)
    result = run(workload, ConstantClock(service), scheduler(max_num_seqs=1), ROOMY)
    waits, wait = [], 0.0
    for gap in [*np.diff(workload.arrivals), 0.0]:
        waits.append(wait)
        wait = max(0.0, wait + service - gap)
    assert result.requests["ttft"].to_numpy() == pytest.approx(np.array(waits) + service, abs=1e-6)
    assert np.mean(waits) == pytest.approx(service * load / (2 * (1 - load)), rel=0.1)  # Pollaczek–Khinchine


def test_a_schedule_worked_out_by_hand() -> None:
    """Budget 4, a second a step. A: 6 prompt, 2 output; B: 2 prompt, 3 output; C arrives at 2.5: 1 prompt, 1 output.

    Step 1: A 4. Step 2: A 2 (first token), B 2 (first token). Step 3: A 1 (ends), B 1. Step 4: B 1 (ends), C 1 (ends).
    """
    workload = trace([(0.0, 6, 2), (0.0, 2, 3), (2.5, 1, 1)])
    result = run(workload, ConstantClock(1.0), scheduler(max_num_batched_tokens=4), ROOMY)
    assert result.requests["first_token"].tolist() == [2, 2, 4]
    assert result.requests["finished"].tolist() == [3, 4, 4]
    assert result.requests["ttft"].tolist() == [2, 2, 1.5]
    assert result.requests["tpot"].tolist()[:2] == [1, 1] and math.isnan(result.requests["tpot"][2])
    assert result.steps["num_scheduled_tokens"].tolist() == [4, 4, 2, 2]
    assert result.steps["num_generated_tokens"].tolist() == [0, 2, 2, 2]
    assert result.steps["num_running"].tolist() == [1, 2, 2, 2]
    assert result.steps["num_waiting"].tolist() == [1, 0, 0, 0]
    assert (result.itl.tolist(), result.itl_counts.tolist()) == ([1.0], [3])
    figures = result.summary()
    assert figures["output_tokens_per_s"] == 6 / 4
    assert figures["ttft_p50"] == 2 and figures["itl_p99"] == 1
    assert result.within(ttft=1.9, tpot=1.0) == pytest.approx(1 / 3)
    assert result.within(ttft=2.0, tpot=0.9) == pytest.approx(1 / 3)  # C has one token, so nothing to be late with


def test_idle_time_is_skipped_and_not_counted_as_latency() -> None:
    result = run(trace([(1.0, 2, 1), (100.0, 2, 1)]), ConstantClock(0.5), scheduler(), ROOMY)
    assert result.requests["finished"].tolist() == [1.5, 100.5]


def test_a_shared_prefix_is_computed_once() -> None:
    """Prefix 10, own 3, blocks of 4: two whole blocks are shared; whoever comes later computes 13 − 8 tokens."""
    rows = [
        {"arrival": 10.0 * i, "prompt_len": 13, "output_len": 1, "prefix_id": 0, "prefix_len": 10} for i in range(4)
    ]
    result = run(trace(rows), ConstantClock(0.0, 1.0), scheduler(), ROOMY)
    assert result.requests["cached_tokens"].tolist() == [0, 8, 8, 8]
    assert result.requests["ttft"].tolist() == [13, 3 + 5, 5, 5]  # the second waits for the first: 13 s after 10
    off = run(trace(rows), ConstantClock(0.0, 1.0), scheduler(), CacheConfig(1000, 4, enable_prefix_caching=False))
    assert off.requests["cached_tokens"].tolist() == [0] * 4


def test_swapped_blocks_take_their_time() -> None:
    workload, pool = trace([(0.0, 8, 8), (0.0, 8, 8)]), CacheConfig(5, 4, num_host_blocks=5)
    swaps = scheduler(preemption_mode="swap")
    plans: list[SchedulerOutput] = []
    result = run(workload, ConstantClock(1.0), swaps, pool, seconds_per_swapped_block=100.0, on_step=plans.append)
    moved = sum(len(p.swap_out) + len(p.swap_in) for p in plans)
    assert moved > 0
    assert result.steps["time"].iloc[-1] == len(plans) + 100 * moved


# ---- what must be conserved ---------------------------------------------------------------------------------------


def itl_from_plans(plans: list[SchedulerOutput], workload: Workload) -> Counter[float]:
    """Every gap between a request's tokens, counted in steps, from the plans alone."""
    times: dict[str, list[int]] = defaultdict(list)
    for now, plan in enumerate(plans, 1):
        for request_id, count in plan.num_scheduled_tokens.items():
            total = workload.prompt_lens[int(request_id)] + len(times[request_id])
            if plan.num_computed_tokens[request_id] + count >= total:
                times[request_id].append(now)
    return Counter(float(b - a) for of_request in times.values() for a, b in itertools.pairwise(of_request))


@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=14),
    blocks=st.integers(8, 14),
    budget=st.integers(1, 30),
    seqs=st.integers(1, 5),
    policy=st.sampled_from(["fcfs", "priority"]),
    mode=st.sampled_from(["recompute", "swap"]),
    caching=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_request_gets_exactly_its_tokens(requests, blocks, budget, seqs, policy, mode, caching) -> None:
    rows = [{"arrival": a, "prompt_len": p, "output_len": o, "priority": p % 3} for a, p, o in requests]
    workload = trace(rows, vocab_size=5)
    config = scheduler(max_num_batched_tokens=budget, max_num_seqs=seqs, policy=policy, preemption_mode=mode)
    finished, plans = [], []
    result = run(
        workload,
        ConstantClock(1.0),
        config,
        CacheConfig(blocks, 4, caching, blocks),
        on_finished=finished.append,
        on_step=plans.append,
    )
    table = result.requests
    assert table["output_len"].tolist() == workload.output_lens.tolist()
    assert result.steps["num_generated_tokens"].sum() == workload.output_lens.sum()
    assert sum(finished) == len(workload)
    assert result.steps["num_scheduled_tokens"].tolist() == [p.total_num_scheduled_tokens for p in plans]
    assert result.steps["num_scheduled_tokens"].max() <= budget
    for earlier, later in (
        ("arrival", "first_scheduled"),
        ("first_scheduled", "first_token"),
        ("first_token", "finished"),
    ):
        assert (table[earlier] <= table[later]).all()
    busy = plans if (np.diff(result.steps["time"]) == 1).all() else None
    if busy is not None:  # no idle time, so that steps are seconds
        assert dict(zip(result.itl.tolist(), result.itl_counts.tolist())) == itl_from_plans(plans, workload)
    assert result.itl_counts.sum() == (workload.output_lens - 1).sum()


def test_the_same_seed_gives_the_same_run() -> None:
    make = lambda: simulate(MODEL, "h200", synthetic(80, 30.0, "uniform:10:900", "lognormal:40:0.7:300", seed=3))
    a, b = make(), make()
    pd.testing.assert_frame_equal(a.requests, b.requests, check_exact=True)
    pd.testing.assert_frame_equal(a.steps, b.steps, check_exact=True)
    assert np.array_equal(a.itl, b.itl) and np.array_equal(a.itl_counts, b.itl_counts)


def test_holding_requests_back_changes_no_decision() -> None:
    """With more sequences allowed than there are requests, nothing is held back; the budget then does the limiting."""
    workload = synthetic(40, prompt="uniform:5:30", output="uniform:1:9", seed=1)
    plans: dict[int, list[Any]] = {4: [], 3: []}
    for policy, seqs in (("fcfs", 4), ("priority", 3)):
        config = scheduler(max_num_seqs=4, policy=policy)
        run(workload, ConstantClock(1.0), config, ROOMY, on_step=lambda p, k=seqs: plans[k].append(what_it_decided(p)))
    assert (
        plans[4] == plans[3]
    )  # all priorities are equal, so both policies are first come, first served; one holds back


# ---- the real engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 400},
        {"num_kv_blocks": 24, "max_num_batched_tokens": 24},
        {"num_kv_blocks": 24, "preemption_mode": "swap"},
        {"num_kv_blocks": 60, "enable_prefix_caching": False, "long_prefill_token_threshold": 16},
    ],
    ids=["roomy", "preempting", "swapping", "threshold"],
)
def test_the_real_engine_makes_the_same_plans(options: dict[str, Any]) -> None:
    from llmlab import LLM
    from llmlab.measure.experiments.simulator import replay

    llm = LLM("tiny", block_size=8, max_num_seqs=6, dtype="float32", **options)
    workload = synthetic(
        14, prompt="uniform:4:40", output="uniform:1:24", num_prefixes=2, prefix_len=17,
        vocab_size=llm.config.vocab_size, seed=2,
    )  # fmt: skip
    engine_scheduler = llm.engine.scheduler
    plan, real, simulated = engine_scheduler.schedule, [], []

    def watched() -> SchedulerOutput:
        output = plan()
        real.append(what_it_decided(output))
        return output

    engine_scheduler.schedule = watched
    served = replay(llm, workload).run
    result = run(
        workload,
        ConstantClock(1.0),
        engine_scheduler.config,
        engine_scheduler.cache_config,
        on_step=lambda p: simulated.append(what_it_decided(p)),
    )
    assert len(real) > 20
    assert simulated == real
    if options["num_kv_blocks"] == 24:
        assert result.summary()["preemptions"] > 0
    same = ["prompt_len", "output_len", "cached_tokens", "preemptions"]
    pd.testing.assert_frame_equal(result.requests[same], served.requests[same])
    same = ["num_running", "num_waiting", "num_scheduled_tokens", "num_generated_tokens", "num_recomputed_tokens",
            "num_preemptions", "kv_cache_usage"]  # fmt: skip
    pd.testing.assert_frame_equal(result.steps[same], served.steps[same])
    assert served.itl_counts.sum() == result.itl_counts.sum()


# ---- simulate: from names -----------------------------------------------------------------------------------------


def test_replicas_are_runs_of_their_own() -> None:
    workload = synthetic(30, 50.0, "uniform:10:400", "uniform:2:40", seed=4)
    both = simulate(MODEL, "h200", workload, data_parallel_size=2)
    for rank in range(2):
        alone = simulate(MODEL, "h200", workload.part(slice(rank, None, 2)))
        part = both.requests[both.requests["replica"] == rank]
        assert part["finished"].tolist() == alone.requests["finished"].tolist()
        assert (both.steps["replica"] == rank).sum() == len(alone.steps)
    assert both.requests["request"].tolist() == list(range(30))
    assert both.requests["arrival"].tolist() == workload.arrivals.tolist()
    assert both.itl_counts.sum() == (workload.output_lens - 1).sum()
    assert both.summary()["ttft_p50"] <= simulate(MODEL, "h200", workload).summary()["ttft_p50"]


def test_a_smaller_token_budget_trades_first_tokens_for_steady_ones() -> None:
    workload = synthetic(120, 12.0, "lognormal:1500:0.5:6000", 64, seed=0)
    table = sweep({"max_num_batched_tokens": [256, 8192]}, model=MODEL, hardware="h200", workload=workload)
    small, large = table.iloc[0], table.iloc[1]
    assert small["itl_p99"] < large["itl_p99"]
    assert small["ttft_p50"] > large["ttft_p50"]


def test_a_sweep_keeps_what_does_not_fit_as_a_reason() -> None:
    workload = synthetic(4, prompt=16, output=2)
    table = sweep(
        {"tensor_parallel_size": [1, 2], "block_size": [8, 16]}, model="llama-3-70b", hardware="H200", workload=workload
    )
    assert table["tensor_parallel_size"].tolist() == [1, 1, 2, 2]
    assert table["block_size"].tolist() == [8, 16, 8, 16]
    assert table["error"].notna().tolist() == [True, True, False, False]
    assert "141.1 GB of weights" in table["error"][0]
    assert (table["output_tokens_per_s"] > 0).tolist() == [False, False, True, True]


def test_efficiency_scales_a_memory_bound_run() -> None:
    workload = synthetic(1, prompt=1, output=50)
    seconds = [
        simulate(MODEL, "h200", workload, efficiency=Efficiency(bandwidth=b, step_overhead=0)).summary()["seconds"]
        for b in (0.8, 0.4)
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "llama-9"}, "unknown model 'llama-9'.*llama-3-8b"),
        ({"hardware": "h900"}, "no single GPU is called 'h900'; there are"),
        ({"hardware": ""}, "no single GPU"),
        ({"model": "llama-3-70b"}, r"does not fit: 141.1 GB of weights a device at tensor_parallel_size=1"),
        ({"hardware": "rtx", "num_kv_blocks": 10**6}, "num_kv_blocks=1000000 of 16 tokens do not fit RTX 4090"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the model's 32 attention heads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer of at least 1, got 0"),
        ({"data_parallel_size": 5}, "data_parallel_size=5, but there are only 4 requests"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_model_len": 20}, "request 0 has 16 prompt and 8 output tokens, more than max_model_len=20"),
        ({"num_kv_blocks": 1}, "request 0 has 16 prompt and 8 output tokens, more than the KV cache's 1 blocks of 16"),
        ({"memory_share": 1.5}, r"memory_share must be in \(0, 1\], got 1.5"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
        ({"scheduling_policy": "lifo"}, "scheduling policy must be one of fcfs, priority"),
        ({"preemption_mode": "hope"}, "preemption_mode must be one of"),
        ({"dtype": "int3"}, "dtype must be one of"),
    ],
)
def test_refusals_name_the_value_and_the_limit(arguments: dict[str, Any], message: str) -> None:
    workload = synthetic(4, prompt=16, output=8)
    with pytest.raises(ValueError, match=message):
        simulate(**{"model": "llama-3-8b", "hardware": "h200", "workload": workload, **arguments})


def test_a_device_without_ways_out_refuses_what_needs_them() -> None:
    lonely = Hardware("a lonely GPU", datasheet_hardware("h200").roof, 200e9)
    workload = synthetic(1)
    with pytest.raises(ValueError, match="a lonely GPU has no link"):
        simulate("llama-3-8b", lonely, workload, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="no bandwidth to host memory is known for a lonely GPU"):
        simulate("llama-3-8b", lonely, workload, preemption_mode="swap")


def test_quantiles_of_latencies_count_tokens() -> None:
    result = ServingRun(pd.DataFrame(), pd.DataFrame(), np.array([0.1, 0.2, 0.9]), np.array([50, 45, 5]))
    assert result.itl_quantile([0.5, 0.51, 0.95, 0.96, 1.0]).tolist() == [0.1, 0.2, 0.2, 0.9, 0.9]
