"""From a Hugging Face checkpoint to the tensors that the forward pass reads.

Weights stay memory-mapped where they are used as they lie in the file; Q, K, V and gate, up are joined into one wide matrix
each, so that a layer does two wide products instead of five narrow ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmlab.config import ModelConfig
from llmlab.ops.cpu.memory import own_pages


@dataclass
class Linear:
    """A projection: its name for the ledger, its weight ``[out_features, in_features]`` (or its packed form) and bias."""

    name: str
    weight: Any
    bias: Tensor | None = None

    def rows(self, begin: int, end: int) -> Linear | None:
        """The projection to some of the output features, over the same memory; None where its packed form can't be cut there."""
        cut = self.weight[begin:end] if isinstance(self.weight, Tensor) else self.weight.rows(begin, end)
        return None if cut is None else Linear(self.name, cut, None if self.bias is None else self.bias[begin:end])


@dataclass
class LayerWeights:
    """One decoder layer. ``q_norm`` and ``k_norm`` (``[head_dim]``) only where the architecture normalises heads."""

    input_layernorm: Tensor
    qkv_proj: Linear
    o_proj: Linear
    post_attention_layernorm: Tensor
    gate_up_proj: Linear
    down_proj: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass
class ModelWeights:
    """All weights. With tied embeddings ``lm_head.weight`` is the very object ``embed_tokens``, in a model packed as well."""

    embed_tokens: Any
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Linear

    def linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        yield self.lm_head


class Checkpoint:
    """The tensors of a model directory by name, sharded or not, read through memory maps.

    Each is on a map of its own, which goes with it: what has been read of a map counts as memory of this process for as long
    as the map is there, so that one for the whole file would hold all weights a second time while they are packed.

    Raises:
        FileNotFoundError: no safetensors files, or a shard that the index names is missing.
        ValueError: a file is corrupt, a tensor is missing or has another shape than asked for.
    """

    def __init__(self, path: Path):
        from safetensors import SafetensorError  # random weights need no package for files

        self.path = path
        self._file_of: dict[str, Path] = {}
        self._read: set[str] = set()
        for name in self._shards(path):
            file = path / name
            if not file.is_file():
                raise FileNotFoundError(f"{path} lacks {name}, which its index names")
            try:
                with self._open(file) as tensors:
                    self._file_of.update(dict.fromkeys(tensors.keys(), file))
            except SafetensorError as error:
                raise ValueError(f"{file} is not a valid safetensors file: {error}") from error

    @staticmethod
    def _open(file: Path) -> Any:
        from safetensors import safe_open

        return safe_open(str(file), framework="pt")

    @staticmethod
    def _shards(path: Path) -> list[str]:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return sorted(f"{Path(name)}" for name in names)
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{index} is not a valid index: {error}") from error
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(f"no safetensors files in {path}")
        return ["model.safetensors"] if "model.safetensors" in names else names

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, still on the memory map."""
        if name not in self._file_of:
            raise ValueError(f"{self.path} has no tensor {name}")
        self._read.add(name)
        with self._open(self._file_of[name]) as tensors:
            tensor = tensors.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.path}: {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ValueError(f"{self.path}: {name} has dtype {tensor.dtype}; quantised checkpoints are not implemented")
        return tensor

    def unread(self) -> list[str]:
        """Tensors that nobody asked for, apart from rotary buffers, which old checkpoints carry and nobody needs."""
        return sorted(n for n in self._file_of.keys() - self._read if not n.endswith("rotary_emb.inv_freq"))


def load_weights(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    pack: Callable[[Tensor], Any] | None = None,
) -> ModelWeights:
    """Read a Hugging Face directory's safetensors.

    Args:
        pack: applied to the weight of every projection as soon as it is read, so that there are never two of all of them.

    Raises:
        FileNotFoundError, ValueError: as :class:`Checkpoint`; also for tensors that the architecture has no place for.
    """
    checkpoint = Checkpoint(Path(path))
    prefix = "model." if "model.embed_tokens.weight" in checkpoint or "embed_tokens.weight" not in checkpoint else ""
    weights = _build(config, _Reader(checkpoint, prefix, dtype, device), pack)
    if extra := checkpoint.unread():
        raise ValueError(f"{path}: {config.architecture} has no place for {len(extra)} tensors: {', '.join(extra[:5])}")
    return weights


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Weights of the right shapes without a checkpoint (normal, σ 0.02; norms 1): for measuring speed alone."""
    return _build(config, _RandomReader(dtype, device, seed))


