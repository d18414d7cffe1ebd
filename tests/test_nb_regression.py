"""The notebooks' own safety net: the project's nbval command catches a wrong number in each of them, and lets clocked ones be.

A copy of every notebook, cut off behind the first cell that prints a number of its own, with one digit of that number changed in
the stored output, and every digit changed in what is marked ``[measured]`` or ``[machine]`` before it. All copies are run
once, by the flags in the Makefile; then exactly the planted cell must have failed in each.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").rglob("*.ipynb"))
MARKED = re.compile(r"\[(?:measured|machine)\][^\n]*")
NOT_PRINTED = re.compile(r"0x[0-9a-f]+|<Figure[^>]*>")  # addresses are not compared; a figure's size is no finding
TIMEOUT = 400


@dataclass(frozen=True)
class Outcome:
    """What became of one cell under nbval: "passed", "failed" or "skipped", and what was said about it."""

    result: str
    message: str


def flags() -> list[str]:
    """What ``make notebooks`` gives to pytest."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("NBVAL ")]
    return shlex.split(line.split(":=")[1])


def run_nbval(folder: Path, **notebooks: Any) -> dict[str, list[Outcome]]:
    """Run notebooks in a project that has nothing but what nbval reads: outcomes of the code cells, by notebook."""
    nbs = folder / "nbs"
    nbs.mkdir()
    for name in ("nbs/conftest.py", "nbs/sanitize.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for name, notebook in notebooks.items():
        nbformat.write(notebook, nbs / f"{name}.ipynb")
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *flags(), "--junitxml=result.xml", "-p", "no:randomly", "nbs"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert run.returncode in (0, 1), run.stdout[-3000:] + run.stderr[-3000:]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in notebooks}
    for case in ElementTree.parse(folder / "result.xml").iter("testcase"):
        name = next(n for n in notebooks if n in (case.get("classname") or "") + (case.get("file") or ""))
        children = {child.tag: (child.get("message") or "") + (child.text or "") for child in case}
        result = "failed" if {"failure", "error"} & set(children) else "skipped" if "skipped" in children else "passed"
        outcomes[name].append(Outcome(result, "\n".join(children.values())))
    return outcomes


def compared(output: Any) -> tuple[Any, str] | None:
    """Where the text of an output lies that nbval compares: its container and key; None for pictures, HTML and stderr."""
    if output.output_type == "stream":
        return (output, "text") if output.name == "stdout" else None
    data = output.get("data", {})
    return (data, "text/plain") if "text/plain" in data else None


def own_digit(text: str) -> int | None:
    """Place of the first digit that is compared, or None."""
    hidden = re.sub(MARKED, lambda m: " " * len(m[0]), text)
    hidden = re.sub(NOT_PRINTED, lambda m: " " * len(m[0]), hidden)
    found = re.search(r"\d", hidden)
    return found.start() if found else None


def another(digit: str) -> str:
    return str(int(digit) % 9 + 1)


def plant(notebook: Any) -> tuple[Any, int]:
    """A copy up to the first code cell with a number of its own, which is changed there; and that cell's number.

    Raises ValueError if the notebook prints none: then nothing in it would be checked.
    """
    planted = copy.deepcopy(notebook)
    number = -1
    for end, cell in enumerate(planted.cells):
        if cell.cell_type != "code":
            continue
        number += 1
        places = [place for place in map(compared, cell.get("outputs", [])) if place]
        for holder, key in places:
            holder[key] = re.sub(
                MARKED, lambda m: m[0][:10] + re.sub(r"\d", lambda d: another(d[0]), m[0][10:]), holder[key]
            )
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            continue
        for holder, key in places:
            at = own_digit(holder[key])
            if at is not None:
                holder[key] = holder[key][:at] + another(holder[key][at]) + holder[key][at + 1 :]
                planted.cells = planted.cells[: end + 1]
                return planted, number
    raise ValueError("no cell prints a number that is compared")


@pytest.fixture(scope="module")
def planted() -> dict[str, tuple[Any, int]]:
    found = {}
    for path in NOTEBOOKS:
        with contextlib.suppress(ValueError):
            found[path.stem] = plant(nbformat.read(path, as_version=4))
    return found


