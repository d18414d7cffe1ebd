"""What notebooks print: marked if it was clocked, compared otherwise; and what they fall back to."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient.exceptions import CellExecutionError
from PIL import Image

from llmlab import hub, nb
from llmlab.measure import system


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_every_line_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    nb.measured("one\ntwo", 3)
    nb.machine("four")
    assert lines(capsys) == ["[measured] one", "[measured] two 3", "[machine] four"]


def test_setup_names_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    nb.setup("cpu")
    (line,) = lines(capsys)
    assert line.startswith("[machine] ") and "torch" in line


def test_expect_prints_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    nb.expect("bytes", 131072, 131072)
    nb.expect("share", 0.7020, 0.70, tolerance=0.01)
    assert lines(capsys) == ["bytes: 131,072", "share: 0.702 (within 1.0% of 0.7)"]
    with pytest.raises(AssertionError, match="bytes: got 131073, must be 131072"):
        nb.expect("bytes", 131073, 131072)
    with pytest.raises(AssertionError, match="share"):
        nb.expect("share", 0.72, 0.70, tolerance=0.01)


def test_readable_columns() -> None:
    table = pd.DataFrame({"flops": [2e12, np.nan], "share": [0.256, 0.5], "bound": ["a", "b"]})
    words = nb.readable(table, {"flops": "FLOP", "share": "%", "absent": "s"})
    assert words["flops"].tolist() == ["2 TFLOP", ""]
    assert words["share (%)"].tolist() == ["25.6", "50.0"]
    assert words["bound"].tolist() == ["a", "b"]


def test_tables_are_compared_unless_clocked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import IPython.display

    shown: list[dict[str, str]] = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    table = pd.DataFrame({"a": [1, 2]})
    nb.show(table)
    nb.show(table, clocked=True, units={"a": "s"}, out=str(tmp_path), name="t")
    assert (tmp_path / "tables" / "t.csv").read_text() == "a\n1\n2\n", "numbers, not words"
    assert not any("[measured]" in d["text/html"] for d in shown)
    assert "[measured]" not in shown[0]["text/plain"]
    assert all(line.startswith("[measured] ") for line in shown[1]["text/plain"].splitlines())


def test_a_verdict_shows_its_rule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "load_now", lambda: 0.0)
    nb.verdict("C04", {"slot": 137}, clocked=False, out=str(tmp_path))
    printed = lines(capsys)
    assert printed[1] == "rule: the engine's own batch builder gives 137"
    assert printed[2] == "C04 confirmed (slot 137)"
    assert (tmp_path / "claims" / "C04.json").is_file()
    nb.verdict("C04", {"slot": 1}, clocked=True)
    assert lines(capsys)[-1].startswith("[measured] C04 refuted")
    monkeypatch.setattr(system, "load_now", lambda: 0.8)
    nb.verdict("C04", {"slot": 137}, clocked=True)
    assert lines(capsys)[-1].startswith("[measured] C04 not decided (machine busy)")


def model_at(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_the_default_model_gives_way_to_the_tiny_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "models_dir", lambda: tmp_path / "models")
    monkeypatch.setattr(hub, "tiny_model_dir", lambda: tmp_path / "tiny")
    with pytest.raises(FileNotFoundError, match="llmlab fetch"):
        nb.choose_model("smollm2-135m-instruct")
    model_at(tmp_path / "tiny")
    assert nb.choose_model("smollm2-135m-instruct") == str(tmp_path / "tiny")
    assert "the tiny model is measured instead" in lines(capsys)[-1]
    model_at(tmp_path / "models" / "smollm2-135m-instruct")
    assert nb.choose_model("smollm2-135m-instruct") == str(tmp_path / "models" / "smollm2-135m-instruct")
    assert lines(capsys) == ["[machine] model: smollm2-135m-instruct"]


def test_any_other_model_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_at(tmp_path / "mine")
    assert nb.choose_model(str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert lines(capsys) == ["[machine] model: mine"]
    with pytest.raises(ValueError, match="nonsense"):
        nb.choose_model("nonsense model")


def notebook_at(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata = {"tags": ["parameters"], "execution": {"iopub.status.busy": "then"}}
    cells[0].outputs = [nbformat.v4.new_output("stream", text="old")]
    cells[0].execution_count = 7
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {}}), path)
    return path


def test_a_notebook_is_run_and_stored_clean(tmp_path: Path) -> None:
    path = notebook_at(tmp_path / "a.ipynb", "x: int = 2", "from pathlib import Path\nprint(x + 1, Path.cwd().name)")
    assert nb.run_in_place(path) > 0
    stored = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in stored.cells] == [1, 2]
    assert [cell.metadata for cell in stored.cells] == [{"tags": ["parameters"]}, {}]
    assert stored.cells[0].outputs == []
    assert stored.cells[1].outputs[0].text == f"3 {tmp_path.name}\n"
    assert set(stored.metadata) == {"kernelspec", "language_info"}


def test_a_failing_notebook_is_left_as_it_was(tmp_path: Path) -> None:
    path = notebook_at(tmp_path / "a.ipynb", "x: int = 2", "1 / 0")
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        nb.run_in_place(path)
    assert path.read_bytes() == before


def test_source_is_shown_to_readers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    nb.source(nb.measured)
    from llmlab.kernels.norm import rms_norm_kernel

    nb.source(rms_norm_kernel)
    assert [list(data) for data in shown] == [["text/html"], ["text/html"]]
    assert "measured" in shown[0]["text/html"] and "rms_norm_kernel" in shown[1]["text/html"]


def test_the_cover_is_the_tagged_figure_else_the_first(tmp_path: Path) -> None:
    draw = "from PIL import Image\nImage.new('RGB', (800, {height}))"  # shown as image/png
    path = notebook_at(tmp_path / "a.ipynb", "x: int = 2", draw.format(height=200), draw.format(height=400))
    nb.run_in_place(path)
    with Image.open(tmp_path / "images" / "a.png") as picture:
        assert picture.width <= 640 and picture.width / picture.height > 2.5
    notebook = nbformat.read(path, as_version=4)
    with Image.open(io.BytesIO(base64.b64decode(notebook.cells[1].outputs[0].data["image/png"]))) as stored:
        assert (stored.size, stored.mode) == ((800, 200), "P")
    notebook.cells[2].metadata["tags"] = ["cover"]
    nbformat.write(notebook, path)
    target = nb.save_cover(path)
    assert target is not None
    with Image.open(target) as picture:
        assert picture.width / picture.height < 2.5


def test_a_notebook_without_figures_has_no_cover(tmp_path: Path) -> None:
    assert nb.save_cover(notebook_at(tmp_path / "a.ipynb", "x: int = 2")) is None


def test_sliders_draw_when_they_are_moved() -> None:
    drawn: list[int] = []
    widget = nb.interact(lambda size: drawn.append(size), size=(1, 5))
    assert drawn == []
    widget.children[0].value = 4
    assert drawn == [4]


def test_a_notebook_that_draws_into_a_widget_comes_to_its_end(tmp_path: Path) -> None:
    """With nbclient's mirror of widgets, nine of ten runs of this one wait until the cell's time is up."""
    picture = """
