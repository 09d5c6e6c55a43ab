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
        self.of_rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def micro_batch(
        self, num_items: Mapping[str, Any], reduces: bool = True, turns: list[int] | None = None
    ) -> Iterator[None]:
        """
        A block with the loss of a micro-batch.

        Args:
            num_items (`Mapping`):
                Number of items that each metric is a mean over, by its name; `""` stands for all other metrics.
            reduces (`bool`, *optional*, defaults to `True`):
                Whether `accelerator.reduce` still reduces. Every process must then have equally many micro-batches.
            turns (`list[int]`, *optional*):
                Of which of TRL's micro-batches each of its items is.
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
            if turns is not None and (values := self.trainer.padding.task.values_of_rows()) is not None:
                blocks = len(values) // len(turns)  # chosen, rejected
                self.of_rows.append((values.flatten(), torch.tensor(turns, device=values.device).repeat(blocks)))
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

    def log(self, repeated_tokens: int = 0, count_of_trl: int = 1) -> None:
        """
        Log the means of all micro-batches, and count their tokens but for those of repeated micro-batches.

        TRL logs the mean over its micro-batches, of which the step has `count_of_trl`.
        """
        trainer, task = self.trainer, self.trainer.padding.task
        accelerator, device = trainer.accelerator, trainer.args.device
        has_others = accelerator.num_processes > 1
        names = sorted({name for values, _ in self.values for name in values})
        if has_others:  # a process may lack rows of some kind, and so their metrics
            names = sorted(set(gather_object(names)))
        counts_tokens = "num_tokens" in names
        names = [name for name in names if name != "num_tokens"]
        table = torch.zeros(2, len(names), dtype=torch.float64)
        for values, num_items in self.values:
            for i, name in enumerate(names):
                count = float(num_items.get(name, num_items[""]))
                if count and values.get(name):
                    table[:, i] += torch.tensor([values[name][-1] * count, count], dtype=torch.float64)
        tokens = trainer._total_train_tokens - self.tokens - repeated_tokens
        totals = torch.cat([table.flatten(), table.new_tensor([tokens])])
        if has_others:  # otherwise it stays on the host: not every device has float64
            totals = accelerator.reduce(totals.to(device))
        *totals, tokens = totals.tolist()
        sums, weights = totals[: len(names)], totals[len(names) :]
        means = {name: total / n if n else 0.0 for name, total, n in zip(names, sums, weights, strict=True)}
        for name in filter(task.min_max_metrics.get, names):
            # Row by row the micro-batches of TRL that a process has no row of are NaN.
            take, own = task.min_max_metrics[name], torch.full((count_of_trl,), math.nan, device=device)
            if self.of_rows:
                rows, turns = map(torch.cat, zip(*self.of_rows, strict=True))
                for turn in turns.unique().tolist():
                    own[turn] = take(rows[turns == turn]).float()
            elif values := [values[name][-1] for values, _ in self.values if values.get(name)]:
                own[:] = take(torch.tensor(values, device=device).float())
            every = accelerator.gather(own[None]).T
            extremes = [take(of_turn[~of_turn.isnan()]) for of_turn in every if not of_turn.isnan().all()]
            means[name] = float(sum(extremes) / len(extremes))
        metrics = trainer._metrics["train"]
        for name, mean in task.merge_metrics(means).items():
            metrics[name] += [mean] * count_of_trl
        if counts_tokens:
            trainer._total_train_tokens = self.tokens + int(tokens) // data_replicas(trainer)
            metrics["num_tokens"] = [trainer._total_train_tokens]
