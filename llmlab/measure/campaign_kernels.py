"""The campaign's clocks on kernels: each against what torch has for the same, over shapes of real models, under the roofline.

On a GPU that is the Triton kernel; on a CPU the fast twin. The interpreter is never clocked. And, where there is the memory for
it, kernels on tensors of more than 2³¹ elements, whose offsets do not fit 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmlab import ops
from llmlab.measure import oracles
from llmlab.measure.campaign_correctness import Case, kernel, rope_table
from llmlab.measure.hardware import Ceilings
from llmlab.measure.known_models import known_config
from llmlab.measure.timer import Measurement, measure_in_turns

MODELS = ("llama-3-8b", "smollm2-135m-instruct")
PAST_32_BITS = 2**31


@dataclass(frozen=True)
class Contest:
    """One op at one shape. ``runs``: what is clocked, by the name that the table gives it; each takes no arguments."""

    op: str
    shape: str
    dtype: torch.dtype
    cost: Any
    nbytes: int
    runs: dict[str, Callable[[], Any]]


def clock(contest: Contest, ceilings: Ceilings, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Rows of the table ``kernels``: all ways in turns, so that a machine that drifts drifts for all."""
    taken = measure_in_turns(contest.runs, device=device, repeats=25, max_seconds=seconds * len(contest.runs))
    return [_row(contest, ceilings, name, measured) for name, measured in taken.items()]


def _row(contest: Contest, ceilings: Ceilings, name: str, measured: Measurement) -> dict[str, Any]:
    level = ceilings.level_holding(contest.nbytes)
    least = ceilings.roof(contest.dtype, level).seconds(*contest.cost)
    return {
        "op": contest.op,
        "dtype": str(contest.dtype).removeprefix("torch."),
        "shape": contest.shape,
        "implementation": name,
        "seconds": measured.median,
        "low": measured.low,
        "high": measured.high,
        "repeats": measured.repeats,
        "flops": contest.cost.flops,
        "bytes": contest.cost.bytes,
        "level": level,
        "least_seconds": least,
        "of_roof": least / measured.median,
        "load": round(measured.load, 2),
    }


def contests(device: torch.device, tokens: tuple[int, ...], compiled: bool = False) -> Iterator[Contest]:
    """Every op of a step at the shapes of the known models. ``compiled``: torch.compile's version beside torch's own."""
    own = "kernel" if device.type == "cuda" else "cpu"
    dtype = torch.bfloat16
    randn = lambda *shape: torch.randn(*shape, device=device).to(dtype)

    def contest(name: str, shape: str, others: dict[str, Callable[..., Any]], *args: Any, **kwargs: Any) -> Contest:
        one = ops.ALL[name]
        mine = one.kernel if own == "kernel" else one.cpu
        cost = one.cost(*args, **kwargs)
        fed = args
        if name == "linear" and own == "cpu":
            fed = (args[0], ops.bind("torch", device).linear_packer()(args[1]))
        runs = {own: lambda: mine(*fed, **kwargs)} | others
        if compiled:
            quick = torch.compile(one.reference)
            runs["compiled"] = lambda: quick(*args, **kwargs)
        first = next(a for a in args if isinstance(a, Tensor))
        kind = first.dtype if first.is_floating_point() else dtype
        return Contest(name, shape, kind, cost, int(cost.bytes), runs)

    for t in tokens:
        for model in MODELS:
            c = known_config(model)
            shape = f"{model}, T={t}"
            x, r, w = randn(t, c.hidden_size), randn(t, c.hidden_size), randn(c.hidden_size)
            torch_norm = {"torch": lambda x=x, w=w: F.rms_norm(x, w.shape, w, 1e-5)}
            yield contest("rms_norm", shape, torch_norm, x, w, 1e-5)
            torch_fused = {"torch": lambda x=x, r=r, w=w: F.rms_norm(x + r, w.shape, w, 1e-5)}
            yield contest("fused_add_rms_norm", shape, torch_fused, x, r, w, 1e-5)
            gate_up = randn(t, 2 * c.intermediate_size)
            yield contest("silu_and_mul", shape, {"torch": lambda x=gate_up: _silu(x)}, gate_up)
            for name, (i, o) in (("qkv", (c.hidden_size, c.qkv_size)), ("down", (c.intermediate_size, c.hidden_size))):
                a, b = randn(t, i), randn(o, i)
                yield contest("linear", f"{shape}, {name} {i}→{o}", {"torch": lambda a=a, b=b: F.linear(a, b)}, a, b)
            q, k = randn(t, c.num_heads, c.head_dim), randn(t, c.num_kv_heads, c.head_dim)
            positions, table = torch.arange(t, device=device), rope_table(device, 8192, c.head_dim)
            rope = (positions, q, k, table)
            yield contest(
                "rotary_embedding", shape, {"torch": lambda a=rope: ops.rotary_embedding.reference(*a)}, *rope
            )


