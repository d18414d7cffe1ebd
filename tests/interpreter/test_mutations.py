# ruff: noqa: E501 (the catalogues are tables: one mutant a line)
"""A test of the checks: kernels are broken on purpose, one line each, and every break must be seen.

A mutant is a kernel's source with one text replaced (a text that is not there fails the test), loaded as a module and run on
poisoned data with all checks on. It is caught by a finding, by a failing run, or by a number that differs from the oracle.
The first catalogue breaks the kernels beside this file, the second one those that the package ships.
"""

import importlib.util
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import llmlab.kernels
from llmlab.interpreter import Checks, KernelError, checked, run

CHECKS = Checks(max_trips=20_000, tf32=False)
OWN = Path(__file__).with_name("mutation_kernels.py")
NAN = float("nan")

Scenario = Callable[[ModuleType], bool]  # runs a (mutated) module; True when every number is right


@dataclass(frozen=True)
class Mutant:
    name: str
    scenario: Scenario
    old: str
    new: str
    equivalent: str = ""  # why no run can tell it from the original


_numbers = itertools.count()


def load(source: str, folder: Path) -> ModuleType:
    path = folder / f"mutant_{next(_numbers)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of(scenario: Scenario) -> str:
    """The source that a scenario runs: of the package's kernel file that its name begins with, else of our own."""
    name = scenario.__name__.removeprefix("package_")
    if name == scenario.__name__:
        return OWN.read_text()
    folder = Path(next(iter(llmlab.kernels.__path__)))
    return (folder / f"{name.split('_')[0]}.py").read_text()


def outcome(scenario: Scenario, module: ModuleType) -> str:
    """ "" for a clean run with right numbers, else what was seen."""
    try:
        with checked(CHECKS) as findings:
            right = scenario(module)
    except KernelError as error:
        return f"failed: {error}"
    seen = sorted({finding.kind for finding in findings})
    return ", ".join(seen + ([] if right else ["wrong numbers"]))


def caught(mutant: Mutant, folder: Path) -> str:
    source = source_of(mutant.scenario)
    assert mutant.old in source, f"{mutant.name}: the text to replace is not in the kernel any more"
    assert mutant.old != mutant.new
    return outcome(mutant.scenario, load(source.replace(mutant.old, mutant.new), folder))


def near(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual.double() - expected.double()).abs().max() <= tolerance)  # NaN is not


# -- the kernels beside this file


def attention(module: ModuleType) -> bool:
    heads, group, dim, block_size = 2, 4, 64, 16
    lengths = [
        (1, 37),
        (5, 5),
        (33, 70),
        (1, 1),
        (2, 16),
        (1, 16),
        (1, 130),
    ]  # the longest last: past it the table ends
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-seq // block_size) for _, seq in lengths]
    cache = torch.full((2, sum(blocks_of) + 5, block_size, heads, dim), NAN, dtype=torch.bfloat16)
    free = (torch.randperm(cache.shape[1] - 1, generator=generator) + 1).tolist()  # block 0 is nobody's, and NaN
    table = torch.full((len(lengths), max(blocks_of)), 2**30, dtype=torch.int32)
    for request, (_, seq) in enumerate(lengths):
        for j in range(blocks_of[request]):
            table[request, j] = block = free.pop()
            used = min(block_size, seq - j * block_size)
            cache[:, block, :used] = torch.randn(2, used, heads, dim, generator=generator).to(torch.bfloat16)
    starts = torch.tensor([0] + [q for q, _ in lengths]).cumsum(0).int()
    tokens = int(starts[-1])
    q = torch.randn(tokens, heads * group + 3, dim, generator=generator).to(torch.bfloat16)[:, : heads * group]
    out = torch.full((tokens, heads * group, dim), NAN, dtype=torch.bfloat16)
    seq_lens = torch.tensor([seq for _, seq in lengths], dtype=torch.int32)
    block_q = 32 // group
    grid = (tokens // block_q + len(lengths), heads)
    strides = (table.stride(0), q.stride(0), out.stride(0), *cache[0].stride()[:3])
    sizes = {"KV_HEADS": heads, "GROUP": group, "D": dim, "BLOCK_SIZE": block_size, "BLOCK_M": 32, "BLOCK_N": 32}
    scale = dim**-0.5
    run(
        module.attention, grid, out, q, cache[0], cache[1], table, starts, seq_lens, scale / math.log(2), len(lengths), *strides, **sizes
    )  # fmt: skip
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for request, (query_len, seq) in enumerate(lengths):
        position = torch.arange(seq)
        keys, values = cache[:, table[request, position // block_size].long(), position % block_size].double()
        own = slice(int(starts[request]), int(starts[request + 1]))
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), keys.repeat_interleave(group, 1)) * scale
        visible = position[None] <= torch.arange(query_len)[:, None] + seq - query_len
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        expected[own] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
    return near(out, expected, 0.02)


def padded(rows: int, length: int, pad: int, fill: float = NAN) -> tuple[Tensor, Tensor]:
    """(a view [rows, length], all of the padding around it)."""
    storage = torch.full((rows, length + pad), fill)
    return storage[:, :length], storage[:, length:]


def rms_norm(module: ModuleType) -> bool:
    length = 96
    generator = torch.Generator().manual_seed(0)
    x, residual, out = (padded(5, length, 16)[0] for _ in range(3))
    x.copy_(torch.randn(5, length, generator=generator))
    residual.copy_(torch.randn(5, length, generator=generator))
    weight = torch.randn(length, generator=generator)
    total = (x + residual).clone()
    expected = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + 1e-5) * weight
    run(module.rms_norm, (5,), x, residual, weight, out, length, x.stride(0), 1e-5, BLOCK=128)
    return near(out, expected, 1e-4) and near(residual, total, 1e-6)


