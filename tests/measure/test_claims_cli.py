"""``llmlab claims``: every claim is shown, one in full has its rule, and nothing is made up where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlab.cli import main
from llmlab.measure import measurements
from llmlab.measure.claims import claim, judge


@pytest.fixture(autouse=True)
def nothing_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "ROOT", Path("/nowhere"))


def test_the_table_names_every_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--no-measure"]) == 0
    printed = capsys.readouterr().out
    assert [line[:3] for line in printed.splitlines() if line.startswith("C")] == [f"C{i:02d}" for i in range(1, 39)]
    assert "not measured here: needs a CUDA device" in printed
    assert "confirmed" not in printed


def test_one_claim_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "4", "C14"]) == 0
    printed = capsys.readouterr().out
    for name in ("C04", "C14"):
        assert claim(name).statement in printed
        assert claim(name).rule in printed
    assert "✓ confirmed" in printed
    assert "slot = 137" in printed
    assert "not measured yet: llmlab report measures it" in printed


def test_as_json_with_the_findings_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge("C10", {"speedup": 1.3}, machine="a machine", model="a model", out=tmp_path)
    judge("C18", {"gate_up_gain": 1.2, "qkv_gain": 1.1}, machine="a machine", load=0.5, out=tmp_path)
    assert main(["claims", "--no-measure", "--json", "--report", str(tmp_path)]) == 0
    records = {record["claim"]: record for record in json.loads(capsys.readouterr().out)}
    assert len(records) == 38
    assert records["C10"]["findings"][0] | {"date": ""} == {
        "verdict": "confirmed", "numbers": {"speedup": 1.3}, "machine": "a machine", "model": "a model", "date": "", "load": 0.0,
    }  # fmt: skip
    assert records["C18"]["findings"][0]["verdict"] == "not decided (machine busy)"
    assert records["C14"]["findings"] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["claims", "C99"], "C99"), (["claims", "--report", "/nowhere/at/all"], "no report at /nowhere")],
)
def test_refusals(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err
