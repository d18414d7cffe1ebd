"""What if: the real scheduler, driven by the cost model's clock instead of a device.

The scheduler is :class:`llmlab.engine.scheduler.Scheduler` itself, so its decisions are the engine's, token for token; only
time is computed instead of spent, and the sampled ids are dummies. :func:`run` is the loop, for any clock; :func:`simulate`
builds its parts from names: a model, a GPU, a parallel plan, a workload. 100,000 requests take about a minute.

Not modelled: other work on the device, kernels' tile effects, network and tokenizer, anything that overlaps with anything else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmlab.config import CacheConfig, ModelConfig, SchedulerConfig
from llmlab.engine.plan import SchedulerOutput
from llmlab.engine.request import Request
from llmlab.engine.scheduler import Scheduler
from llmlab.engine.sizing import choose_dtype
from llmlab.measure.clock import Clock, RooflineClock
from llmlab.measure.cost import kv_bytes_per_token
from llmlab.measure.efficiency import Efficiency
from llmlab.measure.known_models import known_config
from llmlab.measure.plan import Hardware, datasheet_hardware, kv_blocks, shard_config
from llmlab.measure.serving import Log, ServingRun, merge
from llmlab.sampling.params import SamplingParams
from llmlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

_last_token_time = attrgetter("last_token_time")
DUMMY_TOKEN = 0


def run(
    workload: Workload,
    clock: Clock,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    *,
    seconds_per_swapped_block: float = 0.0,
    on_finished: Callable[[int], Any] = lambda count: None,
    on_step: Callable[[SchedulerOutput], Any] = lambda output: None,
) -> ServingRun:
    """Schedule the whole workload, one step after the other, until the last request has its last token.

    Args:
        on_finished: told how many requests a step has finished, for progress bars.
        on_step: told every plan of the scheduler.

    Raises:
        ValueError: a request that could not get all of its tokens: too long for ``max_model_len`` or for all KV blocks.
    """
    _check_lengths(workload, scheduler_config, cache_config)
    now = 0.0
    scheduler = Scheduler(scheduler_config, cache_config, clock=lambda: now)
    log = Log(workload)
    arrivals = workload.arrivals
    # In FCFS order nobody looks past the requests that one step could admit, so the rest can wait outside, unmade.
    held_back = scheduler_config.max_num_seqs if scheduler_config.policy == "fcfs" else len(workload)
    params = {n: SamplingParams(max_tokens=n, ignore_eos=True) for n in np.unique(workload.output_lens).tolist()}
    num_added, in_prefill = 0, False

    while num_added < len(workload) or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, float(arrivals[num_added]))  # nothing to do until the next one arrives
        num_arrived = int(np.searchsorted(arrivals, now, side="right"))
        while num_added < num_arrived and len(scheduler.waiting) < held_back:
            scheduler.add_request(_request(workload, num_added, params))
            num_added += 1

        output = scheduler.schedule()
        on_step(output)
        scheduled, requests = output.num_scheduled_tokens, scheduler.requests
        query_lens = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        seq_lens = query_lens + np.fromiter(output.num_computed_tokens.values(), np.int64, len(scheduled))
        getting = list(map(requests.__getitem__, scheduled))
        sampled = np.ones(len(scheduled), bool)
        if in_prefill or output.scheduled_new_req_ids or output.scheduled_resumed_req_ids:  # else all of them decode
            sampled = np.array([r.num_computed_tokens >= len(r.all_token_ids) for r in getting])
            getting = list(itertools.compress(getting, sampled))
            in_prefill = len(getting) < len(scheduled)
        last_times = Counter(map(_last_token_time, getting))

        seconds = clock.seconds(query_lens, seq_lens, sampled)
        seconds += seconds_per_swapped_block * (len(output.swap_out) + len(output.swap_in))
        now += seconds
        num_running, usage = len(scheduler.running), scheduler.kv_cache_manager.usage
        num_waiting = len(scheduler.waiting) + num_arrived - num_added
        finished = scheduler.update_from_output(output, dict.fromkeys((r.request_id for r in getting), DUMMY_TOKEN))
        log.step(now, seconds, output, num_running, num_waiting, usage, last_times)
        for request in finished:
            log.finish(request)
        if finished:
            on_finished(len(finished))
    return log.close()


def simulate(
    model: str | ModelConfig,
    hardware: str | Hardware,
    workload: Workload,
    *,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    efficiency: Efficiency | None = None,
    clock: Clock | None = None,
    dtype: str | torch.dtype = "auto",
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    memory_share: float = 0.9,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    long_prefill_token_threshold: int = 0,
    scheduling_policy: str = "fcfs",
    preemption_mode: str = "recompute",
    num_host_blocks: int | None = None,
    reserve_full_prompt: bool = False,
    on_finished: Callable[[int], Any] = lambda count: None,
) -> ServingRun:
    """Simulate a model on hardware that need not be there. Names and meanings as in :class:`llmlab.LLM`.

    Args:
        model: a known name ("llama-3-8b"), a directory or hub id as ``LLM`` takes it, or a config.
        hardware: the beginning of a GPU's name ("h200"), or a :class:`Hardware`, for instance this machine's.
        tensor_parallel_size: devices that share every layer. data_parallel_size: copies of that, fed in turn.
        efficiency: which shares of the hardware's roof are assumed to be reached; None for :class:`Efficiency`'s defaults.
        clock: one to use instead of the cost model's (then ``hardware`` only counts for its memory).
        num_kv_blocks: blocks of each copy's KV cache; None for what fits in ``memory_share`` of the memory.

    Raises:
        ValueError: an unknown name, a model that does not fit, degrees that do not divide it, options that contradict each other,
            or a request that could never get all of its tokens.
    """
    config = model if isinstance(model, ModelConfig) else model_config(model)
    efficiency = efficiency or Efficiency()
    torch_dtype = choose_dtype(config.dtype if dtype == "auto" else dtype)
    device = datasheet_hardware(hardware, torch_dtype) if isinstance(hardware, str) else hardware
    if isinstance(data_parallel_size, bool) or not isinstance(data_parallel_size, int) or data_parallel_size < 1:
        raise ValueError(f"data_parallel_size must be an integer of at least 1, got {data_parallel_size!r}")
    scheduler_config = SchedulerConfig(
        max_model_len=config.max_position_embeddings if max_model_len is None else max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=long_prefill_token_threshold,
        policy=scheduling_policy,  # type: ignore[arg-type]
        preemption_mode=preemption_mode,  # type: ignore[arg-type]
        reserve_full_prompt=reserve_full_prompt,
    )
    fitting = kv_blocks(
        config,
        device,
        tensor_parallel_size=tensor_parallel_size,
        dtype=torch_dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        memory_share=memory_share,
    )
    if num_kv_blocks is None:
        num_kv_blocks = fitting
    elif num_kv_blocks > fitting:
        raise ValueError(f"num_kv_blocks={num_kv_blocks} of {block_size} tokens do not fit {device.name}: {fitting} do")
    swaps = preemption_mode == "swap"
    host_blocks = num_kv_blocks if num_host_blocks is None else num_host_blocks
    cache_config = CacheConfig(num_kv_blocks, block_size, enable_prefix_caching, host_blocks if swaps else 0)
    if clock is None:
        clock = RooflineClock(
            config,
            device,
            efficiency,
            tensor_parallel_size=tensor_parallel_size,
            dtype=torch_dtype,
            block_size=block_size,
        )
    seconds_per_block = 0.0
    if swaps:
        if not device.host_bandwidth:
            raise ValueError(f"preemption_mode='swap': no bandwidth to host memory is known for {device.name}")
        block_bytes = block_size * kv_bytes_per_token(shard_config(config, tensor_parallel_size), torch_dtype)
        seconds_per_block = block_bytes / (device.host_bandwidth * efficiency.link)
    copies = [workload]
    if data_parallel_size > 1:
        if data_parallel_size > len(workload):
            raise ValueError(f"data_parallel_size={data_parallel_size}, but there are only {len(workload)} requests")
        copies = [workload.part(slice(rank, None, data_parallel_size)) for rank in range(data_parallel_size)]
    options = {"seconds_per_swapped_block": seconds_per_block, "on_finished": on_finished}
    return merge([run(part, clock, scheduler_config, cache_config, **options) for part in copies])


def sweep(axes: Mapping[str, list[Any]], **fixed: Any) -> pd.DataFrame:
    """Simulate every combination of the arguments in ``axes``: a DataFrame, one row each, the axes and the summary's figures.

    A combination that does not fit has its reason in the column ``error`` and no figures.

        sweep({"max_num_batched_tokens": [256, 2048]}, model="llama-3-8b", hardware="h200", workload=workload)
    """
    import pandas as pd

    rows = []
    for values in itertools.product(*axes.values()):
        arguments = dict(zip(axes, values, strict=True))
        try:
            figures = simulate(**fixed, **arguments).summary()
        except ValueError as error:
            figures = {"error": str(error)}
        named = {name: getattr(value, "name", value) for name, value in arguments.items()}
        rows.append(named | figures)
    return pd.DataFrame(rows)


def model_config(name: str) -> ModelConfig:
    """The config of a known model, or of one that :func:`llmlab.hub.resolve_model` finds; no weights are read."""
    from llmlab.hub import resolve_model

    try:
        return known_config(name)
    except ValueError as unknown:
        try:
            return ModelConfig.from_pretrained(resolve_model(name))
        except ValueError as error:
            raise ValueError(f"{error}; without weights: {unknown}") from None


def _request(workload: Workload, i: int, params: Mapping[int, SamplingParams]) -> Request:
    return Request(
        str(i),
        workload.prompt_token_ids(i),
        params[int(workload.output_lens[i])],
        arrival_time=float(workload.arrivals[i]),
        priority=int(workload.priorities[i]),
    )


def _check_lengths(workload: Workload, scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    needed = workload.prompt_lens + workload.output_lens
    i = int(needed.argmax())
    request = f"request {i} has {workload.prompt_lens[i]} prompt and {workload.output_lens[i]} output tokens"
    if needed[i] > scheduler.max_model_len:
        raise ValueError(f"{request}, more than max_model_len={scheduler.max_model_len}")
    slots = cache.num_blocks * cache.block_size
    if needed[i] - 1 > slots:  # the last token is sampled, never computed
        raise ValueError(f"{request}, more than the KV cache's {cache.num_blocks} blocks of {cache.block_size} hold")
