"""Rotary experiments of notebook 04: against Hugging Face's code and float64."""

import pytest
import torch

from llmlab import ops
from llmlab.config import RopeConfig
from llmlab.measure.claims_quick import rope_tables
from llmlab.measure.experiments import rope
from llmlab.model.rope import RotaryTable, attention_scaling, inverse_frequencies


def tensors(tokens, head_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 5, head_dim, generator=generator).to(dtype)
    return torch.randint(30_000, (tokens,), generator=generator), qkv[:, :3], qkv[:, 3:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (96, 64)])
def test_computed_on_the_cpu_is_the_table(dtype, head_dim, rotary_dim):
    pytest.importorskip("numba")
    from llmlab.measure.experiments.rope_cpu import rotary_embedding_computed

    config = RopeConfig("default", 10000.0, rotary_dim, 30_000)
    table = RotaryTable(config, 30_000, torch.device("cpu")).cos_sin_cache
    positions, q, k = tensors(50, head_dim, dtype)
    got = rotary_embedding_computed(positions, q, k, inverse_frequencies(config))
    for one, want in zip(got, ops.rotary_embedding.reference(positions, q, k, table), strict=True):
        torch.testing.assert_close(one, want, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


def test_sine_and_cosine_are_right_in_every_quadrant():
    pytest.importorskip("numba")
    from llmlab.measure.experiments.rope_cpu import rotary_embedding_computed

    positions = torch.arange(-3000, 100_000, 7)
    one = torch.zeros(len(positions), 1, 32)
    one[:, 0, 0] = 1.0  # turned by its angle, (1, 0) is (cos, sin)
    turned, _ = rotary_embedding_computed(positions, one, one, torch.ones(16))
    assert (turned[:, 0, 0].double() - positions.double().cos()).abs().max() < 2e-7
    assert (turned[:, 0, 16].double() - positions.double().sin()).abs().max() < 2e-7


def test_computed_refuses_what_it_cannot_take():
    pytest.importorskip("numba")
    from llmlab.measure.experiments.rope_cpu import rotary_embedding_computed

    positions, q, k = tensors(2, 64)
    with pytest.raises(ValueError, match="multiple of 16"):
        rotary_embedding_computed(positions, q, k, torch.ones(10))


def test_pairs_agree():
    config = RopeConfig("default", 10000.0, 64, 30_000)
    table = RotaryTable(config, 30_000, torch.device("cpu")).cos_sin_cache
    positions, q, k = tensors(20, 64)
    for name, (look_up, compute) in rope.rotary_pairs(torch.device("cpu")).items():
        for a, b in zip(
            look_up(positions, q, k, table), compute(positions, q, k, inverse_frequencies(config)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6, msg=name)


def test_scores_depend_on_the_distance_only():
    scores = rope.relative_scores(RopeConfig("default", 10000.0, 64, 128), 40)
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=2e-5)
    assert scores[0].std() > 0.1


@pytest.mark.parametrize("name", rope.scaling_types())
@pytest.mark.parametrize("length", [100, 30_000])
def test_frequencies_are_hugging_face_s(name, length):
    config = rope.scaling_types()[name]
    inv_freq, scaling = rope.hf_inverse_frequencies(config, length)
    torch.testing.assert_close(inverse_frequencies(config, length), inv_freq, rtol=1e-6, atol=0)
    assert attention_scaling(config) == pytest.approx(scaling)
    table = rope.wavelengths({name: config}, length)
    assert (table["wavelength"] * table["inv_freq"]).tolist() == pytest.approx([2 * torch.pi] * 64)


def test_table_sizes_are_those_of_real_tables_and_of_the_claim():
    sizes = rope.table_sizes()
    first = sizes.iloc[0]
    config = RopeConfig("default", 10000.0, int(first["rotary_dim"]), int(first["max_position"]))
    assert (
        RotaryTable(config, int(first["max_position"]), torch.device("cpu")).cos_sin_cache.nbytes == first["mb"] * 1e6
    )
    assert rope_tables() == {"smallest_mb": 8192 * 64 * 4 / 1e6, "largest_mb": 131072 * 128 * 4 / 1e6}


def test_comparison_has_a_row_a_case():
    table = rope.table_against_computing((4, 8), max_position=64, max_seconds=0.01)
    assert len(table) == 2 * 2 * len(rope.rotary_pairs(torch.device("cpu")))
    assert (table[["table_seconds", "computed_seconds"]] > 0).all(axis=None)


def test_heads_that_the_cpu_kernels_do_not_take_are_left_to_torch():
    table = rope.table_against_computing((4,), head_dim=80, max_position=64, max_seconds=0.01)
    assert set(table["implementation"]) == {"plain torch"}
