"""Recorded steps: the same as op by op, for every batch size, filled up or not, and only where they can be recorded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from llmlab import LLM, SamplingParams, record_ops
from llmlab.engine import step_graphs
from llmlab.engine.batch import WantedRows

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIONS = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 256, "enable_prefix_caching": False}
PROMPTS = [[5, 6, 7], [3], [9] * 40, list(range(10, 33)), [2, 4] * 11]


@pytest.fixture(scope="module")
def folder(random_hf_model):
    return random_hf_model(seed=5, head_dim=32, **SIZES)[1]


def make(folder, **kwargs) -> LLM:
    return LLM(folder, **{**OPTIONS, **kwargs})


def answers(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=4 + 5 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_and_not_recorded_agree(folder, dtype):
    recorded, eager = make(folder, dtype=dtype), make(folder, dtype=dtype, enforce_eager=True)
    expected = answers(eager)
    assert answers(recorded) == expected
    assert answers(recorded) == expected  # now from recordings only
    # Every batch size is recorded: the requests end one after another.
    shapes = list(recorded.engine.runner._graphs._graphs)
    assert {s.requests for s in shapes if s.wanted is None} == {1, 2, 3, 4, 5}
    assert [s for s in shapes if s.wanted is not None] == [
        (96, 8, 8, 16)
    ]  # the prompts, 90 tokens, all in the first step


def test_hidden_states_to_the_bit(folder, monkeypatch):
    llm = make(folder)
    runner = llm.engine.runner
    play, compared = runner._graphs.run, []

    def compare(batch):
        hidden = play(batch)
        if hidden is not None and batch.num_sched_tokens == batch.num_reqs:
            compared.append(torch.equal(hidden, runner.model.forward(batch, runner._layer_caches)))
        return hidden

    monkeypatch.setattr(runner._graphs, "run", compare)
    answers(llm)
    assert len(compared) > 10 and all(compared)


def test_filled_up_steps_compute_the_same(folder, monkeypatch):
    """Chunks beside decodes: the hidden states, keys and values of the op by op step, and nothing written anywhere else."""
    llm = make(folder, max_num_batched_tokens=24, max_num_seqs=4)
    runner = llm.engine.runner
    play, compared = runner._graphs.run, []

    def compare(batch):
        before = runner.kv_cache.clone()
        played = play(batch)
        if played is None or batch.num_sched_tokens == batch.num_reqs:
            return played
        hidden, cache = played.clone(), runner.kv_cache.clone()
        runner.kv_cache.copy_(before)
        torch.testing.assert_close(runner.model.forward(batch, runner._layer_caches), hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(runner.kv_cache, cache, atol=1e-5, rtol=1e-5)
        slots = cache.flatten(2, 3)
        others = torch.ones(slots.shape[2], dtype=torch.bool)
        others[batch.slot_mapping] = False
        assert torch.equal(slots[:, :, others], before.flatten(2, 3)[:, :, others])
        compared.append(step_graphs.Shape.of(batch))
        return hidden

    monkeypatch.setattr(runner._graphs, "run", compare)
    first = answers(llm)
    assert answers(llm) == answers(llm) == first
    for length in (60, 30):  # in chunks of their own, from whose last tokens nothing is sampled
        llm.generate([list(range(length))], SamplingParams(max_tokens=1), use_tqdm=False)
    assert {shape[:3] for shape in compared} == {(32, 4, 4), (32, 8, 8), (32, 2, 0), (16, 2, 2)}
    assert len({shape.blocks for shape in compared}) > 1


@pytest.mark.parametrize(
    ("query_lens", "discard", "shape"),
    [
        ([1], [False], (1, 1, None, 8)),
        ([1] * 7, [False] * 7, (7, 7, None, 8)),
        ([5], [False], (16, 2, 2, 8)),
        ([1, 1, 15], [False] * 3, (32, 4, 4, 8)),
        ([1, 1, 1, 13], [False] * 4, (16, 8, 8, 8)),
        ([40], [True], (48, 2, 0, 8)),
    ],
)
def test_shapes_that_steps_are_filled_up_to(query_lens, discard, shape):
    tokens = sum(query_lens)
    starts = np.cumsum([0, *query_lens])
    wanted = WantedRows.find(starts, discard, [False] * len(discard), np.arange(tokens))
    table = torch.zeros((len(discard), 5), dtype=torch.int32)
    batch = SimpleNamespace(
        num_sched_tokens=tokens, num_reqs=len(discard), rope_lengths=None, wanted=wanted, block_table=table
    )
    assert step_graphs.Shape.of(batch) == shape
    batch.rope_lengths = torch.ones(tokens)
    assert step_graphs.Shape.of(batch) is None


def test_prompts_whose_logprobs_are_asked_for_run_op_by_op(folder):
    llm = make(folder)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    first = llm.generate([PROMPTS[2]], params, use_tqdm=False)[0]
    for _ in range(2):
        assert llm.generate([PROMPTS[2]], params, use_tqdm=False)[0].prompt_logprobs == first.prompt_logprobs
    assert not llm.engine.runner._graphs._graphs


def test_only_so_many_are_kept(folder, monkeypatch):
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    llm = make(folder)
    first = answers(llm)
    assert answers(llm) == answers(llm) == first
    assert len(llm.engine.runner._graphs._graphs) == 2


def test_a_step_that_is_watched_runs_op_by_op(folder):
    llm = make(folder)
    answers(llm)
    with record_ops() as ledger:
        answers(llm)
    decodes = [c for c in ledger.table().query("op == 'paged_attention' and tensor == 'q'")["shape"] if c[0] == 1]
    assert len(decodes) > 3


def test_where_torch_computes_steps_are_not_recorded(random_hf_model):
    folder = random_hf_model("Qwen3ForCausalLM", seed=6, head_dim=32, **SIZES)[1]
    llm, eager = make(folder), make(folder, enforce_eager=True)
    assert answers(llm) == answers(eager)
    # The heads of several tokens are normed over a copy; those of one token lie together.
    assert {shape.tokens for shape in llm.engine.runner._graphs._graphs} == {1} and llm.engine.runner.plays_graphs


def test_a_model_none_of_whose_ops_is_a_kernel_is_not_recorded(random_hf_model):
    folder = random_hf_model(seed=6, head_dim=24, **SIZES)[1]  # the reference computes attention
    llm, eager = make(folder), make(folder, enforce_eager=True)
    assert answers(llm) == answers(eager)
    assert not llm.engine.runner._graphs._graphs and not llm.engine.runner.plays_graphs


def test_no_recording_off_the_cpu_kernels(folder):
    assert make(folder, backend="reference").engine.runner._graphs is None
    assert make(folder, enforce_eager=True).engine.runner._graphs is None
