"""The scheduler's rules one by one, with made-up tokens instead of a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.request import Request, RequestStatus
from llmlab.engine.scheduler import Scheduler, SchedulerOutput
from llmlab.sampling.params import SamplingParams

TOKEN = 7


def make(
    num_blocks: int = 100, block_size: int = 4, *, caching: bool = True, host: int = 0, eos=(), **config
) -> Scheduler:
    config.setdefault("max_model_len", 1000)
    cache = CacheConfig(num_blocks, block_size, enable_prefix_caching=caching, num_host_blocks=host)
    return Scheduler(SchedulerConfig(**config), cache, frozenset(eos))


def add(scheduler: Scheduler, request_id: str, prompt: int | list[int], **params) -> Request:
    """A request with a prompt of that many tokens that occur in no other."""
    keys = {k: params.pop(k) for k in ("priority", "arrival_time", "cache_salt") if k in params}
    if isinstance(prompt, int):
        start = sum(request_id.encode()) * 10_000
        prompt = list(range(start, start + prompt))
    params.setdefault("max_tokens", None)
    request = Request(request_id, prompt, SamplingParams(**params), **keys)
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler, token_id: int = TOKEN) -> SchedulerOutput:
    """One step of an engine whose model always says ``token_id``. Samples are given for partial prefills too."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, token_id))
    scheduler.kv_cache_manager.block_pool.check()
    return output


def run_all(scheduler: Scheduler, max_steps: int = 10_000) -> list[SchedulerOutput]:
    outputs = []
    while scheduler.has_unfinished_requests():
        outputs.append(step(scheduler))
        assert len(outputs) < max_steps, "no end"
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    assert pool.num_free == pool.num_blocks and len(manager.free_host_blocks) == manager.num_host_blocks
    return outputs


def scheduled(output: SchedulerOutput) -> dict[str, int]:
    return dict(output.num_scheduled_tokens)


# ---- one rule for prefill, chunk and decode


def test_a_prompt_then_decodes():
    scheduler = make()
    request = add(scheduler, "a", 5, max_tokens=3)
    first = step(scheduler)
    assert scheduled(first) == {"a": 5} and first.num_computed_tokens == {"a": 0}
    assert first.scheduled_new_req_ids == ("a",) and first.num_cached_tokens == {"a": 0}
    assert len(first.block_ids["a"]) == 2
    second = step(scheduler)
    assert scheduled(second) == {"a": 1} and second.num_computed_tokens == {"a": 5}
    assert second.scheduled_new_req_ids == () and second.num_cached_tokens == {}
    step(scheduler)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED and request.output_token_ids == [TOKEN] * 3
    assert not scheduler.has_unfinished_requests() and scheduler.running == []
    assert step(scheduler).finished_req_ids == ("a",)
    assert step(scheduler).finished_req_ids == ()


def test_positions_have_no_gap_and_no_repetition():
    scheduler = make()
    add(scheduler, "a", 5, max_tokens=4)
    positions = []
    for output in run_all(scheduler):
        start = output.num_computed_tokens["a"]
        positions += range(start, start + output.num_scheduled_tokens["a"])
    assert positions == list(range(8))


def test_a_long_prompt_is_chunked_and_only_the_last_chunk_gives_a_token():
    scheduler = make(max_num_batched_tokens=8)
    request = add(scheduler, "a", 20)
    outputs = []
    for num_output_tokens in (0, 0, 1, 2):
        outputs.append(step(scheduler))
        assert request.num_output_tokens == num_output_tokens
    assert [scheduled(o)["a"] for o in outputs] == [8, 8, 4, 1]
    assert [o.num_computed_tokens["a"] for o in outputs] == [0, 8, 16, 20]


def test_a_last_chunk_of_one_token_is_prefill_and_its_sample_is_kept():
    scheduler = make(max_num_batched_tokens=8)
    request = add(scheduler, "a", 9)
    assert scheduled(step(scheduler)) == {"a": 8} and request.output_token_ids == []
    assert scheduled(step(scheduler)) == {"a": 1} and request.output_token_ids == [TOKEN]


