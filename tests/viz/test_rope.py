"""Figures of notebook 04: legible, and showing what their tables say."""

import numpy as np
import pytest

from llmlab.config import RopeConfig
from llmlab.measure.experiments.rope import relative_scores, scaling_types, table_sizes, wavelengths
from llmlab.model.rope import inverse_frequencies
from llmlab.viz.rope import relative_figure, table_size_figure, turning_pairs_figure, wavelength_figure

ROPE = RopeConfig("default", 10000.0, 32, 64)
FIGURES = {
    "turning pairs": lambda: turning_pairs_figure(inverse_frequencies(ROPE).tolist(), [0, 4, 8, 15], 12),
    "relative": lambda: relative_figure(relative_scores(ROPE, 12)),
    "wavelengths": lambda: wavelength_figure(wavelengths(scaling_types(), 32768), 4096, 32768),
    "table sizes": lambda: table_size_figure(table_sizes()),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_dots_lie_on_the_circle_at_their_angle():
    figure = FIGURES["turning pairs"]()
    x, y = figure.axes[1].collections[0].get_offsets().T
    np.testing.assert_allclose(np.hypot(x, y), 1)
    angles = np.arange(12) * 10000.0 ** (-8 / 32)
    np.testing.assert_allclose([x, y], [np.cos(angles), np.sin(angles)], atol=1e-5)


def test_every_type_has_a_line():
    axis = FIGURES["wavelengths"]().axes[0]
    assert axis.get_legend_handles_labels()[1] == list(scaling_types())
    default = axis.get_lines()[0].get_ydata()
    assert default[0] == pytest.approx(2 * np.pi)


def test_models_stand_on_their_line():
    models = table_sizes()
    axis = FIGURES["table sizes"]().axes[0]
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.get_lines() if line.get_marker() == "o"}
    assert points == set(zip(models["max_position"], models["mb"]))
