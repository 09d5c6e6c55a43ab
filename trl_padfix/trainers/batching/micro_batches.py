"""An optimizer step as a batch of the data loader: its micro-batches, and TRL's batch for code of a user."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import nn

from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.shared_prefixes import PrefixPlan
from ..data.image_rows import image_tensors
from .bin_packing import halve_largest


__all__ = [
    "CollatedStep",
    "MicroBatch",
    "StepBatch",
    "items_of",
    "join_batches",
    "micro_batches_of",
    "step_of",
    "to_equal_count",
]


class MicroBatch(NamedTuple):
    """
    Rows of a step that have one forward and one backward.

    Attributes:
        batch (`dict`): The batch.
        weight (`float`): Its weight in the loss of the step; 0 if it only matches the forwards of other processes.
        items (`Sequence[int]`): The number of each item (a text, a pair) in TRL's batch; empty if they are unknown.
    """

    batch: dict[str, Any]
    weight: float
    items: Sequence[int] = ()

    def select(self, places: Sequence[int], count: int) -> MicroBatch:
        """The items at these places of the `count` items, with their share of the weight."""
        batch = items_of(self.batch, places, count)
        items = [self.items[place] for place in places] if self.items else ()
        return MicroBatch(batch, self.weight * len(places) / count, items)


class CollatedStep(NamedTuple):
    """
    The rows that a process has of a step, as the collator splits them. On its way to the device it becomes a
    [`StepBatch`].

    Attributes:
        micro_batches (`list[MicroBatch]`): The micro-batches.
        rows_per_item (`int`): Rows of a batch that belong together.
        pad_token_id (`int`): Padding of the ids, for the batch that a user's code reads.
        keeps_micro_batches (`bool`): Whether the micro-batches are those of TRL.
        prefix_plan ([`FlatIndexMaps`] or [`PrefixPlan`], *optional*): The plan of their shared prefixes, before and
            after the step is on its device; `None` if they share none.
        whole (`dict`, *optional*): The batch of TRL, if it cannot be joined from the micro-batches.
        trl_index (`Sequence[int]`): For each item of TRL's batch the number of TRL's micro-batch that it is in; empty
            if unknown.
        trl_count (`int`): Number of TRL's micro-batches in the step.
        trl_sizes (`Sequence[int]`): Items of each of TRL's micro-batches on this process, if a collator may change it.
    """

    micro_batches: list[MicroBatch]
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

        def moved(value: Any) -> Any:
            return value and send_to_device(value, device, non_blocking=non_blocking)

        micro_batches = [m._replace(batch=moved(m.batch)) for m in self.micro_batches]
        plan, whole = moved(self.prefix_plan), moved(self.whole)
        return StepBatch((), self._replace(micro_batches=micro_batches, prefix_plan=plan, whole=whole))

    def joined(self) -> dict[str, Any]:
        """
        The batch of TRL, with all rows.

        Raises:
            ValueError: If micro-batches with images, or with unknown items, cannot be joined.
        """
        if self.whole is not None:
            return dict(self.whole)
        if len(self.micro_batches) == 1:
            return dict(self.micro_batches[0].batch)
        if any(image_tensors(m.batch) or not m.items for m in self.micro_batches):
            raise ValueError(
                "Code of yours reads the batch of a step. With `max_tokens_per_batch` it is in micro-batches, and "
                "images are not numbered by row, so they cannot be put together. Read the batches in `compute_loss` "
                "or in a `training_step` that is there before `train()`, or leave the budget out."
            )
        joined = join_batches([m.batch for m in self.micro_batches], self.rows_per_item, self.pad_token_id)
        items = [item for m in self.micro_batches for item in m.items]
        places = sorted(range(len(items)), key=items.__getitem__)
        return items_of(joined, places, len(items))


class StepBatch(dict):
    """
    A step as code of a user finds it: the batch of TRL, a dictionary of tensors.

    Its tensors are joined when it is first read. As long as they are not modified, [`step_of`] returns the
    micro-batches.
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


# All methods, also `__iter__`: only a subclass of `dict` with its own `__iter__` is copied by its `keys()` in
# `{**batch}` and `dict(batch)`. Of any other one Python copies the storage, which is empty before the first read.
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


def micro_batches_of(batch: Any) -> list[Any]:
    """The micro-batches of a batch of the data loader, or the batch itself if it is not split."""
    step = step_of(batch)
    return [batch] if step is None else [micro_batch.batch for micro_batch in step.micro_batches]


def to_equal_count(micro_batches: list[MicroBatch], count: int, rows_per_item: int) -> list[MicroBatch]:
    """
    Cut the largest micro-batches in two until there are `count`, the most that any process has.

    Batches with images are not cut, because images are not numbered by row. Where nothing is left to cut, the
    micro-batch with the fewest rows is repeated with weight 0.
    """
    sizes = [1 if image_tensors(m.batch) else len(m.batch["input_ids"]) // rows_per_item for m in micro_batches]
    result: list[MicroBatch] = []
    for origin, places in halve_largest([range(size) for size in sizes], count):
        is_whole = len(places) == sizes[origin]
        result.append(micro_batches[origin] if is_whole else micro_batches[origin].select(places, sizes[origin]))
    if len(result) < count:
        smallest = min(result, key=lambda m: len(m.batch["input_ids"]))
        result += [smallest._replace(weight=0.0)] * (count - len(result))
    return result


def items_of(batch: Mapping[str, Any], items: Sequence[int], count: int) -> dict[str, Any]:
    """Some of the `count` items of a batch. A column has one row for each item, or several blocks of such rows."""

    def selected(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.cat([rows[list(items)] for rows in value.split(count)])
        return [value[begin + item] for begin in range(0, len(value), count) for item in items]

    return {name: selected(value) for name, value in batch.items()}


def join_batches(batches: Sequence[dict[str, Any]], rows_per_item: int, pad_token_id: int = 0) -> dict[str, Any]:
    """
    Join micro-batches into one padded batch, padded on their side.

    The rows of a micro-batch come in `rows_per_item` blocks (chosen, rejected), and so do those of the whole batch.
    """
    plain = batches
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
