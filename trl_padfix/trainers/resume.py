"""The checkpoint that a training resumes from."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path


__all__ = ["checkpoint_to_resume"]

logger = logging.getLogger(__name__)

NEWEST = ("true", "latest", "last")
NONE = ("", "false", "none", "null")

_STATE = "trainer_state.json"
"""The file that transformers writes last."""


def checkpoint_to_resume(resume_from: str | bool | None, output_dir: str | Path) -> str | bool | None:
    """
    The checkpoint that `resume_from_checkpoint` names.

    `True`, `"true"` and `"latest"` name the newest folder `checkpoint-STEP` in `output_dir` whose state can be read.
    A newer folder without its state, in which a save was cut off, is skipped with a warning: transformers would stop
    there. transformers itself checks a folder that is named, and everything else in it.

    Raises:
        ValueError: If no checkpoint in `output_dir` has a state.
    """
    word = str(resume_from).lower()
    if resume_from is None or word in NONE:
        return None
    if word not in NEWEST or Path(str(resume_from)).is_dir():
        return resume_from
    folders = Path(output_dir).glob("checkpoint-*")
    steps = {int(f.name[11:]): f for f in folders if f.name[11:].isdecimal() and f.is_dir()}
    for step in sorted(steps, reverse=True):
        with suppress(OSError, ValueError):
            json.loads((steps[step] / _STATE).read_text())
            logger.info(f"Resuming from {steps[step]}.")
            return str(steps[step])
        logger.warning(f"Skipping {steps[step]}: it has no complete `{_STATE}`, so its save was cut off.")
    raise ValueError(
        f"`resume_from_checkpoint={resume_from}`: there is no complete checkpoint in {str(output_dir)!r}. Name a "
        "folder, or leave `resume_from_checkpoint` out to begin from the start."
    )
