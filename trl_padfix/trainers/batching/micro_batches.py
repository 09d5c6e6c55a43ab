"""An optimizer step as a batch of the data loader: its micro-batches, their weights, and their shared prefixes."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn

from ...core.call.batch_metadata import PooledTokens
from ...core.errors import PaddingRemovalError
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.shared_prefixes import PrefixPlan
from ..data.batch_labels import label_positions, rows_with_labels_of_padding
from ..data.batch_metadata import BatchWithMetadata, pop_metadata
from ..data.image_rows import image_tensors
from ..data.layout_collator import LayoutCollator
from .bin_packing import Share, StepPlan, halve_largest, pack_by_budget, pack_depth_first, split_by_length
from .measures import RowMeasure, batch_costs
from .prefix_schedule import ids_and_masks, plan_on_host
from .token_costs import RowCosts


__all__ = [
    "BudgetCollator",
    "CollatedStep",
    "MicroBatch",
    "StepBatch",
    "items_of",
    "join_batches",
    "micro_batches_of",
    "step_of",
    "to_equal_count",
]

logger = logging.getLogger(__name__)  # a worker of a data loader has none of accelerate's state

MicroBatch = tuple[dict[str, Any], float]
"""A micro-batch and its weight."""


class CollatedStep(NamedTuple):
    """
    The rows that a process has of a step, as the collator splits them. On its way to the device it becomes a
    [`StepBatch`].

    Attributes:
        micro_batches (`list[dict]`): The micro-batches.
        weights (`list[float]`): Their weights in the step.
        order (`list[int]`): Number of each item in TRL's batch, micro-batch after micro-batch.
        rows_per_item (`int`): Rows of a batch that belong together.
        pad_token_id (`int`): Padding of the ids, for the batch that a user's code reads.
        keeps_micro_batches (`bool`): Whether the micro-batches are those of TRL.
        prefix_plan ([`FlatIndexMaps`] or [`PrefixPlan`], *optional*): The plan of their shared prefixes, before and
            after the step is on its device; `None` if they share none.
        whole (`dict`, *optional*): The batch of TRL, where it cannot be put together of them.
        trl_index (`list[int]`): For each item the number of TRL's micro-batch that it is in; empty if unknown.
        trl_count (`int`): Number of TRL's micro-batches in the step.
        trl_sizes (`list[int]`): Items of each of TRL's micro-batches on this process, if a collator may change it.
    """

    micro_batches: list[dict[str, Any]]
    weights: list[float]
    order: list[int]
    rows_per_item: int = 1
    pad_token_id: int = 0
    keeps_micro_batches: bool = False
    prefix_plan: FlatIndexMaps | PrefixPlan | None = None
    whole: dict[str, Any] | None = None
    trl_index: Sequence[int] = ()
    trl_count: int = 1
    trl_sizes: Sequence[int] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        """The step on a device; accelerate calls this method of what a data loader returns."""
        parts = (self.micro_batches, self.prefix_plan, self.whole)
        batches, plan, whole = (x and send_to_device(x, device, non_blocking=non_blocking) for x in parts)
        return StepBatch((), self._replace(micro_batches=batches, prefix_plan=plan, whole=whole))

    def joined(self) -> dict[str, Any]:
        """
        The batch that TRL has, of all rows.

        Raises:
            ValueError: If it has images, and the collator did not expect that it is read.
        """
        if self.whole is not None or len(self.micro_batches) == 1:
            return dict(self.micro_batches[0] if self.whole is None else self.whole)
        if any(map(image_tensors, self.micro_batches)):
            raise ValueError(
                "Code of yours reads the batch of a step. With `max_tokens_per_batch` it is in micro-batches, and "
                "images are not numbered by row, so they cannot be put together. Read the batches in `compute_loss` "
                "or in a `training_step` that is there before `train()`, or leave the budget out."
            )
        joined = join_batches(self.micro_batches, self.rows_per_item, self.pad_token_id)
        place = {item: i for i, item in enumerate(self.order)}
        return items_of(joined, [place[item] for item in sorted(place)], len(place))


class StepBatch(BatchWithMetadata):
    """
    A step as code of a user finds it: the batch of TRL, a dictionary of tensors.

    It is made when it is first read. If it was not modified since, the step has its micro-batches, [`step_of`].
    """

    def __init__(self, batch: Mapping[str, Any] | Iterable[Any] = (), step: CollatedStep | None = None):
        super().__init__(batch)
        self._step = step
        self._saved: dict[str, Any] | None = None

    def fill(self) -> None:
        """Make the batch, if it was not read before."""
        if self._step is not None and self._saved is None:
            self._saved = {}
            self.update(self._step.joined())
            # Copies, and not version counters: a write by `.data` or numpy leaves no trace there.
            self._saved = {name: x.clone() if isinstance(x, torch.Tensor) else [*x] for name, x in self.items()}

    @property
    def is_unmodified(self) -> bool:
        """Whether the batch was not read, or has the values that it had then."""
        saved = self._saved
        return saved is None or (self.keys() == saved.keys() and all(_is_same(x, self[k]) for k, x in saved.items()))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        """The batch itself: it is on its device."""
        return self


def _reading(name: str) -> Callable[..., Any]:
    """A method of `dict` that makes the batch before it reads it."""
    method = getattr(dict, name)

    @wraps(method)
    def read(self: StepBatch, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    return read


# All of them: `{**batch}` and `dict(batch)` take the keys where `__iter__` is overridden.
for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__repr__"),
    *("__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(StepBatch, _name, _reading(_name))


def _is_same(saved: object, value: object) -> bool:
    if isinstance(saved, torch.Tensor) and isinstance(value, torch.Tensor):
        return saved.dtype == value.dtype and saved.device == value.device and torch.equal(saved, value)
    return isinstance(value, list) and len(saved) == len(value) and all(map(operator.is_, saved, value))


def step_of(batch: object) -> CollatedStep | None:
    """The micro-batches of a batch of the data loader, if code of a user has not modified it."""
    if isinstance(batch, StepBatch):
        return batch._step if batch.is_unmodified else None
    return batch if isinstance(batch, CollatedStep) else None


@dataclass
class BudgetCollator:
    """
    Splits the rows that a process has of a step into micro-batches, and collates each.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        measure ([`RowMeasure`]):
            Counts the tokens of examples.
        budget (`int`):
            Most tokens of a micro-batch.
        plan ([`StepPlan`]):
            The micro-batches of TRL, from which rows have their weights.
        keeps_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether micro-batches are those of TRL, because the loss compares their rows. Their forwards are split
            later.
        weight_by_tokens (`bool`, *optional*, defaults to `False`):
            Whether the weight of a micro-batch is its share of trained tokens, and not of rows.
        share_across_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether prefixes that micro-batches have in common are computed once in the step.
        plan_in_worker (`bool`, *optional*, defaults to `False`):
            Whether these prefixes are planned here, in the data loader worker.
        cuts_batches (`bool`, *optional*, defaults to `False`):
            Whether the collator may look at its whole batch (a user's). It then gets the micro-batches of TRL, and
            what it makes of them is split by rows.
        rows_per_item (`int`, *optional*, defaults to 1):
            Rows of a batch that belong together.
        pad_token_id (`int`, *optional*, defaults to 0):
            Padding of the ids, for the batch that a user's code reads.
        adds_whole (`bool`, *optional*, defaults to `False`):
            Whether a step with images also has the batch of TRL, because a user's code may read it.
        cp_size (`int`, *optional*, defaults to 1):
            Number of processes that compute a packed row together.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: RowMeasure
    budget: int
    plan: StepPlan
    keeps_micro_batches: bool = False
    weight_by_tokens: bool = False
    share_across_micro_batches: bool = False
    plan_in_worker: bool = False
    cuts_batches: bool = False
    rows_per_item: int = 1
    pad_token_id: int = 0
    adds_whole: bool = False
    cp_size: int = 1

    def __call__(self, shares: list[tuple[Share, list[dict[str, Any]]]]) -> CollatedStep:
        ((share, examples),) = shares
        of_items: dict[str, Any] = {"rows_per_item": self.rows_per_item, "pad_token_id": self.pad_token_id}
        if self.keeps_micro_batches:
            size = self.plan.micro_batch
            batches = [self.collator(examples[begin : begin + size]) for begin in range(0, len(examples), size)]
            sizes = [self._count(batch) for batch in batches]
            weights_in_trl = [1 / len(batches)] * len(batches)
            order = list(range(sum(sizes)))
            return CollatedStep(batches, weights_in_trl, order, **of_items, keeps_micro_batches=True, trl_sizes=sizes)
        weights_of_rows = self.plan.weights(len(examples), share.rows_of_step)
        if self.cuts_batches:
            batches, weights, order, of_items["trl_sizes"] = self._cut(examples, weights_of_rows)
        else:
            batches, weights, order = self._planned(share.rows, examples, weights_of_rows)
        step = CollatedStep(batches, weights, order, **of_items)
        if self.adds_whole and len(batches) > 1 and any(map(image_tensors, batches)):
            step = step._replace(whole=pop_metadata(self.collator(examples))[0])
        has_all_items = sum(map(self._count, batches)) == len(order)  # a collator of a user may drop or add some
        if has_all_items and not self.cuts_batches:
            trl_count = -(-share.rows_of_step // (self.plan.micro_batch * self.plan.processes))
            step = step._replace(trl_index=[share.trl_index[i] for i in order], trl_count=trl_count)
        if self.weight_by_tokens:
            positions = [label_positions(batch) for batch in batches]
            counts = [0 if labels is None else len(labels) for labels in positions]
            step = step._replace(weights=[count / max(sum(counts), 1) for count in counts])
        if self.plan_in_worker and len(batches) > 1 and (inputs := ids_and_masks(batches)):
            step = step._replace(prefix_plan=plan_on_host(inputs, self.budget))
        return step

    def _count(self, batch: Any) -> int:
        """Items of a batch."""
        return len(batch["input_ids"]) // self.rows_per_item

    def _pack(self, costs: RowCosts) -> list[list[int]]:
        """The rows of each micro-batch."""
        pack = pack_depth_first if self.share_across_micro_batches else pack_by_budget
        most = self.budget / self.cp_size if self.cp_size > 1 else math.inf
        parts = split_by_length(costs, most)
        return [rows[packed].tolist() for rows in parts for packed in pack(costs[rows], self.budget)]

    def _planned(
        self, numbers: list[int], examples: list[dict[str, Any]], weights: np.ndarray
    ) -> tuple[list[dict[str, Any]], list[float], list[int]]:
        """Micro-batches of examples by their tokens, their weights, and the order of the examples in them."""
        costs = self.measure.of(numbers, examples)
        # A micro-batch has one weight for all its rows: rows of a last, smaller micro-batch of TRL are not mixed with
        # the others.
        same_weight = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        parts = [rows[part].tolist() for rows in same_weight for part in self._pack(costs[rows])]
        batches = [self.collator([examples[i] for i in rows]) for rows in parts]
        for rows, batch in zip(parts, batches, strict=True):
            self._refuse_use_of_padding(batch, [numbers[i] for i in rows])
            self.measure.check([numbers[i] for i in rows], batch)
        return batches, [float(weights[rows].sum()) for rows in parts], [item for part in parts for item in part]

    def _cut(
        self, examples: list[dict[str, Any]], weights: np.ndarray
    ) -> tuple[list[dict[str, Any]], list[float], list[int], list[int]]:
        """
        Micro-batches cut by rows from what a user's collator makes of each micro-batch of TRL, their weights, the
        order of the items in them, and the number of items of each micro-batch of TRL.
        """
        result: list[dict[str, Any]] = []
        result_weights: list[float] = []
        order: list[int] = []
        sizes: list[int] = []
        for begin in range(0, len(examples), self.plan.micro_batch):
            rows = slice(begin, begin + self.plan.micro_batch)
            batch, weight = self.collator(examples[rows]), float(weights[rows].sum())
            plain = pop_metadata(batch)[0]
            # The collator may have dropped rows or added some: the loss is a mean over what it returned.
            count, begin_of_items = self._count(plain), len(order)
            sizes.append(count)
            if any(not isinstance(v, torch.Tensor) or v.dim() == 0 or len(v) % count for v in plain.values()):
                logger.warning(
                    f"`max_tokens_per_batch`: the collator makes a batch with values that do not have a row for each "
                    f"of its {count} rows ({', '.join(plain)}), so it is computed as one, whatever its tokens."
                )
                result.append(batch)
                result_weights.append(weight)
                order += range(begin_of_items, begin_of_items + count)
                continue
            ids = plain["input_ids"]
            costs = batch_costs(
                ids, plain.get("attention_mask", torch.ones_like(ids)), self.rows_per_item, self.measure.sharing
            )
            parts = self._pack(costs)
            result += (
                [batch] if len(parts) == 1 else [self._with_metadata(items_of(plain, part, count)) for part in parts]
            )
            result_weights += [weight * len(part) / count for part in parts]
            order += [begin_of_items + item for part in parts for item in part]
        return result, result_weights, order, sizes

    def _refuse_use_of_padding(self, batch: dict[str, Any], numbers: list[int]) -> None:
        """
        Raise a [`PaddingRemovalError`] if padding of a micro-batch has labels, or is what a sequence classifier
        scores: rows are padded to other lengths in it than in the batch of TRL, so the loss would be another one.
        `numbers` are those of the items in the dataset.
        """
        what = "has labels", "Let your collator set labels to -100 where the attention mask is 0"
        rows = rows_with_labels_of_padding(batch)
        pad = self.collator.pooling_pad_id if isinstance(self.collator, LayoutCollator) else None
        if pad is not None and "attention_mask" in batch:
            is_scored = PooledTokens.of(batch["input_ids"], batch["attention_mask"], pad).is_padding
            if scored := [row for row, is_padding in enumerate(is_scored) if is_padding]:
                rows, what = scored, ("is scored", f"Let your collator pad with the model's `pad_token_id={pad}`")
        if rows:
            raise PaddingRemovalError(
                f"Padding {what[0]} in rows {sorted({numbers[row % len(numbers)] for row in rows})} of the dataset, "
                "and `max_tokens_per_batch` pads rows to other lengths than TRL: the loss would depend on it. "
                f"{what[1]}, or leave the budget out."
            )

    def _with_metadata(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with the metadata that the collator adds, if it does."""
        adds_metadata = isinstance(self.collator, LayoutCollator)
        return replace(self.collator, collator=lambda _: batch)([]) if adds_metadata else batch


def micro_batches_of(batch: Any) -> list[Any]:
    """The micro-batches of a batch of the data loader, or the batch itself if it is not split."""
    step = step_of(batch)
    return [batch] if step is None else step.micro_batches


def to_equal_count(micro_batches: list[MicroBatch], count: int, rows_per_item: int) -> list[MicroBatch]:
    """
    Cut the largest micro-batches in two until there are `count`, the most that any process has.

    Batches with images are not cut, because images are not numbered by row. Where nothing is left to cut, the
    micro-batch with the fewest rows is repeated with weight 0.
    """
    sizes = [1 if image_tensors(batch) else len(batch["input_ids"]) // rows_per_item for batch, _ in micro_batches]
    result: list[MicroBatch] = []
    for origin, items in halve_largest([range(size) for size in sizes], count):
        (batch, weight), size = micro_batches[origin], sizes[origin]
        if len(items) < size:
            batch, weight = items_of(pop_metadata(batch)[0], items, size), weight * len(items) / size
        result.append((batch, weight))
    smallest, _ = min(result, key=lambda micro_batch: len(micro_batch[0]["input_ids"]))
    return result + [(smallest, 0.0)] * (count - len(result))


def items_of(batch: Mapping[str, Any], items: Sequence[int], count: int) -> dict[str, Any]:
    """Some of the `count` items of a batch. A column has one row for each item, or several blocks of such rows."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.cat([rows[list(items)] for rows in value.split(count)])
        return [value[begin + item] for begin in range(0, len(value), count) for item in items]

    return {name: of(value) for name, value in batch.items()}


def join_batches(batches: Sequence[dict[str, Any]], rows_per_item: int, pad_token_id: int = 0) -> dict[str, Any]:
    """
    Micro-batches as one padded batch, on the side on which they are padded.

    The rows of a micro-batch come in `rows_per_item` blocks (chosen, rejected), and so do those of the whole batch.
    """
    plain = [pop_metadata(batch)[0] for batch in batches]
    counts = [len(batch["input_ids"]) // rows_per_item for batch in plain]
    pads_left = any(not batch["attention_mask"][:, 0].all() for batch in plain if "attention_mask" in batch)

    def widen(value: torch.Tensor, width: int, padding: int) -> torch.Tensor:
        missing = width - value.shape[1] if value.dim() > 1 else 0
        return nn.functional.pad(value, (missing, 0) if pads_left else (0, missing), value=padding)

    joined: dict[str, Any] = {}
    for name in plain[0]:
        values = [batch[name] for batch in plain]
        if not isinstance(values[0], torch.Tensor):
            joined[name] = [x for value in values for x in value]
            continue
        padding = pad_token_id if name.endswith("input_ids") else -100 if "labels" in name else 0
        width = max(value.shape[1] for value in values) if values[0].dim() > 1 else 0
        values = [widen(value, width, padding) for value in values]
        blocks = [value.split(count) for value, count in zip(values, counts, strict=True)]
        joined[name] = torch.cat([block for same in zip(*blocks, strict=True) for block in same])
    return joined
