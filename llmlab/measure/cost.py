"""What a step costs, on paper: FLOPs and the fewest bytes of every op that one forward pass runs, from shapes alone.

Nothing is computed twice: each op's own ``cost`` is asked, with tensors that have shapes and no memory. Identical layers are
asked once and counted ``calls`` times. The walk is that of :class:`llmlab.model.llama.LlamaForCausalLM`, stage by stage, the
last layer's short way for tokens that are not sampled included, and a test holds it to the ledger of a real step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from llmlab import ops
from llmlab.config import ModelConfig
from llmlab.measure.datasheets import Roof
from llmlab.ops.registry import Cost, Op

if TYPE_CHECKING:
    import pandas as pd

GROUPS = ("QKV", "O", "gate+up", "down", "head", "attention", "rest", "sampling")
"""How the ops of a step are put together in tables and figures; the first five are matrix products with weights."""

LINEAR_GROUPS = GROUPS[:5]
_GROUP_OF_STAGE = {
    "qkv_proj": "QKV",
    "o_proj": "O",
    "gate_up_proj": "gate+up",
    "down_proj": "down",
    "lm_head": "head",
    "attention": "attention",
}


def group_of(stage: str, op: str = "") -> str:
    """The group of an op in the ledger. "rest" is embedding, norms with residual, RoPE, SiLU·mul, cache write, gather."""
    if op in ops.ALL and ops.ALL[op].family == "sampling":
        return "sampling"
    return _GROUP_OF_STAGE.get(stage, "rest")


@dataclass(frozen=True)
class OpCost:
    """One op of a step: where it stands, how often it runs (once a layer, mostly), and the cost of one call."""

    stage: str
    op: str
    calls: int
    cost: Cost

    @property
    def group(self) -> str:
        return group_of(self.stage, self.op)

    @property
    def total(self) -> Cost:
        return Cost(self.cost.flops * self.calls, self.cost.bytes * self.calls)


def parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by group: the five of matrix products, "embedding" and "norms". A tied head counts 0."""
    hidden, inner, q_size = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    table = config.vocab_size * hidden
    per_layer = {
        "QKV": config.qkv_size * (hidden + config.qkv_bias),
        "O": hidden * (q_size + config.o_bias),
        "gate+up": 2 * inner * (hidden + config.mlp_bias),
        "down": hidden * (inner + config.mlp_bias),
        "norms": 2 * hidden + (2 * config.head_dim if config.qk_norm else 0),
    }
    counted = {name: count * config.num_layers for name, count in per_layer.items()}
    counted["norms"] += hidden
    return counted | {"head": 0 if config.tie_word_embeddings else table, "embedding": table}


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one token's keys and values take in the cache, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def step_costs(
    config: ModelConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    block_size: int = 16,
    trim_last_layer: bool = False,
) -> list[OpCost]:
    """Every op of one step, in order: request ``r`` has ``query_lens[r]`` new tokens, the last of which sees ``seq_lens[r]``.

    Args:
        dtype: of the hidden states. kv_dtype, weight_dtype: of the cache, and of the matrices in memory; None for the same.
        trim_last_layer: as the engine does it, each request's last token alone goes through the last layer beyond K and V;
            without it the costs of all layers are alike, and affine in the step's shape.

    Raises ValueError if the two do not describe a step.
    """
    if len(query_lens) != len(seq_lens) or not query_lens:
        raise ValueError(f"{len(query_lens)} query_lens for {len(seq_lens)} seq_lens; both must name the same requests")
    if any(not 1 <= q <= s for q, s in zip(query_lens, seq_lens, strict=True)):
        raise ValueError("each request needs 1 <= query_len <= seq_len (the new tokens are part of the sequence)")
    dtypes = dtype, kv_dtype or dtype, weight_dtype or dtype
    walk = _Walk(config, list(query_lens), list(seq_lens), *dtypes, block_size, trim_last_layer)
    merged: list[OpCost] = []
    for part in walk.step():
        same = next((i for i, m in enumerate(merged) if replace(m, calls=part.calls) == part), None)
        if same is None:
            merged.append(part)
        else:
            merged[same] = replace(merged[same], calls=merged[same].calls + part.calls)
    return merged


