"""The report: notebooks run with parameters, failures shown and counted, everything inside one page."""

from __future__ import annotations

import json

import nbformat
import pytest

from llmlab import report

GOOD = [
    ("markdown", "# A question\n\nWhat is drawn here?"),
    ("code", 'model: str = "none"\nout: str = ""'),
    ("code", "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"),
    ("code", "print('model is', model.split('/')[-1])"),
]
BAD = [("markdown", "# Broken"), ("code", "print('before')\n1 / 0"), ("code", "print('never')")]


def write(path, cells) -> None:
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    for kind, source in cells:
        notebook.cells.append(
            nbformat.v4.new_markdown_cell(source) if kind == "markdown" else nbformat.v4.new_code_cell(source)
        )
    if len(notebook.cells) > 2:
        notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A lab with two notebooks and a model directory, where the report looks for them."""
    (tmp_path / "nbs").mkdir()
    (tmp_path / "some-model").mkdir()
    (tmp_path / "some-model" / "config.json").write_text("{}")
    write(tmp_path / "nbs" / "01_good.ipynb", GOOD)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_self_contained_page(lab):
    assert report.build_report(str(lab / "some-model"), device="cpu", out="result") == 0
    page = (lab / "result" / "index.html").read_text()
    assert "A question" in page
    assert "model is some-model" in page
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert 'href="http' not in page
    assert "What limits it" in page
    manifest = json.loads((lab / "result" / "manifest.json").read_text())
    assert manifest["notebooks"][0]["name"] == "01_good"
    assert manifest["notebooks"][0]["error"] is None
    assert manifest["versions"]["torch"]
    assert "notebooks/01_good.ipynb" in manifest["files"]


def test_a_failed_notebook_is_shown_and_counted(lab):
    write(lab / "nbs" / "02_bad.ipynb", BAD)
    assert report.build_report(str(lab / "some-model"), out="result") == 1
    page = (lab / "result" / "index.html").read_text()
    assert "02_bad failed" in page
    assert "ZeroDivisionError" in page
    assert "A question" in page


def test_a_report_never_overwrites_one(lab):
    (lab / "result").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        report.build_report(str(lab / "some-model"), out="result")


def test_only_names_notebooks(lab):
    with pytest.raises(ValueError, match="no notebook is called 07; there are 01_good"):
        report.build_report(str(lab / "some-model"), out="result", only=["07"])
