"""``llmlab report``: run the notebooks on a model, and leave one folder that explains what was found.

``index.html`` is self-contained (figures inside, no network needed): what machine, what limits it, verdicts on the claims, then
every notebook. Beside it: each figure as PNG and SVG, each table as CSV, the executed notebooks, ``manifest.json``.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmlab.doctor import as_dicts, examine
from llmlab.hub import resolve_model

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("llmlab", "torch", "triton", "numba", "numpy", "transformers", "tokenizers", "pandas", "matplotlib")


@dataclass
class NotebookRun:
    """One executed notebook: ``error`` is None if every cell ran."""

    name: str
    title: str
    seconds: float
    error: str | None = None
    html: str = ""
    figure: str | None = None  # data URI of its first figure


@dataclass
class Manifest:
    """What is needed to know what was run: written as ``manifest.json``."""

    started: str
    command: dict[str, Any]
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    machine: list[dict[str, Any]]
    seconds: float = 0.0
    notebooks: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def build_report(model: str, device: str = "auto", out: str | None = None, only: list[str] | None = None) -> int:
    """Execute the notebooks and write the report. Returns 0, or 1 if a notebook failed (the report says which).

    Raises:
        ValueError: ``out`` exists already, or ``only`` names no notebook.
        FileNotFoundError: the model cannot be had, or there are no notebooks (an installed wheel has none).
    """
    start, started = time.perf_counter(), datetime.now(UTC).astimezone()
    notebooks = _select(sorted((ROOT / "nbs").glob("[0-9]*.ipynb")), only)
    path = resolve_model(model)
    folder = Path(out) if out else Path("reports") / started.strftime("%Y-%m-%d-%H%M%S")
    if folder.exists():
        raise ValueError(f"{folder} exists already; a report never overwrites one")
    folder.mkdir(parents=True)
    commit, dirty = _commit()
    manifest = Manifest(
        started=started.isoformat(timespec="seconds"),
        command={"model": model, "device": device, "only": only},
        commit=commit,
        dirty=dirty,
        versions={name: version(name) for name in VERSIONS},
        machine=as_dicts(examine()),
    )
    runs = []
    for i, notebook in enumerate(notebooks, start=1):
        parameters = {"model": str(path), "device": device, "out": str(folder.resolve())}
        runs.append(_execute(notebook, folder, parameters, f"{i}/{len(notebooks)} {notebook.stem}, cell"))
    manifest.seconds = round(time.perf_counter() - start, 1)
    manifest.notebooks = [{k: v for k, v in asdict(run).items() if k not in ("html", "figure")} for run in runs]
    page = _render(manifest, runs, _verdicts(folder))
    (folder / "index.html").write_text(page, encoding="utf-8")
    manifest.files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    failed = [run.name for run in runs if run.error]
    print(f"{folder / 'index.html'}" + (f"  (failed: {', '.join(failed)})" if failed else ""))
    return 1 if failed else 0


def _select(notebooks: list[Path], only: list[str] | None) -> list[Path]:
    if not notebooks:
        raise FileNotFoundError(f"no notebooks in {ROOT / 'nbs'}: run the report in a checkout of the project")
    if not only:
        return notebooks
    chosen = [
        n for n in notebooks if any(n.stem == o.removesuffix(".ipynb") or n.stem.split("_")[0] == o for o in only)
    ]
    if not chosen:
        raise ValueError(f"no notebook is called {' or '.join(only)}; there are {', '.join(n.stem for n in notebooks)}")
    return chosen


def _execute(notebook: Path, folder: Path, parameters: dict[str, str], progress: str) -> NotebookRun:
    """Run one notebook with those of the parameters that it declares; a copy with its outputs stays in the folder."""
    import nbformat
    import papermill

    target = folder / "notebooks" / notebook.name
    target.parent.mkdir(exist_ok=True)
    declared = papermill.inspect_notebook(str(notebook))
    start, error = time.perf_counter(), None
    try:
        papermill.execute_notebook(
            str(notebook),
            str(target),
            parameters={name: value for name, value in parameters.items() if name in declared},
            kernel_name="python3",
            cwd=str(notebook.parent),
            progress_bar={"desc": progress, "unit": "cell", "dynamic_ncols": True},
            extra_arguments=["--log-level=ERROR"],  # of the kernel: its remarks about TCP would tear the bar
        )
    except papermill.PapermillExecutionError as failure:
        error = f"cell {failure.exec_count}: {failure.ename}: {failure.evalue}"
    node = nbformat.read(target, as_version=4)
    title = next(
        (c.source.lstrip("# ").splitlines()[0] for c in node.cells if c.cell_type == "markdown" and c.source),
        notebook.stem,
    )
    return NotebookRun(
        notebook.stem, title, round(time.perf_counter() - start, 1), error, _to_html(node), _first_figure(node)
    )


def _to_html(node: Any) -> str:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", embed_images=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    node.cells = [c for c in node.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    body, _ = exporter.from_notebook_node(node)
    return body


def _first_figure(node: Any) -> str | None:
    for cell in node.cells:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                return "data:image/png;base64," + "".join(png.split())
    return None


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    """All claims with what the notebooks of this run found; one without a measurement says so."""
    from llmlab.measure.claims import claims_table

    return claims_table(folder).to_dict(orient="records")


def _render(manifest: Manifest, runs: list[NotebookRun], verdicts: list[dict[str, Any]]) -> str:
    from jinja2 import Environment, FileSystemLoader
    from pygments.formatters import HtmlFormatter

    from llmlab.measure.hardware import ceilings_table

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("report.html.jinja").render(
        manifest=manifest,
        runs=runs,
        verdicts=verdicts,
        ceilings=ceilings_table().to_html(index=False, border=0),
        code_style=HtmlFormatter(style="default").get_style_defs(".highlight"),
    )


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the checkout and whether it has uncommitted changes; None where there is no git."""
    try:
        run = lambda *args: subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True)
        return run("rev-parse", "HEAD").stdout.strip(), bool(run("status", "--porcelain").stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None
