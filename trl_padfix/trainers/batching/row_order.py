"""
The order of rows: a permutation of TRL's order.

TRL's sampler draws the rows of an epoch, and accelerate gives the processes one batch after another. `group_by_prefix`
brings rows with a shared prefix into one step and one batch. With `padding_free` the batches that processes compute at
the same time cost about equally much. Both only permute the order, and depend only on the data and on TRL's order. So
all processes and a resumed run have the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainingArguments

from ...core.anatomy import find_pretrained
from ..checks.user_code import custom_batch_name, custom_method, is_custom_collator
from ..distributed import data_replicas, max_over_processes
from ..parts.part import Part
from .bin_packing import RowCosts, dataset_costs, partition_equal_rows


__all__ = ["Batches", "RowOrder", "group_rows"]


@dataclass(frozen=True)
class Batches:
    """
    How TRL's batches follow one another in an epoch: `accumulation` times one batch for each process.

    Attributes:
        size (`int`): Rows of a batch.
        processes (`int`, *optional*, defaults to 1): Processes, each with a batch of its own.
        accumulation (`int`, *optional*, defaults to 1): Batches of each process in an optimizer step.
        is_filled (`bool`, *optional*, defaults to `False`):
            Whether accelerate fills the last batches with the first rows of the order (`even_batches`). The permuted
            order ends with these rows, so that no other rows are trained twice.
        quadratic (`float`, *optional*, defaults to 0.0):
            Cost of attention: a row of `n` tokens costs `n + quadratic * n * n`.
    """

    size: int
    processes: int = 1
    accumulation: int = 1
    is_filled: bool = False
    quadratic: float = 0.0

    @property
    def per_step(self) -> int:
        """Rows of an optimizer step, over all processes."""
        return self.size * self.processes * self.accumulation

    def permuted(self, order: Sequence[int] | np.ndarray, costs: RowCosts, is_grouped: bool) -> np.ndarray:
        """
        The order of an epoch, permuted.

        With `is_grouped` rows with a shared prefix come into one step, and within a step into one batch. Otherwise
        each row stays among the batches that the processes compute at the same time.
        """
        order = np.asarray(order, dtype=np.int64)
        filler = np.resize(order, -len(order) % (self.size * self.processes) if self.is_filled else 0)
        if is_grouped:
            order = order[group_rows(costs[order], self.per_step)]
        order = np.concatenate([order, filler])
        size = self.per_step if is_grouped else self.size * self.processes
        if size == self.size:
            return order
        # Trainer fetches all batches of a step first, so accelerate takes some metrics of the last step, if its last
        # batches are filled, from the first rows of each batch alone: that step keeps its order.
        end = len(order) - ((len(order) - 1) % self.per_step + 1 if len(filler) else 0)
        result = [self._balanced(order[i : i + size], costs) for i in range(0, end, size)]
        return np.concatenate([*result, order[end:]])

    def _balanced(self, rows: np.ndarray, costs: RowCosts) -> np.ndarray:
        """Rows of some batches, permuted for equal costs; rows with a shared prefix come into one batch."""
        if len(rows) % (self.size * self.processes):
            return rows
        rows_costs = costs[rows]
        batches = partition_equal_rows(rows_costs, len(rows) // self.size, self.quadratic)
        # Sorted, batches that are computed at the same time cost about equally much.
        beyond = self.quadratic * rows_costs.tokens.astype(float) ** 2
        batches.sort(key=lambda batch: rows_costs.total(batch) + beyond[batch].sum(), reverse=True)
        return np.concatenate([rows[batch] for batch in batches])


@dataclass(eq=False)
class _PermutedSampler(Sampler):
    """The order of another sampler, permuted."""

    sampler: Any
    costs: RowCosts
    batches: Batches
    is_grouped: bool

    def __len__(self) -> int:
        batches, rows = self.batches, len(self.sampler)
        return rows + (-rows % (batches.size * batches.processes) if batches.is_filled else 0)

    def __iter__(self) -> Iterator[int]:
        yield from self.batches.permuted(list(self.sampler), self.costs, self.is_grouped).tolist()

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class RowOrder(Part):
    """The order of rows, for `group_by_prefix`, and for `padding_free` on several processes."""

    has_loader = False
    """Whether a data loader for training was made by TRL, and not by a user's method alone."""

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        data = init_kwargs.get("train_dataset")
        if self.settings.group_by_prefix and data is not None and not isinstance(data, Dataset):
            raise ValueError(
                f"`group_by_prefix=True` compares the beginnings of all rows, but the training dataset is a "
                f"`{type(data).__name__}`, which cannot list its rows. Give a `datasets.Dataset`, or leave it out."
            )

    def attach(self) -> None:
        if not self.settings.group_by_prefix:
            return
        if getattr(self.trainer, "_is_vision_dataset", None):  # `None` for trainers that do not look for images
            raise ValueError(
                "`group_by_prefix=True` compares the tokens of all rows before the first step, and a dataset with "
                "images is tokenized batch by batch. Leave it out."
            )
        if name := custom_method(self.trainer, {"_get_train_sampler"}):
            raise ValueError(f"`group_by_prefix=True` and `{name}` both order the rows. Leave out one of the two.")
        if not self.trainer.padding.task.sequences:
            raise NotImplementedError(
                f"`group_by_prefix` needs the token counts of the rows of {type(self.trainer).__name__}. Leave it out."
            )

    def permute(self, loader: Any) -> Any:
        """A data loader for training, as accelerate has prepared it, whose sampler is permuted."""
        self.has_loader = True
        trainer, is_grouped = self.trainer, bool(self.settings.group_by_prefix)
        dataset, batches = trainer.train_dataset, self._batches()
        if not isinstance(dataset, Dataset) or not (is_grouped or self._balances(dataset, batches)):
            return loader
        # accelerate makes processes draw the same rows (`use_seedable_sampler`), so its sampler stays unchanged.
        sampler = loader.batch_sampler
        while isinstance(sampler, BatchSamplerShard | SkipBatchSampler):
            sampler = sampler.batch_sampler
        loader.set_sampler(_PermutedSampler(sampler.sampler, self.costs(dataset), batches, is_grouped))
        return loader

    def around_training_step(self) -> AbstractContextManager[Any]:
        if self.settings.group_by_prefix and not self.has_loader:
            raise ValueError(
                "`group_by_prefix=True` orders the rows of TRL's data loader, and `get_train_dataloader` of "
                f"{type(self.trainer).__name__} returns another one. Call `super().get_train_dataloader()` in it, or "
                "leave `group_by_prefix` out."
            )
        return super().around_training_step()

    def _balances(self, dataset: Dataset, batches: Batches) -> bool:
        """Whether rows may move to another process: their weight does not depend on other rows of the batch."""
        trainer, task = self.trainer, self.trainer.padding.task
        columns = {name for names in task.sequences for name in names}
        balances = (
            self.settings.padding_free
            and batches.processes > 1
            and bool(columns)
            and columns <= set(dataset.column_names)
            and not is_custom_collator(trainer.data_collator)
            and task.rows_are_independent()
            and not task.balances_experts()
            and custom_batch_name(trainer) is None
        )
        # All processes draw rows in one order, and a hook or a collator may be on one of them only.
        return not max_over_processes(trainer, int(not balances)) if trainer.is_in_train else balances

    def _batches(self) -> Batches:
        args, trainer = self.trainer.args, self.trainer
        processes = trainer.accelerator.num_processes // data_replicas(trainer)
        size = trainer._train_batch_size // (processes if args.accelerator_config.split_batches else 1)
        is_filled = args.accelerator_config.even_batches and not args.dataloader_drop_last and processes > 1
        # Matrix products of a layer cost 24 * H * H operations per token, and attention 2 * H per token before it.
        hidden_size = find_pretrained(trainer.model).config.get_text_config().hidden_size
        return Batches(size, processes, args.gradient_accumulation_steps, is_filled, 1 / (12 * hidden_size))

    def costs(self, rows: Dataset) -> RowCosts:
        """Token costs of rows."""
        args, task = self.trainer.args, self.trainer.padding.task
        mode = vars(args).get("truncation_mode") or "keep_start"
        return dataset_costs(rows, task.sequences, args.max_length, mode, bool(self.settings.prefix_sharing))


