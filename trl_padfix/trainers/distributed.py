"""A trainer, its processes and its models. Works with any version of TRL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather, gather_object
from torch import nn
from transformers import Trainer, TrainerCallback

from ..core.context import temporarily_set
from ..core.errors import PaddingRemovalError
from ..core.model.views import config_of


__all__ = [
    "PaddingFreeTrainer", "PaddingRemover", "check_launch", "data_replicas", "datasets_of", "has_static_graph",
    "is_fsdp2", "is_sharded", "is_zero", "local_metrics_only", "max_over_processes", "models_of", "named_models_of",
    "on_any_process", "raise_on_all", "splitting_parallelism", "step_on_prepared", "sync_gradients_in_last",
]  # fmt: skip


class PaddingFreeTrainer(Trainer):
    """A trainer as tasks and parts use it: TRL's class with `PaddingFreeMixin`, or a test's stand-in."""

    accelerator: Any  # many attributes are optional: only the parallelism that needs them sets them
    padding: Any  # [`Padding`], whose parts read the trainer
    around_user_step: Any


class PaddingRemover(TrainerCallback):
    """A callback that does for other trainers what ours do themselves."""


def named_models_of(trainer: PaddingFreeTrainer) -> dict[str, Any]:
    """The policy, and the reference and the teacher if these are separate models."""
    attributes = {"reference model": "ref_model", "teacher": "teacher_model"}
    others = {name: getattr(trainer, attribute, None) for name, attribute in attributes.items()}
    models = {name: m for name, m in others.items() if isinstance(m, nn.Module) and m is not trainer.model}
    return {"model": trainer.model} | models


def models_of(trainer: PaddingFreeTrainer) -> list[Any]:
    """The models of [`named_models_of`], the policy first."""
    return [*named_models_of(trainer).values()]


def datasets_of(trainer: PaddingFreeTrainer) -> dict[str, Any]:
    """The datasets of a trainer by name, without those that are `None`."""
    evaluated = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    return {name: d for name, d in {"train": trainer.train_dataset, **evaluated}.items() if d is not None}


def check_launch(trainer: PaddingFreeTrainer) -> None:
    """
    Raises:
        PaddingRemovalError: If the model is copied to several devices, or padded rows are split over processes.
    """
    if trainer.args.n_gpu > 1:
        raise PaddingRemovalError(
            f"`nn.DataParallel` on {trainer.args.n_gpu} GPUs runs copies of the model that share one decoder. Set "
            "`CUDA_VISIBLE_DEVICES=0`, or start one process for each GPU (`accelerate launch --multi_gpu`)."
        )
    if splitting_parallelism(trainer.accelerator, "sp_size"):
        raise PaddingRemovalError(
            "`sp_size` (DeepSpeed's) splits every padded row over processes, but a packed batch has no such rows. "
            "Use `cp_size`, which splits the packed row, or set `padding_free=False`."
        )


def splitting_parallelism(accelerator: Accelerator, *sizes: str) -> str | None:
    """The first of `sizes` (`"tp_size"`, `"cp_size"`, `"sp_size"`) that is over 1: processes then share a batch."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    return next((s for s in sizes if parallelism is not None and (vars(parallelism).get(s) or 1) > 1), None)


def data_replicas(trainer: PaddingFreeTrainer) -> int:
    """Number of processes with the same rows, under tensor or context parallelism."""
    return getattr(trainer, "get_tp_size", lambda: 1)()


