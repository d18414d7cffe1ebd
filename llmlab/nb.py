"""What every notebook begins with: one line about the machine, one look for tables and figures, and honest printing.

Notebooks are tested by running them again and comparing what they print. So whatever was clocked, or names the machine, goes
through :func:`measured` or :func:`machine`, whose lines are not compared; everything else is, digit for digit.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from llmlab.measure.claims import Finding


def setup(device: str = "auto") -> None:
    """First cell of every notebook: prints the machine, and has figures shown as PNGs that are sharp on any screen."""
    from llmlab.measure.hardware import describe_machine

    machine(str(describe_machine(_device(device))))
    try:
        from IPython import get_ipython
        from IPython.core.pylabtools import select_figure_formats
    except ImportError:
        return
    shell = get_ipython()
    if shell is not None:
        select_figure_formats(shell, {"png"}, bbox_inches="tight", facecolor="white")


def measured(*parts: Any) -> None:
    """Print what was clocked or counted on this machine, every line marked ``[measured]``."""
    _marked("measured", parts)


def machine(*parts: Any) -> None:
    """Print what this machine is or has, every line marked ``[machine]``."""
    _marked("machine", parts)


def expect(what: str, got: float, want: float, tolerance: float = 0.0) -> None:
    """Print a computed number, and fail if it is not what it must be.

    Args:
        tolerance: relative; 0 for numbers that must be exactly right.

    Raises AssertionError.
    """
    if not math.isclose(got, want, rel_tol=tolerance, abs_tol=0.0):
        raise AssertionError(f"{what}: got {got!r}, must be {want!r} within {tolerance:.1%}")
    shown = f"{got:,}" if isinstance(got, int) else f"{got:,.6g}"
    print(f"{what}: {shown}" + (f" (within {tolerance:.1%} of {want:,.6g})" if tolerance else ""))


def show(
    table: pd.DataFrame,
    *,
    clocked: bool = False,
    units: Mapping[str, str] | None = None,
    out: str = "",
    name: str = "",
) -> None:
    """Show a table: as HTML to readers, as text to the tests, which skip it if it was ``clocked``.

    Args:
        units: column → unit, for columns to be written with SI prefixes ("FLOP", "B/s", "s"), or "%" for shares.
        out, name: where to keep its numbers as CSV, ``out/tables/name.csv``, if both are set.
    """
    from IPython.display import display

    from llmlab.viz.style import has_labels

    if out and name:
        folder = Path(out) / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        table.to_csv(folder / f"{name}.csv", index=has_labels(table), lineterminator="\n")
    table = readable(table, units or {})
    text = table.to_string(index=has_labels(table))
    if clocked:
        text = "\n".join(f"[measured] {line}" for line in text.splitlines())
    html = table.to_html(border=0, index=has_labels(table))
    display({"text/plain": text, "text/html": html}, raw=True)


def readable(table: pd.DataFrame, units: Mapping[str, str]) -> pd.DataFrame:
    """The table with some columns turned into words: ``1.2 G`` and the unit in the column's name."""
    from llmlab.viz.style import engineering

    def write(value: Any, unit: str) -> str:
        if value != value:
            return ""
        return f"{100 * value:.1f}" if unit == "%" else engineering(value, unit)

    columns = [column for column in units if column in table]
    words = {column: [write(value, units[column]) for value in table[column]] for column in columns}
    table = table.assign(**words)
    return table.rename(columns={column: f"{column} (%)" for column in columns if units[column] == "%"})


def figure(fig: Figure, data: pd.DataFrame, out: str, name: str) -> Figure:
    """Keep a figure with its data in ``out`` (if that is set), and hand it back to be shown."""
    from llmlab.viz.style import save_figure

    save_figure(fig, data, Path(out) / "figures" if out else None, name)
    return fig


def source(function: Any) -> None:
    """Show the source of a function, class or Triton kernel to readers; the tests don't compare it."""
    from IPython.display import display
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    text = inspect.getsource(getattr(function, "fn", function))  # a JITFunction wraps the function that was written
    html = highlight(text, PythonLexer(), HtmlFormatter(noclasses=True, nobackground=True))
    display({"text/html": html}, raw=True)


def interact(draw: Callable[..., Any], **controls: Any) -> Any:
    """Sliders for a figure that stands above them: it is drawn again when one of them is moved, and not before.

    ipywidgets' own ``interact`` also draws at once, into a widget that nbclient mirrors; a picture there often makes nbclient
    miss the cell's end and wait until its time is up.

    Args:
        draw: a function of the controls that returns a figure.
        controls: as for ``ipywidgets.interact``.

    Returns the widget.
    """
    import ipywidgets

    moved = False

    def redraw(**values: Any) -> Any:
        nonlocal moved
        first, moved = not moved, True
        return None if first else draw(**values)

    redraw.__signature__ = inspect.signature(draw)  # type: ignore[attr-defined]  # sliders start at the function's defaults
    return ipywidgets.interact(redraw, **controls).widget