def test_a_budget_of_one_token_is_enough():
    scheduler = make(max_num_batched_tokens=1)
    request = add(scheduler, "a", 5, max_tokens=2)
    assert [scheduled(o) for o in run_all(scheduler)] == [{"a": 1}] * 6
    assert request.output_token_ids == [TOKEN] * 2


def test_running_requests_go_first_and_prefill_takes_the_rest():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", 3)
    step(scheduler)
    add(scheduler, "b", 40)
    assert [scheduled(step(scheduler)) for _ in range(6)] == [{"a": 1, "b": 7}] * 5 + [{"a": 1, "b": 5}]
    assert scheduled(step(scheduler)) == {"a": 1, "b": 1}


def test_the_batch_is_in_the_order_of_arrival():
    scheduler = make()
    for name in "dbca":
        add(scheduler, name, 3)
    assert list(step(scheduler).num_scheduled_tokens) == list("dbca")
    scheduler.abort_request("b")
    add(scheduler, "b", 3)
    assert list(step(scheduler).num_scheduled_tokens) == list("dcab")


def test_the_budget_is_shared_in_order():
    scheduler = make(max_num_batched_tokens=10)
    for name, length in zip("abc", (4, 20, 3)):
        add(scheduler, name, length)
    assert scheduled(step(scheduler)) == {"a": 4, "b": 6}
    assert scheduled(step(scheduler)) == {"a": 1, "b": 9}
    assert scheduled(step(scheduler)) == {"a": 1, "b": 5, "c": 3}


def test_max_num_seqs_limits_the_running_ones():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 3, max_tokens=2)
    assert scheduled(step(scheduler)) == {"a": 3, "b": 3}
    assert scheduled(step(scheduler)) == {"a": 1, "b": 1}
    assert scheduled(step(scheduler)) == {"c": 3}


def test_a_threshold_caps_long_prefills_waiting_and_running():
    scheduler = make(max_num_batched_tokens=100, long_prefill_token_threshold=6)
    add(scheduler, "a", 15)
    add(scheduler, "b", 4)
    assert scheduled(step(scheduler)) == {"a": 6, "b": 4}
    assert scheduled(step(scheduler)) == {"a": 6, "b": 1}
    assert scheduled(step(scheduler)) == {"a": 3, "b": 1}
    assert scheduled(step(scheduler)) == {"a": 1, "b": 1}


def test_without_chunking_the_head_waits_for_the_whole_budget():
    scheduler = make(max_model_len=16, max_num_batched_tokens=16, enable_chunked_prefill=False)
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    add(scheduler, "c", 2)  # would fit beside "a", but nobody overtakes
    assert scheduled(step(scheduler)) == {"a": 10}
    assert scheduled(step(scheduler)) == {"a": 1, "b": 10, "c": 2}


def test_without_chunking_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ValueError, match="max_model_len=16"):
        make(max_model_len=16, max_num_batched_tokens=8, enable_chunked_prefill=False)


def test_nothing_to_do_gives_an_empty_plan():
    output = make().schedule()
    assert output.total_num_scheduled_tokens == 0 and scheduled(output) == {}


def test_a_step_without_its_results_is_noticed():
    scheduler = make()
    add(scheduler, "a", 3)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="update_from_output"):
        scheduler.schedule()


