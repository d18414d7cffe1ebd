"""The last layer computes to the end only what somebody reads: the same logits and caches as computing everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmlab import LLM, SamplingParams, ops, record_ops
from llmlab.engine.batch import WantedRows
from llmlab.measure.roofline import StepDriver
from llmlab.model.llama import load_model
from llmlab.model.weights import Linear

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer")

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", {"num_attention_heads": 4, "head_dim": 32}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}
MIXED = ([1, 1, 5, 3], [10, 9, 9, 7])  # query_lens and seq_lens of two decodes and two chunks


# ---- which rows are wanted -------------------------------------------------------------------------------------------


def find(
    query_lens: list[int], discard: list[bool], whole: list[bool], seq_lens: list[int] | None = None
) -> WantedRows | None:
    """The requests' last tokens are scheduled; nothing comes before them unless ``seq_lens`` says so."""
    positions = [np.arange(s - q, s) for q, s in zip(query_lens, seq_lens or query_lens, strict=True)]
    return WantedRows.find(np.cumsum([0, *query_lens]), discard, whole, np.concatenate(positions))


def test_wanted_rows_of_a_mixed_step():
    nobody = [False] * 4
    wanted = find(MIXED[0], [False, False, True, False], nobody)
    assert wanted.rows.tolist() == [0, 1, 9]
    assert wanted.segments.tolist() == [0, 1, 2, 10]
    assert wanted.query_start_loc.tolist() == [0, 1, 2, 2, 3]
    assert find(MIXED[0], [False, False, True, False], nobody, MIXED[1]).positions.tolist() == [9, 8, 6]
    assert wanted.segments.dtype == wanted.query_start_loc.dtype == torch.int32
    whole = find(MIXED[0], [False, False, True, False], [False, False, True, False])
    assert whole.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert whole.query_start_loc.tolist() == [0, 1, 2, 7, 8]
    assert find(MIXED[0], [True] * 4, nobody).rows.tolist() == []


def test_decodes_and_steps_that_are_wanted_whole_are_left_alone():
    assert find([1, 1, 1], [False, True, False], [False] * 3) is None
    assert find([4, 2], [False] * 2, [True] * 2) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_wanted_rows_are_the_last_ones_of_their_requests(requests):
    lens, discard, whole = map(list, zip(*requests, strict=True))
    wanted = find(lens, discard, whole)
    starts = np.cumsum([0, *lens]).tolist()
    expected = [
        list(range(starts[r], starts[r + 1])) if w else [] if d else [starts[r + 1] - 1]
        for r, (_, d, w) in enumerate(requests)
    ]
    if wanted is None:
        assert max(lens) == 1 or [len(rows) for rows in expected] == lens
        return
    assert wanted.rows.tolist() == [row for rows in expected for row in rows]
    assert wanted.query_start_loc.diff().tolist() == [len(rows) for rows in expected]
    tokens = torch.arange(sum(lens))[:, None].float()
    assert ops.gather_last_tokens.reference(tokens, wanted.segments)[:, 0].tolist() == wanted.rows.tolist()


# ---- the forward pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_hidden_states_and_caches_as_without(random_hf_model, name, backend):
    architecture, config = ARCHITECTURES[name]
    folder = random_hf_model(architecture, **config)[1]
    compare(load_model(folder, ops.bind(backend, "cpu"), torch.float32, 64))


def test_the_same_by_the_triton_kernels(random_hf_model):
    folder = random_hf_model("Qwen3ForCausalLM", head_dim=16, num_hidden_layers=2)[1]
    compare(load_model(folder, ops.bind("triton", "cpu"), torch.float32, 64), kinds=("some",))