def verdict(
    claim_id: str, numbers: Mapping[str, float], *, clocked: bool, machine: str = "", model: str = "", out: str = ""
) -> Finding:
    """Judge a claim by its rule, print rule and verdict, and keep the finding in ``out`` (if that is set).

    Args:
        clocked: whether the numbers depend on this machine; then the verdict's line is not compared by the tests, and nothing
            is decided while the machine is busy with something else.
    """
    from llmlab.measure.claims import claim, judge
    from llmlab.measure.system import load_now

    finding = judge(claim_id, numbers, machine=machine, model=model, out=out, load=load_now() if clocked else 0.0)
    one = claim(claim_id)
    print(f"{claim_id}: {one.statement}\nrule: {one.rule}")
    (measured if clocked else print)(finding)
    return finding


def key_figure(what: str, value: float, unit: str, *, note: str = "", out: str = "") -> None:
    """Print a number that a reader should take away, and keep it for the report's first page, if ``out`` is set.

    Args:
        what: of what it is the number, in a few words. note: under which circumstances, or compared with what.
    """
    from llmlab.viz.style import engineering

    if unit == "%":
        shown = f"{100 * value:.0f} %"
    elif unit == "×":
        shown = f"{value:.3g} ×"
    elif unit.startswith("tokens"):
        shown = f"{float(f'{value:.3g}'):,.10g} {unit}"  # nobody says kilotokens
    else:
        shown = engineering(value, unit)
    measured(f"{what}: {shown}" + (f" ({note})" if note else ""))
    if out:
        folder = Path(out) / "key_figures"
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"what": what, "value": shown, "note": note}
        file = folder / f"{len(list(folder.glob('*.json'))):03d}.json"
        file.write_text(json.dumps(kept, ensure_ascii=False) + "\n", encoding="utf-8")


def key_figures(out: str | Path) -> list[dict[str, str]]:
    """What :func:`key_figure` kept in a folder, in order: what, value (with its unit), note."""
    files = sorted((Path(out) / "key_figures").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def choose_model(model: str) -> str:
    """The model's directory if it is here; for the default model, where that was not fetched, the small one that always is.

    Raises:
        ValueError, FileNotFoundError: as :func:`llmlab.hub.resolve_model`, for any other model.
    """
    from llmlab.hub import PACKAGED_MODELS, models_dir, resolve_model, tiny_model_dir

    if model in PACKAGED_MODELS and not (models_dir() / model / "config.json").is_file():
        if not (tiny_model_dir() / "config.json").is_file():
            raise FileNotFoundError(f"the model {model} is not here; get it with: llmlab fetch {model}")
        machine(f"{model} is not here (llmlab fetch {model} gets it): the tiny model is measured instead")
        return str(tiny_model_dir())
    path = resolve_model(model)
    machine(f"model: {path.name}")
    return str(path)


def cover(notebook: Any) -> bytes | None:
    """The figure (PNG) that stands for a notebook: that of the cell tagged ``cover``, else its first; None without any."""
    figures = [
        (("cover" not in cell.metadata.get("tags", []), at), output.data["image/png"])
        for at, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    return base64.b64decode(min(figures)[1]) if figures else None


def save_cover(path: Path, width: int = 640) -> Path | None:
    """Write ``images/NAME.png`` beside a notebook, the picture that the index page shows, at most ``width`` pixels wide."""
    import nbformat
    from PIL import Image

    png = cover(nbformat.read(path, as_version=4))
    if png is None:
        return None
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.thumbnail((width, 10 * width), Image.Resampling.LANCZOS)
    target = path.parent / "images" / f"{path.stem}.png"
    target.parent.mkdir(exist_ok=True)
    picture.quantize(128).save(target, optimize=True)
    return target


def run_in_place(path: Path, timeout: int = 600) -> float:
    """Execute a notebook from top to bottom and store it with its outputs and nothing else; returns the seconds it took.

    Its figures are stored with a palette, a third of the size; its cover goes to ``images/`` beside it.

    Raises nbclient's CellExecutionError if a cell fails; the file is left as it was then.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    start = time.perf_counter()
    folder = {"metadata": {"path": str(path.resolve().parent)}}
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=folder, record_timing=False)
    client.widget_registry = {}  # mirroring a widget that holds a picture, it may miss a cell's end and wait for ever
    client.execute()
    seconds = time.perf_counter() - start
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _with_palette(output.data["image/png"])
    nbformat.write(notebook, path)
    save_cover(path)
    return seconds


def _with_palette(png: str) -> str:
    """The same picture (base64) in its 256 most telling colours: line drawings lose nothing that can be seen."""
    from PIL import Image

    smaller = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    picture.convert("RGB").quantize(256).save(smaller, "png", optimize=True, dpi=picture.info.get("dpi"))
    return base64.b64encode(smaller.getvalue()).decode()


def main() -> None:
    """``python -m llmlab.nb nbs/13_roofline.ipynb …``: what to do with a notebook before it is committed."""
    for name in sys.argv[1:]:
        print(f"{name}: {run_in_place(Path(name)):.1f} s")


def _device(device: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _marked(mark: str, parts: tuple[Any, ...]) -> None:
    for line in " ".join(str(part) for part in parts).splitlines():
        print(f"[{mark}] {line}")


if __name__ == "__main__":
    main()
