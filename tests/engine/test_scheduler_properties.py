"""The scheduler under random traffic, in random configurations, with a model that needs no arithmetic.

The model's keys and values are names of what they must be: the entry of a token names its whole prefix. Every step
copies the swapped blocks, writes the entries of the scheduled tokens to their slots, and then reads back what attention
would read: each position up to the last scheduled one, through the block table. A block that was reused too early,
published but never written, copied too late or hit by another prefix shows as a wrong name. The next token is a function
of the prefix alone, so every request has one right output, which must not depend on anything the scheduler did.
"""

from __future__ import annotations

import random
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.request import Request, RequestStatus
from llmlab.engine.scheduler import Scheduler, SchedulerOutput
from llmlab.sampling.params import SamplingParams

VOCAB_SIZE, EOS, GARBAGE = 100, 99, "garbage"


@cache
def name(prefix: tuple[int, ...]) -> int:
    return hash(prefix)


def next_token(prefix: tuple[int, ...]) -> int:
    return random.Random(name(prefix)).randrange(VOCAB_SIZE)


def right_output(prompt: list[int], params: SamplingParams, max_num_tokens: int) -> list[int]:
    """What the request must give, from a loop that knows no scheduler."""
    tokens, output = list(prompt), []
    while True:
        token = next_token(tuple(tokens))
        tokens.append(token)
        output.append(token)
        may_stop = len(output) >= params.min_tokens
        if may_stop and ((token == EOS and not params.ignore_eos) or token in (params.stop_token_ids or ())):
            return output
        if len(tokens) >= max_num_tokens or len(output) >= (params.max_tokens or 10**9):
            return output


