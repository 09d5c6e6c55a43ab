"""
Tiny trainings under a token budget, and the same without one: on rows, with experts, on images. [`main`] trains in one
process of several.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from kit.methods import make_trainer
from kit.observe import accept_hooks, entered_tokens, has_cache
from kit.processes import on_gpus
from kit.tolerance import tolerance
from kit.trainer_runs import ELSEWHERE, words
from kit.vision_runs import build_captions, build_pairs, make_vision_trainer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig
from zoo import models

import trl_padfix
from trl_padfix.core.layout import shared_prefixes
from trl_padfix.trainers.batching.part_runner import PartRunner


ROWS, GLOBAL_BATCH, STEPS = 40, 8, 3
BUDGETS = {"SFT": 30, "DPO": 60, "Reward": 60, "KTO": 40, "GRPO": 60, "RLOO": 60, "Distillation": 60}
"""Tokens of about a third of a batch, and more than those of the longest row."""
FREE = {"padding_free": True, "parity_check": False}


def build_data(kind: str, count: int = ROWS) -> Dataset:
    """Ragged texts of 1 to 24 words, or ragged pairs or answers, each with a prompt of its own."""
    draw = random.Random(0)
    if kind == "SFT":
        return Dataset.from_list([{"text": words(draw, 1, 24)} for _ in range(count)])
    parts = ("prompt", "completion") if kind == "KTO" else ("prompt", "chosen", "rejected")
    rows: list[dict[str, Any]] = [{part: words(draw, 1, 12) for part in parts} for _ in range(count)]
    return Dataset.from_list([row | ({"label": i % 3 > 0} if kind == "KTO" else {}) for i, row in enumerate(rows)])


def build_branching(kind: str, prompts: int = 8) -> Dataset:
    """As many rows, of which every `prompts`-th begins alike: with as many words as they then have of their own."""
    draw = random.Random(1)
    begins = [words(draw, 9, 12) for _ in range(prompts)]
    rows = build_data(kind).to_list()
    for i, row in enumerate(rows):
        if kind == "SFT":
            row["text"] = begins[i % prompts] + " ".join(row["text"].split()[:9])
        else:
            row["prompt"] = begins[i % prompts]
    return Dataset.from_list(rows)


def make(library: Any, kind: str, folder: Any, *, budget: bool = False, **given: Any) -> Any:
    """A trainer of TRL's or of ours for three steps of eight rows, in ours without padding and within a budget."""
    # Plain gradient descent: Adam makes a step of any size of the rounding of a gradient that nearly cancels.
    settings: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": GLOBAL_BATCH}
    settings |= {"optim": "sgd", "learning_rate": 3e-2, "lr_scheduler_type": "constant"}
    if kind in ("SFT", "DPO", "Reward", "KTO"):
        settings |= {"max_length": 26, "train_dataset": build_data(kind)}
    settings |= (FREE | {"max_tokens_per_batch": BUDGETS[kind]}) if budget else {}
    return make_trainer(library, kind, folder, **settings | given)


def figures_of(trainer: Any) -> torch.Tensor:
    """Train, and return all that was logged of the steps, and the trained weights."""
    trainer.train()
    trained = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    weights = [(p.full_tensor() if isinstance(p, DTensor) else p).double().flatten() for p in trained]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    names = sorted({name for log in logs for name in log if not any(part in name for part in ELSEWHERE)})
    assert len(logs) == STEPS
    assert {"loss", "grad_norm"} <= set(names)
    logged = torch.tensor([[log.get(name, 0.0) for name in names] for log in logs], dtype=torch.float64)
    return torch.cat([logged.flatten(), *weights])


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, factor: float = 1.0) -> None:
    """The same to the rounding of two layers and their backward; `factor` widens it, for negative controls."""
    allowed = factor * tolerance(1.0, terms=64, depth=2 * 8 * 2)
    torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)


class Split(NamedTuple):
    """What a trainer has logged, the tokens of its forwards, the number of chunks of each split batch, itself."""

    figures: torch.Tensor
    forwards: list[int]
    chunks: list[int]
    trainer: Any


def train_split(trainer: Any) -> Split:
    chunks: list[int] = []
    check = PartRunner.check

    def checked(runner: PartRunner) -> None:
        chunks.append(len(runner.parts.rows))
        check(runner)

    forwards: list[int] = []
    layer = next(m for m in trainer.model.modules() if isinstance(m, nn.ModuleList))[0]

    def count(layer: Any, args: Any, kwargs: Any) -> None:
        if not has_cache(kwargs):  # no generation
            forwards.append(args[0].shape[:-1].numel())

    layer.register_forward_pre_hook(count, with_kwargs=True)
    accept_hooks(trainer.model)
    with patch.object(PartRunner, "check", checked):
        return Split(figures_of(trainer), forwards, chunks, trainer)


