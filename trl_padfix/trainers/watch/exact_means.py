"""Evaluation means over all items of a set instead of over its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from transformers.trainer_utils import EvalLoopOutput

from ..data.batch_layouts import without_layouts


__all__ = ["EvalMeans", "ExactEvalMixin", "without_gathering", "without_repeated_rows"]


class EvalMeans:
    """Means of the loss and of TRL's metrics over all items of an evaluation, however they were batched."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(
        self, accelerator: Accelerator, sizes: dict[str, torch.Tensor], loss: torch.Tensor, metrics: dict[str, float]
    ) -> None:
        """
        Add one batch of each process.

        Args:
            accelerator (`Accelerator`):
                Sums over processes.
            sizes (`dict[str, torch.Tensor]`):
                Number of items that each metric is a mean over; metrics without an entry have that of `"loss"`.
            loss (`torch.Tensor`):
                Loss of the batch.
            metrics (`dict[str, float]`):
                TRL's metrics of the batch.
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


class ExactEvalMixin:
    """
    `exact_eval_means` for a TRL trainer; stands in front of `PaddingRemovalMixin`.

    TRL averages loss and metrics over the batches of an evaluation, so a last batch with few rows weighs as much as a
    full one. With the field set they are means over all pairs or tokens.
    """

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._eval_means = EvalMeans()
            super().__init__(*args, **kwargs)

    _rows_per_item = 1
    """Rows of a batch that belong together: two where pairs come as `[chosen, rejected]`."""

    def _loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """Number of items (pairs, tokens) that the loss of a batch is a mean over, if that is known."""
        raise NotImplementedError

    def _metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Number of items that single metrics are means over, where it is not the number of the loss."""
        return {}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        exact = getattr(self.args, "exact_eval_means", False) and not self.model.training
        if not exact or self._loss_items(inputs) is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        returns_outputs = bool(args[0] if args else kwargs.get("return_outputs"))
        own, has_own = inputs, True
        if not returns_outputs:
            own, has_own = without_repeated_rows(self.accelerator, inputs, self._rows_per_item)
        items = {"loss": self._loss_items(own), **self._metric_items(own)}
        metrics = self._metrics["eval"]
        logged = {name: len(values) for name, values in metrics.items()}
        with without_gathering(self.accelerator):
            result = super().compute_loss(model, own, *args, **kwargs)
        new = {name: values[-1] for name, values in metrics.items() if len(values) > logged.get(name, 0)}
        loss = result[0] if returns_outputs else result
        self._eval_means.add(self.accelerator, {name: has_own * n for name, n in items.items()}, loss, new)
        return result

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self._eval_means = EvalMeans()
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )
        for mean in self._eval_means.of("loss").values():
            output.metrics[f"{metric_key_prefix}_loss"] = mean
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if not self.model.training:
            # TRL logs the means of these lists.
            means = self._eval_means.of(*(name for name in self._metrics["eval"] if name != "num_tokens"))
            self._metrics["eval"].update({name: [mean] for name, mean in means.items()})
        super().log(logs, *args, **kwargs)


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
