"""A model written as GGUF is the model: read back by the converter, whose oracle is Hugging Face."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from llmlab.bench.gguf_file import write_gguf
from llmlab.convert_gguf import convert_gguf
from llmlab.hub import tiny_model_dir


def test_there_and_back(tmp_path):
    source = tiny_model_dir()
    back = convert_gguf(write_gguf(source, tmp_path / "m.gguf", "bfloat16"), tmp_path / "back", progress=False)
    before, after = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    for name in (
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert old.get(name, (old.get("rope_parameters") or {}).get(name)) == new[name]
    vocabularies = [json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] for folder in (source, back)]
    assert vocabularies[0].items() <= vocabularies[1].items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "only plain Llama models"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "rope type"),
    ],
)
def test_refuses_what_llama_cpp_would_read_wrongly(change, message, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        write_gguf(model, tmp_path / "m.gguf", "float16")


def test_refuses_other_dtypes(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got 'int8'"):
        write_gguf(tiny_model_dir(), tmp_path / "m.gguf", "int8")