class _Reader:
    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device):
        self.checkpoint, self.prefix, self.dtype, self.device = checkpoint, prefix, dtype, device

    def __call__(self, name: str, *shape: int) -> Tensor:
        """One tensor: a matrix on its memory map if dtype and device are right already; vectors are not worth a map each."""
        tensor = self.checkpoint.read(self._full(name), shape)
        if len(shape) == 1:
            return tensor.to(self.device, self.dtype, copy=True)
        if tensor.dtype == self.dtype and tensor.device == self.device:
            return tensor
        return self._empty(*shape).copy_(tensor)

    def join(self, names: list[str], sizes: list[int], *rest: int) -> Tensor:
        """Several tensors joined along their first dimension, each copied once, straight to its place."""
        joined = self._empty(sum(sizes), *rest)
        for part, name, size in zip(joined.split(sizes), names, sizes, strict=True):
            part.copy_(self.checkpoint.read(self._full(name), (size, *rest)))
        return joined

    def lm_head(self, embed_tokens: Tensor, tied: bool) -> Tensor:
        if not tied:
            return self("lm_head.weight", *embed_tokens.shape)
        if "lm_head.weight" in self.checkpoint and not torch.equal(
            self("lm_head.weight", *embed_tokens.shape), embed_tokens
        ):
            raise ValueError(
                f"{self.checkpoint.path}: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight"
            )
        return embed_tokens

    def _empty(self, *shape: int) -> Tensor:
        if self.device.type == "cpu":
            return own_pages(shape, self.dtype)  # it may die as soon as it is packed
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else self.prefix + name


class _RandomReader:
    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(*shape, dtype=self.dtype, device=self.device)
        return torch.empty(*shape, dtype=self.dtype, device=self.device).normal_(0, 0.02, generator=self.generator)

    def join(self, names: list[str], sizes: list[int], *rest: int) -> Tensor:
        return self(names[0], sum(sizes), *rest)

    def lm_head(self, embed_tokens: Tensor, tied: bool) -> Tensor:
        return embed_tokens if tied else self("lm_head.weight", *embed_tokens.shape)


def _build(config: ModelConfig, read: Any, pack: Callable[[Tensor], Any] | None = None) -> ModelWeights:
    pack = pack or (lambda weight: weight)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(i: int) -> LayerWeights:
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        qkv, qkv_sizes = [f"{attention}.{x}_proj" for x in "qkv"], [q_size, kv_size, kv_size]
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]

        def joined(name: str, parts: list[str], sizes: list[int], bias: bool) -> Linear:
            weight = read.join([f"{part}.weight" for part in parts], sizes, hidden)
            return Linear(name, pack(weight), read.join([f"{part}.bias" for part in parts], sizes) if bias else None)

        def single(name: str, part: str, out_features: int, in_features: int, bias: bool) -> Linear:
            weight = read(f"{part}.weight", out_features, in_features)
            return Linear(name, pack(weight), read(f"{part}.bias", out_features) if bias else None)

        norm = lambda part, size=hidden: read(f"{part}.weight", size)
        return LayerWeights(
            input_layernorm=norm(f"layers.{i}.input_layernorm"),
            qkv_proj=joined("qkv_proj", qkv, qkv_sizes, config.qkv_bias),
            o_proj=single("o_proj", f"{attention}.o_proj", hidden, q_size, config.o_bias),
            post_attention_layernorm=norm(f"layers.{i}.post_attention_layernorm"),
            gate_up_proj=joined("gate_up_proj", gate_up, [inner, inner], config.mlp_bias),
            down_proj=single("down_proj", f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
            q_norm=norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
        )

    embed_tokens = read("embed_tokens.weight", config.vocab_size, hidden)
    return ModelWeights(
        embed_tokens=embed_tokens,
        layers=[layer(i) for i in range(config.num_layers)],
        norm=read("norm.weight", hidden),
        lm_head=Linear("lm_head", pack(read.lm_head(embed_tokens, config.tie_word_embeddings))),
    )
