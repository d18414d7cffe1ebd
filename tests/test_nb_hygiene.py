"""Committed notebooks: executed in order, outputs stored, nothing of the machine that made them. nbval leaves these holes.

nbval compares outputs, but a notebook without outputs passes it, and it looks at neither metadata nor stored errors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").rglob("*.ipynb"))
ALLOWED_TAGS = {"cover", "parameters", "raises-exception", "nbval-ignore-output", "nbval-skip"}
LARGEST = 1_000_000
LONGEST_CELL = 25
MACHINE_PATH = re.compile(r"(?:(?<![\w.])/(?:home|root|tmp|Users|work|mnt|var|opt)/\w|[A-Z]:\\\\\w)")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_is_valid_and_small(path: Path, notebook: Any) -> None:
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST, "too large for a repository: fewer or smaller figures"


def test_was_run_from_top_to_bottom(notebook: Any) -> None:
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "restart the kernel and run all cells"
    assert any(cell.outputs for cell in code_cells(notebook)), "outputs were stripped: nothing would be compared"


def test_stores_no_error_and_no_stderr(notebook: Any) -> None:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            raises = "raises-exception" in cell.metadata.get("tags", [])
            assert output.output_type != "error" or raises, f"stored error in: {cell.source[:80]}"
            assert output.get("name") != "stderr", f"stored stderr in: {cell.source[:80]}"


def test_metadata_is_portable(notebook: Any) -> None:
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert "papermill" not in notebook.metadata
    for cell in notebook.cells:
        assert set(cell.metadata.get("tags", [])) <= ALLOWED_TAGS, cell.source[:80]
        assert not {"execution", "papermill"} & set(cell.metadata), "clean the cell's metadata"


def test_names_no_machine(notebook: Any) -> None:
    for cell in notebook.cells:
        texts = [cell.source]
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts += [v for k, v in output.get("data", {}).items() if k in ("text/plain", "text/html")]
        for text in texts:
            assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)


def test_cells_are_short_and_print_without_semicolon_tricks(notebook: Any) -> None:
    for cell in code_cells(notebook):
        lines = cell.source.splitlines()
        assert len(lines) <= LONGEST_CELL, f"{len(lines)} lines; move code into the package: {lines[0]}"
        assert not lines[-1].rstrip().endswith(";"), "under nbval a semicolon suppresses nothing"


def test_sliders_draw_only_when_moved(notebook: Any) -> None:
    for cell in code_cells(notebook):
        assert not re.search(r"import interact\b|ipywidgets\.interact", cell.source), (
            "use nb.interact: ipywidgets' own draws at once, and nbclient (so the report, too) then often waits for ever"
        )


def test_begins_with_a_question_and_takes_typed_parameters(notebook: Any) -> None:
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    tagged = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    for cell in tagged:  # papermill infers types from annotations only
        assert all(re.match(r"\w+: \w+ = ", line) for line in cell.source.splitlines()), cell.source


def test_stands_on_the_index_page_with_its_picture(path: Path) -> None:
    index = (ROOT / "nbs" / "README.md").read_text(encoding="utf-8")
    assert f"({path.name})" in index, "name it in nbs/README.md"
    assert f'"images/{path.stem}.png"' in index and (ROOT / "nbs" / "images" / f"{path.stem}.png").is_file()


@pytest.mark.parametrize(
    "text", ["see /home/someone/x", "File /tmp/ipykernel_1/2.py", r"C:\\Users", "/work/x", "'/root/a'", "=/Users/me"]
)
def test_finds_machine_paths(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["https://host/home/page", "a/b", "FLOP/s", "data/models", "and/or", "1/tmp"])
def test_leaves_other_slashes_alone(text: str) -> None:
    assert not MACHINE_PATH.search(text)
