"""The notebooks: executed from the first cell to the last, and committed with their outputs."""

import os
import re

import pytest


nbformat = pytest.importorskip("nbformat", reason="`pip install -e '.[notebooks]'`")
nbclient = pytest.importorskip("nbclient", reason="`pip install -e '.[notebooks]'`")
pytest.importorskip("ipykernel", reason="`pip install -e '.[notebooks]'`")

from kit.cells import slow_but  # noqa: E402
from kit.notebooks import FOLDER, NAMES, execute, read  # noqa: E402


REAL = [name for name in NAMES if not name.startswith("2")]
"""Notebooks that use SmolLM2 where they find it."""

CHOICE = "from real_model import smollm2\n\n\nREAL_MODEL = smollm2()"
SMOLLM2 = os.environ.get("TRL_PADFIX_SMOLLM2", "")


def printed(notebook):
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")


def assert_equal_losses(notebook):
    """The losses of a training with TRL, or padded, and of one without padding: what a notebook says of them."""
    for found in re.findall(r"losses.* at most (\S+) apart", printed(notebook)):
        assert float(found) < 1e-4


def test_a_notebook_is_committed_with_its_outputs_and_without_paths():
    for name in NAMES:
        text = (FOLDER / name).read_text()
        assert len(text) < 400_000
        assert not any(path in text for path in ("/tmp/", "/home/", "/root/", "site-packages"))
        code = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert "%pip install" in code[0].source  # the one cell that a machine without the package needs
        assert code[1].source == ("REAL_MODEL = False" if name not in REAL else CHOICE)
        assert_equal_losses(read(name))
        if name in REAL:
            assert code[1].outputs[0].text == "SmolLM2-135M-Instruct\n"  # the stored outputs are a real model's
            assert " apart (relative)" in printed(read(name))
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
    monkeypatch.setenv("TRL_PADFIX_SMOLLM2", "")  # with the tiny model
    notebook = read(name)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=40", "steps=20")
    execute(notebook)
    assert_equal_losses(notebook)
    if name in REAL:
        assert "A tiny random model" in notebook.cells[2].outputs[0].text


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(not SMOLLM2, reason="TRL_PADFIX_SMOLLM2 names no folder of SmolLM2")
@pytest.mark.parametrize("name", REAL)
def test_a_notebook_runs_on_a_real_model(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = read(name)
    execute(notebook)
    assert_equal_losses(notebook)
    assert notebook.cells[2].outputs[0].text == "SmolLM2-135M-Instruct\n"
