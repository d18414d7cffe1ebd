"""The end of the model: what gathering the sampled rows saves at the LM head, and what leaving early saves in the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmlab.config import ModelConfig
from llmlab.measure.cost import OpCost, prefill_costs, total
from llmlab.measure.roofline import StepDriver
from llmlab.measure.timer import compare, measure_in_turns
from llmlab.ops import linear

if TYPE_CHECKING:
    import pandas as pd


def head_flops(config: ModelConfig, rows: int) -> float:
    """FLOPs of the LM head over so many rows."""
    meta = lambda *shape: torch.empty(*shape, device="meta")
    return linear.cost(meta(rows, config.hidden_size), meta(config.vocab_size, config.hidden_size)).flops


def head_share(configs: dict[str, ModelConfig], lengths: Sequence[int]) -> pd.DataFrame:
    """One row a model and prompt length: the LM head's share of a prefill's FLOPs over all rows, and over the last one.

    Columns: model, tokens, share_all, share_last, saved (share of the head's own FLOPs that goes away).
    """
    import pandas as pd

    rows = []
    for name, config in configs.items():
        for length in lengths:
            last, every = head_flops(config, 1), head_flops(config, length)
            layers = total(prefill_costs(config, 1, length)).flops - last
            rows.append(
                {
                    "model": name,
                    "tokens": length,
                    "share_all": every / (layers + every),
                    "share_last": last / (layers + last),
                    "saved": 1 - last / every,
                }
            )
    return pd.DataFrame(rows)


def head_times(driver: StepDriver, lengths: Sequence[int], max_seconds: float = 2.0) -> pd.DataFrame:
    """The LM head of a real model over all rows of a prefill and over its last one.

    Columns: tokens, all_seconds, last_seconds, gain (all over last) with p10 and p90.
    """
    import pandas as pd

    rows = []
    for length in lengths:
        hidden = driver.runner.forward(replace(driver.batch([length], [length]), wanted=None)).clone()
        last = hidden[-1:].contiguous()
        taken = measure_in_turns(
            {"all": lambda h=hidden: driver.runner.logits(h), "last": lambda h=last: driver.runner.logits(h)},
            device=driver.model.ops.device,
            repeats=9,
            max_seconds=max_seconds,
        )
        gain = compare("last", taken["last"], "all", taken["all"])
        rows.append(
            {
                "tokens": length,
                "all_seconds": taken["all"].median,
                "last_seconds": taken["last"].median,
                "gain": gain.ratio,
                "p10": gain.low,
                "p90": gain.high,
            }
        )
    return pd.DataFrame(rows)


def last_layer(config: ModelConfig, length: int, dtype: torch.dtype = torch.bfloat16) -> pd.DataFrame:
    """The last layer's ops for a prompt of ``length`` tokens, all of it and trimmed: way, group, flops, bytes.

    "K and V" are apart from "Q" in either way, though they are one product in the first.
    """
    import pandas as pd

    one = replace(config, num_layers=1, sliding_windows=config.sliding_windows[-1:])
    kv = 2 * config.num_kv_heads / (config.num_heads + 2 * config.num_kv_heads)
    rows = []
    for way in ("all tokens", "trimmed"):
        costs = prefill_costs(one, 1, length, dtype=dtype, trim_last_layer=way == "trimmed")
        ops = [c for c in costs if c.stage not in ("embedding", "lm_head", "")]
        joined = [c for c in ops if c.stage == "qkv_proj"]
        if way == "trimmed":
            wide, narrow = joined  # K and V of all, Q of the last: step_costs' order
            rows += [_row(way, "K and V", [wide], 1.0), _row(way, "Q", [narrow], 1.0)]
        else:
            rows += [_row(way, "K and V", joined, kv), _row(way, "Q", joined, 1 - kv)]
        named = {
            "attention": ["attention"],
            "O": ["o_proj"],
            "MLP": ["gate_up_proj", "act_fn", "down_proj"],
            "norms, RoPE, cache": ["input_layernorm", "qk_norm", "rotary_emb", "kv_cache", "post_attention_layernorm"],
        }
        rows += [_row(way, name, [c for c in ops if c.stage in stages], 1.0) for name, stages in named.items()]
    return pd.DataFrame(rows)


def _row(way: str, group: str, costs: Sequence[OpCost], share: float) -> dict[str, object]:
    flops, moved = total(costs) if costs else (0.0, 0.0)
    return {"way": way, "group": group, "flops": share * flops, "bytes": share * moved}


def trimmed_share(configs: dict[str, ModelConfig], lengths: Sequence[int]) -> pd.DataFrame:
    """One row a model and prompt length: model, num_layers, tokens, saved (share of a prefill's FLOPs), times_layers (the same in
    units of 1/num_layers)."""
    import pandas as pd

    rows = []
    for name, config in configs.items():
        for length in lengths:
            every = total(prefill_costs(config, 1, length)).flops
            trimmed = total(prefill_costs(config, 1, length, trim_last_layer=True)).flops
            saved = 1 - trimmed / every
            rows.append(
                {
                    "model": name,
                    "num_layers": config.num_layers,
                    "tokens": length,
                    "saved": saved,
                    "times_layers": saved * config.num_layers,
                }
            )
    return pd.DataFrame(rows)


def trimmed_times(driver: StepDriver, lengths: Sequence[int], max_seconds: float = 4.0) -> pd.DataFrame:
    """Whole prefill steps with the last layer trimmed and not, in turns.

    Columns: tokens, all_seconds, trimmed_seconds, saved (share of the time; median, p10, p90 of pairs; sure_low and sure_high
    hold the median with 95 % confidence).
    """
    import pandas as pd

    rows = []
    for length in lengths:
        batch = driver.batch([length], [length])
        every = replace(batch, wanted=None)
        taken = measure_in_turns(
            {"all": lambda b=every: driver.run(b), "trimmed": lambda b=batch: driver.run(b)},
            device=driver.model.ops.device,
            warmup=2,
            repeats=25,
            max_seconds=max_seconds,
        )
        ratio = compare("trimmed", taken["trimmed"], "all", taken["all"])
        rows.append(
            {
                "tokens": length,
                "all_seconds": taken["all"].median,
                "trimmed_seconds": taken["trimmed"].median,
                "saved": 1 - 1 / ratio.ratio,
                "p10": 1 - 1 / ratio.low,
                "p90": 1 - 1 / ratio.high,
                "sure_low": 1 - 1 / ratio.sure_low,
                "sure_high": 1 - 1 / ratio.sure_high,
            }
        )
    return pd.DataFrame(rows)