def test_plans_stay_true_when_they_are_kept():
    """A recorded plan must still say which blocks its step used, after the tables have grown or gone."""
    scheduler, seen, kept = make(block_size=2), [], []
    add(scheduler, "a", 3, max_tokens=6)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        end = output.num_computed_tokens["a"] + output.num_scheduled_tokens["a"]
        seen.append(list(output.block_ids["a"][: -(-end // 2)]))
        kept.append(output)
        scheduler.update_from_output(output, {"a": TOKEN})
    for output, blocks in zip(kept, seen):
        end = output.num_computed_tokens["a"] + output.num_scheduled_tokens["a"]
        assert output.block_ids["a"][: -(-end // 2)] == blocks and len(blocks) * 2 >= end


# ---- what is refused at the door


@pytest.mark.parametrize(
    ("prompt", "message"), [(8, "max_model_len=8"), (9, "max_model_len=8"), (1000, "max_model_len=8")]
)
def test_a_prompt_must_leave_room_for_a_token(prompt, message):
    scheduler = make(max_model_len=8)
    other = add(scheduler, "a", 3, max_tokens=2)
    with pytest.raises(ValueError, match=message):
        add(scheduler, "b", prompt)
    assert list(scheduler.requests) == ["a"]
    run_all(scheduler)
    assert other.output_token_ids == [TOKEN] * 2


def test_the_longest_prompt_gives_exactly_one_token():
    scheduler = make(max_model_len=8)
    request = add(scheduler, "a", 7)
    outputs = run_all(scheduler)
    assert request.num_output_tokens == 1 and request.finish_reason == "length"
    assert max(o.num_computed_tokens["a"] + o.num_scheduled_tokens["a"] - 1 for o in outputs) == 6


def test_no_position_reaches_max_model_len_minus_one():
    scheduler = make(max_model_len=8)
    add(scheduler, "a", 2, min_tokens=50, max_tokens=50)
    outputs = run_all(scheduler)
    assert max(o.num_computed_tokens["a"] + o.num_scheduled_tokens["a"] - 1 for o in outputs) == 6


def test_a_prompt_beyond_the_whole_pool_is_refused():
    scheduler = make(num_blocks=3)
    with pytest.raises(ValueError, match="needs 4 KV blocks of 4 tokens; the whole pool has 3"):
        add(scheduler, "a", 13)
    with pytest.raises(ValueError, match="pool"):
        add(scheduler, "b", 16)
    add(scheduler, "c", 12)
    run_all(scheduler)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_lone_request_that_fills_the_pool_ends_with_length(mode, policy):
    scheduler = make(num_blocks=3, host=1, preemption_mode=mode, policy=policy)
    request = add(scheduler, "a", 8, max_tokens=100)
    outputs = run_all(scheduler, max_steps=6)
    assert request.finish_reason == "length" and request.num_tokens == 13  # the last sampled token needs no slot
    assert request.num_preemptions == 0 and len(outputs) == 5


def test_ids_must_be_unique_among_the_unfinished():
    scheduler = make()
    first = add(scheduler, "a", 3, max_tokens=2)
    with pytest.raises(ValueError, match="'a' is in use"):
        add(scheduler, "a", 4)
    step(scheduler)
    with pytest.raises(ValueError, match="'a' is in use"):
        add(scheduler, "a", 4)
    assert scheduler.requests["a"] is first
    run_all(scheduler)
    add(scheduler, "a", 4)
    output = step(scheduler)
    assert output.finished_req_ids == ("a",) and output.scheduled_new_req_ids == ("a",)


def test_a_used_request_is_refused():
    scheduler = make()
    request = add(scheduler, "a", 3, max_tokens=1)
    run_all(scheduler)
    with pytest.raises(ValueError, match="used before"):
        scheduler.add_request(request)


def test_swapping_needs_somewhere_to_swap_to():
    with pytest.raises(ValueError, match="num_host_blocks"):
        make(preemption_mode="swap")


# ---- ending


def test_eos_from_a_set_of_two():
    for eos in (3, 5):
        scheduler = make(eos=(3, 5))
        request = add(scheduler, "a", 3)
        step(scheduler, token_id=eos)
        assert request.finish_reason == "stop" and request.stop_reason is None


def test_update_returns_those_that_ended():
    scheduler = make()
    first, second = add(scheduler, "a", 3, max_tokens=1), add(scheduler, "b", 3, max_tokens=2)
    output = scheduler.schedule()
    assert scheduler.update_from_output(output, {"a": TOKEN, "b": TOKEN}) == [first]
    assert scheduler.running == [second]


@pytest.mark.parametrize("when", ["waiting", "partial", "running", "in flight", "preempted", "swapped"])
def test_abort_at_any_moment_frees_everything_and_happens_once(when):
    scheduler = make(
        num_blocks=6, max_num_batched_tokens=12, host=6, preemption_mode="swap" if when == "swapped" else "recompute"
    )
    add(scheduler, "first", 8 if when in ("preempted", "swapped") else 4)
    if when in ("preempted", "swapped"):
        step(scheduler)
    request = add(scheduler, "a", 11 if when != "partial" else 16)
    output = None
    if when == "in flight":
        output = scheduler.schedule()
    elif when != "waiting":
        while {
            "partial": request.num_computed_tokens == 0,
            "running": request.num_output_tokens == 0,
        }.get(when, request.status is not RequestStatus.PREEMPTED):
            step(scheduler)
        assert (when == "swapped") == bool(request.host_block_ids)
    assert scheduler.abort_request("a") is request
    pool = scheduler.kv_cache_manager.block_pool
    before = pool.num_free, [b.ref_count for b in pool.blocks]
    assert scheduler.abort_request("a") is None and scheduler.abort_request("never seen") is None
    assert (pool.num_free, [b.ref_count for b in pool.blocks]) == before
    assert request.finish_reason == "abort" and request.block_ids == [] and request.host_block_ids == []
    if output is not None:  # its sample arrives too late
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
        assert request.output_token_ids == []
    if "first" in scheduler.requests:
        assert "a" in step(scheduler).finished_req_ids
    run_all(scheduler)


def test_a_late_sample_is_not_given_to_a_new_request_of_the_same_id():
    scheduler = make()
    add(scheduler, "a", 3)
    output = scheduler.schedule()
    scheduler.abort_request("a")
    new = add(scheduler, "a", 3)
    scheduler.update_from_output(output, {"a": TOKEN})
    assert new.output_token_ids == [] and new.status is RequestStatus.WAITING


def test_finishing_from_outside():
    scheduler = make()
    request, other = add(scheduler, "a", 3), add(scheduler, "b", 3, max_tokens=3)
    step(scheduler)
    with pytest.raises(ValueError, match="PREEMPTED"):
        scheduler.finish_request("a", RequestStatus.PREEMPTED)
    scheduler.finish_request("a", RequestStatus.FINISHED_STOPPED, stop_reason="STOP")
    assert (request.finish_reason, request.stop_reason) == ("stop", "STOP")
    run_all(scheduler)
    assert other.output_token_ids == [TOKEN] * 3


def test_one_failing_request_touches_no_other():
    scheduler = make()
    request, other = add(scheduler, "a", 3), add(scheduler, "b", 3, max_tokens=3)
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"b": TOKEN})
    scheduler.finish_request("a", RequestStatus.FINISHED_ERROR, error="no token is allowed")
    assert (request.finish_reason, request.error, request.block_ids) == ("error", "no token is allowed", [])
    run_all(scheduler)
    assert other.output_token_ids == [TOKEN] * 3


# ---- prefix cache


def test_hits_are_not_scheduled():
    scheduler = make()
    for expected in (0, 4, 4):  # a full hit computes the whole last block again
        request = add(scheduler, "a", 8, max_tokens=1)
        output = step(scheduler)
        assert scheduled(output) == {"a": 8 - expected} and output.num_computed_tokens == {"a": expected}
        assert output.num_cached_tokens == {"a": expected} and request.num_cached_tokens == expected


@pytest.mark.parametrize("max_tokens", [5, 6, 9, 10])
def test_a_conversation_hits_its_own_answers(max_tokens):
    scheduler = make()
    first = add(scheduler, "a", 4, max_tokens=max_tokens)
    run_all(scheduler)
    second = add(scheduler, "b", [*first.all_token_ids, 1, 2, 3])
    step(scheduler)
    assert second.num_cached_tokens == (4 + max_tokens - 1) // 4 * 4  # the last answered token was never computed


def test_requests_of_one_step_share_what_the_first_computes():
    scheduler = make()
    prefix = list(range(8))
    first, second = add(scheduler, "a", prefix + [50]), add(scheduler, "b", prefix + [60, 61])
    output = step(scheduler)
    assert scheduled(output) == {"a": 9, "b": 2}
    assert first.block_ids[:2] == second.block_ids[:2] and first.block_ids[2] != second.block_ids[2]


def test_a_resumed_request_hits_its_own_blocks_and_that_is_counted_apart():
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 7, max_tokens=4)
    request = add(scheduler, "b", 8, max_tokens=4)
    run_all(scheduler)
    totals = scheduler.stats.totals
    assert request.num_preemptions == 1 and request.num_cached_tokens == 0
    assert totals.prefix_cache_hits == 0 and totals.prefix_cache_queries == 15
    assert totals.resumed_cache_hits > 0 and totals.resumed_cache_queries == 9


def test_a_blocked_head_is_looked_up_often_and_counted_once():
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 12, max_tokens=4)
    add(scheduler, "b", 8, max_tokens=1)
    run_all(scheduler)
    assert scheduler.stats.totals.prefix_cache_queries == 20


def test_prompt_logprobs_are_computed_for_every_token_every_time():
    scheduler = make()
    for _ in range(2):
        add(scheduler, "a", 9, max_tokens=1, prompt_logprobs=1)
        assert scheduled(step(scheduler)) == {"a": 9}


# ---- preemption


def two_that_do_not_fit(**config) -> tuple[Scheduler, Request, Request]:
    """Four blocks; "a" and "b" hold two each, "a" needs a third for its next token."""
    scheduler = make(num_blocks=4, **config)
    first, second = add(scheduler, "a", 8, max_tokens=5), add(scheduler, "b", 7, max_tokens=5)
    step(scheduler)
    return scheduler, first, second


@pytest.mark.parametrize("caching", [True, False])
def test_the_last_one_is_preempted_and_computes_prompt_and_output_again(caching):
    scheduler, first, second = two_that_do_not_fit(caching=caching)
    second_tokens = list(second.all_token_ids)
    output = step(scheduler)
    assert scheduled(output) == {"a": 1} and output.preempted_req_ids == ("b",)
    assert second.status is RequestStatus.PREEMPTED and second.num_computed_tokens == 0 and second.block_ids == []
    assert second.all_token_ids == second_tokens and second.num_preemptions == 1
    assert list(scheduler.waiting) == [second] and scheduler.running == [first]
    outputs = run_all(scheduler)
    resumed = next(o for o in outputs if o.scheduled_resumed_req_ids)
    assert resumed.scheduled_resumed_req_ids == ("b",)
    assert resumed.num_computed_tokens["b"] + resumed.num_scheduled_tokens["b"] == 8  # 7 + the 1 it had given
    assert first.output_token_ids == second.output_token_ids == [TOKEN] * 5
    assert second.num_prompt_tokens == 7 and second.num_output_tokens == 5


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["b", "c"]), ("priority", ["c", "b"])])
def test_nothing_is_admitted_in_a_step_that_preempted(policy, order):
    """Not even "c", which goes before "b" by its priority, and for which the block that is left would do."""
    scheduler, *_ = two_that_do_not_fit(policy=policy)
    add(scheduler, "c", 1, priority=-1)
    output = step(scheduler)
    assert output.preempted_req_ids == ("b",) and scheduled(output) == {"a": 1}
    assert scheduler.kv_cache_manager.block_pool.num_free == 1
    assert [r.request_id for r in scheduler.waiting] == order