def subclass(trainer: Any, *mixins: type, **members: Any) -> Any:
    """Make the class of a trainer one of a user's."""
    trainer.__class__ = type("Own", (*mixins, type(trainer)), members)
    return trainer


# -- experts

_EXPERTS = models.SHAPE | {"num_hidden_layers": 2, "head_dim": 8, "num_experts_per_tok": 2}
EXPERTS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**_EXPERTS | {"num_local_experts": 4, "intermediate_size": 24}),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_EXPERTS, num_experts=4, moe_intermediate_size=24),
}


def build_experts(kind: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(EXPERTS[kind]())


# -- images

IMAGE_DATA = {"DPO": build_pairs, "SFT": build_captions}
IMAGES, IMAGE_ROWS, IMAGE_BATCH = (2, 0, 1), 12, 6
"""Images of the rows, by turns; rows of the dataset and of a batch."""
IMAGE_BUDGETS = {"DPO": {"prefix_sharing": True, "max_tokens_per_batch": 79}, "SFT": {"max_tokens_per_batch": 64}}


def make_on_images(library: Any, kind: str, family: str, folder: Any, **given: Any) -> Any:
    """A trainer of TRL's or of ours on ragged examples with two images, one and none."""
    settings = {"max_steps": STEPS, "per_device_train_batch_size": IMAGE_BATCH, "optim": "sgd", "learning_rate": 3e-3}
    rows = {"train_dataset": IMAGE_DATA[kind](IMAGE_ROWS, IMAGES)}
    return make_vision_trainer(library, kind, family, folder, **rows | settings | given)


# -- several processes

LAUNCHED = {"save_strategy": "steps", "save_steps": 5, "max_steps": 6}
"""A checkpoint within the second epoch."""


def main(path: str, what: str) -> dict[str, Any]:
    return {"rows": train_on_rows, "experts": train_experts}[what](Path(path))


def train_on_rows(folder: Path) -> dict[str, Any]:
    """Each trainer, TRL's and ours, and ours again from its checkpoint; then rows grouped by prefix."""
    shared_prefixes.MIN_SAVED_TOKENS = 1  # so that prefixes of a few tokens are computed once, too
    per_device = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config: dict[str, Any] = {"per_device_train_batch_size": per_device // 2, "gradient_accumulation_steps": 2}
    config |= LAUNCHED | ({"use_cpu": False, "save_strategy": "no"} if on_gpus() else {})  # as FSDP shards
    logged: dict[str, Any] = {}
    for kind in ("DPO", "SFT", "Reward", "KTO"):
        for library, checkpoint in ((trl, None), (trl_padfix, None), (trl_padfix, "checkpoint-5")):
            if checkpoint and on_gpus():
                continue
            path = folder / f"{kind}-{library.__name__}"
            trainer = make(library, kind, path, budget=library is trl_padfix, **config)
            trainer.train(resume_from_checkpoint=checkpoint and str(path / checkpoint))
            logged.setdefault(kind, []).append(trainer.state.log_history)
    for kind in ("DPO", "SFT"):
        given = config | {"max_steps": 4, "save_strategy": "no", "group_by_prefix": True, "prefix_sharing": True}
        for tokens in (None, BUDGETS[kind]):
            data = {"train_dataset": build_branching(kind), "max_tokens_per_batch": tokens}
            trainer = make(trl_padfix, kind, folder / "grouped", budget=True, **given | data)
            trainer.train()
            logged.setdefault(f"grouped {kind}", []).append(trainer.state.log_history)
    return logged


def train_experts(folder: Path) -> dict[str, Any]:
    """SFT and DPO, with a budget for a whole batch and with one that splits it."""
    rows = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config = {"per_device_train_batch_size": rows, "use_cpu": not on_gpus(), "router_aux_loss_coef": 0.5}
    logged: dict[str, Any] = {}
    for kind in ("SFT", "DPO"):
        for tokens in (10**6, BUDGETS[kind]):
            given = {"model": build_experts("mixtral"), "max_tokens_per_batch": tokens} | config
            given |= {"ref_model": build_experts("mixtral", seed=1)} if kind == "DPO" else {}
            trainer = make(trl_padfix, kind, folder, budget=True, **given)
            forwards = entered_tokens(trainer.model)
            trainer.train()
            logged.setdefault(kind, []).append({"history": trainer.state.log_history, "forwards": forwards})
    return logged
