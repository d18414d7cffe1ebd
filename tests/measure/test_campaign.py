"""The campaign, end to end on a CPU, in a process that has only the packages of a GPU machine; and what holds it together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from llmlab.measure import campaign as module
from llmlab.measure import campaign_correctness as correctness
from llmlab.measure import campaign_kernels, measurements, oracles
from llmlab.measure.campaign import Campaign, main

ABSENT = (
    "psutil tqdm filelock numba llvmlite gguf xgrammar jupyterlab nbval nbformat nbclient nbconvert papermill IPython ipywidgets "
    "ipykernel hypothesis beartype scipy tiktoken regex safetensors tokenizers huggingface_hub transformers pygments pytest"
).split()
"""What a GPU machine may lack: in ``sys.modules`` as None, a module is not found."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The entry of a quick campaign."""
    out = tmp_path_factory.mktemp("campaign")
    arguments = ["--device", "cpu", "--quick", "--minutes", "2", "--out", str(out)]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); "
        f"from llmlab.measure.campaign import main; sys.exit(main({arguments!r}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (file,) = out.iterdir()  # no half-written file beside it
    return measurements.read(file)


def test_every_section_comes_to_its_end(quick: dict[str, Any]) -> None:
    assert {s["status"] for s in quick["sections"]} <= {"done", "skipped"}
    assert [s["name"] for s in quick["sections"] if s["status"] == "done"][:3] == [
        "ceilings",
        "correctness, bfloat16",
        "engine: two layers of smollm2-135m-instruct",
    ]
    assert all(s["reason"] for s in quick["sections"] if s["status"] == "skipped")


def test_every_kernel_is_proved_in_both_dtypes(quick: dict[str, Any]) -> None:
    from llmlab import ops

    table = pd.DataFrame(quick["correctness"])
    assert table["ok"].all()
    assert set(table["how"]) == {"interpreter"}
    with_kernel = {name for name, one in ops.ALL.items() if one.has_kernel}
    assert with_kernel <= set(table["op"])
    in_half = table[table["dtype"].isin(["bfloat16", "float16"])].groupby("op")["dtype"].nunique()
    assert set(in_half.index) >= {name for name in with_kernel if ops.ALL[name].family != "sampling"}
    assert (in_half == 2).all()


def test_no_interpreter_run_is_clocked(quick: dict[str, Any]) -> None:
    assert {row["implementation"] for row in quick["kernels"]} == {"cpu", "torch"}
    assert {row["graph"] for row in quick["engine"]} <= {"none", "engine"}


def test_findings_hold_the_numbers_of_their_rules(quick: dict[str, Any]) -> None:
    assert {"C14", "C15", "C38"} <= {f["claim"] for f in quick["findings"]}  # validated when the entry was read


def test_far_cases_compare_what_they_mean_to() -> None:
    """The same cases as on a GPU, with far fewer elements: 2^31 of them take tens of gigabytes."""
    cases = list(campaign_kernels.far_cases(torch.device("cpu"), 1 << 15))
    assert len(cases) == 10
    for row in (correctness.check(case, "interpreter") for case in cases):
        assert row["ok"], row


def test_a_wrong_kernel_is_found() -> None:
    x = torch.randn(3, 8)
    row = lambda got: correctness.check(
        correctness.Case("op", torch.float32, "a case", lambda: [(got, oracles.silu_and_mul(x))]), "gpu"
    )
    right = oracles.silu_and_mul(x).float()
    assert row(right)["ok"]
    wrong = right.clone()
    wrong[1, 2] += 1e-3
    assert not row(wrong)["ok"] and row(wrong)["error"] > 1
    unwritten = right.clone()
    unwritten[0, 0] = float("nan")
    assert not row(unwritten)["ok"] and row(unwritten)["error"] is None
    assert "must have" in row(right[:2])["reason"]


def test_memory_that_is_not_written_holds_nan() -> None:
    with correctness.poisoned():
        assert torch.empty(5).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def empty(tmp_path: Path) -> Campaign:
    return Campaign(torch.device("cpu"), 1.0, True, tmp_path / "c.json", say=lambda line: None)


def test_a_failure_is_recorded_and_the_rest_goes_on(empty: Campaign) -> None:
    def fail() -> None:
        raise RuntimeError("the reason")

    empty.section("bad", 0.5, fail)
    empty.section("good", 0.5, lambda: None)
    empty.section("not here", 0.5, lambda: "needs more")
    kept = json.loads(empty.file.read_text())["sections"]
    assert [s["status"] for s in kept] == ["failed", "done", "skipped"]
    assert "RuntimeError: the reason" in kept[0]["reason"]
    assert str(measurements.ROOT) not in kept[0]["reason"]
    assert kept[2]["reason"] == "needs more"


def test_a_section_ends_with_its_time_and_keeps_its_rows(empty: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    campaign = Campaign(empty.device, 1.0, True, empty.file, say=lambda line: None)
    row = dict.fromkeys(measurements.COLUMNS["correctness"], 0)

    def slow() -> None:
        for _ in range(100):
            now[0] += 10
            campaign.add("correctness", row)

    campaign.section("slow", 0.5, slow)
    assert len(campaign.entry["correctness"]) == 4  # 30 of the 60 seconds, and the row that crossed the line
    campaign.section("slow again", 1.0, slow)
    campaign.section("late", 1.0, slow)
    assert [s["status"] for s in campaign.entry["sections"]] == ["cut off", "cut off", "skipped"]
    assert campaign.entry["sections"][2]["reason"] == "no time left"


def test_a_row_without_its_columns_is_refused(empty: Campaign) -> None:
    with pytest.raises(ValueError, match="kernels lacks"):
        empty.add("kernels", {"op": "x"})


def test_a_finding_from_rows_clocked_on_a_busy_machine_is_not_decided(empty: Campaign) -> None:
    empty.finding("C10", lambda: {"speedup": 1.3}, load=0.5)
    empty.finding("C10", lambda: {"speedup": 1.3})
    assert [f["load"] for f in empty.entry["findings"]] == [0.5, 0.0]


def test_an_experiment_that_raises_is_skipped_with_its_reason(empty: Campaign) -> None:
    def missing() -> dict[str, float]:
        raise ImportError("no such package")

    empty.finding("C31", missing)
    empty.finding("C10", lambda: {"speedup": float("nan")})
    empty.finding("C04", lambda: {"slot": 137})
    assert [f["claim"] for f in empty.entry["findings"]] == ["C04"]
    assert "no such package" in empty.entry["sections"][0]["reason"]
    assert "a number is missing" in empty.entry["sections"][1]["reason"]


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--quick", "--store"]])
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_quick_campaign_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--device", "cuda", "--quick", "--minutes", "5", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    entry = measurements.read(file)
    assert {row["how"] for row in entry["correctness"]} == {"gpu"}
    decodes = [row for row in entry["engine"] if row["query_len"] == 1]
    assert {row["graph"] for row in decodes} <= {"engine", "captured"}, decodes[0]["graph_error"]
