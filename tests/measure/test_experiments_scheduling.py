"""Scheduling experiments: what is counted is what an independent count of the same run says; variants lose no token."""

from __future__ import annotations

import numpy as np
import pytest

from llmlab import LLM
from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.scheduler import Scheduler
from llmlab.hub import tiny_model_dir
from llmlab.measure.experiments.scheduling import (
    POLICIES,
    another_engine,
    make_requests,
    run_continuous,
    run_static,
    serve,
    slots_by_spread,
    thrashing,
    throughput_by_batch,
)
from llmlab.viz.timeline import record_schedule

PROMPTS, OUTPUTS = [5, 3, 4, 6, 3], [7, 2, 5, 3, 4]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model_dir(), dtype="float32", device="cpu", num_kv_blocks=64, max_model_len=128)


def scheduler(num_seqs: int = 2) -> Scheduler:
    return Scheduler(SchedulerConfig(max_model_len=64, max_num_seqs=num_seqs), CacheConfig(64, block_size=4))


def test_steps_of_both_ways_are_those_counted_by_hand() -> None:
    # pairs (7, 2), (5, 3), (4): each takes as long as its longest
    assert run_static(scheduler(), make_requests(PROMPTS, OUTPUTS), 2) == 7 + 5 + 4
    # two slots: r0 1-7, r1 1-2, r2 3-7, then r3 8-10 and r4 8-11
    assert run_continuous(scheduler(), make_requests(PROMPTS, OUTPUTS)) == 11


def test_slots_used_are_tokens_over_slot_steps() -> None:
    table = slots_by_spread([0.0, 0.8], num_requests=24, slots=4, mean_length=10)
    assert table["static"][0] == table["continuous"][0] == 1.0
    rng = np.random.default_rng(0)
    lengths = np.rint(10 * (1 + 0.8 * rng.uniform(-1, 1, 24))).clip(1)
    assert table["static"][1] == pytest.approx(lengths.sum() / (4 * lengths.reshape(-1, 4).max(1).sum()))
    assert table["static"][1] < table["continuous"][1] < 1.0
    assert (table["shortest"][1], table["longest"][1]) == (lengths.min(), lengths.max())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
def test_every_policy_ends_and_counts_its_second_computations(policy: str, caching: bool) -> None:
    """The oracle: positions of every request that were scheduled more than once, noted step by step."""
    requests = make_requests([10, 30, 20, 25, 12], [20, 9, 30, 12, 25])
    one = POLICIES[policy](
        SchedulerConfig(max_model_len=64, max_num_batched_tokens=12),
        CacheConfig(14, block_size=4, enable_prefix_caching=caching),
    )
    with record_schedule(one) as schedule:
        run_continuous(one, requests)
    seen: set[tuple[str, int]] = set()
    again = 0
    for row in schedule.tokens:
        for position in range(row["first_position"], row["first_position"] + row["num_tokens"]):
            again += (row["request_id"], position) in seen
            seen.add((row["request_id"], position))
    assert again == one.stats.totals.num_recomputed_tokens > 0
    assert [r.num_output_tokens for r in requests] == [20, 9, 30, 12, 25]
    one.kv_cache_manager.block_pool.check()


def test_policies_differ_in_what_they_claim_to() -> None:
    admitted_after_preempting = dict.fromkeys(POLICIES, 0)
    for policy, kind in POLICIES.items():
        one = kind(SchedulerConfig(64, max_num_batched_tokens=6), CacheConfig(14, 4, enable_prefix_caching=False))
        plan = one.schedule

        def watched(plan=plan, policy=policy):
            output = plan()
            admitted = output.scheduled_new_req_ids + output.scheduled_resumed_req_ids
            admitted_after_preempting[policy] += bool(output.preempted_req_ids and admitted)
            return output

        one.schedule = watched
        run_continuous(one, make_requests([10, 30, 20, 25, 12], [20, 9, 30, 12, 25]))
    assert admitted_after_preempting["engine"] == 0 < admitted_after_preempting["admit at once"]


def test_thrashing_is_one_row_a_run() -> None:
    table = thrashing([40, 400], [64], [0, 1], num_requests=6)
    assert len(table) == 2 * 2 * len(POLICIES)
    assert table.groupby(["seed", "num_blocks"])["useful"].nunique().max() == 1, "all policies do the same useful work"
    assert (table[table["num_blocks"] == 400]["preemptions"] == 0).all()
    assert (table[table["num_blocks"] == 40]["preemptions"] > 0).all()


def test_another_engine_shares_weights_and_memory_but_no_limits(llm: LLM) -> None:
    other = another_engine(llm, num_blocks=8, max_num_seqs=1, enable_prefix_caching=False)
    assert other.runner is llm.engine.runner and other.scheduler is not llm.engine.scheduler
    assert other.scheduler.config.max_num_seqs == 1 != llm.engine.scheduler.config.max_num_seqs
    assert other.scheduler.kv_cache_manager.block_pool.num_blocks == 8
    with pytest.raises(ValueError, match="at most the 64"):
        another_engine(llm, num_blocks=65)
    llm.engine.add_request("busy", [1, 2])
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        another_engine(llm)
    llm.engine.discard_request("busy")


def test_serving_in_batches_starts_the_next_when_all_have_ended(llm: LLM) -> None:
    prompts = [[1, 2, 3]] * 5
    static = serve(another_engine(llm), prompts, OUTPUTS, batch_size=2)
    assert static["request_id"].tolist() == ["r0", "r1", "r2", "r3", "r4"]
    assert static["num_tokens"].tolist() == OUTPUTS
    assert static["scheduled"][2:4].min() >= static["finished"][:2].max()
    assert static["scheduled"][4] >= static["finished"][2:4].max()
    engine = another_engine(llm, max_num_seqs=2)
    continuous = serve(engine, prompts, OUTPUTS)
    assert engine.scheduler.stats.totals.num_steps == 11
    assert continuous["scheduled"][2] < continuous["finished"][0]
    assert (continuous["first_token"] <= continuous["finished"]).all() and (continuous["scheduled"] >= 0).all()


def test_throughput_is_requests_over_seconds_and_ops_are_inside_the_step(llm: LLM) -> None:
    table = throughput_by_batch(llm, [1, 3], context=8, steps=3)
    assert table["num_reqs"].tolist() == [1, 3]
    np.testing.assert_allclose(table["tokens_per_s"], table["num_reqs"] / table["seconds"])
    assert (table["low"] <= table["seconds"]).all() and (table["seconds"] <= table["high"]).all()
    assert (table["op_seconds"] > 0).all() and (table["outside_seconds"] > 0).all()
    assert not llm.engine.has_unfinished_requests()