def prefill_costs(config: ModelConfig, num_reqs: int, length: int, **options: object) -> list[OpCost]:
    """Step of ``num_reqs`` whole prompts of ``length`` tokens. Options as in :func:`step_costs`."""
    return step_costs(config, [length] * num_reqs, [length] * num_reqs, **options)  # type: ignore[arg-type]


def decode_costs(config: ModelConfig, num_reqs: int, context: int, **options: object) -> list[OpCost]:
    """Step in which ``num_reqs`` requests get one token each, which sees ``context`` tokens, itself included."""
    return step_costs(config, [1] * num_reqs, [context] * num_reqs, **options)  # type: ignore[arg-type]


def total(costs: Sequence[OpCost]) -> Cost:
    """FLOPs and bytes of a whole step."""
    return Cost(sum(c.total.flops for c in costs), sum(c.total.bytes for c in costs))


def least_seconds(costs: Sequence[OpCost], roof: Roof) -> float:
    """The roofline's bound on a step: the sum over its ops, as one op can't hide behind another's traffic."""
    return sum(c.calls * roof.seconds(*c.cost) for c in costs)


def cost_table(costs: Sequence[OpCost], roof: Roof | None = None) -> pd.DataFrame:
    """One row a group, in the order of :data:`GROUPS`: FLOPs, bytes, intensity, shares; with a roof also seconds and bound."""
    import pandas as pd

    rows = []
    everything = total(costs)
    for group in GROUPS:
        mine = [c for c in costs if c.group == group]
        if not mine:
            continue
        flops, nbytes = total(mine)
        row = {
            "group": group,
            "flops": flops,
            "bytes": nbytes,
            "intensity": flops / nbytes if nbytes else 0.0,
            "flops_share": flops / everything.flops,
            "bytes_share": nbytes / everything.bytes,
        }
        if roof is not None:
            row["least_seconds"] = least_seconds(mine, roof)
            row["bound"] = "compute" if row["intensity"] > roof.ridge else "memory"
        rows.append(row)
    return pd.DataFrame(rows).set_index("group")


def linear_intensity(
    tokens: float, in_features: int, out_features: int, weight_bytes: float = 2, act_bytes: float = 2
) -> float:
    """FLOP/byte of ``[tokens, in] → [tokens, out]``: about ``2·tokens/weight_bytes`` while tokens are few."""
    moved = weight_bytes * in_features * out_features + act_bytes * tokens * (in_features + out_features)
    return 2 * tokens * in_features * out_features / moved


