"""How a trainer was launched, and which models it computes with; read by what works with any version of TRL."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.errors import PaddingRemovalError
from ..core.handle import PaddingRemoval
from ..core.mixers.mixers import WHOLE


__all__ = [
    "check_launch",
    "data_replicas",
    "datasets_of",
    "is_zero_3",
    "models_of",
    "named_models_of",
    "refuse_whole_rows",
    "splitting_parallelism",
]


def named_models_of(trainer: Any) -> dict[str, Any]:
    """The policy, and the reference and the teacher if they are models of their own."""
    others = {"reference model": "ref_model", "teacher": "teacher_model"}
    found = {name: getattr(trainer, attribute, None) for name, attribute in others.items()}
    own = {n: m for n, m in found.items() if isinstance(m, nn.Module) and m is not trainer.model}
    return {"model": trainer.model} | own


def models_of(trainer: Any) -> list[Any]:
    """The models of [`named_models_of`], the policy first."""
    return [*named_models_of(trainer).values()]


def datasets_of(trainer: Any) -> dict[str, Any]:
    """The datasets of a trainer by name, as far as there are any."""
    evaluated = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    return {name: d for name, d in {"train": trainer.train_dataset, **evaluated}.items() if d is not None}


def check_launch(trainer: Any) -> None:
    """
    Raises:
        PaddingRemovalError: If the model is copied, or rows are split over processes.
    """
    if trainer.args.n_gpu > 1:
        raise PaddingRemovalError(
            f"`nn.DataParallel` on {trainer.args.n_gpu} GPUs runs copies of the model that share one decoder. Launch "
            "with `accelerate launch`, or show one GPU with `CUDA_VISIBLE_DEVICES`."
        )
    if splitting_parallelism(trainer.accelerator, "sp_size"):
        raise PaddingRemovalError(
            "`sp_size` (DeepSpeed's) splits every padded row over processes, and a packed batch has no such rows. "
            "Use `cp_size`, which splits the packed row, or set `padding_free=False`."
        )


def splitting_parallelism(accelerator: Any, *sizes: str) -> str | None:
    """The first of `sizes` (`"tp_size"`, `"cp_size"`, `"sp_size"`) by which several processes share one batch."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    return next((s for s in sizes if parallelism is not None and (getattr(parallelism, s, 1) or 1) > 1), None)


def data_replicas(trainer: Any) -> int:
    """How many processes have the same rows, under tensor parallelism and where they share packed rows."""
    return getattr(trainer, "get_tp_size", lambda: 1)()


def is_zero_3(accelerator: Any) -> bool:
    """Whether DeepSpeed gathers parameters module by module, as they are called."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3


def refuse_whole_rows(handle: PaddingRemoval) -> None:
    """
    Raises:
        PaddingRemovalError: If a decoder is called once for each length of a row, where parameters are sharded.
    """
    for mixer in handle.mixers.that_are(WHOLE):
        raise PaddingRemovalError(
            f"{type(mixer.module).__name__} {mixer.why}, so it is called once for each length of a row. Processes "
            "that shard parameters (FSDP, ZeRO-3) gather them in each call, and would wait for one another for ever "
            "where their rows have other lengths. Train it with DDP or ZeRO-2, or with `padding_free=False`."
        )
