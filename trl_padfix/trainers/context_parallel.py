"""
Context parallelism: accelerate's `cp_size`, with `split_rows` of this package in place of ring attention.

accelerate provides the device mesh, the data loader that gives all processes of a group the same batch, and with FSDP2
the sharding over `dp_shard x cp`. Its ring attention, which cuts padded rows, is replaced. transformers and TRL treat
a context-parallel group like a tensor-parallel one: all its processes compute the full loss of one batch.

Under tensor parallelism processes share a batch, too. In trainers that generate, this part makes them draw the same
completions. With TRL alone each process draws its own, and the run hangs when these have different lengths.
"""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather, gather_object, parse_flag_from_env, recursively_apply
from datasets import Dataset
from torch import distributed

from ..core.errors import PaddingRemovalError
from ..core.model.find import find_pretrained
from ..core.parallel.collectives import Group
from ..core.parallel.layout import HEADS, KEYS
from ..core.split_rows import split_rows
from .distributed import models_of, splitting_parallelism
from .parts import Evaluation, Part, Step
from .temporary_attributes import temporarily_set


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .parts import PaddingFreeTrainer


__all__ = ["ContextParallel"]

logger = get_logger(__name__)


class ContextParallel(Part):
    """Distributes packed rows over the processes of accelerate's context-parallel groups."""

    group: Group | None = None

    @property
    def size(self) -> int:
        """Number of processes that share a batch; tensor parallelism counts only in trainers that generate."""
        parallelism: Any = getattr(self.trainer.accelerator, "parallelism_config", None)  # accelerate 1.10
        if parallelism is None or not self.settings.padding_free:
            return 1
        generates = self.trainer.padding.task.supports_cp_generation
        return max(parallelism.cp_size or 1, (parallelism.tp_size or 1) if generates else 1)

    @property
    def _splits_rows(self) -> bool:
        return splitting_parallelism(self.trainer.accelerator, "cp_size") is not None

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        if self.settings.cp_attention not in (HEADS, KEYS):
            raise ValueError(f"`cp_attention` is {HEADS!r} or {KEYS!r}, got {self.settings.cp_attention!r}.")

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[None]:
        original = self.trainer.create_accelerator_and_postprocess

        def create_accelerator_and_postprocess() -> None:
            if self.settings.padding_free:
                _check_sizes(config)
            original()
            if self.size > 1 and self._splits_rows:
                _replace_ring_attention(self.trainer, self.size)

        # On the instance, because Trainer calls it in the middle of its `__init__`.
        name = "create_accelerator_and_postprocess"
        return temporarily_set(self.trainer, name, create_accelerator_and_postprocess)

    def attach_to_models(self) -> None:
        trainer = self.trainer
        if self.size == 1:
            return
        dimension = "cp" if self._splits_rows else "tp"
        if reason := _obstacle(trainer, f"{dimension}_size"):
            raise PaddingRemovalError(f"{reason}. Leave it out, or train with `{dimension}_size=1`.")
        _check_completions_per_prompt(trainer, dimension, self.size)
        mesh: Any = trainer.accelerator.torch_device_mesh
        self.group = Group.of(mesh[dimension].get_group())
        if not self._splits_rows:
            return
        for handle in trainer.padding.handles:
            split_rows(handle, self.group.group, attention=self.settings.cp_attention)
        logger.warning(
            f"`cp_size={self.size}`: each packed row is computed by {self.size} processes, which exchange "
            f"{'heads for tokens' if self.settings.cp_attention == HEADS else 'their keys and values'} at attention, "
            "in place of accelerate's ring attention."
        )

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        self.check_batch(step.inputs)
        if self.group is None:
            yield
            return
        generates = self.trainer.padding.task.supports_cp_generation
        # `gather_for_metrics` also cuts the values of a last batch to its rows, which are those of one process.
        with self._count_groups_as_processes() if generates else self._gather_without_duplicates():
            yield

    def check_batch(self, batch: dict[str, Any]) -> None:
        """
        Compare the batch with those of the other processes of the group: collectives would hang if they differ.

        This costs one small reduction in each step, for which the host waits.

        Raises:
            ValueError: If the processes of the group have different ids, masks or labels; on each of them.
        """
        if self.group is not None:
            self._check_equal(_checksums(batch))

    def _check_equal(self, numbers: list[Any]) -> None:
        assert self.group is not None
        if not self.group.all_equal(numbers, self.trainer.accelerator.device):
            name = "cp_size" if self._splits_rows else "tp_size"
            raise ValueError(
                f"The {self.group.size} processes that share packed rows (`{name}`) were given different batches. "
                "Shuffle with one seed on all of them, and leave the dispatching of batches to accelerate."
            )

    @contextlib.contextmanager
    def generating(self, rows: list[dict[str, Any]] | dict[str, Any]) -> Iterator[None]:
        """
        A block in which TRL completes the prompts of `rows`, or of a batch, and scores them. All processes of a group
        draw the same random numbers, here and in the shuffling that follows.

        Raises:
            ValueError: If the processes of the group have different prompts; on each of them.
        """
        if self.group is None:
            yield
            return
        batch = rows if isinstance(rows, dict) else {"prompt": [row.get("prompt") for row in rows]}
        self._check_equal([zlib.crc32(repr(batch.get("prompt")).encode()), *_checksums(batch)])
        with self.drawing_alike(), self._count_groups_as_processes():
            yield

    @contextlib.contextmanager
    def drawing_alike(self) -> Iterator[None]:
        """A block in which all processes of a group draw the same random numbers and complete prompts alike."""
        if self.group is None:
            yield
            return
        self._sync_rng()
        with contextlib.ExitStack() as stack:
            for model in map(find_pretrained, models_of(self.trainer)):
                # On the instance: also through PEFT, whose `generate` calls that of the model in it.
                stack.enter_context(temporarily_set(model, "generate", self._broadcasting(model.generate)))
            yield
        self._sync_rng()

    def _broadcasting(self, generate: Callable) -> Callable:
        """`generate`, whose tokens are those of the first process of the group."""

        def generate_for_group(*args: object, **kwargs: object) -> object:
            completed = generate(*args, **kwargs)
            is_tensor = isinstance(completed, torch.Tensor)
            ids = self.broadcast_from_first(completed if is_tensor else completed.sequences)
            if not is_tensor:
                completed.sequences = ids
            return ids if is_tensor else completed

        return generate_for_group

    def sampler(self, sampler: Any) -> Any:
        """A sampler, adapted to groups: TRL's sampler of prompts has a batch for each process, a group needs one."""
        if self.size > 1 and hasattr(sampler, "mini_repeat_count"):
            sampler.batch_size //= self.size
        return sampler

    def broadcast_from_first(self, completed: Any) -> Any:
        """
        The object of the first process of the group.

        On other processes rounding may have changed a sampled token, or a reward function may have returned another
        value.
        """
        if self.group is None:
            return completed
        objects = [completed]
        first = distributed.get_global_rank(self.group.group, 0)
        distributed.broadcast_object_list(objects, first, group=self.group.group)
        sent = objects[0]
        return sent.to(self.trainer.accelerator.device) if isinstance(sent, torch.Tensor) else sent

    def _sync_rng(self) -> None:
        """Set the random number generators of all processes of the group to the states of its first one."""
        device = self.trainer.accelerator.device
        device_module = getattr(torch, device.type) if device.type != "cpu" else None
        states = random.getstate(), torch.get_rng_state(), device_module and device_module.get_rng_state(device)
        states = self.broadcast_from_first(states)
        random.setstate(states[0])  # by it GKD draws whether a step generates
        torch.set_rng_state(states[1])
        if device_module:
            device_module.set_rng_state(states[2], device)

    @contextlib.contextmanager
    def _count_groups_as_processes(self) -> Iterator[None]:
        """
        A block in which TRL counts a group as one process: standard deviations, quantiles and sums count no row twice.

        This includes functions of accelerate that the modules of the trainer's classes have imported.
        """
        trainer, accelerator, group = self.trainer, self.trainer.accelerator, self.group
        assert group is not None

        class Grouped(type(accelerator)):
            num_processes = property(lambda _: accelerator.num_processes // group.size)
            process_index = property(lambda _: accelerator.process_index // group.size)

            def gather(self, tensor: Any) -> Any:
                return recursively_apply(first_of_each, accelerator.gather(tensor))

        def first_of_each(x: torch.Tensor) -> torch.Tensor:
            return _first_of_each_group(x, accelerator.num_processes, group.size)

        grouped = object.__new__(Grouped)
        grouped.__dict__ = vars(accelerator)  # the same state: only the properties of the class differ
        replacing: dict[Any, Callable] = {
            gather: lambda x: recursively_apply(first_of_each, gather(x)),
            gather_object: lambda x: gather_object(x if group.rank == 0 else []),
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(temporarily_set(trainer, "accelerator", grouped))
            for module in {sys.modules[owner.__module__] for owner in type(trainer).__mro__}:
                for name, value in [*vars(module).items()]:
                    if value is gather or value is gather_object:
                        stack.enter_context(temporarily_set(module, name, replacing[value]))
            yield

    def around_ref_logps(self) -> contextlib.AbstractContextManager[None]:
        return self._gather_without_duplicates()

    def around_evaluation_loop(self, evaluation: Evaluation) -> contextlib.AbstractContextManager[None]:
        return self._gather_without_duplicates()

    @contextlib.contextmanager
    def _gather_without_duplicates(self) -> Iterator[None]:
        """A block in which `accelerator.gather` takes one process of each group: the others have the same rows."""
        accelerator = self.trainer.accelerator
        # `gather_for_metrics` of the class calls `gather`; one that a user has set on the instance may not.
        names = [name for name in ("gather", "gather_for_metrics") if name == "gather" or name in vars(accelerator)]
        with contextlib.ExitStack() as stack:
            for name in names if self.group is not None else ():
                of_groups = self._of_groups(getattr(accelerator, name))
                stack.enter_context(temporarily_set(accelerator, name, of_groups))
            yield

    def _of_groups(self, gather_all: Callable) -> Callable:
        """`gather_all` with the rows of one process of each group, where it gives those of all processes."""
        assert self.group is not None
        size, processes = self.group.size, self.trainer.accelerator.num_processes

        def gather_of_groups(values: object, *args: object, **kwargs: object) -> Any:
            def first_of_each(x: torch.Tensor) -> torch.Tensor:
                gathered = gather_all(x, *args, **kwargs)
                # Not all: an outer block of this kind has taken one process of each group already, or `gather` is
                # switched off, because the metrics of a micro-batch stay local.
                is_all = len(gathered) == processes * (len(x) if x.dim() else 1) if gathered.dim() else False
                return _first_of_each_group(gathered, processes, size) if is_all else gathered

            return recursively_apply(first_of_each, values)

        return gather_of_groups

    def gathering_from_all(self) -> contextlib.AbstractContextManager[None]:
        """A block with accelerate's own `gather`: Trainer itself divides this label count by the group's size."""
        accelerator = self.trainer.accelerator
        if self.group is None:
            return contextlib.nullcontext()
        return temporarily_set(accelerator, "gather", partial(type(accelerator).gather, accelerator))


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


def _obstacle(trainer: PaddingFreeTrainer, size: str) -> str | None:
    """Why the processes of this trainer cannot share a batch, or `None`. `size`: `"cp_size"` or `"tp_size"`."""
    task = trainer.padding.task
    if task.generates_rows and not task.supports_cp_generation:
        return f"{type(trainer).__name__} generates rows on every process, and with `{size}` some share theirs"
    if task.supports_cp_generation:
        if any(getattr(trainer, name, None) for name in ("tools", "environment_factories", "rollout_func")):
            return "Tools, environments and `rollout_func` may answer every process that shares rows differently"
        if task.generates_within_step and getattr(trainer.args, "use_vllm", False):
            return f"{type(trainer).__name__} with `use_vllm` completes the prompts of every process by themselves"
        if not isinstance(trainer.train_dataset, Dataset):
            return f"A stream of prompts is distributed to processes, and with `{size}` some share theirs"
    if size == "tp_size":
        return None
    if splitting_parallelism(trainer.accelerator, "tp_size"):
        return "`tp_size` splits the weights of a layer over the processes among which `cp_size` splits its rows"
    if trainer.is_deepspeed_enabled:
        return "`cp_size` is not split with DeepSpeed, which has process groups of its own"
    return None


def _check_completions_per_prompt(trainer: PaddingFreeTrainer, dimension: str, size: int) -> None:
    """
    Raises:
        ValueError: If the completions of a prompt are not together in the batches of the groups of processes.
    """
    groups = trainer.accelerator.num_processes // size
    rows = {"num_generations": getattr(trainer.args, "generation_batch_size", 0) // size}
    if trainer.eval_dataset is not None:
        rows["num_generations_eval"] = trainer.args.per_device_eval_batch_size * groups
    for name, count in rows.items():
        completions = getattr(trainer, name, None)
        if completions is not None and count % completions:
            raise ValueError(
                f"With `{dimension}_size={size}` {groups * size} processes have {groups} different "
                f"batches, {count} completions in all, and `{name}={completions}` does not divide them. Change that "
                "or the batch size."
            )


def _checksums(batch: dict[str, Any]) -> list[Any]:
    """
    Two numbers for the whole-number tensors of a batch: one differs if numbers of rows, sizes or the order of tensors
    differ, and one on the device if values do (but for rare collisions).
    """
    shapes: int = 0
    values: Any = 0
    tensors = [x for x in batch.values() if isinstance(x, torch.Tensor) and not x.is_floating_point()]
    for i, x in enumerate(tensors, 1):
        # Sizes are multiplied with a prime that is larger than numbers of rows, so that the two do not cancel out; the
        # position `i` distinguishes orders.
        shapes += i * ((len(x) if x.dim() else 1) + 65_537 * x.numel())
        # Weights by position, within a tensor and (`* 3`) among tensors: swapped values have another checksum. int64
        # may overflow, which is the same on all processes.
        weights = torch.arange(x.numel(), device=x.device) + 1
        values = values * 3 + (x.flatten().long() * weights).sum()
    return [shapes, values]


def _check_sizes(config: TrainingArguments) -> None:
    """
    Raises:
        ValueError: If processes share rows and the product of the sizes is not their number; on each of them.
    """
    parallelism = getattr(config, "parallelism_config", None)
    if parallelism is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate import ParallelismConfig  # accelerate 1.10 and later

        parallelism = ParallelismConfig()  # reads the environment of the launcher
    if parallelism is not None and (parallelism.cp_size or 1) > 1 and parallelism.total_size != config.world_size:
        raise ValueError(
            f"`cp_size={parallelism.cp_size}` and the other sizes of `parallelism_config` make "
            f"{parallelism.total_size} processes, and {config.world_size} were launched. `dp_shard_size` is their "
            "number divided by `cp_size`."
        )


def _first_of_each_group(x: torch.Tensor, processes: int, size: int) -> torch.Tensor:
    """The part of a gathered tensor, `(processes * n, ...)`, that comes from the first process of each group."""
    return x.unflatten(0, (processes, -1))[::size].flatten(0, 1)
