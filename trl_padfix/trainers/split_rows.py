"""
Packed rows that several processes compute together: accelerate's `cp_size`, with our split in place of its ring.

Taken from accelerate are the device mesh, the data loader that gives all processes of a group the same batch, and with
FSDP2 the sharding over `dp_shard x cp`. Not taken are ring attention and the cutting of padded rows. For transformers
and TRL a group counts as one under tensor parallelism does: its processes compute the whole loss of one batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import recursively_apply

from ..core.errors import PaddingRemovalError
from ..core.layout.exchange import Group
from ..core.layout.slices import HEADS, KEYS
from ..core.splitting import split_rows
from .parts import Evaluation, Part, Step


__all__ = ["SplitRows"]

logger = get_logger(__name__)


class SplitRows(Part):
    """Splits packed rows over the processes of accelerate's context-parallel groups."""

    group: Group | None = None

    @property
    def size(self) -> int:
        """How many processes share a batch."""
        parallelism = self.trainer.accelerator.parallelism_config
        return parallelism.cp_size if parallelism is not None and self.settings.padding_free else 1

    def check(self, config: Any, given: dict[str, Any]) -> None:
        if self.settings.cp_attention not in (HEADS, KEYS):
            raise ValueError(f"`cp_attention` is {HEADS!r} or {KEYS!r}, got {self.settings.cp_attention!r}.")

    @contextlib.contextmanager
    def constructing(self, config: Any) -> Iterator[None]:
        made = self.trainer.create_accelerator_and_postprocess

        def create_accelerator_and_postprocess() -> None:
            made()
            if self.size > 1:
                self._take_over()

        own = vars(self.trainer)
        own["create_accelerator_and_postprocess"] = create_accelerator_and_postprocess
        try:
            yield
        finally:
            del own["create_accelerator_and_postprocess"]

    def _take_over(self) -> None:
        """Leave accelerate's ring out, and count the processes of a group as one, as under tensor parallelism."""
        trainer, size = self.trainer, self.size
        trainer.accelerator._prepare_cp = lambda *args: args  # hooks that drop masks, and the ring
        flops = trainer.floating_point_ops
        vars(trainer).update(
            _prepare_context_parallel_inputs=lambda model, inputs: (contextlib.nullcontext, inputs),
            get_tp_size=lambda: size,
            get_cp_size=lambda: 1,
            floating_point_ops=lambda inputs: flops(inputs) // size,
        )

    def attach(self) -> None:
        trainer = self.trainer
        if self.size == 1:
            return
        if reason := self._obstacle():
            raise PaddingRemovalError(f"{reason}. Leave it out, or train with `cp_size=1`.")
        mesh = trainer.accelerator.torch_device_mesh
        self.group = Group.of(mesh["cp"].get_group())
        for handle in trainer.padding.handles:
            split_rows(handle, self.group.group, attention=self.settings.cp_attention)
        logger.warning(
            f"`cp_size={self.size}`: each packed row is computed by {self.size} processes, which exchange "
            f"{'heads for tokens' if self.settings.cp_attention == HEADS else 'their keys and values'} at attention, "
            "in place of accelerate's ring attention."
        )

    def _obstacle(self) -> str | None:
        settings, args = self.settings, self.trainer.args
        if not self.trainer.padding.task.takes_layouts:
            return (
                f"{type(self.trainer).__name__} generates rows on every process, and with `cp_size` some share theirs"
            )
        if settings.max_tokens_per_batch is not None:
            return "`max_tokens_per_batch` cuts a step by the processes that have rows, and with `cp_size` some share"
        if settings.exact_eval_means:
            return "`exact_eval_means` tells rows that are repeated by their process, and with `cp_size` some share"
        if args.torch_compile:
            return "Layers compiled by `torch_compile` take a whole packed row, and `cp_size` splits it"
        if self.trainer.is_deepspeed_enabled:
            return "`cp_size` is not split with DeepSpeed, which has process groups of its own"
        return None

    def ready(self) -> None:
        if self.group is not None and hasattr(self.trainer, "_tp_size"):
            self.trainer._tp_size = self.size  # TRL divides the tokens that it has seen by it

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        if self.group is not None:
            self._check_batch(step.inputs)
        yield

    def _check_batch(self, batch: dict[str, Any]) -> None:
        """
        One small reduction for each step, and the host waits for it: of batches that differ no exchange would end.

        Raises:
            ValueError: If the processes of the group have different ids, masks or labels; on each of them.
        """
        assert self.group is not None
        tensors = [x for x in batch.values() if isinstance(x, torch.Tensor) and not x.is_floating_point()]
        numbers = [
            sum(i * n for i, x in enumerate(tensors, 1) for n in (len(x) if x.dim() else 1, 65_537 * x.numel())),
            0,
        ]
        for x in tensors:
            numbers[1] = numbers[1] * 3 + (x.flatten().long() * (torch.arange(x.numel(), device=x.device) + 1)).sum()
        if not self.group.agree(numbers, self.trainer.accelerator.device):
            raise ValueError(
                f"The {self.group.size} processes that share packed rows (`cp_size`) were given different batches. "
                "Shuffle with one seed on all of them, and leave the dispatching of batches to accelerate."
            )

    @contextlib.contextmanager
    def precomputing(self) -> Iterator[None]:
        with self._gathering_once():
            yield

    @contextlib.contextmanager
    def evaluation(self, evaluation: Evaluation) -> Iterator[None]:
        with self._gathering_once():
            yield

    @contextlib.contextmanager
    def _gathering_once(self) -> Iterator[None]:
        """What is gathered is gathered from one process of each group: repeated rows are none of the data."""
        if self.group is None:
            yield
            return
        accelerator, size = self.trainer.accelerator, self.group.size
        gather = accelerator.gather

        def one_of_each(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (accelerator.num_processes, -1))[::size].flatten(0, 1)

        vars(accelerator)["gather"] = lambda x: recursively_apply(one_of_each, gather(x))
        try:
            yield
        finally:
            del vars(accelerator)["gather"]
