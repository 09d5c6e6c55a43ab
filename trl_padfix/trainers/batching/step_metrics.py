"""What TRL logs of a step that is computed in pieces: means over all of them and over all processes."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object

from ..distributed import data_replicas
from ..field_types import temporarily_set
from ..metrics.exact_eval_means import without_gathering


__all__ = ["StepMetrics"]


class StepMetrics:
    """
    The metrics of the pieces of a step.

    TRL gathers its metrics forward by forward, equally many rows from every process. Here each process keeps its own,
    and one reduction at the end of the step adds them up: means over rows by the weights of the rows, means over
    tokens by the numbers of tokens.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.tokens = trainer._total_train_tokens
        self.found: list[tuple[dict[str, list[float]], Mapping[str, Any]]] = []

    @contextlib.contextmanager
    def piece(self, sizes: Mapping[str, Any], reduces: bool = True) -> Iterator[None]:
        """
        A block with the loss of a piece.

        `sizes`: of how many items each metric is the mean, by its name; `""` stands for all others. `reduces`: whether
        `accelerator.reduce` still reduces, as where processes have equally many pieces.
        """
        metrics, accelerator = self.trainer._metrics, self.trainer.accelerator
        saved, metrics["train"] = metrics["train"], defaultdict(list)
        same = accelerator.reduce if reduces else lambda tensor, *args, **kwargs: tensor
        try:
            # Tokens of processes with the same rows are divided by their number behind the reduction.
            with (
                without_gathering(accelerator),
                temporarily_set(accelerator, "reduce", same),
                temporarily_set(self.trainer, "_tp_size", 1),
            ):
                yield
            self.found.append((metrics["train"], sizes))
        finally:
            metrics["train"] = saved

    def join(self, tokens_again: int = 0) -> None:
        """Log the means of all pieces; `tokens_again` of them were computed to keep step with other processes."""
        trainer, task = self.trainer, self.trainer.padding.task
        accelerator, device = trainer.accelerator, trainer.args.device
        several = accelerator.num_processes > 1
        names = sorted({name for values, _ in self.found for name in values})
        if several:  # a process may have no rows of some kind
            names = sorted(set(gather_object(names)))
        counts_tokens = "num_tokens" in names
        names = [name for name in names if name != "num_tokens"]
        table = torch.zeros(2, len(names), dtype=torch.float64)
        for values, sizes in self.found:
            for i, name in enumerate(names):
                size = float(sizes.get(name, sizes[""]))
                if size and values.get(name):
                    table[:, i] += torch.tensor([values[name][-1] * size, size], dtype=torch.float64)
        seen = trainer._total_train_tokens - self.tokens - tokens_again
        totals = torch.cat([table.flatten(), table.new_tensor([seen])])
        if several:  # else it stays on the host: not every device has float64
            totals = accelerator.reduce(totals.to(device))
        *totals, seen = totals.tolist()
        sums, weights = totals[: len(names)], totals[len(names) :]
        means = {name: total / n if n else 0.0 for name, total, n in zip(names, sums, weights, strict=True)}
        for name in filter(task.extremes.get, names):
            take = task.extremes[name]
            own = [values[name][-1] for values, _ in self.found if values.get(name)] or [math.nan]
            every = accelerator.gather(take(torch.tensor(own, device=device).float()))
            means[name] = float(take(every[~every.isnan()]))
        metrics = trainer._metrics["train"]
        for name, mean in task.joined_metrics(means).items():
            metrics[name].append(mean)
        if counts_tokens:
            trainer._total_train_tokens = self.tokens + int(seen) // data_replicas(trainer)
            metrics["num_tokens"] = [trainer._total_train_tokens]
