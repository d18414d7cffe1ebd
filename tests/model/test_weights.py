"""Loading checkpoints: storage shared and memory-mapped where it can be, and clear errors for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmlab import ops
from llmlab.config import ModelConfig
from llmlab.model.llama import load_model
from llmlab.model.weights import load_weights, random_weights

CPU = torch.device("cpu")


def load(folder, dtype=torch.float32):
    return load_weights(folder, ModelConfig.from_pretrained(folder), dtype, CPU)


def edit(folder, change) -> None:
    """Rewrite the checkpoint with ``change(tensors)`` applied."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def test_fused_weights_are_the_parts_in_order(random_hf_model):
    hf_model, folder = random_hf_model("Qwen2ForCausalLM")
    layer, fused = hf_model.model.layers[1], load(folder).layers[1]
    attention = layer.self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(fused.qkv_proj.weight, torch.cat([p.weight for p in parts]))
    assert torch.equal(fused.qkv_proj.bias, torch.cat([p.bias for p in parts]))
    assert torch.equal(fused.gate_up_proj.weight, torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))


def test_tied_embeddings_share_storage(random_hf_model):
    weights = load(random_hf_model(tie_word_embeddings=True)[1])
    assert weights.lm_head.weight.data_ptr() == weights.embed_tokens.data_ptr()


def test_untied_without_lm_head_is_refused(random_hf_model):
    _, folder = random_hf_model(tie_word_embeddings=False)
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="no tensor lm_head.weight"):
        load(folder)


def test_tied_with_a_different_lm_head_is_refused(random_hf_model):
    _, folder = random_hf_model(tie_word_embeddings=True)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load(folder)


def test_unfused_weights_stay_on_the_memory_map(random_hf_model):
    """Same dtype, same device: the weight's address lies in the mapping of the file, so no copy was made."""
    mappings = Path("/proc/self/maps")
    if not mappings.exists():
        pytest.skip("no /proc on this system")
    weights = load(random_hf_model()[1])
    pointer = weights.layers[0].o_proj.weight.data_ptr()
    for line in mappings.read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= pointer < end:
            assert line.endswith("model.safetensors")
            return
    pytest.fail("the weight's address is in no mapping")


def test_a_packed_model_leaves_its_file(random_hf_model):
    """No map of the checkpoint outlives the packing: its pages would count as this process's memory beside the packed ones."""
    pytest.importorskip("numba")
    mappings = Path("/proc/self/maps")
    if not mappings.exists():
        pytest.skip("no /proc on this system")
    _, folder = random_hf_model(tie_word_embeddings=True, vocab_size=96)
    model = load_model(str(folder), ops.bind("torch", CPU), torch.float32, 64)
    assert model.weights.embed_tokens is model.weights.lm_head.weight  # one copy serves both
    assert str(folder) not in mappings.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "no tensor model.layers.2.mlp.up_proj.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"shape \(47,\), the config says \(48,\)"),
        (
            lambda t: t.update({"model.layers.9.extra": torch.ones(2)}),
            "has no place for 1 tensors: model.layers.9.extra",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "quantised checkpoints"),
    ],
)
def test_wrong_tensors_are_named(random_hf_model, change, message):
    _, folder = random_hf_model()
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_rotary_buffers_of_old_checkpoints_are_skipped(random_hf_model):
    _, folder = random_hf_model()
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(folder)


def test_corrupt_and_missing_files(random_hf_model, tmp_path):
    _, folder = random_hf_model()
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(FileNotFoundError, match="lacks model-00001-of-00002"):
        load(tmp_path)


def test_random_weights_have_the_checkpoint_shapes(random_hf_model):
    _, folder = random_hf_model("Qwen3ForCausalLM", head_dim=16)
    config = ModelConfig.from_pretrained(folder)
    made, loaded = random_weights(config, torch.float32, CPU), load(folder)
    for a, b in zip(made.linears(), loaded.linears(), strict=True):
        assert a.name == b.name
        assert a.weight.shape == b.weight.shape
    assert made.layers[0].q_norm.shape == loaded.layers[0].q_norm.shape
