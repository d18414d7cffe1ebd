"""What a model's generation_config.json says about ending and sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# generation_config.json's name → SamplingParams' name
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def eos_token_ids(model_dir: Path | None, tokenizer_eos: int | None) -> list[int]:
    """generation_config.json's eos_token_id (an id or a list: chat models have several), else config.json's, else the
    tokenizer's. ValueError if a file holds something else.
    """
    for name in ("generation_config.json", "config.json"):
        found = _read(model_dir, name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise ValueError(f"eos_token_id={found!r} in {name} must be a token id or a list of them")
            return list(dict.fromkeys(ids))
    return [] if tokenizer_eos is None else [tokenizer_eos]


def default_sampling_params(model_dir: Path | None) -> dict[str, Any]:
    """What generation_config.json recommends, by the names of SamplingParams."""
    config = _read(model_dir, "generation_config.json")
    return {ours: config[theirs] for theirs, ours in SAMPLING_DEFAULTS.items() if config.get(theirs) is not None}


def _read(model_dir: Path | None, name: str) -> dict[str, Any]:
    """The JSON object in `model_dir`/`name`; empty if there is no such file."""
    if model_dir is None or not (model_dir / name).is_file():
        return {}
    try:
        config = json.loads((model_dir / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{model_dir / name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{model_dir / name} must hold a JSON object, got {type(config).__name__}")
    return config