def test_several_victims_keep_their_order():
    scheduler = make(num_blocks=9, caching=False)
    add(scheduler, "a", 12, max_tokens=14)
    for name in "bcd":
        add(scheduler, name, 7, max_tokens=20)
    arrival = list("abcd")
    while scheduler.has_unfinished_requests():
        step(scheduler)
        order = [r.request_id for r in scheduler.running] + [r.request_id for r in scheduler.waiting]
        assert order == [name for name in arrival if name in order]
    assert scheduler.stats.totals.num_preemptions >= 3


def test_the_head_of_the_queue_blocks_those_behind_it():
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 8)
    add(scheduler, "b", 12)
    add(scheduler, "c", 2)
    assert scheduled(step(scheduler)) == {"a": 8}
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]


def test_a_waiting_request_never_evicts_a_running_one():
    scheduler = make(num_blocks=4, policy="priority")
    add(scheduler, "a", 12, priority=9, max_tokens=4)
    step(scheduler)
    add(scheduler, "b", 12, priority=0, max_tokens=4)
    outputs = run_all(scheduler)
    assert not any(o.preempted_req_ids for o in outputs)


@pytest.mark.parametrize("budget", [3, 5, 16])
def test_recomputed_tokens_are_counted(budget):
    scheduler = make(num_blocks=4, caching=False, max_num_batched_tokens=budget)
    first, second = add(scheduler, "a", 8, max_tokens=9), add(scheduler, "b", 7, max_tokens=5)
    outputs = run_all(scheduler)
    num_recomputed = scheduler.stats.totals.num_recomputed_tokens
    assert first.num_preemptions == 0 and second.num_preemptions >= 1 and num_recomputed > 0
    assert num_recomputed == sum(o.num_recomputed_tokens for o in outputs)
    # each token that was computed is either one of the 8 + 8 and 7 + 4 that had to be, or one of these
    assert scheduler.stats.totals.num_scheduled_tokens == 16 + 11 + num_recomputed


