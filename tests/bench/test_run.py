"""Benchmark runs: real processes on the tiny model, peers that are absent or broken, and what is made of the turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmlab.bench import BenchResult, run_bench
from llmlab.bench import peers as peers_file
from llmlab.bench.peers import ENGINES
from llmlab.bench.result import EngineRun, Turn, stored
from llmlab.bench.run import has_package
from llmlab.bench.workloads import WORKLOADS, Workload
from llmlab.measure import hardware
from llmlab.measure.hardware import Ceilings, describe_machine


@pytest.fixture
def quick(monkeypatch):
    """No measuring of ceilings; a workload of a few tokens."""
    limits = Ceilings(
        describe_machine(), "2026-01-01T00:00:00+00:00", {"float32": 1e11}, 2e10, 3e10, True, (), 1e-6, 0.0
    )
    monkeypatch.setattr(hardware, "ceilings", lambda device, report: limits)
    whole = WORKLOADS[2]
    job = lambda tokens: type(whole.job)((4, 6), (tokens, tokens + 1), 1)
    small = Workload("small", "", 3, job(2), job(1), lambda: iter([([1, 1], [5, 7])]))
    monkeypatch.setattr("llmlab.bench.run.WORKLOADS", (small,))


def run(*against: str, **options: object) -> BenchResult:
    return run_bench("tiny", "cpu", dtype="float32", against=against, repeats=2, threads=1, progress=False, **options)


def test_llmlab_and_hugging_face_take_turns(quick):
    result = run("hf")
    assert [(t.engine, t.repeat) for t in result.turns] == [(e, r) for r in range(3) for e in ("llmlab", "hf")]
    assert all(t.tokens_per_s > 0 for t in result.turns)
    assert {e.name: e.version for e in result.engines}.keys() == {"llmlab", "hf"}
    assert all(50e6 < e.peak_memory < 5e9 and e.load_seconds > 0 for e in result.engines)
    table = result.table().set_index("engine")
    assert table.loc["llmlab", "llmlab_is_x_times"] == 1
    assert not result.missing and not result.failed
    assert "smollm" not in result.text() and "hf" in result.text()


def test_a_peer_that_is_absent_is_named_and_one_that_breaks_is_left_out(quick, monkeypatch, tmp_path):
    monkeypatch.setattr("llmlab.bench.run.has_package", lambda python, package: package != "vllm")
    result = run("vllm", "llamacpp", quantization="int8")  # llama.cpp's binding is said to be here, and is not
    assert result.missing == {"vllm": ENGINES["vllm"].install}
    assert "llama_cpp" in result.failed["llamacpp"]
    assert [e.name for e in result.engines] == ["llmlab"] and result.quantization == "int8"
    assert "vllm is not installed: pip install vllm" in result.text()
    assert "llamacpp failed: ModuleNotFoundError" in result.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": ["gpt"]}, "unknown peer 'gpt'; known are hf, llamacpp, vllm, openvino"),
        ({"against": ["llmlab"]}, "unknown peer 'llmlab'"),
        ({"workloads": ["decode7"]}, "unknown workload 'decode7'"),
        ({"workloads": ["prefill512"]}, "prefill512 needs 513 tokens a sequence, the model takes 512"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        run_bench("tiny", **options)


def test_which_interpreter_has_a_package():
    assert has_package(sys.executable, "torch") and not has_package(sys.executable, "no_such_package")
    with pytest.raises(ValueError, match="is not a Python interpreter"):
        has_package("/nowhere/python", "torch")


def test_the_peers_file_needs_nothing_but_the_standard_library():
    """It is run by interpreters that have only their own engine."""
    import subprocess

    code = f"import runpy; runpy.run_path({str(Path(peers_file.__file__))!r}, run_name='peers')"
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def example(workload: str = "decode1", machine: str = "a machine") -> BenchResult:
    speeds = {"llmlab": (50.0, 100.0, 110.0, 90.0), "hf": (1.0, 25.0, 22.0, 30.0)}
    turns = [Turn(workload, name, r, speed) for name, those in speeds.items() for r, speed in enumerate(those)]
    engines = [EngineRun("llmlab", "1", 1.0, 400_000_000), EngineRun("hf", "5", 2.0, 900_000_000)]
    floors, ceilings = {workload: 200.0}, {"flops": 1e12, "bandwidth": 3e10}
    return BenchResult(
        "m", "bfloat16", None, "2026-01-02", "a device", machine, ceilings, floors, engines, turns, {}, {}
    )


def test_ratios_are_taken_within_a_turn_and_the_warm_up_does_not_count():
    ours, theirs = (row for _, row in example().table().iterrows())
    assert (ours["tokens_per_s"], ours["lowest"], ours["highest"], ours["floor_share"]) == (100, 90, 110, 0.5)
    assert (theirs["llmlab_is_x_times"], theirs["x_lowest"], theirs["x_highest"]) == (4, 3, 5)


def test_saved_and_read_again(tmp_path):
    result = example()
    assert BenchResult.load(result.save(tmp_path / "b.json")) == result
    (tmp_path / "other.json").write_text(json.dumps({"schema": "x"}))
    with pytest.raises(ValueError, match="no benchmark of schema"):
        BenchResult.load(tmp_path / "other.json")


def test_a_report_is_figure_table_and_turns(tmp_path):
    files = example().save_report(tmp_path / "out")
    assert sorted(f.name for f in files) == ["bench.csv", "bench.json", "bench.png", "bench.svg"]
    assert all(f.stat().st_size > 100 for f in files)


def test_runs_in_slices_are_joined():
    joined = example("decode1").merged(example("decode8"))
    assert list(joined.floors) == ["decode1", "decode8"] and len(joined.turns) == 16
    with pytest.raises(ValueError, match="different machine"):
        example().merged(example("decode8", "another"))
    again = example("decode1")
    again.turns[0] = Turn("decode1", "llmlab", 0, 1.5)
    assert joined.merged(again).speeds("decode8", "hf") == joined.speeds("decode8", "hf")
    assert len(joined.merged(again).turns) == 16 and joined.merged(again).turns[8].tokens_per_s == 1.5


def test_stored_by_day_machine_model_and_dtype(tmp_path):
    one, two = example("decode1").store(tmp_path), example("decode8").store(tmp_path)
    assert one == two and one.name == "2026-01-02-a-device-m-bfloat16.json"
    (found,) = stored(tmp_path)
    assert list(found.floors) == ["decode1", "decode8"]
