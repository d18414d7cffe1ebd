"""Figures of prefix caching, chunked prefill and preemption, held to the rules of every figure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from llmlab.measure.experiments.prefix_caching import hash_chain
from llmlab.viz.chunked_prefill import interference_figure
from llmlab.viz.preemption import recompute_or_swap_figure
from llmlab.viz.prefix_caching import hash_chain_figure, pool_figure, savings_figure

SHARED = [11, 12, 13, 14, 21, 22, 23, 24]
CHAIN = {"A": SHARED + [31, 32, 33, 34, 35], "B": SHARED + [41, 42, 43, 44], "C": [99] + SHARED[1:]}
MOMENTS = {
    "A runs": [(0, "A0", "held"), (1, "A1", "held"), (2, "", "held"), (3, "", "free"), (4, "", "free")],
    "A has ended": [(2, "", "free"), (3, "", "free"), (4, "", "free"), (1, "A1", "free"), (0, "A0", "free")],
}


def saved() -> pd.DataFrame:
    seconds = np.array([0.3, 0.2, 0.08])
    return pd.DataFrame({"cached": [0, 256, 992], "seconds": seconds, "low": 0.9 * seconds, "high": 1.3 * seconds})


def steps(chunks: int) -> tuple[pd.DataFrame, float]:
    step = np.arange(-6, chunks + 6)
    inside = (step >= 0) & (step < chunks)
    itl = np.where(inside, 0.02 + 0.3 / chunks, 0.02)
    return pd.DataFrame({"step": step, "long_tokens": inside * 1024 // chunks, "itl": itl}), 0.3


def paper(slope: float) -> pd.DataFrame:
    contexts = 2 ** np.arange(4, 14)
    return pd.DataFrame({"context": contexts, "recompute": 1e-6 * contexts**slope, "swap": 1e-5 * contexts})


def measured() -> pd.DataFrame:
    table = paper(1.5)
    return table.assign(
        **{f"{w}_{e}": table[w] * f for w in ("recompute", "swap") for e, f in (("low", 0.9), ("high", 1.2))}
    )


FIGURES = {
    "chain": lambda: (hash_chain_figure(t := hash_chain(CHAIN, 4), "Chained hashes"), t),
    "pool": lambda: (pool_figure(MOMENTS, "The pool"), pd.DataFrame()),
    "savings": lambda: (savings_figure(t := saved(), 1024, "Saved"), t),
    "interference": lambda: (interference_figure({"whole": (r := steps(1)), "in 8 chunks": steps(8)}, "Arrives"), r[0]),
    "recompute or swap": lambda: (
        recompute_or_swap_figure({"here": (measured(), 100.0), "H100": (t := paper(0.5), np.inf)}, "Which?"),
        t,
    ),
}


@pytest.fixture(params=FIGURES)
def drawn(request: pytest.FixtureRequest) -> tuple[Figure, pd.DataFrame]:
    return FIGURES[request.param]()


def test_legible(drawn: tuple[Figure, pd.DataFrame], legible: Callable[[Figure], None]) -> None:
    legible(drawn[0])


def test_equal_blocks_are_drawn_once_and_every_block_has_a_parent() -> None:
    figure, table = FIGURES["chain"]()
    (axis,) = figure.axes
    boxes = [text.get_text() for text in axis.texts if ":  " in text.get_text()]
    assert sorted(box.split(":")[0] for box in boxes) == ["A", "A", "A, B", "A, B", "B", "C", "C"]
    arrows = [patch for patch in axis.patches if type(patch).__name__ == "FancyArrowPatch"]
    assert len(arrows) == len(boxes)
    assert sum("no hash" in text.get_text() for text in axis.texts) == (table["hash"] == "").sum() == 1


def test_the_free_queue_is_drawn_in_its_order() -> None:
    (axis,) = FIGURES["pool"]()[0].axes
    numbers = [text for text in axis.texts if text.get_text().startswith("#")]
    second = sorted((text for text in numbers if text.get_position()[1] > 0.9), key=lambda t: t.get_position()[0])
    assert [text.get_text() for text in second] == ["#2", "#3", "#4", "#1", "#0"]


def test_a_crossover_is_named_where_there_is_one() -> None:
    here, gpu = FIGURES["recompute or swap"]()[0].axes
    assert [text.get_text() for text in here.texts] == ["100 tokens"] and not gpu.texts
