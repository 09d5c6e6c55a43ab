"""The notebooks: executed from the first cell to the last, and committed without outputs."""

import sys
from pathlib import Path

import pytest


nbformat = pytest.importorskip("nbformat", reason="`pip install -e '.[notebooks]'`")
nbclient = pytest.importorskip("nbclient", reason="`pip install -e '.[notebooks]'`")
pytest.importorskip("ipykernel", reason="`pip install -e '.[notebooks]'`")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


def read(name: str):
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def test_there_are_four():
    assert [name[0] for name in NAMES] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_without_outputs_and_ends_with_its_claim(name):
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[0].source == "REAL_MODEL = False"
    assert "assert" in code[-1].source


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = read(name)
    # The kernel of this environment, whatever kernels are registered for the user.
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()


@pytest.mark.slow
def test_a_claim_that_does_not_hold_stops_a_notebook(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = next(name for name in NAMES if name.startswith("4"))
    notebook = read(name)
    line = next(cell for cell in notebook.cells if "# the line" in cell.source)
    line.source = line.source.replace("handle = remove_padding(actor, prefix_sharing=True)", "handle = leaking(actor)")
    leak = (
        "from trl_padfix.core import batches, remove\n"
        "def leaking(model):\n"
        "    layout_of = batches.padding_free_layout\n"
        "    def leak(mask):\n"
        "        from dataclasses import replace\n"
        "        return replace(layout_of(mask.reshape(1, -1)), batch_shape=tuple(mask.shape))\n"
        "    batches.padding_free_layout = leak\n"
        "    return remove.remove_padding(model)\n"
    )
    notebook.cells.insert(2, nbformat.v4.new_code_cell(leak))
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOKS)}})
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        client.execute()
