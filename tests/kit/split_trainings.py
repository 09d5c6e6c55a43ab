"""
Tiny trainings in which processes share every packed row. [`main`] runs trainings of `TRAININGS` and `REFUSED` in one
process of several, one after another. Each process writes to `FOLDER/NAME-RANK.pt` what was logged, the weights, and
what it computed, or the error that stopped it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from datasets import load_from_disk
from kit import dpo_runs
from kit.methods import BATCHES, METHODS, ONLINE_DEFAULTS, SCATTERED, Maker, Method
from kit.online_runs import ENDS, ONLINE_SETTINGS, build_prompts, save_policy, without_groups
from kit.split_runs import counted
from kit.trainer_runs import MODES, SETTINGS, Run, build_model, build_tokenizer, run

from trl_padfix.core.handle import PaddingRemoval


__all__ = ["REFUSED", "TRAININGS", "method_of", "save_material", "train"]


def _student() -> Any:
    model = build_model()
    model.generation_config.eos_token_id = ENDS
    return model


ALL = METHODS | {
    "DPO": Method(
        "DPO",
        ("rewards/margins", "logps/chosen", "num_tokens"),
        {"plain": ({}, dict), "short": (dpo_runs.SHORT, dict)}
        | {name: (case.config, case.given) for name, case in dpo_runs.SET_UPS.items()},
        {
            "model": build_model,
            "ref_model": lambda: build_model(seed=1),
            "train_dataset": lambda: dpo_runs.build_pairs(40),
            "eval_dataset": lambda: dpo_runs.build_pairs(12, seed=1),
            "processing_class": build_tokenizer,
        },
        settings=SETTINGS | BATCHES | {"max_length": 26},
    ),
    "Distillation": Method(
        "Distillation",
        ("completions/mean_length", "num_tokens"),
        {"plain": ({}, dict), "accumulation": (SCATTERED, dict)},
        ONLINE_DEFAULTS | {"model": _student, "teacher_model": lambda: build_model(seed=1)},
        settings=without_groups(ONLINE_SETTINGS),
    ),
}

KEYS = {"cp_attention": "keys"}
BUDGET = {"max_tokens_per_batch": 60}
GROUPED = {"group_by_prefix": True, "max_steps": 5}
TRAININGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DPO": ("DPO", "plain", {}),
    "DPO, whole rows": ("DPO", "accumulation", {}),
    "DPO, checkpointing": ("DPO", "checkpointing", KEYS),
    "DPO, reentrant checkpointing": ("DPO", "reentrant checkpointing", {}),
    "DPO, LoRA": ("DPO", "lora, checkpointing", KEYS),
    "DPO, precomputed": ("DPO", "precomputed reference", {}),
    "DPO, LoRA, precomputed": ("DPO", "lora, precomputed reference", {}),
    "DPO, grouped": ("DPO", "plain", GROUPED),
    "DPO, exact means": ("DPO", "short", {"exact_eval_means": True, "per_device_eval_batch_size": 8}),
    "DPO, budget": ("DPO", "short", BUDGET),
    "SFT, budget": ("SFT", "accumulation", BUDGET),
    "SFT": ("SFT", "completions only", KEYS),
    "SFT, accumulation": ("SFT", "accumulation", {}),
    "SFT, LoRA": ("SFT", "lora, checkpointing", {}),
    "Reward": ("Reward", "plain", KEYS),
    "Reward, LoRA": ("Reward", "lora", {}),
    "KTO": ("KTO", "plain", {}),
    "KTO, precomputed": ("KTO", "precomputed reference", KEYS),
    "Distillation": ("Distillation", "plain", {}),
    "Distillation, accumulation": ("Distillation", "accumulation", KEYS),
    "GRPO": ("GRPO", "plain", {}),
    "GRPO, accumulation": ("GRPO", "two steps of a generation", KEYS),
    "GRPO, budget": ("GRPO", "accumulation", BUDGET),
    "GRPO, LoRA": ("GRPO", "lora", {}),
    "GRPO, quantiles": ("GRPO", "quantiles by micro-batch", {}),
    "RLOO": ("RLOO", "plain", KEYS),
    "RLOO, normalised": ("RLOO", "normalised advantages", {}),
}
"""The method, its case, and what only our configuration says."""

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "compiled": ("DPO", "short", {"torch_compile": True}, "PaddingRemovalError: Layers compiled by `torch_compile`"),
    "generation": (
        "DPO",
        "short",
        {"predict_with_generate": True},
        "NotImplementedError: `predict_with_generate=True` gives every process prompts of its own, and `cp_size`",
    ),
    "groups cut": (
        "GRPO",
        "plain",
        {"num_generations": 16},
        "ValueError: With `cp_size=2` 2 processes have 1 different batches, 8 completions in all, and "
        "`num_generations=16` does not divide them",
    ),
    "other prompts": ("GRPO", "plain", {}, "ValueError: The 2 processes that share packed rows (`cp_size`)"),
}
"""As above, and what each process says before the first step."""


def save_material(folder: Path) -> None:
    """What all processes read: of several, TRL lets one save a model, and one compute the reference for all."""
    save_policy(folder / "policy")
    for method in (ALL["DPO"], ALL["KTO"]):
        for name in ("train_dataset", "eval_dataset"):
            method.defaults[name]().save_to_disk(folder / method.name / name)


def method_of(name: str) -> Method:
    return ALL[TRAININGS[name][0]]


def train(name: str, folder: Path, ours: bool, **config: Any) -> Run:
    """
    A training and an evaluation: ours with prefixes shared, or TRL's, padded; beside `folder` is what
    [`save_material`] has made.
    """
    kind, case, own = (TRAININGS | {name: given[:3] for name, given in REFUSED.items()})[name]
    method = ALL[kind]
    settings, given = method.cases[case]
    maker = Maker(method, SimpleNamespace(mktemp=lambda part: folder / part))
    maker.policy = str(folder.parent / "policy")  # of the method
    extra = MODES["prefix sharing"] | own if ours else {}
    others = {"train_dataset": build_prompts(24, seed=int(os.environ["RANK"]))} if name == "other prompts" else {}
    if "precomputed" in case:
        others = {name: load_from_disk(folder.parent / kind / name) for name in ("train_dataset", "eval_dataset")}
    trainer = maker(method.ours if ours else method.theirs, settings | extra | config, **given() | others)
    return run(trainer, lambda *_: None)


def main(path: str, *names: str) -> None:
    torch.set_num_threads(1)
    folder, rank = Path(path), int(os.environ["RANK"])
    for name in names:
        print(f"{name} begins", file=sys.stderr, flush=True)
        whole = mock.patch.object(PaddingRemoval, "slices_of", return_value=None)
        found: dict[str, Any] = {}
        with counted() as counts, whole if name.endswith("whole rows") else mock.MagicMock():
            try:
                done = train(name, folder / f"{name}-{rank}", ours=True, use_cpu=False)
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            else:
                parameters = [p.detach() for p in done.trainer.model.parameters() if p.requires_grad]
                full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
                found = {"run": Run(None, done.logs, 0), "weights": torch.cat([p.flatten() for p in full])}
        torch.save(found | {"counts": counts}, folder / f"{name}-{rank}.pt")
