"""Random trainings of three steps, ours against TRL's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import trl
from campaign import HELD, REFUSED
from datasets import Dataset
from kit.methods import make_trainer
from kit.rows import build_prompts
from kit.trainer_runs import build_pairs, lora, rows_for, trajectory

import trl_padfix


LOSSES = {
    "DPO": ["sigmoid", "ipo", "hinge", "robust", "apo_zero", "nca_pair", "sppo_hard", "exo_pair"],
    "KTO": ["kto", "apo_zero_unpaired"],
    "GRPO": ["grpo", "dapo", "dr_grpo", "bnpo"],
}


def draw(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(["DPO", "DPO", "SFT", "SFT", "Reward", "KTO", "GRPO"])
    case = {
        "kind": kind,
        "seed": chance.randrange(1000),
        "rows": chance.randint(9, 24),
        "ours": {"padding_free": chance.random() < 0.8},
        "both": {"gradient_accumulation_steps": chance.choice([1, 1, 2, 3])},
        "lora": chance.random() < 0.25,
        "stream": kind in ("DPO", "SFT") and chance.random() < 0.2,
        "evaluated": kind != "GRPO" and chance.random() < 0.5,
    }
    ours, both = case["ours"], case["both"]
    if ours["padding_free"]:
        ours["prefix_sharing"] = chance.random() < 0.5
    if kind != "GRPO":
        ours["padding_side"] = chance.choice(["left", "right"])
        both["per_device_train_batch_size"] = chance.choice([1, 2, 3, 4])
        both["max_length"] = chance.choice([None, 8, 16, 30])
    if kind in LOSSES:
        both["loss_type"] = chance.choice(LOSSES[kind])
    if kind == "DPO":
        both["precompute_ref_log_probs"] = chance.random() < 0.2 and not case["stream"]
        both["truncation_mode"] = chance.choice(["keep_start", "keep_end"])
        both["beta"] = chance.choice([0.1, 0.5])
    if kind == "SFT":
        both["packing"] = chance.random() < 0.2 and both["max_length"] is not None and not case["stream"]
    if kind in ("DPO", "SFT") and ours["padding_free"] and not case["stream"] and chance.random() < 0.4:
        ours["max_tokens_per_batch"] = chance.choice([30, 60, 200])
    if chance.random() < 0.2:
        both["train_sampling_strategy"] = chance.choice(["sequential", "group_by_length"])
    if chance.random() < 0.15:
        both["dataloader_num_workers"] = 1
    both["gradient_checkpointing"] = chance.random() < 0.25
    return case


def attempt(case: dict[str, Any], folder: Path) -> str:
    theirs = train(case, trl, folder / "trl", case["both"])
    try:
        ours = train(case, trl_padfix, folder / "ours", case["both"] | case["ours"])
    except (trl_padfix.PaddingRemovalError, NotImplementedError, ValueError) as error:
        if isinstance(theirs, Exception) or len(str(error)) > 40:  # in words
            return REFUSED
        raise
    if isinstance(theirs, Exception):
        raise AssertionError(f"TRL refuses and we do not: {theirs}")
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    return HELD


def train(case: dict[str, Any], library: Any, folder: Path, config: dict[str, Any]) -> Any:
    kind, given = case["kind"], {"max_steps": 3} | config
    torch.manual_seed(case["seed"])
    online = kind == "GRPO"
    data = build_prompts(16, seed=case["seed"]) if online else rows_of(kind, case["rows"], case["seed"])
    given["train_dataset"] = data.to_iterable_dataset() if case["stream"] else data
    if case["lora"]:
        given["peft_config"] = lora(task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM")
    if case["evaluated"]:
        given["eval_dataset"] = rows_of(kind, 6, case["seed"] + 1)
    try:
        trainer = make_trainer(library, kind, folder, **given)
        torch.manual_seed(case["seed"])
        trainer.train()
        if case["evaluated"]:
            trainer.evaluate()
    except (ValueError, TypeError, IndexError) as error:
        if library is trl:
            return error
        raise
    # TRL's evaluation loss is a mean over batches, ours too where nothing else is asked for.
    return trajectory(trainer)


def rows_of(kind: str, count: int, seed: int) -> Dataset:
    return rows_for(kind, build_pairs(count, seed, prompt=(1, 10), common=max(2, count // 3)))
