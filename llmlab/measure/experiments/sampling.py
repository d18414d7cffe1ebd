"""Sampling looked at step by step: what each filter leaves of one distribution, which thresholds and sets it comes to, whether
the Gumbel race draws from the right distribution, and what it costs against an inverse-CDF draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmlab import ops
from llmlab.measure.timer import compare, measure_in_turns

if TYPE_CHECKING:
    import pandas as pd

STAGES = ("raw", "temperature", "min_p", "top_k", "top_p")


def filter_stages(
    logits: Tensor, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> pd.DataFrame:
    """One row's logits [vocab_size] after each step of the sampler, in its order: the probabilities of all tokens, best first.

    Columns: token_id, rank (1 is best), and one for each of :data:`STAGES`, renormalised over what is kept; 0 for what is not.
    """
    import pandas as pd

    row = logits.float().cpu()[None]
    of = lambda value, dtype=torch.float32: torch.tensor([value], dtype=dtype)
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "temperature": lambda x: ops.apply_temperature.reference(x, of(temperature)),
        "min_p": lambda x: ops.apply_min_p.reference(x, of(min_p)),
        "top_k": lambda x: ops.apply_top_k_top_p.reference(x, of(top_k, torch.int64), of(1.0)),
        "top_p": lambda x: ops.apply_top_k_top_p.reference(x, of(0, torch.int64), of(top_p)),
    }
    order = row[0].sort(descending=True, stable=True).indices
    found = {"raw": row.softmax(-1)[0]}
    for name, step in steps.items():
        row = step(row)
        found[name] = row.softmax(-1)[0]
    table = pd.DataFrame({"token_id": order.numpy(), "rank": np.arange(1, len(order) + 1)})
    return table.assign(**{name: probs[order].numpy() for name, probs in found.items()})


def stage_summary(stages: pd.DataFrame) -> pd.DataFrame:
    """One row a stage: tokens kept, the raw probability mass that they hold, entropy in bits, probability of the best token."""
    import pandas as pd

    rows = []
    for name in STAGES:
        probs = stages[name].to_numpy(np.float64)
        kept = probs > 0
        entropy = -float((probs[kept] * np.log2(probs[kept])).sum())
        rows.append(
            {
                "stage": name,
                "kept": int(kept.sum()),
                "raw_mass": float(stages["raw"][kept].sum()),
                "entropy_bits": entropy,
                "best": float(probs.max()),
            }
        )
    return pd.DataFrame(rows)


def min_p_thresholds(min_p: float, highest: Sequence[float], vocab_size: int = 1000) -> pd.DataFrame:
    """The least probability that the op keeps beside a best token of a given one, by bisection: highest, threshold, rule."""
    import pandas as pd

    def kept(top: float, candidate: float) -> bool:
        rest = max(1 - top - candidate, 1e-9) / vocab_size
        row = torch.tensor([[top, candidate] + [rest] * vocab_size], dtype=torch.float64).log().float()
        return bool(ops.apply_min_p.reference(row, torch.tensor([min_p]))[0, 1].isfinite())

    rows = []
    for top in highest:
        low, high = 0.0, top
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (low, middle) if kept(top, middle) else (middle, high)
        rows.append({"highest": top, "threshold": high, "rule": min_p * top})
    return pd.DataFrame(rows)


def smallest_set(logits: Tensor, top_p: float) -> list[int]:
    """The smallest set of tokens whose mass reaches ``top_p``, by sorting and summing in float64; ids in order of probability."""
    probs, order = logits.double().softmax(-1).sort(descending=True, stable=True)
    reached = (probs.cumsum(-1) >= top_p).nonzero()
    last = int(reached[0]) if len(reached) else len(probs) - 1
    return order[: last + 1].tolist()


def draws_by_race(logits: Tensor, count: int, seed: int, chunk: int = 4096) -> Tensor:
    """``count`` tokens drawn from ``softmax(logits)`` [vocab_size] by the sampler's own race, at positions 0, 1, 2, …"""
    bound, drawn = ops.bind("torch", "cpu"), []
    for begin in range(0, count, chunk):
        positions = torch.arange(begin, min(begin + chunk, count))
        rows = logits.float().cpu().expand(len(positions), -1)
        seeds = torch.full_like(positions, seed)
        drawn.append(bound.gumbel_argmax(rows, torch.ones(len(positions)), seeds, positions))
    return torch.cat(drawn)


