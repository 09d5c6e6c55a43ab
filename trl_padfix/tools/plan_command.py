"""The command that starts a planned training, with accelerate's configuration; and the data to plan for."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from .plan import Plan, Training
from .reading import reading


__all__ = [
    "DataLengths", "accelerate_config", "flags", "read_lengths", "splitting_flags", "training_command",
]  # fmt: skip


@dataclass(frozen=True)
class DataLengths:
    """Lengths of data, from the figures of `trl-padfix stats`."""

    longest: int  # tokens of the longest row
    distinct_per_row: float | None  # mean over batches of the last size in the file; `None` without batches
    data: str  # name of the data


def read_lengths(path: Path, max_length: int | None) -> DataLengths:
    """
    Read the file that `trl-padfix stats --json` wrote.

    Raises:
        ValueError: If it is another file.
    """
    with path.open("rb") as file, reading(f"the figures {str(path)!r}", "Give what `trl-padfix stats --json` wrote."):
        figures = json.load(file)
    try:
        lengths = figures["lengths"]
        longest = int(lengths["sequence" if "sequence" in lengths else "text"]["max"])
        batches, data = figures["batches"], figures["data"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} has no {error}: give what `trl-padfix stats --json` wrote.") from error
    limits = [n for n in (longest, figures.get("max_length"), max_length) if n]
    per_row = [batch["distinct"] / batch["batch_size"] for batch in batches]
    return DataLengths(min(limits), per_row[-1] if per_row else None, data)


def training_command(plan: Plan, model: str, method: str, data: str, accelerate: Path, flags: list[str]) -> str:
    """
    The command that starts a planned training.

    Args:
        plan ([`Plan`]):
            Plan of the training.
        model (`str`):
            Value of `--model_name_or_path`.
        method (`str`):
            Command of `trl-padfix`.
        data (`str`):
            Name of the data, or a recipe.
        accelerate (`Path`):
            File of accelerate's configuration.
        flags (`list[str]`):
            Further flags, as of [`flags`].
    """
    launch = f"accelerate launch --config_file {shlex.quote(str(accelerate))}{splitting_flags(plan.training)}"
    if data.endswith((".yaml", ".yml")):
        source = ["--config", data]
    else:  # `--dataset_name` takes no single file
        source = ["--dataset_name", "DATA" if Path(data).is_file() else data]
    command = f"{launch} -m trl_padfix {method} {shlex.join(['--model_name_or_path', model, *source])}"
    return " \\\n  ".join([command, *flags])


def accelerate_config(training: Training, folder: Path) -> str:
    """Accelerate's configuration of a training, in YAML: one of those in `folder`, with its number of GPUs."""
    name = "fsdp2" if training.sharded else "multi_gpu" if training.gpus > 1 else "single_gpu"
    if training.loads_sharded:
        name = "multi_gpu"
    config = yaml.safe_load((folder / f"{name}.yaml").read_text()) | {"num_processes": training.gpus}
    return yaml.safe_dump(config, sort_keys=False)


def splitting_flags(training: Training) -> str:
    """Flags of `accelerate launch` for context parallelism; empty without it."""
    if training.split == 1:
        return ""
    shards = training.gpus // training.split
    sizes = f"--parallelism_config_cp_size {training.split} --parallelism_config_dp_shard_size {shards}"
    return f" --use_fsdp --fsdp_version 2 --use_parallelism_config {sizes}"


def flags(plan: Plan, longest: int | None, has_experts: bool = False, row_tokens: int = 1024) -> list[str]:
    """
    Flags of `trl-padfix dpo`, `sft` and so on for a plan.

    Args:
        plan ([`Plan`]):
            Plan of the training.
        longest (`int`, *optional*):
            `--max_length`; `None` for methods without it.
        has_experts (`bool`):
            Whether the model is a mixture of experts.
        row_tokens (`int`):
            Tokens of the longest row, or pair: under tensor parallelism a batch has a number of rows, not a budget.
    """
    training = plan.training
    result = ["--padding_free", "--prefix_sharing auto"]
    result += [f"--max_length {longest}"] if longest else []
    if training.tensor_parallel > 1:  # a budget is refused: the GPUs of a group have one batch
        result.append(f"--per_device_train_batch_size {max(1, plan.tokens // row_tokens)}")
    else:
        result.append(f"--max_tokens_per_batch {plan.tokens}")
    result.append(f"--activation_checkpointing {str(training.checkpointing).lower()}")
    if training.offload:
        result.append("""--activation_checkpointing_kwargs '{"offload": true}'""")
    if training.lora:
        result.append(f"--use_peft --lora_r {training.lora} --lora_target_modules all-linear --dtype bfloat16")
        result += ["--lora_dropout 0"] if has_experts else []  # PEFT puts adapters on experts without dropout only
    if training.quantized:
        result.append("--load_in_4bit" + " --bnb_4bit_quant_storage bfloat16" * training.sharded)
    if training.loads_sharded:
        sizes = {"fsdp_size": training.gpus // training.tensor_parallel, "tp_size": training.tensor_parallel}
        sizes = {name: n for name, n in (sizes | {"ep_size": training.expert_parallel}).items() if n > 1}
        more = {"tp_plan": "auto"} if training.tensor_parallel > 1 else {}
        more |= {"fsdp_mixed_precision": True} if training.sharded else {}
        config = json.dumps({"distributed_config": sizes | more})
        result += [f"--model_init_kwargs '{config}' --save_only_model true"]
    if training.sharded:
        sync = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
        result.append(f"--accelerator_config '{sync}'")
    return result
