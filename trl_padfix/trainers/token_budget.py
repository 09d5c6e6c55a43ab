"""
Training batches by token budget.

A batch of the data loader is one optimizer step. The sampler deals its rows out to the processes with even work, the
collator splits those of a process into micro-batches, and `training_step` runs them one after another: counts of steps
and epochs, shuffling and resuming stay Trainer's. Losses and metrics are the means over all rows, however they were
split.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from .base import _field
from .config import check_budget
from .metrics import gathering_nothing
from .row_costs import RowCosts, arrange, pair_costs, split, text_costs


__all__ = ["BudgetCollator", "BudgetMixin", "BudgetSampler", "PairMeasure", "TextMeasure"]

logger = get_logger(__name__)

MICRO_BATCHES = "micro_batches"
"""Key of a batch that is a list of micro-batches."""


@dataclass(frozen=True)
class PairMeasure:
    """What tokenized preference pairs cost, as examples or as a dataset."""

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    sharing: bool = False

    def examples(self, examples: list[dict[str, Any]]) -> RowCosts:
        lengths = [[len(e[name]) for e in examples] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        return self._costs(lengths, _numbers(tuple(e["prompt_ids"]) for e in examples))

    def dataset(self, dataset: Dataset) -> RowCosts:
        lengths = [_lengths(dataset, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        return self._costs(lengths, _numbers(_contents(dataset, "prompt_ids")) if self.sharing else None)

    def _costs(self, lengths: list[Any], prompts: list[int] | None) -> RowCosts:
        return pair_costs(
            *lengths,
            prompts=prompts if self.sharing else None,
            max_length=self.max_length,
            truncation_mode=self.truncation_mode,
        )


@dataclass(frozen=True)
class TextMeasure:
    """What tokenized texts cost, as examples or as a dataset."""

    max_length: int | None = None

    def examples(self, examples: list[dict[str, Any]]) -> RowCosts:
        return text_costs([len(e["input_ids"]) for e in examples], max_length=self.max_length)

    def dataset(self, dataset: Dataset) -> RowCosts:
        return text_costs(_lengths(dataset, "input_ids"), max_length=self.max_length)


@dataclass
class BudgetCollator:
    """
    Splits the rows of a batch into micro-batches and collates each.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        measure ([`PairMeasure`] or [`TextMeasure`]):
            What examples cost.
        budget (`int`):
            Most tokens of a micro-batch.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: PairMeasure | TextMeasure
    budget: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        parts = split(self.measure.examples(examples), self.budget)
        return {MICRO_BATCHES: [self.collator([examples[i] for i in rows]) for rows in parts]}


class BudgetSampler(Sampler[int]):
    """
    The order of another sampler, rearranged so that the processes of each global batch have even work.

    Args:
        order (`Sampler[int]`):
            Order of the rows; the same on all processes.
        costs ([`RowCosts`]):
            Tokens of all rows.
        per_process (`int`):
            Rows of one process in a global batch.
        processes (`int`):
            How many processes.
        epoch (`Callable`):
            The epoch that an iteration is for. It is asked, since a dataloader that skips batches at several processes
            does not hand `set_epoch` on to its sampler (accelerate 1.15), and a resumed run would see another order.
    """

    def __init__(
        self, order: Sampler[int], costs: RowCosts, per_process: int, processes: int, epoch: Callable[[], int]
    ):
        self.order, self.costs, self.per_process, self.processes = order, costs, per_process, processes
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.costs)

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.order, SeedableRandomSampler):
            self.order.set_epoch(self.epoch())
        return arrange(list(self.order), self.costs, self.per_process, self.processes)


