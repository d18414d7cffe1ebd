"""Every kernel test runs in the checked interpreter, against float64 oracles that share no code with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from llmlab.interpreter import checked

# Half an ulp of the output's rounding twice over, and what float32 arithmetic inside may lose on rows of a few hundred.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}


@pytest.fixture(autouse=True)
def no_findings() -> Iterator[None]:
    """Bounds, uninitialised lanes, overflow, races: any finding in any kernel of the test fails it."""
    with checked(raise_on_findings=True):
        yield


@pytest.fixture(scope="session")
def assert_near() -> Callable[..., None]:
    """``assert_near(actual, expected)``: expected in float64, the tolerance that of actual's dtype; NaN never passes."""

    def check(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
        rtol, atol = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual.double(), expected.double(), rtol=factor * rtol, atol=factor * atol)

    return check


@dataclass
class PagedBatch:
    """A batch in a paged cache, and the same keys and values per request for the oracle."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.key_cache, self.value_cache, self.block_table, self.query_start_loc, self.seq_lens

    def oracle(self, scale: float, window: int | None = None, soft_cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attention in float64, request by request: (out, natural log-sum-exp)."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], float("-inf"), dtype=torch.float64)
        starts = self.query_start_loc.tolist()
        for r, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            q = self.q[starts[r] : starts[r + 1]].double()
            group = q.shape[1] // keys.shape[1]
            k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            own = torch.arange(len(k) - len(q), len(k))[:, None]
            seen = torch.arange(len(k))[None, :]
            visible = (seen <= own) if window is None else (seen <= own) & (seen > own - window)
            scores = scores.masked_fill(~visible, float("-inf"))
            out[starts[r] : starts[r + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
            lse[starts[r] : starts[r + 1]] = scores.logsumexp(-1).T
        return out, lse


@pytest.fixture(scope="session")
def paged_batch() -> Callable[..., PagedBatch]:
    """Factory of batches as hostile as the engine may make them.

    ``lens`` is a list of (query length, sequence length). Blocks are shuffled; blocks that nobody owns and slots past a
    sequence's end are NaN; unused block-table entries are far outside the cache; q is a view between NaN heads.
    """

    def build(
        lens: list[tuple[int, int]],
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> PagedBatch:
        g = torch.Generator().manual_seed(seed)
        counts = [-(-seq_len // block_size) for _, seq_len in lens]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=g).tolist()
        caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
        block_table = torch.full((len(lens), max(counts, default=0) + 1), 2**30, dtype=torch.int32)
        keys, values = [], []
        for r, (_, seq_len) in enumerate(lens):
            kv = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=g).to(dtype)
            for j in range(counts[r]):
                block = order.pop()
                block_table[r, j] = block
                rows = kv[:, j * block_size : (j + 1) * block_size]
                caches[:, block, : rows.shape[1]] = rows
            keys.append(kv[0])
            values.append(kv[1])
        starts = torch.tensor([0, *torch.tensor([q for q, _ in lens]).cumsum(0)], dtype=torch.int32)
        heads = torch.full((int(starts[-1]), num_heads + 3, head_dim), float("nan"), dtype=dtype)
        heads[:, 1 : 1 + num_heads] = torch.randn(len(heads), num_heads, head_dim, generator=g).to(dtype)
        seq_lens = torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32)
        q = heads[:, 1 : 1 + num_heads]
        return PagedBatch(q, caches[0], caches[1], block_table, starts, seq_lens, keys, values)

    return build
