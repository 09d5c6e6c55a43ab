"""
The order of rows: which of them are in one optimizer step, and on which process.

One sampler serves `group_by_prefix` and `max_tokens_per_batch`: it takes the order of an epoch, brings rows with a
shared prefix into one step, and partitions the rows of each step by tokens. The result depends only on the seed, the
epoch and the data, so all processes and a resumed run have the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

from accelerate.data_loader import SeedableRandomSampler
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from ..custom_loss import is_custom_collator
from ..distributed import data_replicas
from ..parts import Part
from ..settings import check_grouping
from ..temporary_attributes import temporarily_set
from .budget_checks import check_budget
from .budget_collator import BudgetCollator
from .image_measures import ImageMeasure, measure_images
from .measures import RowMeasure
from .prefix_groups import group_rows
from .step_plan import Share, StepPlan
from .streams import GroupedStream, StepStream
from .token_costs import RowCosts


if TYPE_CHECKING:
    from transformers import TrainingArguments


__all__ = ["StepDataset", "StepOrder"]

logger = get_logger(__name__)


@dataclass(eq=False)
class StepSampler(Sampler):
    """
    The order of another sampler, rearranged by steps, the same on all processes.

    Args:
        order (`Sampler`):
            The order of an epoch.
        costs ([`RowCosts`]):
            Tokens of the rows.
        plan ([`StepPlan`]):
            The optimizer steps.
        epoch (`Callable`):
            Returns the number of the epoch. A data loader that skips batches on several processes does not pass
            `set_epoch` on to its sampler (accelerate 1.15), and a resumed run would have another order.
        is_grouped (`bool`, *optional*, defaults to `False`):
            Whether rows with a shared prefix are brought into one step. Otherwise each step keeps its rows.
        is_partitioned (`bool`, *optional*, defaults to `False`):
            Whether items are the rows of a process in a step, for [`StepDataset`], and not single rows.
        equal_rows (`bool`, *optional*, defaults to `False`):
            Whether each process has the micro-batches that it has in TRL.
    """

    order: Sampler[int]
    costs: RowCosts
    plan: StepPlan
    epoch: Callable[[], int]
    is_grouped: bool = False
    is_partitioned: bool = False
    equal_rows: bool = False

    def __len__(self) -> int:
        return len(self.plan) if self.is_partitioned else len(self.costs)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.order, SeedableRandomSampler):
            self.order.set_epoch(self.epoch())
        order: Any = list(self.order)
        if self.is_grouped:
            order = group_rows(order, self.costs, self.plan.per_step)
        if self.is_partitioned:
            return self.plan.rows_per_process(order, self.costs, equal=self.equal_rows)
        return self.plan.order_by_micro_batch(order, self.costs)


class StepDataset(TorchDataset):
    """
    A dataset whose items are the rows of a process in a step, indexed by the [`Share`] of the process.

    An item is a tuple: the share and its rows.
    """

    def __init__(self, rows: Dataset, plan: StepPlan):
        self.rows = rows
        self.total_dataset_length = len(plan)  # accelerate computes from it whether the last batch is full

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, share: Share) -> tuple[Share, list[dict[str, Any]]]:
        return share, self.rows.__getitems__(share.rows)


class StepOrder(Part):
    """The rows of each optimizer step, for `group_by_prefix` and `max_tokens_per_batch`."""

    images: ImageMeasure | None = None
    """Token counts of the rows of a train dataset with images, under a budget."""

    steps: StepPlan | None = None
    """The optimizer steps of the epochs that are running, under a budget."""

    @property
    def is_on(self) -> bool:
        return self.settings.group_by_prefix or self.settings.max_tokens_per_batch is not None

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        check_grouping(config)
        if not self.settings.group_by_prefix:
            return
        data = init_kwargs.get("train_dataset")
        if data is not None and not isinstance(data, Dataset) and self.settings.group_by_prefix_buffer is None:
            raise ValueError(
                f"`group_by_prefix=True` looks for rows that begin alike, and the training dataset is a "
                f"`{type(data).__name__}`, which does not show all its rows. Set the number of rows to read ahead "
                "(`group_by_prefix_buffer=8192`), or give a `datasets.Dataset`."
            )

    def attach(self) -> None:
        if self.settings.group_by_prefix and getattr(self.trainer, "_is_vision_dataset", False):
            raise ValueError(
                "`group_by_prefix=True` compares the tokens of all rows before the first step, and a dataset with "
                "images is tokenized batch by batch. Leave it out."
            )

    def around_dataloader(
        self, dataset: Dataset | IterableDataset, is_training: bool
    ) -> contextlib.AbstractContextManager[Any]:
        buffer = self.settings.group_by_prefix_buffer
        if not is_training or buffer is None or isinstance(dataset, Dataset):
            return contextlib.nullcontext()
        if self.settings.max_tokens_per_batch is not None:
            return contextlib.nullcontext()  # its own stream groups the rows
        return temporarily_set(
            self.trainer, "train_dataset", GroupedStream(dataset, self.measure(), self.plan(), buffer)
        )

    @property
    def collator(self) -> Any:
        """The collator that the trainer was given."""
        collator = self.trainer.data_collator
        while isinstance(collator, BudgetCollator):
            collator = collator.collator
        return collator

    @property
    def has_custom_collator(self) -> bool:
        """Whether the collator may look at its whole batch, and gets the batches of TRL: not with images."""
        return self.images is None and is_custom_collator(self.collator)

    def fix_steps(self, rows_with_images: Dataset | None = None) -> StepPlan:
        """Fix the steps of the epochs that follow; first count the tokens of a train dataset with images."""
        self.steps = self.plan()
        self.images = None if rows_with_images is None else self._count_tokens(rows_with_images)
        return self.steps

    def stream(self, rows: Any, budget: int) -> StepStream:
        """
        The steps of a streamed train dataset.

        Raises:
            ValueError: If workers or processes read a stream in parts, or if the buffer holds less than a step.
        """
        trainer, plan, buffer = self.trainer, self.plan(), self.settings.group_by_prefix_buffer
        workers, size = trainer.args.dataloader_num_workers, plan.per_step
        if workers > 1:
            raise ValueError(
                f"`max_tokens_per_batch` makes a step of consecutive rows of a stream, and {workers} data loader "
                "workers would read it in parts. Set `dataloader_num_workers` to 0 or 1, or give a "
                "`datasets.Dataset` (`Dataset.from_generator`)."
            )
        if buffer is not None and buffer < size:
            raise ValueError(
                f"`group_by_prefix_buffer={buffer}` rows are fewer than the {size} of an optimizer step, "
                "so none could be brought together. Read several steps ahead, or leave `group_by_prefix` out."
            )
        if plan.processes > 1:
            # All processes read all rows, and each takes its share of a step.
            begins = gather_object([crc32(repr(list(islice(iter(rows), size))).encode())])
            if len(set(begins)) > 1:
                raise ValueError(
                    "`max_tokens_per_batch`: processes read other first rows of the stream, and would train on some "
                    "rows twice and on others never. Give `shuffle` a `seed`, and every process the whole stream "
                    "(no `split_dataset_by_node`)."
                )
        columns = None
        if trainer.args.remove_unused_columns:  # what transformers does with a `Dataset`, and not with a stream
            trainer._set_signature_columns_if_needed()
            columns = set(trainer._signature_columns)
        return StepStream(rows, self.measure(), plan, buffer, budget, columns)

    def _count_tokens(self, rows: Dataset) -> ImageMeasure:
        trainer = self.trainer
        return measure_images(
            rows,
            self.collator,
            sharing=bool(self.settings.prefix_sharing),
            processes=(trainer.accelerator.process_index, trainer.accelerator.num_processes),
            workers=getattr(trainer.args, "dataset_num_proc", None),
        )

    def measure(self) -> RowMeasure:
        """Token costs of the rows of the trainer's data."""
        if self.images is not None:
            return self.images
        args, measure = self.trainer.args, self.trainer.padding.task.measure
        if measure is None:
            raise NotImplementedError(
                f"`max_tokens_per_batch` and `group_by_prefix` need the token counts of the rows of "
                f"{type(self.trainer).__name__}. Leave them out, or give its task a `measure`."
            )
        mode = getattr(args, "truncation_mode", None) or "keep_start"
        return measure(getattr(args, "max_length", None), mode, bool(self.settings.prefix_sharing))

    def plan(self) -> StepPlan:
        """The optimizer steps of an epoch."""
        args, data = self.trainer.args, self.trainer.train_dataset
        split_batches = args.accelerator_config.split_batches
        rows = len(data) if isinstance(data, Dataset) else 0
        processes = 1 if split_batches else self.trainer.accelerator.num_processes // data_replicas(self.trainer)
        micro_batch, accumulation_steps = self.trainer._train_batch_size, args.gradient_accumulation_steps
        if self.settings.max_tokens_per_batch is not None:
            # A step keeps its rows even if `auto_find_batch_size` has lowered the batch size.
            micro_batch = args._rows_per_micro_batch
            accumulation_steps = args.per_device_train_batch_size // micro_batch
        return StepPlan(rows, micro_batch, accumulation_steps, processes, args.dataloader_drop_last)

    def sampler(self, sampler: Any, dataset: Dataset | IterableDataset) -> Any:
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
                f"tokens, and the configuration chooses a `{type(sampler).__name__}`, which rearranges them "
                "differently. Leave `train_sampling_strategy` (or `group_by_length`) out."
            )
        trainer = self.trainer
        if isinstance(sampler, RandomSampler):
            # As accelerate would replace it: all processes draw alike, and each epoch has its seed. Without
            # `data_seed` that is torch's seed, which is `seed` unless the script has set another one since.
            sampler = SeedableRandomSampler(dataset, data_seed=trainer.args.data_seed)
        costs = self.measure().costs(dataset)
        if budget is not None:
            self._check_rows(costs, dataset, budget)
        # Partitioned by tokens, the rows with images could all go to some of the processes. DDP has no gradient of a
        # vision tower that a process does not use, so each process keeps the rows that it has in TRL.
        has_rows_without_images = self.images is not None and not self.images.images.all()
        return StepSampler(
            sampler,
            costs,
            self.steps or self.plan(),
            lambda: int(trainer.state.epoch or 0),
            is_grouped=bool(self.settings.group_by_prefix),
            is_partitioned=budget is not None,
            equal_rows=trainer.padding.task.needs_all_rows() or self.has_custom_collator or has_rows_without_images,
        )

    def _check_rows(self, costs: RowCosts, dataset: Dataset, budget: int) -> None:
        """
        Warn of rows that are larger than the budget.

        Raises:
            ValueError: If a single sequence has more tokens than the budget.
        """
        check_budget(self.measure().longest(dataset), budget)
        is_over = costs.tokens > budget
        if is_over.any():
            logger.warning(
                f"{is_over.sum()} of {len(costs)} rows of the train dataset have more tokens than "
                f"`max_tokens_per_batch={budget}`, the longest {costs.tokens.max()}: each is a micro-batch by itself, "
                "and needs the memory of its size. Raise the budget, or lower `max_length`."
            )
