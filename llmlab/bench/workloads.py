"""The standard workloads, and the least time that each can take on a machine.

Every repeat draws new random token ids, decoding is greedy and EOS is ignored, so that all engines do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llmlab.config import ModelConfig
    from llmlab.measure.datasheets import Roof

PROMPT_LEN, OUTPUT_LEN = 128, 128
MIXED_AT_ONCE = 16


@dataclass(frozen=True)
class Job:
    """Prompts to complete, request ``r`` with exactly ``output_lens[r]`` tokens, at most ``max_num_seqs`` at once."""

    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    max_num_seqs: int

    def prompts(self, rng: np.random.Generator, vocab_size: int) -> list[list[int]]:
        """Random token ids of these lengths."""
        return [rng.integers(0, vocab_size, length).tolist() for length in self.prompt_lens]


@dataclass(frozen=True)
class Workload:
    """A named job.

    Attributes:
        measures: what the tokens/s are, in words.
        tokens: number of tokens that count.
        job: what is clocked. less: a job whose time is taken off it (the prefill of a decode workload).
        steps: ``(query_lens, seq_lens)`` of each step that an ideal engine would need for what is counted.
    """

    name: str
    measures: str
    tokens: int
    job: Job
    less: Job | None
    steps: Callable[[], Iterator[tuple[list[int], list[int]]]]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(p + o for p, o in zip(self.job.prompt_lens, self.job.output_lens, strict=True))

    def tokens_per_second(self, complete: Callable[[Job], float]) -> float:
        """``complete`` does a job and returns its seconds."""
        before = complete(self.less) if self.less else 0.0
        return self.tokens / max(complete(self.job) - before, 1e-9)

    def most_tokens_per_second(self, config: ModelConfig, roof: Roof) -> float:
        """What the roof allows: every step in the least time that its FLOPs and bytes need."""
        from llmlab.measure.cost import least_seconds, step_costs

        dtype, stored = _torch_dtype(roof.dtype), _torch_dtype(config.dtype)
        # What is only computed in float32 need not be held as such.
        weights = min(dtype, stored, key=lambda one: one.itemsize)
        costs = (step_costs(config, *step, dtype=dtype, weight_dtype=weights) for step in self.steps())
        return self.tokens / sum(least_seconds(one, roof) for one in costs)


def _prefill(length: int) -> Workload:
    steps = lambda: iter([([length], [length])])
    words = f"prompt tokens/s, one prompt of {length}, one output token"
    return Workload(f"prefill{length}", words, length, Job((length,), (1,), 1), None, steps)


def _decode(batch: int) -> Workload:
    job = lambda tokens: Job((PROMPT_LEN,) * batch, (tokens,) * batch, batch)

    def steps() -> Iterator[tuple[list[int], list[int]]]:
        for length in range(PROMPT_LEN + 1, PROMPT_LEN + OUTPUT_LEN):
            yield [1] * batch, [length] * batch

    words = f"output tokens/s of {batch} sequence{'s' * (batch > 1)} at once, prefill subtracted"
    return Workload(f"decode{batch}", words, batch * (OUTPUT_LEN - 1), job(OUTPUT_LEN), job(1), steps)


def mixed_lengths() -> tuple[list[int], list[int]]:
    """Prompt and output lengths of the mixed workload: 32 requests, 4,560 prompt and 2,277 output tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(16, 257, 32).tolist(), rng.integers(16, 129, 32).tolist()


def _mixed() -> Workload:
    prompt_lens, output_lens = mixed_lengths()

    def steps() -> Iterator[tuple[list[int], list[int]]]:
        """Token by token: each running request gets one, whoever is admitted its whole prompt, in the same step."""
        waiting = list(zip(prompt_lens, output_lens))[::-1]
        running: list[list[int]] = []  # tokens computed, tokens to come
        while waiting or running:
            query = [1] * len(running)
            while waiting and len(running) < MIXED_AT_ONCE:
                prompt, output = waiting.pop()
                running.append([prompt - 1, output])
                query.append(prompt)
            for request in running:
                request[0] += 1
                request[1] -= 1
            yield query, [request[0] for request in running]
            running = [request for request in running if request[1]]

    words = f"output tokens/s, 32 requests of mixed lengths, at most {MIXED_AT_ONCE} at once"
    job = Job(tuple(prompt_lens), tuple(output_lens), MIXED_AT_ONCE)
    return Workload("mixed", words, sum(output_lens), job, None, steps)


WORKLOADS = (_prefill(512), _prefill(2048), _decode(1), _decode(8), _decode(32), _mixed())


def _torch_dtype(name: str):  # type: ignore[no-untyped-def]
    import torch

    return getattr(torch, name)