def write_cache(module: ModuleType) -> bool:
    length = 48
    k = torch.randn(6, length)
    slots = torch.tensor([3, 7, -1, 0, 11, 5], dtype=torch.int32)
    cache, pad = padded(12, length, 16)
    run(module.write_cache, (6,), k, cache, slots, length, cache.stride(0), BLOCK=64)
    written = torch.zeros(12, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    return (
        torch.equal(cache[slots[slots >= 0]], k[slots >= 0])
        and bool(cache[~written].isnan().all())
        and bool(pad.isnan().all())
    )


TAIL_K = "k = tl.load(keys + rows[None, :] + d[:, None], mask=seen[None, :], other=0.0)"
TAIL_V = "v = tl.load(values + rows[:, None] + d[None, :], mask=seen[:, None], other=0.0)"
SCORE_MASKED = "a key that is not seen has its score replaced by -inf, whatever was loaded for it"

OWN_MUTANTS = [
    Mutant("attention: key mask dropped", attention, TAIL_K, "k = tl.load(keys + rows[None, :] + d[:, None])", SCORE_MASKED),
    Mutant("attention: value mask dropped", attention, TAIL_V, "v = tl.load(values + rows[:, None] + d[None, :])"),
    Mutant("attention: value `other` dropped", attention, TAIL_V, TAIL_V.replace(", other=0.0", "")),
    Mutant("attention: key `other` dropped", attention, TAIL_K, TAIL_K.replace(", other=0.0", ""), SCORE_MASKED),
    Mutant("attention: block table read past its end", attention, "kn // BLOCK_SIZE, mask=seen, other=0)", "kn // BLOCK_SIZE)"),
    Mutant("attention: a query does not see itself", attention, "kn[None, :] <= context", "kn[None, :] < context"),
    Mutant("attention: past the sequence's end", attention, "tl.minimum(context + (local + 1) * BLOCK_Q, seq_len)", "context + (local + 1) * BLOCK_Q"),
    Mutant("attention: unmasked one tile too far", attention, "(context + local * BLOCK_Q + 1) //", "(context + local * BLOCK_Q + BLOCK_Q) //"),
    Mutant("attention: stores rows of the next request", attention, "out, mask=row_mask[:, None])", "out, mask=(head < GROUP)[:, None])"),
    Mutant("attention: query mask dropped", attention, "d[None, :], mask=row_mask[:, None], other=0.0)\n    row_max", "d[None, :])\n    row_max"),
    Mutant("attention: query taken as contiguous", attention, ".to(tl.int64) * q_stride +", ".to(tl.int64) * (KV_HEADS * GROUP * D) +"),
    Mutant("attention: sum not rescaled", attention, "row_sum = row_sum * alpha + ", "row_sum = row_sum + "),
    Mutant("attention: no early return", attention, "if local * BLOCK_Q >= query_len:", "if local * BLOCK_Q > 1000000:", "the return saves time: without it the program's rows are all masked"),
    Mutant("attention: wrong head written", attention, "* out_stride + (kv_head * GROUP + head) * D", "* out_stride + (kv_head * GROUP + head // 2) * D"),
    Mutant("rms_norm: x mask dropped", rms_norm, "x = tl.load(x_ptr + row * stride + i, mask=mask, other=0.0)", "x = tl.load(x_ptr + row * stride + i)"),
    Mutant("rms_norm: x `other` dropped", rms_norm, "x = tl.load(x_ptr + row * stride + i, mask=mask, other=0.0)", "x = tl.load(x_ptr + row * stride + i, mask=mask)"),
    Mutant("rms_norm: residual store unmasked", rms_norm, "h.to(residual_ptr.dtype.element_ty), mask=mask)", "h.to(residual_ptr.dtype.element_ty))"),
    Mutant("rms_norm: out store unmasked", rms_norm, "+ i, out, mask=mask)", "+ i, out)"),
    Mutant("rms_norm: row stride forgotten", rms_norm, "out_ptr + row * stride", "out_ptr + row * length"),
    Mutant("rms_norm: weight mask dropped", rms_norm, "tl.load(weight_ptr + i, mask=mask, other=0.0)", "tl.load(weight_ptr + i)"),
    Mutant("rms_norm: reads its own store back", rms_norm, "    variance =", "    h = tl.load(residual_ptr + row * stride + i, mask=mask, other=0.0)\n    variance ="),
    Mutant("write_cache: -1 not skipped", write_cache, "if slot < 0:", "if slot < -1:"),
    Mutant("write_cache: store unmasked", write_cache, "k, mask=mask)", "k)"),
    Mutant("write_cache: two programs, one slot", write_cache, "slot = tl.load(slot_ptr + token)", "slot = tl.load(slot_ptr + token) % 4"),
]  # fmt: skip


# -- the kernels that the package ships: package_FILE_... runs kernels/FILE.py


def package_rope(module: ModuleType) -> bool:
    """Partial rotary, an odd number of heads, non-contiguous q and k, positions out of order."""
    tokens, q_heads, kv_heads, dim, rotary = 5, 3, 1, 24, 12
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, generator=generator)
    q = qkv[:, : q_heads * dim].view(tokens, q_heads, dim)
    k = qkv[:, q_heads * dim : (q_heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    positions = torch.tensor([7, 0, 3, 9, 1])
    angles = torch.outer(torch.arange(10.0), 10000.0 ** -(torch.arange(0, rotary, 2) / rotary))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    actual = module.rotary_embedding(positions, q, k, table)

    def expected(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions][:, None]
        half = rotary // 2
        turned = torch.complex(x[..., :half].double(), x[..., half:rotary].double()) * turn
        return torch.cat([turned.real, turned.imag, x[..., rotary:].double()], -1)

    return all(near(a, expected(x), 1e-5) for a, x in zip(actual, (q, k), strict=True))


def package_mlp(module: ModuleType) -> bool:
    """Rows of odd length in padded storage."""
    x, _ = padded(4, 2 * 40, 24)
    x.copy_(torch.randn(4, 80, generator=torch.Generator().manual_seed(0)))
    gate, up = x[:, :40].double(), x[:, 40:].double()
    return near(module.silu_and_mul(x), torch.nn.functional.silu(gate) * up, 1e-5)


def package_linear(module: ModuleType) -> bool:
    """Odd sizes, padded rows, a bias, K cut in four, each twice: the whole and the split path."""
    generator = torch.Generator().manual_seed(0)
    right = True
    for depth in (1030, 40):
        x, _ = padded(5, depth, 8)
        weight, _ = padded(37, depth, 8)
        x.copy_(torch.randn(5, depth, generator=generator) / depth**0.5)
        weight.copy_(torch.randn(37, depth, generator=generator))
        x, weight = x.bfloat16(), weight.bfloat16()
        bias = torch.randn(37, generator=generator).bfloat16()
        tile = module.choose_tile(x, weight)
        out = module.run_tile(x, weight, bias, tile, 4 if depth > 1000 else 1)
        right &= near(out, x.double() @ weight.double().T + bias.double(), 0.02)
    return right


def package_linear_far(module: ModuleType) -> bool:
    """Rows so far apart that their offsets pass 2^31 elements (memory that is asked for and never touched)."""
    far = torch.empty(9 * 2**28, dtype=torch.float16)
    x = torch.as_strided(far, (9, 8), (2**28, 1))
    x.copy_(torch.randn(9, 8).half())
    weight = torch.randn(16, 8).half()
    out = module.linear(x, weight)
    return near(out, x.double() @ weight.double().T, 0.02)


def package_cache(module: ModuleType) -> bool:
    """Keys and values of different strides, a skipped slot, a cache whose unwritten slots are NaN."""
    tokens, heads, dim, blocks, size = 5, 3, 12, 3, 4
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(tokens, 2 * heads + 1, dim, generator=generator)
    k, v = kv[:, :heads], kv[:, heads : 2 * heads].clone()
    caches = torch.full((2, blocks, size, heads, dim), NAN)
    key_cache, value_cache = caches[0], torch.full((blocks, heads, size, dim), NAN).transpose(1, 2)
    slots = torch.tensor([9, 2, -1, 3, 11])
    module.reshape_and_cache(k, v, key_cache, value_cache, slots)
    kept = slots >= 0
    right = bool(caches[1].isnan().all())
    for cache, values in ((key_cache, k), (value_cache, v)):
        flat = cache.reshape(blocks * size, heads, dim)
        right &= torch.equal(flat[slots[kept]], values[kept]) and int(flat.isnan().all(-1).all(-1).sum()) == 8
    return right


def package_norm(module: ModuleType) -> bool:
    """bfloat16 rows in padded storage: the rounding before the weight shows in the last bit."""
    generator = torch.Generator().manual_seed(0)
    x, _ = padded(5, 40, 8)
    x = torch.randn(5, 48, generator=generator).bfloat16()[:, :40]
    residual = torch.randn(5, 56, generator=generator).bfloat16()[:, :40]
    weight = (1 + torch.randn(40, generator=generator)).bfloat16()
    total = x + residual

    def expected(rows: Tensor) -> Tensor:  # float64 inside; Hugging Face's rounding points
        wide = rows.double()
        return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).bfloat16()

    normed = module.rms_norm(x, weight, 1e-5)
    fused, summed = module.fused_add_rms_norm(x, residual, weight, 1e-5)
    return torch.equal(normed, expected(x)) and torch.equal(fused, expected(total)) and torch.equal(summed, total)


def package_embedding(module: ModuleType) -> bool:
    weight, _ = padded(7, 20, 4)
    weight.copy_(torch.randn(7, 20, generator=torch.Generator().manual_seed(0)))
    ids = torch.tensor([6, 0, 3, 3])
    starts = torch.tensor([0, 2, 3, 7], dtype=torch.int32)
    return torch.equal(module.embedding(ids, weight), weight[ids]) and torch.equal(
        module.gather_last_tokens(weight, starts), weight[starts[1:].long() - 1]
    )


def package_sampling(module: ModuleType) -> bool:
    """Two blocks of logits a row, all negative, in padded storage; a row of temperature 0; equal maxima."""
    vocab = 5000
    logits, _ = padded(3, vocab, 8)
    logits.copy_(-5 - torch.rand(3, vocab, generator=torch.Generator().manual_seed(0)))
    temperatures = torch.tensor([0.5, 0.0, 1.7])
    divisors = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    right = torch.equal(module.apply_temperature(logits, temperatures), logits / divisors)
    min_p = torch.tensor([0.5, 0.9, 0.99])
    kept = module.apply_min_p(logits, min_p)
    share = (logits.double() - logits.double().amax(1, keepdim=True)).exp() / min_p[:, None].double()
    right &= torch.equal(kept[share > 1 + 1e-5], logits[share > 1 + 1e-5]) and bool(
        kept[share < 1 - 1e-5].isneginf().all()
    )
    logits[0, 7] = logits[0, 4900] = logits[0, 4901] = -1.0
    logits[2, 4098] = logits[2, 4097] = -1.0
    greedy = module.greedy_argmax(logits)
    right &= greedy.tolist() == logits.argmax(1).tolist() and greedy.tolist()[::2] == [7, 4097]
    seeds, positions = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    drawn = module.gumbel_argmax(logits * 1e6, temperatures, seeds, positions)  # noise is nothing beside such distances
    return right and drawn.tolist() in (
        [[first, greedy[1], second] for first in (7, 4900, 4901) for second in (4097, 4098)]
    )


PACKAGE_MUTANTS = [
    Mutant("rope: pairs past the rotary half", package_rope, "mask = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]", "mask = (heads < NUM_HEADS)[:, None] & (dims < BLOCK_HALF)[None, :]"),
    Mutant("rope: heads past the last", package_rope, "mask = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]", "mask = (heads < BLOCK_HEADS)[:, None] & (dims < HALF)[None, :]"),
    Mutant("rope: turned the other way", package_rope, "(second * cos[None, :] + first * sin[None, :])", "(second * cos[None, :] - first * sin[None, :])"),
    Mutant("rope: pairs half a head apart", package_rope, "in_ptr + in_offsets + HALF, mask", "in_ptr + in_offsets + HEAD_DIM // 2, mask"),
    Mutant("rope: q taken as contiguous", package_rope, "q_ptr + token * q_stride_token,\n        q_out_ptr + token * (NUM_Q_HEADS * HEAD_DIM)", "q_ptr + token * (NUM_Q_HEADS * HEAD_DIM),\n        q_out_ptr + token * (NUM_Q_HEADS * HEAD_DIM)"),
    Mutant("rope: row of the token, not of its position", package_rope, "angles_ptr + position * table_stride", "angles_ptr + token * table_stride"),
    Mutant("rope: tail past the head", package_rope, "tail_mask = (heads < NUM_HEADS)[:, None] & (tail < HEAD_DIM)[None, :]", "tail_mask = (heads < NUM_HEADS)[:, None] & (tail > 0)[None, :]"),
    Mutant("silu: gate mask dropped", package_mlp, "gate = tl.load(row_ptr + cols, mask=mask, other=0.0)", "gate = tl.load(row_ptr + cols)", "a block is at most twice as long as a row's gate half: past it lies the row's own up half, and nothing is stored there"),
    Mutant("silu: up mask dropped", package_mlp, "up = tl.load(row_ptr + intermediate_size + cols, mask=mask, other=0.0)", "up = tl.load(row_ptr + intermediate_size + cols)"),
    Mutant("silu: store unmasked", package_mlp, "out.to(out_ptr.dtype.element_ty), mask=mask)", "out.to(out_ptr.dtype.element_ty))"),
    Mutant("silu: up half a stride away", package_mlp, "tl.load(row_ptr + intermediate_size + cols", "tl.load(row_ptr + x_stride // 2 + cols"),
    Mutant("silu: gate not multiplied", package_mlp, "gate / (1.0 + tl.exp(-gate)) * up", "1.0 / (1.0 + tl.exp(-gate)) * up"),
    Mutant("linear: x read past its depth", package_linear, "mask=row_mask[:, None] & k_mask[None, :], other=0.0)", "mask=row_mask[:, None], other=0.0)"),
    Mutant("linear: weight read past its last row", package_linear, "mask=col_mask[None, :] & k_mask[:, None], other=0.0)", "mask=k_mask[:, None], other=0.0)"),
    Mutant("linear: splits write one place", package_linear, "out_rows = split.to(tl.int64) * M + rows", "out_rows = split.to(tl.int64) * 0 + rows"),
    Mutant("linear: splits overlap", package_linear, "k_end = tl.minimum(k_start + k_per_split, K)", "k_end = tl.minimum(k_start + k_per_split + BLOCK_K, K)"),
    Mutant("linear: parts of another matrix", package_linear, "(split * M + row) * N + cols", "(split * N + row) * N + cols"),
    Mutant("linear: bias mask dropped", package_linear, "total += tl.load(bias_ptr + cols, mask=mask, other=0.0)", "total += tl.load(bias_ptr + cols)"),
    Mutant("linear: offsets in 32 bits", package_linear_far, "x_ptr + rows[:, None].to(tl.int64) * x_stride", "x_ptr + rows[:, None] * x_stride"),
    Mutant("cache: -1 not skipped", package_cache, "if slot < 0:", "if slot < -1:"),
    Mutant("cache: values by the keys' strides", package_cache, "block * value_stride_block + index * value_stride_slot", "block * key_stride_block + index * key_stride_slot"),
    Mutant("cache: one head too many", package_cache, "mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]", "mask = (heads <= NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]"),
    Mutant("cache: block and place swapped", package_cache, "block = slot // block_size\n    index = slot % block_size", "index = slot // block_size\n    block = slot % block_size"),
    Mutant("norm: mean over the padded length", package_norm, "tl.sum(x * x, 1) / row_length", "tl.sum(x * x, 1) / BLOCK_LENGTH"),
    Mutant("norm: weight mask dropped", package_norm, "tl.load(weight_ptr + cols, mask=col_mask, other=0.0)", "tl.load(weight_ptr + cols)"),
    Mutant("norm: not rounded before the weight", package_norm, "(x * reciprocal[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)", "x * reciprocal[:, None]"),
    Mutant("norm: rows past the last", package_norm, "mask = (rows < num_rows)[:, None] & col_mask[None, :]", "mask = (rows <= num_rows)[:, None] & col_mask[None, :]"),
    Mutant("norm: statistics before rounding", package_norm, "total = rounded.to(tl.float32)", "total = x + residual.to(tl.float32)"),
    Mutant("embedding: row stride forgotten", package_embedding, "source * table_stride", "source * row_length"),
    Mutant("embedding: first token, not last", package_embedding, ".to(tl.int64) + offset", ".to(tl.int64)"),
    Mutant("embedding: store unmasked", package_embedding, "values, mask=mask)", "values)"),
    Mutant("sampling: temperature 0 divides", package_sampling, "tl.where(temperature == 0.0, 1.0, temperature)", "temperature"),
    Mutant("sampling: temperature store unmasked", package_sampling, "tl.store(out_ptr + row * vocab_size + cols, x, mask=mask)", "tl.store(out_ptr + row * vocab_size + cols, x)"),
    Mutant("sampling: min_p of the first row", package_sampling, "tl.load(log_min_p_ptr + row)", "tl.load(log_min_p_ptr)"),
    Mutant("sampling: min_p's maximum with a zero", package_sampling, "mask=start + cols < vocab_size, other=float(\"-inf\"))", "mask=start + cols < vocab_size, other=0.0)"),
    Mutant("sampling: argmax over padding", package_sampling, "mask=mask, other=float(\"-inf\")).to(tl.float32)", "mask=mask, other=0.0).to(tl.float32)"),
    Mutant("sampling: the last of equals", package_sampling, "tl.min(tl.where(scores == tl.max(scores, 0), ids, 0x7FFFFFFF), 0)", "tl.max(tl.where(scores == tl.max(scores, 0), ids, -1), 0)"),
    Mutant("sampling: blocks of one row overwrite each other", package_sampling, "out = row * num_blocks + block", "out = row * num_blocks"),
]  # fmt: skip

SCENARIOS = list(dict.fromkeys(mutant.scenario for mutant in OWN_MUTANTS + PACKAGE_MUTANTS))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_originals_are_clean(scenario: Scenario, tmp_path: Path) -> None:
    assert outcome(scenario, load(source_of(scenario), tmp_path)) == ""


@pytest.mark.parametrize(
    "mutant", [m for m in OWN_MUTANTS + PACKAGE_MUTANTS if not m.equivalent], ids=lambda mutant: mutant.name
)
def test_mutants_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    assert caught(mutant, tmp_path) != ""


@pytest.mark.parametrize(
    "mutant", [m for m in OWN_MUTANTS + PACKAGE_MUTANTS if m.equivalent], ids=lambda mutant: mutant.name
)
def test_equivalent_mutants_are_left_alone(mutant: Mutant, tmp_path: Path) -> None:
    """They compute the right numbers without touching what is not theirs, so that a finding would be a false one."""
    assert caught(mutant, tmp_path) == "", mutant.equivalent


def test_the_catalogue_is_as_large_as_it_says() -> None:
    assert len([m for m in OWN_MUTANTS if not m.equivalent]) == 21 and len(OWN_MUTANTS) == 24
    assert len([m for m in PACKAGE_MUTANTS if not m.equivalent]) >= 30
    names = [m.name for m in OWN_MUTANTS + PACKAGE_MUTANTS]
    assert len(set(names)) == len(names)
