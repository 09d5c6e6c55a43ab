"""
Tiny trainings by token budget, and the same by fixed batches. [`main`] trains with all trainers in one process of
several, and resumes in the middle of an epoch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from kit.processes import on_gpus
from kit.trainer_runs import build_model, build_tokenizer, make_trainer, words
from peft import LoraConfig

import trl_padfix
from trl_padfix.core.layout import pieces
from trl_padfix.trainers.steps.once import MicroBatches


ROWS, GLOBAL_BATCH = 32, 8

TRAINERS = {"dpo": "DPO", "sft": "SFT"}
ALL_TRAINERS = TRAINERS | {"reward": "Reward", "kto": "KTO"}
BUDGET = {"dpo": 60, "sft": 30, "reward": 60, "kto": 30}
"""Tokens for about two rows of the batch, and more than the longest one alone."""

LOSSES = {"kto": {"loss_type": "apo_zero_unpaired"}}
"""What several processes are compared with one by: TRL pairs completions for the KL term by the batch of a device."""

LAUNCHED = {"save_strategy": "steps", "save_steps": 6, "max_steps": 9}
"""Nine steps of two epochs and a quarter, and a checkpoint in the middle of the second."""


def build_data(name: str) -> Dataset:
    """Ragged texts of 1 to 24 words, or ragged pairs, each with a prompt of its own."""
    draw = random.Random(0)
    if name == "sft":
        return Dataset.from_list([{"text": words(draw, 1, 24)} for _ in range(ROWS)])
    if name == "kto":
        rows = [{"prompt": words(draw, 1, 12), "completion": words(draw, 1, 12)} for _ in range(ROWS)]
        return Dataset.from_list([row | {"label": i % 3 > 0} for i, row in enumerate(rows)])
    parts = {"prompt": 12, "chosen": 12, "rejected": 12}
    return Dataset.from_list([{part: words(draw, 1, most) for part, most in parts.items()} for _ in range(ROWS)])


def build_branching(name: str, prompts: int = 8) -> Dataset:
    """As many rows, of which every `prompts`-th begins alike: with as many words as they then have of their own."""
    draw = random.Random(1)
    begins = [words(draw, 9, 12) for _ in range(prompts)]
    rows = build_data(name).to_list()
    for i, row in enumerate(rows):
        if name == "sft":
            row["text"] = begins[i % prompts] + " ".join(row["text"].split()[:9])
        else:
            row["prompt"] = begins[i % prompts]
    return Dataset.from_list(rows)


def make(
    name: str, folder: Any, *, ours: bool, data: Dataset | None = None, adapters: bool = False, **config: Any
) -> Any:
    budget = {"padding_free": True, "max_tokens_per_batch": BUDGET[name]} if ours else {}
    settings = {"max_length": 26, "per_device_train_batch_size": GLOBAL_BATCH} | budget | config
    given = {"ref_model": build_model(seed=1)} if name in ("dpo", "kto") and not adapters else {}
    given |= {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapters else {}
    given |= {"model": build_model("reward" if name == "reward" else "causal")}
    given |= {"train_dataset": build_data(name) if data is None else data}
    return make_trainer(trl_padfix if ours else trl, ALL_TRAINERS[name], folder, settings, **given)


ELSEWHERE = ("per_second", "_fraction", "total_flos", "train_loss")
"""Ends of names of what depends on the clock or on the padding."""


def figures(history: list[dict[str, float]], but: Sequence[str] = ()) -> torch.Tensor:
    """Everything else that is logged of each step, `(steps, figures)`, without what is named in `but`."""
    steps = [log for log in history if "loss" in log]
    names = sorted(name for name in steps[0] if not name.endswith((*ELSEWHERE, *but)))
    assert {"loss", "grad_norm"} <= set(names)
    assert len(names) > 4
    return torch.tensor([[log[name] for name in names] for log in steps], dtype=torch.float64)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


TEMPLATE = (
    "{% for m in messages %}{{ 'w5 ' if m.role == 'assistant' else '' }}{{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}{{ 'w5 ' }}{% endif %}"
)


def make_recorded(folder: Any, rows: int, *, ours: bool = True) -> Any:
    """GRPO on two recorded tasks of three trials, both of them in each step of six rows."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trials = [
        {"task": task, "reward": float(i == task), "messages": [
            {"role": "user", "content": f"w{3 + task} " * 6},
            {"role": "assistant", "content": f"w{10 + 3 * task + i} " * (i + 1)},
        ]}
        for task in range(2) for i in range(3)
    ]  # fmt: skip
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    recorded = trl_padfix.RecordedRollouts(Dataset.from_list(trials), tokenizer)
    settings = {"num_generations": 3, "per_device_train_batch_size": rows, "learning_rate": 1e-2}
    settings |= {"max_steps": 4, "num_iterations": 2, "epsilon": 0.01, "max_completion_length": 14}
    settings |= {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 14} if ours else {}
    given = {"model": build_model(), "reward_funcs": recorded.rewards, "train_dataset": recorded.prompts}
    given |= {"processing_class": tokenizer, "rollout_func": recorded}
    return make_trainer(trl_padfix if ours else trl, "GRPO", folder, settings, **given)


def make_grouped(name: str, folder: Any, **config: Any) -> Any:
    """Four steps on rows of which four begin alike."""
    given = {"prefix_sharing": True, "group_by_prefix": True, "data": build_branching(name), "max_steps": 4}
    return make(name, folder, ours=True, **given | config)


def main(path: str) -> dict[str, Any]:
    folder = Path(path)
    pieces.FORWARD = 1  # so that prefixes of a few tokens are computed once, too
    # By two, so that accumulation is a part of it.
    per_device = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config = {"per_device_train_batch_size": per_device // 2, "gradient_accumulation_steps": 2} | LAUNCHED
    checkpoints = [None, "checkpoint-6"]
    if on_gpus():  # as FSDP shards
        config, checkpoints = config | {"use_cpu": False, "save_strategy": "no"}, [None]
    logged, trunks, check = {}, [], MicroBatches.check
    MicroBatches.check = lambda once: (trunks.append(len(once.planned.trunks) if once.planned else 0), check(once))[1]
    for name in ALL_TRAINERS:
        for checkpoint in checkpoints:
            trainer = make(name, folder / name, ours=True, **config | LOSSES.get(name, {}))
            trainer.train(resume_from_checkpoint=checkpoint and str(folder / name / checkpoint))
            logged.setdefault(name, []).append(trainer.state.log_history)
    for name, budget in (("dpo", None), ("dpo", BUDGET["dpo"]), ("sft", 44)):
        given = config | {"max_steps": 4, "save_strategy": "no", "max_tokens_per_batch": budget}
        trainer = make_grouped(name, folder / "grouped", **given)
        trunks.clear()
        trainer.train()
        assert any(trunks) == (budget is not None)
        logged.setdefault(f"grouped {name}", []).append(trainer.state.log_history)
    if not on_gpus():
        recorded = make_recorded(folder / "recorded", 3)
        recorded.train()
        logged["recorded"] = recorded.state.log_history
    return logged