def compare(model, kinds=("last", "some", "whole one", "none")) -> None:
    driver = StepDriver(model, torch.float32, max_tokens=64, block_size=4)
    batch = driver.batch(*MIXED)
    before = driver.runner.kv_cache.clone()
    every = driver.runner.forward(replace(batch, wanted=None))
    cache, logits = driver.runner.kv_cache.clone(), driver.runner.logits(every)
    choices = {
        "last": ([False] * 4, [False] * 4),
        "some": ([False, False, True, False], [False] * 4),
        "whole one": ([False, True, True, False], [False, False, True, False]),
        "none": ([True] * 4, [False] * 4),
    }
    for kind in kinds:
        wanted = find(MIXED[0], *choices[kind], MIXED[1])
        driver.runner.kv_cache.copy_(before)
        hidden = driver.runner.forward(replace(batch, wanted=wanted))
        assert hidden.shape == (len(wanted.rows), every.shape[1])
        torch.testing.assert_close(hidden, every[wanted.rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(driver.runner.kv_cache, cache, atol=1e-5, rtol=1e-5)
        if len(hidden):
            torch.testing.assert_close(driver.runner.logits(hidden), logits[wanted.rows], atol=1e-4, rtol=1e-5)


def test_only_the_wanted_tokens_go_all_the_way(random_hf_model):
    model = load_model(random_hf_model()[1], ops.bind("torch", "cpu"), torch.float32, 64)
    driver = StepDriver(model, torch.float32, max_tokens=64, block_size=4)
    with record_ops() as ledger:
        driver.run(driver.batch([9], [9]))
    table = ledger.table().query("role == 'in' and layer == 2")
    shape = lambda op, stage: table.query(f"op == '{op}' and stage == '{stage}'")["shape"].iloc[0]
    assert shape("reshape_and_cache", "kv_cache")[0] == 9
    assert shape("paged_attention", "attention")[0] == 1
    assert shape("linear", "gate_up_proj")[0] == 1
    outputs = ledger.table().query("role == 'out' and layer == 2 and stage == 'qkv_proj'")["shape"].tolist()
    assert outputs == [(9, 32), (1, 48)]  # K and V of all, Q of the last; 6 and 2 heads of 8


def test_a_chunk_that_samples_nothing_ends_with_its_keys_and_values(random_hf_model):
    llm = make(random_hf_model()[1], max_num_batched_tokens=8, max_num_seqs=4)
    llm.engine.add_request("r", list(range(2, 22)), SamplingParams(temperature=0, max_tokens=1))
    with record_ops() as ledger:
        llm.engine.step()
    assert ledger.records[-1].op == "reshape_and_cache" and ledger.records[-1].layer == 2
    assert sum(r.op == "paged_attention" for r in ledger.records) == 2
    llm.engine.abort_request("r")
    llm.engine.step()


# ---- the engine ------------------------------------------------------------------------------------------------------


def make(folder, **kwargs) -> LLM:
    return LLM(folder, **{"dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 64, **kwargs})


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_logprobs_beside_others_are_hugging_faces(random_hf_model, backend, budget):
    """Requests that want every position, the last one only, or greedy tokens, in the same steps, chunked or not."""
    model, folder = random_hf_model()
    prompts = [list(range(5, 18)), [3, 4] * 7, [9], [40, 41, 42, 43]]
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **wish)
        for wish in ({"prompt_logprobs": 0}, {"logprobs": 0}, {}, {"prompt_logprobs": 0, "logprobs": 0})
    ]
    llm = make(folder, backend=backend, max_num_batched_tokens=budget, max_num_seqs=4)
    for prompt, wish, output in zip(prompts, params, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids = prompt + output.outputs[0].token_ids
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == output.outputs[0].token_ids
        at = lambda position, of=expected, ids=ids: of[position - 1, ids[position]].item()
        if wish.prompt_logprobs is not None:
            got = [entry[ids[t]].logprob for t, entry in enumerate(output.prompt_logprobs) if entry is not None]
            assert got == pytest.approx([at(t) for t in range(1, len(prompt))], abs=1e-4)
        if wish.logprobs is not None:
            got = [entry[t].logprob for t, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]
            assert got == pytest.approx([at(t) for t in range(len(prompt), len(ids))], abs=1e-4)


# ---- rotating one of q and k alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["reference", "cpu", "kernel"])
def test_either_may_have_no_heads(face):
    generator = torch.Generator().manual_seed(0)
    positions, table = torch.randint(40, (9,), generator=generator), torch.randn(40, 32, generator=generator)
    q, k = (torch.randn(9, heads, 32, generator=generator) for heads in (6, 2))
    rotate = getattr(ops.rotary_embedding, face)
    both = rotate(positions, q, k, table)
    only_q, nothing = rotate(positions, q, k[:, :0], table)
    assert torch.equal(only_q, both[0]) and nothing.shape == (9, 0, 32)
    nothing, only_k = rotate(positions, q[:, :0], k, table)
    assert torch.equal(only_k, both[1]) and nothing.shape == (9, 0, 32)


# ---- a part of a weight ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_some_output_features_of_a_weight(backend, dtype, quantization):
    generator = torch.Generator().manual_seed(0)
    bound = ops.bind(backend, "cpu")
    weight, x = torch.randn(96, 64, generator=generator), torch.randn(5, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    linear = Linear("qkv_proj", bound.linear_packer(quantization)(weight.to(dtype)), bias)
    every = bound.linear(x, linear.weight, linear.bias)
    for begin, end in ((0, 64), (64, 96), (32, 48)):
        part = linear.rows(begin, end)
        torch.testing.assert_close(bound.linear(x, part.weight, part.bias), every[:, begin:end], atol=1e-5, rtol=1e-5)
    if backend == "torch" and bound.has_cpu_kernels:
        assert linear.rows(8, 24) is None  # panels hold sixteen
