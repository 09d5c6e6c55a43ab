"""
The notebooks: their claims, checked after the cells that show them, and their outputs, written by

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

SAME = (
    "from numpy.testing import assert_allclose\n"
    "curves = [losses for _, losses in runs.values()]\n"
    "assert_allclose(curves[1], curves[0], rtol=1e-3)\n"
    "assert all(losses[-1] < losses[0] and sorted(seconds) == seconds for seconds, losses in runs.values())\n"
)
"""Checks of a race: the losses are equal in both modes, and they fall."""

CLAIMS: dict[str, dict[int, str]] = {
    "1": {
        4: ("assert padded != alone\nassert aligned == alone\n"),
        5: ("assert plain > 0.1\nassert packed < 1e-3\n"),
        6: ("assert by_hand > 0.1\nassert packed < 1e-3\n"),
        7: (
            "assert torch.allclose(packed, of_the_end, atol=1e-5)\n"
            "assert not torch.allclose(plain, of_the_end, atol=1e-2)\n"
        ),
        8: ("assert handle.stats.packed_tokens == sum(row.shape[1] for row in rows)\n"),
        9: SAME,
        10: "assert len(ids) == 8 + beginning['input_ids'].shape[1]\n",
    },
    "2": {
        5: ('assert account["distinct"] < account["real"] < account["padded"]\n'),
        7: "assert distinct.sum() < real.sum() < padded.sum()\n",
        8: SAME + "assert_allclose(curves[2], curves[0], rtol=1e-3)\n",
        9: "assert right > 0.7\n",  # a coin gives 0.5, and more than 0.7 of 60 pairs once in 1,000 times
    },
    "3": {
        8: (
            'assert after["eval_exact_match"] > max(0.5, before["eval_exact_match"])\n'
            'assert after["eval_loss"] < before["eval_loss"]\n'
            'assert after["eval_padfix/pad_fraction"] > 0  # the evaluation computed no padding either\n'
            'assert tokenizer.padding_side == "right"  # and left everything as it was\n'
        ),
        9: "assert exactly_right(student) > untaught + 0.3\n",
        10: SAME,
        11: "assert 'rivière' in answers or 'jardin' in answers\n",
    },
    "4": {
        5: (
            "assert (packed - alone).abs().max() < 1e-3\n"
            "assert (with_the_line - padded).norm() < 1e-3 * padded.norm()\n"
            "assert stats.packed_tokens < stats.padded_tokens / 2\n"
        ),
        6: ("assert (rewards - alone).abs().max() < 1e-3 < (plain - alone).abs().max()\n"),
        7: SAME,
        8: "assert len(ids) > len(tokenizer(questions[0])['input_ids'])\n",
    },
    "5": {
        5: (
            "replies = sum(m['role'] == 'assistant' for row in rollouts for m in row['messages'])\n"
            "assert len(turns) == len(rows) == replies\n"
        ),
        6: "assert [cells[i, 0] for i in range(count)] == [0] + [-1] * (count - 1)\n",
        8: (
            'assert account["distinct, grouped"] < account["distinct"] < account["real"] < account["padded"]\n'
            'assert account["distinct, grouped"] < 0.25 * account["padded"]\n'
        ),
        9: "assert len(pairs) == 3 and all(len(pair['prompt']) == 1 for pair in pairs)\n",
        11: (
            "assert apart < 1e-4\n"
            "assert tokens['prefix_sharing'] < 0.75 * tokens['padding-free']\n"
            "assert tokens['group_by_prefix'] < 0.75 * tokens['prefix_sharing']\n"
        ),
        12: SAME + "assert all(losses[-1] < losses[0] - 0.5 for losses in (*curves, runs['group_by_prefix'][1]))\n",
        13: "assert 0 < len(ids) <= 12\n",
    },
}
"""By the number of a notebook: what must hold after so many of its code cells."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / name, as_version=4)


def with_claims(notebook: nbformat.NotebookNode, number: str) -> nbformat.NotebookNode:
    """The notebook with half of a race's steps, and with a cell after each one that something is claimed of."""
    cells, count = [], 0
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=40", "steps=20")
        cells.append(cell)
        count += cell.cell_type == "code"
        if cell.cell_type == "code" and count in CLAIMS[number]:
            cells.append(nbformat.v4.new_code_cell(CLAIMS[number][count]))
    notebook.cells = cells
    return notebook


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in a kernel of this environment, whatever kernels are registered for the user."""
    client = nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})  # tiny models; the other cores have tests of their own


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
