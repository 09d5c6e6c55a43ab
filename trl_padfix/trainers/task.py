"""What the trainers differ in: a task says what the rows of a trainer are, and what its loss makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from datasets import Dataset

from ..core.handle import PaddingRemoval
from .checks import check_vocabulary, require_columns, require_rows
from .custom_loss import has_own_loss
from .data.row_checks import sound_rows
from .data.turns import check_tool_messages


__all__ = ["PairTask", "Task"]


class Task:
    """The task of a trainer that nobody here has heard of; a subclass fills in what differs."""

    # What a dataset must have

    columns: ClassVar[list[set[str]]] = []
    """Columns that a dataset must have: all of one of these sets. Without any it is not looked at."""

    needs = ""
    """What needs the columns, as the beginning of a sentence."""

    texts: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")
    """Columns with text or messages, none of which may be missing in a row."""

    takes_images = True
    """Whether image data is left to TRL and to `remove_padding` to accept or refuse."""

    # What a batch is

    collators: ClassVar[dict[type, type]] = {}
    """TRL's collators, and those of this package that replace them, so that the padding side is honoured."""

    layout_policy: bool | None = None
    """
    Whether batches come from their collator with the layouts of their forwards: `True` if every forward of a step, and
    of an evaluation, is within `compute_loss`; `None` for those of training only, and where `padded_batches` is the
    one below.
    """

    generates_for_groups = False
    """Whether rows are generated before a step in a way that gives processes which share packed rows the same ones."""

    rows_per_item = 1
    """Rows of a batch that belong together: two where pairs come as `[chosen, rejected]`."""

    measure: type[Any] | None = None
    """The `RowMeasure` of the data, for `max_tokens_per_batch` and `group_by_prefix`."""

    # What TRL logs

    extremes: ClassVar[dict[str, Callable]] = {}
    """Metrics that are no means but the least or the most over rows, and what takes it."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def check(self, config: Any, given: dict[str, Any]) -> None:
        """Errors that are better raised before a model is loaded. `given`: the arguments of `__init__` by name."""

    def check_dataset(self, dataset: Any, given: Any) -> Any:
        """
        The dataset that TRL is to prepare, with sound rows, or an error. `given` has the arguments of TRL's
        `_prepare_dataset`: `dataset_name`, `processing_class`, `args`, ...
        """
        if not self.columns:
            return dataset
        require_rows(dataset, given.dataset_name)
        require_columns(dataset, given.dataset_name, self.columns, self.needs)
        check_vocabulary(given.processing_class)
        return sound_rows(dataset, given.dataset_name, self.texts)

    def check_prepared(self, prepared: Dataset, rows: int, given: Any) -> None:
        """Errors and warnings about what TRL has made of `rows` rows. Streams do not come here."""

    def attached(self) -> None:
        """Errors that need both the data as TRL has prepared them and the models with padding removed."""

    def precomputes_layouts(self, is_training: bool) -> bool:
        """What `layout_policy` says of batches of training, or of evaluation."""
        plain = is_training and type(self).padded_batches is Task.padded_batches
        return plain if self.layout_policy is None else self.layout_policy

    def packs_rows(self) -> bool:
        """Whether TRL puts several sequences into a row, which are then kept apart also without `padding_free`."""
        return False

    def pools_by(self, handle: PaddingRemoval) -> int | None:
        """The pad token by which a sequence classifier looks for the token that it scores."""
        return None

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy that a step on `inputs` takes; none where they are not known."""
        if not isinstance(inputs.get("input_ids"), torch.Tensor):
            return []
        return [{name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}]

    def parity_inputs(self, inputs: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The batch whose images and token types the parity check gives the model with one of `padded_batches`."""
        return inputs

    def scoring_module(self, model: Any) -> Any:
        """What the loss calls of a model, where that is a part of it: its forwards are split by a budget."""
        return model

    def model_for_loss(self, model: Any) -> Any:
        """The model that TRL's loss is given, where it would hand it something that it must not see."""
        return model

    def scored(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch as the loss is to see it."""
        return inputs

    def for_metrics(self, inputs: dict[str, Any], logits: Any, labels: Any) -> tuple[Any, Any]:
        """What `compute_metrics` is given of a batch, of the logits and labels that TRL hands over."""
        return logits, labels

    def counted(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The batches as transformers is to count their labels."""
        return batches

    def loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """Number of items (pairs, tokens) that the loss of a batch is a mean over, if that is known."""
        return None

    def metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Number of items that single metrics are means over, where it is not the number of the loss."""
        return {}

    def compares_rows(self) -> bool:
        """Whether the loss of a forward is no mean over its rows, so that it takes two passes to split it."""
        return getattr(self.trainer, "aux_loss_enabled", False) or has_own_loss(self.trainer)

    def loss_weight(self, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        """
        Of a loss that compares rows: the factor by which that of a `piece`, some rows of a batch, goes into the loss
        of the `whole` batch, where that is the sum over its pieces; `None` where it is not.
        """
        return None

    def in_pieces(self, inputs: dict[str, Any], splits: Any) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Around the losses of the pieces of a batch; gives the batch that they are rows of."""
        return contextlib.nullcontext(inputs)

    def joined_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics of a step, of their means over its pieces."""
        return means

    def averages_tokens(self) -> bool:
        """Whether the loss of a forward is a mean over its tokens, whatever else is in the step."""
        return False

    def reason_not_to_split(self) -> str | None:
        """Why a budget cannot split the steps of this trainer, if that is so."""
        return None


class PairTask(Task):
    """Rows are the chosen completions of a batch, and then its rejected ones."""

    rows_per_item = 2

    def check_dataset(self, dataset: Any, given: Any) -> Any:
        dataset = super().check_dataset(dataset, given)
        check_tool_messages(dataset, given.processing_class, given.dataset_name, ("prompt", "chosen"))
        return dataset

    def loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        return torch.tensor(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)
