"""What an engine's arguments mean on this machine: device, dtype, sequence length, and the size of the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmlab.config import ModelConfig

if TYPE_CHECKING:
    from llmlab.engine.runner import Runner
    from llmlab.engine.scheduler import Scheduler

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPE_ALIASES = {"float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_FREE_MEMORY_SHARE = {"cuda": 0.9, "cpu": 0.25}


def choose_device(device: str | torch.device) -> torch.device:
    """The device that a name means; "auto" is a GPU if there is one. Raises ValueError for one that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r}: {error}") from error
    if found.type not in _FREE_MEMORY_SHARE:
        raise ValueError(f"device must be one of {', '.join(_FREE_MEMORY_SHARE)}, got {device!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch finds no CUDA device")
    return found


def choose_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of weights and KV cache. Raises ValueError for one that is not float32, float16 or bfloat16."""
    name = str(dtype).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[name]


def choose_max_model_len(config: ModelConfig, wanted: int | None) -> int:
    """The model's own limit, or what was asked for if rope scaling reaches that far."""
    limit = config.max_position_embeddings
    if wanted is None:
        return limit
    if config.rope.rope_type in ("linear", "dynamic"):
        limit = int(limit * config.rope.parameters["factor"])
    elif config.rope.rope_type == "yarn" and config.rope.parameters.get("factor"):
        limit = max(
            limit, int(config.rope.parameters["original_max_position_embeddings"] * config.rope.parameters["factor"])
        )
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= limit:
        raise ValueError(f"max_model_len must be an integer in [1, {limit}] (the model's positions), got {wanted!r}")
    return wanted


def choose_num_kv_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    num_kv_blocks: int | None,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Blocks of the KV cache: as told, or what the longest allowed batch could use within a share of the free memory.

    Raises ValueError for sizes that are impossible, contradict each other, or do not fit the free memory.
    """
    if num_kv_blocks is not None and kv_cache_memory_bytes is not None:
        raise ValueError("give num_kv_blocks or kv_cache_memory_bytes, not both")
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be an integer of at least 1, got {block_size!r}")
    block_bytes = 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    if num_kv_blocks is not None:
        if isinstance(num_kv_blocks, bool) or not isinstance(num_kv_blocks, int) or num_kv_blocks < 1:
            raise ValueError(f"num_kv_blocks must be an integer of at least 1, got {num_kv_blocks!r}")
        wanted = num_kv_blocks * block_bytes
        if wanted > free:
            raise ValueError(f"num_kv_blocks={num_kv_blocks} needs {wanted:,} bytes; {free:,} are free")
        return num_kv_blocks
    if kv_cache_memory_bytes is not None:
        if not block_bytes <= kv_cache_memory_bytes <= free:
            raise ValueError(
                f"kv_cache_memory_bytes={kv_cache_memory_bytes:,} must be at least one block ({block_bytes:,} bytes) "
                f"and at most the free memory ({free:,} bytes)"
            )
        return int(kv_cache_memory_bytes) // block_bytes
    useful = max_num_seqs * -(-max_model_len // block_size)
    affordable = int(free * _FREE_MEMORY_SHARE[device.type]) // block_bytes
    if affordable < 1:
        raise ValueError(f"no memory for a KV cache: a block needs {block_bytes:,} bytes, {free:,} are free")
    return min(useful, affordable)


def check_fit(runner: Runner, scheduler: Scheduler) -> None:
    """Raise ValueError if the scheduler may plan positions or blocks that the runner does not have.

    A kernel that was sent there would read and write foreign memory.
    """
    num_positions, cache = len(runner.model.rotary.cos_sin_cache), scheduler.cache_config
    if scheduler.config.max_model_len > num_positions:
        raise ValueError(
            f"max_model_len={scheduler.config.max_model_len}, but the model's rotary table has {num_positions} positions"
        )
    if cache.block_size != runner.block_size:
        raise ValueError(f"block_size={cache.block_size}, but the KV cache has blocks of {runner.block_size} tokens")
    for name, memory in (("num_blocks", runner.kv_cache), ("num_host_blocks", runner.host_cache)):
        most = 0 if memory is None else memory.shape[2]
        if getattr(cache, name) > most:
            raise ValueError(f"{name}={getattr(cache, name)}, but the memory holds {most} blocks")


def _free_memory() -> int:
    import psutil  # on a GPU machine it may be absent

    return psutil.virtual_memory().available
