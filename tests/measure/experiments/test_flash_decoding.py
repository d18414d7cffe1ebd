"""Flash-Decoding experiments: schedules are feasible, waves are counted right, and cut contexts give the same attention."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from llmlab import ops
from llmlab.measure.experiments import flash_decoding as experiment
from llmlab.measure.experiments.paging import SMOLLM2, attention_batch
from llmlab.ops.cpu.attention import paged_attention


@pytest.mark.parametrize(("programs", "units", "share"), [(8, 132, 8 / 132), (132, 132, 1.0), (133, 132, 133 / 264)])
def test_waves(programs: int, units: int, share: float) -> None:
    assert experiment.fill(programs, units) == share


def test_equal_programs_fill_a_machine_in_waves() -> None:
    plan = experiment.schedule([4] * 48, 16, merge_tiles=1)
    assert plan["end"].max() == 13
    assert experiment.utilisation(plan, 16) == pytest.approx(192 / (16 * 13))
    assert experiment.utilisation(experiment.schedule([5] * 20, 16), 16) == experiment.fill(20, 16)


@pytest.mark.parametrize("tiles", [[64] * 3, [1, 7, 3, 3, 9, 2, 2], [1] * 120 + [10] * 8])
def test_no_unit_does_two_things_at_once(tiles: list[int]) -> None:
    plan = experiment.schedule(tiles, 4, merge_tiles=2)
    programs = plan[plan["program"] >= 0]
    assert (programs["end"] - programs["start"]).tolist() == tiles
    for _, own in plan.groupby("unit"):
        own = own.sort_values("start")
        assert (own["start"].to_numpy()[1:] >= own["end"].to_numpy()[:-1]).all()
    assert plan[plan["program"] < 0]["start"].iloc[0] == programs["end"].max()
    assert programs["end"].max() <= sum(tiles) / 4 + max(tiles)  # Graham's bound for list scheduling


def test_no_units() -> None:
    with pytest.raises(ValueError, match="num_units must be at least 1"):
        experiment.schedule([1], 0)


@pytest.mark.parametrize("max_parts", [1, 2, 16])
def test_any_number_of_parts_is_the_same_attention(max_parts: int) -> None:
    batch = attention_batch([1, 1], [700, 33], SMOLLM2, 16, dtype=torch.bfloat16)
    out, lse = paged_attention(*batch.args, return_lse=True, max_parts=max_parts)
    want, want_lse = ops.paged_attention.reference(*batch.args, return_lse=True)
    torch.testing.assert_close(out.float(), want.float(), atol=5e-3, rtol=2e-2)
    torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=1e-3)


@pytest.mark.skipif(experiment.cores() < 2, reason="needs two cores")
def test_cut_and_uncut_are_clocked_and_compared() -> None:
    table = experiment.split_against_whole((256, 512), layers=2, max_seconds=0.05)
    assert table["context"].tolist() == [256, 512]
    assert (table[["whole", "split", "speedup"]] > 0).all(axis=None)
    assert table["max_error"].max() < 5e-3
    assert table["units"].tolist() == [experiment.cores()] * 2
    assert isinstance(table, pd.DataFrame)


def test_one_core_has_nothing_to_split_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "cores", lambda: 1)
    with pytest.raises(ValueError, match="at least two cores"):
        experiment.split_against_whole((256,))
