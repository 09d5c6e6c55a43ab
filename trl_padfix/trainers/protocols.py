"""The trainer that tasks and parts read."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


__all__ = ["PaddingFreeTrainer"]


class PaddingFreeTrainer(Trainer):
    """A trainer as tasks and parts use it: TRL's class with `PaddingFreeMixin`, or a test's stand-in."""

    accelerator: Any  # many attributes are optional: only the parallelism that needs them sets them
    padding: Any  # [`Padding`], whose parts read the trainer
