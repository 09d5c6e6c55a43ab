"""The notebooks: executed from the first cell to the last with their claims, and committed with their outputs."""

import pytest


nbformat = pytest.importorskip("nbformat", reason="`pip install -e '.[notebooks]'`")
nbclient = pytest.importorskip("nbclient", reason="`pip install -e '.[notebooks]'`")
pytest.importorskip("ipykernel", reason="`pip install -e '.[notebooks]'`")

from kit.cells import slow_but  # noqa: E402
from kit.notebooks import CLAIMS, FOLDER, NAMES, execute, read, with_claims  # noqa: E402


def test_every_notebook_has_claims():
    assert [name[0] for name in NAMES] == list(CLAIMS)
    for name in NAMES:
        code = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert 0 < min(CLAIMS[name[0]]) <= max(CLAIMS[name[0]]) == len(code), name


def test_a_notebook_is_committed_with_its_outputs_and_without_paths():
    for name in NAMES:
        text = (FOLDER / name).read_text()
        assert len(text) < 400_000
        assert not any(path in text for path in ("/tmp/", "/home/", "/root/", "site-packages"))
        code = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert "%pip install" in code[0].source  # the one cell that a machine without the package needs
        assert code[1].source == "REAL_MODEL = False"
        assert not any("assert" in cell.source for cell in code)
        outputs = [output for cell in code for output in cell.outputs]
        assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
        assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
        pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        assert 0 < len(pictures) == len(set(pictures))
        assert max(map(len, pictures)) < 120_000


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([n for n in NAMES if n.startswith("1")], NAMES))
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    execute(with_claims(read(name), name[0]))


@pytest.mark.slow
def test_a_claim_that_does_not_hold_stops_a_notebook(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = next(name for name in NAMES if name.startswith("4"))
    notebook = with_claims(read(name), "4")
    line = next(cell for cell in notebook.cells if "# the line" in cell.source)
    line.source = line.source.replace("handle = remove_padding(actor, prefix_sharing=True)", "handle = leaking(actor)")
    leak = (
        "from trl_padfix.core import remove\n"
        "from trl_padfix.core.call import layout_of as batches\n"
        "def leaking(model):\n"
        "    layout_of = batches.padding_free_layout\n"
        "    def leak(mask):\n"
        "        from dataclasses import replace\n"
        "        return replace(layout_of(mask.reshape(1, -1)), batch_shape=tuple(mask.shape))\n"
        "    batches.padding_free_layout = leak\n"
        "    return remove.remove_padding(model)\n"
    )
    notebook.cells.insert(2, nbformat.v4.new_code_cell(leak))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        execute(notebook)