def test_four_long_requests_through_a_pool_for_two_and_a_half():
    for reserve in (False, True):
        scheduler = make(num_blocks=25, max_num_batched_tokens=16, reserve_full_prompt=reserve)
        requests = [add(scheduler, name, 39, max_tokens=1) for name in "abcd"]
        run_all(scheduler, max_steps=100)
        assert all(r.finish_reason == "length" for r in requests)
        preemptions = scheduler.stats.totals.num_preemptions
        assert preemptions == 0 if reserve else preemptions <= 4


def test_reserving_admits_only_whole_prompts_and_keeps_their_blocks():
    def admitted(reserve: bool) -> list[str]:
        scheduler = make(num_blocks=10, max_num_batched_tokens=8, reserve_full_prompt=reserve)
        for name in "ab":
            add(scheduler, name, 24, max_tokens=9)
        for _ in range(4):
            step(scheduler)
        return [r.request_id for r in scheduler.running]

    assert admitted(False) == ["a", "b"]
    assert admitted(True) == ["a"]

    scheduler = make(num_blocks=10, max_num_batched_tokens=8, reserve_full_prompt=True)
    request = add(scheduler, "a", 24, max_tokens=2)
    assert len(step(scheduler).block_ids["a"]) == 6 and request.num_computed_tokens == 8
    run_all(scheduler)


