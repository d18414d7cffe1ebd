"""Real steps against the roofline (Williams, Waterman & Patterson 2009, "Roofline: an insightful visual performance model").

Two ways to run a step: through the engine (:func:`record_prefill`, :func:`record_decode`: a request comes in, the scheduler
plans, the ledger watches), and at any shape at once (:class:`StepDriver`: the same model and ops over a KV cache that is filled
beforehand, so that a context of thousands of tokens need not be computed to be measured).

An op is clocked once a step, in its place, and the medians are taken over steps: an op that is run several times in a row finds
its weights in a cache where, in a real step, it would not. On a GPU the ledger waits for the device around every op, so that
the microseconds of a launch are part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmlab.config import CacheConfig
from llmlab.engine.batch import Batch, WantedRows
from llmlab.engine.runner import Runner
from llmlab.measure.cost import (
    GROUPS,
    group_of,
    kv_bytes_per_token,
    least_seconds,
    parameters,
    step_costs,
    total,
)
from llmlab.measure.datasheets import Roof
from llmlab.measure.timer import measure_in_turns
from llmlab.ops.registry import record_ops

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.engine.llm import LLM
    from llmlab.measure.hardware import Ceilings
    from llmlab.model.llama import LlamaForCausalLM
    from llmlab.ops.ledger import Ledger


class StepDriver:
    """Runs steps of any shape on a model, over a paged cache of its own that holds random keys and values.

    Args:
        max_tokens: tokens that the cache has room for, over all requests of a step.
    """

    def __init__(
        self, model: LlamaForCausalLM, dtype: torch.dtype, max_tokens: int, block_size: int = 16, seed: int = 0
    ):
        c = model.config
        self.model, self.dtype, self.block_size = model, dtype, block_size
        self.num_blocks = -(-max_tokens // block_size)
        self.max_model_len = len(model.rotary.cos_sin_cache)
        self.generator = torch.Generator().manual_seed(seed)
        self.runner = Runner(model, CacheConfig(self.num_blocks, block_size), dtype)
        block = torch.randn(1, 2, 1, block_size, c.num_kv_heads, c.head_dim, generator=self.generator)
        block = block.to(
            self.runner.kv_cache.device, dtype
        )  # before it is expanded: else all of it is made on the host
        self.runner.kv_cache.copy_(block.expand_as(self.runner.kv_cache))
        self._by_layer = [(layer[0], layer[1]) for layer in self.runner.kv_cache]

    def batch(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> Batch:
        """A step's input with random tokens, each request's blocks scattered over the cache. ValueError if it does not fit."""
        per_request = [-(-length // self.block_size) for length in seq_lens]
        if sum(per_request) > self.num_blocks:
            raise ValueError(f"{sum(per_request)} blocks are needed, the driver's cache has {self.num_blocks}")
        longest = max(seq_lens)
        if longest > self.max_model_len:
            raise ValueError(f"a sequence of {longest} tokens; the model was made for {self.max_model_len}")
        free = torch.randperm(self.num_blocks, generator=self.generator).to(torch.int32)
        table = torch.zeros(len(seq_lens), max(per_request), dtype=torch.int32)
        for row, blocks in zip(table, free[: sum(per_request)].split(per_request), strict=True):
            row[: len(blocks)] = blocks
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
        rows = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(query_lens))
        slots = table[rows, positions // self.block_size].long() * self.block_size + positions % self.block_size
        vocab_size, device = self.model.config.vocab_size, self.model.ops.device
        depends = self.model.config.rope.length_threshold is not None
        nobody = (False,) * len(seq_lens)
        rope_lengths = torch.tensor(seq_lens)[rows] if depends else None
        move = lambda array: torch.from_numpy(array).to(device)
        return Batch(
            req_ids=tuple(str(r) for r in range(len(seq_lens))),
            input_ids=torch.randint(vocab_size, (int(starts[-1]),), generator=self.generator).to(device),
            positions=positions.to(device),
            query_start_loc=starts.to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            slot_mapping=slots.to(device),
            block_table=table.to(device),
            logits_indices=(starts[1:] - 1).to(device),
            discard=nobody,
            rope_lengths=rope_lengths.to(device) if depends else None,
            wanted=WantedRows.find(
                starts.numpy(), nobody, nobody, positions.numpy(), rope_lengths.numpy() if depends else None, move
            ),
        )

    def run(self, batch: Batch) -> Tensor:
        """Logits ``[num_reqs, vocab_size]`` of one step, as the engine runs it: scheduler and sampler are left out."""
        return self.runner.logits(self.runner.last_tokens(batch, self.runner.forward(batch)))

    def run_eagerly(self, batch: Batch) -> Tensor:
        """The same, op by op even where the engine would play a recorded graph."""
        with torch.inference_mode():
            hidden = self.model.forward(batch, self._by_layer)
        return self.runner.logits(self.runner.last_tokens(batch, hidden))


@dataclass(frozen=True)
class Recording:
    """Some steps of one shape, op by op.

    Attributes:
        ops: one row a call, in order: layer, stage, op, group, flops, bytes, and seconds: median, ``low``, ``high`` over steps.
        steps: how many steps were recorded.
    """

    ops: pd.DataFrame
    steps: int


def record_steps(run: Callable[[], Any], steps: int, prepare: Callable[[], Any] = lambda: None) -> Recording:
    """Record ``run()`` so many times (``prepare()`` before each, unrecorded) and join the ledgers call by call.

    Raises ValueError if two steps did not run the same ops.
    """
    ledgers = []
    for _ in range(steps):
        prepare()
        with record_ops(check=False) as ledger:
            run()
        ledgers.append(ledger)
    return _join(ledgers)


def _join(ledgers: Sequence[Ledger]) -> Recording:
    frames = [ledger.costs() for ledger in ledgers]
    names = ["layer", "stage", "op"]
    first = frames[0]
    for frame in frames[1:]:
        if not frame[names].equals(first[names]):
            raise ValueError("the recorded steps differ in the ops that they ran")
    table = first[names].copy()
    table["group"] = [group_of(stage, op) for stage, op in zip(first["stage"], first["op"], strict=True)]
    for column in ("flops", "bytes"):
        table[column] = np.median([frame[column] for frame in frames], axis=0)
    seconds = np.array([frame["seconds"] for frame in frames])
    table["low"], table["seconds"], table["high"] = np.percentile(seconds, (10, 50, 90), axis=0)
    return Recording(table, len(frames))


def record_prefill(llm: LLM, length: int, steps: int = 5, seed: int = 0) -> Recording:
    """Record the engine's step that computes a prompt of ``length`` random tokens and samples the first token of its answer.

    Raises ValueError if the prompt does not fit one step.
    """
    budget = llm.engine.scheduler.config.max_num_batched_tokens
    if length > budget:
        raise ValueError(f"a prompt of {length} tokens takes several steps of {budget} tokens")
    prompts = np.random.default_rng(seed).integers(llm.config.vocab_size, size=(steps + 1, length)).tolist()
    runs = iter(range(steps + 1))

    def prepare() -> None:
        run = next(runs)
        llm.engine.discard_request(f"prefill-{run - 1}")
        llm.engine.add_request(f"prefill-{run}", prompts[run], _endless(llm))

    prepare()
    llm.engine.step()  # unrecorded: compiles, packs and touches what only the first step has to
    recording = record_steps(llm.engine.step, steps, prepare)
    llm.engine.discard_request(f"prefill-{steps}")
    return recording


def record_decode(llm: LLM, num_reqs: int, context: int, steps: int = 15, seed: int = 0) -> Recording:
    """Record the engine's steps that give ``num_reqs`` requests one token each, at contexts around ``context``.

    The prompts are computed first, unrecorded. Raises ValueError if the context leaves no room for the steps.
    """
    prompt = context - steps // 2 - 2  # one unrecorded decode step comes between the prompt and the first recorded one
    if prompt < 1:
        raise ValueError(f"context must be more than {steps // 2 + 2} for {steps} steps, got {context}")
    rng = np.random.default_rng(seed)
    names = [f"decode-{r}" for r in range(num_reqs)]
    for name in names:
        llm.engine.add_request(name, rng.integers(llm.config.vocab_size, size=prompt).tolist(), _endless(llm))
    waiting = set(names)
    try:
        while waiting:
            waiting -= {output.request_id for output in llm.engine.step()}
        llm.engine.step()
        return record_steps(llm.engine.step, steps)
    finally:
        llm.engine.discard_request(names)


def points(recording: Recording, roof: Roof) -> pd.DataFrame:
    """One row a group of ops: where it stands against the roof.

    Columns: calls, flops, bytes, seconds (``low``, ``high``: sums of the ops' 10th and 90th percentiles), share of the time,
    intensity (FLOP/byte), flops_per_s, bytes_per_s, bound (which side of the ridge), least_seconds (what the roof allows),
    of_roof (least_seconds / seconds; above 1 where the operands come from a faster memory than the roof's).
    """
    ops = recording.ops.assign(
        least_seconds=[roof.seconds(f, b) for f, b in zip(recording.ops["flops"], recording.ops["bytes"], strict=True)]
    )
    table = ops.groupby("group").agg(
        calls=("op", "size"),
        flops=("flops", "sum"),
        bytes=("bytes", "sum"),
        seconds=("seconds", "sum"),
        low=("low", "sum"),
        high=("high", "sum"),
        least_seconds=("least_seconds", "sum"),
    )
    table = table.reindex([group for group in GROUPS if group in table.index])
    table["share"] = table["seconds"] / table["seconds"].sum()
    table["intensity"] = table["flops"] / table["bytes"]
    table["flops_per_s"] = table["flops"] / table["seconds"]
    table["bytes_per_s"] = table["bytes"] / table["seconds"]
    table["bound"] = np.where(table["intensity"] > roof.ridge, "compute", "memory")
    table["of_roof"] = table["least_seconds"] / table["seconds"]
    return table


def utilisation(flops: float, nbytes: float, seconds: float, roof: Roof) -> tuple[float, float]:
    """``(MFU, MBU)``: the share of peak FLOP/s and of peak bandwidth that the necessary work makes use of."""
    return flops / seconds / roof.flops, nbytes / seconds / roof.bandwidth


def working_set(model: LlamaForCausalLM, kv_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a step reads at least once: all weights that it multiplies with, and the keys and values of its tokens."""
    counted = parameters(model.config)
    weights = sum(counted.values()) - (0 if model.config.tie_word_embeddings else counted["embedding"])
    return weights * dtype.itemsize + kv_tokens * kv_bytes_per_token(model.config, dtype)


def roof_for(ceilings: Ceilings, dtype: torch.dtype, nbytes: int) -> Roof:
    """The measured roof of the fastest memory that holds a step's working set: main memory, or a cache that is large enough.

    From one step to the next a model stays in a cache that can hold it; then that cache's bandwidth is the bound.
    """
    return ceilings.roof(dtype, ceilings.level_holding(nbytes))


def sweep_prefill(
    driver: StepDriver, ceilings: Ceilings, lengths: Sequence[int], *, max_seconds: float = 1.0
) -> pd.DataFrame:
    """Whole prompts of several lengths, one at a time. Columns as :func:`sweep_decode`."""
    return _sweep(driver, ceilings, [([length], [length]) for length in lengths], max_seconds)


def sweep_decode(
    driver: StepDriver,
    ceilings: Ceilings,
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    max_seconds: float = 1.0,
) -> pd.DataFrame:
    """One token each for several batch sizes at several contexts; combinations that the driver's cache can't hold are left out.

    One row a shape: num_reqs, query_len and context (of the longest query), flops, bytes, seconds (median, ``low``, ``high``)
    as the engine runs the step, eager_seconds if it is run op by op (the same where the engine has no graph for it),
    least_seconds (sum of the ops' bounds), tokens_per_s, mfu, mbu, level (the memory whose roof was used); and, from steps
    that were recorded in turns with those, seconds, FLOPs and bytes of "linear", "attention" and "other" ops, and
    ``outside_seconds``, the time of an eager step that was spent in no op.
    """
    shapes = [([1] * b, [context] * b) for context in contexts for b in batches if _fits(driver, b, context)]
    return _sweep(driver, ceilings, shapes, max_seconds)


def sweep_mixed(
    driver: StepDriver,
    ceilings: Ceilings,
    num_decodes: int,
    context: int,
    chunks: Sequence[int],
    *,
    max_seconds: float = 1.0,
) -> pd.DataFrame:
    """Decodes at one context, and beside them the first tokens of a prompt: one row a size of that chunk (0: none).

    Columns as :func:`sweep_decode`, and chunk.
    """
    shapes = []
    for chunk in chunks:
        beside = [chunk] if chunk else []
        shapes.append(([1] * num_decodes + beside, [context] * num_decodes + beside))
    return _sweep(driver, ceilings, shapes, max_seconds).assign(chunk=list(chunks))


def _fits(driver: StepDriver, num_reqs: int, context: int) -> bool:
    fits = num_reqs * -(-context // driver.block_size) <= driver.num_blocks
    return fits and context <= driver.max_model_len


def _sweep(
    driver: StepDriver, ceilings: Ceilings, shapes: Sequence[tuple[list[int], list[int]]], max_seconds: float
) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([_one_shape(driver, ceilings, *shape, max_seconds) for shape in shapes])


def _one_shape(
    driver: StepDriver,
    ceilings: Ceilings,
    query_lens: list[int],
    seq_lens: list[int],
    max_seconds: float,
) -> dict[str, Any]:
    config, dtype = driver.model.config, driver.dtype
    costs = step_costs(config, query_lens, seq_lens, dtype=dtype, block_size=driver.block_size, trim_last_layer=True)
    batch = driver.batch(query_lens, seq_lens)
    longest = query_lens.index(max(query_lens))
    ledgers: list[Ledger] = []

    def recorded() -> None:
        with record_ops(check=False) as ledger:
            driver.run(batch)
        ledgers.append(ledger)

    clocked = measure_in_turns(
        {"engine": lambda: driver.run(batch), "eager": lambda: driver.run_eagerly(batch), "by op": recorded},
        device=driver.model.ops.device,
        warmup=2,  # the engine records a shape when it first meets it
        repeats=15,
        max_seconds=max_seconds,
    )
    measured = clocked["engine"]
    nbytes = working_set(driver.model, sum(seq_lens), dtype)
    roof = roof_for(ceilings, dtype, nbytes)
    flops, moved = total(costs)
    mfu, mbu = utilisation(flops, moved, measured.median, roof)
    return {
        "num_reqs": len(query_lens),
        "query_len": query_lens[longest],
        "context": seq_lens[longest],
        "flops": flops,
        "bytes": moved,
        "seconds": measured.median,
        "low": measured.low,
        "high": measured.high,
        "repeats": measured.repeats,
        "eager_seconds": clocked["eager"].median,
        "least_seconds": least_seconds(costs, roof),
        "tokens_per_s": sum(query_lens) / measured.median,
        "mfu": mfu,
        "mbu": mbu,
        "level": ceilings.level_holding(nbytes),
        **_by_kind(_join(ledgers[2:]), clocked["eager"].median),  # without the warm-up
    }


def _by_kind(recording: Recording, step_seconds: float) -> dict[str, float]:
    kind = recording.ops["group"].map({"attention": "attention", "rest": "other", "sampling": "other"}).fillna("linear")
    sums = recording.ops.groupby(kind)[["seconds", "flops", "bytes"]].sum()
    row = {
        f"{name}_{column}": float(sums.loc[name, column])
        for name in ("linear", "attention", "other")
        for column in ("seconds", "flops", "bytes")
    }
    return row | {"outside_seconds": step_seconds - float(sums["seconds"].sum())}


def _endless(llm: LLM) -> Any:
    from llmlab.sampling.params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
