"""The metrics that TRL logs, of a step in micro-batches: means over all of them and over all processes."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from ..distributed import data_replicas
from ..metrics.exact_eval_means import local_metrics_only
from ..temporary_attributes import temporarily_set


if TYPE_CHECKING:
    from ..parts import PaddingFreeTrainer


__all__ = ["StepMetrics"]


class StepMetrics:
    """
    The metrics of the micro-batches of a step.

    TRL gathers its metrics after each forward, equally many rows from every process. Here each process keeps local
    metrics, and one reduction at the end of the step adds them up: means over rows with the weights of the rows, means
    over tokens with the numbers of tokens.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        self.trainer = trainer
        self.tokens = trainer._total_train_tokens
        self.values: list[tuple[dict[str, list[float]], Mapping[str, Any]]] = []
        self.row_values: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def micro_batch(
        self, num_items: Mapping[str, Any], reduces: bool = True, trl_index: list[int] | None = None
    ) -> Iterator[None]:
        """
        A block with the loss of a micro-batch.

        Args:
            num_items (`Mapping`):
                Number of items that each metric is a mean over, by its name; `""` stands for all other metrics.
            reduces (`bool`, *optional*, defaults to `True`):
                Whether `accelerator.reduce` still reduces. Every process must then have equally many micro-batches.
            trl_index (`list[int]`, *optional*):
                For each item of the micro-batch, the number of TRL's micro-batch that it is in.
        """
        metrics, accelerator = self.trainer._metrics, self.trainer.accelerator
        saved, metrics["train"] = metrics["train"], defaultdict(list)
        reduce = accelerator.reduce if reduces else lambda tensor, *args, **kwargs: tensor
        try:
            # TRL divides the tokens of processes that share rows by `_tp_size`; `log` does so after the reduction.
            with (
                local_metrics_only(accelerator),
                temporarily_set(accelerator, "reduce", reduce),
                temporarily_set(self.trainer, "_tp_size", 1),
            ):
                yield
            self.values.append((metrics["train"], num_items))
            if trl_index is not None and (values := self.trainer.padding.task.values_of_rows()) is not None:
                blocks = len(values) // len(trl_index)  # chosen, rejected
                self.row_values.append(
                    (values.flatten(), torch.tensor(trl_index, device=values.device).repeat(blocks))
                )
        finally:
            metrics["train"] = saved

    @contextlib.contextmanager
    def discarded(self) -> Iterator[None]:
        """A block with forwards whose metrics and tokens are not logged."""
        try:
            with self.micro_batch({"": 0}):
                yield
        finally:
            self.trainer._total_train_tokens = self.tokens

    def log(self, repeated_tokens: int = 0, trl_count: int = 1) -> None:
        """
        Log the means of all micro-batches, and count their tokens but for those of repeated micro-batches.

        TRL logs the mean over its micro-batches, of which the step has `trl_count`.
        """
        trainer, task = self.trainer, self.trainer.padding.task
        names = sorted({name for values, _ in self.values for name in values})
        if trainer.accelerator.num_processes > 1:  # a process may lack rows of some kind, and so their metrics
            names = sorted(set(gather_object(names)))
        averaged = [name for name in names if name != "num_tokens"]
        means, tokens = self._means(averaged, trainer._total_train_tokens - self.tokens - repeated_tokens)
        for name in filter(task.min_max_metrics.get, averaged):
            means[name] = self._mean_extreme(name, trl_count)
        metrics = trainer._metrics["train"]
        for name, mean in task.merge_metrics(means).items():
            metrics[name] += [mean] * trl_count
        if "num_tokens" in names:
            trainer._total_train_tokens = self.tokens + tokens // data_replicas(trainer)
            metrics["num_tokens"] = [trainer._total_train_tokens]

    def _means(self, names: list[str], tokens: int) -> tuple[dict[str, float], int]:
        """The means of metrics over the items of all processes, and the sum of their `tokens`: one reduction."""
        accelerator, device = self.trainer.accelerator, self.trainer.args.device
        table = torch.zeros(2, len(names), dtype=torch.float64)
        for values, num_items in self.values:
            for i, name in enumerate(names):
                count = float(num_items.get(name, num_items[""]))
                if count and values.get(name):
                    table[:, i] += torch.tensor([values[name][-1] * count, count], dtype=torch.float64)
        totals = torch.cat([table.flatten(), table.new_tensor([tokens])])
        if accelerator.num_processes > 1:  # otherwise it stays on the host: not every device has float64
            totals = accelerator.reduce(totals.to(device))
        *totals, tokens_of_all = totals.tolist()
        sums, weights = totals[: len(names)], totals[len(names) :]
        means = {name: total / n if n else 0.0 for name, total, n in zip(names, sums, weights, strict=True)}
        return means, int(tokens_of_all)

    def _mean_extreme(self, name: str, trl_count: int) -> float:
        """
        The logged value of a metric that is a minimum or maximum over rows.

        As in TRL it is a mean over TRL's micro-batches; the value of each of them is taken over all processes.
        """
        extreme_of, device = self.trainer.padding.task.min_max_metrics[name], self.trainer.args.device
        # NaN: a micro-batch of TRL without a row on this process.
        local = torch.full((trl_count,), math.nan, device=device)
        if self.row_values:
            rows, trl_index = map(torch.cat, zip(*self.row_values, strict=True))
            for i in trl_index.unique().tolist():
                local[i] = extreme_of(rows[trl_index == i]).float()
        elif values := [values[name][-1] for values, _ in self.values if values.get(name)]:
            local[:] = extreme_of(torch.tensor(values, device=device).float())
        gathered = self.trainer.accelerator.gather(local[None]).T  # `(trl_count, processes)`
        extremes = [extreme_of(values[~values.isnan()]) for values in gathered if not values.isnan().all()]
        return float(sum(extremes) / len(extremes))
