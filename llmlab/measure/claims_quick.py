"""Measurements of claims that need neither a model's weights nor an accelerator, each in about a second or less.

Every function returns the numbers that its claim's rule reads; what they mean stands in the register.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch

from llmlab import ops
from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.measure.cost import cost_table, decode_costs, parameters, step_costs, total
from llmlab.measure.known_models import known_config


def slot_of_position() -> dict[str, float]:
    """C04: position 25 of a request with table [5, 8, 12], by the engine's own batch builder."""
    from llmlab.engine.batch import Batch

    request = SimpleNamespace(all_token_ids=[0] * 26, num_tokens=26, num_prompt_tokens=26)
    plan = SimpleNamespace(num_scheduled_tokens={"r": 1}, num_computed_tokens={"r": 25}, block_ids={"r": [5, 8, 12]})
    batch = Batch.build(plan, {"r": request}, block_size=16)  # type: ignore[arg-type]
    return {"slot": int(batch.slot_mapping[0])}


def tables_per_layer() -> dict[str, float]:
    """C05: the block_table and slot_mapping tensors that a four-layer model's ops are given in one step."""
    from llmlab.measure.roofline import StepDriver
    from llmlab.model.llama import LlamaForCausalLM
    from llmlab.model.weights import random_weights
    from llmlab.ops.registry import record_ops

    config = dataclasses.replace(
        known_config("smollm2-135m-instruct"),
        hidden_size=64, intermediate_size=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=64,
        rope=dataclasses.replace(known_config("smollm2-135m-instruct").rope, rotary_dim=32), sliding_windows=(None,) * 4,
    )  # fmt: skip
    cpu = torch.device("cpu")
    model = LlamaForCausalLM(config, random_weights(config, torch.float32, cpu), ops.bind("reference", cpu), 64)
    driver = StepDriver(model, torch.float32, 256)
    with record_ops(keep_tensors=True) as ledger:
        driver.run(driver.batch([5, 1], [5, 20]))
    given = {"paged_attention": [], "reshape_and_cache": []}
    for record in ledger.records:
        if record.op in given:
            arguments = ops.ALL[record.op].signature.bind(*record.arguments[0], **record.arguments[1]).arguments
            given[record.op].append(arguments["block_table" if record.op == "paged_attention" else "slot_mapping"])
    distinct = {op: len({tensor.data_ptr() for tensor in tensors}) for op, tensors in given.items()}
    return {
        "layers": len(given["paged_attention"]),
        "block_tables": distinct["paged_attention"],
        "slot_mappings": distinct["reshape_and_cache"],
    }


def slots_used() -> dict[str, float]:
    """C02: 128 requests of 16 to 512 output tokens, 16 at a time, in whole batches and by the real scheduler."""
    from llmlab.engine.request import Request
    from llmlab.engine.scheduler import Scheduler
    from llmlab.sampling.params import SamplingParams

    slots, lengths = 16, np.random.default_rng(0).integers(16, 513, 128)
    batches = lengths.reshape(-1, slots)
    static = lengths.sum() / (slots * batches.max(1).sum())
    scheduler = Scheduler(SchedulerConfig(max_model_len=1024, max_num_seqs=slots), CacheConfig(num_blocks=1024))
    for i, length in enumerate(lengths.tolist()):
        scheduler.add_request(Request(str(i), [1, 2, 3], SamplingParams(max_tokens=length, ignore_eos=True)))
    steps = 0
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, dict.fromkeys(plan.num_scheduled_tokens, 7))
        steps += 1
    return {"slots_used_static": static, "slots_used_continuous": lengths.sum() / (slots * steps)}


