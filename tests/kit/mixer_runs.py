"""
Tiny trainings of decoders whose layers one packed row cannot serve; as a script, those of one process of several.

`accelerate launch tests/kit/mixer_runs.py FOLDER CASES` trains the saved models of the cases, one after another, and
writes what they logged and their weights. Each case is a family, a method and a mode, separated by commas.
"""

from __future__ import annotations

import json
import os
import random
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback


if __name__ == "__main__":  # a script sees its own folder only
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.families import build
from kit.family_outcomes import leaking_layouts, stable_topk
from kit.processes import leave
from kit.sft_runs import build_rows
from kit.trainer_runs import MODES, SETTINGS, build_tokenizer, words

from trl_padfix import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


TRAINERS = {
    "dpo": ((trl.DPOTrainer, trl.DPOConfig), (DPOTrainer, DPOConfig)),
    "sft": ((trl.SFTTrainer, trl.SFTConfig), (SFTTrainer, SFTConfig)),
}
STEPS, STEP_ROWS = 4, 4
"""Optimizer steps of a launched training, and its rows in each, over all processes."""

SHARDED_LAYERS = {"qwen3_5_text": "Qwen3_5DecoderLayer"}
"""Layers for FSDP, where the model names others that it does not have (of images, for one of text)."""

WITH_BUFFERS = {"nemotron_h", "deepseek_v32"}
"""Models with buffers in their checkpoints (of experts), which accelerate 1.15 cannot hand to other processes."""


def build_pairs(count: int, seed: int) -> Dataset:
    """Ragged pairs, some of which have a prompt in common."""
    draw = random.Random(seed)
    prompts = [words(draw, 2, 14) for _ in range(count // 2)]
    answers = [[words(draw, 1, 10) + "<eos>" for _ in range(2)] for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": draw.choice(prompts), "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    )


def build_uneven(kind: str, count: int = 16) -> Dataset:
    """
    Rows of which every other two are of one length.

    Dealt out in their order by twos, one process has nothing to remove in a step, and the other one ragged rows.
    """
    draw = random.Random(2)
    rows = (build_pairs(count, 0) if kind == "dpo" else build_rows(count)).to_list()
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


def train_saved(kind: str, classes: tuple[type, type], models: Path, output: Path, **config: Any) -> list[dict]:
    """Train the models that [`save_initial`] left in a folder, and save the policy; returns the log."""
    trainer_class, config_class = classes
    settings = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 1e-1, "max_grad_norm": 1.0, "max_length": 26}
    settings |= {"per_device_eval_batch_size": 2, "output_dir": str(output)}
    settings |= {"train_sampling_strategy": "sequential"}
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32) for name in ("policy", "reference")
    )
    data = build_uneven(kind)
    trainer = trainer_class(
        model=policy,
        args=config_class(**SETTINGS | settings | config),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=build_tokenizer(),
        **{"ref_model": reference} if kind == "dpo" else {},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(output))
    return trainer.state.log_history


def main(folder: Path, cases: list[str]) -> None:
    config: dict[str, Any] = {"per_device_train_batch_size": STEP_ROWS // int(os.environ["WORLD_SIZE"])}
    if os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu":  # see `launched.py`
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        config["use_cpu"] = False
    leaks = bool(os.environ.get("BROKEN_LAYOUT"))
    config_of_ours = {"parity_check": not (leaks or os.environ.get("UNCHECKED"))}
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
            theirs, ours = TRAINERS[kind]
            given = (theirs, {}) if os.environ.get("PLAIN_TRL") else (ours, config_of_ours | MODES[mode])
            logged[case] = train_saved(kind, given[0], folder / family, folder / case, **config, **given[1])
    if int(os.environ["RANK"]) == 0:
        (folder / "logged.json").write_text(json.dumps(logged))
    torch.distributed.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