def attention_contests(device: torch.device, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Contest]:
    """Paged attention against SDPA on contiguous keys. ``shapes``: (requests, new tokens of each, context)."""
    own = "kernel" if device.type == "cuda" else "cpu"
    dtype, block = torch.bfloat16, 16
    mine = ops.paged_attention.kernel if own == "kernel" else ops.paged_attention.cpu
    for model in MODELS:
        c = known_config(model)
        for reqs, new, context in shapes:
            blocks = -(-context // block)
            caches = torch.randn(2, reqs * blocks, block, c.num_kv_heads, c.head_dim, device=device).to(dtype)
            table = torch.randperm(reqs * blocks, device=device).int().view(reqs, blocks)
            starts = torch.arange(0, reqs * new + 1, new, dtype=torch.int32, device=device)
            lens = torch.full((reqs,), context, dtype=torch.int32, device=device)
            q = torch.randn(reqs * new, c.num_heads, c.head_dim, device=device).to(dtype)
            args = (q, caches[0], caches[1], table, starts, lens, c.head_dim**-0.5)
            runs = {own: lambda a=args: mine(*a)}
            if new in (1, context):  # SDPA's causal mask is aligned to the top left
                heads = q.view(reqs, new, c.num_heads, c.head_dim).transpose(1, 2)
                shape = (reqs, blocks * block, c.num_kv_heads, c.head_dim)
                k, v = (x.reshape(shape)[:, :context].transpose(1, 2).contiguous() for x in caches)
                runs["torch"] = lambda q=heads, k=k, v=v, causal=new > 1: F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=True
                )
            cost = ops.paged_attention.cost(*args)
            shape = f"{model}, R={reqs}, new={new}, context={context}"
            yield Contest("paged_attention", shape, dtype, cost, int(cost.bytes), runs)


def sampling_contests(device: torch.device, rows: tuple[int, ...], vocab: int = 128_256) -> Iterator[Contest]:
    """The sampler's heavy ops at a large vocabulary, against sorting and multinomial."""
    own = "kernel" if device.type == "cuda" else "cpu"
    for r in rows:
        logits = 3 * torch.randn(r, vocab, device=device)
        place = lambda value, dtype, r=r: torch.full((r,), value, dtype=dtype, device=device)
        temperatures, seeds = place(0.8, torch.float32), torch.arange(r, device=device)
        top_k, top_p = place(50, torch.int64), place(0.9, torch.float32)
        calls = {
            "gumbel_argmax": (
                (logits, temperatures, seeds, seeds),
                lambda x=logits: torch.multinomial((x / 0.8).softmax(-1), 1),
            ),
            "apply_top_k_top_p": ((logits, top_k, top_p), lambda x=logits: _sorted_filter(x, 50, 0.9)),
            "greedy_argmax": ((logits,), lambda x=logits: x.argmax(-1)),
            "top_n_logprobs": ((logits, seeds, 5), lambda x=logits: x.log_softmax(-1).topk(5)),
        }
        for name, (args, other) in calls.items():
            one = ops.ALL[name]
            mine = one.kernel if own == "kernel" else one.cpu
            cost = one.cost(*args)
            runs = {own: lambda f=mine, a=args: f(*a), "torch": other}
            yield Contest(name, f"R={r}, V={vocab}", torch.float32, cost, int(cost.bytes), runs)


