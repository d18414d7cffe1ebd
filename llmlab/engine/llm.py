"""``LLM``: vLLM's offline class. A vLLM script runs here by changing its import line."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmlab import ops
from llmlab.config import CacheConfig, ModelConfig, SchedulerConfig
from llmlab.engine.engine import LLMEngine, Prompt
from llmlab.engine.outputs import RequestOutput
from llmlab.engine.runner import Runner
from llmlab.engine.scheduler import Scheduler
from llmlab.engine.sizing import choose_device, choose_dtype, choose_max_model_len, choose_num_kv_blocks
from llmlab.hub import resolve_model
from llmlab.model.llama import LlamaForCausalLM
from llmlab.model.weights import load_weights
from llmlab.sampling.params import SamplingParams
from llmlab.sampling.sampler import Sampler
from llmlab.tokenizer import NoTokenizer, Tokenizer, has_tokenizer

if TYPE_CHECKING:
    from llmlab.sampling.processors import LogitsProcessor


class LLM:
    """A model, its tokenizer and an engine, for offline use.

    Args:
        model: a local Hugging Face directory, a name that ``llmlab fetch`` knows, or a hub id.
        tokenizer: a directory or a tokenizer object; None for the model's own.
        dtype: "auto" (as stored), "float32", "float16" or "bfloat16"; weights and KV cache.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:0" …
        backend: "torch" (on a CPU: the fast twins), "triton" (on a CPU: interpreted, for correctness), "reference" (plain
            torch everywhere); "auto" is Triton on a GPU and torch on a CPU.
        seed: from which the seeds of requests without one are derived: the same script gives the same outputs each time it
            is started; None for fresh entropy.
        block_size: tokens in a KV block.
        num_kv_blocks, kv_cache_memory_bytes: size of the KV cache, as one or the other; None for what the longest allowed
            batch could use, within a quarter of the free memory (nine tenths on a GPU).
        max_model_len: longest sequence, prompt and output together; None for the model's own.
        max_num_seqs, max_num_batched_tokens: limits of one step.
        long_prefill_token_threshold: longest prefill chunk in one step; 0 for no limit but the token budget.
        scheduling_policy: "fcfs" or "priority". preemption_mode: "recompute" or "swap" (to ``num_host_blocks`` host blocks,
            as many as the device has by default).
        reserve_full_prompt: admit a request only when blocks for its whole prompt are free.
        logprobs_mode: "raw_logprobs" (the model's own) or "processed_logprobs" (of what is sampled from).
        logits_processors: custom ones (:class:`llmlab.sampling.processors.LogitsProcessor`), applied in order.
        tensor_parallel_size: only 1 so far.
        enforce_eager: run every step op by op, none from a recorded graph (see :mod:`llmlab.engine.step_graphs`).
        quantization: "int8" for the projections' weights as 8-bit integers with a scale an output feature, made when they
            are loaded (half the bytes to read, slightly other logits); None for weights as they are. Not for Triton.

    Raises:
        FileNotFoundError: the model, or a file of it, does not exist.
        ValueError: an argument is out of its limits, or the model needs what is not implemented.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        backend: str = "auto",
        seed: int | None = 0,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        preemption_mode: str = "recompute",
        num_host_blocks: int | None = None,
        reserve_full_prompt: bool = False,
        logprobs_mode: str = "raw_logprobs",
        logits_processors: Sequence[LogitsProcessor] = (),
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        quantization: str | None = None,
    ):
        if tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size must be 1, got {tensor_parallel_size}: more is not implemented yet")
        if not isinstance(model, (str, Path)):
            raise ValueError(f"model must be a path or a name, got {type(model).__name__}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be an integer or None, got {seed!r}")
        path = resolve_model(model)
        config = ModelConfig.from_pretrained(path)
        torch_device = choose_device(device)
        torch_dtype = choose_dtype(config.dtype if dtype == "auto" else dtype)
        if backend == "auto":
            backend = "triton" if torch_device.type == "cuda" else "torch"
        max_model_len = choose_max_model_len(config, max_model_len)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 2048 if enable_chunked_prefill else max(2048, max_model_len)
        scheduler_config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=scheduling_policy,
            preemption_mode=preemption_mode,
            reserve_full_prompt=reserve_full_prompt,
        )
        self.tokenizer = _tokenizer(path, tokenizer)
        bound = ops.bind(backend, torch_device)
        weights = load_weights(path, config, torch_dtype, torch_device, bound.linear_packer(quantization))
        self.model = LlamaForCausalLM(config, weights, bound, max_model_len)
        num_blocks = choose_num_kv_blocks(
            config,
            torch_dtype,
            torch_device,
            block_size,
            num_kv_blocks,
            kv_cache_memory_bytes,
            max_num_seqs,
            max_model_len,
        )
        if num_host_blocks is None:
            num_host_blocks = num_blocks if preemption_mode == "swap" else 0
        cache_config = CacheConfig(num_blocks, block_size, enable_prefix_caching, num_host_blocks)
        eos_token_ids = frozenset(self.tokenizer.eos_token_ids)
        self.config = config
        self.engine = LLMEngine(
            Runner(self.model, cache_config, torch_dtype, enforce_eager),
            Scheduler(scheduler_config, cache_config, eos_token_ids),
            Sampler(
                config.vocab_size,
                eos_token_ids,
                self.tokenizer,
                ops=self.model.ops,
                logprobs_mode=logprobs_mode,
                logits_processors=logits_processors,
                seed=seed,
            ),
            self.tokenizer,
        )
        self._request_counter = itertools.count()
        self._waited_for: set[str] = set()  # requests of a generate or a stream of this object
        self._mail: dict[str, RequestOutput] = {}  # their newest outputs, until they are fetched

    # ---- vLLM's methods -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs of all prompts, in their order.

        Args:
            prompts: text, token ids, or ``{"prompt": …}`` / ``{"prompt_token_ids": …}``; one or a list.
            sampling_params: one for all, or one each; None for the model's generation defaults.
            priority: one each, lower is sooner; used by the "priority" policy.

        Raises:
            ValueError: as :meth:`LLMEngine.add_request`, for the first bad prompt; then none of them is run.
        """
        prompts = _list_of_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        for name, values in (("sampling_params", sampling_params), ("priority", priority)):
            if values is not None and (not isinstance(values, Sequence) or isinstance(values, str)):
                raise ValueError(f"{name} must be one for all prompts or a list, got {type(values).__name__}")
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts")
        request_ids: list[str] = []
        try:
            for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
                request_id = f"generate-{next(self._request_counter)}"
                self.engine.add_request(request_id, prompt, params, priority=0 if priority is None else priority[i])
                request_ids.append(request_id)
            self._waited_for.update(request_ids)
            return self._run(request_ids, use_tqdm)
        except BaseException:
            self.engine.discard_request(request_ids)
            raise
        finally:
            self._waited_for.difference_update(request_ids)
            for request_id in request_ids:
                self._mail.pop(request_id, None)

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to a list of them, through the model's chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError("messages must be a list of {'role': …, 'content': …}, or a list of such lists")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts: list[Prompt] = [self.chat_prompt(c, chat_template, add_generation_prompt) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: list[dict[str, str]], chat_template: str | None = None, add_generation_prompt: bool = True
    ) -> dict[str, Any]:
        """A conversation as a prompt: its rendered text and token ids, with the template's special tokens and no others."""
        return {
            "prompt": self.tokenizer.render_chat(messages, chat_template, add_generation_prompt),
            "prompt_token_ids": self.tokenizer.encode_chat(messages, chat_template, add_generation_prompt),
        }

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The output of one prompt as it grows, in pieces that never end inside a character or a stop string.

        Closing the iterator early aborts the request.
        """
        params = self.get_default_sampling_params() if params is None else params
        if params.n != 1:
            raise ValueError(f"stream needs n=1, got {params.n}")
        request_id = f"stream-{next(self._request_counter)}"
        self.engine.add_request(request_id, prompt, params)
        return TextStream(self, request_id)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config.json`` recommends, over vLLM's defaults."""
        return SamplingParams(**self.tokenizer.default_sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while a request is running."""
        return self.engine.scheduler.kv_cache_manager.reset_prefix_cache()

    # ---- for the notebooks ----------------------------------------------------------------------------------------

    def forward_logits(self, token_ids: list[int]) -> Tensor:
        """Logits ``[num_tokens, vocab_size]`` float32 at every position of one sequence, from one forward pass."""
        _, token_ids, _ = self.engine._tokenize(list(token_ids))
        if len(token_ids) > self.engine.scheduler.config.max_model_len:
            raise ValueError(
                f"{len(token_ids)} tokens are more than max_model_len={self.engine.scheduler.config.max_model_len}"
            )
        return self.engine.runner.forward_logits(token_ids)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with _progress_bar(len(request_ids)) if use_tqdm else nullcontext() as show:
            while len(done) < len(request_ids):
                self._step()
                for request_id in request_ids:
                    output = self._mail.pop(request_id, None)
                    if output is None or not output.finished:
                        continue
                    done[request_id] = output
                    if show is not None:
                        show(output)
        return [done[request_id] for request_id in request_ids]

    def _step(self) -> None:
        """One step of the engine; outputs go to whoever waits for them: a generate, a stream, or the engine's own user."""
        for output in self.engine.step():
            if output.request_id in self._waited_for:
                self._mail[output.request_id] = output
            else:
                self.engine.put_back(output)


class TextStream(Iterator[str]):
    """The text of one request as it grows. :meth:`close` it, or let go of it, and the request is aborted."""

    def __init__(self, llm: LLM, request_id: str):
        self._llm, self._request_id = llm, request_id
        self._shown, self._finished = 0, False
        llm._waited_for.add(request_id)

    def __next__(self) -> str:
        llm, request_id = self._llm, self._request_id
        while not self._finished:
            output = llm._mail.pop(request_id, None)
            if output is None:
                if not llm.engine.is_unfinished(request_id):
                    break
                llm._step()
                continue
            text, self._finished = output.outputs[0].text, output.finished
            if output.error:
                self.close()
                raise RuntimeError(output.error)
            piece, self._shown = text[self._shown :], max(self._shown, len(text))
            if piece:
                return piece
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is still running; further pieces there are none."""
        self._finished = True
        self._llm._waited_for.discard(self._request_id)
        self._llm._mail.pop(self._request_id, None)
        self._llm.engine.discard_request(self._request_id)

    def __del__(self) -> None:
        self.close()


@contextmanager
def _progress_bar(requests: int) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over requests, with the tokens read and written a second; the function that is yielded counts one that is done."""
    from tqdm import tqdm  # here, so that a machine without it can still generate

    tokens = {"input": 0, "output": 0}
    with tqdm(total=requests, desc="Processed prompts", dynamic_ncols=True) as bar:

        def show(output: RequestOutput) -> None:
            tokens["input"] += len(output.prompt_token_ids)
            tokens["output"] += sum(len(o.token_ids) for o in output.outputs)
            elapsed = max(bar.format_dict["elapsed"], 1e-9)
            speed = {key: f"{value / elapsed:.1f} tok/s" for key, value in tokens.items()}
            bar.set_postfix(speed, refresh=False)
            bar.update(1)

        yield show


def _list_of_prompts(prompts: Any) -> list[Prompt]:
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # arrays and tensors
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts must be text, token ids, a dict of one, or a list of these, got {type(prompts).__name__}"
        )
    one = bool(prompts) and all(hasattr(t, "__index__") and not hasattr(t, "__len__") for t in prompts)
    return [list(prompts)] if one else list(prompts)


def _tokenizer(path: Path, tokenizer: Any) -> Tokenizer:
    """The tokenizer that was asked for, or the model's own; generation defaults and EOS ids are always the model's."""
    if tokenizer is not None:
        return Tokenizer.load(tokenizer, model_dir=path)
    if not has_tokenizer(path):
        warnings.warn(
            f"{path} has no tokenizer: prompts must be token ids, and outputs will have no text", stacklevel=3
        )
        return NoTokenizer(path)
    return Tokenizer.load(path)
