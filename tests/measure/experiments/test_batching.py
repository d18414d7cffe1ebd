"""Flat batches and padding of notebook 02: against counting by hand, and a look-up against the matrix product."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmlab import ops
from llmlab.engine.batch import Batch
from llmlab.measure.claims_quick import padding
from llmlab.measure.experiments.batching import (
    length_distributions,
    lookup_times,
    one_hot_matmul,
    padded_against_flat,
    padding_table,
    padding_waste,
    token_table,
)
from llmlab.measure.known_models import known_config

CONFIG = known_config("smollm2-135m-instruct")


def test_token_table_has_slots_as_blocks_and_offsets():
    plan = SimpleNamespace(
        num_scheduled_tokens={"a": 2, "b": 1},
        num_computed_tokens={"a": 24, "b": 0},
        block_ids={"a": [5, 8, 12], "b": [3]},
    )
    requests = {
        n: SimpleNamespace(all_token_ids=list(range(100, 130)), num_tokens=30, num_prompt_tokens=30) for n in "ab"
    }
    table = token_table(Batch.build(plan, requests, 16), 16)
    assert table["request"].tolist() == ["a", "a", "b"]
    assert table[["input_id", "position", "slot", "block", "offset"]].to_numpy().tolist() == [
        [124, 24, 136, 8, 8],
        [125, 25, 137, 8, 9],
        [100, 0, 48, 3, 0],
    ]


def test_equal_requests_waste_nothing_and_one_long_one_wastes_most():
    assert padding_waste(CONFIG, [64] * 4, [64] * 4)["flop_waste"] == 0
    waste = padding_waste(CONFIG, [100, 1, 1, 1], [100, 1, 1, 1])
    assert (waste["tokens"], waste["padded_tokens"]) == (103, 400)
    assert waste["token_waste"] == pytest.approx(1 - 103 / 400)
    assert waste["flop_waste"] > waste["token_waste"] - 0.1


def test_agrees_with_the_claim_s_own_measurement():
    lengths = np.random.default_rng(0).integers(16, 257, 16).tolist()
    assert padding_waste(CONFIG, lengths, lengths)["flop_waste"] == padding()["padded_waste"]


def test_distributions_are_steps_and_sorted():
    steps = length_distributions(16)
    assert all(len(step) == 16 and step == sorted(step, reverse=True) for step in steps.values())
    assert all(1 <= query <= seq for step in steps.values() for query, seq in step)
    table = padding_table(CONFIG, steps)
    assert table.index.tolist() == list(steps)
    assert table.loc["equal prompts", "flop_waste"] == 0
    assert (table["flop_waste"] < 1).all()


def test_a_look_up_is_a_product_with_one_hot_rows():
    generator = torch.Generator().manual_seed(0)
    weight, ids = torch.randn(50, 16, generator=generator), torch.randint(50, (9,), generator=generator)
    torch.testing.assert_close(one_hot_matmul(ids, weight), torch.nn.functional.embedding(ids, weight), rtol=0, atol=0)


def test_look_up_times_count_what_is_moved():
    (row,) = lookup_times([4], 64, 32, max_seconds=0.01).itertuples()
    assert row.lookup_bytes == 2 * 4 * 32 * 4 + 4 * 8
    assert row.matmul_flops == 2 * 4 * 64 * 32
    assert row.lookup_seconds > 0 and row.matmul_seconds > 0


def test_padded_and_flat_steps_have_the_shapes_they_say():
    runs = []
    driver = SimpleNamespace(
        batch=lambda query, seq: (list(query), list(seq)),
        run=lambda batch: runs.append(batch),
        model=SimpleNamespace(ops=ops.bind("reference", "cpu")),
    )
    taken, compared = padded_against_flat(driver, [5, 2], repeats=3, max_seconds=0.01)
    assert ([5, 2], [5, 2]) in runs and ([5, 5], [5, 5]) in runs
    assert set(taken) == {"flat", "padded"} and compared.name == "flat"
