"""The register is complete, its rules discriminate, and no verdict exists apart from numbers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from llmlab.measure import measurements
from llmlab.measure.claims import Verdict, claim, claims_table, judge, quick_claims, read_findings, register
from llmlab.measure.hardware import describe_machine

# For each claim: numbers that must confirm it, numbers that must not, and what those must give instead.
CASES = {
    "C01": ((8, 6), (8, 1.5), "refuted"),
    "C02": ((0.3, 0.95), (0.9, 0.8), "refuted"),
    "C03": ((3, 0.9), (3, 1.5), "refuted"),
    "C04": ((137,), (25,), "refuted"),
    "C05": ((30, 1, 1), (30, 30, 1), "refuted"),
    "C06": ((1.5, 1.03), (1.5, 1.3), "refuted"),
    "C07": ((0, 0.4), (0, 0.01), "refuted"),
    "C08": ((1.2, 1.0), (0.9, 1.0), "depends"),
    "C09": ((1e-7, 0.03), (1e-2, 0.03), "refuted"),
    "C10": ((1.3,), (0.8,), "refuted"),
    "C11": ((2, 67), (2, 500), "refuted"),
    "C12": ((1e-6, 1.0), (1e-6, 2.0), "refuted"),
    "C13": ((1.05, 100), (1.3, 100), "depends"),
    "C14": ((0.97, 0.99), (0.8, 0.99), "depends"),
    "C15": ((16, 15, 1, 8, 1.1), (16, 2, 1, 8, 1.1), "refuted"),
    "C16": ((3, 2.9, 3.1, 1.0), (3, 2.9, 3.1, 2.0), "depends"),
    "C17": ((0.8, 0.82), (0.8, 1.05), "refuted"),
    "C18": ((1.1, 1.2), (1.1, 0.9), "depends"),
    "C19": ((0.6,), (0.75,), "refuted"),
    "C20": ((0.998,), (0.5,), "refuted"),
    "C21": ((1e-6, 0.03, 30), (1e-1, 0.03, 30), "refuted"),
    "C22": ((0, 1.5), (0, 0), "refuted"),
    "C23": ((5, 1000), (0, 1000), "refuted"),
    "C24": ((0.09, 0.008, 1), (0.09, 0.008, 0.99), "refuted"),
    "C25": ((500, 500), (500, 499), "refuted"),
    "C26": ((0.4, 3), (1e-9, 3), "refuted"),
    "C27": ((0.702, 0.70, 0.167), (0.5, 0.70, 0.167), "refuted"),
    "C28": ((1, 2, 1e6, 128, 8192), (1, 2, 1000, 128, 8192), "depends"),
    "C29": ((10, 100), (90, 100), "refuted"),
    "C30": ((0.2, 1.3), (0.9, 1.3), "refuted"),
    "C31": ((2, 1e-5), (1.0, 1e-5), "refuted"),
    "C32": ((4, 0.25, 2), (4, 0.25, 3), "refuted"),
    "C33": ((1e-7, 4), (1e-2, 4), "refuted"),
    "C34": ((1.98, 1.01), (1.98, 2.0), "refuted"),
    "C35": ((0.1, 0.2, 0.0), (0.1, 1.2, 0.0), "depends"),
    "C36": ((0.9, 0.85), (0.9, 0.1), "refuted"),
    "C37": ((20,), (1.1,), "depends"),
    "C38": ((0.02, 0.012, 1), (0.02, 0.0195, 1), "refuted"),
}


@pytest.fixture
def nothing_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "ROOT", Path("/nowhere"))


def test_the_register_is_complete_and_in_order() -> None:
    assert [one.id for one in register()] == [f"C{i:02d}" for i in range(1, 39)]
    for one in register():
        assert one.statement.endswith(".") and one.rule and one.numbers


@pytest.mark.parametrize("claim_id", CASES)
def test_rules_discriminate(claim_id: str) -> None:
    confirming, other, word = CASES[claim_id]
    one = claim(claim_id)
    names = list(one.numbers)
    assert len(confirming) == len(other) == len(names)
    assert one.decide(dict(zip(names, confirming, strict=True))) == Verdict("confirmed")
    verdict = one.decide(dict(zip(names, other, strict=True)))
    assert verdict.word == word
    assert (verdict.on != "") == (word == "depends"), "what it depends on must be said, and only then"


def test_a_finding_keeps_numbers_and_no_verdict(tmp_path: Path) -> None:
    finding = judge("C04", {"slot": 137}, machine="a machine", model="a model", out=tmp_path)
    kept = json.loads((tmp_path / "claims" / "C04.json").read_text())
    assert set(kept) == {"claim", "numbers", "machine", "model", "date", "load"}
    assert read_findings(tmp_path) == [finding]
    assert finding.verdict == Verdict("confirmed")
    assert str(finding) == "C04 confirmed (slot 137)"
    kept["numbers"]["slot"] = 25
    (tmp_path / "claims" / "C04.json").write_text(json.dumps(kept))
    assert read_findings(tmp_path)[0].verdict == Verdict("refuted")


@pytest.mark.parametrize("numbers", [{}, {"slots": 137}, {"slot": 137, "more": 1}])
def test_other_numbers_than_the_rules_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="C04 is decided by"):
        judge("C04", numbers)


def test_unknown_claims_are_refused() -> None:
    with pytest.raises(ValueError, match="C99"):
        claim("C99")


@pytest.mark.usefixtures("nothing_stored")
def test_the_table_says_what_was_not_measured(tmp_path: Path) -> None:
    judge("C14", {"prefill_compute_share": 0.99, "decode_memory_share": 0.98}, machine="a machine", out=tmp_path)
    table = claims_table(tmp_path, measure=False).set_index("claim")
    assert len(table) == 38
    assert table.loc["C14", "verdict"] == "confirmed"
    assert "0.98" in table.loc["C14", "numbers"]
    assert table.loc["C14", "measured on"].startswith("a machine")
    assert table.loc["C15", "verdict"] == "not measured yet"
    assert table.loc["C31", "verdict"] == f"not measured here: needs {claim('C31').needs}"
    assert (table["rule"] != "").all()


def test_stored_results_of_other_machines_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    entry = measurements.new_entry("campaign", describe_machine(), {})
    entry["findings"] = [asdict(judge("C31", {"speedup": 3, "max_error": 0}, machine="a GPU"))]
    measurements.store(entry, tmp_path / "data" / "measurements")
    monkeypatch.setattr(measurements, "ROOT", tmp_path)
    row = claims_table(measure=False).set_index("claim").loc["C31"]
    assert row["verdict"] == "confirmed" and row["measured on"].startswith("a GPU")


@pytest.mark.usefixtures("nothing_stored")
def test_a_busy_machine_decides_nothing(tmp_path: Path) -> None:
    judge("C10", {"speedup": 1.3}, load=0.6, out=tmp_path)
    assert (
        claims_table(tmp_path, measure=False).set_index("claim").loc["C10", "verdict"] == "not decided (machine busy)"
    )
    assert str(judge("C10", {"speedup": 1.3}, load=0.1).verdict) == "confirmed"


def test_the_newest_finding_of_a_machine_counts(tmp_path: Path) -> None:
    for run, slot, date in (("a", 1, "2026-01-02"), ("b", 137, "2026-01-03"), ("c", 2, "2026-01-01")):
        judge("C04", {"slot": slot}, machine="m", out=tmp_path / run)
        file = tmp_path / run / "claims" / "C04.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"date": date}))
    assert [finding.numbers["slot"] for finding in read_findings(tmp_path)] == [137]


def test_quick_claims_are_measured_on_the_spot() -> None:
    found = {one.id: one.measure() for one in quick_claims()}
    assert {"C02", "C03", "C04", "C05", "C07", "C11", "C19", "C20", "C24", "C27", "C33"} <= set(found)
    for claim_id, numbers in found.items():
        assert judge(claim_id, numbers).verdict.word in ("confirmed", "refuted", "depends")
    assert found["C04"] == {"slot": 137}
    assert found["C11"]["largest_mb"] == pytest.approx(131072 * 128 * 4 / 1e6)
    assert found["C19"]["bytes_ratio"] == 0.6
    assert found["C20"]["saved_share"] == 1 - 1 / 512
    assert found["C24"]["threshold_at_0.9"] == pytest.approx(0.09, rel=1e-3)
    assert found["C24"]["threshold_at_0.08"] == pytest.approx(0.008, rel=1e-3)
    assert found["C27"]["mlp_parameters"] == pytest.approx(0.7020, abs=1e-4)
    assert found["C27"]["attention_parameters"] == pytest.approx(0.1671, abs=1e-4)
    # Six blocks of sixteen requests each, by hand: the static share is the mean over the batches' longest.
    assert found["C02"]["slots_used_continuous"] > found["C02"]["slots_used_static"]


def test_rules_name_their_thresholds() -> None:
    """A rule that only says "better" decides nothing: each holds a number, or says that nothing may differ."""
    exact = {"C03", "C04", "C05", "C10", "C13", "C18", "C23", "C25", "C28", "C33", "C35"}
    words = re.compile(r"\d|hal[fv]|quarter|tenth|double|twice")
    assert [one.id for one in register() if one.id not in exact and not words.search(one.rule)] == []


def test_a_finding_names_its_model_not_the_folder(tmp_path: Path) -> None:
    assert judge("C04", {"slot": 137}, model=str(tmp_path / "some-model")).model == "some-model"
    assert judge("C04", {"slot": 137}).model == ""