class Lab:
    """A scheduler, the named KV cache on device and host, and every invariant that a step must keep."""

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.scheduler = Scheduler(scheduler_config, cache_config, frozenset({EOS}))
        self.block_size = cache_config.block_size
        self.device = [[GARBAGE] * self.block_size for _ in range(cache_config.num_blocks)]
        self.host = [[GARBAGE] * self.block_size for _ in range(cache_config.num_host_blocks)]
        self.added: dict[str, Request] = {}
        self.right_outputs: dict[str, list[int]] = {}

    # ---- what the world does

    def add(self, prompt: list[int], params: SamplingParams, **kwargs) -> Request | None:
        request = Request(f"r{len(self.added)}", prompt, params, **kwargs)
        try:
            self.scheduler.add_request(request)
        except ValueError:
            assert len(prompt) >= self.scheduler.max_num_tokens
            return None
        self.added[request.request_id] = request
        self.right_outputs[request.request_id] = right_output(prompt, params, self.scheduler.max_num_tokens)
        return request

    def step(self, fail: bool = False) -> SchedulerOutput:
        scheduler = self.scheduler
        computed_before = {r.request_id: r.num_computed_tokens for r in scheduler.running}
        output = scheduler.schedule()
        self.check_plan(output, computed_before)
        if fail:
            for request_id, block_ids in output.block_ids.items():  # whatever a broken kernel wrote before it died
                for position in self.positions(output, request_id):
                    self.device[block_ids[position // self.block_size]][position % self.block_size] = GARBAGE
            for _, block in output.swap_in:
                self.device[block] = [GARBAGE] * self.block_size
            for _, block in output.swap_out:
                self.host[block] = [GARBAGE] * self.block_size
            scheduler.fail_step(output, "the step failed")
        else:
            self.forward(output)
            kept = {}
            for request_id in output.num_scheduled_tokens:
                request = scheduler.requests[request_id]
                if self.positions(output, request_id).stop == request.num_tokens:
                    kept[request_id] = next_token(tuple(request.all_token_ids))
            finished = scheduler.update_from_output(output, kept)
            for request in finished:
                right = self.right_outputs[request.request_id]
                assert request.output_token_ids == right, "the output depends on the scheduling"
        return output

    def forward(self, output: SchedulerOutput) -> None:
        for source, target in output.swap_out:
            self.host[target] = list(self.device[source])
        for source, target in output.swap_in:
            self.device[target] = list(self.host[source])
        tokens = {r: self.scheduler.requests[r].all_token_ids for r in output.num_scheduled_tokens}
        for request_id, block_ids in output.block_ids.items():
            for position in self.positions(output, request_id):
                slot = self.device[block_ids[position // self.block_size]]
                slot[position % self.block_size] = name(tuple(tokens[request_id][: position + 1]))
        for request_id, block_ids in output.block_ids.items():
            for position in range(self.positions(output, request_id).stop):
                entry = self.device[block_ids[position // self.block_size]][position % self.block_size]
                assert entry == name(tuple(tokens[request_id][: position + 1])), (
                    "attention reads another prefix's entry"
                )

    @staticmethod
    def positions(output: SchedulerOutput, request_id: str) -> range:
        start = output.num_computed_tokens[request_id]
        return range(start, start + output.num_scheduled_tokens[request_id])

    # ---- what must hold

    def check_plan(self, output: SchedulerOutput, computed_before: dict[str, int]) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        num_scheduled = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(num_scheduled.values()) <= config.max_num_batched_tokens
        assert all(n > 0 for n in num_scheduled.values())
        assert num_scheduled or not scheduler.requests, "an empty step"
        assert set(num_scheduled) == set(output.num_computed_tokens) == set(output.block_ids)
        running = {r.request_id: r for r in scheduler.running}
        assert set(num_scheduled) <= set(running) and len(running) <= config.max_num_seqs
        assert not set(num_scheduled) & set(output.preempted_req_ids)
        admitted = {*output.scheduled_new_req_ids, *output.scheduled_resumed_req_ids}
        assert not (admitted and output.preempted_req_ids), "admission in a step that preempted"
        assert set(output.num_cached_tokens) == admitted and not set(computed_before) & admitted
        assert all(output.num_cached_tokens[r] <= output.num_computed_tokens[r] for r in admitted)
        owners: dict[int, str] = {}
        for request_id, count in num_scheduled.items():
            request, stop = running[request_id], self.positions(output, request_id).stop
            if request_id in computed_before:
                assert output.num_computed_tokens[request_id] == computed_before[request_id]
            assert request.num_computed_tokens == stop <= request.num_tokens <= config.max_model_len - 1
            assert len(output.block_ids[request_id]) * self.block_size >= stop
            if not config.enable_chunked_prefill:
                assert stop == request.num_tokens
            if config.long_prefill_token_threshold:
                assert count <= config.long_prefill_token_threshold
            for position in self.positions(output, request_id):  # nobody else writes to the same block in this step
                block = output.block_ids[request_id][position // self.block_size]
                assert owners.setdefault(block, request_id) == request_id

    def check_state(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        pool = manager.block_pool
        pool.check()
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        assert {r.request_id for r in running + waiting} == set(scheduler.requests)
        assert len(running) + len(waiting) == len(scheduler.requests) == scheduler.num_unfinished_requests
        assert all(r.status is RequestStatus.RUNNING for r in running)
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)
        assert all(not r.block_ids for r in waiting) and all(not r.host_block_ids for r in running)
        for block in pool.blocks:
            assert block.ref_count == sum(r.block_ids.count(block.block_id) for r in running)
        assert pool.num_free + len({i for r in running for i in r.block_ids}) == pool.num_blocks
        if manager.enable_prefix_caching:  # whatever is full and computed can be found
            for r in running:
                published = [pool.blocks[i].block_hash for i in r.block_ids[: r.num_computed_tokens // self.block_size]]
                assert published == r.block_hashes[: len(published)] and None not in published
        on_host = [i for r in waiting for i in r.host_block_ids]
        assert sorted(on_host + manager.free_host_blocks) == list(range(manager.num_host_blocks))
        if scheduler.config.policy == "fcfs":
            order = [int(r.request_id[1:]) for r in running + waiting]
            assert order == sorted(order), "somebody was overtaken"
        for request in self.added.values():
            if request.is_finished:
                assert not request.block_ids and not request.host_block_ids and request.finished_time is not None
            assert request.output_token_ids == self.right_outputs[request.request_id][: request.num_output_tokens]

    def drain(self, max_steps: int = 50_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "no end"
        pool, manager = self.scheduler.kv_cache_manager.block_pool, self.scheduler.kv_cache_manager
        assert pool.num_free == pool.num_blocks and all(block.ref_count == 0 for block in pool.blocks)
        assert len(manager.free_host_blocks) == manager.num_host_blocks
        self.check_state()
        assert manager.reset_prefix_cache()


def random_lab(random_: random.Random) -> Lab:
    chunked = random_.random() < 0.8
    max_model_len = random_.choice([8, 24, 60])
    swap = random_.random() < 0.4
    block_size = random_.choice([1, 2, 4, 16])
    return Lab(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=random_.choice([1, 2, 4, 16]),
            max_num_batched_tokens=random_.choice([1, 2, 3, 8, 40])
            if chunked
            else max_model_len + random_.choice([0, 30]),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=random_.choice([0, 0, 1, 5]) if chunked else 0,
            policy=random_.choice(["fcfs", "priority"]),
            preemption_mode="swap" if swap else "recompute",
            reserve_full_prompt=random_.random() < 0.3,
        ),
        CacheConfig(
            num_blocks=max(1, round(max_model_len * random_.uniform(0.5, 2.5) / block_size)),
            block_size=block_size,
            enable_prefix_caching=random_.random() < 0.8,
            num_host_blocks=random_.choice([1, 4, 60]) if swap else 0,
        ),
    )


def random_params(random_: random.Random) -> SamplingParams:
    max_tokens = random_.choice([None, 1, 3, 10, 30])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=random_.choice([0, 0, 1, 5]) if max_tokens is None or max_tokens >= 5 else 0,
        ignore_eos=random_.random() < 0.3,
        stop_token_ids=random_.choice([[], [3], [3, 5]]),
        prompt_logprobs=random_.choice([None, None, None, 0]),
    )


def random_prompt(random_: random.Random) -> list[int]:
    """Often a long common prefix, sometimes a continuation of nothing else."""
    shared = [1] * random_.choice([0, 0, 3, 8, 15, 25])
    return shared + [random_.randrange(2) for _ in range(random_.randint(1, 6))]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lab = random_lab(self.random)

    @rule(priority=st.integers(0, 2), salt=st.sampled_from([None, None, "a"]))
    def add(self, priority: int, salt: str | None) -> None:
        prompt, params = random_prompt(self.random), random_params(self.random)
        self.lab.add(prompt, params, priority=priority, cache_salt=salt)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.lab.step()

    @rule()
    def a_step_fails(self) -> None:
        self.lab.step(fail=True)

    @precondition(lambda self: self.lab.added)
    @rule(data=st.data(), status=st.sampled_from([s for s in RequestStatus if s.is_finished]))
    def end_one(self, data, status: RequestStatus) -> None:
        request = self.lab.added[data.draw(st.sampled_from(sorted(self.lab.added)))]
        was_finished = request.is_finished
        ended = self.lab.scheduler.finish_request(request.request_id, status)
        assert ended is (None if was_finished else request)

    @rule()
    def reset(self) -> None:
        idle = not self.lab.scheduler.running
        assert self.lab.scheduler.kv_cache_manager.reset_prefix_cache() == idle

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "lab"):
            self.lab.check_state()

    def teardown(self) -> None:
        if hasattr(self, "lab"):
            self.lab.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def test_ten_thousand_random_operations():
    """Adds, steps, aborts, failures, through many configurations; every invariant after each operation."""
    random_ = random.Random(20)
    operations = preemptions = swapped = hits = 0
    while operations < 10_000:
        lab = random_lab(random_)
        for _ in range(random_.choice([30, 100, 300])):
            operations += 1
            dice = random_.random()
            if dice < 0.25 and len(lab.scheduler.requests) < 20:
                lab.add(random_prompt(random_), random_params(random_), priority=random_.randrange(3))
            elif dice < 0.27 and lab.scheduler.requests:
                lab.scheduler.abort_request(random_.choice(sorted(lab.scheduler.requests)))
            elif dice < 0.275:
                lab.step(fail=True)
            else:
                lab.step()
            lab.check_state()
        lab.drain()
        totals = lab.scheduler.stats.totals
        preemptions += totals.num_preemptions
        swapped += totals.num_swapped_blocks
        hits += totals.prefix_cache_hits
    assert preemptions > 200 and swapped > 50 and hits > 1_000, "the traffic was too tame to mean anything"


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 64])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_any_budget_gives_the_same_outputs(budget, policy):
    config = SchedulerConfig(max_model_len=40, max_num_batched_tokens=budget, max_num_seqs=6, policy=policy)
    lab = Lab(config, CacheConfig(num_blocks=14, block_size=4))
    random_ = random.Random(3)
    for i in range(12):
        lab.add(random_prompt(random_), random_params(random_), priority=i % 3)
    lab.drain()
    assert all(r.finish_reason in ("stop", "length") for r in lab.added.values())


def test_work_is_bounded_however_small_the_pool():
    """A pool for one and a half requests: everything ends, and in a number of steps that thrashing would exceed."""
    for mode, host in (("recompute", 0), ("swap", 12)):
        config = SchedulerConfig(max_model_len=40, max_num_batched_tokens=16, preemption_mode=mode)
        lab = Lab(config, CacheConfig(num_blocks=6, block_size=4, num_host_blocks=host))
        for i in range(10):
            lab.add([i, *range(9)], SamplingParams(max_tokens=10, ignore_eos=True))
        lab.drain(max_steps=150)
        totals = lab.scheduler.stats.totals
        assert totals.num_generated_tokens == 100 and totals.num_preemptions <= 20
