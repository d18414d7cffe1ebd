"""Statistics: one record a step, totals, latencies by the scheduler's clock, memory that stays flat."""

from __future__ import annotations

import math

import pytest

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.request import Request
from llmlab.engine.scheduler import Scheduler
from llmlab.engine.stats import EngineStats, EngineTotals, StepStats, TokenLatencies
from llmlab.sampling.params import SamplingParams


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, num_blocks: int = 50, **config) -> Scheduler:
    config = SchedulerConfig(max_model_len=100, **config)
    return Scheduler(config, CacheConfig(num_blocks, block_size=4), clock=clock)


def step(scheduler: Scheduler, clock: Clock, seconds: float) -> StepStats:
    output = scheduler.schedule()
    clock.now += seconds
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    return scheduler.stats.records[-1]


def test_a_record_tells_what_its_step_did():
    clock = Clock()
    scheduler = make(clock, max_num_batched_tokens=12, max_num_seqs=2)
    for name, length in (("a", 8), ("b", 8), ("c", 8)):
        scheduler.add_request(Request(name, range(length), SamplingParams(max_tokens=2), arrival_time=clock.now))
    first = step(scheduler, clock, 1.0)
    assert (first.step, first.time, first.num_running, first.num_waiting) == (1, 101.0, 2, 1)
    assert (first.num_scheduled_tokens, first.num_generated_tokens) == (12, 2)  # 8, and 4 after 4 that were cached
    assert (first.prefix_cache_queries, first.prefix_cache_hits) == (16, 4)
    assert first.kv_cache_usage == pytest.approx(3 / 50)
    assert (first.ttft, first.itl_mean, first.itl_max, first.num_finished) == (1.0, None, None, 0)
    second = step(scheduler, clock, 0.5)
    assert (second.num_scheduled_tokens, second.num_generated_tokens, second.num_finished) == (2, 2, 2)
    assert (second.ttft, second.itl_mean, second.itl_max) == (None, 0.5, 0.5)
    assert (second.num_running, second.num_waiting, second.prefix_cache_queries) == (2, 1, 0)
    third = step(scheduler, clock, 0.25)
    assert third.ttft == 1.75 and third.num_finished == 0
    assert scheduler.stats.totals == EngineTotals(
        num_steps=3,
        num_scheduled_tokens=18,
        num_generated_tokens=5,
        num_finished=2,
        prefix_cache_queries=24,
        prefix_cache_hits=8,
    )
    assert scheduler.stats.totals.prefix_cache_hit_rate == pytest.approx(1 / 3)


def test_latencies_are_per_token():
    latencies = TokenLatencies(now=10.0)
    requests = [Request(str(i), [1], SamplingParams(), arrival_time=t) for i, t in enumerate((4.0, 6.0, 0.0, 0.0))]
    requests[2].last_token_time, requests[3].last_token_time = 9.0, 7.0
    for request in requests:
        latencies.add(request)
    assert latencies.ttft == 5.0 and latencies.itl_mean == 2.0 and latencies.itl_max == 3.0
    assert [r.last_token_time for r in requests] == [10.0] * 4
    assert [r.first_token_time for r in requests] == [10.0, 10.0, None, None]


def test_a_request_knows_its_times():
    clock = Clock()
    scheduler = make(clock)
    request = Request("a", range(5), SamplingParams(max_tokens=3), arrival_time=98.0)
    scheduler.add_request(request)
    for _ in range(3):
        step(scheduler, clock, 1.0)
    times = (request.first_scheduled_time, request.first_token_time, request.last_token_time, request.finished_time)
    assert times == (100.0, 101.0, 103.0, 103.0)


def test_preemption_does_not_reset_the_first_token():
    clock = Clock()
    scheduler = make(clock, num_blocks=4)
    requests = [Request(name, [i] * 7, SamplingParams(max_tokens=8), arrival_time=100.0) for i, name in enumerate("ab")]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step(scheduler, clock, 1.0)
    assert requests[1].num_preemptions > 0 and requests[1].first_token_time == 101.0
    records = list(scheduler.stats.records)
    assert [r.ttft for r in records if r.ttft is not None] == [1.0]
    assert max(r.itl_max for r in records if r.itl_max is not None) > 1.0  # the wait in between counts as latency
    assert sum(r.num_preemptions for r in records) == scheduler.stats.totals.num_preemptions > 0
    assert sum(r.resumed_cache_queries for r in records) == scheduler.stats.totals.resumed_cache_queries > 0


def test_aborts_are_finished_requests_too():
    clock = Clock()
    scheduler = make(clock)
    for name in "ab":
        scheduler.add_request(Request(name, range(5), SamplingParams(max_tokens=3), arrival_time=100.0))
    scheduler.abort_request("a")
    assert step(scheduler, clock, 1.0).num_finished == 1


def test_records_are_bounded_and_totals_are_not():
    clock = Clock()
    scheduler = make(clock)
    scheduler.stats = EngineStats(max_records=5)
    scheduler.add_request(Request("a", range(5), SamplingParams(max_tokens=30), arrival_time=100.0))
    while scheduler.has_unfinished_requests():
        step(scheduler, clock, 1.0)
    assert [r.step for r in scheduler.stats.records] == [26, 27, 28, 29, 30]
    assert scheduler.stats.totals.num_steps == 30 and scheduler.stats.totals.num_generated_tokens == 30


def test_as_a_dataframe():
    clock = Clock()
    scheduler = make(clock)
    empty = scheduler.stats.to_dataframe()
    scheduler.add_request(Request("a", range(5), SamplingParams(max_tokens=3), arrival_time=100.0))
    for _ in range(3):
        step(scheduler, clock, 2.0)
    frame = scheduler.stats.to_dataframe()
    assert list(frame.columns) == list(empty.columns) and frame.index.name == "step" and list(frame.index) == [1, 2, 3]
    assert frame["num_scheduled_tokens"].tolist() == [5, 1, 1]
    assert frame["itl_mean"].tolist()[1:] == [2.0, 2.0] and math.isnan(frame["itl_mean"].iloc[0])
