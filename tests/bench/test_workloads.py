"""The standard workloads: what is counted, and the floor against the same sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmlab.bench.workloads import WORKLOADS, Job, mixed_lengths
from llmlab.measure.cost import decode_costs, least_seconds, prefill_costs
from llmlab.measure.datasheets import Roof
from llmlab.measure.known_models import known_config

CONFIG = known_config("smollm2-135m-instruct")
ROOF = Roof("a machine", "bfloat16", "memory", 2e12, 30e9, "measured")
NAMED = {workload.name: workload for workload in WORKLOADS}


def test_the_names_and_the_sizes_of_the_mixed_workload():
    assert list(NAMED) == ["prefill512", "prefill2048", "decode1", "decode8", "decode32", "mixed"]
    prompts, outputs = mixed_lengths()
    assert (len(prompts), sum(prompts), sum(outputs)) == (32, 4560, 2277)
    assert min(prompts) >= 16 and max(prompts) <= 256 and min(outputs) >= 16 and max(outputs) <= 128


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_the_ideal_steps_compute_every_token_once(workload):
    """Each output token but the last of a request is computed once, each prompt token too (unless its time is taken off)."""
    computed = sum(sum(query) for query, _ in workload.steps())
    job = workload.job
    expected = sum(job.output_lens) - len(job.output_lens)
    assert computed == expected + (0 if workload.less else sum(job.prompt_lens))
    for query, context in workload.steps():
        assert len(query) == len(context) <= job.max_num_seqs
        assert all(1 <= q <= c for q, c in zip(query, context, strict=True))


def test_floors():
    bf16 = {"dtype": torch.bfloat16}
    prefill = 512 / least_seconds(prefill_costs(CONFIG, 1, 512, **bf16), ROOF)
    assert NAMED["prefill512"].most_tokens_per_second(CONFIG, ROOF) == pytest.approx(prefill)
    one = NAMED["decode1"].most_tokens_per_second(CONFIG, ROOF)
    # 134.5 M weights of two bytes, and the keys and values of 192 tokens on average, read at 30 GB/s
    kv = 30 * 2 * 3 * 64 * 2 * 192
    assert one == pytest.approx(30e9 / (2 * 134.5e6 + kv), rel=0.02)
    # in float32 the weights may stay as the checkpoint has them; keys and values take four bytes
    single = NAMED["decode1"].most_tokens_per_second(CONFIG, replace(ROOF, dtype="float32"))
    assert single == pytest.approx(30e9 / (2 * 134.5e6 + 2 * kv), rel=0.02)
    half, whole = (1 / least_seconds(decode_costs(CONFIG, 32, n, **bf16), ROOF) for n in (129, 255))
    assert 32 * whole < NAMED["decode32"].most_tokens_per_second(CONFIG, ROOF) < 32 * half


def test_decode_takes_the_prefill_off():
    seconds = {1: 2.0, 128: 4.54}
    speed = NAMED["decode8"].tokens_per_second(lambda job: seconds[job.output_lens[0]])
    assert speed == pytest.approx(8 * 127 / 2.54)


def test_prompts_are_new_each_time():
    job, rng = Job((5, 3), (1, 1), 2), np.random.default_rng(0)
    first, second = job.prompts(rng, 1000), job.prompts(rng, 1000)
    assert [len(p) for p in first] == [5, 3] and first != second
    assert all(0 <= token < 1000 for prompt in first for token in prompt)
