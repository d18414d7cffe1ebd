"""The Llama family's forward pass: Llama, Mistral, Qwen2 and Qwen3 differ in biases, head norms and windows only.

The code is the pipeline: embedding, then for each layer norm → QKV → RoPE → cache write → attention → O → norm → gate/up →
SiLU·mul → down, then the final norm; and from the rows that are sampled, logits.

What the last layer makes of a token is read by nobody but the LM head, so there only the tokens that are sampled from go all
the way; of the others only K and V are needed, for later steps to attend to.
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
        self.rotary = RotaryTable(config.rope, max_model_len, ops.device)
        self.scale = config.head_dim**-0.5
        pack = ops.linear_packer()
        for linear in weights.linears():
            if isinstance(linear.weight, Tensor):  # not packed as it was read
                linear.weight = pack(linear.weight)
        if config.tie_word_embeddings and weights.lm_head.weight.dtype == weights.embed_tokens.dtype:
            weights.embed_tokens = weights.lm_head.weight  # one copy for both, unless packing has rounded the numbers

    def forward(self, batch: Batch, kv_caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states ``[num_wanted, hidden_size]`` after the final norm, of the tokens in ``batch.wanted``; of all if None.

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
            if batch.wanted is None or layer is not weights.layers[-1]:
                hidden = self._attention(i, layer, hidden, rope, batch, kv_caches[i])
            else:
                self._write_keys_and_values(i, layer, hidden, rope, batch, kv_caches[i])
                if len(batch.wanted.rows) == 0:
                    return hidden[:0]
                annotate(i)
                hidden = ops.gather_last_tokens(hidden, batch.wanted.segments)
                residual = ops.gather_last_tokens(residual, batch.wanted.segments)
                hidden = self._attention_of_wanted(i, layer, hidden, batch, kv_caches[i])
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
        c = self.config
        qkv = self._linear(i, layer.qkv_proj, hidden).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        q, k = self._norm_heads(i, layer.q_norm, q), self._norm_heads(i, layer.k_norm, k)
        q = self._rotate_and_cache(i, q, k, v, rope, batch, cache)
        return self._attend(i, layer, q, batch.query_start_loc, batch, cache)

    def _write_keys_and_values(
        self,
        i: int,
        layer: LayerWeights,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        cache: tuple[Tensor, Tensor],
    ) -> None:
        """The part of the last layer that every token takes."""
        c = self.config
        kv = self._heads(i, layer.qkv_proj, hidden, c.num_heads, c.num_heads + 2 * c.num_kv_heads)
        k, v = kv.split(c.num_kv_heads, dim=1)
        k = self._norm_heads(i, layer.k_norm, k)
        self._rotate_and_cache(i, k[:, :0], k, v, rope, batch, cache)

    def _rotate_and_cache(
        self,
        i: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Every token's key, rotated, and its value go to their slots; returns the rotated queries (there may be no heads)."""
        annotate(i, "rotary_emb")
        rows, table = rope
        q, k = self.ops.rotary_embedding(rows, q, k, table)
        annotate(i, "kv_cache")
        self.ops.reshape_and_cache(k, v, *cache, batch.slot_mapping)
        return q

    def _attention_of_wanted(
        self,
        i: int,
        layer: LayerWeights,
        hidden: Tensor,
        batch: Batch,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The part that only the wanted tokens take, ``[num_wanted, hidden_size]``; all keys and values are in the cache."""
        q = self._norm_heads(i, layer.q_norm, self._heads(i, layer.qkv_proj, hidden, 0, self.config.num_heads))
        annotate(i, "rotary_emb")
        rows, table = self.rotary.lookup(batch.wanted.positions, batch.wanted.rope_lengths)
        q, _ = self.ops.rotary_embedding(rows, q, q[:, :0], table)
        return self._attend(i, layer, q, batch.wanted.query_start_loc, batch, cache)

    def _attend(
        self, i: int, layer: LayerWeights, q: Tensor, starts: Tensor, batch: Batch, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """From rotated queries, request r's in rows ``starts[r] … starts[r+1]−1``, to the output of the O projection."""
        annotate(i, "attention")
        out = self.ops.paged_attention(
            q,
            *cache,
            batch.block_table,
            starts,
            batch.seq_lens,
            self.scale,
            sliding_window=self.config.sliding_windows[i],
        )
        return self._linear(i, layer.o_proj, out.flatten(1))

    def _heads(self, i: int, qkv_proj: Linear, hidden: Tensor, begin: int, end: int) -> Tensor:
        """Heads ``begin … end−1`` of the joined projection ``[rows, end − begin, head_dim]``, computed alone if it can be cut."""
        head_dim = self.config.head_dim
        part = qkv_proj.rows(begin * head_dim, end * head_dim)
        if part is None:
            return self._linear(i, qkv_proj, hidden).unflatten(1, (-1, head_dim))[:, begin:end]
        return self._linear(i, part, hidden).unflatten(1, (-1, head_dim))

    def _norm_heads(self, i: int, weight: Tensor | None, x: Tensor) -> Tensor:
        """Heads normed one by one, where the architecture does that."""
        if weight is None:
            return x
        annotate(i, "qk_norm")
        return self.ops.rms_norm(x.reshape(-1, x.shape[-1]), weight, self.config.rms_norm_eps).view(x.shape)

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
