"""A Hugging Face directory of the Llama family as one GGUF file, for the peers that read nothing else.

The inverse of :mod:`llmlab.convert_gguf`, with its names and its order of rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from llmlab.config import ModelConfig
from llmlab.convert_gguf import ggml_tensors, permute
from llmlab.model.weights import Checkpoint

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # ggml's token types


def write_gguf(model_dir: str | Path, path: str | Path, dtype: str) -> Path:
    """Write ``path``: matrices in ``dtype`` ("float32", "float16" or "bfloat16"), vectors in float32; returns it.

    Raises:
        ValueError: the model has something that llama.cpp's plain Llama does not know, or another dtype is asked for.
    """
    import gguf

    model_dir, path = Path(model_dir), Path(path)
    config = ModelConfig.from_pretrained(str(model_dir))
    if config.architecture != "LlamaForCausalLM" or config.qkv_bias or config.mlp_bias or config.o_bias:
        raise ValueError(
            f"only plain Llama models can be written as GGUF, not {config.architecture} with biases or norms"
        )
    if config.rope.rope_type != "default":
        raise ValueError(f"only the rope type 'default' can be written as GGUF, not {config.rope.rope_type!r}")
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    if dtype not in kinds:
        raise ValueError(f"dtype must be one of {', '.join(kinds)}, got {dtype!r}")
    kind = gguf.GGMLQuantizationType[kinds[dtype]]
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind.name, f"MOSTLY_{kind.name}")])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.rope.rotary_dim)
    writer.add_rope_freq_base(config.rope.theta)
    _write_vocabulary(writer, model_dir, config.vocab_size)
    for name in ("bos", "eos", "pad"):
        token_id = raw.get(f"{name}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id[0] if isinstance(token_id, list) else token_id)
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    checkpoint = Checkpoint(model_dir)
    for ggml_name, (hf_name, shape) in ggml_tensors(sizes).items():
        values = checkpoint.read(hf_name, shape).to(torch.float32).numpy()
        if hf_name.endswith("q_proj.weight"):
            values = permute(values, config.num_heads)
        elif hf_name.endswith("k_proj.weight"):
            values = permute(values, config.num_kv_heads)
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(ggml_name, values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer, model_dir: Path, vocab_size: int) -> None:  # type: ignore[no-untyped-def]
    """Tokens, their types, and merges. Engines under test get token ids: the pre-tokenizer, which tells how text is split, is
    written as SmolLM's, whatever it is."""
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    if tokenizer["model"]["type"] != "BPE":
        raise ValueError(f"only BPE vocabularies can be written as GGUF, not {tokenizer['model']['type']}")
    tokens = [f"[UNUSED{i}]" for i in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, _NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
