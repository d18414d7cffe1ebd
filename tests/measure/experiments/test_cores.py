"""Tile loads and busy cores: every row is there, and bad shapes are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from llmlab.measure.experiments.busy_cores import competitors, region_times
from llmlab.measure.experiments.tile_loads import WAYS, operand_bytes, tile_loads
from llmlab.ops.cpu import amx


@pytest.mark.skipif(not amx.available(), reason="no AMX here")
def test_both_ways_of_loading():
    table = tile_loads((64, 96), tokens=64, panels=4, max_seconds=0.01)
    assert sorted(zip(table["in_features"], table["way"])) == sorted((n, way) for n in (64, 96) for way in WAYS)
    assert (table["flops"] == 2 * 64 * 64 * table["in_features"]).all() and (table["seconds"] > 0).all()
    assert operand_bytes(64) == (4096, 4096)
    with pytest.raises(ValueError, match="multiples"):
        tile_loads((64,), tokens=48)


def test_without_tiles(monkeypatch):
    monkeypatch.setattr(amx, "available", lambda: False)
    with pytest.raises(ValueError, match="no AMX"):
        tile_loads((64,))


def test_regions_and_competitors_that_go_away():
    table = region_times(busy=(0, 1), repeats=1)
    assert list(table["busy"]) == [0, 0, 1, 1] and set(table["way"]) == {"barrier", "gate"}
    assert ((table["low"] <= table["seconds"]) & (table["seconds"] <= table["high"])).all()
    with competitors(0):
        pass
