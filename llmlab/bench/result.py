"""What a benchmark run found: every turn of every engine, the machine and its ceilings; and the table of it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlab.measure.measurements import slug
from llmlab.viz.style import engineering

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "llmlab-bench-1"
OURS = "llmlab"


@dataclass(frozen=True)
class Turn:
    """One engine's go at one workload. ``repeat`` 0 is the warm-up, which no median counts."""

    workload: str
    engine: str
    repeat: int
    tokens_per_s: float

    @property
    def warm_up(self) -> bool:
        return self.repeat == 0


@dataclass(frozen=True)
class EngineRun:
    """One engine in its own process: its version, seconds to load the model, the most memory it ever held in bytes."""

    name: str
    version: str
    load_seconds: float
    peak_memory: int


@dataclass
class BenchResult:
    """One run.

    Attributes:
        model, dtype, quantization: what was run (quantization is llmlab's own weights; the peers keep ``dtype``).
        date: ISO 8601, UTC. device: what computed, in words. machine: one line about it.
        ceilings: ``flops`` (GEMM of the dtype, FLOP/s) and ``bandwidth`` (reads of the memory that holds the weights,
            bytes/s), measured on it.
        floors: by workload, the tokens/s that these ceilings allow.
        engines, turns: what ran. missing: peers that are not installed, and how to get them. failed: peers that broke.
    """

    model: str
    dtype: str
    quantization: str | None
    date: str
    device: str
    machine: str
    ceilings: dict[str, float]
    floors: dict[str, float]
    engines: list[EngineRun] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def speeds(self, workload: str, engine: str) -> list[float]:
        """Tokens/s of the counted turns, in order."""
        mine = [t for t in self.turns if (t.workload, t.engine) == (workload, engine) and not t.warm_up]
        return [t.tokens_per_s for t in sorted(mine, key=lambda t: t.repeat)]

    def table(self) -> pd.DataFrame:
        """One row a workload and engine.

        Columns: workload, engine, tokens_per_s (median), lowest, highest, floor_share (of what the machine allows),
        llmlab_is_x_times (median over the turns of llmlab's speed by the engine's in the same turn), x_lowest, x_highest.
        """
        import pandas as pd

        rows = []
        for workload in dict.fromkeys(t.workload for t in self.turns):
            base = self.speeds(workload, OURS)
            for engine in self.engines:
                values = self.speeds(workload, engine.name)
                if not values:
                    continue
                ratios = [ours / theirs for ours, theirs in zip(base, values)]
                row = {"workload": workload, "engine": engine.name, **_spread(values, "tokens_per_s", "", 1)}
                row["floor_share"] = round(statistics.median(values) / self.floors[workload], 3)
                row |= _spread(ratios, "llmlab_is_x_times", "x_", 2)
                rows.append(row)
        return pd.DataFrame(rows)

    def memory_table(self) -> pd.DataFrame:
        """One row an engine: version, seconds to load, peak memory in MB."""
        import pandas as pd

        columns = ["engine", "version", "load_s", "peak_MB"]
        rows = [(e.name, e.version, round(e.load_seconds, 1), round(e.peak_memory / 1e6)) for e in self.engines]
        return pd.DataFrame(rows, columns=columns)

    def merged(self, other: BenchResult) -> BenchResult:
        """This run and a later one of the same model, dtype and machine as one: the later one's workloads replace this one's.

        For runs in slices. Raises ValueError if the two differ in what they ran or where.
        """
        for name in ("model", "dtype", "quantization", "machine"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"runs of different {name}: {getattr(self, name)!r} and {getattr(other, name)!r}")
        engines = {engine.name: engine for engine in self.engines}
        for engine in other.engines:
            before = engines.get(engine.name)
            peak = max(engine.peak_memory, before.peak_memory if before else 0)
            engines[engine.name] = EngineRun(engine.name, engine.version, engine.load_seconds, peak)
        return BenchResult(
            self.model,
            self.dtype,
            self.quantization,
            other.date,
            self.device,
            self.machine,
            other.ceilings,
            self.floors | other.floors,
            list(engines.values()),
            [turn for turn in self.turns if turn.workload not in other.floors] + other.turns,
            {name: how for name, how in (self.missing | other.missing).items() if name not in engines},
            {name: why for name, why in (self.failed | other.failed).items() if name not in engines},
        )

    def text(self) -> str:
        """For people: what ran where, the tables, and what did not run."""
        lines = [f"{self.model}, {self.dtype}, {self.machine}, {self.date[:10]}"]
        rates = engineering(self.ceilings["flops"], "FLOP/s"), engineering(self.ceilings["bandwidth"], "B/s")
        lines += ["floor: what {} and {} allow".format(*rates), "", self.table().to_string(index=False), ""]
        lines.append(self.memory_table().to_string(index=False))
        lines += [f"{name} is not installed: {how}" for name, how in self.missing.items()]
        lines += [f"{name} failed: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)

    def save_report(self, folder: str | Path) -> list[Path]:
        """Write ``bench.png``, ``bench.svg``, ``bench.csv`` (the table) and ``bench.json`` (this run); returns the files."""
        from llmlab.viz.bench import bench_figure
        from llmlab.viz.style import save_figure

        files = save_figure(bench_figure(self), self.table(), folder, "bench")
        return [*files, self.save(Path(folder) / "bench.json")]

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON."""
        path = Path(path)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    def store(self, folder: str | Path | None = None) -> Path:
        """Keep it as ``<date>-<device>-<model>-<dtype>.json`` in ``data/measurements/bench`` (or ``folder``), joined with what
        was stored there on the same day; returns the file."""
        folder = Path(folder or stored_dir())
        folder.mkdir(parents=True, exist_ok=True)
        name = slug(" ".join((self.device, self.model, self.dtype, self.quantization or "")))
        path = folder / f"{self.date[:10]}-{name}.json"
        return (BenchResult.load(path).merged(self) if path.is_file() else self).save(path)

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Raises ValueError for a file of another schema."""
        data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path} is no benchmark of schema {SCHEMA}")
        data["engines"] = [EngineRun(**engine) for engine in data["engines"]]
        data["turns"] = [Turn(**turn) for turn in data["turns"]]
        return cls(**data)


def stored_dir() -> Path:
    """Where results are kept: ``data/measurements/bench`` of a checkout."""
    return Path(__file__).resolve().parents[2] / "data" / "measurements" / "bench"


def stored(folder: str | Path | None = None) -> list[BenchResult]:
    """The results that are kept, the newest first."""
    files = sorted(Path(folder or stored_dir()).glob("*.json"), reverse=True)
    return sorted(map(BenchResult.load, files), key=lambda result: result.date, reverse=True)


def _spread(values: list[float], name: str, prefix: str, digits: int) -> dict[str, float]:
    if not values:
        return {}
    return {
        name: round(statistics.median(values), digits),
        f"{prefix}lowest": round(min(values), digits),
        f"{prefix}highest": round(max(values), digits),
    }