class BudgetMixin:
    """Micro-batches of `max_tokens_per_batch` for a TRL trainer; stands in front of `PaddingRemovalMixin`."""

    _weight: float | None = None
    """What the loss of the running micro-batch counts for, where it is a mean over its rows."""

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        super()._check_before(config, given)
        check_budget(config)
        if getattr(config, "max_tokens_per_batch", None) is None:
            return
        if config.gradient_accumulation_steps > 1:
            raise ValueError(
                f"`max_tokens_per_batch` was set after the configuration was made, with "
                f"`gradient_accumulation_steps={config.gradient_accumulation_steps}`. The budget says in how many "
                "pieces a batch is computed: pass it to the configuration, which counts the batch of a step anew."
            )
        if config.accelerator_config.split_batches or not config.accelerator_config.even_batches:
            raise ValueError(
                "`max_tokens_per_batch` deals equally many rows to every process: leave `split_batches` and "
                "`even_batches` out of `accelerator_config`."
            )
        if not isinstance(given.get("train_dataset"), Dataset | None):
            raise ValueError(
                f"`max_tokens_per_batch` plans an epoch by the lengths of all its rows, and the training dataset is a "
                f"`{type(given['train_dataset']).__name__}`. Give a `datasets.Dataset` (of a stream "
                "`Dataset.from_generator`), or leave the budget out."
            )

    def _set_up_padding(self) -> None:
        super()._set_up_padding()
        if getattr(self.args, "max_tokens_per_batch", None) is None:
            return
        if reason := self._not_a_mean_over_rows():
            raise ValueError(
                f"{reason}, so the loss of a batch is not the mean of the losses of its pieces, and "
                "`max_tokens_per_batch` cannot split it. Leave one of them out."
            )

    def _not_a_mean_over_rows(self) -> str | None:
        """What of the loss depends on which rows are in one forward, if anything does."""
        if getattr(self, "_is_vision_dataset", False):
            return "The dataset has images, which are not split with their rows"
        if getattr(self, "aux_loss_enabled", False):
            return "The load-balancing loss of the experts (`router_aux_loss_coef`) is taken over a whole forward"
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and (getattr(parallelism, "tp_size", 1) or 1) > 1:
            return "Under tensor parallelism several processes compute one batch"
        return None

    def _measure(self) -> PairMeasure | TextMeasure:
        """What the rows of this trainer's data cost."""
        raise NotImplementedError

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if getattr(self.args, "max_tokens_per_batch", None) is None:
            return sampler
        if not isinstance(sampler, RandomSampler | SequentialSampler):
            raise ValueError(
                f"`max_tokens_per_batch` rearranges rows by their lengths, and the configuration asks for a "
                f"`{type(sampler).__name__}`, which does the same in another way. Leave `train_sampling_strategy` "
                "(or `group_by_length`) out."
            )
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if isinstance(sampler, RandomSampler):
            # What accelerate makes of it: all processes draw alike, each epoch from its own seed.
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = SeedableRandomSampler(dataset, data_seed=seed)
        costs = self._measure().dataset(dataset)
        over = costs.each > self.args.max_tokens_per_batch
        if over.any():
            logger.warning(
                f"{over.sum()} of {len(costs)} rows of the train dataset have more tokens than "
                f"`max_tokens_per_batch={self.args.max_tokens_per_batch}`, the longest {costs.each.max()}: each is a "
                "micro-batch of its own, and needs the memory of its size. Raise the budget, or lower `max_length`."
            )
        per_process, processes = self._train_batch_size, self.accelerator.num_processes
        return BudgetSampler(sampler, costs, per_process, processes, epoch=lambda: int(self.state.epoch or 0))

    def get_train_dataloader(self) -> Any:
        if getattr(self.args, "max_tokens_per_batch", None) is None:
            return super().get_train_dataloader()
        collator = BudgetCollator(self.data_collator, self._measure(), self.args.max_tokens_per_batch)
        with _field(self, "data_collator", collator):
            return super().get_train_dataloader()

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        return super()._get_num_items_in_batch([m for batch in batch_samples for m in _pieces(batch)], device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        return sum(super(BudgetMixin, self).floating_point_ops(m) for m in _pieces(inputs))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for micro_batch in _pieces(inputs):
            super()._track_num_input_tokens(micro_batch)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if MICRO_BATCHES not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        batches = inputs[MICRO_BATCHES]
        sizes = torch.stack([self._batch_size_of(batch) for batch in batches])
        mean_size, most = sizes.sum().float(), len(batches)
        if self.accelerator.num_processes > 1:
            ours = torch.stack([mean_size, mean_size.new_tensor(most)]).unsqueeze(0)
            everyone = self.accelerator.gather(ours)
            mean_size, most = everyone[:, 0].mean(), int(everyone[:, 1].max())
        batches = _halved(batches, most, self._rows_per_item)
        loss = torch.zeros((), device=self.args.device)
        with self._metrics_over_all(batches):
            for i, batch in enumerate(batches):
                if num_items_in_batch is None:
                    self._weight = self._batch_size_of(batch) / mean_size
                with self._gradients_synchronised(model, i == len(batches) - 1):
                    loss = loss + super().training_step(model, batch, num_items_in_batch)
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss if self._weight is None else loss * self._weight

    @contextlib.contextmanager
    def _gradients_synchronised(self, model: Any, last: bool) -> Iterator[None]:
        """Whether the backward in this block ends the step, for those that reduce gradients over processes."""
        state = self.accelerator.gradient_state
        saved = state.sync_gradients
        state._set_sync_gradients(saved and last)
        try:
            each = state.plugin_kwargs.get("sync_each_batch", False)
            if last or each or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                yield
            else:
                with self.accelerator.no_sync(model):
                    yield
        finally:
            state._set_sync_gradients(saved)

    @contextlib.contextmanager
    def _metrics_over_all(self, batches: Sequence[dict[str, Any]]) -> Iterator[None]:
        """
        Let TRL log the means over all micro-batches of a step, on all processes, as if they were one batch.

        It gathers its metrics forward by forward, equally many rows from every process; here each process keeps its
        own, and one reduction at the end of the step adds them up by weight.
        """
        metrics, tokens = self._metrics["train"], self._total_train_tokens
        try:
            self._metrics["train"] = collected = defaultdict(list)
            with gathering_nothing(self.accelerator):
                yield
        finally:
            self._metrics["train"], self._weight = metrics, None
        sizes: dict[str, list[torch.Tensor]] = defaultdict(list)
        for batch in batches:
            for name, size in {"": self._batch_size_of(batch), **self._metric_sizes(batch)}.items():
                sizes[name].append(size)
        collected.pop("num_tokens", None)
        names = sorted(name for name, values in collected.items() if len(values) == len(batches))
        device = self.args.device
        weights = torch.stack([torch.stack(sizes[n if n in sizes else ""]) for n in names]).double().to(device)
        values = torch.tensor([collected[n] for n in names], dtype=torch.float64, device=device)
        seen = values.new_tensor([self._total_train_tokens - tokens])
        totals = torch.cat([(values * weights).sum(1), weights.sum(1), seen])
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals)
        *totals, seen = totals.tolist()
        for name, total, weight in zip(names, totals, totals[len(names) :], strict=False):
            metrics[name].append(total / weight if weight else 0.0)
        self._total_train_tokens = tokens + int(seen)
        metrics["num_tokens"] = [self._total_train_tokens]


