"""The campaign's proof of every kernel: random data, outputs and unowned cache slots full of NaN, float64 oracles.

On a GPU the compiled kernels run; on a CPU the same kernels at small sizes in the checked interpreter, which also finds accesses
out of bounds, lanes that were never written, and races.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmlab import ops
from llmlab.measure import oracles
from llmlab.measure.measurements import ROOT

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}
"""Relative and absolute: an ulp or two of the output's rounding, and what float32 sums inside may lose."""


@dataclass(frozen=True)
class Sizes:
    """How large the cases are. ``lens``: (query length, sequence length) of a mixed batch; ``contexts``: of a decode."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    heads: tuple[tuple[int, int, int], ...]
    lens: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    vocab: int
    block_sizes: tuple[int, ...]


SIZES = {
    "gpu": Sizes(
        (1, 17, 1025),
        (576, 4096),
        ((9, 3, 64), (32, 8, 128)),
        ((1, 37), (700, 700), (33, 1500), (1, 1), (2, 16), (1, 4097), (128, 2000)),
        (1, 16, 511, 4096, 8191),
        128_256,
        (16, 1, 256),
    ),
    "interpreter": Sizes((1, 5), (96,), ((4, 2, 64),), ((1, 37), (5, 5), (9, 30), (1, 1)), (1, 40), 500, (16,)),
}


@dataclass(frozen=True)
class Case:
    """One call of one kernel. ``run`` gives pairs (got, want): compared exactly if ``want`` is not float64."""

    op: str
    dtype: torch.dtype
    name: str
    run: Callable[[], list[tuple[Tensor, Tensor]]]


def check(case: Case, how: str) -> dict[str, Any]:
    """Run a case: one row of the table ``correctness``. Nothing is raised: a kernel that does is not ok, and the row says why."""
    row = {"op": case.op, "dtype": str(case.dtype).removeprefix("torch."), "case": case.name, "limit": 1.0, "how": how}
    try:
        with _checked(how):
            errors = [_error(got, want) for got, want in case.run()]
    except Exception:
        return row | {"ok": False, "error": None, "reason": traceback.format_exc(limit=-4).replace(f"{ROOT}/", "")}
    worst = max(errors)
    ok = worst <= 1.0  # false for NaN
    return row | {"ok": ok, "error": worst if worst < float("inf") else None, "reason": "" if ok else "differs"}


def cases(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """All cases, those first on which an engine stands or falls. Sampling computes in float32 whatever ``dtype`` is."""
    for make in (_attention, _linear, _norms, _rope, _cache, _mlp, _rows):
        yield from make(device, sizes, dtype)
    yield from _sampling(device, sizes)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch allocates without filling it holds NaN (integers: their maximum), so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def kernel(family: str, name: str) -> Callable[..., Any]:
    """A launcher, called in poisoned memory."""
    launcher = getattr(importlib.import_module(f"llmlab.kernels.{family}"), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with poisoned():
            return launcher(*args, **kwargs)

    return call


def _op(name: str) -> Callable[..., Any]:
    return kernel(ops.ALL[name].family, name)


def _checked(how: str) -> Any:
    if how != "interpreter":
        return nullcontext()
    from llmlab.interpreter import checked

    return checked(raise_on_findings=True)


def _error(got: Tensor, want: Tensor) -> float:
    """The largest difference as a multiple of what is allowed; 0 or infinity where the results must be the same bits."""
    if got.shape != want.shape:
        raise ValueError(f"the result has shape {tuple(got.shape)}, must have {tuple(want.shape)}")
    if want.dtype != torch.float64:
        same = torch.equal(got, want) or bool(((got == want) | (got.isnan() & want.isnan())).all())
        return 0.0 if same else float("inf")
    rtol, atol = TOLERANCES[got.dtype]
    same_infinity = got.isinf() & (got.double() == want)
    ratio = (got.double() - want).abs() / (atol + rtol * want.abs())
    ratio = torch.where(same_infinity, 0.0, ratio)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max()) if ratio.numel() else 0.0


def _randn(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _inside_nan(x: Tensor) -> Tensor:
    """The same values as a view whose rows have NaN between them: what reads past a row's end meets it."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _norms(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for tokens in sizes.tokens:
        for hidden in sizes.hidden:

            def plain(t: int = tokens, h: int = hidden) -> list[tuple[Tensor, Tensor]]:
                x, w = _inside_nan(_randn(device, dtype, t, h)), _randn(device, dtype, h)
                return [(_op("rms_norm")(x, w, 1e-5), oracles.rms_norm(x, w, 1e-5))]

            def fused(t: int = tokens, h: int = hidden) -> list[tuple[Tensor, Tensor]]:
                x, r, w = _randn(device, dtype, t, h), _randn(device, dtype, t, h), _randn(device, dtype, h)
                total = x.double() + r.double()
                normed, residual = _op("fused_add_rms_norm")(x, r, w, 1e-5)
                return [(normed, oracles.rms_norm(residual, w, 1e-5)), (residual, total)]

            yield Case("rms_norm", dtype, f"T={tokens} H={hidden}", plain)
            yield Case("fused_add_rms_norm", dtype, f"T={tokens} H={hidden}", fused)


