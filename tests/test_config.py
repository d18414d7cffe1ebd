"""ModelConfig ignores nothing silently; the other configs refuse impossible limits."""

from __future__ import annotations

import json

import pytest

from llmlab.config import CacheConfig, ModelConfig, SchedulerConfig

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def test_sizes():
    config = ModelConfig.from_dict(RAW)
    assert (config.head_dim, config.qkv_size, config.rope.theta, config.dtype) == (8, 80, 10000.0, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.* is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope type 'mrope'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not implemented"),
        ({"rope_scaling": {"type": "ntk"}}, "rope type 'ntk' is not implemented"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "surprise": 1}}, "surprise"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "must have rotary_dim/2 = 4",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads=4"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window must be a positive integer, got 0",
        ),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "rope factor must be positive"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must not be negative"),
        ({"rms_norm_eps": None}, "wrong type"),
        ({"architectures": 5}, "wrong type"),
        ({"num_key_value_heads": "2"}, "wrong type"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2"),
        ({"head_dim": "8"}, "head_dim must be a positive integer"),
        ({"rope_parameters": 5}, "wrong type"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**RAW, **change})


def test_unknown_keys_are_warned_about_by_name():
    with pytest.warns(UserWarning, match="frobnication_factor"):
        ModelConfig.from_dict({**RAW, "frobnication_factor": 3})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_hugging_face_writes_no_unknown_key(architecture):
    import transformers

    raw = getattr(transformers, f"{architecture}Config")(head_dim=128).to_dict()
    ModelConfig.from_dict(json.loads(json.dumps({**raw, "architectures": [f"{architecture}ForCausalLM"]})))


def test_llama31_shape():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = ModelConfig.from_dict({**RAW, "head_dim": 128, "rope_theta": 500000.0, "rope_scaling": scaling})
    from llmlab.model.rope import inverse_frequencies

    inv_freq = inverse_frequencies(config.rope).tolist()
    known = {28: 3.211446e-3, 29: 2.166571e-3, 31: 8.567514e-4, 34: 1.785078e-4, 35: 9.556212e-5, 63: 3.068926e-7}
    for i, value in known.items():
        assert inv_freq[i] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("factor", "expected"), [(4.0, 1.138629), (8.0, 1.207944), (32.0, 1.346574)])
def test_yarn_attention_factor(factor, expected):
    from llmlab.model.rope import attention_scaling

    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 16}
    assert attention_scaling(ModelConfig.from_dict({**RAW, "rope_scaling": scaling}).rope) == pytest.approx(
        expected, abs=1e-6
    )


def test_missing_and_corrupt_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(num_blocks=0), "num_blocks must be an integer of at least 1, got 0"),
        (lambda: CacheConfig(num_blocks=4, block_size=0), "block_size"),
        (lambda: SchedulerConfig(max_model_len=16, max_num_seqs=0), "max_num_seqs"),
        (lambda: SchedulerConfig(max_model_len=16, policy="lifo"), "scheduling policy must be one of fcfs, priority"),
        (lambda: SchedulerConfig(max_model_len=16, preemption_mode="drop"), "preemption_mode"),
        (
            lambda: SchedulerConfig(max_model_len=16, max_num_batched_tokens=8, enable_chunked_prefill=False),
            "without chunked prefill max_num_batched_tokens=8",
        ),
    ],
)
def test_impossible_limits_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
