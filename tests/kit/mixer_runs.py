"""
Tiny trainings of decoders whose layers one packed row cannot serve. [`main`] trains saved models in one process of
several, one after another; each case is a family, a method and a mode, separated by commas.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from kit import trainer_runs
from kit.methods import make_trainer
from kit.processes import on_gpus
from kit.rows import build_rows
from kit.trainer_runs import MODES, words
from transformers import AutoModelForCausalLM, PreTrainedModel
from zoo.families import build
from zoo.family_outcomes import leaking_layouts, stable_topk

import trl_padfix


STEPS, STEP_ROWS = 4, 4
"""Optimizer steps of a launched training, and its rows in each, over all processes."""

SHARDED_LAYERS = {"qwen3_5_text": "Qwen3_5DecoderLayer"}
"""Layers for FSDP, where the model names others that it does not have (of images, for one of text)."""

WITH_BUFFERS = {"nemotron_h", "deepseek_v32"}
"""Models with buffers in their checkpoints (of experts), which accelerate 1.15 cannot hand to other processes."""

build_pairs = partial(trainer_runs.build_pairs, prompt=(2, 14), answer=(1, 10), common=None, end="<eos>")


def build_uneven(kind: str) -> Dataset:
    """
    Rows of which every other two are of one length.

    Distributed in their order, two at a time: one process has nothing to remove in a step, the other one ragged rows.
    """
    draw = random.Random(2)
    rows = (build_pairs(16, 0) if kind == "dpo" else build_rows(16)).to_list()
    for i, row in enumerate(rows):
        if i // 2 % 2 == 0:
            row.update({name: words(draw, 5, 5) for name in row})
    return Dataset.from_list(rows)


@cache
def initial(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A policy and a reference that differs from it."""
    policy, reference = build(family), build(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for own, other in zip(policy.parameters(), reference.parameters(), strict=True):
            if own.dim() >= 2 and own.is_floating_point():
                own.mul_(0.7)  # so large that a leak is seen, and not so large that 20 steps amplify rounding
                other.mul_(0.7 + 0.1 * torch.randn(own.shape, generator=generator))
    return policy, reference


def save_initial(family: str, folder: Path) -> None:
    for name, model in zip(("policy", "reference"), initial(family), strict=True):
        model.save_pretrained(folder / family / name)


UNIFORM_TOKENS = 11
"""Tokens of the rows of one length: twice five words, and the end."""


def hide_tokens(collator: Any, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Hides a token within the rows of one length, which one process of two has."""
    batch = collator(examples)
    uniform = batch["attention_mask"].sum(1) == UNIFORM_TOKENS
    batch["attention_mask"][uniform, 3] = 0
    return batch


def train_saved(kind: str, library: Any, models: Path, output: Path, holes: bool = False, **config: Any) -> list[dict]:
    """Train the models that [`save_initial`] left in a folder, and save the policy; returns the log."""
    given = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 1e-1, "max_grad_norm": 1.0, "max_length": 26}
    given |= {"per_device_eval_batch_size": 2, "train_sampling_strategy": "sequential"} | config
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32) for name in ("policy", "reference")
    )
    data = build_uneven(kind)
    given |= {"model": policy, "train_dataset": data, "eval_dataset": data.select(range(4))}
    given |= {"ref_model": reference} if kind == "dpo" else {}
    trainer = make_trainer(library, kind.upper(), output, **given)
    if holes:
        trainer.data_collator = partial(hide_tokens, trainer.data_collator)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(output))
    return trainer.state.log_history


def main(path: str, *cases: str) -> dict[str, Any]:
    folder, rows = Path(path), STEP_ROWS // int(os.environ["WORLD_SIZE"])
    config: dict[str, Any] = {"per_device_train_batch_size": rows, "use_cpu": not on_gpus()}
    leaks = bool(os.environ.get("BROKEN_LAYOUT"))
    torch.set_num_threads(1)
    logged = {}
    for case in cases:
        print(f"{case} begins", file=sys.stderr, flush=True)
        family, kind, mode = case.split(",")
        os.environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
        if family in SHARDED_LAYERS:
            os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = SHARDED_LAYERS[family]
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(family not in WITH_BUFFERS).lower()
        with stable_topk(), leaking_layouts() if leaks else nullcontext():
            holes = mode == "holes"
            given = config | {"parity_check": not leaks, "holes": holes} | MODES["padding-free" if holes else mode]
            logged[case] = train_saved(kind, trl_padfix, folder / family, folder / case, **given)
    return logged
