"""Figures of notebook 01: legible, and showing what their tables say."""

import pandas as pd
import pytest

from llmlab.bpe import Tokenizer
from llmlab.measure.experiments.bpe import compression, merge_steps
from llmlab.viz.bpe import compression_figure, merge_tree_figure, readable_bytes

TEXT = "unable to believe the unbelievable: a believer believes; the unable disbelieve, able as they are\n" * 5


def compressed():
    table, _ = compression(TEXT, {"same": TEXT, "other": "a label on a table"}, [256, 272, 288])
    others = pd.DataFrame({"tokenizer": ["big"], "text": ["other"], "vocab_size": [4096], "bytes_per_token": [3.0]})
    return compression_figure(table, {"same": 5.0}, others)


def tree(piece):
    return merge_tree_figure(merge_steps(Tokenizer.train(TEXT, 300), piece), piece)


FIGURES = {
    "tree": lambda: tree(" unbelievable"),
    "bytes only": lambda: tree("é🦙"),
    "one byte": lambda: tree("x"),
    "compression": compressed,
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible(name, legible):
    legible(FIGURES[name]())


def test_the_tree_shows_every_byte_and_every_merge():
    tokenizer = Tokenizer.train(TEXT, 300)
    steps = merge_steps(tokenizer, " unable")
    shown = [text.get_text() for text in tree(" unable").axes[0].texts]
    for token in steps["token"]:
        assert readable_bytes(token) in shown
    for rank in steps["rank"]:
        assert f"{rank:,}" in shown


@pytest.mark.parametrize(
    ("token", "text"),
    [(b" a", "␣a"), (b"\n", "⏎"), (b"\xf0\x9f", "f0 9f"), ("🦙".encode(), "U+1F999"), (b"\x00", "00")],
)
def test_tokens_are_readable(token, text):
    assert readable_bytes(token) == text


def test_compression_has_a_line_a_text():
    axis = compressed().axes[0]
    assert axis.get_lines()[0].get_ydata()[0] == 1.0  # without merges a token is a byte
    assert {"same", "other", "same: bytes a piece", "other: big"} == set(axis.get_legend_handles_labels()[1])