def _mlp(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for tokens in sizes.tokens:
        for inner in sizes.hidden:

            def run(t: int = tokens, i: int = inner) -> list[tuple[Tensor, Tensor]]:
                x = 3 * _randn(device, dtype, t, 2 * i)
                return [(_op("silu_and_mul")(x), oracles.silu_and_mul(x))]

            yield Case("silu_and_mul", dtype, f"T={tokens} I={inner}", run)


def _linear(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for tokens in sizes.tokens:
        for hidden in sizes.hidden:
            for out in (hidden, 3 * hidden + 40):

                def run(t: int = tokens, i: int = hidden, o: int = out) -> list[tuple[Tensor, Tensor]]:
                    x, w = _randn(device, dtype, t, i), _randn(device, dtype, o, i) / i**0.5
                    return [(_op("linear")(x, w), oracles.linear(x, w))]

                yield Case("linear", dtype, f"T={tokens} in={hidden} out={out}", run)


def rope_table(device: torch.device, positions: int, dim: int) -> Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def _rope(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for heads, kv_heads, dim in sizes.heads:
        for tokens in sizes.tokens:

            def run(t: int = tokens, h: int = heads, g: int = kv_heads, d: int = dim) -> list[tuple[Tensor, Tensor]]:
                table = rope_table(device, 4096, d)
                positions = torch.randint(4096, (t,), device=device)
                q, k = _inside_nan(_randn(device, dtype, t, h, d)), _randn(device, dtype, t, g, d)
                got_q, got_k = _op("rotary_embedding")(positions, q, k, table)
                want = [oracles.rotary(positions, x, table) for x in (q, k)]
                return [(got_q, want[0]), (got_k, want[1])]

            def fused(t: int = tokens, h: int = heads, g: int = kv_heads, d: int = dim) -> list[tuple[Tensor, Tensor]]:
                table, positions = rope_table(device, 4096, d), torch.randint(4096, (t,), device=device)
                q, k, v = (_randn(device, dtype, t, n, d) for n in (h, g, g))
                caches, slots = _empty_caches(device, dtype, t, g, d)
                got = kernel("rope", "rope_and_cache")(positions, q, k, v, table, *caches, slots)
                written = [cache.flatten(0, 1)[slots] for cache in caches]
                return [
                    (got, oracles.rotary(positions, q, table)),
                    (written[0], oracles.rotary(positions, k, table)),
                    (written[1], v),
                ]

            yield Case("rotary_embedding", dtype, f"T={tokens} heads={heads}/{kv_heads} D={dim}", run)
            yield Case("rope_and_cache", dtype, f"T={tokens} heads={heads}/{kv_heads} D={dim}", fused)


def _empty_caches(device: torch.device, dtype: torch.dtype, tokens: int, kv_heads: int, dim: int) -> tuple:
    blocks = -(-tokens // 16) + 3
    shape = (blocks, 16, kv_heads, dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    return caches, torch.randperm(blocks * 16, device=device)[:tokens]


def _cache(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for _, kv_heads, dim in sizes.heads:
        for tokens in sizes.tokens:

            def run(t: int = tokens, g: int = kv_heads, d: int = dim) -> list[tuple[Tensor, Tensor]]:
                k, v = _inside_nan(_randn(device, dtype, t, g, d)), _randn(device, dtype, t, g, d)
                caches, slots = _empty_caches(device, dtype, t, g, d)
                slots[t // 2] = -1
                want = [cache.clone() for cache in caches]
                kept = slots >= 0
                for cache, x in zip(want, (k, v), strict=True):
                    cache.view(-1, g, d)[slots[kept]] = x[kept]
                _op("reshape_and_cache")(k, v, *caches, slots)
                return list(zip(caches, want, strict=True))

            yield Case("reshape_and_cache", dtype, f"T={tokens} kv_heads={kv_heads} D={dim}, one slot -1", run)


def _rows(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    for tokens in sizes.tokens:
        for hidden in sizes.hidden:

            def embed(t: int = tokens, h: int = hidden) -> list[tuple[Tensor, Tensor]]:
                ids, weight = torch.randint(1000, (t,), device=device), _randn(device, dtype, 1000, h)
                return [(_op("embedding")(ids, weight), weight[ids])]

            def gather(t: int = tokens, h: int = hidden) -> list[tuple[Tensor, Tensor]]:
                x = _randn(device, dtype, t, h)
                starts = torch.tensor(sorted({0, (t + 1) // 2, t}), dtype=torch.int32, device=device)
                return [(_op("gather_last_tokens")(x, starts), x[starts[1:].long() - 1])]

            yield Case("embedding", dtype, f"T={tokens} H={hidden}", embed)
            yield Case("gather_last_tokens", dtype, f"T={tokens} H={hidden}", gather)


def paged_batch(
    device: torch.device,
    dtype: torch.dtype,
    lens: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """The arguments of ``paged_attention``, and each request's keys and values.

    Blocks are shuffled; slots that no sequence owns hold NaN, table entries past a sequence point outside of the cache.
    """
    num_heads, kv_heads, dim = heads
    counts = [-(-s // block_size) for _, s in lens]
    total = sum(counts) + 3
    caches = torch.full((2, total, block_size, kv_heads, dim), float("nan"), dtype=dtype, device=device)
    table = torch.full((len(lens), max(counts) + 1), 2**30, dtype=torch.int32, device=device)
    free = torch.randperm(total, device=device)
    keys, values, used = [], [], 0
    for r, (_, length) in enumerate(lens):
        mine = free[used : used + counts[r]]
        used += counts[r]
        table[r, : counts[r]] = mine.int()
        kv = _randn(device, dtype, 2, length, kv_heads, dim)
        places = torch.arange(length, device=device)
        caches[:, mine[places // block_size], places % block_size] = kv
        keys.append(kv[0])
        values.append(kv[1])
    starts = torch.tensor([0, *torch.tensor([q for q, _ in lens]).cumsum(0)], dtype=torch.int32, device=device)
    q = _inside_nan(_randn(device, dtype, int(starts[-1]), num_heads, dim))
    seq_lens = torch.tensor([s for _, s in lens], dtype=torch.int32, device=device)
    return (q, caches[0], caches[1], table, starts, seq_lens), keys, values


def attend(
    device: torch.device,
    dtype: torch.dtype,
    lens: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    call: Callable[..., Any],
    **options: Any,
) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of a kernel over a poisoned paged batch, beside the oracle's."""
    arguments, keys, values = paged_batch(device, dtype, lens, heads, block_size)
    scale = heads[2] ** -0.5
    out, lse = call(*arguments, scale, return_lse=True, **options)
    starts = arguments[4].tolist()
    want = [
        oracles.attention(
            arguments[0][starts[r] : starts[r + 1]],
            keys[r],
            values[r],
            scale,
            options.get("sliding_window"),
            options.get("soft_cap"),
        )
        for r in range(len(lens))
    ]
    # The log-sum-exp is float32, of products of rounded operands: what the tensor cores' sums lose is a few of its ulps.
    return [(out, torch.cat([w[0] for w in want])), (lse / 4, torch.cat([w[1] for w in want]) / 4)]


def _attention(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    paged, split = _op("paged_attention"), kernel("flash_decoding", "flash_decoding")
    decodes = tuple((1, s) for s in sizes.contexts)
    longest = max(sizes.contexts)
    plain = (("mixed", sizes.lens, {}), ("decode", decodes, {}), ("prefill", ((longest // 4 + 1,) * 2,), {}))
    options = (
        ("mixed, window 33", sizes.lens, {"sliding_window": 33}),
        ("mixed, soft cap 5", sizes.lens, {"soft_cap": 5.0}),
    )

    def case(op: str, name: str, call: Any, lens: Any, heads: Any, block_size: int, **more: Any) -> Case:
        run = lambda: attend(device, dtype, lens, heads, block_size, call, **more)
        return Case(op, dtype, f"{name}, heads={heads[0]}/{heads[1]} D={heads[2]} block={block_size}", run)

    for heads in sizes.heads:
        for name, lens, more in (*plain, *options):
            yield case("paged_attention", name, paged, lens, heads, sizes.block_sizes[0], **more)
        for splits in (1, 8):
            name = f"decode, {splits} splits"
            yield case("flash_decoding", name, split, decodes, heads, sizes.block_sizes[0], num_splits=splits)
        for block_size in sizes.block_sizes[1:]:
            yield case("paged_attention", "mixed", paged, sizes.lens, heads, block_size)
        yield Case("contiguous_attention", dtype, f"mixed, heads={heads[0]}/{heads[1]} D={heads[2]}",
                   lambda h=heads: _contiguous(device, dtype, sizes.lens, h))  # fmt: skip
        yield Case("merge_attention_states", dtype, f"T={sizes.tokens[-1]}, some parts empty",
                   lambda h=heads: _merge(device, dtype, sizes.tokens[-1], h))  # fmt: skip


def _contiguous(device: torch.device, dtype: torch.dtype, lens: Any, heads: Any) -> list[tuple[Tensor, Tensor]]:
    (q, *_), keys, values = paged_batch(device, dtype, lens, heads, 16)
    bounds = [[0, *torch.tensor([pair[i] for pair in lens]).cumsum(0).tolist()] for i in (0, 1)]
    starts, key_starts = (torch.tensor(b, dtype=torch.int32, device=device) for b in bounds)
    scale = heads[2] ** -0.5
    call = kernel("contiguous_attention", "contiguous_attention")
    got = call(q, torch.cat(keys), torch.cat(values), starts, key_starts, scale)
    pieces = [q[a:b] for a, b in zip(bounds[0], bounds[0][1:], strict=False)]
    want = [oracles.attention(p, k, v, scale)[0] for p, k, v in zip(pieces, keys, values, strict=True)]
    return [(got, torch.cat(want))]


def _merge(device: torch.device, dtype: torch.dtype, tokens: int, heads: Any) -> list[tuple[Tensor, Tensor]]:
    out_a, out_b = (_randn(device, dtype, tokens, heads[0], heads[2]) for _ in range(2))
    lse_a, lse_b = (3 * torch.randn(tokens, heads[0], device=device) for _ in range(2))
    lse_a[0, 0], out_a[0, 0] = float("-inf"), float("nan")  # a part without keys may hold anything
    got, got_lse = _op("merge_attention_states")(out_a, lse_a, out_b, lse_b)
    clean = torch.nan_to_num(out_a)
    want, want_lse = oracles.merge(clean, lse_a, out_b, lse_b)
    return [(got, want), (got_lse, want_lse)]


def _sampling(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    rows, vocab, f32 = 5, sizes.vocab, torch.float32
    logits = lambda: 3 * torch.randn(rows, vocab, device=device)
    place = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)
    on_host = lambda name, *args: getattr(ops, name).reference(*(a.cpu() if isinstance(a, Tensor) else a for a in args))

    def temperature() -> list[tuple[Tensor, Tensor]]:
        x, t = logits(), place([0.0, 0.3, 1.0, 1.7, 0.0], f32)
        return [(_op("apply_temperature")(x, t), x.double() / torch.where(t == 0, 1.0, t).double()[:, None])]

    def min_p() -> list[tuple[Tensor, Tensor]]:
        x, p = logits(), place([0.0, 0.01, 0.1, 0.9, 1.0], f32)
        distance = (x.double() - x.double().amax(-1, keepdim=True)) - p.double().log()[:, None]
        got = _op("apply_min_p")(x, p)
        want = torch.where(distance.abs() < 1e-5, got, torch.where(distance < 0, float("-inf"), x))  # rounding decides
        return [(got, want)]

    def penalties() -> list[tuple[Tensor, Tensor]]:
        x, listed = logits(), torch.arange(0, vocab, max(vocab // 40, 1), device=device)
        cells = torch.cartesian_prod(torch.arange(rows, device=device), listed)
        counts = torch.randint(0, 4, (len(cells),), device=device)
        factors = [place(v, f32) for v in ([1.0, 1.2, 0.8, 2, 1], [0.0, 0.5, 1, 0, -1], [0.0, 0.4, 0, 2, -1])]
        arguments = (x, cells[:, 0].contiguous(), cells[:, 1].contiguous(), counts, *factors)
        return [(_op("apply_penalties")(*arguments), oracles.penalties(*arguments))]

    def greedy() -> list[tuple[Tensor, Tensor]]:
        x = logits()
        x[1] = float("-inf")
        x[2, vocab // 2 :] = x[2].max()
        return [(_op("greedy_argmax")(x), on_host("greedy_argmax", x).to(device))]

    def top_k_top_p() -> list[tuple[Tensor, Tensor]]:
        x, k, p = logits(), place([0, 1, 50, vocab, 7], torch.int64), place([0.9, 1.0, 0.5, 0.95, 0.0], f32)
        return [(_op("apply_top_k_top_p")(x, k, p), on_host("apply_top_k_top_p", x, k, p).to(device))]

    def race() -> list[tuple[Tensor, Tensor]]:
        from llmlab.ops.sampling import exponential_noise

        x, t = logits(), place([0.0, 0.3, 1.0, 1.7, 1.0], f32)
        seeds, positions = torch.arange(rows, device=device) * 7919, torch.arange(rows, device=device)
        got = _op("gumbel_argmax")(x, t, seeds, positions)
        noise = exponential_noise(seeds.cpu(), positions.cpu(), vocab).to(device).double().log()
        scores = x.double() / torch.where(t == 0, 1.0, t).double()[:, None] - torch.where(t[:, None] == 0, 0.0, noise)
        winner = scores.gather(1, got[:, None])[:, 0]  # at a near tie either is right
        return [(winner.float(), scores.amax(-1))]

    def top_n() -> list[tuple[Tensor, Tensor]]:
        x, tokens = logits(), torch.randint(vocab, (rows,), device=device)
        got = _op("top_n_logprobs")(x, tokens, 5)
        want = on_host("top_n_logprobs", x, tokens, 5)
        logprobs = x.double().log_softmax(-1).gather(1, got[1].long())
        return [(got[0], logprobs), (got[1].long(), want[1].to(device)), (got[2].long(), want[2].to(device))]

    for name, run in (
        ("apply_top_k_top_p", top_k_top_p), ("gumbel_argmax", race), ("greedy_argmax", greedy), ("top_n_logprobs", top_n),
        ("apply_temperature", temperature), ("apply_min_p", min_p), ("apply_penalties", penalties),
    ):  # fmt: skip
        yield Case(name, f32, f"R={rows} V={vocab}", run)
