"""The Llama family's forward pass: Llama, Mistral, Qwen2 and Qwen3 differ in biases, head norms and windows only.

The code is the pipeline: embedding, then for each layer norm → QKV → RoPE → cache write → attention → O → norm → gate/up →
SiLU·mul → down, then the final norm; and from the rows that are sampled, logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmlab.config import ModelConfig
from llmlab.model.rope import RotaryTable
from llmlab.model.weights import LayerWeights, Linear, ModelWeights
from llmlab.ops import OpSet
from llmlab.ops.registry import annotate

if TYPE_CHECKING:
    from llmlab.engine.batch import Batch


class LlamaForCausalLM:
    """A model: its config, its weights, and the ops that it runs on.

    Args:
        max_model_len: the longest sequence that the rotary table must serve.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: OpSet, max_model_len: int):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rotary = RotaryTable(config.rope, max_model_len, weights.embed_tokens.device)
        self.scale = config.head_dim**-0.5
        pack = ops.linear_packer()
        for linear in weights.linears():
            if isinstance(linear.weight, Tensor):  # not packed as it was read
                linear.weight = pack(linear.weight)
        if ops.has_cpu_kernels:
            weights.leave_file()

    def forward(self, batch: Batch, kv_caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states ``[num_sched_tokens, hidden_size]`` after the final norm.

        Args:
            kv_caches: ``(key_cache, value_cache)`` of each layer; this step's K and V are written into them.
        """
        ops, weights, eps = self.ops, self.weights, self.config.rms_norm_eps
        rope = self.rotary.lookup(batch.positions, batch.rope_lengths)
        annotate(stage="embedding")
        hidden = ops.embedding(batch.input_ids, weights.embed_tokens)
        residual = None
        for i, layer in enumerate(weights.layers):
            annotate(i, "input_layernorm")
            if residual is None:
                residual, hidden = hidden, ops.rms_norm(hidden, layer.input_layernorm, eps)
            else:
                hidden, residual = ops.fused_add_rms_norm(hidden, residual, layer.input_layernorm, eps)
            hidden = self._attention(i, layer, hidden, rope, batch, kv_caches[i])
            annotate(i, "post_attention_layernorm")
            hidden, residual = ops.fused_add_rms_norm(hidden, residual, layer.post_attention_layernorm, eps)
            gate_up = self._linear(i, layer.gate_up_proj, hidden)
            annotate(i, "act_fn")
            hidden = self._linear(i, layer.down_proj, ops.silu_and_mul(gate_up))
        annotate(stage="norm")
        hidden, _ = ops.fused_add_rms_norm(hidden, residual, weights.norm, eps)
        annotate()
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size] → [rows, vocab_size]`` in float32."""
        logits = self._linear(None, self.weights.lm_head, hidden).float()
        annotate()
        return logits

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        ops, c = self.ops, self.config
        qkv = self._linear(i, layer.qkv_proj, hidden).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            annotate(i, "qk_norm")
            q = ops.rms_norm(q.reshape(-1, c.head_dim), layer.q_norm, c.rms_norm_eps).view(q.shape)
            k = ops.rms_norm(k.reshape(-1, c.head_dim), layer.k_norm, c.rms_norm_eps).view(k.shape)
        annotate(i, "rotary_emb")
        rows, table = rope
        q, k = ops.rotary_embedding(rows, q, k, table)
        annotate(i, "kv_cache")
        ops.reshape_and_cache(k, v, *cache, batch.slot_mapping)
        annotate(i, "attention")
        out = ops.paged_attention(
            q,
            *cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            self.scale,
            sliding_window=c.sliding_windows[i],
        )
        return self._linear(i, layer.o_proj, out.flatten(1))

    def _linear(self, i: int | None, linear: Linear, x: Tensor) -> Tensor:
        annotate(i, linear.name)
        return self.ops.linear(x, linear.weight, linear.bias)


def load_model(path: str, ops: OpSet, dtype: torch.dtype, max_model_len: int) -> LlamaForCausalLM:
    """Config, weights and forward pass of a Hugging Face directory, ready to run on ``ops``' device."""
    from llmlab.model.weights import load_weights

    config = ModelConfig.from_pretrained(path)
    return LlamaForCausalLM(
        config, load_weights(path, config, dtype, ops.device, ops.linear_packer()), ops, max_model_len
    )
