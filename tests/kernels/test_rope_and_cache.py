"""Rotary embedding in its three forms, and the cache write alone and joined to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmlab.kernels.cache import reshape_and_cache
from llmlab.kernels.rope import rope_and_cache, rotary_embedding, rotary_embedding_computed
from torch import Tensor

FUZZ = settings(
    derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
HEADS = st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 8), (32, 1)])
DIMS = st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 128), (128, 64), (80, 20), (96, 6)])


def frequencies(rotary_dim: int) -> Tensor:
    return (1e4 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)).float()


def table(rotary_dim: int, length: int = 64) -> Tensor:
    """The table as the model builds it: angles in float32; cosines | sines, between NaN columns."""
    angles = torch.arange(length).float()[:, None] * frequencies(rotary_dim)
    whole = torch.full((length, rotary_dim + 5), float("nan"))
    whole[:, :rotary_dim] = torch.cat((angles.cos(), angles.sin()), 1)
    return whole[:, :rotary_dim]


def rotated(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Complex multiplication in float64: pair (i, i + n) is one complex number, turned by position * inv_freq[i]."""
    half = len(inv_freq)
    wide = x.double()
    angles = (positions.float()[:, None] * inv_freq).double()  # the product itself is float32 by contract
    turned = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag, wide[..., 2 * half :]), -1)


