"""Stored measurements: one JSON file a run in ``data/measurements``, whose form ``data/measurements/README.md`` describes.

Written by the campaign (:mod:`llmlab.measure.campaign`) and from a report's findings:
``python -m llmlab.measure.measurements --from-report reports/2026-11-30-101500``. Read by claims, notebooks and figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlab.measure.claims import Finding, claim, read_findings
from llmlab.measure.hardware import Ceilings, Machine

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]
COLUMNS: dict[str, tuple[str, ...]] = {
    "correctness": ("op", "dtype", "case", "ok", "error", "limit", "how"),
    "kernels": (
        "op",
        "dtype",
        "shape",
        "implementation",
        "seconds",
        "low",
        "high",
        "repeats",
        "flops",
        "bytes",
        "load",
    ),
    "engine": ("model", "dtype", "num_reqs", "query_len", "context", "seconds", "low", "high", "tokens_per_s", "load"),
}
"""The tables of an entry, and the columns that every row of one has; it may have more."""

_KEYS = {"schema", "made_by", "date", "device", "machine", "commit", "dirty", "parameters", "sections", "ceilings"}


@dataclass(frozen=True)
class Measurements:
    """All entries, a table each; every table has the columns device, date, commit and file beside its own.

    Attributes:
        ceilings: dtype, level, FLOP/s, bytes/s, load; one row for each pair of a measured dtype and memory level.
        findings: claim, verdict, numbers (a dictionary), model, load.
        correctness, kernels, engine: see :data:`COLUMNS`.
    """

    ceilings: pd.DataFrame
    correctness: pd.DataFrame
    kernels: pd.DataFrame
    engine: pd.DataFrame
    findings: pd.DataFrame


def new_entry(made_by: str, machine: Machine, parameters: dict[str, Any]) -> dict[str, Any]:
    """An entry without results."""
    commit, dirty = commit_of(ROOT)
    return {
        "schema": SCHEMA,
        "made_by": made_by,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.device,
        "machine": asdict(machine),
        "commit": commit,
        "dirty": dirty,
        "parameters": parameters,
        "sections": [],
        "ceilings": None,
        "findings": [],
        **{table: [] for table in COLUMNS},
    }


def validate(entry: dict[str, Any]) -> None:
    """Raises ValueError, naming what is wrong, for an entry that the documentation does not describe."""
    if entry.get("schema") != SCHEMA:
        raise ValueError(f"measurements of schema {entry.get('schema')!r}; this version reads {SCHEMA}")
    if missing := (_KEYS | {"findings", *COLUMNS}) - set(entry):
        raise ValueError(f"the entry lacks {', '.join(sorted(missing))}")
    for table, columns in COLUMNS.items():
        for i, row in enumerate(entry[table]):
            if missing := set(columns) - set(row):
                raise ValueError(f"{table}[{i}] lacks {', '.join(sorted(missing))}")
    for finding in entry["findings"]:
        if set(finding["numbers"]) != set(claim(finding["claim"]).numbers):
            raise ValueError(f"{finding['claim']} has the numbers {sorted(finding['numbers'])}, not those of its rule")
    if entry["ceilings"] is not None:
        Ceilings.from_dict(entry["ceilings"])


def write(entry: dict[str, Any], file: Path) -> None:
    """Write an entry so that there is always a whole file: the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(json.dumps(entry, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(file)


def read(file: Path) -> dict[str, Any]:
    """One entry. Raises ValueError, naming the file, for one that is not valid."""
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        validate(entry)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
    return entry


def store(entry: dict[str, Any], folder: Path | None = None) -> Path:
    """Keep an entry as ``<date>-<device>.json`` in ``data/measurements``; returns the file.

    What the same device gave on the same day stays: tables are replaced by newer ones that hold anything, findings one by one.
    """
    validate(entry)
    file = (folder or ROOT / "data" / "measurements") / f"{entry['date'][:10]}-{slug(entry['device'])}.json"
    if file.is_file():
        older = read(file)
        for key in ("ceilings", *COLUMNS):
            entry[key] = entry[key] or older[key]
        newer = {(f["claim"], f["model"]) for f in entry["findings"]}
        entry["findings"] += [f for f in older["findings"] if (f["claim"], f["model"]) not in newer]
        entry["findings"].sort(key=lambda f: (f["claim"], f["model"]))
        entry["sections"] = older["sections"] + entry["sections"]
    write(entry, file)
    return file


def load(*places: str | Path) -> Measurements:
    """All entries in these files and folders; without any, those in ``data/measurements``.

    Raises ValueError, naming the file, for an entry that is not valid.
    """
    import pandas as pd

    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ceilings", "findings", *COLUMNS)}
    for file in _files(places):
        entry = read(file)
        origin = {key: entry[key] for key in ("device", "date", "commit")} | {"file": file.name}
        for name in COLUMNS:
            tables[name] += [origin | row for row in entry[name]]
        tables["ceilings"] += [origin | row for row in _ceiling_rows(entry["ceilings"])]
        for finding in map(_finding, entry["findings"]):
            row = {"claim": finding.claim, "verdict": str(finding.verdict), "numbers": finding.numbers}
            tables["findings"].append(origin | {"date": finding.date, "model": finding.model} | row)
    return Measurements(**{name: pd.DataFrame(rows) for name, rows in tables.items()})


def stored_findings(*places: str | Path) -> list[Finding]:
    """The findings of all entries, the newest of a claim, machine and model only."""
    newest: dict[tuple[str, str, str], Finding] = {}
    for file in _files(places):
        for finding in map(_finding, read(file)["findings"]):
            key = finding.claim, finding.machine, finding.model
            if key not in newest or newest[key].date < finding.date:
                newest[key] = finding
    return sorted(newest.values(), key=lambda finding: (finding.claim, finding.machine))


def from_report(folder: Path) -> dict[str, Any]:
    """An entry with the findings, the ceilings and the machine of a report. Raises ValueError for a folder that is none."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        measured = Ceilings.from_dict(manifest["ceilings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no report of this version: {error!r}") from error
    entry = new_entry("report", measured.machine, manifest["command"])
    entry |= {key: manifest[key] for key in ("commit", "dirty")}
    entry |= {"date": manifest["started"], "ceilings": manifest["ceilings"]}
    entry["findings"] = [asdict(finding) for finding in read_findings(folder)]
    entry["sections"] = [
        {
            "name": notebook["name"],
            "status": "failed" if notebook["error"] else "done",
            "seconds": notebook["seconds"],
            "reason": notebook["error"] or "",
        }
        for notebook in manifest["notebooks"]
    ]
    return entry


def slug(device: str) -> str:
    """A device's name for use in a file's: ``Intel(R) Xeon(R) Processor, 2 threads`` → ``intel-xeon-processor-2-threads``."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:r|tm|c)\)", "", device.lower())).strip("-")


