"""The engine on these kernels, interpreted, gives the references' tokens: whole, chunked, mixed and preempted."""

from __future__ import annotations

import pytest

from llmlab import LLM, SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6], [9] * 30, [3, 1, 4, 1, 5, 9, 2, 6]]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=3, top_p=0.8, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=4, top_k=5, presence_penalty=0.5, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=5, min_p=0.05, temperature=0.7, ignore_eos=True),
]
WAYS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 8},
    "preempted": {"num_kv_blocks": 8},
    "odd blocks": {"block_size": 5},
}


@pytest.fixture(autouse=True)
def no_findings() -> None:
    """Unchecked here, to be quick: every kernel is checked in its own tests."""


def generate(folder, backend: str, **options) -> list[tuple[int, ...]]:
    defaults = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 64, "block_size": 8}
    llm = LLM(str(folder), dtype="float32", device="cpu", backend=backend, **{**defaults, **options})
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_every_way_gives_the_references_tokens(random_hf_model, architecture):
    _, folder = random_hf_model(architecture, head_dim=16, num_hidden_layers=2)
    expected = generate(folder, "reference")
    assert len(set(expected)) == len(PROMPTS)
    for name, options in WAYS.items():
        assert generate(folder, "triton", **options) == expected, name
