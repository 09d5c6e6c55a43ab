"""Every set-up of DPO, each a configuration and what else its trainer is given."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from kit import trainer_runs
from kit.trainer_runs import build_model, lora
from peft import LoraConfig, TaskType, get_peft_model
from zoo import models


STEPS = 20


def build_pairs(count: int, seed: int = 0) -> Dataset:
    """Ragged pairs, some of which have a prompt in common; some answers are cut off."""
    return trainer_runs.build_pairs(count, seed, common=None, end="<eos>")


def build_alike_pairs() -> Dataset:
    """Pairs of which some have two equal answers, and some a rejected one that goes on where the chosen one ends."""
    columns = build_pairs(40).to_dict()
    for i in range(0, 40, 4):
        columns["rejected"][i] = columns["chosen"][i]
        columns["chosen"][i + 1] = columns["rejected"][i + 1].rsplit(" ", 1)[0] + " w2 <eos>"
    return Dataset.from_dict(columns)


def adapters() -> LoraConfig:
    return lora(task_type=TaskType.CAUSAL_LM)


def adapted() -> dict[str, Any]:
    return {"ref_model": None, "peft_config": adapters()}


def adapted_before() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"ref_model": None, "model": get_peft_model(build_model(), adapters())}


def both(architecture: str) -> Any:
    """Policy and reference of another architecture."""
    return lambda: {"model": models.build(architecture), "ref_model": models.build(architecture, seed=1)}


SET_UPS = {
    "checkpointing": ({"gradient_checkpointing": True}, dict),
    "reentrant checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        dict,
    ),
    "accumulation": ({"gradient_accumulation_steps": 2}, dict),
    "synchronised reference": (
        {"max_steps": 7, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6},
        dict,
    ),
    "precomputed reference, ld_alpha": ({"precompute_ref_log_probs": True, "ld_alpha": 0.4}, dict),
    "lora, checkpointing": ({"gradient_checkpointing": True}, adapted),
    "lora, precomputed reference": ({"precompute_ref_log_probs": True}, adapted),
    "an adapter trained before": ({}, adapted_before),
    "experts": ({"router_aux_loss_coef": 0.1}, both("qwen3_moe")),
    "absolute positions": ({}, both("gpt2")),
    # The gradients of equal answers cancel; Adam would make full steps of what rounding leaves of them.
    "answers that are equal, or begin alike": (
        {"optim": "sgd", "learning_rate": 0.02},
        lambda: {"train_dataset": build_alike_pairs()},
    ),
}
CASES = {"plain": ({"max_steps": STEPS}, dict), "short": ({}, dict)}
CASES |= {"a last batch of one pair": ({}, lambda: {"train_dataset": build_pairs(9)})}
CASES |= SET_UPS
