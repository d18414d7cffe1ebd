"""Configurations: the model's (read from a Hugging Face ``config.json``), the KV cache's and the scheduler's.

Nothing in a model's config is ignored silently: a key either changes what is computed here, or must have the value that
means "off", or is bookkeeping that cannot change logits; anything else is warned about by name. No torch in this file,
so that the scheduler, which needs these classes, can be read and tested without it.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """What one architecture does differently from Llama, and what its ``config.json`` means where a key is missing."""

    qkv_bias: bool | None = False  # None: as the config's ``attention_bias`` says
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}
_QWEN_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None, o_bias=None, mlp_bias=None, defaults=_LLAMA_DEFAULTS),
    "MistralForCausalLM": Family(
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096, "head_dim": None}
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": Family(
        qkv_bias=None, o_bias=None, qk_norm=True, defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128}
    ),
}

# Keys that this engine gives no effect to: each may only have a value that has none.
_MUST_BE = {
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (1, 1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1, 1.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "chunk_size_feed_forward": (0, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}
# Bookkeeping, training and generation defaults: no influence on logits.
_BOOKKEEPING = frozenset(
    """architectures model_type transformers_version _name_or_path torch_dtype dtype use_cache initializer_range attention_dropout
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id output_attentions output_hidden_states
    return_dict id2label label2id problem_type auto_map is_llama_config _attn_implementation
    _attn_implementation_autoset unsloth_version transformers.js_config unsloth_fixed tokenizer_class task_specific_params
    finetuning_task is_decoder torchscript use_bfloat16 resid_pdrop embd_pdrop hidden_dropout classifier_dropout""".split()
)
_USED = frozenset(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps tie_word_embeddings rope_theta rope_scaling rope_parameters attention_bias mlp_bias
    sliding_window use_sliding_window max_window_layers layer_types partial_rotary_factor
    original_max_position_embeddings""".split()
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters: ``rope_type`` is one of :data:`ROPE_TYPES`, ``parameters`` those of the type."""

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def length_threshold(self) -> int | None:
        """Sequence length beyond which a token's rotation depends on the length of its sequence, or None if it never does."""
        if self.rope_type == "dynamic":
            return self.max_position_embeddings
        if self.rope_type == "longrope":
            return self.parameters["original_max_position_embeddings"]
        return None

    def cache_tags(self, num_prompt_tokens: int) -> tuple[tuple[str, str], ...]:
        """What must be equal, besides the tokens, for two prompts to have the same keys: the length they are rotated for."""
        if self.length_threshold is None or num_prompt_tokens <= self.length_threshold:
            return ()
        return (("rope_length", str(num_prompt_tokens) if self.rope_type == "dynamic" else "long"),)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the model's code reads. Sizes are in elements; ``dtype`` is the checkpoint's, as a string."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one entry a layer
    dtype: str

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` in a Hugging Face model directory.

        Raises:
            FileNotFoundError: no such directory or no ``config.json`` in it.
            ValueError: the file is not JSON, or says something that this engine does not implement.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"no config.json in {Path(path)}: not a Hugging Face model directory")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """The same from the parsed JSON. Raises ValueError for what is not implemented and for impossible sizes."""
        if not isinstance(raw, dict):
            raise ValueError(f"a model config must be a JSON object, not {type(raw).__name__}")
        try:
            return cls._from_dict(raw)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"config.json: a value has the wrong type: {error}") from error

    @classmethod
    def _from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        _check_keys(raw)
        get = lambda key, default=None: raw.get(key, family.defaults.get(key, default))

        hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        num_kv_heads = get("num_key_value_heads") or num_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
        head_dim = get("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
            head_dim = hidden_size // num_heads
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={raw['hidden_act']!r} is not implemented; only 'silu' is")
        _size({"head_dim": head_dim}, "head_dim")
        if float(get("rms_norm_eps")) < 0:
            raise ValueError(f"config.json: rms_norm_eps must not be negative, got {get('rms_norm_eps')!r}")
        num_layers = _size(raw, "num_hidden_layers")
        max_position = int(get("max_position_embeddings"))
        attention_bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
        pick = lambda fixed, configured: configured if fixed is None else fixed
        return cls(
            architecture=architecture,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=float(get("rms_norm_eps")),
            tie_word_embeddings=bool(get("tie_word_embeddings")),
            rope=_rope(raw, head_dim, max_position),
            qkv_bias=pick(family.qkv_bias, attention_bias),
            o_bias=pick(family.o_bias, attention_bias),
            mlp_bias=pick(family.mlp_bias, mlp_bias),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(raw, architecture, get, num_layers),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not names:  # a config saved without its model
        by_type = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
        names = [by_type[raw["model_type"]]] if raw.get("model_type") in by_type else []
    for name in names:
        if name in FAMILIES:
            return name
    raise ValueError(
        f"architecture {names or raw.get('model_type')!r} is not implemented; implemented are {', '.join(FAMILIES)}"
    )


def _size(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _check_keys(raw: dict[str, Any]) -> None:
    for key, allowed in _MUST_BE.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"config.json: {key}={raw[key]!r} is not implemented (only {allowed[0]!r} is)")
    unknown = sorted(set(raw) - _USED - _BOOKKEEPING - set(_MUST_BE))
    if unknown:
        warnings.warn(f"config.json: keys without meaning to llmlab: {', '.join(unknown)}", stacklevel=4)


def _rope(raw: dict[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (before)."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError("config.json: rope_parameters per layer type are not implemented")
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    rope_type = {"su": "longrope"}.get(rope_type, rope_type)  # the name that longrope had at first
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not implemented; implemented are {', '.join(ROPE_TYPES)}")
    theta = float(parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    if not theta > 0:
        raise ValueError(f"config.json: rope_theta must be positive, got {theta!r}")
    if parameters.get("factor") is not None and not parameters["factor"] > 0:
        raise ValueError(f"config.json: rope factor must be positive, got {parameters['factor']!r}")
    factor = parameters.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"rotary_dim={rotary_dim} (head_dim={head_dim}, partial_rotary_factor={factor}) must be even and at most head_dim"
        )
    if rotary_dim != head_dim:
        raise ValueError(f"partial_rotary_factor={factor} is not implemented for these architectures (only 1.0 is)")
    if rope_type in ("yarn", "llama3", "longrope"):
        if raw.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        parameters.setdefault("original_max_position_embeddings", max_position)
    required = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }.get(rope_type, ())
    for key in required:
        if parameters.get(key) is None:
            raise ValueError(f"config.json: rope type {rope_type!r} needs {key!r}")
    optional = {
        "dynamic": {"original_max_position_embeddings"},
        "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
        "longrope": {"factor", "attention_factor"},
    }.get(rope_type, set())
    unknown = sorted(set(parameters) - set(required) - optional - {"original_max_position_embeddings"})
    if unknown:
        raise ValueError(f"config.json: rope parameters {unknown} are not implemented for rope type {rope_type!r}")
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(parameters[key]) != rotary_dim // 2:
                raise ValueError(
                    f"rope {key} has {len(parameters[key])} entries, must have rotary_dim/2 = {rotary_dim // 2}"
                )
    return RopeConfig(rope_type, theta, rotary_dim, max_position, parameters)


def _sliding_windows(raw: dict[str, Any], architecture: str, get: Any, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: Mistral has one for all; Qwen switches it on, for all layers past ``max_window_layers``."""
    window = get("sliding_window")
    if window is not None:
        _size({"sliding_window": window}, "sliding_window")
    if architecture == "LlamaForCausalLM":
        if window is not None:
            raise ValueError(f"config.json: sliding_window={window} is not implemented for LlamaForCausalLM")
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if window is None:
        window = 4096
    first = raw.get("max_window_layers", 28)
    kinds = raw.get("layer_types") or [SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise ValueError(f"config.json: layer_types {kinds!r} do not name an attention for each of {num_layers} layers")
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache: ``num_blocks`` blocks of ``block_size`` tokens each; ``num_host_blocks`` more to swap to."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        _at_least(self, "block_size", 1)
        _at_least(self, "num_blocks", 1)
        _at_least(self, "num_host_blocks", 0)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. Defaults are vLLM's class defaults; the meaning of each is vLLM's too.

    ``reserve_full_prompt`` admits a request only when blocks for its whole prompt are free, not for its first chunk alone.
    """

    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    reserve_full_prompt: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            _at_least(self, name, 1)
        _at_least(self, "long_prefill_token_threshold", 0)
        _one_of("scheduling policy", self.policy, ("fcfs", "priority"))
        _one_of("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_model_len={self.max_model_len}: a longer prompt would wait for ever"
            )


def _at_least(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")
