"""Logits of every architecture and rope type against Hugging Face's own, float32, on random weights."""

from __future__ import annotations

import pytest
import torch

from llmlab import ops
from llmlab.config import CacheConfig
from llmlab.engine.runner import Runner
from llmlab.model.llama import load_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-mha-tied": ("LlamaForCausalLM", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-odd-head-dim": ("LlamaForCausalLM", {"head_dim": 20, "rms_norm_eps": 1e-5}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 7, "head_dim": 16}),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True}),
}
ROPES = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn-options": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **LONGROPE},
    "longrope-no-factor": {"rope_type": "longrope", "original_max_position_embeddings": 16, **LONGROPE},
}  # fmt: skip


def logits_of(folder, token_ids: list[int], backend: str = "reference", max_model_len: int = 128) -> torch.Tensor:
    model = load_model(folder, ops.bind(backend, "cpu"), torch.float32, max_model_len)
    return Runner(model, CacheConfig(num_blocks=1, block_size=4), torch.float32).forward_logits(token_ids)


def check(hf_model, folder, length: int, backend: str = "reference") -> None:
    token_ids = torch.randint(
        0, hf_model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length)
    )
    with torch.no_grad():
        expected = hf_model(token_ids).logits[0]
    with ops.record_ops():  # holds every op to its contract on the way
        actual = logits_of(folder, token_ids[0].tolist(), backend)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_architectures(random_hf_model, case, backend):
    architecture, config = CASES[case]
    check(*random_hf_model(architecture, **config), length=33, backend=backend)


# Lengths on both sides of longrope's 16 and of dynamic's 64.
@pytest.mark.parametrize(("rope", "length"), [(r, n) for r in ROPES for n in (12, 40)] + [("dynamic", 90)])
def test_rope_types(random_hf_model, rope, length):
    parameters = {"rope_theta": 10000.0, **ROPES[rope]}
    check(*random_hf_model(rope_parameters=parameters), length=length)


def test_checkpoint_in_shards(random_hf_model):
    hf_model, folder = random_hf_model(save={"max_shard_size": "40KB"})
    assert len(list(folder.glob("*.safetensors"))) > 2
    check(hf_model, folder, length=9)


def test_old_spelling_of_rope(random_hf_model):
    """``rope_theta`` and ``rope_scaling`` beside each other, as before transformers 5."""
    import json

    parameters = {"rope_theta": 10000.0, **ROPES["llama3"]}
    hf_model, folder = random_hf_model(rope_parameters=parameters)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    file.write_text(json.dumps({**config, "rope_scaling": scaling}))
    check(hf_model, folder, length=40)
