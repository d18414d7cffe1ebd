"""A long prompt arrives while others decode: what that does to their inter-token latency, whole and in chunks.

Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmlab.sampling.params import SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from llmlab.engine.engine import LLMEngine


def long_prompt_arrives(
    engine: LLMEngine,
    *,
    num_running: int = 4,
    context: int = 32,
    prompt_len: int = 1024,
    before: int = 6,
    after: int = 6,
    seed: int = 0,
) -> tuple[pd.DataFrame, float]:
    """``num_running`` requests decode; after ``before`` steps a prompt of ``prompt_len`` tokens comes. ``after`` more, and stop.

    Returns one row a step, and the long prompt's time to first token in seconds. Columns: step (0 is the first that holds a
    part of the long prompt), long_tokens (tokens of that prompt), num_tokens (all of the step), itl (seconds since the running
    requests' token before).

    Raises ValueError if the token budget leaves no room for the long prompt beside the running requests.
    """
    import pandas as pd

    scheduler = engine.scheduler
    budget = scheduler.config.max_num_batched_tokens
    if budget <= num_running:
        raise ValueError(f"max_num_batched_tokens={budget} leaves nothing beside {num_running} running requests")
    rng, vocab_size = np.random.default_rng(seed), engine.runner.model.config.vocab_size
    names = [f"running-{r}" for r in range(num_running)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    try:
        for name in names:
            engine.add_request(name, rng.integers(vocab_size, size=context).tolist(), params)
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        first_step = scheduler.stats.totals.num_steps + before
        for _ in range(before):
            engine.step()
        engine.add_request("long", rng.integers(vocab_size, size=prompt_len).tolist(), params)
        request, left = scheduler.requests["long"], after
        while left:
            engine.step()
            left -= request.first_token_time is not None
    finally:
        engine.discard_request([*names, "long"])
    rows, done = [], 0
    for record in list(scheduler.stats.records)[first_step - before :]:
        chunk = 0 if record.step <= first_step else min(record.num_scheduled_tokens - num_running, prompt_len - done)
        done += chunk
        rows.append((record.step - first_step - 1, chunk, record.num_scheduled_tokens, record.itl_max))
    table = pd.DataFrame(rows, columns=["step", "long_tokens", "num_tokens", "itl"])
    return table, request.first_token_time - request.arrival_time


def compare_budgets(runs: dict[str, list[tuple[pd.DataFrame, float]]]) -> pd.DataFrame:
    """Per way, over its repeats: worst_itl, usual_itl (of steps without the long prompt) and ttft, medians in seconds."""
    import pandas as pd

    rows = {
        way: {
            "steps": int((tables[0][0]["long_tokens"] > 0).sum()),
            "usual_itl": np.median([table.loc[table["step"] < 0, "itl"].median() for table, _ in tables]),
            "worst_itl": np.median([table["itl"].max() for table, _ in tables]),
            "ttft": np.median([ttft for _, ttft in tables]),
        }
        for way, tables in runs.items()
    }
    return pd.DataFrame(rows).T.astype({"steps": int})