def commit_of(root: Path) -> tuple[str | None, bool | None]:
    """Commit of a checkout and whether it has uncommitted changes; None where there is no git."""
    try:
        run = lambda *args: subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True)
        return run("rev-parse", "HEAD").stdout.strip(), bool(run("status", "--porcelain").stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None


def main(argv: list[str] | None = None) -> int:
    """Store a report's findings, or list what is stored."""
    parser = argparse.ArgumentParser(prog="python -m llmlab.measure.measurements", description=__doc__)
    parser.add_argument("--from-report", metavar="FOLDER", type=Path, help="store the findings of this report")
    parser.add_argument("--into", metavar="FOLDER", type=Path, help="instead of data/measurements")
    args = parser.parse_args(argv)
    if args.from_report:
        print(store(from_report(args.from_report), args.into))
        return 0
    for file in _files((args.into,) if args.into else ()):
        entry = read(file)
        counts = ", ".join(f"{len(entry[table])} {table}" for table in (*COLUMNS, "findings"))
        print(f"{file.name}: {entry['device']}, {entry['date']}, by the {entry['made_by']}: {counts}")
    return 0


def _files(places: Iterable[str | Path]) -> Iterator[Path]:
    checkout = (ROOT / "pyproject.toml").is_file()
    for place in map(Path, places or ((ROOT / "data" / "measurements",) if checkout else ())):
        yield from sorted(place.glob("*.json")) if place.is_dir() else (place,)


def _finding(stored: dict[str, Any]) -> Finding:
    return Finding(**stored)


def _ceiling_rows(stored: dict[str, Any] | None) -> list[dict[str, Any]]:
    if stored is None:
        return []
    measured = Ceilings.from_dict(stored)
    levels = [level.level for level in measured.levels] or ["memory"]
    roofs = [measured.roof(dtype, level) for dtype in measured.gemm for level in levels]
    return [
        {"dtype": r.dtype, "level": r.memory, "flops_per_s": r.flops, "bytes_per_s": r.bandwidth, "load": measured.load}
        for r in roofs
    ]


if __name__ == "__main__":
    raise SystemExit(main())