def crossover_tokens(
    ridge: float, in_features: int, out_features: int, weight_bytes: float = 2, act_bytes: float = 2
) -> float:
    """Tokens in a step from which a linear layer is compute-bound: ``T* = R·w / (2 − R·a·(1/in + 1/out))``; inf if never."""
    slack = 2 - ridge * act_bytes * (1 / in_features + 1 / out_features)
    return ridge * weight_bytes / slack if slack > 0 else float("inf")


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """``(in_features, out_features)`` of the five matrix products, by group."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "QKV": (hidden, config.qkv_size),
        "O": (config.num_heads * config.head_dim, hidden),
        "gate+up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, config.vocab_size),
    }


@dataclass
class _Walk:
    """The forward pass, asking every op for its cost instead of its result."""

    config: ModelConfig
    query_lens: list[int]
    seq_lens: list[int]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weight_dtype: torch.dtype
    block_size: int
    trim_last_layer: bool

    def step(self) -> Iterator[OpCost]:
        c, tokens = self.config, sum(self.query_lens)
        act = lambda *shape: self._meta(*shape)
        hidden, weight = act(tokens, c.hidden_size), act(c.hidden_size)
        reqs = len(self.query_lens)
        trims = self.trim_last_layer and reqs < tokens
        gather = self._call("", ops.gather_last_tokens, hidden, torch.empty(reqs + 1, dtype=torch.int32, device="meta"))
        yield self._call("embedding", ops.embedding, self._ids(tokens), act(c.vocab_size, c.hidden_size))
        for i, window in enumerate(c.sliding_windows):
            if i == 0:
                yield self._call("input_layernorm", ops.rms_norm, hidden, weight, c.rms_norm_eps)
            else:
                yield self._call("input_layernorm", ops.fused_add_rms_norm, hidden, hidden, weight, c.rms_norm_eps)
            if i == c.num_layers - 1 and trims:
                yield from self._keys_and_values(tokens)
                yield from (gather, gather)  # of hidden states and residual: the others end here
                tokens, hidden = reqs, act(reqs, c.hidden_size)
                yield from self._queries(tokens, window, [1] * reqs)
            else:
                yield from self._attention(tokens, window)
            yield self._call("post_attention_layernorm", ops.fused_add_rms_norm, hidden, hidden, weight, c.rms_norm_eps)
            yield self._linear("gate_up_proj", tokens, c.hidden_size, 2 * c.intermediate_size, c.mlp_bias)
            yield self._call("act_fn", ops.silu_and_mul, act(tokens, 2 * c.intermediate_size))
            yield self._linear("down_proj", tokens, c.intermediate_size, c.hidden_size, c.mlp_bias)
        yield self._call("norm", ops.fused_add_rms_norm, hidden, hidden, weight, c.rms_norm_eps)
        if not trims:
            yield gather
        yield self._linear("lm_head", reqs, c.hidden_size, c.vocab_size, False)

    def _attention(self, tokens: int, window: int | None) -> Iterator[OpCost]:
        c = self.config
        yield self._linear("qkv_proj", tokens, c.hidden_size, c.qkv_size, c.qkv_bias)
        yield from self._rotate(tokens, c.num_heads, c.num_kv_heads)
        yield self._write(tokens)
        yield from self._attend(tokens, window, self.query_lens)

    def _keys_and_values(self, tokens: int) -> Iterator[OpCost]:
        """What every token takes of the last layer."""
        c = self.config
        yield self._linear("qkv_proj", tokens, c.hidden_size, 2 * c.num_kv_heads * c.head_dim, c.qkv_bias)
        yield from self._rotate(tokens, 0, c.num_kv_heads)
        yield self._write(tokens)

    def _queries(self, tokens: int, window: int | None, query_lens: list[int]) -> Iterator[OpCost]:
        """What only the sampled ones take."""
        c = self.config
        yield self._linear("qkv_proj", tokens, c.hidden_size, c.num_heads * c.head_dim, c.qkv_bias)
        yield from self._rotate(tokens, c.num_heads, 0)
        yield from self._attend(tokens, window, query_lens)

    def _rotate(self, tokens: int, num_heads: int, num_kv_heads: int) -> Iterator[OpCost]:
        c = self.config
        q, k = self._meta(tokens, num_heads, c.head_dim), self._meta(tokens, num_kv_heads, c.head_dim)
        if c.qk_norm:
            for heads in (x for x in (q, k) if x.numel()):
                yield self._call("qk_norm", ops.rms_norm, heads.flatten(0, 1), self._meta(c.head_dim), c.rms_norm_eps)
        table = torch.empty(1, c.rope.rotary_dim, dtype=torch.float32, device="meta")
        yield self._call("rotary_emb", ops.rotary_embedding, self._ids(tokens), q, k, table)

    def _write(self, tokens: int) -> OpCost:
        c = self.config
        kv = self._meta(tokens, c.num_kv_heads, c.head_dim)
        return self._call("kv_cache", ops.reshape_and_cache, kv, kv, self._cache(), self._cache(), self._ids(tokens))

    def _cache(self) -> torch.Tensor:
        c = self.config
        return torch.empty(1, self.block_size, c.num_kv_heads, c.head_dim, dtype=self.kv_dtype, device="meta")

    def _attend(self, tokens: int, window: int | None, query_lens: list[int]) -> Iterator[OpCost]:
        c = self.config
        q, cache = self._meta(tokens, c.num_heads, c.head_dim), self._cache()
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        blocks = torch.empty(len(lens), 1, dtype=torch.int32, device="meta")
        yield self._call(
            "attention", ops.paged_attention, q, cache, cache, blocks, starts, lens, 1.0, sliding_window=window
        )
        yield self._linear("o_proj", tokens, c.num_heads * c.head_dim, c.hidden_size, c.o_bias)

    def _linear(self, stage: str, tokens: int, in_features: int, out_features: int, bias: bool) -> OpCost:
        x, weight = self._meta(tokens, in_features), self._meta(out_features, in_features, dtype=self.weight_dtype)
        return self._call(stage, ops.linear, x, weight, self._meta(out_features) if bias else None)

    def _call(self, stage: str, op: Op, *args: object, **kwargs: object) -> OpCost:
        return OpCost(stage, op.name, 1, op.cost(*args, **kwargs))

    def _meta(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device="meta")

    def _ids(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device="meta")
