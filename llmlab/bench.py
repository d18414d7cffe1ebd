"""``llmlab bench``: throughput on the standard workloads, beside peers, in turns within one run.

Absolute figures hold for one machine on one day; what carries over is the ratio of two engines that took turns. Every
repeat draws new random token ids, decoding is greedy and EOS is ignored, so that all engines do the same work.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    import pandas as pd

PROMPT_LEN, OUTPUT_LEN = 128, 128


class Engine(Protocol):
    """An engine under test: complete every prompt with exactly so many tokens, at most ``max_num_seqs`` at once."""

    name: str

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None: ...


@dataclass(frozen=True)
class Workload:
    """A named job: ``tokens_per_second`` runs it once, with the token ids that the generator draws."""

    name: str
    measures: str
    tokens_per_second: Callable[[Engine, np.random.Generator, int], float]


def _ids(rng: np.random.Generator, vocab_size: int, length: int) -> list[int]:
    return rng.integers(0, vocab_size, length).tolist()


def _seconds(engine: Engine, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> float:
    start = time.perf_counter()
    engine.complete(prompts, output_lens, max_num_seqs)
    return time.perf_counter() - start


def _prefill(length: int) -> Workload:
    def run(engine: Engine, rng: np.random.Generator, vocab_size: int) -> float:
        return length / _seconds(engine, [_ids(rng, vocab_size, length)], [1], 1)

    return Workload(f"prefill{length}", f"prompt tokens/s, one prompt of {length}, one output token", run)


def _decode(batch: int) -> Workload:
    def run(engine: Engine, rng: np.random.Generator, vocab_size: int) -> float:
        prompts = lambda: [_ids(rng, vocab_size, PROMPT_LEN) for _ in range(batch)]
        first = _seconds(engine, prompts(), [1] * batch, batch)
        whole = _seconds(engine, prompts(), [OUTPUT_LEN] * batch, batch)
        return batch * (OUTPUT_LEN - 1) / max(whole - first, 1e-9)

    return Workload(f"decode{batch}", f"output tokens/s of {batch} sequences at once, prefill subtracted", run)


def mixed_lengths() -> tuple[list[int], list[int]]:
    """Prompt and output lengths of the mixed workload: 32 requests, 4,560 prompt and 2,277 output tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(16, 257, 32).tolist(), rng.integers(16, 129, 32).tolist()


def _mixed(engine: Engine, rng: np.random.Generator, vocab_size: int) -> float:
    prompt_lens, output_lens = mixed_lengths()
    prompts = [_ids(rng, vocab_size, length) for length in prompt_lens]
    return sum(output_lens) / _seconds(engine, prompts, output_lens, 16)


WORKLOADS = [
    _prefill(512),
    _prefill(2048),
    _decode(1),
    _decode(8),
    _decode(32),
    Workload("mixed", "output tokens/s, 32 requests of mixed lengths, at most 16 at once", _mixed),
]


class Llmlab:
    """This project's engine."""

    name = "llmlab"

    def __init__(self, model: str, device: str, backend: str, dtype: str):
        from llmlab import LLM

        self.llm = LLM(model, device=device, backend=backend, dtype=dtype, enable_prefix_caching=False)
        self._request_ids = itertools.count()
        self.vocab_size = self.llm.config.vocab_size

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        from llmlab import SamplingParams

        engine = self.llm.engine
        jobs = iter(zip(prompts, output_lens, strict=True))
        running = 0
        while True:
            for prompt, tokens in itertools.islice(jobs, max_num_seqs - running):
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                engine.add_request(str(next(self._request_ids)), prompt, params)
                running += 1
            if not running:
                return
            running -= sum(output.finished for output in engine.step())


class HuggingFace:
    """transformers' ``generate``: static batches, padded on the left, each as long as its longest output."""

    name = "hf"

    def __init__(self, model: str, device: str, backend: str, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM

        from llmlab.hub import resolve_model

        torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch_dtype).eval()
        if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
            self.model.cuda()

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        import torch

        for begin in range(0, len(prompts), max_num_seqs):
            chunk = prompts[begin : begin + max_num_seqs]
            longest = max(map(len, chunk))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in chunk], device=self.model.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in chunk], device=self.model.device)
            tokens = max(output_lens[begin : begin + max_num_seqs])
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=False,
                    pad_token_id=0,
                )


class VLLM:
    """vLLM's offline engine, where it is installed."""

    name = "vllm"

    def __init__(self, model: str, device: str, backend: str, dtype: str):
        from vllm import LLM

        from llmlab.hub import resolve_model

        self.llm = LLM(str(resolve_model(model)), dtype=dtype, enable_prefix_caching=False, max_num_seqs=32)

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
        self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


PEERS = {"hf": (HuggingFace, "transformers"), "vllm": (VLLM, "vllm")}


def run_bench(
    model: str,
    device: str = "auto",
    backend: str = "auto",
    dtype: str = "auto",
    against: list[str] | None = None,
    workloads: list[str] | None = None,
    repeats: int = 3,
) -> pd.DataFrame:
    """One row a workload and engine: median tokens/s, lowest and highest, and the ratio to llmlab within each turn.

    Raises:
        ValueError: an unknown workload or peer, a peer that is not installed, or no repeats.
    """
    import pandas as pd

    chosen = _choose("workload", workloads, {w.name: w for w in WORKLOADS})
    peers = [_choose("peer", [name], PEERS)[0] for name in against or []]
    for _, package in peers:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"peer needs the package {package}, which is not installed")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    ours = Llmlab(model, device, backend, dtype)
    engines: list[Engine] = [ours, *(peer(model, device, backend, dtype) for peer, _ in peers)]
    rng = np.random.default_rng()
    speeds: dict[tuple[str, str], list[float]] = {}
    turns = list(_turns(chosen, engines, repeats))
    for workload, engine, repeat in tqdm(turns, desc="Turns", dynamic_ncols=True):
        gc.collect()
        speed = workload.tokens_per_second(engine, rng, ours.vocab_size)
        if repeat >= 0:
            speeds.setdefault((workload.name, engine.name), []).append(speed)
    rows = []
    for workload in chosen:
        base = speeds[workload.name, ours.name]
        for engine in engines:
            values = speeds[workload.name, engine.name]
            ratios = [a / b for a, b in zip(base, values, strict=True)]
            rows.append(
                {
                    "workload": workload.name,
                    "engine": engine.name,
                    "tokens_per_s": round(statistics.median(values), 1),
                    "lowest": round(min(values), 1),
                    "highest": round(max(values), 1),
                    "llmlab_is_x_times": round(statistics.median(ratios), 2),
                }
            )
    return pd.DataFrame(rows)


def _turns(workloads: list[Workload], engines: list[Engine], repeats: int) -> Iterator[tuple[Workload, Engine, int]]:
    """Engines take turns within each repeat; repeat −1 warms up and is not counted."""
    for workload in workloads:
        for repeat in range(-1, repeats):
            for engine in engines:
                yield workload, engine, repeat


def _choose(what: str, names: list[str] | None, known: dict) -> list:
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