def paged_capacity() -> dict[str, float]:
    """C03: requests of 16 to 2048 tokens in 4096 blocks of 16 tokens, with max_model_len 2048."""
    from llmlab.engine.kv_cache import KVCacheManager
    from llmlab.engine.request import Request
    from llmlab.sampling.params import SamplingParams

    block_size, num_blocks, max_model_len = 16, 4096, 2048
    manager = KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False))
    fitted, worst = 0, 0.0
    for length in np.random.default_rng(0).integers(16, max_model_len + 1, 10 * num_blocks).tolist():
        request = Request(str(fitted), [1] * length, SamplingParams())
        if not manager.allocate_slots(request, length):
            break
        fitted += 1
        worst = max(worst, len(request.block_ids) - length / block_size)
    reserved = num_blocks * block_size // max_model_len
    return {"capacity_gain": fitted / reserved, "worst_waste_blocks": worst}


def padding() -> dict[str, float]:
    """C07: 16 prompts of 16 to 256 tokens of SmolLM2-135M, flat as the engine has them, and padded to the longest."""
    from llmlab.engine.batch import Batch

    lengths = np.random.default_rng(0).integers(16, 257, 16).tolist()
    names = [str(i) for i in range(len(lengths))]
    requests = {
        n: SimpleNamespace(all_token_ids=[1] * q, num_tokens=q, num_prompt_tokens=q) for n, q in zip(names, lengths)
    }
    plan = SimpleNamespace(
        num_scheduled_tokens=dict(zip(names, lengths)),
        num_computed_tokens=dict.fromkeys(names, 0),
        block_ids={n: list(range(-(-q // 16))) for n, q in zip(names, lengths)},
    )
    flat_tokens = Batch.build(plan, requests, block_size=16).num_sched_tokens  # type: ignore[arg-type]
    config, longest = known_config("smollm2-135m-instruct"), [max(lengths)] * len(lengths)
    useful, padded = (total(step_costs(config, q, q)).flops for q in (lengths, longest))
    return {"flat_waste": flat_tokens / sum(lengths) - 1, "padded_waste": 1 - useful / padded}


def rope_as_matrix() -> dict[str, float]:
    """C09: the op against the product with the block-diagonal rotation matrix, written out, in float64."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads, dim = 32, 2, 64
    positions = torch.randint(4096, (tokens,), generator=generator)
    angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    q, k = (torch.randn(tokens, heads, dim, generator=generator) for _ in range(2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    rotated = ops.rotary_embedding.reference(positions, q, k, cos_sin)[0]
    half, rows = dim // 2, torch.arange(dim // 2)
    matrix = torch.zeros(tokens, dim, dim, dtype=torch.float64)
    turn = angles[positions]
    matrix[:, rows, rows] = matrix[:, rows + half, rows + half] = turn.cos()
    matrix[:, rows, rows + half], matrix[:, rows + half, rows] = -turn.sin(), turn.sin()
    product = torch.einsum("tij,thj->thi", matrix, q.double())
    elementwise = ops.rotary_embedding.cost(positions, q, k, cos_sin).flops
    return {
        "max_error": float((rotated - product).abs().max()),
        "flops_ratio": elementwise / (2 * tokens * 2 * heads * dim * dim),
    }


def rope_tables() -> dict[str, float]:
    """C11: float32 tables of the known models, and of Llama 3.1 with its 131,072 positions."""
    from llmlab.measure.experiments.rope import table_sizes

    sizes = table_sizes()["mb"]
    return {"smallest_mb": float(sizes.min()), "largest_mb": float(sizes.max())}


def silu_bytes() -> dict[str, float]:
    """C19: bytes of every tensor that either form reads or writes, counted on the tensors themselves."""
    gate_up = torch.randn(64, 2 * 96, dtype=torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate)
    product = activated * up
    two_steps = [gate, activated, activated, up, product]
    fused = [gate_up, ops.silu_and_mul.reference(gate_up)]
    count = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
    return {"bytes_ratio": count(fused) / count(two_steps)}


def head_saved() -> dict[str, float]:
    """C20: LM head of SmolLM2-135M, a prompt of 512 tokens, one row against all."""
    config, length = known_config("smollm2-135m-instruct"), 512
    head = lambda rows: ops.linear.cost(
        torch.empty(rows, config.hidden_size, device="meta"),
        torch.empty(config.vocab_size, config.hidden_size, device="meta"),
    )
    return {"saved_share": 1 - head(1).flops / head(length).flops}


def greedy_after_temperature() -> dict[str, float]:
    """C23: pairs of neighbouring float32 logits, divided by temperatures between 0.1 and 2."""
    generator = torch.Generator().manual_seed(0)
    lower = 20 * torch.rand(10_000, generator=generator) + 1
    logits = torch.stack((lower, torch.nextafter(lower, torch.tensor(torch.inf))), -1)
    temperatures = 0.1 + 1.9 * torch.rand(len(lower), generator=generator)
    scaled = ops.apply_temperature.reference(logits, temperatures)
    return {"changed": int((scaled.argmax(-1) != logits.argmax(-1)).sum()), "tried": len(lower)}


def min_p_thresholds() -> dict[str, float]:
    """C24: the least probability that min_p = 0.1 keeps, by bisection with the op itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 64, generator=generator) * 3
    kept = ops.apply_min_p.reference(logits, torch.ones(len(logits))).gather(1, logits.argmax(-1, keepdim=True))
    return {
        "threshold_at_0.9": _least_kept(0.9),
        "threshold_at_0.08": _least_kept(0.08),
        "top_kept": float(kept.isfinite().float().mean()),
    }


def _least_kept(top: float) -> float:
    low, high = 0.0, top
    for _ in range(20):
        candidate = (low + high) / 2
        filler = (1 - top - candidate) / 1000
        row = torch.tensor([[top, candidate] + [max(filler, 1e-9)] * 1000]).log()
        kept = ops.apply_min_p.reference(row, torch.tensor([0.1]))[0, 1].isfinite()
        low, high = (low, candidate) if kept else (candidate, high)
    return high


def top_p_sets() -> dict[str, float]:
    """C25: against sorting and summing in float64; rows that come within 1e-6 of p at a token are left out."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (500, 200)).astype(np.float32))
    p = torch.from_numpy(rng.uniform(0.05, 0.99, 500).astype(np.float32))
    kept = ops.apply_top_k_top_p.reference(logits, torch.zeros(500, dtype=torch.int64), p).isfinite()
    ordered, order = logits.double().softmax(-1).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    clear = ((before - p.double()[:, None]).abs() > 1e-6).all(-1)
    smallest = torch.zeros_like(kept).scatter(1, order, before < p.double()[:, None])
    return {"rows": int(clear.sum()), "equal_rows": int((smallest == kept).all(-1)[clear].sum())}


def llama_3_8b_shares() -> dict[str, float]:
    """C27: parameters counted, FLOPs of a decode step at context 2048."""
    config = known_config("llama-3-8b")
    counted = parameters(config)
    everything = sum(counted.values())
    shares = cost_table(decode_costs(config, 1, 2048))["flops_share"]
    return {
        "mlp_parameters": (counted["gate+up"] + counted["down"]) / everything,
        "mlp_flops": shares["gate+up"] + shares["down"],
        "attention_parameters": (counted["QKV"] + counted["O"]) / everything,
    }


def merge_pieces() -> dict[str, float]:
    """C33: one query over 640 keys, whole and in four pieces of 160 that are merged by their log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, block, pieces, length = 6, 2, 32, 16, 4, 640
    keys, values = (torch.randn(length // block, block, kv_heads, dim, generator=generator) for _ in range(2))
    q = torch.randn(1, heads, dim, generator=generator)
    table, starts = torch.arange(length // block, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32)

    def attend(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lens = torch.tensor([blocks.shape[1] * block], dtype=torch.int32)
        return ops.paged_attention.reference(q, keys, values, blocks, starts, lens, dim**-0.5, return_lse=True)

    whole, _ = attend(table)
    out, lse = attend(table[:, : length // block // pieces])
    for piece in table.chunk(pieces, dim=1)[1:]:
        out, lse = ops.merge_attention_states.reference(out, lse, *attend(piece))
    return {"max_error": float((out - whole).abs().max()), "pieces": pieces}