# ---- priority


def test_the_smallest_priority_is_admitted_first_then_the_earliest():
    scheduler = make(policy="priority", max_num_batched_tokens=3)
    for name, priority, arrival in (("late", 0, 2.0), ("low", 5, 0.0), ("early", 0, 1.0), ("tie", 0, 2.0)):
        add(scheduler, name, 3, priority=priority, arrival_time=arrival, max_tokens=1)
    assert [list(o.num_scheduled_tokens) for o in run_all(scheduler)] == [["early"], ["late"], ["tie"], ["low"]]


def priority_scheduler(*requests: tuple[str, int, int], num_blocks: int, **config) -> Scheduler:
    """Requests (id, prompt length, priority), all admitted in that order, one a step."""
    scheduler = make(num_blocks=num_blocks, policy="priority", **config)
    for name, length, priority in requests:
        add(scheduler, name, length, priority=priority, arrival_time=0.0)
        while not scheduler.requests[name].num_output_tokens:
            step(scheduler)
    return scheduler


def test_a_victim_already_scheduled_is_taken_out_again_and_gives_back_its_budget():
    # "low" runs first in the list; "high" needs a block, so "low", scheduled a moment ago, must go.
    scheduler = priority_scheduler(("low", 5, 9), ("high", 4, 0), num_blocks=3, max_num_batched_tokens=100)
    low, high = scheduler.requests["low"], scheduler.requests["high"]
    assert scheduler.kv_cache_manager.block_pool.num_free == 0
    while not low.num_preemptions:
        computed = low.num_computed_tokens
        output = step(scheduler)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
    assert output.preempted_req_ids == ("low",) and scheduled(output) == {"high": 1}
    assert set(output.block_ids) == set(output.num_computed_tokens) == {"high"}
    assert computed > 0 and low.num_computed_tokens == 0 and scheduler.running == [high]


