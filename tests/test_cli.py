"""The command line as a user meets it: help, figures as JSON, one clear line and exit code 2 for what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmlab.cli import main

COMMANDS = ["report", "fetch", "generate", "bench", "doctor", "kernels", "claims", "simulate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_doctor_measures_and_keeps_ceilings(capsys, monkeypatch, tmp_path):
    from llmlab.measure import ceilings

    monkeypatch.setenv("LLMLAB_HOME", str(tmp_path))
    measure = ceilings.measure_ceilings
    small = lambda machine, device: measure(machine, device, gemm_sizes=(64,), largest_buffer=1 << 20)
    monkeypatch.setattr(ceilings, "measure_ceilings", small)
    state = lambda: {f["what"]: f for f in json.loads(capsys.readouterr().out)}["ceilings"]
    assert main(["doctor", "--json"]) == 0
    assert state()["found"] == "not measured yet"
    assert main(["doctor", "--json", "--measure"]) == 0
    assert "GB/s" in state()["found"]


def test_doctor_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["python"]["found"] == sys.version.split()[0]
    assert {"torch", "triton", "GPU", "CPU", "threads", "memory"} <= set(findings)


def test_doctor_for_people(capsys):
    assert main(["doctor"]) == 0
    assert "✓ torch" in capsys.readouterr().out.replace("  ", " ").replace("  ", " ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fetch", "no-such-model"], "no-such-model"),
        (["generate", "hello", "--model", "no-such-model"], "no-such-model"),
        (["generate", "hello", "--model", "tiny", "--temperature", "-1"], "temperature"),
        (["bench", "--workloads", "decode7"], "unknown workload 'decode7'"),
        (["bench", "--against", "gpt"], "unknown peer 'gpt'"),
        (["simulate", "--rate", "-1"], "rate must be positive"),
        (["simulate", "--hardware", "abacus"], "no single GPU is called 'abacus'"),
        (["simulate", "--model", "llama-3-70b"], "141.1 GB of weights"),
        (["simulate", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["report", "--only", "99"], "no notebook is called 99"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "Traceback" not in error


def test_unknown_command():
    with pytest.raises(SystemExit) as exit_:
        main(["frobnicate"])
    assert exit_.value.code == 2


def test_generate_with_the_embedded_model(capsys):
    argv = ["generate", "Once upon a time", "--model", "tiny", "--max-tokens", "8"]
    assert main(argv) == 0
    streamed = capsys.readouterr().out.rstrip("\n")
    assert main([*argv, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["text"] == streamed
    assert figures["output_tokens"] == 8
    assert figures["time_to_first_token_s"] > 0


def test_importing_llmlab_is_light():
    """``import llmlab`` must not pull in torch: names are imported when they are used."""
    code = "import sys, llmlab; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_simulate_for_people_and_as_json(capsys):
    argv = ["simulate", "--num-requests", "20", "--rate", "10", "--tensor-parallel-size", "2", "--slo", "1", "0.1"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "H200 SXM" in shown and "(datasheet)" in shown and "assumed: 70% of peak FLOP/s" in shown
    assert main([*argv, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_requests"] == 20
    assert figures["within_slo"] == 1.0
    assert figures["efficiency"]["flops"] == 0.7


def test_simulate_a_trace(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    file.write_text("arrival,prompt_len,output_len\n0,100,5\n0.5,30,7\n")
    assert main(["simulate", "--trace", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 2
