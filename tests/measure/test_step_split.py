"""The split of a step: all of it, nothing twice, and an engine that is as it was before."""

from __future__ import annotations

import pytest

from llmlab import LLM, SamplingParams
from llmlab.measure.experiments.step_split import MODEL_PARTS, PARTS, outside_the_model, step_split


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=64)


def test_parts_add_up_and_nothing_is_left_behind(llm):
    attributes = [set(vars(x)) for x in (llm.engine, llm.engine.runner, llm.engine.scheduler)]
    before = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0]
    table = step_split(llm, (1, 3), steps=3, prompt_len=8)
    assert list(table["part"]) == [*PARTS, *PARTS] and (table["seconds"] > 0).all()
    assert table.groupby("num_reqs")["share"].sum().tolist() == pytest.approx([1, 1])
    outside = outside_the_model(table)
    for size, share in outside.items():
        inside = table[(table["num_reqs"] == size) & table["part"].isin(MODEL_PARTS)]["share"].sum()
        assert share == pytest.approx(1 - inside)
    assert not llm.engine.has_unfinished_requests()
    assert [set(vars(x)) for x in (llm.engine, llm.engine.runner, llm.engine.scheduler)] == attributes
    after = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0]
    assert before.token_ids == after.token_ids


def test_a_slow_sampler_shows_as_the_sampler(llm, monkeypatch):
    import time

    plain = type(llm.engine.sampler).__call__

    def slow(self, *args):
        time.sleep(0.02)
        return plain(self, *args)

    monkeypatch.setattr(type(llm.engine.sampler), "__call__", slow)
    table = step_split(llm, (2,), steps=3, prompt_len=8).set_index("part")
    assert table.loc["sample", "seconds"] >= 0.02
