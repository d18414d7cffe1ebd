"""One look for every figure: legible in print, safe for colour-blind readers, opaque; and how a figure is saved with its data.

Colours are Paul Tol's "muted" scheme (Tol 2021, SRON technical note EPS/TN/09-002); a marker or a hatch always says the same a
second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, LINE = "#1b1f24", "#57606a", "#d0d7de"
GROUP_COLOURS = {
    "QKV": "#332288",
    "O": "#88ccee",
    "gate+up": "#44aa99",
    "down": "#117733",
    "head": "#999933",
    "attention": "#cc6677",
    "rest": "#aa4499",
    "sampling": "#ddcc77",
}
SERIES = ("#332288", "#cc6677", "#44aa99", "#999933", "#88ccee", "#882255", "#117733")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {
    "figure.facecolor": "white",
    "figure.dpi": 130,
    "savefig.facecolor": "white",
    "savefig.transparent": False,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=SERIES),
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": True,
    "legend.framealpha": 1.0,
    "legend.edgecolor": LINE,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "llmlab",
    "svg.fonttype": "none",
}

P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Let a drawing function use :data:`STYLE`, whatever the caller's settings are, and leave those alone."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapped


def new_figure(width: float = 9.0, height: float = 5.0) -> Figure:
    """An empty figure, in inches, that nobody else knows: not pyplot's, so a notebook shows it once and forgets it."""
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(fig: Figure, data: pd.DataFrame, folder: str | Path | None, name: str) -> list[Path]:
    """Write ``name.png``, ``name.svg`` and the table it was drawn from, ``name.csv``; nothing if ``folder`` is empty.

    The same figure gives the same bytes each time. Returns the files.
    """
    if not folder:
        return []
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{ending}" for ending in ("png", "svg", "csv")]
    with mpl.rc_context(STYLE):
        fig.savefig(files[0], metadata={"Software": None}, bbox_inches="tight", pad_inches=0.1)
        fig.savefig(files[1], metadata={"Date": None, "Creator": None}, bbox_inches="tight", pad_inches=0.1)
    data.to_csv(files[2], index=has_labels(data), lineterminator="\n")
    return files


def has_labels(table: pd.DataFrame) -> bool:
    """Whether a table's index says something: it has a name, or is more than row numbers."""
    return any(table.index.names) or not pd.api.types.is_integer_dtype(table.index)


def engineering(value: float, unit: str = "", digits: int = 3) -> str:
    """``2.2e12`` → ``2.2 T``: a number with its SI prefix, and a unit if given; below 1 a prefix only with a unit."""
    if abs(value) < 1 and not unit:
        return f"{value:.{digits}g}"
    power = int(np.floor(np.log10(abs(value) * 1.0005) / 3)) if value else 0
    power = min(max(power, -3), 5)
    return f"{value / 1000.0**power:.{digits}g} {'nµm kMGTP'[power + 3].strip()}{unit}".strip()


def log_axis(axis: Axes, which: str, unit: str = "", base: int = 10) -> None:
    """A logarithmic axis whose ticks read as numbers (1 G, 10 G), not as powers; 2 and 5 too where it is short."""
    target = axis.xaxis if which == "x" else axis.yaxis
    (axis.set_xscale if which == "x" else axis.set_yscale)("log", base=base)

    def minor(value: float, _: object) -> str:
        low, high = target.get_view_interval()
        digit = round(value / 10 ** np.floor(np.log10(value)), 6)
        return engineering(value, unit) if high < 60 * low and digit in (2, 5) else ""

    target.set_major_formatter(FuncFormatter(lambda value, _: engineering(value, unit)))
    target.set_minor_formatter(FuncFormatter(minor if base == 10 else lambda value, _: ""))
