"""
Packed rows that several processes compute together: accelerate's `cp_size`, with our split in place of its ring.

Taken from accelerate are the device mesh, the data loader that gives all processes of a group the same batch, and with
FSDP2 the sharding over `dp_shard x cp`. Not taken are ring attention and the cutting of padded rows. For transformers
and TRL a group counts as one under tensor parallelism does: its processes compute the whole loss of one batch.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather, gather_object, parse_flag_from_env, recursively_apply
from datasets import Dataset
from torch import distributed

from ..core.errors import PaddingRemovalError
from ..core.parallel.collectives import Group
from ..core.parallel.layout import HEADS, KEYS
from ..core.split_rows import split_rows
from .distributed import splitting_parallelism
from .field_types import temporarily_set
from .parts import Evaluation, Part, Step


__all__ = ["ContextParallel"]

logger = get_logger(__name__)


class ContextParallel(Part):
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
            if self.settings.padding_free:
                _check_sizes(config)
            made()
            if self.size > 1:
                self._replace_ring_attention()

        own = vars(self.trainer)
        own["create_accelerator_and_postprocess"] = create_accelerator_and_postprocess
        try:
            yield
        finally:
            del own["create_accelerator_and_postprocess"]

    def _replace_ring_attention(self) -> None:
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
        self._check_groups_of_completions()
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
        args, task = self.trainer.args, self.trainer.padding.task
        if not (task.layout_policy or task.generates_for_groups):
            return (
                f"{type(self.trainer).__name__} generates rows on every process, and with `cp_size` some share theirs"
            )
        if task.generates_for_groups:
            if any(getattr(self.trainer, name, None) for name in ("tools", "environment_factories", "rollout_func")):
                return "Tools, environments and `rollout_func` may answer every process that shares rows differently"
            if not isinstance(self.trainer.train_dataset, Dataset):
                return "A stream of prompts is dealt out by processes, and with `cp_size` some share theirs"
        if splitting_parallelism(self.trainer.accelerator, "tp_size"):
            return "`tp_size` splits the weights of a layer over the processes among which `cp_size` splits its rows"
        if args.torch_compile:
            return "Layers compiled by `torch_compile` take a whole packed row, and `cp_size` splits it"
        if self.trainer.is_deepspeed_enabled:
            return "`cp_size` is not split with DeepSpeed, which has process groups of its own"
        return None

    def _check_groups_of_completions(self) -> None:
        """
        Raises:
            ValueError: If the completions of a prompt do not meet in the batches of the groups of processes.
        """
        trainer, size = self.trainer, self.size
        groups = trainer.accelerator.num_processes // size
        rows = {"num_generations": getattr(trainer.args, "generation_batch_size", 0) // size}
        if trainer.eval_dataset is not None:
            rows["num_generations_eval"] = trainer.args.per_device_eval_batch_size * groups
        for name, count in rows.items():
            alike = getattr(trainer, name, None)
            if alike is not None and count % alike:
                raise ValueError(
                    f"With `cp_size={size}` {trainer.accelerator.num_processes} processes have {groups} different "
                    f"batches, {count} completions in all, and `{name}={alike}` does not divide them. Change that or "
                    "the batch size."
                )

    def ready(self) -> None:
        if self.group is not None and hasattr(self.trainer, "_tp_size"):
            self.trainer._tp_size = self.size  # TRL divides the tokens that it has seen by it

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        self.check_batch(step.inputs)
        if self.group is None:
            yield
            return
        generates = self.trainer.padding.task.generates_for_groups
        with self._count_groups_as_processes() if generates else contextlib.nullcontext():
            yield

    def check_batch(self, batch: dict[str, Any]) -> None:
        """
        One small reduction for each step, and the host waits for it: of batches that differ no exchange would end.

        Raises:
            ValueError: If the processes of the group have different ids, masks or labels; on each of them.
        """
        if self.group is None:
            return
        tensors = [x for x in batch.values() if isinstance(x, torch.Tensor) and not x.is_floating_point()]
        numbers = [
            sum(i * n for i, x in enumerate(tensors, 1) for n in (len(x) if x.dim() else 1, 65_537 * x.numel())),
            0,
        ]
        for x in tensors:
            numbers[1] = numbers[1] * 3 + (x.flatten().long() * (torch.arange(x.numel(), device=x.device) + 1)).sum()
        self._require_agreement(numbers)

    def _require_agreement(self, numbers: list[Any]) -> None:
        assert self.group is not None
        if not self.group.agree(numbers, self.trainer.accelerator.device):
            raise ValueError(
                f"The {self.group.size} processes that share packed rows (`cp_size`) were given different batches. "
                "Shuffle with one seed on all of them, and leave the dispatching of batches to accelerate."
            )

    @contextlib.contextmanager
    def generating(self, rows: list[dict[str, Any]]) -> Iterator[None]:
        """
        Around TRL's completing and scoring of the prompts of `rows`: all processes of a group draw alike, here and in
        the shuffling that follows.

        Raises:
            ValueError: If the processes of the group have different prompts; on each of them.
        """
        if self.group is None:
            yield
            return
        self._require_agreement([zlib.crc32(repr([row.get("prompt") for row in rows]).encode())])
        self._sync_rng()
        with self._count_groups_as_processes():
            yield
        self._sync_rng()

    def broadcast_from_first(self, completed: Any) -> Any:
        """What the first process of the group has generated: sampled elsewhere, rounding may have changed a token."""
        if self.group is None:
            return completed
        held = [completed]
        first = distributed.get_global_rank(self.group.group, 0)
        distributed.broadcast_object_list(held, first, group=self.group.group)
        return held[0]

    def _sync_rng(self) -> None:
        """Give all processes of the group the random numbers of its first one."""
        device = self.trainer.accelerator.device
        accelerators = getattr(torch, device.type) if device.type != "cpu" else None
        state = self.broadcast_from_first((torch.get_rng_state(), accelerators and accelerators.get_rng_state(device)))
        torch.set_rng_state(state[0])
        if accelerators:
            accelerators.set_rng_state(state[1], device)

    @contextlib.contextmanager
    def _count_groups_as_processes(self) -> Iterator[None]:
        """
        To TRL a group is one process: standard deviations, quantiles and sums count no row twice.

        Also where a class of the trainer, TRL's or a user's, calls the functions that its module has of accelerate.
        """
        trainer, accelerator, group = self.trainer, self.trainer.accelerator, self.group
        assert group is not None

        class Grouped(type(accelerator)):
            num_processes = property(lambda _: accelerator.num_processes // group.size)
            process_index = property(lambda _: accelerator.process_index // group.size)

            def gather(self, tensor: Any) -> Any:
                return recursively_apply(one_of_each, accelerator.gather(tensor))

        def one_of_each(x: torch.Tensor) -> torch.Tensor:
            return _first_of_each_group(x, accelerator.num_processes, group.size)

        grouped = object.__new__(Grouped)
        grouped.__dict__ = vars(accelerator)  # one state, two ways to see it
        replacing: dict[Any, Callable] = {
            gather: lambda x: recursively_apply(one_of_each, gather(x)),
            gather_object: lambda x: gather_object(x if group.rank == 0 else []),
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(temporarily_set(trainer, "accelerator", grouped))
            for module in {sys.modules[owner.__module__] for owner in type(trainer).__mro__}:
                for name, value in [*vars(module).items()]:
                    if value is gather or value is gather_object:
                        stack.enter_context(temporarily_set(module, name, replacing[value]))
            yield

    @contextlib.contextmanager
    def precomputing(self) -> Iterator[None]:
        with self._gather_without_duplicates():
            yield

    @contextlib.contextmanager
    def evaluation(self, evaluation: Evaluation) -> Iterator[None]:
        with self._gather_without_duplicates():
            yield

    @contextlib.contextmanager
    def _gather_without_duplicates(self) -> Iterator[None]:
        """What is gathered is gathered from one process of each group: repeated rows are none of the data."""
        if self.group is None:
            yield
            return
        accelerator, size, of_all = self.trainer.accelerator, self.group.size, self.trainer.accelerator.gather

        def one_of_each(x: torch.Tensor) -> torch.Tensor:
            return _first_of_each_group(x, accelerator.num_processes, size)

        with temporarily_set(accelerator, "gather", lambda x: recursively_apply(one_of_each, of_all(x))):
            yield


def _check_sizes(config: Any) -> None:
    """
    Raises:
        ValueError: If processes are to share rows, and the sizes do not make as many as there are; on each of them.
    """
    given = getattr(config, "parallelism_config", None)
    if given is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate import ParallelismConfig  # accelerate 1.10 and later

        given = ParallelismConfig()  # what the launcher says
    if given is not None and (given.cp_size or 1) > 1 and given.total_size != config.world_size:
        raise ValueError(
            f"`cp_size={given.cp_size}` and the other sizes of `parallelism_config` make {given.total_size} "
            f"processes, and {config.world_size} were launched. `dp_shard_size` is their number divided by `cp_size`."
        )


def _first_of_each_group(x: torch.Tensor, processes: int, size: int) -> torch.Tensor:
    """Of what all have given, `(processes * n, ...)`, that of the first process of each group of `size`."""
    return x.unflatten(0, (processes, -1))[::size].flatten(0, 1)
