"""Sampling through the whole engine: exact distributions, seeds under chunking and preemption, structured output."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from llmlab import LLM, SamplingParams, bpe
from llmlab.sampling.params import StructuredOutputsParams

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer")

PROMPTS = [[5, 6, 7], [11] * 9, list(range(20, 45)), [3], [60, 61, 62, 63]]


def make(folder: Any, **kwargs: Any) -> LLM:
    return LLM(folder, **{"num_kv_blocks": 128, "block_size": 4, **kwargs})


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def folder(random_hf_model):
    return random_hf_model(seed=5)[1]


# ---- the exact distribution ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 3.0},
        {"temperature": 4.0, "top_k": 4},
        {"temperature": 4.0, "top_p": 0.8},
        {"temperature": 4.0, "min_p": 0.2},
    ],
)
def test_pairs_of_tokens_have_the_models_distribution(random_hf_model, params):
    """Two tokens a request, 1,500 requests: all 81 pairs against p(first)·p(second | first) of the Hugging Face model."""
    vocab_size, prompt, draws = 9, [1, 4, 2], 1500
    model, folder = random_hf_model(seed=8, vocab_size=vocab_size)

    def probs_after(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0, -1].double() / params["temperature"]
        p = logits.softmax(-1).numpy()
        order = np.argsort(-p)
        keep = np.ones(vocab_size, dtype=bool)
        if "top_k" in params:
            keep[order[params["top_k"] :]] = False
        if "top_p" in params:
            keep[order[int((np.cumsum(p[order]) < params["top_p"]).sum()) + 1 :]] = False
        if "min_p" in params:
            keep = p >= params["min_p"] * p.max()
        return np.where(keep, p, 0) / p[keep].sum()

    expected = np.stack([p * probs_after([*prompt, t]) for t, p in enumerate(probs_after(prompt))]).flatten()
    llm = make(folder, seed=123, max_num_seqs=64)
    found = tokens(run(llm, [prompt] * draws, SamplingParams(max_tokens=2, ignore_eos=True, **params)))
    observed = np.bincount([a * vocab_size + b for a, b in found], minlength=vocab_size**2)
    assert observed[expected == 0].sum() == 0
    common = expected * draws >= 5
    rare = ~common & (expected > 0)
    cells, wanted = observed[common].tolist(), (expected[common] * draws).tolist()
    if rare.any():
        cells.append(observed[rare].sum())
        wanted.append(expected[rare].sum() * draws)
    assert len(cells) >= 6
    assert chisquare(cells, np.array(wanted) * sum(cells) / sum(wanted)).pvalue > 1e-3


# ---- seeds -----------------------------------------------------------------------------------------------------------


SEEDED = SamplingParams(seed=7, temperature=0.9, top_p=0.95, max_tokens=14, ignore_eos=True)
CROWD = [SamplingParams(temperature=t, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0, 2.0, 0.7)]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(folder, place):
    alone = tokens(run(make(folder), [PROMPTS[2]], SEEDED))[0]
    prompts = [PROMPTS[i] for i in (0, 1, 3, 4)]
    prompts.insert(place, PROMPTS[2])
    params = list(CROWD)
    params.insert(place, SEEDED)
    assert tokens(run(make(folder), prompts, params))[place] == alone
    assert len(set(alone)) > 3


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},  # prompts in chunks
        {"long_prefill_token_threshold": 3},
        {"num_kv_blocks": 12},  # preemptions
        {"num_kv_blocks": 12, "preemption_mode": "swap"},
        {"backend": "reference"},
        {"enable_prefix_caching": False},
    ],
)
@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.5, "repetition_penalty": 1.3, "min_tokens": 6}])
def test_seeded_requests_are_the_same_however_they_are_scheduled(folder, limits, extra):
    params = [
        SamplingParams(seed=s, temperature=0.9, top_k=40, max_tokens=14, bad_words=[], stop_token_ids=[9], **extra)
        for s in range(5)
    ]
    expected = tokens(run(make(folder), PROMPTS, params))
    llm = make(folder, **limits)
    outputs = run(llm, PROMPTS, params)
    assert tokens(outputs) == expected
    if limits.get("num_kv_blocks") == 12:
        assert sum(o.metrics.num_preemptions for o in outputs) > 0


def test_the_engines_seed_makes_unseeded_requests_reproducible(folder):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first, second, other = (tokens(run(make(folder, seed=s), PROMPTS, params)) for s in (1, 1, 2))
    assert first == second != other
    fresh = [tokens(run(make(folder, seed=None), PROMPTS, params)) for _ in range(2)]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("seed", [None, 5])
def test_the_outputs_of_one_prompt_differ(folder, seed):
    (output,) = run(make(folder), [PROMPTS[0]], SamplingParams(n=4, seed=seed, max_tokens=10, ignore_eos=True))
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4
    if seed is not None:
        alone = run(make(folder), [PROMPTS[0]], SamplingParams(seed=seed + 2, max_tokens=10, ignore_eos=True))
        assert output.outputs[2].token_ids == tokens(alone)[0]


# ---- penalties, constraints, errors ----------------------------------------------------------------------------------


def test_penalties_and_min_tokens_survive_preemption(folder):
    params = SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=9, max_tokens=14
    )
    expected = tokens(run(make(folder), PROMPTS, params))
    outputs = run(make(folder, num_kv_blocks=12), PROMPTS, params)
    assert tokens(outputs) == expected and sum(o.metrics.num_preemptions for o in outputs) > 0
    assert all(len(t) >= 9 for t in expected)


def test_a_request_without_a_token_left_fails_alone(folder):
    llm = make(folder)
    dead_end = SamplingParams(allowed_token_ids=[2], min_tokens=1)  # 2 is this model's EOS
    outputs = run(llm, PROMPTS[:3], [CROWD[0], dead_end, CROWD[0]])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "constraints" in outputs[1].error and outputs[0].error is None
    assert tokens(run(llm, PROMPTS[:1], CROWD[0])) == [outputs[0].outputs[0].token_ids]  # the engine goes on


def test_logprobs_are_the_models(random_hf_model):
    model, folder = random_hf_model(seed=5)
    params = SamplingParams(
        seed=1, temperature=0.5, top_k=5, logprobs=3, prompt_logprobs=2, max_tokens=6, ignore_eos=True
    )
    (output,) = run(make(folder), [PROMPTS[2]], params)
    sequence = [*PROMPTS[2], *output.outputs[0].token_ids]
    with torch.no_grad():
        expected = model(torch.tensor([sequence])).logits[0].double().log_softmax(-1)
    rows = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    assert rows[0] is None and len(rows) == len(sequence)
    for t, entries in enumerate(rows[1:]):
        assert sequence[t + 1] in entries
        assert {i for i in entries if i != sequence[t + 1]} <= set(expected[t].topk(3).indices.tolist())
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[t, token_id].item(), abs=2e-5)
    own = sum(rows[len(PROMPTS[2]) + i][t].logprob for i, t in enumerate(output.outputs[0].token_ids))
    assert output.outputs[0].cumulative_logprob == pytest.approx(own)


# ---- structured output -----------------------------------------------------------------------------------------------


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 6, "max_num_seqs": 6}, {"num_kv_blocks": 16}])
def test_structured_output_through_chunks_and_preemption(random_hf_model, limits):
    pytest.importorskip("xgrammar", reason="the optional package xgrammar is not installed")
    _, folder = random_hf_model(seed=6, vocab_size=300)
    tokenizer = bpe.Tokenizer.train("positive neutral negative true false name " * 20, 290)
    llm = make(folder, tokenizer=tokenizer, **limits)
    choices = ["positive", "neutral", "negative"]
    wishes = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(choice=choices),
        StructuredOutputsParams(regex=r"[A-D]"),
        StructuredOutputsParams(json=SCHEMA),
    ]
    params = [SamplingParams(seed=i, max_tokens=50, structured_outputs=w) for i, w in enumerate(wishes)]
    params += [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 2
    prompts = ["Say something: ", "The film was ", "A, B, C or D? ", "x", "free text ", "y"]
    outputs = [o.outputs[0] for o in run(llm, prompts, params)]
    assert [o.finish_reason for o in outputs] == ["stop"] * 4 + ["length"] * 2
    for one in (outputs[0], outputs[3]):
        value = json.loads(one.text)
        assert set(value) == {"name", "ok"} and isinstance(value["ok"], bool) and len(value["name"]) <= 5
    assert outputs[1].text in choices and outputs[2].text in list("ABCD")
    expected = [o.outputs[0].token_ids for o in run(make(folder, tokenizer=tokenizer), prompts, params)]
    assert [o.token_ids for o in outputs] == expected


def test_a_bad_schema_is_refused_before_anything_runs(random_hf_model):
    pytest.importorskip("xgrammar", reason="the optional package xgrammar is not installed")
    _, folder = random_hf_model(seed=6, vocab_size=300)
    llm = make(folder, tokenizer=bpe.Tokenizer.train("ab " * 20, 260))
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "strin"}))
    with pytest.raises(ValueError, match="structured_outputs.json"):
        run(llm, ["a", "b"], [SamplingParams(), bad])
    assert not llm.engine.has_unfinished_requests()
