"""The notebooks run from top to bottom, and what is shipped shows what they print."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
TITLES = [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=TITLES)
def test_what_is_shipped_was_run_in_order(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [output.output_type for cell in code for output in cell.outputs]
    assert "error" not in kinds
    assert not [output for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < 2e6
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for part in ("You will be able to", "Predict", "## Exercises", "<summary>Answers</summary>"):
        assert part in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=TITLES)
def test_it_runs(path, monkeypatch):
    """What comes out of each cell is of the kinds that stand in the file: figures, texts, results."""
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shipped = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    run = NotebookClient(
        fresh,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
        coalesce_streams=True,  # what a cell prints may come in several pieces
    )
    run.execute()
    for before, now in zip(shipped.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            kinds = [
                [_kind(output) for output in cell.outputs if output.get("name") != "stderr"] for cell in (before, now)
            ]
            assert kinds[0] == kinds[1]


def _kind(output):
    """A figure, or what else came out; some machines print warnings of libraries beside it."""
    figure = any("plotly" in kind for kind in output.get("data", {}))
    return "figure" if figure else output.output_type
