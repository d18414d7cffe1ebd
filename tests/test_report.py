"""The report: notebooks run with parameters, failures shown and counted, everything inside one page."""

from __future__ import annotations

import json
import re

import nbformat
import pytest

from llmlab import report
from llmlab.measure import measurements
from llmlab.measure.hardware import Ceilings, describe_machine

CEILINGS = Ceilings(
    machine=describe_machine(),
    date="2026-01-02T03:04:05+00:00",
    gemm={"float32": 2e11},
    read_bandwidth=2e10,
    copy_bandwidth=2.5e10,
    beyond_caches=True,
    levels=(),
    call_overhead=1e-6,
    load=0.0,
)

GOOD = [
    ("markdown", "# A question\n\nWhat is drawn here?"),
    ("code", 'model: str = "none"\nout: str = ""'),
    ("code", "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"),
    ("code", "print('model is', model.split('/')[-1])"),
    ("code", "from llmlab import nb\n_ = nb.verdict('C04', {'slot': 137}, clocked=False, out=out)"),
    ("code", "nb.key_figure('decode', 81.3, 'tokens/s', note='one request', out=out)"),
    ("markdown", "More in [the next one](02_bad.ipynb), where $x_1 < y_1$."),
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


def make_lab(folder, monkeypatch, notebooks):
    """A lab with some notebooks and a model directory, where the report looks for them."""
    (folder / "nbs").mkdir()
    (folder / "some-model").mkdir()
    (folder / "some-model" / "config.json").write_text("{}")
    for name, cells in notebooks.items():
        write(folder / "nbs" / f"{name}.ipynb", cells)
    monkeypatch.setattr(report, "ROOT", folder)
    monkeypatch.setattr(measurements, "ROOT", folder)
    monkeypatch.setattr(report, "_ceilings", lambda device: CEILINGS)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def lab(tmp_path, monkeypatch):
    return make_lab(tmp_path, monkeypatch, {"01_good": GOOD})


def build(folder, notebooks):
    """Exit code, page and manifest of a report on these notebooks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_lab(folder, monkeypatch, notebooks)
        code = report.build_report(str(folder / "some-model"), device="cpu", out="result")
    page = (folder / "result" / "index.html").read_text()
    return code, page, json.loads((folder / "result" / "manifest.json").read_text()), folder / "result"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return build(tmp_path_factory.mktemp("good"), {"01_good": GOOD})


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One notebook that runs, one that raises, one whose kernel dies."""
    dies = [("markdown", "# Dies"), ("code", "import os\nos._exit(3)")]
    return build(tmp_path_factory.mktemp("mixed"), {"01_good": GOOD, "02_bad": BAD, "03_dies": dies})


def test_one_self_contained_page(good):
    code, page, manifest, folder = good
    assert code == 0
    assert "A question" in page
    assert "model is some-model" in page
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert 'href="http' not in page
    assert "<math" in page and "$x_1" not in page, "formulas are drawn without a network"
    assert manifest["notebooks"][0]["name"] == "01_good"
    assert manifest["notebooks"][0]["error"] is None
    assert manifest["versions"]["torch"]
    assert {"index.html", "claims/C04.json", "notebooks/01_good.ipynb"} <= set(manifest["files"])
    assert all((folder / name).is_file() for name in manifest["files"])


def test_the_first_page_says_what_was_found(good):
    page = good[1]
    first = page[: page.index('<h2 id="notebooks">')]
    assert str(CEILINGS.machine) in first
    assert "<b>81.3 tokens/s</b>decode" in first
    assert '<a href="#01_good" title="01_good">C04</a>' in first
    assert "rule</summary>the engine&#39;s own batch builder gives 137" in first
    assert re.search(r"\d+ confirmed, .* not measured", first)
    said = float(re.search(r"this page ([\d.]+) kB", first)[1])
    assert said == pytest.approx(len(page.encode()) / 1e3, rel=0.02)
    assert first.index("What this machine is") < first.index("What limits it") < first.index("Verdicts")
    assert "H100" not in first.split("for comparison")[0], "datasheets are not mixed with what was measured"


def test_its_findings_can_be_stored(good, tmp_path):
    entry = measurements.read(measurements.store(measurements.from_report(good[3]), tmp_path))
    assert [finding["claim"] for finding in entry["findings"]] == ["C04"]
    assert entry["device"] == CEILINGS.machine.device


def test_failed_notebooks_are_shown_and_counted(mixed):
    code, page, manifest, _ = mixed
    assert code == 1
    assert "02_bad failed at cell" in page and "ZeroDivisionError" in page
    assert "03_dies failed at" in page
    assert "A question" in page, "one that fails does not take the others with it"
    assert [bool(notebook["error"]) for notebook in manifest["notebooks"]] == [False, True, True]


def test_every_link_works_offline(mixed):
    _, page, _, folder = mixed
    ids = set(re.findall(r' id="([^"]+)"', page))
    for link in re.findall(r'href="([^"]+)"', page):
        assert link[1:] in ids if link.startswith("#") else (folder / link).is_file(), link
    assert 'href="#02_bad"' in page[page.index('id="01_good"') :], "a link between notebooks stays inside the page"
    assert '<details class="notebook" id="01_good">' in page, "collapsed, as there are several"
    assert '<details class="notebook" id="02_bad" open>' in page, "what failed is open"


def test_a_report_never_overwrites_one(lab):
    (lab / "result").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        report.build_report(str(lab / "some-model"), out="result")


def test_only_names_notebooks(lab):
    with pytest.raises(ValueError, match="no notebook is called 07; there are 01_good"):
        report.build_report(str(lab / "some-model"), out="result", only=["07"])