def _silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _sorted_filter(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True)
    ordered[:, top_k:] = float("-inf")
    mass = ordered.softmax(-1).cumsum(-1)
    ordered[(mass - ordered.softmax(-1)) > top_p] = float("-inf")
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def far_cases(device: torch.device, elements: int = PAST_32_BITS) -> Iterator[Case]:
    """Kernels on tensors of more than so many elements; only the first and last rows are compared. With 2³¹ some need 20 GB."""
    dtype, hidden = torch.bfloat16, 4096
    rows = elements // hidden + 8
    name = f"more than {elements:,} elements"
    ends = lambda x: torch.cat((x[:2], x[-2:]))
    big = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)

    def norm() -> list[tuple[Tensor, Tensor]]:
        x, w = big(rows, hidden), big(hidden)
        got = kernel("norm", "rms_norm")(x, w, 1e-5)
        return [(ends(got), oracles.rms_norm(ends(x), w, 1e-5))]

    def fused() -> list[tuple[Tensor, Tensor]]:
        x, r, w = big(rows, hidden), big(rows, hidden), big(hidden)
        normed, total = kernel("norm", "fused_add_rms_norm")(x, r, w, 1e-5)
        return [
            (ends(normed), oracles.rms_norm(ends(total), w, 1e-5)),
            (ends(total), ends(x).double() + ends(r).double()),
        ]

    def silu() -> list[tuple[Tensor, Tensor]]:
        x = big(elements // 28672 + 3, 28672)
        return [(ends(kernel("mlp", "silu_and_mul")(x)), oracles.silu_and_mul(ends(x)))]

    def linear() -> list[tuple[Tensor, Tensor]]:
        x, w = big(rows, hidden), big(64, hidden) / 64
        return [(ends(kernel("linear", "linear")(x, w)), oracles.linear(ends(x), w))]

    def embedding() -> list[tuple[Tensor, Tensor]]:
        weight, ids = big(rows, hidden), torch.tensor([0, rows - 1, rows // 2], device=device)
        return [(kernel("embedding", "embedding")(ids, weight), weight[ids])]

    def rope() -> list[tuple[Tensor, Tensor]]:
        q, k, table = big(rows, 32, 128), big(rows, 8, 128), rope_table(device, 4096, 128)
        positions = torch.arange(rows, device=device) % 4096
        got, _ = kernel("rope", "rotary_embedding")(positions, q, k, table)
        return [(ends(got), oracles.rotary(ends(positions), ends(q), table))]

    def cache() -> list[tuple[Tensor, Tensor]]:
        blocks = elements // (16 * 8 * 128) + 8
        caches = [torch.zeros(blocks, 16, 8, 128, dtype=dtype, device=device) for _ in range(2)]
        k, v = big(2, 8, 128), big(2, 8, 128)
        slots = torch.tensor([3, blocks * 16 - 1], device=device)
        kernel("cache", "reshape_and_cache")(k, v, *caches, slots)
        return [(c.view(-1, 8, 128)[slots], x) for c, x in zip(caches, (k, v), strict=True)]

    def attention() -> list[tuple[Tensor, Tensor]]:
        far = [torch.empty_strided((2, 16, 8, 128), (elements + 16, 1024, 128, 1), dtype=dtype, device=device)
               for _ in range(2)]  # fmt: skip
        keys, values = big(20, 8, 128), big(20, 8, 128)
        for target, x in zip(far, (keys, values), strict=True):
            target[1], target[0, :4] = x[:16], x[16:]
            target[0, 4:] = float("nan")
        q, table = big(3, 32, 128), torch.tensor([[1, 0]], dtype=torch.int32, device=device)
        starts, lens = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 3], [20]))
        got = kernel("attention", "paged_attention")(q, *far, table, starts, lens, 128**-0.5)
        return [(got, oracles.attention(q, keys, values, 128**-0.5)[0])]

    def logits(op: str, family: str, *extra: float) -> Callable[[], list[tuple[Tensor, Tensor]]]:
        def run() -> list[tuple[Tensor, Tensor]]:
            r = elements // 128_256 + 3
            x = torch.randn(r, 128_256, device=device)
            more = [torch.full((r,), e, device=device, dtype=torch.int64 if e > 1 else torch.float32) for e in extra]
            got = kernel(family, op)(x, *more)
            want = getattr(ops, op).reference(ends(x).cpu(), *(ends(m).cpu() for m in more))
            return [(ends(got), want.to(device))]

        return run

    for op, run in (
        ("paged_attention", attention), ("reshape_and_cache", cache), ("silu_and_mul", silu), ("rms_norm", norm),
        ("embedding", embedding), ("linear", linear), ("rotary_embedding", rope), ("fused_add_rms_norm", fused),
    ):  # fmt: skip
        yield Case(op, dtype, name, run)
    yield Case("greedy_argmax", torch.float32, name, logits("greedy_argmax", "sampling"))
    yield Case("apply_top_k_top_p", torch.float32, name, logits("apply_top_k_top_p", "selection", 50, 0.9))
