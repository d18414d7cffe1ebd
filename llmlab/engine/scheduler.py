"""The scheduler decides how many tokens each request gets in a step. Nothing else does; no torch here.

One rule, no phases: every request has ``num_tokens`` and ``num_computed_tokens``, and a step lets the second chase the
first within four limits: ``max_num_seqs``, ``max_num_batched_tokens``, ``max_model_len`` and free KV blocks.
A long prompt is so computed in chunks, beside the others' decodes. Follows ``vllm/v1/core/sched/scheduler.py``.
``max_model_len`` needs no care inside a step: ``add_request`` and ``check_stop`` keep every request shorter than it.

Progress is a theorem: while a request is unfinished, ``schedule()`` gives at least one token to one of them. Of two
requests, the one with the better place (earlier, or of better priority) is never preempted for the other; so the best
of all can take every block, and ``add_request`` and ``max_num_tokens`` see to it that all blocks are enough for any one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.kv_cache import KVCacheManager
from llmlab.engine.plan import SchedulerOutput, StepPlan
from llmlab.engine.request import Request, RequestStatus, check_stop
from llmlab.engine.request_queue import FCFSRequestQueue, PriorityRequestQueue
from llmlab.engine.stats import EngineStats, TokenLatencies

RUNNING = RequestStatus.RUNNING


class Scheduler:
    """Holds every unfinished request and plans the steps: ``schedule()``, run it, ``update_from_output()``, again.

    Raises ValueError if requests are to be swapped and there is nowhere to swap to.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if scheduler_config.preemption_mode == "swap" and cache_config.num_host_blocks == 0:
            raise ValueError("preemption_mode='swap' needs host memory: num_host_blocks must be at least 1, got 0")
        self.config = scheduler_config
        self.cache_config = cache_config
        self.kv_cache_manager = KVCacheManager(cache_config)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.clock = clock
        # Prompt + output of one request. The last token is only sampled, never computed, so it needs no slot.
        self.max_num_tokens = min(scheduler_config.max_model_len, cache_config.num_blocks * cache_config.block_size + 1)
        self.requests: dict[str, Request] = {}
        self.waiting = self._new_queue()
        self.running: list[Request] = []
        self.stats = EngineStats()
        self._step = 0
        self._sequence_numbers = itertools.count()
        self._finished_req_ids: list[str] = []

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            ValueError: the id is in use, or the prompt leaves no room for an output token in the context length or in
                the whole KV cache. The scheduler is unchanged then.
        """
        limit, num_prompt_tokens = self.max_num_tokens, request.num_prompt_tokens
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if request.status is not RequestStatus.WAITING or request.num_output_tokens or request.num_computed_tokens:
            raise ValueError(f"{request} was used before; make a new one")
        if num_prompt_tokens >= self.config.max_model_len:
            raise ValueError(
                f"request {request.request_id!r}: its prompt of {num_prompt_tokens} tokens leaves no room for output "
                f"within max_model_len={self.config.max_model_len}"
            )
        if num_prompt_tokens >= limit:
            manager = self.kv_cache_manager
            raise ValueError(
                f"request {request.request_id!r}: its prompt of {num_prompt_tokens} tokens needs "
                f"{manager.num_blocks_for(num_prompt_tokens)} KV blocks of {manager.block_size} tokens; the whole pool "
                f"has {manager.block_pool.num_blocks}"
            )
        request.queue_key = (request.priority, request.arrival_time, next(self._sequence_numbers))
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort_request(self, request_id: str) -> Request | None:
        """End a request at any moment. Returns it, or None (and changes nothing) if there is no such request any more."""
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORTED)

    def finish_request(
        self,
        request_id: str,
        status: RequestStatus,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Request | None:
        """End a request from outside: a stop string was met, or it alone failed. Everything it held is freed.

        Returns the request, or None if it has ended already. Raises ValueError if ``status`` is not a finished one.
        """
        if not status.is_finished:
            raise ValueError(f"a request can't finish as {status.name}")
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request_id)
        request.status, request.stop_reason, request.error = status, stop_reason, error
        self._forget(request)
        return request

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.requests)

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step: running requests first, then, if nobody had to be preempted, waiting ones."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if plan.preempted:
            self.running = [request for request in self.running if request.status is RUNNING]
        else:
            self._schedule_waiting(plan)
        if self.requests and not plan.num_scheduled_tokens:
            raise RuntimeError("nothing to schedule: every step must be followed by update_from_output")
        self._step += 1
        finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
        return SchedulerOutput(
            step=self._step,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - plan.budget,
            num_computed_tokens=plan.num_computed_tokens,
            block_ids=plan.block_ids,
            scheduled_new_req_ids=tuple(plan.new),
            scheduled_resumed_req_ids=tuple(plan.resumed),
            preempted_req_ids=tuple(plan.preempted),
            finished_req_ids=tuple(finished_req_ids),
            num_cached_tokens=plan.num_cached_tokens,
            num_recomputed_tokens=sum(plan.num_recomputed_tokens.values()),
            swap_out=tuple(plan.swap_out),
            swap_in=tuple(plan.swap_in),
        )

    def _schedule_running(self, plan: StepPlan) -> None:
        threshold = self.config.long_prefill_token_threshold
        block_size = self.kv_cache_manager.block_size
        allocate_slots = self.kv_cache_manager.allocate_slots
        num_scheduled, num_computed, block_ids = plan.num_scheduled_tokens, plan.num_computed_tokens, plan.block_ids
        for request in self.running:
            if plan.budget == 0:
                break
            if request.status is not RUNNING:  # preempted a moment ago, for a request before it
                continue
            computed = request.num_computed_tokens
            num_new = len(request.all_token_ids) - computed
            # Nearly every decode: the slot is inside a block that it holds, and does not fill that block.
            if num_new == 1 and 0 < computed % block_size < block_size - 1:
                request_id = request.request_id
                num_scheduled[request_id] = 1
                num_computed[request_id] = computed
                block_ids[request_id] = request.block_ids
                request.num_computed_tokens = computed + 1
                plan.budget -= 1
                continue
            if 0 < threshold < num_new:
                num_new = threshold
            num_new = min(num_new, plan.budget)
            if num_new > 0 and (allocate_slots(request, num_new) or self._make_room(request, num_new, plan)):
                plan.add(request, num_new)

    def _make_room(self, request: Request, num_new_tokens: int, plan: StepPlan) -> bool:
        """Preempt until the request has its slots; False if it has to go itself.

        Then the others go on: in FCFS order there are none behind it, but under the priority policy there may be
        better ones, and the step must not end empty.
        """
        while True:
            victim = self._pick_victim()
            self._preempt(victim, plan)
            if victim is request:
                return False
            if self.kv_cache_manager.allocate_slots(request, num_new_tokens):
                return True

    def _pick_victim(self) -> Request:
        if self.config.policy == "priority":
            return max((r for r in self.running if r.status is RUNNING), key=lambda r: r.queue_key)
        return next(r for r in reversed(self.running) if r.status is RUNNING)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take a running request's blocks away and let it wait, before all others, for a second start."""
        if request.request_id in plan.num_scheduled_tokens:
            plan.take_back(request)
            self.kv_cache_manager.withdraw(request.block_ids, request.num_computed_tokens)
        pairs = self.kv_cache_manager.swap_out(request) if self.config.preemption_mode == "swap" else None
        if pairs is None:  # recompute: the tokens, output included, are prefilled again
            self.kv_cache_manager.free(request)
            self._start_over(request)
        else:
            plan.swap_out += pairs
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.waiting.put_back(request)
        plan.preempted.append(request.request_id)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Admit from the head of the queue until something does not fit; nobody overtakes the head."""
        config, manager = self.config, self.kv_cache_manager
        while self.waiting and plan.budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek()
            hits = manager.get_computed_blocks(request)
            if request.host_block_ids:  # its own copy reaches exactly this far; whole blocks of it may be shared
                hits = hits[: request.num_computed_tokens // manager.block_size]
            num_new = request.num_tokens - max(request.num_computed_tokens, len(hits) * manager.block_size)
            if 0 < config.long_prefill_token_threshold < num_new:
                num_new = config.long_prefill_token_threshold
            if num_new > plan.budget:
                if not config.enable_chunked_prefill:
                    break
                num_new = plan.budget
            num_reserved = request.num_tokens if config.reserve_full_prompt else 0
            if not manager.allocate_slots(request, num_new, hits, num_reserved):
                break
            self._admit(self.waiting.pop(), len(hits), plan)
            plan.add(request, num_new)

    def _admit(self, request: Request, num_hits: int, plan: StepPlan) -> None:
        """The head of the queue has got its blocks: it runs from now on."""
        manager = self.kv_cache_manager
        num_hit_tokens = num_hits * manager.block_size
        if request.host_block_ids:
            plan.swap_in += manager.swap_in(request, num_hits)
        else:
            request.num_computed_tokens = num_hit_tokens
        resumed = request.status is RequestStatus.PREEMPTED
        if not resumed:
            request.num_cached_tokens = num_hit_tokens
            request.first_scheduled_time = self.clock()
        (plan.resumed if resumed else plan.new).append(request.request_id)
        plan.num_cached_tokens[request.request_id] = num_hit_tokens
        looked_up = manager.enable_prefix_caching and not request.skip_reading_prefix_cache
        self.stats.count_admission(request.num_tokens if looked_up else 0, num_hit_tokens, resumed)
        request.status = RUNNING
        self.running.append(request)

    # ---- after the step -------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: Mapping[str, int]
    ) -> list[Request]:
        """Give every request the token sampled for it. Returns the requests that ended with it, their blocks freed.

        Samples of partial prefills, and of requests that ended while the step ran, are discarded, even if a new request
        has taken the id: it has nothing computed yet.
        """
        latencies = TokenLatencies(self.clock())
        num_running, usage = len(self.running), self.kv_cache_manager.usage
        finished: list[Request] = []
        for request_id, token_id in sampled_token_ids.items():
            request = self.requests.get(request_id)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            request.append_output_token_id(token_id)
            latencies.add(request)
            if check_stop(request, self.max_num_tokens, self.eos_token_ids):
                finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is RUNNING]
            for request in finished:
                self._forget(request)
        self.stats.record(scheduler_output, latencies.now, num_running, len(self.waiting), usage, latencies)
        return finished

    def fail_step(self, scheduler_output: SchedulerOutput, error: str) -> list[Request]:
        """The step could not be run: end its requests with an error, and trust nothing that it was to write.

        The engine can go on afterwards: blocks published for this step can't be hit, and requests whose swap-out was
        part of it will recompute. Returns the requests that ended.
        """
        manager, failed = self.kv_cache_manager, []
        resumed = set(scheduler_output.scheduled_resumed_req_ids) if scheduler_output.swap_in else set()
        for request_id, block_ids in scheduler_output.block_ids.items():
            num_trusted = 0 if request_id in resumed else scheduler_output.num_computed_tokens[request_id]
            manager.withdraw(block_ids, num_trusted)
            request = self.finish_request(request_id, RequestStatus.FINISHED_ERROR, error=error)
            if request is not None:
                failed.append(request)
        for request_id in scheduler_output.preempted_req_ids:
            request = self.requests.get(request_id)
            if request is not None and request.host_block_ids:
                manager.free(request)
                self._start_over(request)
        return failed

    def reset(self, error: str) -> list[Request]:
        """Give up every request and all cached content, whatever state they are in.

        For a plan or an update that was cut short (Ctrl-C), after which queues, tables and published hashes may contradict
        each other. Returns the requests, which have ended with an error.
        """
        failed = list(self.requests.values())
        self.kv_cache_manager = KVCacheManager(self.cache_config)
        self.requests, self.running, self.waiting = {}, [], self._new_queue()
        for request in failed:
            request.status, request.error = RequestStatus.FINISHED_ERROR, error
            request.block_ids, request.host_block_ids = [], []
            request.finished_time = self.clock()
            self._finished_req_ids.append(request.request_id)
        return failed

    def _new_queue(self) -> FCFSRequestQueue | PriorityRequestQueue:
        return PriorityRequestQueue() if self.config.policy == "priority" else FCFSRequestQueue()

    def _start_over(self, request: Request) -> None:
        request.num_tokens_to_recompute = max(request.num_tokens_to_recompute, request.num_computed_tokens)
        request.num_computed_tokens = 0

    def _forget(self, request: Request) -> None:
        """What every ending has in common, whatever its reason."""
        self.kv_cache_manager.free(request)
        request.finished_time = self.clock()
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)
        self.stats.count_finished()
