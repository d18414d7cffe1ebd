"""A benchmark run: one process an engine, so that each one's memory is its own and a broken one spoils nothing; turns between
them within the run, because a ratio of two engines that took turns carries over and an absolute figure does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
from tqdm import tqdm

from llmlab.bench import peers
from llmlab.bench.peers import ENGINES, Options
from llmlab.bench.result import OURS, BenchResult, EngineRun, Turn
from llmlab.bench.workloads import WORKLOADS, Job, Workload

LOAD_SECONDS, TURN_SECONDS = 300, 600
"""An engine that takes longer, to load or for a turn, counts as broken."""
REST_SECONDS = 0.3
"""Pause before a turn: idle threads of the engine that ran before spin for up to 0.2 s before they sleep."""


class EngineFailed(RuntimeError):
    """An engine's process ended, or did not answer in time."""


class Worker:
    """An engine in its own process.

    Args:
        python: the interpreter to run it in.

    Raises EngineFailed, with the last lines that the engine printed.
    """

    def __init__(self, options: Options, python: str):
        self.name = options.engine
        self.peak_memory = 0
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        variable = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
        command = [python, str(Path(peers.__file__).resolve()), json.dumps(asdict(options))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=variable, text=True
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            hello = self._answer(LOAD_SECONDS)
        except BaseException:
            self.close()
            raise
        self.load_seconds: float = hello["load_seconds"]
        self.version: str = hello["version"]

    def complete(self, prompts: list[list[int]], job: Job) -> float:
        """Do a job; its seconds."""
        message = {"prompts": prompts, "output_lens": job.output_lens, "max_num_seqs": job.max_num_seqs}
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended: what it printed says why
            raise EngineFailed(self._last_words()) from None
        answer = self._answer(TURN_SECONDS)
        self.peak_memory = answer["peak_memory"]
        return answer["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            raise EngineFailed(f"no answer within {seconds} s") from None
        if not line:
            self._process.wait()
            raise EngineFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else f"ended with exit code {self._process.returncode}"


def run_bench(
    model: str,
    device: str = "auto",
    backend: str = "auto",
    dtype: str = "auto",
    against: Sequence[str] = (),
    workloads: Sequence[str] = (),
    repeats: int = 3,
    peer_pythons: Sequence[str] = (),
    threads: int | None = None,
    quantization: str | None = None,
    progress: bool = True,
) -> BenchResult:
    """Run workloads on llmlab and on the peers that are installed, in turns; the first turn of each warms up.

    Args:
        against: names of peers (:data:`llmlab.bench.peers.ENGINES`). One that is not installed, or breaks, is left out and
            named in the result.
        workloads: names; if there are none, all whose sequences the model can take.
        repeats: counted turns of each engine and workload.
        peer_pythons: interpreters of other environments in which peers may be installed.
        threads: of every engine; None for as many as torch uses.

    Raises:
        ValueError: an unknown workload or peer, no repeats, or a model or option that llmlab refuses.
        EngineFailed: llmlab itself broke.
    """
    import torch

    from llmlab.config import ModelConfig
    from llmlab.engine.sizing import choose_device, choose_dtype
    from llmlab.hub import resolve_model
    from llmlab.measure.hardware import ceilings
    from llmlab.measure.roofline import roof_for
    from llmlab.measure.timer import torch_threads

    chosen = _choose("workload", workloads, {w.name: w for w in WORKLOADS}) or list(WORKLOADS)
    _choose("peer", against, {name: name for name in ENGINES if name != OURS})
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    path = resolve_model(model)
    config = ModelConfig.from_pretrained(path)
    chosen = _that_fit(chosen, config.max_position_embeddings, asked_for=bool(workloads))
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(config.dtype if dtype == "auto" else dtype)
    threads = threads or torch.get_num_threads()
    say = lambda line: print(line, file=sys.stderr)
    with torch_threads(threads):
        limits = ceilings(torch_device, report=say)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    roof = roof_for(limits, torch_dtype, size)
    result = BenchResult(
        model=path.name,
        dtype=roof.dtype,
        quantization=quantization,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=limits.machine.device,
        machine=str(limits.machine),
        ceilings={"flops": roof.flops, "bandwidth": roof.bandwidth},
        floors={w.name: w.most_tokens_per_second(config, roof) for w in chosen},
    )
    options = lambda name, source: Options(
        name, str(source), roof.dtype, torch_device.type, backend, threads, quantization if name == OURS else None
    )
    with ExitStack() as stack:
        files = _Files(path, stack)
        workers = [stack.enter_context(_open(options(OURS, path), sys.executable))]
        for name in dict.fromkeys(against):
            python = next((p for p in (sys.executable, *peer_pythons) if has_package(p, ENGINES[name].package)), None)
            if python is None:
                result.missing[name] = ENGINES[name].install
                continue
            try:
                source = files.of(name, roof.dtype)
                workers.append(stack.enter_context(_open(options(name, source), python)))
            except (EngineFailed, ValueError) as error:
                result.failed[name] = str(error)
        _take_turns(chosen, workers, repeats, config.vocab_size, result, progress)
        result.engines = [EngineRun(w.name, w.version, w.load_seconds, w.peak_memory) for w in workers if w.peak_memory]
    return result


def has_package(python: str, package: str) -> bool:
    """Whether an interpreter can find a package. Raises ValueError if it is no interpreter."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        return subprocess.run([python, "-c", code, package], capture_output=True).returncode == 0
    except OSError as error:
        raise ValueError(f"{python} is not a Python interpreter: {error}") from error


def _take_turns(
    workloads: list[Workload],
    workers: list[Worker],
    repeats: int,
    vocab_size: int,
    result: BenchResult,
    progress: bool,
) -> None:
    rng = np.random.default_rng()
    bar = tqdm(
        total=len(workloads) * (repeats + 1) * len(workers), desc="turns", dynamic_ncols=True, disable=not progress
    )
    with bar:
        for workload in workloads:
            for repeat in range(repeats + 1):
                for worker in workers:
                    bar.set_postfix_str(f"{workload.name} {worker.name}{'' if repeat else ' (warm-up)'}")
                    if worker.name not in result.failed:
                        try:
                            speed = _turn(workload, worker, rng, vocab_size)
                            result.turns.append(Turn(workload.name, worker.name, repeat, speed))
                        except EngineFailed as error:
                            if worker.name == OURS:
                                raise
                            result.failed[worker.name] = f"{workload.name}: {error}"
                    bar.update()


def _turn(workload: Workload, worker: Worker, rng: np.random.Generator, vocab_size: int) -> float:
    def complete(job: Job) -> float:
        prompts = job.prompts(rng, vocab_size)
        time.sleep(REST_SECONDS)
        return worker.complete(prompts, job)

    return workload.tokens_per_second(complete)


@contextmanager
def _open(options: Options, python: str) -> Iterator[Worker]:
    worker = Worker(options, python)
    try:
        yield worker
    finally:
        worker.close()


class _Files:
    """The model as each engine reads it: its directory, or a GGUF file that is written when it is first asked for."""

    def __init__(self, path: Path, stack: ExitStack):
        self._path, self._stack = path, stack
        self._written: dict[str, Path] = {}

    def of(self, name: str, dtype: str) -> Path:
        """Raises ValueError for a model that cannot be written as GGUF."""
        if not ENGINES[name].gguf:
            return self._path
        from llmlab.bench.gguf_file import write_gguf

        stored = ENGINES[name].gguf_dtype or dtype
        if stored not in self._written:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="llmlab-bench-"))
            self._written[stored] = write_gguf(self._path, Path(folder) / f"{self._path.name}.gguf", stored)
        return self._written[stored]


def _that_fit(workloads: list[Workload], limit: int, asked_for: bool) -> list[Workload]:
    for workload in workloads if asked_for else ():
        if workload.longest > limit:
            raise ValueError(
                f"workload {workload.name} needs {workload.longest} tokens a sequence, the model takes {limit}"
            )
    return [workload for workload in workloads if workload.longest <= limit]


def _choose(what: str, names: Sequence[str], known: dict[str, Any]) -> list[Any]:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
    return [known[name] for name in names]