@pytest.fixture(scope="module")
def outcomes(
    planted: dict[str, tuple[Any, int]], default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    return run_nbval(tmp_path_factory.mktemp("planted"), **{name: notebook for name, (notebook, _) in planted.items()})


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_a_planted_digit_is_caught_and_clocked_ones_are_not(
    name: str, planted: dict[str, tuple[Any, int]], outcomes: dict[str, list[Outcome]]
) -> None:
    assert name in planted, "no stored output holds a number that is compared: nothing is checked here; was it run?"
    _, number = planted[name]
    *before, last = outcomes[name]
    assert len(before) == number
    for i, outcome in enumerate(before):
        assert outcome.result == "passed", f"cell {i} was only changed where it is marked: {outcome.message[-2000:]}"
    assert last.result == "failed", "the planted digit was not noticed"
    assert "mismatch" in last.message, last.message[-2000:]


def broken_package(folder: Path) -> Path:
    """A copy of the package in which the kernels of RMSNorm are wrong by a part in ten thousand: where to import it from."""
    for name in ("llmlab", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    kernels = folder / "kernels" / "norm.py"
    text = kernels.read_text()
    assert "tl.rsqrt(" in text
    kernels.write_text(text.replace("tl.rsqrt(", "1.0001 * tl.rsqrt("))
    return folder


@pytest.mark.slow
def test_a_broken_kernel_is_caught(tmp_path: Path) -> None:
    """The notebook on RMSNorm up to the cell that runs the kernel, with the package as it is and with a broken copy of it."""
    notebook = nbformat.read(ROOT / "nbs" / "03_rmsnorm.ipynb", as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code" and "transformers" not in c.source]
    last = next(i for i, c in enumerate(code) if "rms_norm.kernel(" in c.source)
    path = broken_package(tmp_path / "broken")
    before = {
        "sound": "import sys",
        "broken": f"import sys\nsys.path.insert(0, {str(path)!r})",
    }
    notebooks = {
        name: nbformat.v4.new_notebook(cells=[cell(source, ""), *code[: last + 1]]) for name, source in before.items()
    }
    outcomes = run_nbval(tmp_path, **notebooks)
    assert [o.result for o in outcomes["sound"]] == ["passed"] * (last + 2), outcomes["sound"]
    assert [o.result for o in outcomes["broken"]] == ["passed"] * (last + 1) + ["failed"], outcomes["broken"]
    assert "AssertionError" in outcomes["broken"][-1].message


def cell(source: str, printed: str) -> Any:
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
    return nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=1)


def test_what_is_caught_in_a_small_notebook(tmp_path: Path) -> None:
    """Each kind of change alone, on cells that print what the helpers of notebooks print."""
    cells = [
        cell("print('1.5 GB')", "1.5 GB\n"),
        cell("print('1.5 GB')", "1.6 GB\n"),
        cell("print('[measured] 1.5 s')", "[measured] 2.5 s\n"),
        cell("print('[machine] 8 cores')", "[machine] 2 cores\n[machine] one line more\n"),
        cell("print('[measured] 1.5 s')\nprint(7)", "[measured] 2.5 s\n8\n"),
        cell("print(7)", "[measured] 7\n"),
        cell("assert 1 + 1 == 3", ""),
    ]
    (outcomes,) = run_nbval(tmp_path, small=nbformat.v4.new_notebook(cells=cells)).values()
    assert [o.result for o in outcomes] == ["passed", "failed", "passed", "passed", "failed", "failed", "failed"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("tokens: 12", 8),
        ("[measured] 12 ms", None),
        ("[machine] 2 cores\nrows 7", 23),
        ("<Figure size 640x480 with 1 Axes>", None),
        ("at 0x7f00 is 3", 13),
        ("none", None),
    ],
)
def test_the_digit_that_is_changed_is_one_that_is_compared(text: str, at: int | None) -> None:
    assert own_digit(text) == at


def test_a_notebook_without_numbers_is_not_accepted() -> None:
    with pytest.raises(ValueError, match="no cell prints a number"):
        plant(nbformat.v4.new_notebook(cells=[cell("print('[measured] 3')", "[measured] 3\n")]))
