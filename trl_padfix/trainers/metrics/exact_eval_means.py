"""Evaluation means over all items of a set instead of over its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from accelerate import Accelerator

from ..data.batch_metadata import pop_metadata
from ..distributed import data_replicas, datasets_of
from ..field_types import temporarily_set
from ..parts import Evaluation, Part, Step


__all__ = ["ExactMeans", "without_gathering", "without_repeated_rows"]


class ExactMeans(Part):
    """
    `exact_eval_means`: evaluation means over all pairs or tokens.

    TRL averages loss and metrics over the batches of an evaluation, so a last batch with few rows weighs as much as a
    full one.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._sums: dict[str, torch.Tensor] = {}
        """Of loss and metrics the sum over all items, and their number, `(2,)`."""

    def ready(self) -> None:
        """
        Raises:
            NotImplementedError: If rows that several processes repeat in a last batch could not be left out of a mean.
        """
        trainer, args = self.trainer, self.trainer.args
        processes = trainer.accelerator.num_processes // data_replicas(trainer)
        if not self.settings.exact_eval_means or processes == 1:
            return
        gives_logits = trainer.compute_metrics is not None and not self.settings.predict_with_generate
        has_images = getattr(trainer, "_is_vision_dataset", False)
        stays_whole = gives_logits or has_images or trainer.padding.task.packs_rows()
        for name, dataset in datasets_of(trainer).items():
            is_stream = not isinstance(dataset, Sized)
            if name != "train" and (is_stream or (stays_whole and len(dataset) % (args.eval_batch_size * processes))):
                raise NotImplementedError(
                    f"`exact_eval_means=True` counts each row of the {name} dataset once, and {processes} processes "
                    "repeat some to fill their last batches, which cannot be left out of a stream, of packed "
                    "rows, of rows with images, or of what `compute_metrics` is given. Set it to False, or choose a "
                    "`per_device_eval_batch_size` that times the processes divides the rows."
                )

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        task, accelerator = self.trainer.padding.task, self.trainer.accelerator
        if not self.settings.exact_eval_means or step.mode == "train" or task.loss_items(step.inputs) is None:
            yield
            return
        has_own = True
        if not step.returns_outputs:
            step.inputs, has_own = without_repeated_rows(
                accelerator, step.inputs, task.rows_per_item, data_replicas(self.trainer)
            )
        items = {"loss": task.loss_items(step.inputs), **task.metric_items(step.inputs)}
        metrics = self.trainer._metrics["eval"]
        logged = {name: len(values) for name, values in metrics.items()}
        with without_gathering(accelerator):
            yield
        new = {name: values[-1] for name, values in metrics.items() if len(values) > logged.get(name, 0)}
        names = ["loss", *sorted(new)]
        weights = has_own * torch.stack([items.get(name, items["loss"]) for name in names]).float()
        values = torch.cat([step.loss.detach().float().reshape(1), weights.new_tensor([new[n] for n in names[1:]])])
        totals = torch.stack([torch.where(weights > 0, values * weights, 0.0), weights], dim=1)
        if accelerator.num_processes > 1:
            totals = accelerator.reduce(totals)
        for name, total in zip(names, totals.cpu().double(), strict=True):
            self._sums[name] = self._sums.get(name, 0) + total

    def _mean(self, name: str) -> dict[str, float]:
        """The mean of that name, if it has items."""
        total, items = self._sums.get(name, torch.zeros(2)).tolist()
        return {name: total / items} if items else {}

    @contextlib.contextmanager
    def evaluation(self, evaluation: Evaluation) -> Iterator[None]:
        self._sums = {}
        yield
        for mean in self._mean("loss").values():
            evaluation.output.metrics[f"{evaluation.prefix}_loss"] = mean

    def log(self, logs: dict[str, float], mode: str) -> None:
        if self.settings.exact_eval_means and mode == "eval":
            metrics = self.trainer._metrics["eval"]
            for name in metrics.keys() - {"num_tokens"}:
                metrics[name] = list(self._mean(name).values()) or metrics[name]  # TRL logs the means of these lists


@contextlib.contextmanager
def without_gathering(accelerator: Accelerator) -> Iterator[None]:
    """Until the block ends, `accelerator.gather` and `gather_for_metrics` return their argument unchanged."""

    def same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    with temporarily_set(accelerator, "gather", same), temporarily_set(accelerator, "gather_for_metrics", same):
        yield


def without_repeated_rows(
    accelerator: Accelerator, batch: dict[str, Any], rows_per_item: int, alike: int = 1
) -> tuple[dict[str, Any], bool]:
    """
    A batch without the rows that accelerate repeats from the first batch to fill up the last one, and whether it has
    any others; where it has none, it is as it was given. Every `alike` processes have the same batch.
    """
    state, rows = accelerator.gradient_state, batch["input_ids"].shape[0]
    whole, (batch, _) = batch, pop_metadata(batch)
    if accelerator.num_processes == alike or not state.end_of_dataloader or state.remainder <= 0:
        return whole, True
    items = rows // rows_per_item
    own = min(max(state.remainder - accelerator.process_index // alike * items, 0), items)
    arrays = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    if own in (0, items) or any(v.shape[0] not in (items, rows) for v in arrays.values()):
        return whole, own > 0
    return {**batch, **{k: torch.cat([part[:own] for part in v.split(items)]) for k, v in arrays.items()}}, True
