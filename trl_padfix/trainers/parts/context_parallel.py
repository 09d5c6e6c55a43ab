"""
Context parallelism: accelerate's `cp_size`, with `split_rows` of this package in place of ring attention.

accelerate provides the device mesh, the data loader that gives all processes of a group the same batch, and with FSDP2
the sharding over `dp_shard x cp`. Its ring attention, which cuts padded rows, is replaced. transformers and TRL treat
a context-parallel group like a tensor-parallel one: all its processes compute the full loss of one batch.

Trainers that generate are refused, also under tensor parallelism, where processes share a batch, too. Each process
would draw its own completions, and the run would hang when their lengths differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import recursively_apply
from transformers import TrainingArguments

from ...core.context import temporarily_set
from ...core.errors import PaddingRemovalError
from ...core.parallel.collectives import Group
from ...core.split_rows import split_rows
from ..distributed import splitting_parallelism
from .part import PaddingFreeTrainer, Part


__all__ = ["ContextParallel"]

logger = get_logger(__name__)


class ContextParallel(Part):
    """Distributes packed rows over the processes of accelerate's context-parallel groups."""

    group: Group | None = None

    @property
    def size(self) -> int:
        """Number of processes that share packed rows."""
        accelerator = self.trainer.accelerator
        if not self.settings.padding_free or not splitting_parallelism(accelerator, "cp_size"):
            return 1
        return accelerator.parallelism_config.cp_size

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[None]:
        original = self.trainer.create_accelerator_and_postprocess

        def create_accelerator_and_postprocess() -> None:
            original()
            if self.size > 1:
                _replace_ring_attention(self.trainer, self.size)

        # On the instance, because Trainer calls it in the middle of its `__init__`.
        return temporarily_set(self.trainer, create_accelerator_and_postprocess=create_accelerator_and_postprocess)

    def attach_to_models(self) -> None:
        trainer = self.trainer
        if self.settings.padding_free and (reason := _obstacle(trainer)):
            raise PaddingRemovalError(reason)
        if self.size == 1:
            return
        mesh: Any = trainer.accelerator.torch_device_mesh
        self.group = Group.of(mesh["cp"].get_group())
        for handle in trainer.padding.handles:
            split_rows(handle, self.group.group)
        logger.warning(
            f"`cp_size={self.size}`: each packed row is computed by {self.size} processes, which exchange heads for "
            "tokens at attention, in place of accelerate's ring attention."
        )

    def _gather_without_duplicates(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """A block in which `accelerator.gather` takes one process of each group: the others have the same rows."""
        accelerator = self.trainer.accelerator
        # That for metrics only if a user has set it: the class's method calls `gather`.
        names = {"gather", *({"gather_for_metrics"} & vars(accelerator).keys())} if self.group else ()
        return temporarily_set(accelerator, **{n: self._of_groups(getattr(accelerator, n)) for n in names})

    around_step = around_ref_logps = around_evaluation_loop = _gather_without_duplicates

    def _of_groups(self, gather_all: Callable) -> Callable:
        """`gather_all`, reduced to the rows of one process of each group where it returns all processes."""
        assert self.group is not None
        size, processes = self.group.size, self.trainer.accelerator.num_processes

        def gather_of_groups(values: object, *args: object, **kwargs: object) -> Any:
            def first_of_each(x: torch.Tensor) -> torch.Tensor:
                gathered = gather_all(x, *args, **kwargs)
                # Otherwise an outer block like this one has taken one process of each group already, or `gather` is
                # switched off, because the metrics of a micro-batch stay local.
                is_all = len(gathered) == processes * (len(x) if x.dim() else 1) if gathered.dim() else False
                return gathered.unflatten(0, (processes, -1))[::size].flatten(0, 1) if is_all else gathered

            return recursively_apply(first_of_each, values)

        return gather_of_groups

    def around_label_count(self) -> contextlib.AbstractContextManager[None]:
        """A block with accelerate's own `gather`: Trainer itself divides this label count by the group's size."""
        accelerator = self.trainer.accelerator
        own = {} if self.group is None else {"gather": partial(type(accelerator).gather, accelerator)}
        return temporarily_set(accelerator, **own)


def _replace_ring_attention(trainer: PaddingFreeTrainer, size: int) -> None:
    """Switch accelerate's ring attention off, and count the processes of a group as under tensor parallelism."""
    trainer.accelerator._prepare_cp = lambda *args: args  # it would add hooks that drop masks, and the ring
    flops = trainer.floating_point_ops
    vars(trainer).update(
        _prepare_context_parallel_inputs=lambda model, inputs: (contextlib.nullcontext, inputs),
        get_tp_size=lambda: size,
        get_cp_size=lambda: 1,
        floating_point_ops=lambda inputs: flops(inputs) // size,
    )


def _obstacle(trainer: PaddingFreeTrainer) -> str | None:
    """Why the processes of this trainer cannot share a batch, or `None`."""
    task, accelerator = trainer.padding.task, trainer.accelerator
    for size, generates in {"cp_size": task.generates_rows is not False, "tp_size": task.generates_rows}.items():
        if generates and splitting_parallelism(accelerator, size):
            return (
                f"{type(trainer).__name__} generates rows on every process, and with `{size}` some must share "
                f"their rows. Train with `{size}=1`; `dp_shard_size` (FSDP2) shards the model."
            )
    if not splitting_parallelism(accelerator, "cp_size"):
        return None
    if splitting_parallelism(accelerator, "tp_size"):
        return (
            "`tp_size` splits the weights of a layer over the processes among which `cp_size` splits its rows. Train "
            "with `cp_size=1` or `tp_size=1`."
        )
    if trainer.args.torch_compile:
        return "`cp_size` exchanges tokens within layers, which cannot be compiled. Train with `torch_compile=False`."
    if trainer.is_deepspeed_enabled:
        return (
            "`cp_size` is not split with DeepSpeed, which has process groups of its own. Train with `cp_size=1`, or "
            "with FSDP2."
        )
    return None
