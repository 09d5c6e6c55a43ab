"""
Common base of trainers that generate completions, and then compute log-probabilities of prompt and completion.

These scoring forwards are packed. Generation stays as it is.
"""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch.utils.data import DataLoader
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ...core.call.batch_cache import batch_cache
from ..base import PARTS, PaddingFreeMixin, hook
from ..batching.row_order import RowOrder
from ..checks.user_code import custom_batch_name
from ..data.batch_rows import numbered_images, without_images
from ..messages import say
from ..parts.generation import Generation
from ..parts.part import entered
from ..task import Task


__all__ = ["OnlineTask", "OnlineTrainer", "trained_tokens"]

logger = get_logger(__name__)


def trained_tokens(batch: dict[str, Any]) -> torch.Tensor:
    """Number of completion tokens that are trained on. Answers of tools, where `tool_mask` is 0, are not."""
    mask = batch["completion_mask"]
    return (mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]).sum()


class OnlineTask(Task):
    """Each row is a prompt with a completion; the rows of a group have one prompt."""

    generates_rows = True
    min_max_metrics = {"clip_ratio/low_min": torch.min, "clip_ratio/high_max": torch.max}

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return [{"input_ids": ids, "attention_mask": mask}]

    def trimmed(self, batch: dict[str, Any]) -> dict[str, Any]:
        masks = [batch["prompt_mask"], batch["completion_mask"]]
        # `mask_truncated_completions` masks whole completions: one column of them stays.
        used = [mask.any(0).nonzero().flatten().tolist() or [0] for mask in masks]
        kept = [[*range(columns[0], columns[-1] + 1)] for columns in used]
        widths = [mask.shape[1] for mask in masks]
        both = [*kept[0], *(widths[0] + column for column in kept[1])]  # of token types, of images for example
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) == len(masks[0]):
                i = int(not name.startswith("prompt_"))
                columns = {sum(widths): both, widths[i]: kept[i]}.get(value.shape[1])
                batch[name] = value if columns is None else value[:, columns]
        return batch

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        return len(chunk["prompt_ids"]) / len(batch["prompt_ids"])

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"": trained_tokens(batch)}

    def rows_are_independent(self) -> bool:
        return True

    def may_regroup(self) -> bool:
        """
        Whether rows may move between the micro-batches of one optimizer step.

        TRL shuffles the rows of a generation over its micro-batches, which scatters the completions of a prompt. The
        step does not depend on this order under three conditions: the loss is a sum over rows with weights that do
        not depend on their micro-batch, the micro-batches of a generation fill whole steps, and no user code acts on
        the loss or the gradient of a micro-batch.
        """
        trainer, args, settings = self.trainer, self.trainer.args, self.trainer.padding.settings
        accumulated = args.gradient_accumulation_steps
        steps = vars(args).get("steps_per_generation", accumulated)
        # Under a budget a batch keeps exactly TRL's rows; one big batch shares all prefixes of a step.
        shares = trainer.padding.is_removed and settings.prefix_sharing and settings.max_tokens_per_batch is None
        is_sum = self.rows_are_independent() and not self.balances_experts()
        if not (shares and is_sum) or accumulated == 1 or (steps % accumulated and accumulated % steps):
            return False
        if of_user := custom_batch_name(trainer):
            logger.warning_once(
                f"Rows stay in TRL's micro-batches, because `{of_user}` may compare the rows of a micro-batch. "
                "With `gradient_accumulation_steps=1` a step shares all prefixes."
            )
            return False
        said = (
            "Rows move between the micro-batches of a step, to share prompts: means over micro-batches (`kl`, "
            "`entropy`, `clip_ratio`) differ from TRL's; the step does not."
        )
        trainer.padding.handles[0].say_once(said, tell=say)
        return True


