"""TRL's experimental trainers and ours on tiny data: what each is given, and what is compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from kit.methods import make_trainer
from kit.online_runs import load_policy, reward_words
from kit.rows import build_prompts
from kit.trainer_runs import Run, build_model, build_tokenizer, run, watch_decoder, words
from transformers import AutoTokenizer

from trl_padfix.tools.tiny import train_tokenizer


BEGIN = "w3 w5 w7 w9 "
"""The beginning of every prompt."""

TEMPLATE = (
    "{% for m in messages %}{{ 'w3 ' if m['role'] == 'user' else 'w4 ' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %} <eos> {% endif %}{% endfor %}{% if add_generation_prompt %}w4 {% endif %}"
)


def build_texts(*parts: str) -> Callable[[int, int], Dataset]:
    def build(count: int, seed: int) -> Dataset:
        draw = random.Random(seed)
        rows = [{p: words(draw, 2, 12) for p in parts} | {"prompt": BEGIN + words(draw, 2, 18)} for _ in range(count)]
        return Dataset.from_list(rows)

    return build


def build_chats(count: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    chats = [(BEGIN + words(draw, 2, 18), words(draw, 2, 12)) for _ in range(count)]
    roles = ("user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": r, "content": c} for r, c in zip(roles, chat, strict=True)]} for chat in chats]
    )


def reward_half(completions: list[str], **kwargs: Any) -> list[float]:
    """1 for about half of all completions."""
    return [float(reward > 0.5) for reward in reward_words(completions)]


@dataclass(frozen=True)
class Experiment:
    """Settings of a trainer, its data, what else it is given, and whether TRL can evaluate it."""

    settings: dict[str, Any]
    data: Callable[[int, int], Dataset] = lambda *given: build_prompts(*given, begin=BEGIN)
    given: Callable[[str], dict[str, Any]] = lambda policy: {}
    tokenizer: dict[str, Any] = field(default_factory=lambda: {"padding_side": "left"})
    evaluates: bool = True


def reward(function: Callable) -> Callable[[str], dict[str, Any]]:
    return lambda policy: {"reward_funcs": function}


def build_bytes(policy: str) -> dict[str, Any]:
    """Models for a tokenizer of bytes, and the tokenizer, which is in the folder of the teacher too."""
    folder = f"{policy}/teacher"
    if not Path(folder, "tokenizer.json").exists():  # equal counts are merged in another order each time
        tokenizer = train_tokenizer((row["messages"][0]["content"] for row in build_chats(24, 0)), vocab_size=320)
        # The config of the model decides the class of the tokenizer, so both are there before either is loaded.
        build_model(seed=1, vocab_size=len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    student, teacher = (build_model(seed=seed, vocab_size=len(tokenizer)) for seed in (0, 1))
    teacher.config._name_or_path = folder
    return {"model": student, "teacher_model": teacher, "processing_class": tokenizer}


ROWS = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
GROUPS = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_generations": 4}
PAIRS = Experiment(ROWS | {"max_length": 40}, build_texts("chosen", "rejected"), tokenizer={"bos_token": "<bos>"})
CHATS = ROWS | {"max_length": 48, "temperature": 1.0}
BYTES = {"max_length": 128, "max_completion_length": 12}
REWARDED = {"given": reward(reward_words)}
FROM_SELF = {"max_completion_length": 12, "distillation_mode": "full_logits", "distillation_topk": None}

EXPERIMENTS = {
    "ORPO": PAIRS,
    "CPO": Experiment(PAIRS.settings | {"cpo_alpha": 0.5}, PAIRS.data, tokenizer=PAIRS.tokenizer),
    "TPO": Experiment(PAIRS.settings | {"beta": 0.1}, build_texts("chosen", "rejected", "reference")),
    "GKD": Experiment(
        CHATS | {"max_new_tokens": 12},
        build_chats,
        lambda policy: {"teacher_model": build_model(seed=1)},
        {"chat_template": TEMPLATE},
    ),
    "GOLD": Experiment(CHATS | BYTES, build_chats, build_bytes),
    "IWOPD": Experiment(CHATS | BYTES, build_chats, build_bytes),
    "OnlineDPO": Experiment(ROWS | {"max_new_tokens": 12}, evaluates=False, **REWARDED),
    "SDFT": Experiment(GROUPS | FROM_SELF, build_texts("privileged_context")),
    "SDPO": Experiment(GROUPS | FROM_SELF | {"success_reward_threshold": 0.5, "distillation_weight": 0.5}, **REWARDED),
    "GMPO": Experiment(GROUPS | {"max_completion_length": 12, "beta": 0.1}, **REWARDED),
    "A2PO": Experiment(ROWS | {"max_completion_length": 12, "num_value_samples": 4}, given=reward(reward_half)),
}
STEADY = {"adam_epsilon": 1e-4}
"""Else a weight whose gradient is all but zero moves as far as any other, by the sign of a rounding error."""

MODULES = {"OnlineDPO": "online_dpo", "IWOPD": "iw_opd"}


def module(name: str, library: str) -> Any:
    """The module of `trl` or `trl_padfix` that holds an experiment."""
    return import_module(f"{library}.experimental.{MODULES.get(name, name.lower())}")


def classes(name: str, library: str) -> tuple[type, type]:
    """Trainer and configuration of `trl` or of `trl_padfix`."""
    return getattr(module(name, library), f"{name}Trainer"), getattr(module(name, library), f"{name}Config")


def build(name: str, library: str, folder: Any, policy: str, **given: Any) -> Any:
    experiment = EXPERIMENTS[name]
    data = {"train_dataset": experiment.data(24, 0)}
    data |= {"eval_dataset": experiment.data(8, 1)} if experiment.evaluates else {}
    plain = {"model": load_policy(policy), "max_steps": 10} | data
    given = plain | experiment.given(policy) | STEADY | experiment.settings | given
    given.setdefault("processing_class", build_tokenizer(**experiment.tokenizer))
    return make_trainer(module(name, library), name, folder, **given)


def train(name: str, library: str, folder: Any, policy: str, **config: Any) -> Run:
    """Ten steps, and an evaluation."""

    def watch(trainer: Any, batches: list) -> None:
        if library == "trl":
            watch_decoder(trainer, batches)
        random.seed(0)
        torch.manual_seed(0)

    return run(build(name, library, folder, policy, **config), watch)
