"""What tasks use of a trainer, and a trainer of its token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import Trainer

from ..core.handle import PaddingRemoval
from .data.batch_rows import ImageCounts
from .settings import Settings


__all__ = ["Budget", "TaskPadding", "TaskTrainer"]


class Budget(Protocol):
    """`TokenBudget`, whose module describes the methods."""

    @property
    def budget(self) -> int | None: ...
    def why_all_rows(self) -> str | None: ...
    def compute_loss(
        self, compute: Callable, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any: ...
    def split_forwards(
        self, *concatenated: torch.Tensor, images: ImageCounts | None = None
    ) -> AbstractContextManager[None]: ...


class TaskPadding(Protocol):
    """`Padding`, as tasks use it."""

    settings: Settings
    handles: list[PaddingRemoval]
    budget: Budget | None
    why_padded: str | None

    @property
    def parts(self) -> Sequence[object]: ...
    @property
    def handle(self) -> PaddingRemoval | None: ...
    @property
    def is_removed(self) -> bool: ...


class TaskTrainer(Trainer):
    """A trainer as tasks use it: TRL's class with `PaddingFreeMixin`, or a test's stand-in."""

    accelerator: Any  # many attributes are optional: only the parallelism that needs them sets them

    @property
    def padding(self) -> TaskPadding: ...
