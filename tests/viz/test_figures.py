"""Every figure: opaque, labelled, nothing clipped or written over something else, the same bytes each time, data beside it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from llmlab.measure.cost import (
    cost_table,
    crossover_tokens,
    decode_costs,
    least_seconds,
    linear_shapes,
    prefill_costs,
    step_costs,
    total,
)
from llmlab.measure.datasheets import DATASHEETS, Roof
from llmlab.measure.known_models import known_config
from llmlab.viz.ledger import ledger_bytes, ledger_figure
from llmlab.viz.roofline import (
    breakdown_figure,
    crossover_figure,
    kv_share_figure,
    roofline_figure,
    sweep_figure,
    trail_figure,
    utilisation_figure,
)
from llmlab.viz.style import GROUP_COLOURS, SERIES, STYLE, engineering, new_figure, save_figure

CONFIG = known_config("smollm2-135m-instruct")
ROOFS = [
    Roof("a machine", "bfloat16", memory, 2.2e12, bandwidth, "measured")
    for memory, bandwidth in (("L3", 39.6e9), ("memory", 25.4e9), ("L2", 165e9))
]


def points_table() -> pd.DataFrame:
    tables = []
    for phase, costs in (("prefill", prefill_costs(CONFIG, 1, 512)), ("decode", decode_costs(CONFIG, 1, 512))):
        table = cost_table(costs, ROOFS[0])
        table["seconds"] = table["least_seconds"] * np.linspace(1.2, 4, len(table))
        table["share"] = table["seconds"] / table["seconds"].sum()
        table["flops_per_s"] = table["flops"] / table["seconds"]
        tables.append(table.reset_index().assign(phase=phase))
    return pd.concat(tables)


def sweep_table(shapes: list[tuple[int, int, int]]) -> pd.DataFrame:
    rows = []
    for reqs, query, context in shapes:
        costs = step_costs(CONFIG, [query] * reqs, [context] * reqs)
        least = least_seconds(costs, ROOFS[0])
        seconds = 2 * least
        flops, nbytes = total(costs)
        rows.append(
            {
                "num_reqs": reqs,
                "query_len": query,
                "context": context,
                "seconds": seconds,
                "low": 0.9 * seconds,
                "high": 1.3 * seconds,
                "least_seconds": least,
                "tokens_per_s": reqs * query / seconds,
                "mfu": flops / seconds / ROOFS[0].flops,
                "mbu": nbytes / seconds / ROOFS[0].bandwidth,
            }
        )
    return pd.DataFrame(rows)


def trail_table() -> pd.DataFrame:
    rows = []
    for phase, sizes in (("prefill", [16, 64, 256, 1024]), ("decode", [1, 4, 16, 64])):
        for kind in ("linear", "attention"):
            for size in sizes:
                costs = prefill_costs(CONFIG, 1, size) if phase == "prefill" else decode_costs(CONFIG, size, 1024)
                chosen = [c for c in costs if (c.group == "attention") == (kind == "attention") and c.group != "rest"]
                flops = total(chosen).flops
                rate = flops / least_seconds(chosen, ROOFS[0]) / 2
                rows.append((phase, kind, size, total(chosen).intensity, rate))
    return pd.DataFrame(rows, columns=["phase", "kind", "size", "intensity", "flops_per_s"])


def crossover_table() -> pd.DataFrame:
    roofs = {name: sheet.roof() for name, sheet in DATASHEETS.items()}
    return pd.DataFrame(
        {
            name: {group: crossover_tokens(roof.ridge, *shape) for group, shape in linear_shapes(CONFIG).items()}
            for name, roof in roofs.items()
        }
    ).T


def share_table() -> pd.DataFrame:
    share = lambda b, c: cost_table(decode_costs(CONFIG, b, c)).loc["attention", "bytes_share"]
    return pd.DataFrame({c: {b: share(b, c) for b in (1, 4, 16, 64)} for c in (256, 1024, 4096)})


def ledger_table() -> pd.DataFrame:
    from llmlab import ops
    from llmlab.ops.registry import record_ops

    with record_ops() as ledger:
        ledger.layer, ledger.stage = 1, "gate_up_proj"
        ops.linear(torch.ones(7, 64), torch.ones(256, 64))
        ledger.stage = "act_fn"
        ops.silu_and_mul(torch.ones(7, 256))
    return ledger_bytes(ledger.table(), 1)


FIGURES: dict[str, Callable[[], tuple[Figure, pd.DataFrame]]] = {
    "roofline": lambda: (roofline_figure(points_table(), ROOFS, "One prefill, one decode step"), points_table()),
    "trail": lambda: (trail_figure(trail_table(), ROOFS[0], "Over length and batch"), trail_table()),
    "breakdown": lambda: (breakdown_figure(points_table(), "Where the time goes"), points_table()),
    "sweep": lambda: (
        sweep_figure(t := sweep_table([(b, 1, c) for c in (128, 1024) for b in (1, 4, 16)]), "Decode"),
        t,
    ),
    "utilisation": lambda: (
        utilisation_figure(
            t := sweep_table([(1, n, n) for n in (16, 64, 256)]), "query_len", "prompt (tokens)", "Prefill"
        ),
        t,
    ),
    "crossover": lambda: (crossover_figure(crossover_table(), "Compute-bound from"), crossover_table()),
    "kv share": lambda: (
        kv_share_figure(share_table(), {"half of the bytes": 12000.0}, "What decode reads"),
        share_table(),
    ),
    "ledger": lambda: (ledger_figure(ledger_table(), "One layer"), ledger_table()),
}


@pytest.fixture(params=FIGURES)
def drawn(request: pytest.FixtureRequest) -> tuple[Figure, pd.DataFrame]:
    return FIGURES[request.param]()


def test_is_legible(drawn: tuple[Figure, pd.DataFrame], legible: Callable[[Figure], None]) -> None:
    legible(drawn[0])


def test_is_opaque(drawn: tuple[Figure, pd.DataFrame], tmp_path: Path) -> None:
    from PIL import Image

    figure, data = drawn
    png, *_ = save_figure(figure, data, tmp_path, "f")
    image = np.asarray(Image.open(png).convert("RGBA"))
    assert image[..., 3].min() == 255
    assert image[0, 0].tolist() == [255, 255, 255, 255]


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_figure_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    digests = []
    for run in ("a", "b"):
        files = save_figure(*FIGURES[name](), tmp_path / run, "f")
        assert [f.suffix for f in files] == [".png", ".svg", ".csv"]
        digests.append([hashlib.sha256(f.read_bytes()).hexdigest() for f in files])
    assert digests[0] == digests[1]
    assert b"<dc:date>" not in (tmp_path / "a" / "f.svg").read_bytes()


def test_the_data_lies_beside_it(tmp_path: Path) -> None:
    figure, data = FIGURES["crossover"]()
    save_figure(figure, data, tmp_path, "f")
    back = pd.read_csv(io.StringIO((tmp_path / "f.csv").read_text()))
    np.testing.assert_allclose(back["QKV"], data["QKV"])


@pytest.mark.parametrize("folder", ["", None])
def test_without_a_folder_nothing_is_written(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert save_figure(*FIGURES["crossover"](), folder, "f") == []
    assert list(tmp_path.iterdir()) == []


def test_the_callers_settings_are_neither_used_nor_changed() -> None:
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30}):
        before = dict(mpl.rcParams)
        figure, _ = FIGURES["breakdown"]()
        assert dict(mpl.rcParams) == before
        assert to_rgb(figure.axes[0].get_facecolor()) == (1, 1, 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (999.9, "1 k"),
        (1234, "1.23 k"),
        (2.2e12, "2.2 T"),
        (0.25, "0.25"),
        (-3e6, "-3 M"),
        (4e17, "400 P"),
    ],
)
def test_numbers_have_prefixes(value: float, text: str) -> None:
    assert engineering(value) == text


def test_units_follow_the_prefix() -> None:
    assert engineering(39.6e9, "B/s") == "39.6 GB/s"
    assert engineering(1.5e-3, "s") == "1.5 ms"
    assert engineering(12, "B") == "12 B"


# Machado, Oliveira & Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency", severity 1.
DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def seen(colour: str, deficiency: str) -> np.ndarray:
    """The colour in CIE L*a*b*, as a viewer with the deficiency sees it."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ linear / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("colours", [tuple(GROUP_COLOURS.values()), SERIES[:4]], ids=["groups", "series"])
def test_neighbouring_colours_differ_to_colour_blind_eyes(colours: tuple[str, ...], deficiency: str) -> None:
    for one, other in pairwise(colours):  # neighbours in bars and legends
        assert np.linalg.norm(seen(one, deficiency) - seen(other, deficiency)) > 15, (one, other)


def test_style_is_only_known_parameters() -> None:
    assert set(STYLE) <= set(mpl.rcParams)
    assert new_figure().get_facecolor() is not None