def is_zero(stage: int, accelerator: Accelerator) -> bool:
    """Whether DeepSpeed shards gradients (2), or also parameters, and gathers them for each call of a module (3)."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == stage


def _is_loaded_sharded(model: torch.nn.Module) -> bool:
    """Whether transformers has loaded a model sharded, by the `dp_size` of its `DistributedConfig`."""
    sizes = getattr(config_of(model), "distributed_config", None)
    return (getattr(sizes, "dp_size", None) or 1) > 1


def has_static_graph(trainer: PaddingFreeTrainer) -> bool:
    """Whether DDP expects every backward to be the same one (`ddp_static_graph`, of transformers 5)."""
    return bool(vars(trainer.args).get("ddp_static_graph")) and trainer.accelerator.num_processes > 1


def is_fsdp2(trainer: PaddingFreeTrainer) -> bool:
    """Whether FSDP2 shards all models: accelerate has wrapped them, or transformers has loaded them sharded."""
    return all(map(_is_loaded_sharded, models_of(trainer))) or getattr(trainer.accelerator, "is_fsdp2", False)


def is_sharded(trainer: PaddingFreeTrainer) -> bool:
    """
    Whether processes with different rows meet in every forward, not only at the end of the step: FSDP, ZeRO-3, and
    models that transformers has loaded sharded, including expert parallelism.
    """
    is_loaded_so = any(map(_is_loaded_sharded, models_of(trainer)))
    return is_loaded_so or trainer.is_fsdp_enabled or is_zero(3, trainer.accelerator)


def max_over_processes(trainer: PaddingFreeTrainer, count: int) -> int:
    """The largest `count` of all processes."""
    if trainer.accelerator.num_processes == 1:
        return count
    return int(gather(torch.tensor([count], device=trainer.args.device)).max())


def on_any_process(trainer: PaddingFreeTrainer, flag: bool) -> bool:
    """Whether `flag` is set on any process."""
    return max_over_processes(trainer, int(flag)) > 0


def local_metrics_only(accelerator: Accelerator, copies: int = 1) -> contextlib.AbstractContextManager[None]:
    """
    A block with the metrics of this process alone: `accelerator.gather` and its like return their argument.

    `copies`: how often `gather` repeats it, for code that expects the tensors of that many processes.
    """

    # Weights differ between processes, so means are weighted before they are reduced, not gathered before.
    def identity(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    def gather(value: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.cat([torch.atleast_1d(value)] * copies) if copies > 1 else value

    others = dict.fromkeys(("pad_across_processes", "reduce"), identity)
    return temporarily_set(accelerator, gather=gather, gather_for_metrics=gather, **others)


def raise_on_all(error: Exception | None) -> None:
    """
    Raise the `error` of one process on all processes, if any has one. Every process must call this.

    Raises:
        RuntimeError: On processes without an `error` of their own, with the text of the other process's error.
    """
    texts = gather_object([error and f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise RuntimeError(f"Process {rank} stopped, and this process would wait for it. Its error: {text}")


@contextlib.contextmanager
def sync_gradients_in_last(trainer: PaddingFreeTrainer, model: torch.nn.Module, is_last: bool) -> Iterator[None]:
    """A block with one of several backwards of a step, whose gradients are reduced over processes in the last one."""
    accelerator = trainer.accelerator
    state = accelerator.gradient_state
    # `no_sync` postpones the reduction. DeepSpeed forbids it, and `sync_each_batch` asks for a reduction each time.
    each = state.plugin_kwargs.get("sync_each_batch", False)
    postpones = not (is_last or each or accelerator.distributed_type == DistributedType.DEEPSPEED)
    with contextlib.ExitStack() as stack:
        stack.callback(state._set_sync_gradients, state.sync_gradients)
        state._set_sync_gradients(state.sync_gradients and is_last)
        if postpones:
            # accelerate does not wrap a model that transformers has loaded sharded.
            is_wrapped = not _is_loaded_sharded(trainer.model)
            stack.enter_context(accelerator.no_sync(model) if is_wrapped else trainer._defer_fsdp_gradient_reduction())
        yield


def step_on_prepared(
    trainer: PaddingFreeTrainer, model: torch.nn.Module, inputs: dict[str, Any], num_items: Any
) -> torch.Tensor:
    """Loss and backward of prepared `inputs`, by transformers' `training_step`; callable within a running one."""
    prepared = temporarily_set(
        trainer,
        _prepare_inputs=lambda inputs: inputs,
        _prepare_context_parallel_inputs=lambda model, inputs: (contextlib.nullcontext, inputs),
    )
    with prepared, torch.autocast(trainer.args.device.type, enabled=False):
        return Trainer.training_step(trainer, model, inputs, num_items)
