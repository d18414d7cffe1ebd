"""Shared fixtures: Hugging Face models with random weights, saved to disk; the default model where it was fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the tests may depend on a hub

import pytest
import torch

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def random_hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """Factory: ``(model, directory)`` of a Hugging Face architecture with random float32 weights that are not all alike."""

    def build(
        architecture: str = "LlamaForCausalLM", seed: int = 0, save: dict[str, Any] | None = None, **config: Any
    ) -> tuple[Any, Path]:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model_class = getattr(transformers, architecture)
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**{**SMALL, **config})).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter) + (1.0 if parameter.dim() == 1 else 0.0))
        folder = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(folder, **(save or {}))
        return model, folder

    return build


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Directory of the default model; skips the test where it was not fetched."""
    from llmlab.hub import models_dir

    path = models_dir() / "smollm2-135m-instruct"
    if not (path / "config.json").is_file():
        pytest.skip("the default model is not here; run: llmlab fetch")
    return path
