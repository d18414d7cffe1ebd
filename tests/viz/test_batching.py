"""Figures of batching, held to the rules of every figure; and the slots that the batch figure shows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from llmlab.engine.batch import Batch
from llmlab.measure.experiments.scheduling import slots_by_spread, thrashing
from llmlab.viz.batching import (
    batch_figure,
    slot_table,
    slots_figure,
    thrashing_figure,
    throughput_figure,
    waiting_figure,
)

GOLDEN = {"A": (9, 1, [7, 2, 5]), "B": (8, 1, [1, 3, 9]), "C": (4, 5, [4, 8, 6]), "D": (4, 3, [4, 10])}


def golden() -> pd.DataFrame:
    plan = SimpleNamespace(
        num_computed_tokens={name: r[0] for name, r in GOLDEN.items()},
        num_scheduled_tokens={name: r[1] for name, r in GOLDEN.items()},
        block_ids={name: r[2] for name, r in GOLDEN.items()},
    )
    requests = {name: SimpleNamespace(all_token_ids=[0] * 12, num_tokens=12, num_prompt_tokens=12) for name in GOLDEN}
    return slot_table(Batch.build(plan, requests, block_size=4), block_size=4)


def served(num_requests: int) -> pd.DataFrame:
    first = np.arange(num_requests) // 8 * 1.0 + 0.1
    return pd.DataFrame({"first_token": first, "finished": first + 0.3 + 0.01 * np.arange(num_requests)})


def throughput() -> pd.DataFrame:
    table = pd.DataFrame({"num_reqs": [1, 2, 4, 8], "seconds": [0.017, 0.019, 0.02, 0.022]})
    return table.assign(
        low=0.9 * table["seconds"],
        high=1.2 * table["seconds"],
        tokens_per_s=table["num_reqs"] / table["seconds"],
        op_seconds=0.9 * table["seconds"],
        outside_seconds=0.001,
    )


def thrash(caching: bool) -> pd.DataFrame:
    return thrashing([40, 80], [64], [0], num_requests=6, enable_prefix_caching=caching)


FIGURES = {
    "batch": lambda: (batch_figure(t := golden(), 4, "Ten tokens of four requests"), t),
    "slots": lambda: (slots_figure(t := slots_by_spread([0, 0.5, 1], num_requests=16, slots=4), "Slots used"), t),
    "throughput": lambda: (throughput_figure(t := throughput(), "Tokens per second"), t),
    "waiting": lambda: (waiting_figure({"static": (t := served(24)), "continuous": t}, "24 requests, 8 slots"), t),
    "thrashing": lambda: (thrashing_figure({"with": (t := thrash(True)), "without": thrash(False)}, "Twice"), t),
}


@pytest.fixture(params=FIGURES)
def drawn(request: pytest.FixtureRequest) -> tuple[Figure, pd.DataFrame]:
    return FIGURES[request.param]()


def test_legible(drawn: tuple[Figure, pd.DataFrame], legible: Callable[[Figure], None]) -> None:
    legible(drawn[0])


def test_slots_of_the_golden_batch() -> None:
    table = golden()
    written = table[table["row"] >= 0].sort_values("row")
    assert written["slot"].tolist() == [21, 36, 32, 33, 34, 35, 24, 40, 41, 42]
    assert written["request"].tolist() == list("ABCCCCCDDD")
    shared = table[table["block"] == 4]
    assert shared["request"].tolist() == list("CCCCDDDD") and (shared["row"] == -1).all()
    assert len(table) == 10 + 9 + 9 + 7


def test_every_new_token_stands_twice_in_the_picture() -> None:
    """Once in the flat batch and once in the slot that it is written to; a token of the past in its slot only."""
    (axis,) = FIGURES["batch"]()[0].axes
    shown = [text.get_text() for text in axis.texts]
    table = golden()
    for token in table.itertuples():
        name = f"{token.request}{token.position}"
        if token.block != 4:
            assert shown.count(name) == (2 if token.row >= 0 else 1), name
    assert [name for name in shown if name.startswith("CD")] == ["CD0", "CD1", "CD2", "CD3"]
