"""
Tiny trainings of models with experts by token budget. [`main`] trains SFT and DPO in one process of several, with a
budget for a whole step and with one that splits it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import trl
from kit import models
from kit.budget_runs import ALL_TRAINERS, BUDGET, GLOBAL_BATCH, build_data
from kit.processes import on_gpus
from kit.trainer_runs import make_trainer
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

import trl_padfix


SHAPE = models.SHAPE | {"num_hidden_layers": 2, "head_dim": 8, "num_experts_per_tok": 2}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SHAPE | {"num_local_experts": 4, "intermediate_size": 24}),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=24),
}
COEFFICIENT = 0.5
WHOLE_STEP = 10**6


def build_model(kind: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]())


def make(name: str, kind: str, folder: Any, *, ours: bool, **config: Any) -> Any:
    budget = {"padding_free": True, "max_tokens_per_batch": BUDGET[name]} if ours else {}
    settings = {"max_length": 26, "per_device_train_batch_size": GLOBAL_BATCH, "max_steps": 4}
    settings |= {"router_aux_loss_coef": COEFFICIENT} | budget | config
    data = build_data(name)
    given = {"model": build_model(kind), "train_dataset": data, "eval_dataset": data.select(range(8))}
    given |= {"ref_model": build_model(kind, seed=1)} if name in ("dpo", "kto") else {}
    return make_trainer(trl_padfix if ours else trl, ALL_TRAINERS[name], folder, settings, **given)


def entered(trainer: Any) -> list[int]:
    """Tokens of each forward of the policy."""
    found: list[int] = []
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: found.append(args[0].shape[:2].numel()))
    return found


def main(folder: str) -> dict[str, Any]:
    rows = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config = {"per_device_train_batch_size": rows, "use_cpu": not on_gpus(), "parity_check": False}
    logged: dict[str, Any] = {}
    for name in ("sft", "dpo"):
        for budget in (WHOLE_STEP, BUDGET[name]):
            trainer = make(name, "mixtral", folder, ours=True, max_tokens_per_batch=budget, **config)
            forwards = entered(trainer)
            trainer.train()
            logged.setdefault(name, []).append({"history": trainer.state.log_history, "forwards": forwards})
    return logged