def group_rows(costs: RowCosts, step: int) -> np.ndarray:
    """
    The order in which rows with long shared prefixes are in one optimizer step of `step` rows.

    Groups are merged from the longest shared prefix to shorter ones, as long as they fit into a step. They fill the
    steps from the largest group to smaller ones, and among groups of one size in the order of the rows. The prefix of
    all rows does not count, because it is in every step anyway. The result is random only through the order of rows.
    """
    groups = [np.sort(rows) for rows in _groups(costs, step)]
    groups.sort(key=lambda rows: (-len(rows), rows[0]))
    steps: list[list[np.ndarray]] = [[] for _ in range(-(-len(costs) // step))]
    # `heapq` has the smallest item on top, so negative free rows put the step with the most room there. An incomplete
    # last step has less room from the start.
    heap = [(-min(step, len(costs) - i * step), i) for i in range(len(steps))]
    heapq.heapify(heap)
    for rows in groups:
        while len(rows):
            free, index = -heap[0][0], heap[0][1]
            taken, rows = rows[:free], rows[free:]
            steps[index].append(taken)
            heapq.heapreplace(heap, (len(taken) - free, index))
    *full, last = [np.concatenate(groups) for groups in steps] if steps else [costs.order]
    full.sort(key=np.min)
    return np.concatenate([*full, last])


def _groups(costs: RowCosts, limit: int) -> list[np.ndarray]:
    """Groups of at most `limit` rows, merged from the longest shared prefixes to shorter ones."""
    gaps = np.flatnonzero(costs.same_group)  # gap i lies between the sorted rows i - 1 and i
    # Among gaps of equal length the first one changes from epoch to epoch, so a large group is cut differently.
    offset = costs.order[0] if len(costs) else 0
    gaps = gaps[np.lexsort(((gaps + offset) % max(len(costs), 1), -costs.shared[gaps]))]
    # First row of the group that ends at a row, and last row of the group that begins at it.
    first_of, last_of = list(range(len(costs))), list(range(len(costs)))
    for gap in gaps.tolist():
        begin, end = first_of[gap - 1], last_of[gap]
        if end - begin < limit:
            first_of[end], last_of[begin] = begin, end
    groups, begin = [], 0
    while begin < len(costs):
        groups.append(costs.order[begin : last_of[begin] + 1])
        begin = last_of[begin] + 1
    return groups
