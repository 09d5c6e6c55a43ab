"""
Tiny trainings of a mixture of experts that transformers shards while it loads it (`DistributedConfig`).

[`main`] runs trainings in one process of several, one after another. Each process writes to `FOLDER/NAME-RANK.pt` what
was logged, the weights, and what entered the decoder, or the error that stopped it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from kit.methods import METHODS, ONLINE, make_trainer
from kit.trainer_runs import Run, build_tokenizer, confusing_layout, lora, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from zoo import models

import trl_padfix
from trl_padfix.core.anatomy import reshard_parameters
from trl_padfix.core.call import layout_of
from trl_padfix.core.layout import shared_prefixes


__all__ = ["BAD", "SIZES", "save_models", "train"]

BUDGET = {"max_tokens_per_batch": 40}
SIZES: dict[str, dict[str, Any]] = {
    "FSDP2": {"fsdp_size": 2},
    "TP": {"tp_size": 2, "tp_plan": "auto"},
    "EP": {"fsdp_size": 2, "ep_size": 2},
    "TP of attention, EP": {"tp_size": 2, "ep_size": 2},
    "FSDP2 and TP": {"fsdp_size": 2, "tp_size": 2},
    "FSDP2 and EP": {"fsdp_size": 4, "ep_size": 2},
    "FSDP2, TP and EP": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    "FSDP2, replicated": {"fsdp_size": 2, "dp_replicate_size": 2},
}
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "policy": (0, {}),
    "reference": (1, {}),
    "reward": (0, {"num_labels": 1}),
}
"""Seed and configuration of each model."""
ADAPTERS = {"peft_config": lora(target_modules=["q_proj", "v_proj"])}
UNBALANCED = {"output_router_logits": False, "router_aux_loss_coef": 0.0}
"""TRL balances experts over the rows of a process, which is another loss in two."""
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "experts of one batch": ({"tp_size": 2, "ep_size": 2, "tp_plan": {}}, {}, 2, "has no `tp_plan`"),
    "a budget of one batch": (SIZES["TP"], BUDGET, 2, "under tensor parallelism several processes"),
}
"""Sizes, settings and processes of trainings that cannot run, and what each process says."""
MODES: dict[str, dict[str, Any]] = {
    "sharing": {"padding_free": True, "prefix_sharing": True},
    "budget": {"padding_free": True, "prefix_sharing": True} | BUDGET,
    "router logits": {"padding_free": True, "prefix_sharing": True} | BUDGET,  # asked for, and in no loss
    "confused": {"padding_free": True, "prefix_sharing": True, "parity_check": False},
}
ROWS = 8
"""Rows of a step, of all processes."""


def save_models(folder: Path) -> None:
    """Models of [`SHAPES`] with their tokenizer; weights are not tied, which FSDP2 trains wrongly anyhow."""
    for name, (seed, more) in SHAPES.items():
        auto = AutoModelForSequenceClassification if "num_labels" in more else AutoModelForCausalLM
        own = {"num_hidden_layers": 2, "max_position_embeddings": 32768, **UNBALANCED} | more
        model = models.build("qwen3_moe", None, seed, auto, tie_word_embeddings=False, **own)
        if "num_labels" not in more:
            model.generation_config.eos_token_id = [1, 2, 3, 4, 5]
        model.save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)


def load(folder: Path, name: str, sizes: dict[str, Any] | None, **given: Any) -> Any:
    if sizes:
        from transformers.distributed import DistributedConfig  # 5.23 and later

        given["distributed_config"] = DistributedConfig(**sizes)
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    return auto.from_pretrained(folder / name, dtype=torch.float32, **given)


def make(method: str, mode: str, folder: Path, sizes: dict[str, Any] | None, **config: Any) -> Any:
    """A trainer of a model in `folder`; TRL's if no `mode` is given."""
    shared = (sizes or {}).get("tp_size", 1)  # processes that have one batch
    batches = int(os.environ.get("WORLD_SIZE", 1)) // shared
    given: dict[str, Any] = METHODS[method].settings | {
        "per_device_train_batch_size": ROWS // batches,
        "per_device_eval_batch_size": 4 if method in ONLINE else 1,  # TRL's evaluation is a mean over batches
        "max_steps": 3,
        "optim": "sgd",  # Adam would make steps of the rounding of gradients that cancel
        "learning_rate": 0.02,
        "use_cpu": sizes is None,
    }
    asked = {"output_router_logits": True} if mode == "router logits" else {}
    given["model"] = load(folder, "reward" if method == "Reward" else "policy", sizes, **asked)
    if mode.startswith("LoRA"):
        given |= ADAPTERS
    elif method in ("DPO", "Distillation"):
        given["ref_model" if method == "DPO" else "teacher_model"] = load(folder, "reference", sizes, **asked)
    given["eval_dataset"] = METHODS[method].defaults["eval_dataset"]()
    given |= MODES.get(mode.removeprefix("LoRA, "), {}) | config
    trainer = make_trainer(trl if mode in ("", "LoRA") else trl_padfix, method, folder / "run", **given)
    if method in ONLINE:
        answer_from_table(trainer, int(os.environ.get("RANK", 0)) // shared)
    return trainer


def train(method: str, mode: str, folder: Path, sizes: dict[str, Any] | None = None) -> Run:
    """A training and an evaluation."""
    confused = mock.patch.object(layout_of, "prefix_sharing_layout", confusing_layout)
    with confused if mode == "confused" else contextlib.nullcontext():
        return run(make(method, mode, folder, sizes))


def answer_from_table(trainer: Any, batch: int) -> None:
    """Let a trainer complete its prompts, and answer them then by prompt and place: processes draw their own."""
    generate = trainer._generate_single_turn

    def answered(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        found = generate(prompt_ids, *args, **kwargs)
        answers = []
        for i, prompt in enumerate(map(tuple, prompt_ids)):
            place = (batch * len(prompt_ids) + i) % 4
            draw = torch.Generator().manual_seed(hash(prompt) % 1000 + place)
            length = int(torch.randint(2, 11, (), generator=draw))
            answers.append([*torch.randint(6, 38, (length,), generator=draw).tolist(), 1])
        return (answers, *found[1:]) if isinstance(found, tuple) else answers

    trainer._generate_single_turn = answered


def main(path: str, *cells: str) -> None:
    torch.set_num_threads(1)
    shared_prefixes.MIN_SAVED_TOKENS = 1
    folder, rank = Path(path), int(os.environ["RANK"])
    for cell in cells:
        print(f"{cell} begins", file=sys.stderr, flush=True)
        found: dict[str, Any] = {}
        if cell in BAD:
            sizes, config, *_ = BAD[cell]
            trainer = None
            try:
                trainer = make("SFT", "sharing", folder, sizes, **config)
                trainer.train()
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            found["steps"] = trainer.state.global_step if trainer is not None else 0
        else:
            size, method, mode = cell.split("; ")
            done = train(method, mode, folder, SIZES[size])
            reshard_parameters(done.trainer.model)  # the head is gathered after an evaluation
            weights = [p.detach() for p in done.trainer.model.parameters() if p.requires_grad]
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]
            found["run"] = Run(None, done.logs, done.entered, forwards=done.forwards)
            found["weights"] = torch.cat([p.flatten() for p in full])
        torch.save(found, folder / f"{cell}-{rank}.pt")