def split_qkv(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k and v as views of one tensor, as the QKV projection leaves them."""
    num_heads, num_kv_heads = heads
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=g).to(dtype)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    return [part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, 1)]


@FUZZ
@given(tokens=st.integers(1, 5), heads=HEADS, dims=DIMS, dtype=DTYPES, seed=st.integers(0, 99))
def test_rotation(assert_near, tokens, heads, dims, dtype, seed):
    head_dim, rotary_dim = dims
    q, k, _ = split_qkv(tokens, heads, head_dim, dtype, seed)
    positions = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(seed))
    before = q.clone(), k.clone()
    for out in (
        rotary_embedding(positions, q, k, table(rotary_dim)),
        rotary_embedding_computed(positions, q, k, frequencies(rotary_dim)),
    ):
        for rope, x in zip(out, (q, k), strict=True):
            assert rope.dtype == dtype and rope.shape == x.shape
            assert_near(rope, rotated(x, positions, frequencies(rotary_dim)))
            assert torch.equal(rope[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(q, before[0]) and torch.equal(k, before[1]), "the inputs stay as they were"


@pytest.mark.parametrize("position", [4097, 131071, 1000003])
def test_computed_angles_stay_exact_far_out(position):
    """The reduction to a quarter turn loses nothing: within 2e-7 of float64's cosine and sine of the same float32 angle."""
    inv_freq = frequencies(128)
    q = torch.zeros(1, 1, 128)
    q[..., :64] = 1.0  # so that the result is cosines | sines
    out, _ = rotary_embedding_computed(torch.tensor([position]), q, q, inv_freq, attention_factor=2.0)
    angles = (torch.tensor(float(position)) * inv_freq).double()
    assert (out[0, 0].double() / 2 - torch.cat((angles.cos(), angles.sin()))).abs().max() < 2e-7


@FUZZ
@given(
    tokens=st.integers(1, 6),
    heads=HEADS,
    dims=DIMS,
    block_size=st.sampled_from([1, 5, 8, 16]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_cache_writes(assert_near, tokens, heads, dims, block_size, dtype, seed):
    """Alone and with the rotation: every slot named gets its token, −1 none, and no other slot is touched."""
    head_dim, rotary_dim = dims
    q, k, v = split_qkv(tokens, heads, head_dim, dtype, seed)
    g = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 64, (tokens,), generator=g)
    slots = torch.randperm(4 * block_size + 20, generator=g)[: tokens + 1]
    slots[0] = -1
    slots = slots[:tokens]
    num_blocks = -(-(4 * block_size + 20) // block_size)

    def caches() -> Tensor:
        return torch.full((2, num_blocks, block_size, heads[1], head_dim), float("nan"), dtype=dtype)

    plain, fused = caches(), caches()
    reshape_and_cache(k, v, plain[0], plain[1], slots)
    q_out = rope_and_cache(positions, q, k, v, table(rotary_dim), fused[0], fused[1], slots)
    assert_near(q_out, rotated(q, positions, frequencies(rotary_dim)))
    k_rotated = rotated(k, positions, frequencies(rotary_dim))
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = divmod(slot, block_size)
            written[place] = True
            assert torch.equal(plain[0][place], k[token]) and torch.equal(plain[1][place], v[token])
            assert_near(fused[0][place], k_rotated[token])
            assert torch.equal(fused[1][place], v[token])
    for cache in (plain, fused):
        assert cache[:, ~written].isnan().all()


def test_slot_arithmetic():
    """Block table [5, 8, 12], block size 16, position 25: slot 137, which is place 9 of block 8."""
    slot = [5, 8, 12][25 // 16] * 16 + 25 % 16
    assert slot == 137
    cache = torch.zeros(2, 13, 16, 1, 64)
    reshape_and_cache(torch.ones(1, 1, 64), torch.ones(1, 1, 64), cache[0], cache[1], torch.tensor([slot]))
    assert cache.nonzero()[:, 1:3].unique(dim=0).tolist() == [[8, 9]]


def test_a_cache_of_another_dtype_is_written_rounded():
    k = torch.full((1, 1, 64), 1.0 + 3 * 2**-8)
    cache = torch.zeros(2, 1, 4, 1, 64, dtype=torch.bfloat16)
    reshape_and_cache(k, -k, cache[0], cache[1], torch.tensor([2]))
    assert torch.equal(cache[0, 0, 2], k[0].bfloat16()) and torch.equal(cache[1, 0, 2], -k[0].bfloat16())


def test_slots_past_two_to_the_31_elements():
    """Slot 3 in block 1, which starts 2^31 + 64 elements into the cache (memory that is reserved, and hardly touched)."""
    caches = [torch.empty_strided((2, 2, 1, 64), (2**31 + 64, 64, 64, 1), dtype=torch.float16) for _ in range(2)]
    k = torch.ones(1, 1, 64, dtype=torch.float16)
    reshape_and_cache(k, k + 1, *caches, torch.tensor([3]))
    assert (caches[0][1, 1] == 1).all() and (caches[1][1, 1] == 2).all()
    rope_and_cache(torch.tensor([0]), k, k + 2, k + 3, table(64), *caches, torch.tensor([2]))
    assert (caches[0][1, 0] == 3).all() and (caches[1][1, 0] == 4).all()


def test_nothing_in_nothing_out():
    q, none = torch.empty(0, 2, 64), torch.empty(0, dtype=torch.int64)
    cache = torch.full((2, 1, 4, 2, 64), float("nan"))
    assert [x.shape for x in rotary_embedding(none, q, q, table(64))] == [(0, 2, 64)] * 2
    assert rope_and_cache(none, q, q, q, table(64), cache[0], cache[1], none).shape == (0, 2, 64)
    reshape_and_cache(q, q, cache[0], cache[1], none)
    assert cache.isnan().all()


def far_heads(q):
    """Of q's shape, each head 2^31 elements after the one before: more than the kernels' int32 offsets reach."""
    return torch.empty_strided(q.shape, (64, 2**31, 1), device="meta")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, p: rotary_embedding(p[:1], q, q, table(64)), r"positions must be \[2\]"),
        (lambda q, p: rotary_embedding(p, q, q, table(128)), r"within 2..64 \(head_dim\), not 128"),
        (lambda q, p: rotary_embedding(p, q, q[:1], table(64)), r"k \[T, Hkv, D\]"),
        (lambda q, p: rotary_embedding_computed(p, q, q, torch.ones(2, 2)), "inv_freq must be contiguous"),
        (lambda q, p: reshape_and_cache(q, q, torch.ones(1, 4, 1, 64), torch.ones(1, 4, 1, 64), p), r"\[N, B, 2, 64\]"),
        (lambda q, p: reshape_and_cache(q, q[:1], q, q, p), r"k and v must be \[T, Hkv, D\] alike"),
        (
            lambda q, p: reshape_and_cache(q, q, torch.ones(1, 4, 2, 64), torch.ones(1, 4, 2, 64), p[:1]),
            r"slot_mapping must be \[2\]",
        ),
        (lambda q, p: rotary_embedding(p, far_heads(q), q, table(64)), "q: 2 heads, 2147483648 elements apart"),
        (
            lambda q, p: reshape_and_cache(far_heads(q), q, torch.ones(1, 4, 2, 64), torch.ones(1, 4, 2, 64), p),
            "k: 2 heads, 2147483648 elements apart, span more than",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 2, 64), torch.zeros(2, dtype=torch.int64))
