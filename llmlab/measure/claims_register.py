"""C01 … C38 as data: statement, rule in words, the numbers it reads, and the rule in code. Written before measuring.

Thresholds are choices, made once: "visible" is a tenth, "about the same" is 10 or 15 %, "exact" is rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log

from llmlab.measure import claims_quick as quick
from llmlab.measure.claims import CONFIRMED, REFUTED, Claim, Numbers, Verdict, depends

GPU = "a CUDA device"


def _if(condition: Callable[[Numbers], bool], otherwise: Verdict = REFUTED) -> Callable[[Numbers], Verdict]:
    return lambda n: CONFIRMED if condition(n) else otherwise


def _batching(n: Numbers) -> Verdict:
    if n["throughput_gain"] < 2:
        return REFUTED
    return CONFIRMED if log(max(n["gain_in_ops"], 1)) >= 0.75 * log(n["throughput_gain"]) else REFUTED


def _request_level(n: Numbers) -> Verdict:
    if n["slots_used_continuous"] <= n["slots_used_static"]:
        return REFUTED
    return _if(
        lambda n: n["slots_used_static"] < 0.5 and n["slots_used_continuous"] >= 0.9,
        depends("how unequal the lengths are"),
    )(n)


def _bound_by(n: Numbers) -> Verdict:
    prefill, decode = n["prefill_compute_share"], n["decode_memory_share"]
    if prefill < 0.5 or decode < 0.5:
        return REFUTED
    if prefill >= 0.95 and decode >= 0.95:
        return CONFIRMED
    return depends(
        f"the operator: {1 - prefill:.0%} of prefill's and {1 - decode:.0%} of decode's time is on the other side"
    )


def _batch_lifts_linear(n: Numbers) -> Verdict:
    lifted = n["linear_intensity_gain"] >= 0.8 * n["batch_gain"] and abs(n["attention_intensity_gain"] - 1) <= 0.1
    if not lifted:
        return REFUTED
    if n["linear_rate_gain"] >= 0.25 * n["batch_gain"] and n["attention_rate_gain"] <= 0.5 * n["linear_rate_gain"]:
        return CONFIRMED
    return depends("the implementation: intensities behave as claimed, achieved rates do not follow")


def _decode_attention(n: Numbers) -> Verdict:
    near = (
        n["least_intensity"] / n["predicted_intensity"] >= 0.85
        and n["most_intensity"] / n["predicted_intensity"] <= 1.15
    )
    if not near:
        return REFUTED
    return _if(
        lambda n: 0.8 <= n["context_exponent"] <= 1.2,
        depends("the implementation: intensity as claimed, time not linear in context"),
    )(n)


def _fusion(n: Numbers) -> Verdict:
    if abs(n["time_ratio"] - n["bytes_ratio"]) <= 0.1:
        return CONFIRMED
    return REFUTED if n["time_ratio"] >= 1 else depends("what else the op spends its time on")


def _wide(n: Numbers) -> Verdict:
    gains = n["gate_up_gain"], n["qkv_gain"]
    if min(gains) > 1:
        return CONFIRMED
    return REFUTED if max(gains) <= 1 else depends("the shape")


def _swap(n: Numbers) -> Verdict:
    if n["recompute_seconds"] < n["swap_seconds"] and n["crossover_context"] > n["largest_context"]:
        return CONFIRMED
    if n["crossover_context"] < n["smallest_context"]:
        return REFUTED
    return depends(f"the context: recompute wins below {n['crossover_context']:.0f} tokens")


def _parallel_shares(n: Numbers) -> Verdict:
    return CONFIRMED if abs(n["rank_share"] * n["ranks"] - 1) < 0.01 and n["all_reduces_per_layer"] == 2 else REFUTED


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C01",
        "Batching raises throughput because weights are reused (arithmetic intensity); fewer launches is "
        "a side effect.",
        "throughput at least doubles with the batch, and at least 3/4 of the gain (in logarithm) remains "
        "when time outside ops is left out",
        {
            "throughput_gain": "tokens/s at the largest batch over batch 1",
            "gain_in_ops": "the same, counting time inside ops only",
        },
        _batching,
    ),
    Claim(
        "C02",
        "With unequal output lengths, request-level batching wastes most of its slots; token-level "
        "(continuous) batching does not.",
        "request-level batching uses less than half of its slots, continuous batching at least 90 %",
        {
            "slots_used_static": "share of slot-steps that gave a token",
            "slots_used_continuous": "the same, by the real scheduler",
        },
        _request_level,
        quick.slots_used,
    ),
    Claim(
        "C03",
        "Paged KV allocation fits more concurrent requests in the same memory than reserving "
        "max_model_len each; waste ≤ one block a request.",
        "more requests fit, and no request wastes a whole block",
        {
            "capacity_gain": "requests that fit, paged over reserved",
            "worst_waste_blocks": "largest unused part of a request's blocks, in blocks",
        },
        _if(lambda n: n["capacity_gain"] > 1 and n["worst_waste_blocks"] < 1),
        quick.paged_capacity,
    ),
    Claim(
        "C04",
        "Slot arithmetic: position 25 with table [5, 8, 12], block 16, is slot 137.",
        "the engine's own batch builder gives 137",
        {"slot": "slot of position 25"},
        _if(lambda n: n["slot"] == 137),
        quick.slot_of_position,
    ),
    Claim(
        "C05",
        "One block_table and one slot_mapping serve every layer.",
        "in a recorded step all layers are given the same two tensors",
        {
            "layers": "layers that ran",
            "block_tables": "different block_table tensors",
            "slot_mappings": "different slot_mapping tensors",
        },
        _if(lambda n: n["layers"] > 1 and n["block_tables"] == 1 and n["slot_mappings"] == 1),
        quick.tables_per_layer,
    ),
    Claim(
        "C06",
        "Indirection through the block table costs bandwidth; block_size 16 keeps the loss small.",
        "block size 1 is slower than contiguous keys by more than the spread, and block size 16 by at most 10 %",
        {"slowdown_block_1": "time over contiguous", "slowdown_block_16": "time over contiguous"},
        lambda n: (
            REFUTED
            if n["slowdown_block_16"] > 1.1
            else CONFIRMED
            if n["slowdown_block_1"] > 1.05
            else depends("the block size: even 1 costs nothing here")
        ),
    ),
    Claim(
        "C07",
        "A flattened batch does no padded work; a padded batch of the same requests wastes a measurable "
        "share of FLOPs.",
        "the flat batch has no token too many; the padded one spends at least a tenth of its FLOPs on padding",
        {"flat_waste": "tokens computed in vain, share", "padded_waste": "FLOPs spent on padding, share"},
        _if(lambda n: n["flat_waste"] == 0 and n["padded_waste"] >= 0.1),
        quick.padding,
    ),
    Claim(
        "C08",
        "RMSNorm is cheaper than LayerNorm (no mean, no shift) and as stable.",
        "faster beyond the spread, with at most twice the error in the same dtype",
        {
            "speedup": "LayerNorm's time over RMSNorm's, at its least sure value",
            "error_ratio": "RMSNorm's error over LayerNorm's",
        },
        lambda n: (
            REFUTED
            if n["error_ratio"] > 2
            else CONFIRMED
            if n["speedup"] > 1
            else depends("the implementation: no cheaper here")
        ),
    ),
    Claim(
        "C09",
        "RoPE as elementwise work equals the block-diagonal rotation matrix product, at a small part of its cost.",
        "equal within float32 rounding, at no more than a tenth of the FLOPs",
        {"max_error": "largest difference", "flops_ratio": "elementwise over matrix product"},
        _if(lambda n: n["max_error"] <= 1e-5 and n["flops_ratio"] <= 0.1),
        quick.rope_as_matrix,
    ),
    Claim(
        "C10",
        "A cos/sin table beats computing sin/cos in the kernel (special-function rate).",
        "the table is faster beyond the spread",
        {"speedup": "computing over looking up, at its least sure value"},
        _if(lambda n: n["speedup"] > 1),
    ),
    Claim(
        "C11",
        "That table is small: a few MB to tens of MB.",
        "between 1 and 100 MB for every model looked at",
        {"smallest_mb": "smallest table, MB", "largest_mb": "largest table, MB"},
        _if(lambda n: n["smallest_mb"] >= 1 and n["largest_mb"] <= 100),
        quick.rope_tables,
    ),
    Claim(
        "C12",
        "Online softmax gives the exact softmax, tile by tile; attention memory grows as S, not S².",
        "equal within float32 rounding, and memory grows with an exponent of at most 1.2 in S",
        {
            "max_error": "largest difference from the two-pass softmax",
            "memory_exponent": "slope of log memory over log S",
        },
        _if(lambda n: n["max_error"] <= 1e-5 and n["memory_exponent"] <= 1.2),
    ),
    Claim(
        "C13",
        "Reading prefill K/V back from the paged cache costs an extra indirection, and buys prefix "
        "caching and chunked prefill.",
        "prefill attention from the cache is at most 10 % slower than from contiguous K/V, and both "
        "features save tokens",
        {"slowdown": "paged over contiguous", "cached_tokens": "prompt tokens that a second request did not compute"},
        lambda n: (
            REFUTED
            if n["cached_tokens"] <= 0
            else CONFIRMED
            if n["slowdown"] <= 1.1
            else depends("the price: more than a tenth here")
        ),
    ),
    Claim(
        "C14",
        "Prefill is compute-bound, decode is memory-bound, per operator and as a whole.",
        "at least 95 % of a prefill step's measured time is in ops above the ridge, and of a decode "
        "step's in ops below it",
        {
            "prefill_compute_share": "share of prefill's time in ops above the ridge",
            "decode_memory_share": "share of decode's time in ops below it",
        },
        _bound_by,
    ),
    Claim(
        "C15",
        "Batching turns decode's GEMVs into GEMMs and lifts their intensity with the batch; attention's "
        "stays where it was.",
        "linear intensity grows by at least 0.8 of the batch's growth, attention's stays within 10 %; the"
        " linear ops' FLOP/s grow by at least a quarter of the batch's growth, attention's by at most "
        "half of that",
        {
            "batch_gain": "largest batch",
            "linear_intensity_gain": "over batch 1",
            "attention_intensity_gain": "over batch 1",
            "linear_rate_gain": "FLOP/s over batch 1",
            "attention_rate_gain": "FLOP/s over batch 1",
        },
        _batch_lifts_linear,
    ),
    Claim(
        "C16",
        "Decode attention's intensity is about the GQA group size at any batch; its cost grows linearly with context.",
        "2·group/(bytes an element) FLOP/byte within 15 % at every batch and context of the sweep, and "
        "time ∝ context^e with 0.8 ≤ e ≤ 1.2",
        {
            "predicted_intensity": "2·group/(bytes an element)",
            "least_intensity": "over the sweep",
            "most_intensity": "over the sweep",
            "context_exponent": "slope of log time over log context, at the largest batch",
        },
        _decode_attention,
    ),
    Claim(
        "C17",
        "Fusing residual-add with RMSNorm saves the traffic it should.",
        "time shrinks to the share of bytes that remains, within 0.1",
        {"bytes_ratio": "fused over apart", "time_ratio": "fused over apart"},
        _fusion,
    ),
    Claim(
        "C18",
        "One wide gate/up GEMM beats two; likewise QKV.",
        "both are faster beyond the spread",
        {
            "gate_up_gain": "two products' time over one's, at its least sure value",
            "qkv_gain": "three products' time over one's, likewise",
        },
        _wide,
    ),
    Claim(
        "C19",
        "A fused SiLU·mul moves 3/5 of the bytes of the two-step form.",
        "bytes of the tensors that the fused op reads and writes, over those of the two steps, are 0.6 within 1 %",
        {"bytes_ratio": "fused over two-step"},
        _if(lambda n: abs(n["bytes_ratio"] - 0.6) <= 0.006),
        quick.silu_bytes,
    ),
    Claim(
        "C20",
        "Gathering last tokens before the LM head removes almost all of prefill's LM-head cost.",
        "at least 95 % of the head's FLOPs in a prefill of 512 tokens go away",
        {"saved_share": "of the LM head's FLOPs"},
        _if(lambda n: n["saved_share"] >= 0.95),
        quick.head_saved,
    ),
    Claim(
        "C21",
        "In the last layer only K and V are needed for all tokens; the rest for the sampled tokens alone "
        "gives the same logits and saves about 1/num_layers of prefill.",
        "the same logits within rounding, and between half and one and a half times 1/num_layers saved",
        {"max_error": "largest difference of logits", "saved_share": "of prefill's FLOPs", "num_layers": "layers"},
        _if(lambda n: n["max_error"] <= 1e-4 and 0.5 <= n["saved_share"] * n["num_layers"] <= 1.5),
    ),
    Claim(
        "C22",
        "Logprobs taken before processing differ from those after; the raw ones are the model's.",
        "raw ones equal log_softmax of the logits within rounding, processed ones differ by more than 0.01",
        {
            "raw_error": "largest difference from log_softmax",
            "processed_difference": "largest difference from log_softmax",
        },
        _if(lambda n: n["raw_error"] <= 1e-4 and n["processed_difference"] > 0.01),
    ),
    Claim(
        "C23",
        "Greedy before temperature avoids a precision loss.",
        "there are float32 logits whose argmax changes when they are divided by a temperature",
        {"changed": "of the near ties tried, how many changed", "tried": "near ties tried"},
        _if(lambda n: n["changed"] > 0),
        quick.greedy_after_temperature,
    ),
    Claim(
        "C24",
        "min_p never removes the top token, and adapts: threshold 0.09 at p_max 0.9 and 0.008 at p_max "
        "0.08, for min_p 0.1.",
        "both thresholds within 1 %, and the top token kept in every row, even at min_p 1",
        {
            "threshold_at_0.9": "least probability kept",
            "threshold_at_0.08": "least probability kept",
            "top_kept": "share of rows",
        },
        _if(
            lambda n: (
                abs(n["threshold_at_0.9"] - 0.09) <= 9e-4
                and abs(n["threshold_at_0.08"] - 0.008) <= 8e-5
                and n["top_kept"] == 1
            )
        ),
        quick.min_p_thresholds,
    ),
    Claim(
        "C25",
        "Top-p keeps the smallest set whose mass reaches p, the crossing token included.",
        "the same set as sorting and summing in float64, in every row whose mass does not come within "
        "float32's rounding of p",
        {"rows": "rows compared", "equal_rows": "rows with the same set"},
        _if(lambda n: n["rows"] > 0 and n["equal_rows"] == n["rows"]),
        quick.top_p_sets,
    ),
    Claim(
        "C26",
        "Gumbel-max / exponential sampling has the same distribution as multinomial and needs no prefix "
        "sum; it is faster at a 128k vocabulary.",
        "a chi-square test does not tell them apart (p ≥ 0.001), and it is faster beyond the spread",
        {"p_value": "of the chi-square test", "speedup": "multinomial's time over the race's, at its least sure value"},
        lambda n: (
            REFUTED
            if n["p_value"] < 1e-3
            else CONFIRMED
            if n["speedup"] > 1
            else depends("the implementation: not faster here")
        ),
    ),
    Claim(
        "C27",
        "Llama-3-8B: MLP about 70 % of parameters and FLOPs, attention about 16 % of parameters.",
        "MLP 0.68 to 0.72 of the parameters and 0.65 to 0.80 of a decode step's FLOPs at context 2048; "
        "attention 0.15 to 0.18 of the parameters",
        {
            "mlp_parameters": "share",
            "mlp_flops": "share of a decode step at context 2048",
            "attention_parameters": "share of QKV and O",
        },
        _if(
            lambda n: (
                0.68 <= n["mlp_parameters"] <= 0.72
                and 0.65 <= n["mlp_flops"] <= 0.8
                and 0.15 <= n["attention_parameters"] <= 0.18
            )
        ),
        quick.llama_3_8b_shares,
    ),
    Claim(
        "C28",
        "Preemption by recompute beats swap over PCIe in the usual range.",
        "recompute is faster at every context of the range",
        {
            "recompute_seconds": "at the middle of the range",
            "swap_seconds": "at the middle of the range",
            "crossover_context": "tokens",
            "smallest_context": "of the range",
            "largest_context": "of the range",
        },
        _swap,
        needs=GPU,
    ),
    Claim(
        "C29",
        "Preferring running requests and admitting none after a preemption avoids thrashing.",
        "at most 3/4 of the tokens that the other policy computes twice",
        {
            "recomputed_ours": "tokens computed again",
            "recomputed_other": "the same when waiting requests are admitted at once",
        },
        _if(lambda n: n["recomputed_ours"] <= 0.75 * n["recomputed_other"]),
    ),
    Claim(
        "C30",
        "Chunked prefill shields running requests' inter-token latency from a long prompt, at a price in "
        "that prompt's first token.",
        "the worst inter-token latency at least halves, and the long prompt's first token comes later",
        {
            "itl_ratio": "worst latency, chunked over whole",
            "ttft_ratio": "long prompt's first token, chunked over whole",
        },
        lambda n: (
            REFUTED
            if n["itl_ratio"] > 0.5
            else CONFIRMED
            if n["ttft_ratio"] > 1
            else depends("the price: none was measured")
        ),
    ),
    Claim(
        "C31",
        "Flash-Decoding (split-KV) raises utilisation for few sequences with long contexts; the merge is exact.",
        "at least 1.2 times as fast at one sequence, and equal within rounding",
        {"speedup": "unsplit over split, one sequence", "max_error": "largest difference"},
        _if(lambda n: n["speedup"] >= 1.2 and n["max_error"] <= 1e-3),
        needs="a CUDA device, or a CPU with two cores",
    ),
    Claim(
        "C32",
        "Tensor parallel: each rank holds 1/TP of QKV, gate/up, O, down; two all-reduces a layer, of "
        "num_sched_tokens·hidden_size.",
        "shares within 1 %, exactly two all-reduces a layer",
        {"ranks": "TP", "rank_share": "of those weights on one rank", "all_reduces_per_layer": "counted in a step"},
        _parallel_shares,
    ),
    Claim(
        "C33",
        "Context parallel: attention over pieces of the context merges exactly by log-sum-exp.",
        "equal to attention over the whole within float32 rounding",
        {"max_error": "largest difference", "pieces": "pieces of the context"},
        _if(lambda n: n["pieces"] > 1 and n["max_error"] <= 1e-5),
        quick.merge_pieces,
    ),
    Claim(
        "C34",
        "MoE: parameters grow with the experts, FLOPs a token with the active ones only.",
        "doubling the experts at the same number of active ones at least multiplies MLP parameters by 1.9"
        " and FLOPs by at most 1.05",
        {"parameter_gain": "for twice the experts", "flops_gain": "for twice the experts"},
        _if(lambda n: n["parameter_gain"] >= 1.9 and n["flops_gain"] <= 1.05),
    ),
    Claim(
        "C35",
        "MLA, sparse and linear attention cut the KV bytes read for each decoded token.",
        "each reads less than grouped-query attention at the same context",
        {"mla_ratio": "bytes over GQA's", "sparse_ratio": "bytes over GQA's", "linear_ratio": "bytes over GQA's"},
        lambda n: (
            CONFIRMED
            if max(n["mla_ratio"], n["sparse_ratio"], n["linear_ratio"]) < 1
            else REFUTED
            if min(n["mla_ratio"], n["sparse_ratio"], n["linear_ratio"]) >= 1
            else depends("the method")
        ),
    ),
    Claim(
        "C36",
        "A shared prefix is computed once: prefix caching removes its prefill time from later requests.",
        "of the time saved if only the uncached tokens cost anything, at least 3/4 is saved",
        {"cached_share": "of the prompt's tokens", "saved_share": "of the first request's time to first token"},
        _if(lambda n: n["saved_share"] >= 0.75 * n["cached_share"] > 0),
    ),
    Claim(
        "C37",
        "In prefill, attention too amortises its KV reads, over the query tokens of a tile.",
        "prefill attention's FLOP/s are at least 4 times what they could be if each query token read its "
        "own keys at the measured bandwidth of the memory that holds them",
        {"rate_over_unamortised": "achieved FLOP/s over bandwidth · decode intensity"},
        _if(
            lambda n: n["rate_over_unamortised"] >= 4,
            depends("the implementation: not fast enough to tell rereading from reuse"),
        ),
    ),
    Claim(
        "C38",
        "At small batch, launch overhead is a visible share of a decode step; graphs or compilation remove it.",
        "a decode step at batch 1 gets shorter by at least a tenth when it is played from a recorded graph",
        {
            "eager_seconds": "of a step at batch 1, op by op",
            "graph_seconds": "of the same step, as the engine runs it",
            "recorded": "1 if that is from a graph",
        },
        lambda n: (
            depends("the engine: it records no graphs here")
            if not n["recorded"]
            else CONFIRMED
            if n["graph_seconds"] <= 0.9 * n["eager_seconds"]
            else REFUTED
        ),
    ),
)
"""All claims in order. :func:`llmlab.measure.claims.claims_table` shows them with what was found."""