class OnlineTrainer(PaddingFreeMixin):
    """[`PaddingFreeMixin`] for a TRL trainer that generates its completions: a mixin in front of TRL's class."""

    task_class = OnlineTask
    part_classes = tuple(part for part in PARTS if part not in (RowOrder, Generation))

    @hook
    def get_train_dataloader(self) -> DataLoader:
        rows, group = (vars(self.args).get(name) or 1 for name in ("generation_batch_size", "num_generations"))
        if isinstance(self.train_dataset, Sized) and len(self.train_dataset) < rows // group:
            raise ValueError(
                f"A generation takes {rows // group} prompts, and `train_dataset` has {len(self.train_dataset)}: TRL "
                f"would take no step. Lower `per_device_train_batch_size={self.args.per_device_train_batch_size}`."
            )
        return super().get_train_dataloader()

    @hook
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # Calls with a KV cache are never packed. Generation without a cache and paged generation must not be either.
        with entered(handle.disabled() for handle in self.padding.handles):
            return super()._generate_single_turn(*args, **kwargs)

    @hook
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with entered(handle.disabled() for handle in self.padding.handles):  # a reward may call the policy
            return super()._calculate_rewards(*args, **kwargs)

    @hook
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with batch_cache():
            return super()._generate_and_score_completions(inputs)

    @hook
    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self.padding.budget.budget is not None:
            batch_size = len(input_ids)  # one call: the budget splits it, not TRL's number of rows
            given = {f"argument {i}": value for i, value in enumerate(args, 6)} | kwargs
            require_rows_in(without_images(given), batch_size, "`max_tokens_per_batch` splits them. Leave it out.")
        score = super()._get_per_token_logps_and_entropies
        with self.padding.budget.split_forwards(input_ids, attention_mask, images=numbered_images(kwargs)):
            if args:
                return score(model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs)
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)

    @hook
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        task, buffered = self.padding.task, self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # An evaluation buffers nothing, and a later step of a generation has its rows in the buffer already.
        if self._buffered_inputs is buffered or not task.may_regroup():
            return inputs
        window = min(self.args.gradient_accumulation_steps, len(self._buffered_inputs))
        self._buffered_inputs = group_prompts(self._buffered_inputs, window)
        return self._buffered_inputs[self._step % len(self._buffered_inputs)]


def group_prompts(batches: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """
    Make rows with the same prompt and images neighbors within each `window` of micro-batches.

    Args:
        batches (`list[dict]`):
            Micro-batches with `prompt_ids` of shape `(B, P)`. Every value that is not a scalar has `B` rows, except
            images: `num_images` gives their number per row.
        window (`int`):
            Number of micro-batches of one optimizer step; divides `len(batches)`.

    Returns:
        `list[dict]`: the same number of micro-batches, with the same sizes.

    Raises:
        ValueError: If a value is neither a scalar nor has an entry for each row.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix.trainers.methods.online import group_prompts

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in group_prompts(batches, window=2)]
    [[[1], [1]], [[2], [2]]]

    ```
    """
    grouped: list[dict[str, Any]] = []
    for begin in range(0, len(batches), window):
        step = [split_pixel_values_by_grid(batch) for batch in batches[begin : begin + window]]
        for batch in step:
            require_rows_in(batch, len(batch["prompt_ids"]), "`prefix_sharing` moves them. Set it to False.")
        keys = torch.cat([torch.cat([b["prompt_ids"], _image_keys(b)], dim=1) for b in step])
        # Rows with equal keys get one number; the stable sort by this number keeps their order.
        order = keys.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
        rows = [len(b["prompt_ids"]) for b in step]
        columns = {}
        for name, value in step[0].items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                columns[name] = torch.cat([b[name] for b in step])[order].split(rows)
            elif isinstance(value, list):
                entries = [v for b in step for v in b[name]]
                moved = iter([entries[i] for i in order.tolist()])
                columns[name] = [list(islice(moved, count)) for count in rows]
            else:
                columns[name] = [b[name] for b in step]
        regrouped = ({name: values[i] for name, values in columns.items()} for i in range(len(step)))
        grouped += [unsplit_pixel_values_by_grid(batch) for batch in regrouped]
    return grouped


def require_rows_in(batch: dict[str, Any], count: int, remedy: str) -> None:
    """Raise a `ValueError` for a value of a batch that is neither a scalar nor has an entry for each row."""
    for name, value in batch.items():
        is_tensor = isinstance(value, torch.Tensor | np.ndarray)
        is_scalar = isinstance(value, str) or (value.ndim == 0 if is_tensor else not isinstance(value, Sized))
        if not is_scalar and (isinstance(value, dict) or len(value) != count):
            raise ValueError(
                f"`{name}` of a batch does not have one value for each of its {count} rows, so it is unknown which "
                f"of its {len(value)} values belong to a row, and {remedy}"
            )


def _image_keys(batch: dict[str, Any]) -> torch.Tensor:
    """A number that stands for the images of each row, `(B, 1)`: equal for equal images, 0 without images."""
    ids, pixels = batch["prompt_ids"], batch.get("pixel_values")
    if pixels is None or len(pixels) != len(ids):
        return ids.new_zeros(len(ids), 1)
    # Reinterpret the bits as integers, so that they fit next to the token ids and compare exactly.
    return torch.stack([row.double().sum() for row in pixels]).view(torch.int64).to(ids)[:, None]
