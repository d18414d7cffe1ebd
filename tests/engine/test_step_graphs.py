"""Recorded decode steps: the same bits as op by op, for every batch size, and only where they can be recorded."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from llmlab import LLM, SamplingParams, record_ops

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPTS = [[5, 6, 7], [3], [9] * 40, list(range(10, 33)), [2, 4] * 11]


@pytest.fixture(scope="module")
def folder(random_hf_model):
    return random_hf_model(seed=5, head_dim=32, **SIZES)[1]


def make(folder, **kwargs) -> LLM:
    return LLM(folder, **{"dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 256, **kwargs})


def answers(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=4 + 5 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_and_not_recorded_agree(folder, dtype):
    recorded, eager = make(folder, dtype=dtype), make(folder, dtype=dtype, enforce_eager=True)
    expected = answers(eager)
    assert answers(recorded) == expected
    assert answers(recorded) == expected  # now from recordings only
    # Every batch size that occurred twice is recorded: the requests end one after another.
    assert sorted(recorded.engine.runner._graphs._graphs) == [1, 2, 3, 4, 5]


def test_hidden_states_to_the_bit(folder, monkeypatch):
    llm = make(folder)
    runner = llm.engine.runner
    play, compared = runner._graphs.run, []

    def compare(batch):
        hidden = play(batch)
        if hidden is not None:
            compared.append(torch.equal(hidden, runner.model.forward(batch, runner._layer_caches)))
        return hidden

    monkeypatch.setattr(runner._graphs, "run", compare)
    answers(llm)
    assert len(compared) > 10 and all(compared)


def test_a_step_that_is_watched_runs_op_by_op(folder):
    llm = make(folder)
    answers(llm)
    with record_ops() as ledger:
        answers(llm)
    decodes = [c for c in ledger.table().query("op == 'paged_attention' and tensor == 'q'")["shape"] if c[0] == 1]
    assert len(decodes) > 3


def test_a_model_with_an_op_of_torchs_own_is_not_recorded(random_hf_model):
    folder = random_hf_model("Qwen3ForCausalLM", seed=6, head_dim=32, **SIZES)[1]  # heads are normed over a copy
    llm, eager = make(folder), make(folder, enforce_eager=True)
    assert answers(llm) == answers(eager)
    assert not llm.engine.runner._graphs._graphs


def test_no_recording_off_the_cpu_kernels(folder):
    assert make(folder, backend="reference").engine.runner._graphs is None
    assert make(folder, enforce_eager=True).engine.runner._graphs is None