def draws_by_multinomial(logits: Tensor, count: int, seed: int) -> Tensor:
    """The same number of tokens by ``torch.multinomial``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(logits.double().softmax(-1), count, replacement=True, generator=generator)


def chi_square(drawn: Tensor, probs: Tensor, least_expected: float = 5.0) -> dict[str, float]:
    """Pearson's test of drawn tokens against ``probs`` [vocab_size]; rare tokens share one cell, so that none expects too few.

    Returns statistic, degrees of freedom, and the p-value: how likely the right distribution is to look at least as wrong.
    """
    expected = probs.double() * len(drawn)
    observed = torch.bincount(drawn, minlength=len(probs)).double()
    common = expected >= least_expected
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    observed = torch.cat((observed[common], observed[~common].sum()[None]))
    if expected[-1] < least_expected:  # what is rare is too rare even together
        expected = torch.cat((expected[:-2], expected[-2:].sum()[None]))
        observed = torch.cat((observed[:-2], observed[-2:].sum()[None]))
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    tail = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double())
    return {"statistic": statistic, "freedom": freedom, "p_value": float(tail)}


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """A token a row by the probabilities' prefix sum and a search in it: ``logits`` [R, V], ``uniform`` [R, 1] in [0, 1)."""
    mass = logits.softmax(-1).cumsum(-1)
    return torch.searchsorted(mass, uniform * mass[:, -1:], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def draw_times(
    vocab_sizes: Sequence[int], num_reqs: int = 8, device: str = "cpu", repeats: int = 15, max_seconds: float = 2.0
) -> pd.DataFrame:
    """One row a vocabulary: the race against ``torch.multinomial`` and against an inverse-CDF draw, in turns, over random logits.

    Columns: vocab_size, race_seconds, multinomial_seconds, prefix_seconds; of the ratios multinomial over race: speedup, p10,
    p90, sure_low; and prefix_speedup.
    """
    import pandas as pd

    bound = ops.bind("torch" if device == "cpu" else "triton", device)
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(num_reqs, device=device)
    seeds, positions = torch.arange(num_reqs, device=device), torch.full((num_reqs,), 7, device=device)
    uniform = torch.rand(num_reqs, 1, generator=generator).to(device)
    rows = []
    for vocab_size in vocab_sizes:
        sets = [((3 * torch.randn(num_reqs, vocab_size, generator=generator)).to(device),) for _ in range(3)]
        ways: dict[str, Callable[..., Any]] = {
            "race": lambda x: bound.gumbel_argmax(x, ones, seeds, positions),
            "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
            "prefix": lambda x: inverse_cdf(x, uniform),
        }
        taken = measure_in_turns(ways, inputs=sets, device=device, repeats=repeats, max_seconds=max_seconds)
        ratio = compare("race", taken["race"], "multinomial", taken["multinomial"])
        rows.append(
            {
                "vocab_size": vocab_size,
                **{f"{way}_seconds": taken[way].median for way in ways},
                "speedup": ratio.ratio,
                "p10": ratio.low,
                "p90": ratio.high,
                "sure_low": ratio.sure_low,
                "prefix_speedup": compare("race", taken["race"], "prefix", taken["prefix"]).ratio,
            }
        )
    return pd.DataFrame(rows)


def raw_and_processed(llm: Any, prompt: str, **settings: Any) -> pd.DataFrame:
    """The first token's logprobs before and after processing, for the tokens in the raw top 20: token_id, raw, processed, model.

    ``raw`` and ``processed`` are what two samplers report in their two modes; ``model`` is ``log_softmax`` of the model's logits.
    """
    import pandas as pd

    from llmlab.engine.request import Request
    from llmlab.sampling.params import SamplingParams
    from llmlab.sampling.sampler import Sampler

    token_ids = llm.tokenizer.encode(prompt)
    logits = llm.forward_logits(token_ids)[-1:]
    expected = logits.double().log_softmax(-1)[0]
    listed = expected.topk(20).indices.tolist()
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        sampler = Sampler(logits.shape[1], (), llm.tokenizer, ops=llm.model.ops, logprobs_mode=mode, seed=0)
        request = Request(mode, token_ids, SamplingParams(logprobs=-1, **settings))
        sampler.add_request(request)
        (found[mode],) = sampler(logits, [request]).logprobs
    return pd.DataFrame(
        {
            "token_id": listed,
            "token": [llm.tokenizer.decode([i]) for i in listed],
            "model": expected[listed].tolist(),
            "raw": [found["raw_logprobs"][i].logprob for i in listed],
            "processed": [found["processed_logprobs"][i].logprob for i in listed],
        }
    )
