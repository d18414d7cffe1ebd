"""A model on several devices, on paper: what a rank holds, what ranks tell each other, the memory left for the KV cache.

Tensor parallel as in Megatron-LM (Shoeybi et al. 2019, section 3): QKV and gate/up split by columns, O and down by rows, so
a layer has two all-reduces of ``num_sched_tokens · hidden_size``; the embedding table and the LM head are split by vocabulary,
which costs one more all-reduce and one all-gather of the logits. Ranks without a KV head of their own share one.
Data parallel: whole copies, requests dealt out in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from llmlab.config import ModelConfig
from llmlab.measure.cost import kv_bytes_per_token, parameters
from llmlab.measure.datasheets import DATASHEETS, Roof
from llmlab.measure.efficiency import Efficiency

if TYPE_CHECKING:
    from llmlab.measure.hardware import Ceilings


@dataclass(frozen=True)
class Hardware:
    """One device: its roof (measured or from a datasheet: the roof says which), memory, and ways out.

    Attributes:
        memory_bytes: for weights, KV cache and activations.
        link_bandwidth: bytes/s to the other ranks, in one direction; 0 if there is no link.
        host_bandwidth: bytes/s to host memory, in one direction, for preemption by swap; 0 if there is none.
    """

    name: str
    roof: Roof
    memory_bytes: float
    link_bandwidth: float = 0.0
    host_bandwidth: float = 0.0


# Bytes/s in one direction, from the same datasheets: NVLink or Infinity Fabric to the other GPUs, PCIe to the host.
_WAYS_OUT = {
    "A100-80GB SXM": (300e9, 32e9),
    "H100 SXM": (450e9, 64e9),
    "H200 SXM": (450e9, 64e9),
    "B200 (HGX, 1000 W)": (900e9, 64e9),
    "RTX 4090": (32e9, 32e9),
    "MI300X": (448e9, 64e9),
}


def datasheet_hardware(name: str, dtype: torch.dtype = torch.bfloat16) -> Hardware:
    """A known GPU by its datasheet's name or the beginning of it, in any case: ``"h200"``.

    Raises ValueError for a name that fits none or several, and a dtype that the device has no rate for.
    """
    fitting = [sheet for key, sheet in DATASHEETS.items() if name and key.lower().startswith(name.lower())]
    exact = [sheet for sheet in fitting if sheet.name.lower() == name.lower()]
    if len(exact or fitting) != 1:
        raise ValueError(f"no single GPU is called {name!r}; there are {', '.join(DATASHEETS)}")
    sheet = (exact or fitting)[0]
    link, host = _WAYS_OUT[sheet.name]
    roof = sheet.roof(str(dtype).removeprefix("torch."))
    return Hardware(sheet.name, roof, sheet.memory_bytes, link, host)


def measured_hardware(limits: Ceilings, config: ModelConfig, dtype: torch.dtype) -> Hardware:
    """The machine whose ceilings were measured; the roof is of the memory that holds the model's weights."""
    machine = limits.machine
    roof = limits.roof(dtype, limits.level_holding(weight_bytes(config, dtype)))
    memory = machine.accelerator_bytes or machine.memory_bytes
    return Hardware(machine.device, roof, memory, 0.0, limits.copy_bandwidth / 2)


def shard_config(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """The model that one rank computes: a part of the heads, of the MLP and of the vocabulary, at full hidden size.

    Raises ValueError if heads or MLP columns can't be dealt out evenly.
    """
    tp = tensor_parallel_size
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tensor_parallel_size must be an integer of at least 1, got {tp!r}")
    if config.num_heads % tp:
        raise ValueError(f"tensor_parallel_size={tp} does not divide the model's {config.num_heads} attention heads")
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={tp} and the model's {config.num_kv_heads} KV heads: one must divide the other"
        )
    if config.intermediate_size % tp:
        raise ValueError(f"tensor_parallel_size={tp} does not divide intermediate_size={config.intermediate_size}")
    return replace(
        config,
        num_heads=config.num_heads // tp,
        num_kv_heads=max(1, config.num_kv_heads // tp),
        intermediate_size=config.intermediate_size // tp,
        vocab_size=-(-config.vocab_size // tp),
    )


def all_reduce_seconds(nbytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """A ring's bound: each rank sends and receives ``2·(ranks − 1)/ranks`` of the data (Patarasuk and Yuan 2009)."""
    return latency + nbytes * 2 * (ranks - 1) / ranks / bandwidth if ranks > 1 else 0.0


def all_gather_seconds(nbytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """``nbytes`` of all ranks together, of which each lacks ``(ranks − 1)/ranks``."""
    return latency + nbytes * (ranks - 1) / ranks / bandwidth if ranks > 1 else 0.0


def communication_seconds(
    config: ModelConfig,
    hardware: Hardware,
    efficiency: Efficiency,
    ranks: int,
    num_tokens: float,
    num_sampled: int,
    dtype: torch.dtype,
) -> float:
    """Seconds of one step's collectives: two all-reduces a layer and one after the embedding, and the logits' all-gather."""
    if ranks == 1:
        return 0.0
    bandwidth, latency = hardware.link_bandwidth * efficiency.link, efficiency.link_latency
    reduced = all_reduce_seconds(num_tokens * config.hidden_size * dtype.itemsize, ranks, bandwidth, latency)
    logits = num_sampled * config.vocab_size * dtype.itemsize
    gathered = all_gather_seconds(logits, ranks, bandwidth, latency) if num_sampled else 0.0
    return (2 * config.num_layers + 1) * reduced + gathered


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of a model, or of one rank's share of it."""
    return sum(parameters(config).values()) * dtype.itemsize


def activation_bytes(config: ModelConfig, num_tokens: int, num_reqs: int, dtype: torch.dtype) -> int:
    """The most that a step keeps at a time, roughly: two hidden states beside the MLP's or attention's; or float32 logits."""
    widest = max(3 * config.intermediate_size, 2 * config.qkv_size)
    in_layer = num_tokens * (2 * config.hidden_size + widest) * dtype.itemsize
    return max(in_layer, num_reqs * config.vocab_size * 4)


def kv_blocks(
    config: ModelConfig,
    hardware: Hardware,
    *,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    memory_share: float = 0.9,
) -> int:
    """Blocks that fit beside weights and activations in ``memory_share`` of a device's memory (the fullest rank's).

    Raises ValueError, with the bytes, if the weights do not fit or leave no room for one block.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share must be in (0, 1], got {memory_share!r}")
    rank = shard_config(config, tensor_parallel_size)
    if tensor_parallel_size > 1 and not hardware.link_bandwidth:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size}: {hardware.name} has no link to other devices")
    usable = hardware.memory_bytes * memory_share
    weights = weight_bytes(rank, dtype)
    left = usable - weights - activation_bytes(rank, max_num_batched_tokens, max_num_seqs, dtype)
    block_bytes = block_size * kv_bytes_per_token(rank, dtype)
    if left < block_bytes:
        raise ValueError(
            f"the model does not fit: {weights / 1e9:.1f} GB of weights a device at "
            f"tensor_parallel_size={tensor_parallel_size}, and {hardware.name} has {usable / 1e9:.1f} GB "
            f"({memory_share:.0%} of {hardware.memory_bytes / 1e9:.0f}) for weights, activations and KV cache"
        )
    return int(left // block_bytes)
