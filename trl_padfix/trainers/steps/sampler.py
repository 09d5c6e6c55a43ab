"""
Which rows meet in an optimizer step, and on which process.

One sampler serves `group_by_prefix` and `max_tokens_per_batch`: it takes the order of an epoch, brings rows that begin
alike into one step, and deals the rows of each step out with even work. The result depends on the seed, the epoch and
the data alone, so that all processes and a resumed run have one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.logging import get_logger
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler, get_worker_info

from ..field_types import temporarily_set
from .config import check_grouping
from .costs import RowCosts
from .dealing import StepPlan
from .grouping import group_rows
from .measures import RowMeasure


__all__ = ["GroupedStream", "StepMixin", "StepRows", "StepSampler"]

logger = get_logger(__name__)


@dataclass(eq=False)
class StepSampler(Sampler):
    """
    The order of another sampler, rearranged by steps, the same on all processes.

    `grouped` brings rows that begin alike into one step; without it each step keeps its rows. With `shares` it yields
    the rows of a process in a step, for [`StepRows`], and with `equal` these have equally many rows. `epoch` gives the
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


class StepRows(TorchDataset):
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


class StepMixin:
    """`group_by_prefix` for a TRL trainer; stands in front of `PaddingRemovalMixin`."""

    _plan: StepPlan | None = None
    """The steps of the epochs that are running."""

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        super()._check_before(config, given)
        check_grouping(config)
        if not getattr(config, "group_by_prefix", False):
            return
        data, buffer = given.get("train_dataset"), config.group_by_prefix_buffer
        if data is not None and not isinstance(data, Dataset) and buffer is None:
            raise ValueError(
                f"`group_by_prefix=True` looks for rows that begin alike, and the training dataset is a "
                f"`{type(data).__name__}`, which does not show all its rows. Say among how many of them it is to look "
                "(`group_by_prefix_buffer=8192`), or give a `datasets.Dataset`."
            )

    def _set_up_padding(self) -> None:
        super()._set_up_padding()
        if getattr(self.args, "group_by_prefix", False) and getattr(self, "_is_vision_dataset", False):
            raise ValueError(
                "`group_by_prefix=True` compares the tokens of all rows before the first step, and a dataset with "
                "images is tokenized batch by batch. Leave it out."
            )

    def _row_measure(self) -> type[RowMeasure]:
        """What measures the rows of this trainer's data."""
        raise NotImplementedError

    def _measure(self) -> RowMeasure:
        """Token costs of the rows of this trainer's data."""
        mode = getattr(self.args, "truncation_mode", None) or "keep_start"
        sharing = bool(getattr(self.args, "prefix_sharing", False))
        return self._row_measure()(getattr(self.args, "max_length", None), mode, sharing)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        dataset = dataset.rows if isinstance(dataset, StepRows) else dataset
        sampler = super()._get_train_sampler(dataset)
        budget, grouped = (getattr(self.args, n, None) for n in ("max_tokens_per_batch", "group_by_prefix"))
        if sampler is None or (budget is None and not grouped):
            return sampler
        if not isinstance(sampler, RandomSampler | SequentialSampler):
            raise ValueError(
                f"`{'max_tokens_per_batch' if budget is not None else 'group_by_prefix'}` rearranges rows by their "
                f"tokens, and the configuration asks for a `{type(sampler).__name__}`, which does the same in another "
                "way. Leave `train_sampling_strategy` (or `group_by_length`) out."
            )
        if isinstance(sampler, RandomSampler):
            # What accelerate makes of it: all processes draw alike, each epoch from its own seed. Without `data_seed`
            # that is torch's, which is `seed` unless the script has set another since the trainer was made.
            sampler = SeedableRandomSampler(dataset, data_seed=self.args.data_seed)
        costs, plan = self._measure().dataset(dataset), self._plan or self._step_plan()
        if budget is not None:
            self._check_rows(costs, dataset, budget)
        epoch = lambda: int(self.state.epoch or 0)  # noqa: E731
        shares, equal = budget is not None, self._compares_rows()
        return StepSampler(sampler, costs, plan, epoch, grouped=bool(grouped), shares=shares, equal=equal)

    def _check_rows(self, costs: RowCosts, dataset: Dataset, budget: int) -> None:
        """
        Raises:
            ValueError: If a sequence has more tokens than the budget.
        """
        longest = self._measure().longest(dataset)
        if (longest > budget).any():
            raise ValueError(
                f"{(longest > budget).sum()} rows of the train dataset have a sequence of more tokens than "
                f"`max_tokens_per_batch={budget}`, the longest {longest.max()} (row {longest.argmax()}), and no "
                "forward could hold it. Raise the budget, set `max_length`, or drop these rows."
            )
        over = costs.each > budget
        if over.any():
            logger.warning(
                f"{over.sum()} of {len(costs)} rows of the train dataset have more tokens than "
                f"`max_tokens_per_batch={budget}`, the longest {costs.each.max()}: each is a micro-batch of its own, "
                "and needs the memory of its size. Raise the budget, or lower `max_length`."
            )

    def _step_plan(self) -> StepPlan:
        split_batches = self.args.accelerator_config.split_batches
        rows = len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else 0
        processes = 1 if split_batches else self.accelerator.num_processes
        budget = getattr(self.args, "max_tokens_per_batch", None) is not None
        micro_batch = self.args._rows_per_micro_batch if budget else self._train_batch_size
        accumulated = self._train_batch_size // micro_batch if budget else self.args.gradient_accumulation_steps
        return StepPlan(rows, micro_batch, accumulated, processes, self.args.dataloader_drop_last)

    def get_train_dataloader(self) -> Any:
        buffer = getattr(self.args, "group_by_prefix_buffer", None)
        if buffer is None or isinstance(self.train_dataset, Dataset):
            return super().get_train_dataloader()
        stream = GroupedStream(self.train_dataset, self._measure(), self._step_plan(), buffer)
        with temporarily_set(self, "train_dataset", stream):
            return super().get_train_dataloader()
