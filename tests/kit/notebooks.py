"""
The notebooks, executed from the first cell to the last, and their outputs, written by

    PYTHONPATH=tests python -m kit.notebooks
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat


FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / name, as_version=4)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in a kernel of this environment, whatever kernels are registered for the user."""
    client = nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the other cores have tests of their own
    client.execute(env=os.environ | {"OMP_NUM_THREADS": threads})


def clear(notebook: nbformat.NotebookNode) -> None:
    """Leave of the outputs what a reader wants: no progress bars, warnings, paths and tables of a running training."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.metadata.pop("execution", None)
        kept = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                continue
            if output.output_type == "stream":
                lines = [line for line in output.text.split("\n") if "real_accelerator.py" not in line]  # DeepSpeed's
                output.text = "\n".join(line.rsplit("\r", 1)[-1] for line in lines)
                output.text = re.sub(r"(?:/[\w.-]+){3,}", "...", output.text)
            if output.output_type == "display_data" and "image/png" not in output.data:
                continue
            if output.get("execution_count"):
                output.execution_count = None
            kept.append(output)
        cell.outputs = kept
    notebook.metadata.pop("widgets", None)


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        shown = read(name)
        execute(shown)
        clear(shown)
        nbformat.write(shown, FOLDER / name)
        print(name)
