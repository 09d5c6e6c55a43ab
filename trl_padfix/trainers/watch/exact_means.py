"""Evaluation means over all items of a set instead of over its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from ..data.batch_layouts import without_layouts
from ..parts import Evaluation, Part, Step


__all__ = ["EvalMeans", "ExactMeans", "without_gathering", "without_repeated_rows"]


class EvalMeans:
    """Means of the loss and of TRL's metrics over all items of an evaluation, however they were batched."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(
        self, accelerator: Accelerator, sizes: dict[str, torch.Tensor], loss: torch.Tensor, metrics: dict[str, float]
    ) -> None:
        """
        Add loss and TRL's metrics of one batch of each process.

        `sizes`: how many items each is a mean over; metrics without an entry have that of `"loss"`.
        """
        names = ["loss", *sorted(metrics)]
        weights = torch.stack([sizes.get(name, sizes["loss"]) for name in names]).float()
        values = torch.cat([loss.detach().float().reshape(1), weights.new_tensor([metrics[n] for n in names[1:]])])
        totals = torch.stack([torch.where(weights > 0, values * weights, 0.0), weights])
        if accelerator.num_processes > 1:
            totals = accelerator.reduce(totals)
        for name, total, weight in zip(names, *totals.tolist(), strict=True):
            kept = self._sums.setdefault(name, [0.0, 0.0])
            kept[0] += total
            kept[1] += weight

    def of(self, *names: str) -> dict[str, float]:
        """The means of those of `names` that have items."""
        return {name: self._sums[name][0] / self._sums[name][1] for name in names if self._sums.get(name, [0, 0])[1]}


class ExactMeans(Part):
    """
    `exact_eval_means`: evaluation means over all pairs or tokens.

    TRL averages loss and metrics over the batches of an evaluation, so a last batch with few rows weighs as much as a
    full one.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._means = EvalMeans()

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        task, accelerator = self.trainer.padding.task, self.trainer.accelerator
        if not self.settings.exact_eval_means or step.mode == "train" or task.loss_items(step.inputs) is None:
            yield
            return
        has_own = True
        if not step.returns_outputs:
            own, has_own = without_repeated_rows(accelerator, step.inputs, task.rows_per_item)
            if own is not step.inputs:
                step.inputs = own
        items = {"loss": task.loss_items(step.inputs), **task.metric_items(step.inputs)}
        metrics = self.trainer._metrics["eval"]
        logged = {name: len(values) for name, values in metrics.items()}
        with without_gathering(accelerator):
            yield
        new = {name: values[-1] for name, values in metrics.items() if len(values) > logged.get(name, 0)}
        self._means.add(accelerator, {name: has_own * n for name, n in items.items()}, step.loss, new)

    @contextlib.contextmanager
    def evaluation(self, evaluation: Evaluation) -> Iterator[None]:
        self._means = EvalMeans()
        yield
        for mean in self._means.of("loss").values():
            evaluation.output.metrics[f"{evaluation.prefix}_loss"] = mean

    def log(self, logs: dict[str, float], mode: str) -> None:
        if self.settings.exact_eval_means and mode == "eval":
            # TRL logs the means of these lists.
            metrics = self.trainer._metrics["eval"]
            means = self._means.of(*(name for name in metrics if name != "num_tokens"))
            metrics.update({name: [mean] for name, mean in means.items()})


@contextlib.contextmanager
def without_gathering(accelerator: Accelerator) -> Iterator[None]:
    """Until the block ends, `accelerator.gather` and `gather_for_metrics` return their argument unchanged."""

    def same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    saved = dict(vars(accelerator))
    vars(accelerator).update(gather=same, gather_for_metrics=same)
    try:
        yield
    finally:
        for name in ("gather", "gather_for_metrics"):
            del vars(accelerator)[name]
            vars(accelerator).update({name: saved[name]} if name in saved else {})


def without_repeated_rows(
    accelerator: Accelerator, batch: dict[str, Any], rows_per_item: int
) -> tuple[dict[str, Any], bool]:
    """
    A batch without the rows that accelerate repeats from the first batch to fill up the last one.

    Returns:
        The batch, and whether it has any row that is not repeated; where it has none, it is as it was given.
    """
    state, rows = accelerator.gradient_state, batch["input_ids"].shape[0]
    whole, (batch, _) = batch, without_layouts(batch)
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return whole, True
    items = rows // rows_per_item
    own = min(max(state.remainder - accelerator.process_index * items, 0), items)
    if own in (0, items) or any(v.shape[0] not in (items, rows) for v in batch.values() if _is_array(v)):
        return whole, own > 0
    cut = {k: torch.cat([part[:own] for part in v.split(items)]) for k, v in batch.items() if _is_array(v)}
    return {**batch, **cut}, True


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
