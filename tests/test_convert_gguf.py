"""GGUF files written here with the gguf package, converted, and compared with Hugging Face models that hold the same weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmlab.convert_gguf import convert_gguf
from llmlab.hub import models_dir

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ġ 1", "Ċ 1", "Â ²", "h e", "he l", "l o", "hel lo", "Ġ hello"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), "<note>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}{% endfor %}\n"
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2
GGML_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # norm weights other than 1 as well
            parameter.copy_(parameter.bfloat16())
    return model


def ggml_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGML_NAMES[rest]}.weight"
    return f"{GGML_NAMES[stem]}.weight"


def ggml_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows 2i and 2i + 1 of a head in ggml are the two of rotary pair i: Hugging Face's rows i and i + head_dim/2."""
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(HEAD_DIM // 2):
            out[head * HEAD_DIM + 2 * i] = weight[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = weight[head * HEAD_DIM + i + HEAD_DIM // 2]
    return out


def metadata() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors_of(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """ggml name → float32 array in ggml's row order."""
    tensors = {}
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            array = ggml_rows(array, HEADS if "q_proj" in name else KV_HEADS)
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[ggml_name(name)] = array
    return tensors


def write_gguf(
    path: Path,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    qtype: GGML = GGML.F32,
    architecture: str = "llama",
) -> Path:
    """Matrices in ``qtype``, vectors in float32, as llama.cpp does it."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, array in tensors.items():
        kind = qtype if array.ndim == 2 else GGML.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] * 5 % len(TOKENS)).logits


def load(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qtype", [GGML.F32, GGML.F16, GGML.BF16, GGML.Q8_0, GGML.Q4_0, GGML.Q4_1])
def test_logits_equal_the_model_with_the_same_weights(tmp_path: Path, qtype: GGML, tied: bool) -> None:
    model = tiny_llama(tied)
    source = write_gguf(tmp_path / "m.gguf", metadata(), tensors_of(model), qtype)
    converted = load(convert_gguf(source, tmp_path / "out", progress=False))
    with torch.no_grad():  # what the quantization made of each matrix, in Hugging Face's row order, rounded to bfloat16
        for parameter in model.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quants.quantize(parameter.numpy(), qtype)
                parameter.copy_(torch.tensor(gguf.quants.dequantize(blocks, qtype)).bfloat16())
    assert converted.config.tie_word_embeddings is tied
    assert torch.equal(logits(converted), logits(model))


def test_rope_scaling_and_head_dim_reach_the_config(tmp_path: Path) -> None:
    model = tiny_llama()
    plain = write_gguf(tmp_path / "a.gguf", metadata(), tensors_of(model))
    fields = metadata() | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaled = write_gguf(tmp_path / "b.gguf", fields | {"llama.attention.key_length": HEAD_DIM}, tensors_of(model))
    a = logits(load(convert_gguf(plain, tmp_path / "a", progress=False)))
    b = logits(load(convert_gguf(scaled, tmp_path / "b", progress=False)))
    config = LlamaConfig(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0}
    reference = LlamaForCausalLM(config).eval()
    reference.load_state_dict(model.state_dict())
    assert torch.equal(b, logits(reference))
    assert not torch.allclose(a, b)


def test_config_and_generation_config(tmp_path: Path) -> None:
    fields = metadata() | {"tokenizer.ggml.eot_token_id": 0}
    out = convert_gguf(
        write_gguf(tmp_path / "m.gguf", fields, tensors_of(tiny_llama())), tmp_path / "out", progress=False
    )
    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # not the float32's 9.99999975e-06
    assert (config["rope_theta"], config["head_dim"], config["dtype"]) == (100000.0, HEAD_DIM, "bfloat16")
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    tensors = tensors_of(tiny_llama())

    def make(**changes: Any) -> Any:
        folder = tmp_path_factory.mktemp("tokenizer")
        fields = metadata() | {key.replace("__", "."): value for key, value in changes.items()}
        return AutoTokenizer.from_pretrained(
            convert_gguf(write_gguf(folder / "m.gguf", fields, tensors), folder / "out", progress=False)
        )

    return make


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12", ["1", "2"]),  # merges of digits exist in the vocabulary, but a digit stands alone
        ("hello 12", ["hello", "Ġ", "1", "2"]),
        ("\n1", ["Ċ", "1"]),
        ("    12", ["ĠĠĠĠ", "1", "2"]),  # indentation is one piece: no space goes to the number
        (" hello", ["Ġhello"]),
        ("hello  hello", ["hello", "Ġ", "Ġhello"]),
        ("h²", ["h", "Â²"]),
        ("h ²", ["h", "Ġ", "Â²"]),  # ² counts as a digit
        ("<|im_start|>12<note> 1", ["<|im_start|>", "1", "2", "<note>", "Ġ", "1"]),
    ],
)
def test_smollm_pretokenizer(tokenizer_of: Callable[..., Any], text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of()
    ids = tokenizer(text)["input_ids"]
    assert ids == [TOKENS.index(piece) for piece in pieces]
    assert tokenizer.decode(ids) == text


def test_plain_pretokenizer_differs_on_the_same_text(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of(tokenizer__ggml__pre="gpt-2")
    assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == ["12"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("    12")["input_ids"]) == ["ĠĠ", "Ġ", "Ġ", "12"]


def test_special_tokens_and_template(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("hello")["input_ids"] == [TOKENS.index("hello")]
    assert tokenizer.decode([1, TOKENS.index("<note>")], skip_special_tokens=True) == "<note>"
    assert tokenizer_of(tokenizer__ggml__add_bos_token=True)("hello")["input_ids"] == [1, TOKENS.index("hello")]


def test_llama3_takes_whole_tokens_and_adds_bos(tokenizer_of: Callable[..., Any]) -> None:
    fields = {"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__merges": MERGES[:-1]}
    tokenizer = tokenizer_of(**fields, tokenizer__ggml__add_bos_token=True)
    # 'Ġhello' is in the vocabulary, but its merge is gone: only a tokenizer that ignores merges finds it.
    assert tokenizer.convert_ids_to_tokens(tokenizer(" hello")["input_ids"]) == ["<|im_start|>", "Ġhello"]


REFUSED_METADATA = {
    "unknown pre": ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
    "no pre": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
    "sentencepiece": ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    "space prefix": ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
    "eos added": ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token"),
    "unknown tokenizer key": ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
    "id out of range": ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id is 5000"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count"),
    "softcap": ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    "scaling without factor": ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor"),
    "partial rotary": ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
    "per-layer heads": ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
    "missing size": ({"llama.embedding_length": None}, "llama.embedding_length"),
    "vocabulary size": ({"llama.vocab_size": 7}, "llama.vocab_size is 7"),
    "split file": ({"split.count": 2}, "split.count is 2"),
    "wrong width": ({"llama.feed_forward_length": 128}, "shape"),
    "too few layers": ({"llama.block_count": 1}, "not part of this Llama model"),
    "too many layers": ({"llama.block_count": 3}, "is missing"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED_METADATA.values(), ids=REFUSED_METADATA.keys())
def test_refuses_metadata_by_name_and_writes_nothing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in (metadata() | changes).items() if value is not None}
    source = write_gguf(tmp_path / "m.gguf", fields, tensors_of(tiny_llama()))
    with pytest.raises(ValueError, match=message):
        convert_gguf(source, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_refuses_other_architectures_and_tensors(tmp_path: Path) -> None:
    tensors = tensors_of(tiny_llama())
    qwen = write_gguf(tmp_path / "qwen.gguf", metadata(), tensors, architecture="qwen2")
    with pytest.raises(ValueError, match="'qwen2'"):
        convert_gguf(qwen, tmp_path / "out", progress=False)
    bias = write_gguf(tmp_path / "bias.gguf", metadata(), tensors | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)})
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.bias"):
        convert_gguf(bias, tmp_path / "out", progress=False)
    factors = write_gguf(tmp_path / "rope.gguf", metadata(), tensors | {"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        convert_gguf(factors, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_refuses_broken_files(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "m.gguf", metadata(), tensors_of(tiny_llama())).read_bytes()
    for size in (0, 3, 20, 200, len(good) // 2, len(good) - 100):
        (tmp_path / "cut.gguf").write_bytes(good[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a readable GGUF"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out", progress=False)
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 1000)
    with pytest.raises(ValueError, match=r"junk\.gguf is not a readable GGUF"):
        convert_gguf(tmp_path / "junk.gguf", tmp_path / "out", progress=False)
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_never_writes_over_a_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", metadata(), tensors_of(tiny_llama()))
    out = convert_gguf(source, tmp_path / "out", progress=False)
    before = (out / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="already holds a model"):
        convert_gguf(source, out, progress=False)
    assert (out / "model.safetensors").stat().st_mtime_ns == before


@pytest.fixture(scope="module")
def default_model() -> Path:
    path = models_dir() / "smollm2-135m-instruct"
    if not (path / "config.json").is_file():
        pytest.skip("the default model is not here: llmlab fetch smollm2-135m-instruct")
    return path


@pytest.mark.model
def test_default_model_weights(default_model: Path) -> None:
    """Every bit of every tensor. The digest was taken from transformers' own reading of the same GGUF, rounded to bfloat16."""
    digest = hashlib.sha256()
    with safe_open(default_model / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode() + file.get_tensor(name).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("in 2023 we", ["in", "Ġ", "2", "0", "2", "3", "Ġwe"]),
        ("a\n12", ["a", "Ċ", "1", "2"]),
        ("    42", ["ĠĠĠĠ", "4", "2"]),
        ("x² 3", ["x", "Â²", "Ġ", "3"]),
        ("\t7\n\n8", ["ĉ", "7", "ĊĊ", "8"]),
    ],
)
def test_default_model_tokenizes_digits_alone(default_model: Path, text: str, pieces: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


@pytest.mark.model
def test_default_model_answers_a_chat(default_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    model = load(default_model)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == 2  # <|im_end|>: the model ends its turn, and generation_config's list stops it there
