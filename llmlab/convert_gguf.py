"""GGUF → an ordinary Hugging Face directory, for models of the Llama architecture with a byte-level BPE vocabulary.

The file format is ggml's (docs/gguf.md in its repository); tensors are decoded by the ``gguf`` package. No model class is
needed: each tensor is dequantized, put back into Hugging Face's layout, rounded to bfloat16 and streamed to
``model.safetensors``, one at a time. Every metadata key that could change the model's output is either understood or
refused by name.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from llmlab.pretokenize import LLAMA3_PATTERN

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

_REQUIRED_KEYS = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.layer_norm_rms_epsilon""".split()
_OPTIONAL_KEYS = """attention.head_count_kv attention.key_length attention.value_length rope.dimension_count rope.freq_base
    rope.scaling.factor rope.scaling.type vocab_size""".split()
# `scores` needs no action: it ranks SentencePiece's merges, which are not converted.
_TOKENIZER_KEYS = """model pre tokens token_type merges scores add_bos_token add_eos_token add_space_prefix
    bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id padding_token_id""".split()

# ggml's name → Hugging Face's name, and the shape by the names in `ggml_tensors`.
_GLOBAL_TENSORS = {
    "token_embd.weight": ("model.embed_tokens.weight", ("vocab", "hidden")),
    "output_norm.weight": ("model.norm.weight", ("hidden",)),
    "output.weight": ("lm_head.weight", ("vocab", "hidden")),
}
_LAYER_TENSORS = {
    "attn_norm.weight": ("input_layernorm.weight", ("hidden",)),
    "attn_q.weight": ("self_attn.q_proj.weight", ("q", "hidden")),
    "attn_k.weight": ("self_attn.k_proj.weight", ("kv", "hidden")),
    "attn_v.weight": ("self_attn.v_proj.weight", ("kv", "hidden")),
    "attn_output.weight": ("self_attn.o_proj.weight", ("hidden", "q")),
    "ffn_norm.weight": ("post_attention_layernorm.weight", ("hidden",)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", ("intermediate", "hidden")),
    "ffn_up.weight": ("mlp.up_proj.weight", ("intermediate", "hidden")),
    "ffn_down.weight": ("mlp.down_proj.weight", ("hidden", "intermediate")),
}
_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types


def convert_gguf(gguf_path: str | Path, out_dir: str | Path, progress: bool = True) -> Path:
    """Write the model in ``gguf_path`` as a Hugging Face directory ``out_dir``; returns ``out_dir``. Weights become bfloat16.

    FileNotFoundError: no such file. ValueError, naming what is not understood: a broken file, an architecture other than
    ``llama``, a tokenizer other than byte-level BPE, an unknown ``tokenizer.ggml.pre``, metadata key, tensor or tensor type;
    or ``out_dir`` holds a model already. All of it is checked before the first file is written.
    """
    from gguf import GGUFReader

    path, out = Path(gguf_path), Path(out_dir)
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {path}")
    if (out / "config.json").exists():
        raise ValueError(f"{out} already holds a model; give another folder or remove it")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error

    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    tokenizer, tokenizer_config = hf_tokenizer(metadata)
    plan = _plan(reader, config)

    out.mkdir(parents=True, exist_ok=True)
    _write_safetensors(out / "model.safetensors", plan, config, progress)
    tokenizer.save(str(out / "tokenizer.json"))
    if template := metadata.get("tokenizer.chat_template"):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    _write_json(out / "generation_config.json", generation_config(metadata))
    _write_json(out / "config.json", config)
    return out


def hf_config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """``config.json`` of a LlamaForCausalLM from GGUF metadata; ``tied`` says that the file has no ``output.weight``."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"split.count is {metadata['split.count']}: merge the parts first (llama-gguf-split --merge)")
    values = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    if unknown := sorted(set(values) - {*_REQUIRED_KEYS, *_OPTIONAL_KEYS}):
        raise ValueError(f"metadata not understood: {', '.join('llama.' + key for key in unknown)}")
    if missing := [key for key in _REQUIRED_KEYS if key not in values]:
        raise ValueError(f"metadata missing: {', '.join('llama.' + key for key in missing)}")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(values.get(key), list):
            raise ValueError(
                f"llama.{key} differs from layer to layer: {values[key]}; only one value for all layers is supported"
            )

    num_heads, hidden_size = values["attention.head_count"], values["embedding_length"]
    head_dim = values.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise ValueError(f"llama.{key} is {values[key]} but the head dimension is {head_dim}; they must be equal")
    rope_type, rope_scaling = values.get("rope.scaling.type", "none"), None
    if rope_type not in ("none", "linear"):
        raise ValueError(f"llama.rope.scaling.type is {rope_type!r}; 'none' and 'linear' can be converted")
    if rope_type == "linear":
        if "rope.scaling.factor" not in values:
            raise ValueError("metadata missing: llama.rope.scaling.factor")
        rope_scaling = {"rope_type": "linear", "factor": _shortest(values["rope.scaling.factor"])}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if values.get("vocab_size", len(tokens)) != len(tokens):
        raise ValueError(
            f"llama.vocab_size is {values['vocab_size']} but tokenizer.ggml.tokens has {len(tokens)} entries"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden_size,
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": _shortest(values["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(values.get("rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``generation_config.json``: the token ids that end a generation (of sequence, of turn, of message), bos and pad."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    ids = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": eos or None}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return {key: value for key, value in ids.items() if value is not None}


def hf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The ``tokenizers`` tokenizer (its pre-tokenizer follows ``tokenizer.ggml.pre``) and ``tokenizer_config.json``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    values = {
        key.removeprefix("tokenizer.ggml."): v for key, v in metadata.items() if key.startswith("tokenizer.ggml.")
    }
    if unknown := sorted(set(values) - set(_TOKENIZER_KEYS)):
        raise ValueError(f"metadata not understood: {', '.join('tokenizer.ggml.' + key for key in unknown)}")
    if values.get("model") != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {values.get('model')!r}; only 'gpt2' (byte-level BPE) can be converted"
        )
    for key in ("add_space_prefix", "add_eos_token"):
        if values.get(key):
            raise ValueError(f"tokenizer.ggml.{key} is true; only false can be converted")
    for key in ("tokens", "merges"):
        if not values.get(key):
            raise ValueError(f"metadata missing: tokenizer.ggml.{key}")

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": pre_tokenizers.Sequence([split, byte_level_alone]),
    }
    pre = values.get("pre")
    if pre not in known:
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}; known are {', '.join(map(repr, known))}")

    tokens: list[str] = values["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens repeats {len(tokens) - len(vocab)} of its {len(tokens)} entries")
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    # Two of Llama 3's habits that the metadata does not spell out: a piece that is a token is taken as it stands, even where
    # no chain of merges leads to it, and BOS is added unless said otherwise.
    llama3 = pre == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    tokenizer.pre_tokenizer = known[pre]
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = values.get("token_type") or [1] * len(tokens)
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])

    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    special: dict[str, Any] = {}
    for name, key in names.items():
        token_id = values.get(key)
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"tokenizer.ggml.{key} is {token_id}, outside the vocabulary of {len(tokens)}")
        special[f"{name}_token"] = None if token_id is None else tokens[token_id]
    if values.get("add_bos_token", llama3):
        if special["bos_token"] is None:
            raise ValueError("a BOS is to be added but there is no tokenizer.ggml.bos_token_id")
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, values["bos_token_id"])]
        )
    # PreTrainedTokenizerFast takes tokenizer.json as it stands; a model's own class would rebuild the pre-tokenizer.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    return tokenizer, tokenizer_config


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection ``[num_heads·head_dim, hidden_size]`` from ggml's order to Hugging Face's.

    ggml rotates neighbours (2i, 2i+1), Hugging Face halves (i, i + head_dim/2).
    """
    rows, hidden_size = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden_size)
    return pairs.swapaxes(1, 2).reshape(rows, hidden_size)


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of :func:`unpermute`: rows from Hugging Face's order to ggml's."""
    rows, hidden_size = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, hidden_size)
    return halves.swapaxes(1, 2).reshape(rows, hidden_size)


@dataclass(frozen=True)
class _Planned:
    """One tensor to write: its name and shape in the Hugging Face directory and the GGUF tensor that it comes from."""

    name: str
    shape: tuple[int, ...]
    source: ReaderTensor


def _plan(reader: GGUFReader, config: Mapping[str, Any]) -> list[_Planned]:
    """What to write, in file order. Names, shapes and types are checked here; nothing is decoded yet."""
    expected = ggml_tensors(config)
    found = {tensor.name: tensor for tensor in reader.tensors}
    if unknown := [name for name in found if name not in expected]:
        raise ValueError(f"tensor {unknown[0]!r} is not part of this Llama model ({len(unknown)} such tensors)")
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"tensor {missing[0]!r} is missing ({len(missing)} such tensors)")
    for name, (_, shape) in expected.items():
        actual = tuple(int(size) for size in reversed(found[name].shape))
        if actual != shape:
            raise ValueError(f"tensor {name!r} has shape {actual}, the metadata asks for {shape}")
        _check_type(found[name])
    return [_Planned(hf_name, shape, found[name]) for name, (hf_name, shape) in expected.items()]


def ggml_tensors(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """ggml name → (Hugging Face name, shape) of every tensor that a model of this config has."""
    size = {
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "q": config["num_attention_heads"] * config["head_dim"],
        "kv": config["num_key_value_heads"] * config["head_dim"],
    }
    names = {
        name: entry
        for name, entry in _GLOBAL_TENSORS.items()
        if name != "output.weight" or not config["tie_word_embeddings"]
    }
    for i in range(config["num_hidden_layers"]):
        names |= {f"blk.{i}.{name}": (f"model.layers.{i}.{hf}", dims) for name, (hf, dims) in _LAYER_TENSORS.items()}
    return {name: (hf, tuple(size[dim] for dim in dims)) for name, (hf, dims) in names.items()}


def _check_type(tensor: ReaderTensor) -> None:
    """Decode one block's worth of zeros: an unsupported quantization is found before anything is written."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    _, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"tensor {tensor.name!r} has type {tensor.tensor_type.name}, which cannot be decoded"
        ) from error


