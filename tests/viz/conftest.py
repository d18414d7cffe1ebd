"""What every figure must be: labelled, with no text cut off and none written over another."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def texts(figure: Figure) -> list[Any]:
    """Every text that shows. Tick labels beyond the limits of their axis exist too, but are not drawn."""
    FigureCanvasAgg(figure).draw()
    beyond = set()
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not limits[0] <= tick.get_loc() <= limits[1]:
                    beyond |= {id(tick.label1), id(tick.label2)}
    found = figure.findobj(lambda artist: isinstance(artist, mpl.text.Text) and id(artist) not in beyond)
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def axes_are_labelled_and_log_axes_say_so(figure: Figure) -> None:
    plots = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    assert plots
    assert any(axis.get_xlabel() for axis in plots)
    for axis in plots:
        for name, scale in ((axis.get_xlabel(), axis.get_xscale()), (axis.get_ylabel(), axis.get_yscale())):
            assert scale != "log" or not name or name.endswith("log"), name
        assert axis.get_title(loc="left") or axis.get_title() or figure.get_suptitle()


def no_text_is_clipped(figure: Figure) -> None:
    shown = texts(figure)
    width, height = figure.canvas.get_width_height()
    for text in shown:
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= width + 1, text.get_text()
        assert box.y0 >= -1 and box.y1 <= height + 1, text.get_text()


def no_text_is_written_over_another(figure: Figure) -> None:
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    for (one, a), (other, b) in combinations(boxes, 2):
        overlap_x = min(a.x1, b.x1) - max(a.x0, b.x0)
        overlap_y = min(a.y1, b.y1) - max(a.y0, b.y0)
        # The box of a line of text is taller than its letters: a third of it may be shared.
        assert overlap_x <= 2 or overlap_y <= 0.45 * min(a.height, b.height), f"{one!r} over {other!r}"


@pytest.fixture(
    params=[axes_are_labelled_and_log_axes_say_so, no_text_is_clipped, no_text_is_written_over_another],
    ids=lambda check: check.__name__,
)
def legible(request: pytest.FixtureRequest) -> Callable[[Figure], None]:
    """A check of one figure: call it with the figure. One test a check."""
    return request.param
