"""``llmlab report``: run the notebooks on a model, and leave one folder that explains what was found.

``index.html`` is self-contained (figures inside, no network needed): what machine, what limits it, verdicts on the claims, then
every notebook. Beside it: each figure as PNG and SVG, each table as CSV, the executed notebooks, ``manifest.json``.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlab.doctor import as_dicts, examine
from llmlab.hub import resolve_model
from llmlab.measure.measurements import commit_of
from llmlab.report_math import Formulas

if TYPE_CHECKING:
    from llmlab.measure.hardware import Ceilings

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
    figure: str | None = None  # data URI of the figure that stands for it

    @property
    def size(self) -> str:
        return _bytes(len(self.html.encode()))


@dataclass
class Manifest:
    """What is needed to know what was run: written as ``manifest.json``."""

    started: str
    command: dict[str, Any]
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    machine: list[dict[str, Any]]
    ceilings: dict[str, Any] | None = None
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
    commit, dirty = commit_of(ROOT)
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
    measured = _ceilings(device)
    manifest.ceilings = measured.to_dict()
    manifest.seconds = round(time.perf_counter() - start, 1)
    manifest.notebooks = [{k: v for k, v in asdict(run).items() if k not in ("html", "figure")} for run in runs]
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    page = _render(manifest, runs, folder, measured, [(str(p.relative_to(folder)), p.stat().st_size) for p in files])
    (folder / "index.html").write_text(page, encoding="utf-8")
    manifest.files = sorted(["index.html", *(str(p.relative_to(folder)) for p in files)])
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
    except Exception as failure:  # a kernel that died, a time-out: one notebook's end must not be the report's
        error = f"{type(failure).__name__}: {failure}"
    node = nbformat.read(target if target.is_file() else notebook, as_version=4)
    title = next(
        (c.source.lstrip("# ").splitlines()[0].strip() for c in node.cells if c.cell_type == "markdown" and c.source),
        notebook.stem,
    )
    return NotebookRun(notebook.stem, title, round(time.perf_counter() - start, 1), error, _to_html(node), _cover(node))


def _to_html(node: Any) -> str:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", embed_images=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    node.cells = [c for c in node.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    formulas = Formulas()
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = formulas.take_out(cell.source)
    body = formulas.put_back(exporter.from_notebook_node(node)[0])
    return re.sub(r'href="(?:\./)?(\d\d\w*_\w+)\.ipynb"', r'href="#\1"', body)  # notebooks are sections of the page


def _cover(node: Any) -> str | None:
    from llmlab.nb import cover

    png = cover(node)
    return None if png is None else "data:image/png;base64," + base64.b64encode(png).decode()


def _ceilings(device: str) -> Ceilings:
    from llmlab.engine.sizing import choose_device
    from llmlab.measure.hardware import ceilings

    return ceilings(choose_device(device), report=print)


def _render(
    manifest: Manifest, runs: list[NotebookRun], folder: Path, measured: Ceilings, files: list[tuple[str, int]]
) -> str:
    from jinja2 import Environment, FileSystemLoader
    from pygments.formatters import HtmlFormatter

    from llmlab.measure.claims import claims_table
    from llmlab.measure.hardware import roofs_table
    from llmlab.nb import key_figures

    verdicts = claims_table(folder)  # all claims: one without a measurement says so
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = environment.get_template("report.html.jinja").render(
        manifest=manifest,
        runs=runs,
        machine_line=str(measured.machine),
        key_figures=key_figures(folder),
        verdicts=verdicts.to_dict(orient="records"),
        tally=_tally(verdicts["verdict"]),
        homes=_homes(runs),
        ceilings=_limits(measured).to_html(index=False, border=0),
        measured=measured,
        datasheets=roofs_table(None).to_html(index=False, border=0),
        files=[(name, _bytes(size)) for name, size in files],
        page_size="@page-size@",
        folder_size="@folder-size@",
        code_style=HtmlFormatter(style="default").get_style_defs(".highlight"),
    )
    size = len(page.encode())
    page = page.replace("@page-size@", _bytes(size), 1)
    return page.replace("@folder-size@", _bytes(size + sum(size for _, size in files)), 1)


def _tally(verdicts: Any) -> str:
    """``12 findings confirmed, …``: how many of each, in words."""
    words = verdicts.str.extract(r"^(confirmed|refuted|depends|not decided|not measured)")[0].value_counts()
    names = {name: name for name in ("confirmed", "refuted", "depends", "not decided", "not measured")}
    names["depends"] = "dependent on something"
    return ", ".join(f"{words[name]} {said}" for name, said in names.items() if name in words) + "."


def _limits(measured: Ceilings) -> Any:
    """One row a dtype: its FLOP/s, and the ridge over each memory."""
    import pandas as pd

    levels = [level.level for level in measured.levels] or ["memory"]
    rows = []
    for dtype, flops in measured.gemm.items():
        roofs = [measured.roof(dtype, level) for level in levels]
        ridges = {f"ridge over {r.memory} ({r.bandwidth / 1e9:.3g} GB/s)": f"{r.ridge:.3g} FLOP/byte" for r in roofs}
        rows.append({"matrix products in": dtype, "reach": f"{flops / 1e12:.3g} TFLOP/s"} | ridges)
    return pd.DataFrame(rows)


def _homes(runs: list[NotebookRun]) -> dict[str, str]:
    """Claim → the notebook that gave its verdict here."""
    return {claim: run.name for run in reversed(runs) for claim in re.findall(r"\b(C\d\d): [A-Z].*\nrule: ", run.html)}


def _bytes(size: float) -> str:
    """In words: ``3.4 MB``."""
    from llmlab.viz.style import engineering

    return engineering(size, "B")
