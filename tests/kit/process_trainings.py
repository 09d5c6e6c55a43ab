"""Trainings of several processes, one after the other: TRL's trainer beside ours. `main` runs in each process."""

from __future__ import annotations

import tempfile
from typing import Any

import trl
from kit.budget_runs import build_branching, make_on_images
from kit.methods import ONLINE, make_trainer
from kit.online_runs import load_policy
from kit.processes import on_gpus
from kit.trainer_runs import build_model, lora
from transformers import set_seed
from zoo import models

import trl_padfix


EXPERTS = {"model": lambda: models.build("qwen3_moe"), "ref_model": lambda: models.build("qwen3_moe", seed=1)}
BRANCHING = {
    "train_dataset": lambda: build_branching("SFT", prompts=2),
    "model": lambda: build_model(tie_word_embeddings=False),  # which FSDP2 can shard
}
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("GRPO", "RLOO", "Distillation", "Reward", "KTO")},
    **{f"{kind}, LoRA": (kind, {"peft_config": lora}) for kind in ("GRPO", "DPO")},
    "GRPO, a group on both processes": ("GRPO", {"num_generations": 8, "per_device_train_batch_size": 4}),
    "DPO, balanced experts": ("DPO", EXPERTS | {"router_aux_loss_coef": 1.0}),
    "DPO, images": ("DPO", {"family": "llava"}),
    "DPO, a hook on one process": ("DPO", {}),
    "SFT, fewer rows on one process": ("SFT", BRANCHING),
    "SFT, a hook beside a loss on one process": ("SFT", BRANCHING),
}


def add_hooks(trainer: Any) -> None:
    """Watch gradients on one process, as wandb does."""
    for parameter in trainer.model.parameters() if trainer.accelerator.is_main_process else ():
        parameter.register_hook(lambda gradient: None)


def drop_rows(trainer: Any) -> None:
    """Collate fewer rows on one process."""
    collate = trainer.data_collator
    if not trainer.accelerator.is_main_process:
        trainer.data_collator = lambda rows: collate(rows[:3])


def watch_states(trainer: Any) -> None:
    """Compute a loss of one's own, and watch the states of layers on one process."""
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs)
    for layer in () if trainer.accelerator.is_main_process else trainer.model.model.layers:
        layer.register_forward_hook(lambda module, args, output: None)


CHANGES = {
    "DPO, a hook on one process": add_hooks,
    "SFT, fewer rows on one process": drop_rows,
    "SFT, a hook beside a loss on one process": watch_states,
}
SPLIT = {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 64}


def train(library: Any, name: str, folder: str, **of_mode: Any) -> dict[str, list[float]]:
    """Loss, gradient norm, and (of ours) the shared fraction of three steps."""
    kind, given = TRAININGS[name]
    given = given | of_mode
    given = {name: value() if callable(value) else value for name, value in given.items()}
    given |= {"model": load_policy(f"{folder}/policy")} if kind in ONLINE else {}
    set_seed(0)
    make = make_on_images if "family" in given else make_trainer
    trainer = make(library, kind, folder=tempfile.mkdtemp(), max_steps=3, use_cpu=not on_gpus(), **given)
    CHANGES.get(name, lambda trainer: None)(trainer)
    set_seed(1)  # of the completions
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {name: [log.get(name, 0.0) for log in logs] for name in ("loss", "grad_norm", "padfix/shared_fraction")}


def main(folder: str, *names: str) -> dict[str, Any]:
    """By training: TRL's figures, and ours."""
    return {name: [train(trl, name, folder), train(trl_padfix, name, folder, **SPLIT)] for name in names or TRAININGS}
