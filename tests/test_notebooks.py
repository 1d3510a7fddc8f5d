"""Notebooks run from the first cell to the last, as a person would, in a kernel of their own."""

from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
LAST = {"plan": "{'fsdp': 32}", "train": "'defghij'"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LAST))
@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="the docs extra runs notebooks")
    nbclient = pytest.importorskip("nbclient", reason="the docs extra runs notebooks")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))  # and not in the home folder
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=where).execute()
    (output,) = book.cells[-1].outputs
    assert output.data["text/plain"] == LAST[name]


def test_notebooks_are_kept_without_outputs():
    """What a run prints belongs to that run, and not to the repository."""
    found = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert [path.stem for path in found] == sorted(LAST)
    for path in found:
        assert '"outputs": []' in path.read_text()
        assert '"output_type"' not in path.read_text()
