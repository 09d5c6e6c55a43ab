"""Merges the metrics of chunks into those that TRL logs of a batch: means over all rows and all processes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object

from ...core.context import temporarily_set
from ..distributed import data_replicas, local_metrics_only
from ..parts.part import PaddingFreeTrainer


__all__ = ["ChunkMetrics"]


class ChunkMetrics:
    """
    The metrics of the chunks of a batch.

    TRL gathers its metrics in each forward, equally many rows from every process. Here each chunk has local metrics.
    One reduction at the end weights means over rows by numbers of rows, and means over tokens by numbers of tokens.
    TRL then has one value for the batch, as without a budget.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        self.trainer = trainer
        self.tokens = trainer._total_train_tokens
        self.values: list[tuple[dict[str, list[float]], Mapping[str, Any]]] = []

    @contextlib.contextmanager
    def chunk(self, num_items: Mapping[str, Any]) -> Iterator[None]:
        """
        A block with the loss of a chunk.

        `num_items`: number of items that each metric is a mean over, by its name; `""` stands for all other metrics.
        """
        metrics = self.trainer._metrics
        saved, metrics["train"] = metrics["train"], defaultdict(list)
        try:
            # TRL divides the tokens of processes that share rows by `_tp_size`; `log` does so after the reduction.
            with local_metrics_only(self.trainer.accelerator), temporarily_set(self.trainer, _tp_size=1):
                yield
            self.values.append((metrics["train"], num_items))
        finally:
            metrics["train"] = saved

    def log(self) -> None:
        """Give TRL the value of each metric for the whole batch."""
        trainer, task = self.trainer, self.trainer.padding.task
        # The names of all processes: a process without rows of some kind lacks their metrics.
        names = sorted(set(gather_object([name for values, _ in self.values for name in values])))
        averaged = [name for name in names if name != "num_tokens"]
        means, tokens = self._means(averaged, trainer._total_train_tokens - self.tokens)
        for name in filter(task.min_max_metrics.get, averaged):
            means[name] = self._extreme(name)
        metrics = trainer._metrics["train"]
        for name, mean in task.merge_metrics(means).items():
            metrics[name].append(mean)
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

    def _extreme(self, name: str) -> float:
        """The minimum or maximum over all rows; NaN if no row has a value."""
        extreme_of, accelerator = self.trainer.padding.task.min_max_metrics[name], self.trainer.accelerator

        def extreme(values: torch.Tensor) -> torch.Tensor:
            values = values[~values.isnan()]
            return extreme_of(values).reshape(1) if len(values) else values.new_full((1,), float("nan"))

        local = torch.tensor([values[name][-1] for values, _ in self.values if values.get(name)])
        return float(extreme(accelerator.gather(extreme(local).to(self.trainer.args.device))))