def test_blocks_that_a_victim_did_not_get_to_write_are_never_hit():
    """They were published when "low" was scheduled; then "low" left the step, and only one of them is reused at once."""
    scheduler = make(num_blocks=7, policy="priority", long_prefill_token_threshold=8)
    low = add(scheduler, "low", 28, priority=9)
    assert scheduled(step(scheduler)) == {"low": 8}
    add(scheduler, "high", 4, priority=0)
    assert scheduled(step(scheduler)) == {"low": 8, "high": 4}
    output = step(scheduler)  # "low" was given two blocks for 8 more tokens, then "high" needed one
    assert scheduled(output) == {"high": 1} and output.preempted_req_ids == ("low",)
    assert len(scheduler.kv_cache_manager.get_computed_blocks(low)) * 4 == 16


def test_giving_way_to_itself_does_not_end_the_step_for_better_requests():
    # "low" is first in the list and needs a block: it is its own victim. "high" must still be scheduled.
    scheduler = priority_scheduler(("low", 4, 9), ("high", 6, 0), num_blocks=4)
    low = scheduler.requests["low"]
    outputs = []
    while not low.num_preemptions:
        outputs.append(step(scheduler))
    assert outputs[-1].preempted_req_ids == ("low",) and scheduled(outputs[-1]) == {"high": 1}


def test_the_victim_is_the_worst_wherever_it_stands():
    scheduler = priority_scheduler(("b", 3, 5), ("c", 3, 9), ("a", 8, 0), num_blocks=6)
    c = scheduler.requests["c"]
    while not c.num_preemptions:
        output = step(scheduler)
    assert output.preempted_req_ids == ("c",)
    assert [r.request_id for r in scheduler.running] == ["b", "a"]


def test_a_preempted_request_can_be_overtaken_only_by_a_better_one():
    scheduler = priority_scheduler(("a", 8, 0), ("b", 7, 5), num_blocks=5)
    while not scheduler.waiting:
        step(scheduler)
    add(scheduler, "worse", 3, priority=6)
    add(scheduler, "better", 3, priority=4)
    assert [r.request_id for r in scheduler.waiting] == ["better", "b", "worse"]


# ---- swap


def test_swap_keeps_what_was_computed():
    scheduler, first, second = two_that_do_not_fit(preemption_mode="swap", host=4, caching=False)
    device = list(second.block_ids)
    output = step(scheduler)
    assert output.preempted_req_ids == ("b",) and [s for s, _ in output.swap_out] == device and output.swap_in == ()
    assert second.num_computed_tokens == 7 and second.block_ids == []
    host = [t for _, t in output.swap_out]
    while second.status is RequestStatus.PREEMPTED:
        output = step(scheduler)
    assert output.scheduled_resumed_req_ids == ("b",) and output.num_computed_tokens["b"] == 7
    assert output.num_scheduled_tokens["b"] == 1
    assert [s for s, _ in output.swap_in] == host
    assert [t for _, t in output.swap_in] == output.block_ids["b"][:2]
    run_all(scheduler)
    totals = scheduler.stats.totals
    assert totals.num_recomputed_tokens == 0 and totals.num_swapped_blocks == 4
    assert first.num_output_tokens == second.num_output_tokens == 5


def test_blocks_still_on_the_device_are_not_copied_back():
    scheduler, _, second = two_that_do_not_fit(preemption_mode="swap", host=4)
    assert len(step(scheduler).swap_out) == 2
    while second.status is RequestStatus.PREEMPTED:
        output = step(scheduler)
    assert output.num_computed_tokens["b"] == 7 and output.num_cached_tokens["b"] == 4
    assert [target for _, target in output.swap_in] == output.block_ids["b"][1:]
    run_all(scheduler)


