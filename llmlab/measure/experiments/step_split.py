"""Where a decode step's time goes: the model, and what stands around it (scheduler, batch, sampler, detokenizer, outputs).

A stopwatch around each part of the engine's own step; nothing is run that a plain step would not run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from llmlab.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llmlab.engine.engine import LLMEngine
    from llmlab.engine.llm import LLM

MODEL_PARTS = ("forward", "logits")
PARTS = (*MODEL_PARTS, "sample", "schedule", "batch", "detokenize", "update", "output")
WARM_UP = 4
"""Steps that do not count: the first of a size is the one that is recorded."""


def step_split(
    llm: LLM,
    sizes: Sequence[int] = (1, 8, 32),
    *,
    steps: int = 24,
    prompt_len: int = 128,
    params: SamplingParams | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Median seconds of each part of a decode step, and its share of the step.

    Args:
        sizes: numbers of sequences. steps: that count, after a few to warm up. prompt_len: tokens of each random prompt.
        params: how tokens are chosen; None for greedy.

    Returns:
        Columns num_reqs, part (see :data:`PARTS`), seconds, share (of the sum of the parts).
    """
    # The first to be admitted get some tokens more than the last.
    params = replace(params or SamplingParams(temperature=0.0), max_tokens=2 * (steps + WARM_UP) + 16, ignore_eos=True)
    rng = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        prompts = rng.integers(0, llm.config.vocab_size, (size, prompt_len)).tolist()
        seconds = _decode(llm, prompts, params, steps)
        whole = sum(seconds.values())
        rows += [{"num_reqs": size, "part": p, "seconds": seconds[p], "share": seconds[p] / whole} for p in PARTS]
    return pd.DataFrame(rows)


def _decode(llm: LLM, prompts: list[list[int]], params: SamplingParams, steps: int) -> dict[str, float]:
    engine = llm.engine
    names = [f"step-split-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    try:
        started: set[str] = set()
        while len(started) < len(names):
            started |= {output.request_id for output in engine.step()}
        for _ in range(WARM_UP):
            engine.step()
        samples: dict[str, list[float]] = {part: [] for part in PARTS}
        with _stopwatch(engine) as clock:
            for _ in range(steps):
                clock.clear()
                begin = time.perf_counter()
                engine.step()
                whole = time.perf_counter() - begin
                clock["batch"] = clock.pop("execute") - clock["forward"]
                clock["output"] = whole - sum(clock.values())
                for part in PARTS:
                    samples[part].append(clock[part])
        return {part: float(np.median(seconds)) for part, seconds in samples.items()}
    finally:
        engine.discard_request(names)
        while engine.has_unfinished_requests():
            engine.step()


@contextmanager
def _stopwatch(engine: LLMEngine) -> Iterator[dict[str, float]]:
    """Seconds by part, added up from call to call, while the block runs."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - begin

        return call

    watched = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.runner, "execute", "execute"),
        (engine.runner, "forward", "forward"),
        (engine.runner, "logits", "logits"),
        (engine.scheduler, "update_from_output", "update"),
        (engine, "_detokenize", "detokenize"),
    ]
    sampler = engine.sampler
    try:
        for owner, method, part in watched:
            setattr(owner, method, timed(part, getattr(owner, method)))
        engine.sampler = timed("sample", sampler)  # a step does nothing with it but call it
        yield seconds
    finally:
        engine.sampler = sampler
        for owner, method, _ in watched:
            delattr(owner, method)  # the class's own is seen again


def outside_the_model(table: pd.DataFrame) -> dict[int, float]:
    """The share of everything but the model (forward pass and LM head), by number of sequences."""
    rest = table[~table["part"].isin(MODEL_PARTS)]
    return {int(size): float(share) for size, share in rest.groupby("num_reqs")["share"].sum().items()}
