"""The runner owns what a forward pass needs besides the batch: the model and the KV cache's memory."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmlab.config import CacheConfig
from llmlab.engine.batch import Batch
from llmlab.engine.step_graphs import StepGraphs
from llmlab.ops.cpu.memory import Arena, allocate_in, large_pages
from llmlab.ops.registry import recording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmlab.engine.request import Request
    from llmlab.engine.scheduler import SchedulerOutput
    from llmlab.model.llama import LlamaForCausalLM


class Runner:
    """Runs scheduled steps on one device.

    Args:
        enforce_eager: run every step op by op, none from a recorded graph.

    Attributes:
        kv_cache: ``[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]``; its pages are touched as blocks are used.
        host_cache: the same with ``num_host_blocks`` blocks in host memory, for preemption by swap; None without it.
    """

    def __init__(self, model: LlamaForCausalLM, cache: CacheConfig, dtype: torch.dtype, enforce_eager: bool = False):
        self.model = model
        self.block_size = cache.block_size
        self.device = model.ops.device
        self.kv_cache = self._allocate(cache.num_blocks, dtype, self.device)
        self.host_cache = (
            self._allocate(cache.num_host_blocks, dtype, torch.device("cpu")) if cache.num_host_blocks else None
        )
        self._layer_caches = self._by_layer(self.kv_cache)
        self._results = Arena() if model.ops.has_cpu_kernels else None
        self._graphs = None
        if not enforce_eager and model.ops.has_cpu_kernels:
            self._graphs = StepGraphs(lambda batch: model.forward(batch, self._layer_caches), self.block_size)

    def execute(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> tuple[Batch, Tensor]:
        """Copy swapped blocks, run the forward pass: the batch, and the hidden states ``[num_wanted, hidden_size]``.

        Wanted are the tokens that are sampled from, and all tokens of prompts whose logprobs are asked for;
        ``batch.hidden_start_loc`` says which rows are whose.
        """
        self.swap(output.swap_out, output.swap_in)
        whole = None
        if output.total_num_scheduled_tokens > len(output.num_scheduled_tokens):
            whole = {
                r
                for r, computed in output.num_computed_tokens.items()
                if requests[r].sampling_params.prompt_logprobs is not None
                and computed < requests[r].num_prompt_tokens - 1
            }
        batch = Batch.build(output, requests, self.block_size, self.device, self._length_dependent_rope, whole)
        return batch, self.forward(batch)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states ``[num_wanted, hidden_size]``: from a recorded graph where there is one, else op by op."""
        with torch.inference_mode():
            hidden = None if self._graphs is None or recording() else self._graphs.run(batch)
            return self._forward(batch, self._layer_caches) if hidden is None else hidden

    @property
    def plays_graphs(self) -> bool:
        """Whether steps are recorded and played."""
        return self._graphs is not None and self._graphs.recordable

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size] → [rows, vocab_size]`` float32."""
        with torch.inference_mode():
            return self.model.compute_logits(hidden)

    def last_tokens(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The rows to sample from, ``[num kept requests, hidden_size]``: partial prefills have none."""
        kept = [r + 1 for r, discard in enumerate(batch.discard) if not discard]
        if batch.wanted is not None and len(hidden) == len(kept):
            return hidden  # each of them has at least one row, so no other has been computed
        starts = batch.hidden_start_loc
        with torch.inference_mode():
            if len(kept) < batch.num_reqs:
                starts = starts[[0, *kept]]  # what is not kept goes with the request behind it
            return self.model.ops.gather_last_tokens(hidden, starts)

    def forward_logits(self, token_ids: list[int]) -> Tensor:
        """Logits ``[num_tokens, vocab_size]`` float32 of every position, in a cache of its own: no request is disturbed."""
        batch = Batch.single(token_ids, self.block_size, self.device, self._length_dependent_rope)
        cache = self._allocate(batch.block_table.shape[1], self.kv_cache.dtype, self.device)
        with torch.inference_mode():
            return self.model.compute_logits(self._forward(batch, self._by_layer(cache)))

    def _forward(self, batch: Batch, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        with nullcontext() if self._results is None else allocate_in(self._results):
            return self.model.forward(batch, caches)

    @property
    def _length_dependent_rope(self) -> bool:
        return self.model.config.rope.length_threshold is not None

    def _allocate(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        c = self.model.config
        shape = (c.num_layers, 2, num_blocks, self.block_size, c.num_kv_heads, c.head_dim)
        if device.type == "cpu":
            # In memory a block's keys and values of all layers lie together, so that the pages taken are those of the blocks
            # in use, not a few MB for the first of them in every layer.
            by_block = (num_blocks, c.num_layers, 2, *shape[3:])
            memory = large_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(by_block)
            return memory.permute(1, 2, 0, 3, 4, 5)
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def _by_layer(kv_cache: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(layer[0], layer[1]) for layer in kv_cache]

    def swap(self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]] = ()) -> None:
        """Copy whole blocks, all layers: ``swap_out`` as (device, host) pairs, then ``swap_in`` as (host, device) pairs.

        Out first: a block swapped out may be handed to another request of this very step.
        """
        if swap_out:
            source, target = map(list, zip(*swap_out, strict=True))
            self.host_cache[:, :, target] = self.kv_cache[:, :, source].to("cpu")
        if swap_in:
            source, target = map(list, zip(*swap_in, strict=True))
            self.kv_cache[:, :, target] = self.host_cache[:, :, source].to(self.device)
