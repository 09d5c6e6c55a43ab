"""Computes evaluation means over all items (pairs, tokens) of a dataset instead of means over its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from accelerate import Accelerator

from ..distributed import data_replicas, datasets_of, local_metrics_only, trains_on_images
from ..parts.part import Evaluation, PaddingFreeTrainer, Part, Step


__all__ = ["ExactMeans", "drop_duplicate_rows"]


class ExactMeans(Part):
    """
    `exact_eval_means`: evaluation means over all pairs or tokens.

    TRL takes the mean over batches, so a last batch with few rows has the weight of a full one. Here each value counts
    with its number of items: sum over batches of `value * items`, divided by the sum of `items`. Example: a loss of
    1.0 over 3 pairs and one of 2.0 over 1 pair have the mean 1.25, not 1.5.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._sums: dict[str, torch.Tensor] = {}
        """By name of the loss or metric, the sum over all items and their number, `(2,)`."""

    def acts(self) -> bool:
        return self.settings.exact_eval_means

    def on_init_end(self) -> None:
        """
        Raises:
            NotImplementedError: If duplicate rows in the last batches of several processes cannot be dropped.
        """
        trainer, args = self.trainer, self.trainer.args
        processes = trainer.accelerator.num_processes // data_replicas(trainer)
        if processes == 1:
            return
        # Rows can only be dropped where each tensor of a batch has one entry per row.
        gives_logits = trainer.compute_metrics is not None and not self.settings.predict_with_generate
        keeps_duplicates = gives_logits or trains_on_images(trainer) or trainer.padding.task.packs_rows()
        for name, dataset in datasets_of(trainer).items():
            is_stream = not isinstance(dataset, Sized)
            has_duplicates = is_stream or len(dataset) % (args.eval_batch_size * processes) > 0
            if name != "train" and (is_stream or (keeps_duplicates and has_duplicates)):
                raise NotImplementedError(
                    f"`exact_eval_means=True` counts each row of the {name} dataset once, and {processes} processes "
                    "repeat some to fill their last batches. Repeated rows cannot be dropped from a stream, from "
                    "packed rows, rows with images, or the inputs of `compute_metrics`. Set it to False, or choose a "
                    "`per_device_eval_batch_size` whose product with the number of processes divides the rows."
                )

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        task, accelerator = self.trainer.padding.task, self.trainer.accelerator
        if step.mode != "eval" or task.num_loss_items(step.inputs) is None:
            yield
            return
        if not step.returns_outputs:  # outputs must have a row for each row of the batch
            replicas = data_replicas(self.trainer)
            step.inputs, step.has_rows = drop_duplicate_rows(accelerator, step.inputs, task.rows_per_item, replicas)
        items = {"loss": task.num_loss_items(step.inputs), **task.num_metric_items(step.inputs)}
        metrics = self.trainer._metrics["eval"]
        # TRL appends to these lists during the forward: longer ones have a new value.
        lengths = {name: len(values) for name, values in metrics.items()}
        with local_metrics_only(accelerator):
            yield
        new = {name: values[-1] for name, values in metrics.items() if len(values) > lengths.get(name, 0)}
        names = ["loss", *sorted(new)]
        # A process without rows of its own computed a batch of duplicates; its weights are 0.
        weights = step.has_rows * torch.stack([items.get(name, items["loss"]) for name in names]).float()
        new_values = weights.new_tensor([new[name] for name in names[1:]])
        loss = step.result[0] if isinstance(step.result, tuple) else step.result
        values = torch.cat([loss.detach().float().reshape(1), new_values])
        # `where`, because a metric without items may be NaN, and NaN * 0 is NaN.
        totals = torch.stack([torch.where(weights > 0, values * weights, 0.0), weights], dim=1)
        if accelerator.num_processes > 1:
            totals = accelerator.reduce(totals)
        for name, total in zip(names, totals.cpu().double(), strict=True):
            self._sums[name] = self._sums.get(name, 0) + total

    def _mean(self, name: str) -> float | None:
        """The mean of a loss or metric; `None` if it has no items."""
        total, items = self._sums.get(name, torch.zeros(2)).tolist()
        return total / items if items else None

    @contextlib.contextmanager
    def around_evaluation_loop(self, evaluation: Evaluation) -> Iterator[None]:
        self._sums = {}
        yield
        if (mean := self._mean("loss")) is not None:
            evaluation.output.metrics[f"{evaluation.prefix}_loss"] = mean

    def log(self, logs: dict[str, float], mode: str) -> None:
        if mode == "eval":
            metrics = self.trainer._metrics["eval"]
            for name in metrics.keys() - {"num_tokens"}:
                if (mean := self._mean(name)) is not None:
                    metrics[name] = [mean]  # TRL logs the mean of the list


def drop_duplicate_rows(
    accelerator: Accelerator, batch: dict[str, Any], rows_per_item: int, replicas: int = 1
) -> tuple[dict[str, Any], bool]:
    """
    Drop the rows that accelerate repeats from the first batch to fill the last one.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Its `gradient_state.remainder` is the number of items of the last batch, over all processes.
        batch (`dict`):
            The batch of this process.
        rows_per_item (`int`):
            Rows of an item: 2 for a pair, whose rejected row is `items` rows after the chosen one.
        replicas (`int`, *optional*, defaults to `1`):
            Number of adjacent processes that have the same batch.

    Returns:
        The batch, and whether it has a row that is not a duplicate. A batch of duplicates only is returned unchanged:
        the process must run its forward with the others.

    Example: with a remainder of 3 and 2 items per process, process 0 keeps both of its items and process 1 its first.
    """
    state, rows = accelerator.gradient_state, batch["input_ids"].shape[0]
    if accelerator.num_processes == replicas or not state.end_of_dataloader or state.remainder <= 0:
        return batch, True
    items = rows // rows_per_item
    unique = min(max(state.remainder - accelerator.process_index // replicas * items, 0), items)
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    if unique in (0, items) or any(v.shape[0] not in (items, rows) for v in tensors.values()):
        return batch, unique > 0
    kept = {k: torch.cat([part[:unique] for part in v.split(items)]) for k, v in tensors.items()}
    return {**batch, **kept}, True
