"""What quantised weights cost in accuracy: the same text through two engines, logits beside logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llmlab.engine.llm import LLM


def weight_error(weight: Tensor) -> dict[str, float]:
    """Of one weight in 8-bit integers: relative error (root mean square), and the one that evenly spread rounding predicts.

    A number is off by anything up to half a step: by step/√12 in the root mean square.
    """
    from llmlab.ops.quantization import quantize_int8

    quantized, exact = quantize_int8(weight), weight.double()
    size = exact.square().mean().sqrt()
    error = (quantized.values.double() * quantized.scales.double()[:, None] - exact).square().mean().sqrt()
    predicted = (quantized.scales.double().square().mean() / 12).sqrt()
    return {"relative_error": float(error / size), "predicted": float(predicted / size)}


def quantization_error(exact: LLM, quantized: LLM, token_ids: list[int], window: int = 256) -> dict[str, float]:
    """What changes when a text is read by the second engine instead of the first.

    Args:
        window: tokens that are read at a time, each window without what came before.

    Returns:
        perplexity, perplexity_quantized; cosine (mean over positions of the logits' cosine, each less its mean), cosine_worst;
        greedy_agreement (share of positions with the same most likely token); logprob_error (mean absolute difference of the
        actual next token's log-probability); tokens (that were predicted).
    """
    totals = dict.fromkeys(("loss", "loss_quantized", "cosine", "agree", "difference"), 0.0)
    worst, count, positions = 1.0, 0, 0
    for begin in range(0, len(token_ids) - 1, window):
        part = token_ids[begin : begin + window]
        if len(part) < 2:
            break
        targets = torch.tensor(part[1:])[:, None]
        one, other = (llm.forward_logits(part) for llm in (exact, quantized))
        logprobs = [logits[:-1].log_softmax(-1).gather(1, targets) for logits in (one, other)]
        cosine = torch.cosine_similarity(one - one.mean(-1, keepdim=True), other - other.mean(-1, keepdim=True))
        totals["loss"] -= float(logprobs[0].sum())
        totals["loss_quantized"] -= float(logprobs[1].sum())
        totals["difference"] += float((logprobs[0] - logprobs[1]).abs().sum())
        totals["cosine"] += float(cosine.sum())
        totals["agree"] += float((one.argmax(-1) == other.argmax(-1)).sum())
        worst, count, positions = min(worst, float(cosine.min())), count + len(targets), positions + len(part)
    if not count:
        raise ValueError(f"need at least two tokens to predict one, got {len(token_ids)}")
    perplexity = lambda loss: float(torch.tensor(loss / count).exp())
    return {
        "perplexity": perplexity(totals["loss"]),
        "perplexity_quantized": perplexity(totals["loss_quantized"]),
        "cosine": totals["cosine"] / positions,
        "cosine_worst": worst,
        "greedy_agreement": totals["agree"] / positions,
        "logprob_error": totals["difference"] / count,
        "tokens": count,
    }
