"""docs/examples/notebook.ipynb trains, plots and predicts, from its first cell to its last."""

import ast
import os

import nbformat
import pytest
import runs
from nbclient import NotebookClient

PATH = runs.ROOT / "docs/examples/notebook.ipynb"


def test_the_notebook_is_valid_and_has_no_outputs():
    """Committed outputs would be figures that no test compares with the code."""
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.docs
def test_the_notebook_trains_plots_and_predicts(monkeypatch):
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("PYTHONPATH", runs.packages_path())):
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(PATH, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": PATH.parent}}, env=os.environ)
    client.execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    results = {name: cell[-1].data for name, cell in outputs.items() if cell and "data" in cell[-1]}
    scores = ast.literal_eval(results["train"]["text/plain"])
    assert scores["eval_accuracy"] > 0.7
    assert "image/png" in results["curves"]
    assert ast.literal_eval(results["pipeline"]["text/plain"])[0]["label"] == "networkx"
    assert "prediction" in results["file"]["text/plain"]
    assert len(nbformat.writes(notebook)) < 150_000
