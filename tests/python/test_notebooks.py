"""The notebooks run from top to bottom, in a kernel of their own."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs python3-nbclient")
nbclient = pytest.importorskip("nbclient", reason="needs python3-nbclient")
pytest.importorskip("ipykernel", reason="needs python3-ipykernel")
pytest.importorskip("matplotlib", reason="needs python3-matplotlib")
pytest.importorskip("torch", reason="needs python3-torch")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed with outputs"
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3",
                                     resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    drawn = [output for cell in notebook.cells for output in cell.get("outputs", [])
             if "image/png" in output.get("data", {})]
    assert len(drawn) == 2, "the figures are not there"


def test_there_are_some():
    assert list(NOTEBOOKS.glob("*.ipynb"))
