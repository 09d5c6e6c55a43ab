"""
Tiny trainings in which processes share every packed row. [`main`] runs some of `TRAININGS` in one process of several,
one after another. Each process writes to `FOLDER/NAME-RANK.pt` what was logged, the weights, and what it computed.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import trl
from datasets import load_from_disk
from kit import experimental_runs
from kit.experimental_runs import STEADY
from kit.methods import METHODS, Maker, Method
from kit.online_runs import save_policy
from kit.split_runs import counted
from kit.trainer_runs import MODES, Run, run
from kit.vision_runs import build_captions, build_pairs, make_vision_trainer

import trl_padfix
from trl_padfix.core import handle
from trl_padfix.core.call.calls import LocalTokens


__all__ = ["LENGTH", "TRAININGS", "TWO_GROUPS", "method_of", "save_material", "train"]

BUDGET = {"max_tokens_per_batch": 60}
LENGTH = 16
FEW = {"packed_multiple_of": LENGTH, "parity_check": False}  # which computes one whole row packed, not split
GROUPED = {"group_by_prefix": True}
HALVES = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
PICTURED = {"DPO": build_pairs, "SFT": build_captions}
SHARDED = {"llava": "LlamaDecoderLayer,CLIPEncoderLayer", "gemma3": "Gemma3DecoderLayer,SiglipEncoderLayer"}
TRAININGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DPO": ("DPO", "short", {}),
    "DPO, a last batch of one pair": ("DPO", "a last batch of one pair", {}),
    "DPO, whole rows": ("DPO", "accumulation", {}),
    "DPO, reentrant checkpointing": ("DPO", "reentrant checkpointing", {}),
    "DPO, LoRA": ("DPO", "lora, checkpointing", {}),
    "DPO, LoRA, precomputed": ("DPO", "lora, precomputed reference", {}),
    "DPO, grouped": ("DPO", "short", GROUPED),
    "DPO, few lengths": ("DPO", "short", FEW),
    "SFT, budget": ("SFT", "accumulation", {"max_tokens_per_batch": 30}),
    "SFT, budget, a long row": ("SFT", "a long row in five", {"max_tokens_per_batch": 112}),
    "SFT, accumulation": ("SFT", "accumulation", {}),
    "Reward, LoRA": ("Reward", "lora", {}),
    "KTO, precomputed": ("KTO", "precomputed reference", {}),
    "TPO": ("TPO", "plain", BUDGET),
    "SFT, budget, images": ("SFT", "images", BUDGET),
    "DPO, images that see themselves": ("DPO", "images that see themselves", {}),
}
"""The method, its case, and what only our configuration says."""

TWO_GROUPS = {"DPO, budget, two groups": ("DPO", "short", BUDGET | HALVES)}
"""As above, with half of the rows for each of two groups, which have other numbers of them in a micro-batch."""


def save_material(folder: Path) -> None:
    """Files that all processes read: TRL lets one process save a model, and one compute the reference for all."""
    save_policy(folder / "policy")
    experimental_runs.build_bytes(str(folder / "policy"))
    for method in (METHODS["DPO"], METHODS["KTO"]):
        for name in ("train_dataset", "eval_dataset"):
            method.defaults[name]().save_to_disk(folder / method.name / name)


def method_of(name: str) -> Method:
    kind = (TRAININGS | TWO_GROUPS)[name][0]
    return METHODS[kind] if kind in METHODS else Method(kind, (), {})


def train(name: str, folder: Path, ours: bool, **config: Any) -> Run:
    """
    A training and an evaluation: ours with prefixes shared, or TRL's, padded; beside `folder` is what
    [`save_material`] has made.
    """
    kind, case, own = (TRAININGS | TWO_GROUPS)[name]
    if kind not in METHODS:
        library, mode = ("trl_padfix", MODES["prefix sharing"] | own) if ours else ("trl", {})
        return experimental_runs.train(kind, library, folder, str(folder.parent / "policy"), **mode, **config)
    if case.startswith("images"):
        # `STEADY`: a bias of keys has no gradient but rounding, in encoders of images.
        extra = STEADY | {"per_device_train_batch_size": 3, "max_steps": 4}
        extra |= MODES["prefix sharing"] | own if ours else {}
        family = "gemma3" if case.endswith("themselves") else "llava"
        rows = {part: PICTURED[kind](n, (2, 0, 1)) for part, n in (("train_dataset", 12), ("eval_dataset", 3))}
        # accelerate looks for the layers of the vision tower's encoders by the names that the model gives.
        with mock.patch.dict(os.environ, {"FSDP_TRANSFORMER_CLS_TO_WRAP": SHARDED[family]}):
            library = trl_padfix if ours else trl
            return run(make_vision_trainer(library, kind, family, folder, **rows | extra | config))
    method = METHODS[kind]
    settings, given = method.cases[case]
    maker = Maker(method, SimpleNamespace(mktemp=lambda part: folder / part))
    maker.policy = str(folder.parent / "policy")  # of the method
    extra = MODES["prefix sharing"] | own if ours else {}
    others = {}
    if "precomputed" in case:
        others = {name: load_from_disk(folder.parent / kind / name) for name in ("train_dataset", "eval_dataset")}
    return run(maker(method.ours if ours else method.theirs, settings | extra | config, **given() | others))


def main(path: str, *names: str) -> None:
    torch.set_num_threads(1)
    folder, rank = Path(path), int(os.environ["RANK"])
    for name in names:
        print(f"{name} begins", file=sys.stderr, flush=True)
        whole = mock.patch.object(handle, "tokens_of", lambda layout, group: LocalTokens(layout))
        with counted() as counts, whole if name.endswith("whole rows") else nullcontext():
            done = train(name, folder / f"{name}-{rank}", ours=True, use_cpu=False)
            parameters = [p.detach() for p in done.trainer.model.parameters() if p.requires_grad]
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
        found = {"run": Run(None, done.logs, 0), "weights": torch.cat([p.flatten() for p in full]), "counts": counts}
        torch.save(found, folder / f"{name}-{rank}.pt")
