"""What sampling costs: the sampler against the plain way, ``torch.sort`` for filters and ``torch.multinomial`` for the draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmlab import ops
from llmlab.measure.timer import compare, measure_in_turns

if TYPE_CHECKING:
    import pandas as pd

CONFIGURATIONS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k and top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min-p": {"temperature": 0.8, "min_p": 0.1},
}


def sort_and_multinomial(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The plain way, for ``logits`` [num_reqs, vocab_size] with the same parameters in every row: [num_reqs] token ids."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / temperature
    if min_p > 0.0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), float("-inf"))
    if top_k > 0 or top_p < 1.0:
        ordered, order = logits.sort(dim=-1)
        if top_k > 0:
            ordered.masked_fill_(ordered < ordered[:, -top_k, None], float("-inf"))
        if top_p < 1.0:
            dropped = ordered.softmax(-1).cumsum(-1) <= 1.0 - top_p
            dropped[:, -1] = False
            ordered.masked_fill_(dropped, float("-inf"))
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)


def sampler_benchmark(
    vocab_size: int = 128_256,
    num_reqs: int = 64,
    backend: str = "torch",
    device: str = "cpu",
    max_seconds: float = 10.0,
) -> pd.DataFrame:
    """One row a configuration, with the medians of both ways in milliseconds and how many times as fast the sampler is.

    The whole sampler is clocked, Python and the copy of the tokens to the host included, on random logits; both ways in turns.
    ``p10`` and ``p90`` are those of the ratios. Figures hold for this machine in this minute: what lasts is the ratio.
    """
    import pandas as pd

    from llmlab.engine.request import Request
    from llmlab.sampling.params import SamplingParams
    from llmlab.sampling.sampler import Sampler

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(num_reqs, vocab_size, generator=generator)).to(device)
    rows = []
    for name, settings in CONFIGURATIONS.items():
        sampler = Sampler(vocab_size, (), ops=ops.bind(backend, device), seed=0)
        requests = [Request(str(i), [1], SamplingParams(**settings)) for i in range(num_reqs)]
        for request in requests:
            sampler.add_request(request)
        measured = measure_in_turns(
            {
                "sampler": lambda sampler=sampler, requests=requests: sampler(logits, requests),
                "torch": lambda settings=settings: sort_and_multinomial(logits, **settings).tolist(),
            },
            device=device,
            max_seconds=max_seconds,
        )
        ratio = compare("sampler", measured["sampler"], "torch", measured["torch"])
        medians = {f"{way} ms": 1e3 * taken.median for way, taken in measured.items()}
        rows.append({"configuration": name, **medians, "ratio": ratio.ratio, "p10": ratio.low, "p90": ratio.high})
    return pd.DataFrame(rows)