def test_a_swapped_request_comes_back_with_what_it_had_even_if_a_twin_got_further():
    scheduler = make(policy="priority", preemption_mode="swap", host=8, max_num_seqs=2, long_prefill_token_threshold=6)
    pool = scheduler.kv_cache_manager.block_pool
    add(scheduler, "other", 4, priority=0)
    slow = add(scheduler, "slow", list(range(28)), priority=9)
    step(scheduler)
    foreign = pool.take(pool.num_free)  # now "other" can't grow
    assert step(scheduler).preempted_req_ids == ("slow",) and slow.num_computed_tokens == 6
    pool.release(foreign)
    add(scheduler, "twin", list(range(28)), priority=1, max_tokens=2)
    while slow.status is RequestStatus.PREEMPTED:
        output = step(scheduler)
    assert len(scheduler.kv_cache_manager.get_computed_blocks(slow)) == 6
    assert output.num_computed_tokens["slow"] == 6 and output.num_cached_tokens["slow"] == 4
    assert len(output.swap_in) == 1 and output.num_scheduled_tokens["slow"] == 6


def test_a_full_host_falls_back_to_recompute():
    scheduler, _, second = two_that_do_not_fit(preemption_mode="swap", host=1, caching=False)
    output = step(scheduler)
    assert output.preempted_req_ids == ("b",) and output.swap_out == () and second.num_computed_tokens == 0
    run_all(scheduler)
    assert scheduler.stats.totals.num_recomputed_tokens == 7


# ---- a step that fails as a whole


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_a_failed_step_nothing_of_it_is_trusted_and_the_engine_goes_on(mode):
    scheduler = make(num_blocks=6, preemption_mode=mode, host=6, max_num_batched_tokens=12)
    add(scheduler, "old", 5, max_tokens=1)
    run_all(scheduler)
    add(scheduler, "a", 10)
    add(scheduler, "b", 11)
    step(scheduler)
    output = scheduler.schedule()
    failed = scheduler.fail_step(output, "out of memory")
    assert {r.request_id for r in failed} == set(output.num_scheduled_tokens)
    assert all(r.finish_reason == "error" and r.error == "out of memory" for r in failed)
    scheduler.kv_cache_manager.block_pool.check()
    for request in failed:
        probe = Request("p", request.all_token_ids + [0], SamplingParams())
        hits = scheduler.kv_cache_manager.get_computed_blocks(probe)
        assert len(hits) * 4 <= output.num_computed_tokens[request.request_id]
    assert scheduler.kv_cache_manager.get_computed_blocks(Request("p", range(5), SamplingParams())) == []
    add(scheduler, "c", 10, max_tokens=2)
    run_all(scheduler, max_steps=100)


def test_copies_of_a_failed_step_are_not_trusted():
    scheduler, first, second = two_that_do_not_fit(preemption_mode="swap", host=4)
    output = scheduler.schedule()
    assert output.swap_out
    assert scheduler.fail_step(output, "device lost") == [first]
    assert second.num_computed_tokens == 0 and second.host_block_ids == []
    run_all(scheduler)
    assert second.num_output_tokens == 5


def test_blocks_that_a_failed_step_was_to_copy_in_are_not_trusted():
    scheduler, _, second = two_that_do_not_fit(preemption_mode="swap", host=4)
    step(scheduler)
    while True:
        output = scheduler.schedule()
        if output.swap_in:
            break
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
    scheduler.fail_step(output, "device lost")
    assert second.finish_reason == "error"
    probe = Request("probe", [*second.all_token_ids, 1], SamplingParams())
    assert scheduler.kv_cache_manager.get_computed_blocks(probe) == []


# ---- it stands alone


def test_the_scheduler_imports_no_torch():
    code = (
        "import sys, llmlab.engine.scheduler, llmlab.engine.stats\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