import numpy as np
from matplotlib.figure import Figure

def draw(a):
    fig = Figure((11, 8), dpi=130)
    fig.subplots().imshow(np.random.default_rng(a).random((400, 400)))
    return fig
"""
    show = "from llmlab import nb\nnb.setup('cpu')\nfrom ipywidgets import interact\n_ = interact(draw, a=(1, 5))"
    path = notebook_at(tmp_path / "a.ipynb", picture, show, "print('the end')")
    assert nb.run_in_place(path, timeout=60) < 60
    assert nbformat.read(path, as_version=4).cells[-1].outputs[0].text == "the end\n"


def test_key_figures_are_printed_and_kept_in_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nb.key_figure("decode", 1369.6, "tokens/s", note="32 at a time", out=str(tmp_path))
    nb.key_figure("copy", 2.5e10, "B/s", out=str(tmp_path))
    nb.key_figure("of the roof", 0.7, "%", out=str(tmp_path))
    nb.key_figure("not kept", 1.0, "s")
    assert lines(capsys)[0] == "[measured] decode: 1,370 tokens/s (32 at a time)"
    kept = nb.key_figures(tmp_path)
    assert [figure["value"] for figure in kept] == ["1,370 tokens/s", "25 GB/s", "70 %"]
    assert kept[0]["note"] == "32 at a time"
    assert nb.key_figures(tmp_path / "nothing") == []


def test_sliders_start_at_the_functions_defaults() -> None:
    drawn: list[int] = []
    widget = nb.interact(lambda width=3: drawn.append(width), width=(0, 10))
    assert widget.children[0].value == 3 and drawn == []
    widget.children[0].value = 7
    assert drawn == [7]


def test_ratios_have_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    nb.key_figure("one over another", 0.989, "×")
    assert lines(capsys) == ["[measured] one over another: 0.989 ×"]