def _pieces(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return batch.get(MICRO_BATCHES, [batch])


def _halved(batches: list[dict[str, Any]], count: int, rows_per_item: int) -> list[dict[str, Any]]:
    """`count` micro-batches, as many as the process with the most of them has: the largest are cut in two."""
    batches = list(batches)
    while len(batches) < count:
        at = max(range(len(batches)), key=lambda i: len(batches[i]["input_ids"]))
        items = len(batches[at]["input_ids"]) // rows_per_item
        cut = slice(items // 2), slice(items // 2, None)
        # Some columns have a row for each item, others `rows_per_item` times as many.
        batches[at : at + 1] = [
            {k: torch.cat([rows[half] for rows in v.split(items)]) for k, v in batches[at].items()} for half in cut
        ]
    return batches


def _numbers(keys: Any) -> list[int]:
    """Equal keys by one number."""
    known: dict[Any, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _lengths(dataset: Dataset, column: str) -> np.ndarray:
    tables = dataset.select_columns([column]).with_format("arrow").iter(10_000)
    return np.concatenate([pc.list_value_length(table[column]).to_numpy() for table in tables])


def _contents(dataset: Dataset, column: str) -> Iterator[bytes]:
    """The token ids of each row, as something to compare."""
    for table in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        for chunk in table[column].chunks:
            offsets, ids = chunk.offsets.to_numpy(), chunk.values.to_numpy()
            yield from (ids[a:b].tobytes() for a, b in pairwise(offsets))
