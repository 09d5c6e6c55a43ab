"""
Which rows meet in an optimizer step, and on which process.

One sampler serves `group_by_prefix` and `max_tokens_per_batch`: it takes the order of an epoch, brings rows that begin
alike into one step, and deals the rows of each step out with even work. The result depends on the seed, the epoch and
the data alone, so that all processes and a resumed run have one order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.logging import get_logger
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler, get_worker_info

from ..distributed import data_replicas
from ..field_types import temporarily_set
from ..parts import Part
from .bin_packing import StepPlan
from .config import check_grouping
from .image_measures import ImageMeasure
from .measures import RowMeasure
from .prefix_groups import group_rows
from .token_costs import RowCosts


__all__ = ["GroupedStream", "StepDataset", "StepOrder", "StepSampler"]

logger = get_logger(__name__)


@dataclass(eq=False)
class StepSampler(Sampler):
    """
    The order of another sampler, rearranged by steps, the same on all processes.

    `grouped` brings rows that begin alike into one step; without it each step keeps its rows. With `shares` it yields
    the rows of a process in a step, for [`StepDataset`], and with `equal` these have equally many rows. `epoch` gives the
    number of the epoch, because a dataloader that skips batches at several processes does not hand `set_epoch` on to
    its sampler (accelerate 1.15), and a resumed run would see another order.
    """

    order: Sampler[int]
    costs: RowCosts
    plan: StepPlan
    epoch: Callable[[], int]
    grouped: bool = False
    shares: bool = False
    equal: bool = False

    def __len__(self) -> int:
        return len(self.plan) if self.shares else len(self.costs)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.order, SeedableRandomSampler):
            self.order.set_epoch(self.epoch())
        order: Any = list(self.order)
        if self.grouped:
            order = group_rows(order, self.costs, self.plan.per_process * self.plan.processes)
        if self.shares:
            return self.plan.shares(order, self.costs, equal=self.equal)
        return self.plan.in_micro_batches(order, self.costs)


class StepDataset(TorchDataset):
    """
    A dataset whose items are the shares of processes in steps.

    An item is how many rows the step has, the numbers of the process's own rows, and these rows as examples.
    """

    def __init__(self, rows: Dataset, plan: StepPlan):
        self.rows = rows
        self.total_dataset_length = len(plan)  # by which accelerate tells whether the last batch is full

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, share: tuple[int, list[int]]) -> tuple[int, list[int], list[dict[str, Any]]]:
        of_step, rows = share
        return of_step, rows, self.rows.__getitems__(rows)


class GroupedStream(IterableDataset):
    """
    A stream of which `buffer` rows are read ahead and brought into the steps of `plan`, whatever its number of rows.
    """

    def __init__(self, rows: Any, measure: RowMeasure, plan: StepPlan, buffer: int):
        self.rows, self.measure, self.plan, self.buffer = rows, measure, plan, buffer

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        plan = self.plan
        if worker is not None and worker.num_workers > 1:  # workers make batches in turns, each of rows of its own
            plan = StepPlan(0, plan.micro_batch)
        size = plan.per_process * plan.processes
        buffer = max(self.buffer // size, 1) * size  # a buffer ends where a step does
        stream = iter(self.rows)
        while rows := list(islice(stream, buffer)):
            costs = self.measure.examples(rows)
            yield from (rows[i] for i in plan.in_micro_batches(group_rows(range(len(rows)), costs, size), costs))


class StepOrder(Part):
    """Which rows meet in an optimizer step, for `group_by_prefix` and `max_tokens_per_batch`."""

    images: ImageMeasure | None = None
    """Token counts of the rows of a train dataset with images, under a budget."""

    steps: StepPlan | None = None
    """The optimizer steps of the epochs that are running, under a budget."""

    @property
    def is_on(self) -> bool:
        return self.settings.group_by_prefix or self.settings.max_tokens_per_batch is not None

    def check(self, config: Any, given: dict[str, Any]) -> None:
        check_grouping(config)
        if not self.settings.group_by_prefix:
            return
        data = given.get("train_dataset")
        if data is not None and not isinstance(data, Dataset) and self.settings.group_by_prefix_buffer is None:
            raise ValueError(
                f"`group_by_prefix=True` looks for rows that begin alike, and the training dataset is a "
                f"`{type(data).__name__}`, which does not show all its rows. Say among how many of them it is to look "
                "(`group_by_prefix_buffer=8192`), or give a `datasets.Dataset`."
            )

    def attach(self) -> None:
        if self.settings.group_by_prefix and getattr(self.trainer, "_is_vision_dataset", False):
            raise ValueError(
                "`group_by_prefix=True` compares the tokens of all rows before the first step, and a dataset with "
                "images is tokenized batch by batch. Leave it out."
            )

    def loading(self, dataset: Any, is_training: bool) -> contextlib.AbstractContextManager[Any]:
        buffer = self.settings.group_by_prefix_buffer
        if not is_training or buffer is None or isinstance(dataset, Dataset):
            return contextlib.nullcontext()
        return temporarily_set(
            self.trainer, "train_dataset", GroupedStream(dataset, self.measure(), self.plan(), buffer)
        )

    def measure(self) -> RowMeasure:
        """Token costs of the rows of the trainer's data."""
        if self.images is not None:
            return self.images
        args, measure = self.trainer.args, self.trainer.padding.task.measure
        if measure is None:
            raise NotImplementedError(
                f"`max_tokens_per_batch` and `group_by_prefix` need to know what rows of a "
                f"{type(self.trainer).__name__} cost. Leave them out, or give its task a `measure`."
            )
        mode = getattr(args, "truncation_mode", None) or "keep_start"
        return measure(getattr(args, "max_length", None), mode, bool(self.settings.prefix_sharing))

    def plan(self) -> StepPlan:
        """The optimizer steps of an epoch."""
        args, data = self.trainer.args, self.trainer.train_dataset
        split_batches = args.accelerator_config.split_batches
        rows = len(data) if isinstance(data, Dataset) else 0
        processes = 1 if split_batches else self.trainer.accelerator.num_processes // data_replicas(self.trainer)
        micro_batch, accumulated = self.trainer._train_batch_size, args.gradient_accumulation_steps
        if self.settings.max_tokens_per_batch is not None:
            # The rows of a step stay, also where `auto_find_batch_size` has lowered the batch size after all.
            micro_batch = args._rows_per_micro_batch
            accumulated = args.per_device_train_batch_size // micro_batch
        return StepPlan(rows, micro_batch, accumulated, processes, args.dataloader_drop_last)

    def sampler(self, sampler: Any, dataset: Any) -> Any:
        """
        The sampler of the train dataset, in the order of steps.

        Raises:
            ValueError: If it rearranges rows itself, or a row has more tokens than the budget.
        """
        if sampler is None:
            return sampler
        budget = self.settings.max_tokens_per_batch
        if not isinstance(sampler, RandomSampler | SequentialSampler):
            raise ValueError(
                f"`{'max_tokens_per_batch' if budget is not None else 'group_by_prefix'}` rearranges rows by their "
                f"tokens, and the configuration asks for a `{type(sampler).__name__}`, which does the same in another "
                "way. Leave `train_sampling_strategy` (or `group_by_length`) out."
            )
        trainer = self.trainer
        if isinstance(sampler, RandomSampler):
            # What accelerate makes of it: all processes draw alike, each epoch from its own seed. Without `data_seed`
            # that is torch's, which is `seed` unless the script has set another since the trainer was made.
            sampler = SeedableRandomSampler(dataset, data_seed=trainer.args.data_seed)
        costs = self.measure().dataset(dataset)
        if budget is not None:
            self._check_rows(costs, dataset, budget)
        epoch = lambda: int(trainer.state.epoch or 0)  # noqa: E731
        return StepSampler(
            sampler,
            costs,
            self.steps or self.plan(),
            epoch,
            grouped=bool(self.settings.group_by_prefix),
            shares=budget is not None,
            equal=trainer.padding.task.compares_rows(),
        )

    def _check_rows(self, costs: RowCosts, dataset: Dataset, budget: int) -> None:
        """
        Raises:
            ValueError: If a sequence has more tokens than the budget.
        """
        longest = self.measure().longest(dataset)
        if (longest > budget).any():
            raise ValueError(
                f"{(longest > budget).sum()} rows of the train dataset have a sequence of more tokens than "
                f"`max_tokens_per_batch={budget}`, the longest {longest.max()} (row {longest.argmax()}), and no "
                f"forward could hold it. Raise the budget to {longest.max()} at least, set `max_length`, or drop them."
            )
        over = costs.each > budget
        if over.any():
            logger.warning(
                f"{over.sum()} of {len(costs)} rows of the train dataset have more tokens than "
                f"`max_tokens_per_batch={budget}`, the longest {costs.each.max()}: each is a micro-batch of its own, "
                "and needs the memory of its size. Raise the budget, or lower `max_length`."
            )
