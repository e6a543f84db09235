"""The notebooks: executed as a user would, with nothing but the public interface, and kept in git without outputs.

`pytest -m notebooks` runs the executions alone, `pytest -m "not notebooks"` everything else.
"""

import ast
from pathlib import Path

import pytest

import quantize_state

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 600
"""For one notebook. Alone on two cores each takes less than 40 s; in CI they share them with all other tests."""

nbformat = pytest.importorskip("nbformat")

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@by_name
def test_in_git_a_notebook_has_no_outputs(path):
    """`jupyter nbconvert --clear-output --inplace notebooks/*.ipynb` takes them out."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(path))
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}, "an editor left its own metadata"
    assert notebook.cells[0].source.startswith("# ") and path.stat().st_size < 50_000


@by_name
def test_a_notebook_uses_the_public_interface_alone(path):
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("quantize_state"), ast.unparse(node)
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("quantize_state.") for name in node.names), ast.unparse(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "qs":
                assert node.attr in quantize_state.__all__, f"qs.{node.attr}"
                assert not node.attr.startswith("_")


@pytest.mark.notebooks
@by_name
def test_a_notebook_runs(path, monkeypatch):
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    client.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    drawn = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert drawn, "a notebook shows plots"


def test_there_are_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]
