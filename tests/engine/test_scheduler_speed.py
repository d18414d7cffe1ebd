"""What a step of scheduling costs in Python; printed, not judged (``pytest -s``)."""

from __future__ import annotations

import statistics
import time

import pytest

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.request import Request
from llmlab.engine.scheduler import Scheduler
from llmlab.sampling.params import SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [100, 2000])
def test_microseconds_per_decode_step(num_prompt_tokens, caching, num_reqs=256, num_steps=160):
    """Medians over steps in which all requests decode; ten full periods of a block, so growth and hashing are in them."""
    config = SchedulerConfig(max_model_len=4096, max_num_seqs=num_reqs, max_num_batched_tokens=1 << 20)
    scheduler = Scheduler(config, CacheConfig(num_blocks=num_reqs * 256, enable_prefix_caching=caching))
    for i in range(num_reqs):
        prompt = range(i, i + num_prompt_tokens + i % 16)  # not all reach the end of a block in the same step
        scheduler.add_request(Request(str(i), prompt, SamplingParams(max_tokens=None)))
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    schedule_us, update_us = [], []
    for step in range(num_steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        sampled = dict.fromkeys(output.num_scheduled_tokens, step)
        after = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        end = time.perf_counter()
        schedule_us.append((middle - start) * 1e6)
        update_us.append((end - after) * 1e6)
        assert output.total_num_scheduled_tokens == num_reqs
    print(
        f"\n{num_reqs} decodes after {num_prompt_tokens} tokens, prefix caching {'on' if caching else 'off'}: "
        f"schedule {statistics.median(schedule_us):.0f} µs, update {statistics.median(update_us):.0f} µs (medians), "
        f"best {min(schedule_us):.0f} + {min(update_us):.0f} µs"
    )