def _decode(planned: _Planned, config: Mapping[str, Any]) -> torch.Tensor:
    """Dequantize one tensor and round it once, to bfloat16."""
    from gguf.quants import dequantize

    values = dequantize(planned.source.data, planned.source.tensor_type)
    if planned.name.endswith("q_proj.weight"):
        values = unpermute(values, config["num_attention_heads"])
    elif planned.name.endswith("k_proj.weight"):
        values = unpermute(values, config["num_key_value_heads"])
    return torch.tensor(values, dtype=torch.bfloat16)


def _write_safetensors(path: Path, plan: list[_Planned], config: Mapping[str, Any], progress: bool) -> None:
    """Stream the tensors into one file, holding one at a time.

    The safetensors format: 8 bytes of header length, a JSON header with each tensor's dtype, shape and offsets, the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for planned in plan:
        start, end = end, end + 2 * math.prod(planned.shape)
        header[planned.name] = {"dtype": "BF16", "shape": planned.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    bar = tqdm(total=end, unit="B", unit_scale=True, desc="converting", disable=not progress)
    with path.open("wb") as file, bar:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for planned in plan:
            data = _decode(planned, config).view(torch.uint8).numpy()
            file.write(data.data)
            bar.update(data.nbytes)


def _shortest(value: float) -> float:
    """The shortest decimal that names this float32: 1e-5 where a float64 would say 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
