"""Steps of any shape give Hugging Face's logits; recordings, points and sweeps add up to what was recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from llmlab import LLM, ops
from llmlab.measure.cost import decode_costs, least_seconds, step_costs, total
from llmlab.measure.datasheets import Roof
from llmlab.measure.hardware import CacheLevel, Ceilings, CpuCache, describe_machine
from llmlab.measure.roofline import (
    Recording,
    StepDriver,
    points,
    record_decode,
    record_prefill,
    record_steps,
    roof_for,
    sweep_decode,
    sweep_mixed,
    sweep_prefill,
    utilisation,
    working_set,
)
from llmlab.model.llama import LlamaForCausalLM, load_model

MEASURED = Ceilings(
    machine=dataclasses.replace(
        describe_machine(), threads=4, caches=(CpuCache("L2", 1 << 20, 1), CpuCache("L3", 16 << 20, 4))
    ),
    date="2026-01-01T00:00:00+00:00",
    gemm={"float32": 2e11},
    read_bandwidth=2e10,
    copy_bandwidth=2.5e10,
    beyond_caches=True,
    levels=(CacheLevel("L2", 1 << 19, 1e11), CacheLevel("L3", 8 << 20, 5e10), CacheLevel("memory", 1 << 30, 2e10)),
    call_overhead=1e-6,
    load=0.0,
)
ROOF = Roof("test", "float32", "memory", flops=1e9, bandwidth=1e8, source="measured")


@pytest.fixture(scope="module")
def hf(random_hf_model: Any) -> Any:
    return random_hf_model(seed=5)


@pytest.fixture
def model(hf: Any) -> LlamaForCausalLM:
    return load_model(str(hf[1]), ops.bind("reference", "cpu"), torch.float32, 64)


@pytest.fixture
def driver(model: LlamaForCausalLM) -> StepDriver:
    return StepDriver(model, torch.float32, max_tokens=192, block_size=4)


@pytest.fixture
def llm(hf: Any) -> LLM:
    with pytest.warns(UserWarning, match="has no tokenizer"):
        return LLM(hf[1], num_kv_blocks=64, block_size=4, max_num_batched_tokens=32)


def test_a_prefill_gives_hugging_faces_logits(hf: Any, driver: StepDriver) -> None:
    batch = driver.batch([9, 5], [9, 5])
    ours = driver.run(batch)
    for row, ids in enumerate(batch.input_ids.split([9, 5])):
        with torch.no_grad():
            theirs = hf[0](ids[None]).logits[0, -1]
        torch.testing.assert_close(ours[row], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lens", [[9, 5], [1, 1]], ids=["prefill", "decode"])
def test_the_engines_way_and_op_by_op_give_the_same(hf: Any, lens: list[int]) -> None:
    model = load_model(str(hf[1]), ops.bind("torch", "cpu"), torch.float32, 64)
    driver = StepDriver(model, torch.float32, max_tokens=192, block_size=4)
    batch = driver.batch(lens, [20, 30])
    eager = driver.run_eagerly(batch)
    for _ in range(4):  # at first op by op, then recorded, then played
        torch.testing.assert_close(driver.run(batch), eager)


def test_a_batch_describes_its_requests(driver: StepDriver) -> None:
    batch = driver.batch([1, 3], [10, 3])
    assert batch.positions.tolist() == [9, 0, 1, 2]
    assert batch.query_start_loc.tolist() == [0, 1, 4]
    assert batch.seq_lens.tolist() == [10, 3]
    assert batch.logits_indices.tolist() == [0, 3]
    table = batch.block_table.tolist()
    held = table[0][:3] + table[1][:1]
    assert len(set(held)) == 4, "no two requests share a block"
    expected = [table[0][2] * 4 + 1, *(table[1][0] * 4 + i for i in range(3))]
    assert batch.slot_mapping.tolist() == expected


def test_no_garbage_in_the_drivers_cache(driver: StepDriver) -> None:
    assert driver.runner.kv_cache.isfinite().all()
    assert driver.runner.kv_cache.std() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(("lens", "message"), [([100, 100], "blocks are needed"), ([65], "made for 64")])
def test_steps_that_do_not_fit_are_refused(driver: StepDriver, lens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        driver.batch([1] * len(lens), lens)


def test_a_recording_has_every_call_of_a_step(driver: StepDriver) -> None:
    batch = driver.batch([1, 1], [20, 30])
    recording = record_steps(lambda: driver.run(batch), 5)
    paper = decode_costs(driver.model.config, 1, 1, dtype=torch.float32)
    assert len(recording.ops) == sum(c.calls for c in paper)
    assert recording.steps == 5
    assert (recording.ops["low"] <= recording.ops["seconds"]).all()
    assert (recording.ops["seconds"] <= recording.ops["high"]).all()
    assert set(recording.ops["group"]) == {"QKV", "O", "gate+up", "down", "head", "attention", "rest"}


def test_steps_that_differ_are_no_recording(driver: StepDriver) -> None:
    x = torch.ones(2, 4)
    work = iter([lambda: ops.silu_and_mul(x), lambda: ops.rms_norm(x, torch.ones(4), 1e-5)])
    with pytest.raises(ValueError, match="differ"):
        record_steps(lambda: next(work)(), 2)


def test_points_add_up() -> None:
    calls = pd.DataFrame(
        {
            "op": ["linear", "linear", "paged_attention"],
            "group": ["QKV", "QKV", "attention"],
            "flops": [1e6, 3e6, 1e6],
            "bytes": [1e4, 3e4, 1e6],
            "low": [1e-3, 2e-3, 3e-3],
            "seconds": [2e-3, 6e-3, 24e-3],
            "high": [3e-3, 7e-3, 30e-3],
        }
    )
    table = points(Recording(calls, 3), ROOF)
    assert list(table.index) == ["QKV", "attention"]
    assert table.loc["QKV", ["calls", "flops", "bytes", "seconds"]].tolist() == [2, 4e6, 4e4, 8e-3]
    assert table["share"].tolist() == pytest.approx([0.25, 0.75])
    assert table["bound"].tolist() == ["compute", "memory"]  # 100 and 1 FLOP/byte, the ridge is at 10
    assert table["least_seconds"].tolist() == pytest.approx([4e-3, 10e-3])
    assert table["of_roof"].tolist() == pytest.approx([0.5, 10 / 24])
    assert table.loc["QKV", "flops_per_s"] == pytest.approx(5e8)
    assert table.loc["attention", "bytes_per_s"] == pytest.approx(1e6 / 24e-3)


def test_utilisation_is_share_of_peak() -> None:
    assert utilisation(flops=5e8, nbytes=2e7, seconds=1.0, roof=ROOF) == (0.5, 0.2)


def test_a_sweep_has_a_row_for_every_shape_that_fits(driver: StepDriver) -> None:
    table = sweep_decode(driver, MEASURED, [1, 4, 8], [16, 40, 200], max_seconds=0.01)
    shapes = list(zip(table["num_reqs"], table["context"], strict=True))
    assert shapes == [(1, 16), (4, 16), (8, 16), (1, 40), (4, 40)]  # 8·40 and 200 are more than cache or model hold
    for row in table.itertuples():
        costs = decode_costs(driver.model.config, row.num_reqs, row.context, dtype=torch.float32, block_size=4)
        assert (row.flops, row.bytes) == tuple(total(costs))
        assert row.linear_flops + row.attention_flops + row.other_flops == pytest.approx(row.flops)
        assert row.linear_bytes + row.attention_bytes + row.other_bytes == pytest.approx(row.bytes)
        roof = MEASURED.roof("float32", row.level)
        assert row.least_seconds == pytest.approx(least_seconds(costs, roof))
        assert row.mfu == pytest.approx(row.flops / row.seconds / roof.flops)
        assert row.mbu == pytest.approx(row.bytes / row.seconds / roof.bandwidth)
        assert row.tokens_per_s == pytest.approx(row.num_reqs / row.seconds)
        assert row.repeats >= 3
        in_ops = row.linear_seconds + row.attention_seconds + row.other_seconds
        assert row.outside_seconds == pytest.approx(row.eager_seconds - in_ops)


def test_a_prefill_sweep_computes_whole_prompts(driver: StepDriver) -> None:
    table = sweep_prefill(driver, MEASURED, [8, 32], max_seconds=0.01)
    assert table["query_len"].tolist() == table["context"].tolist() == [8, 32]
    assert table["flops"].is_monotonic_increasing


def test_a_mixed_sweep_puts_chunks_beside_decodes(driver: StepDriver) -> None:
    table = sweep_mixed(driver, MEASURED, 3, 12, [0, 1, 16], max_seconds=0.01)
    assert table[["chunk", "num_reqs", "query_len", "context"]].to_numpy().tolist() == [
        [0, 3, 1, 12],
        [1, 4, 1, 12],
        [16, 4, 16, 16],
    ]
    options = {"dtype": torch.float32, "block_size": 4, "trim_last_layer": True}
    costs = step_costs(driver.model.config, [1, 1, 1, 16], [12, 12, 12, 16], **options)
    assert tuple(table.loc[2, ["flops", "bytes"]]) == tuple(total(costs))
    assert table.loc[2, "tokens_per_s"] == pytest.approx(19 / table.loc[2, "seconds"])


def test_the_roof_is_that_of_the_memory_that_holds_the_step(model: LlamaForCausalLM) -> None:
    weights = sum(t.numel() for t in _tensors(model)) * 4
    assert working_set(model, 0, torch.float32) == weights
    per_token = 2 * 3 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert working_set(model, 10, torch.float32) == weights + 10 * per_token
    assert roof_for(MEASURED, torch.float32, weights).memory == "L2"
    assert roof_for(MEASURED, torch.float32, 10**9).memory == "memory"


def _tensors(model: LlamaForCausalLM) -> list[torch.Tensor]:
    """What a step multiplies with: everything but the embedding table, which is not tied to the head here."""
    w = model.weights
    norms = [w.norm, *(n for layer in w.layers for n in (layer.input_layernorm, layer.post_attention_layernorm))]
    return [*norms, *(linear.weight for linear in w.linears())]


def test_the_engines_own_steps_are_recorded(llm: LLM) -> None:
    prefill = record_prefill(llm, 20, steps=3)
    assert prefill.steps == 3
    attention = prefill.ops[prefill.ops["group"] == "attention"].iloc[0]
    assert attention["flops"] == 6 * (20 * 21 // 2) * (4 * 8 + 5)
    decode = record_decode(llm, num_reqs=3, context=12, steps=5)  # all prompts in one step
    attention = decode.ops[decode.ops["group"] == "attention"].iloc[0]
    assert attention["flops"] == 6 * 3 * 12 * (4 * 8 + 5)  # the median step's context is the one that was asked for
    head = decode.ops[decode.ops["group"] == "head"].iloc[0]
    assert head["flops"] == 2 * 3 * 48 * 97
    assert "sampling" in set(decode.ops["group"])
    assert not llm.engine.has_unfinished_requests()
    pool = llm.engine.scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_blocks


def test_recordings_that_can_not_be_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="several steps"):
        record_prefill(llm, 33)
    with pytest.raises(ValueError, match="context must be more than"):
        record_decode(llm, 1, 5, steps=15)


def test_medians_are_taken_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmlab.ops import ledger

    times = iter(np.cumsum([0, 1.0, 0, 5.0, 0, 3.0]))
    monkeypatch.setattr(ledger.time, "perf_counter", lambda: float(next(times)))
    recording = record_steps(lambda: ops.silu_and_mul(torch.ones(1, 4)), 3)
    assert recording.ops["seconds"].tolist() == [3.0]
