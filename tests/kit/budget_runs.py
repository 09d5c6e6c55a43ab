"""
Tiny trainings by token budget, and the same by fixed batches: on rows, with experts, on images. [`main`] trains in one
process of several.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from datasets import Dataset, IterableDataset
from kit import trainer_runs
from kit.loss_watchers import before_loss
from kit.methods import make_trainer
from kit.observe import entered_tokens
from kit.processes import on_gpus
from kit.rows import build_rows
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer, trained, words
from kit.vision_runs import build_captions, build_pairs, make_vision_trainer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig
from zoo import models

import trl_padfix
from trl_padfix.core.layout import shared_prefixes
from trl_padfix.trainers.batching.micro_batches import micro_batches_of
from trl_padfix.trainers.batching.prefix_schedule import MicroBatchRunner


ROWS, GLOBAL_BATCH = 32, 8

TRAINERS = {"dpo": "DPO", "sft": "SFT"}
ALL_TRAINERS = TRAINERS | {"reward": "Reward", "kto": "KTO"}
BUDGET = {"dpo": 60, "sft": 30, "reward": 60, "kto": 30}
"""Tokens for about two rows of the batch, and more than the longest one alone."""

LOSSES = {"kto": {"loss_type": "apo_zero_unpaired"}}
"""A loss without the KL term of KTO, for which TRL pairs the completions of a device's batch."""

STEPS = 6
LAUNCHED = {"save_strategy": "steps", "save_steps": 5, "max_steps": STEPS}
"""An epoch and a half, and a checkpoint within the second."""


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


def make(name: str, folder: Any, *, ours: bool, adapters: bool = False, **given: Any) -> Any:
    given = {"max_length": 26, "per_device_train_batch_size": GLOBAL_BATCH, "train_dataset": build_data(name)} | given
    given = ({"padding_free": True, "max_tokens_per_batch": BUDGET[name]} if ours else {}) | given
    given |= {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapters else {}
    return make_trainer(trl_padfix if ours else trl, ALL_TRAINERS[name], folder, **given)


assert_same = partial(trainer_runs.assert_same, rtol=1e-5, atol=1e-5)


class Trained(NamedTuple):
    """What a trainer has logged, the tokens of each of its forwards, and the trainer."""

    figures: torch.Tensor
    forwards: list[int]
    trainer: Any


def train(name: str, change: Callable[[Any], Any], *, ours: bool, folder: Any = "unused", **given: Any) -> Trained:
    """Three steps of a trainer that `change` has changed. In ours forwards are only those of the steps."""
    trainer = make(name, folder, ours=ours, **{"max_steps": 3} | ({"parity_check": False} if ours else {}) | given)
    change(trainer)
    forwards = entered_tokens(trainer.model)
    return Trained(trained(trainer), forwards, trainer)


def subclass(trainer: Any, *mixins: type, **members: Any) -> None:
    """Make the class of a trainer one of a user's."""
    trainer.__class__ = type("Own", (*mixins, type(trainer)), members)


def watched(trainer: Any) -> list[list[list[int]]]:
    """Train, and list the tokens of the rows of every micro-batch, step by step."""
    steps, training_step = [], trainer.training_step

    def step(*args: Any, **kwargs: Any) -> Any:
        steps.append([])
        return training_step(*args, **kwargs)

    def look(inputs: Any) -> None:
        if trainer.model.training:
            steps[-1].append(inputs["attention_mask"].sum(1).tolist())

    trainer.training_step = step
    before_loss(trainer, look)
    trainer.train()
    return steps


# -- experts

_EXPERTS = models.SHAPE | {"num_hidden_layers": 2, "head_dim": 8, "num_experts_per_tok": 2}
EXPERTS = {
    "mixtral": lambda: MixtralConfig(**_EXPERTS | {"num_local_experts": 4, "intermediate_size": 24}),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_EXPERTS, num_experts=4, moe_intermediate_size=24),
}
COEFFICIENT = 0.5


def build_experts(kind: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(EXPERTS[kind]())


def make_experts(name: str, kind: str, folder: Any, **given: Any) -> Any:
    given = {"model": build_experts(kind), "max_steps": 4, "router_aux_loss_coef": COEFFICIENT} | given
    given |= {"ref_model": build_experts(kind, seed=1)} if name in ("dpo", "kto") else {}
    return make(name, folder, eval_dataset=build_data(name).select(range(8)), **given)


# -- images

IMAGE_DATA = {"DPO": build_pairs, "SFT": build_captions, "KTO": build_captions}
IMAGES, IMAGE_ROWS, IMAGE_BATCH, IMAGE_STEPS = (2, 0, 1), 12, 6, 3
"""Images of the rows, by turns; rows of the dataset and of a step; steps, of an epoch and a half."""
IMAGE_BUDGETS = {
    "DPO": {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 79},
    "SFT": {"padding_free": True, "max_tokens_per_batch": 64},
}
"""Budgets with which two processes have other numbers of micro-batches in some step."""


def make_on_images(library: Any, kind: str, family: str, folder: Any, **given: Any) -> Any:
    """A trainer of TRL's or of ours on ragged examples with two images, one and none."""
    data = IMAGE_DATA[kind]
    rows = {"train_dataset": data(IMAGE_ROWS, IMAGES), "eval_dataset": data(4, IMAGES, seed=1)}
    settings = {"max_steps": IMAGE_STEPS, "per_device_train_batch_size": IMAGE_BATCH}
    return make_vision_trainer(library, kind, family, folder, **rows | settings | given)


def pictured(kind: str) -> Dataset:
    """Rows of which each has an image."""
    return IMAGE_DATA[kind](IMAGE_ROWS, (2, 1, 1, 3))


def partly_pictured(kind: str) -> Dataset:
    """Rows of which some have images, but one of every three."""
    return IMAGE_DATA[kind](IMAGE_ROWS, (1, 0, 0, 0, 2, 1))


IN_ORDER = {"train_sampling_strategy": "sequential", "eval_dataset": None}

# -- recorded rollouts

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
    given = SETTINGS | {"num_generations": 3, "per_device_train_batch_size": rows, "learning_rate": 1e-2, "beta": 0.0}
    given |= {"max_steps": 4, "num_iterations": 2, "epsilon": 0.01, "max_completion_length": 14}
    given |= {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 14} if ours else {}
    given |= {"model": build_model(), "reward_funcs": recorded.rewards, "train_dataset": recorded.prompts}
    given |= {"processing_class": tokenizer, "rollout_func": recorded}
    return make_trainer(trl_padfix if ours else trl, "GRPO", folder, **given)


def make_grouped(name: str, folder: Any, **config: Any) -> Any:
    """Four steps on rows of which four begin alike."""
    given = {"prefix_sharing": True, "group_by_prefix": True, "train_dataset": build_branching(name), "max_steps": 4}
    return make(name, folder, ours=True, **given | config)


def main(path: str, what: str) -> dict[str, Any]:
    parts = {"rows": train_on_rows, "experts": train_experts, "images": train_on_images, "streams": train_on_streams}
    parts |= {"packed": partial(evaluate, packs=True), "evaluated": partial(evaluate, packs=False)}
    return parts[what](Path(path))


def train_on_rows(folder: Path) -> dict[str, Any]:
    shared_prefixes.MIN_SAVED_TOKENS = 1  # so that prefixes of a few tokens are computed once, too
    # By two, so that accumulation is a part of it.
    per_device = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config = {"per_device_train_batch_size": per_device // 2, "gradient_accumulation_steps": 2} | LAUNCHED
    checkpoints = [None, "checkpoint-5"]
    if on_gpus():  # as FSDP shards
        config, checkpoints = config | {"use_cpu": False, "save_strategy": "no"}, [None]
    logged, prefixes, check = {}, [], MicroBatchRunner.check

    def checked(runner: MicroBatchRunner) -> None:
        prefixes.append(len(runner.plan.prefixes) if runner.plan else 0)
        check(runner)

    MicroBatchRunner.check = checked  # type: ignore[method-assign]
    for name in ALL_TRAINERS:
        for checkpoint in checkpoints:
            trainer = make(name, folder / name, ours=True, **config | LOSSES.get(name, {}))
            trainer.train(resume_from_checkpoint=checkpoint and str(folder / name / checkpoint))
            logged.setdefault(name, []).append(trainer.state.log_history)
    for name, budget in (("dpo", None), ("dpo", BUDGET["dpo"]), ("sft", 44)):
        given = config | {"max_steps": 4, "save_strategy": "no", "max_tokens_per_batch": budget}
        trainer = make_grouped(name, folder / "grouped", **given)
        prefixes.clear()
        trainer.train()
        assert any(prefixes) == (budget is not None)
        logged.setdefault(f"grouped {name}", []).append(trainer.state.log_history)
    if not on_gpus():
        recorded = make_recorded(folder / "recorded", 3)
        recorded.train()
        logged["recorded"] = recorded.state.log_history
    return logged


def train_experts(folder: Path) -> dict[str, Any]:
    """SFT and DPO, with a budget for a whole step and with one that splits it."""
    rows = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config = {"per_device_train_batch_size": rows, "use_cpu": not on_gpus(), "parity_check": False}
    logged: dict[str, Any] = {}
    for name in ("sft", "dpo"):
        for budget in (10**6, BUDGET[name]):
            trainer = make_experts(name, "mixtral", folder, ours=True, max_tokens_per_batch=budget, **config)
            forwards = entered_tokens(trainer.model)
            trainer.train()
            logged.setdefault(name, []).append({"history": trainer.state.log_history, "forwards": forwards})
    return logged


def train_on_images(folder: Path) -> dict[str, Any]:
    """DPO and SFT; where parameters are sharded, TRL's DPO beside them."""
    config = {"per_device_train_batch_size": IMAGE_BATCH // int(os.environ["WORLD_SIZE"]), "eval_dataset": None}
    logged: dict[str, Any] = {}
    if on_gpus():
        os.environ |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,CLIPEncoderLayer"}
        os.environ |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # the buffers of the tower would be lost
        config |= {"use_cpu": False}
        trls = make_on_images(trl, "DPO", "llava", folder, train_dataset=pictured("DPO"), **config)
        trls.train()
        logged["TRL's DPO"] = {"history": trls.state.log_history}
    runs = {kind: (kind, pictured(kind), {}) for kind in IMAGE_BUDGETS}
    runs |= {f"{kind}, some with images": (kind, partly_pictured(kind), IN_ORDER) for kind in IMAGE_BUDGETS}
    for name, (kind, data, more) in runs.items():
        given = {"train_dataset": data, **config, **IMAGE_BUDGETS[kind], **more}
        trainer = make_on_images(trl_padfix, kind, "llava", folder / name, **given)
        counts, step = [], trainer.training_step

        def counted(model: Any, inputs: Any, *args: Any, step: Any = step, counts: Any = counts) -> Any:
            counts.append(len(micro_batches_of(inputs)))
            return step(model, inputs, *args)

        trainer.training_step = counted
        trainer.train()
        gathered = trainer.accelerator.gather(torch.tensor(counts)).view(-1, len(counts)).tolist()
        logged[name] = {"history": trainer.state.log_history, "micro_batches": gathered}
    return logged


def stream_of(rows: Dataset) -> IterableDataset:
    """Rows one by one, with a column that no trainer takes."""
    return IterableDataset.from_generator(lambda: ({**row, "source": i} for i, row in enumerate(rows)))


STREAMED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}


def train_on_streams(folder: Path) -> dict[str, Any]:
    """Three steps and a fourth one of fewer rows, and one of the second pass, of a stream and of a dataset."""
    logged = {}
    for name in TRAINERS:
        rows = build_data(name).select(range(3 * GLOBAL_BATCH + 5))
        for kind, data in {"stream": stream_of(rows), "rows": rows}.items():
            order = {} if kind == "stream" else {"train_sampling_strategy": "sequential"}
            trainer = make(name, folder / name, ours=True, train_dataset=data, **STREAMED, **order)
            trainer.train()
            logged[f"{name}, {kind}"] = trainer.state.log_history
    return logged


def evaluate(folder: Path, packs: bool) -> dict[str, Any]:
    """SFT, TRL's and ours, accumulated, and an evaluation."""
    given = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    given |= {"per_device_eval_batch_size": 2, "eval_dataset": build_rows(8, 1)}
    given |= {"max_length": 48, "packing": True} if packs else {"max_length": 26}
    histories = []
    for library, more in ((trl, {}), (trl_padfix, {"padding_free": True, "exact_eval_means": not packs})):
        trainer = make_trainer(library, "SFT", folder, **given, **more)
        trainer.train()
        trainer.evaluate()
        histories.append(trainer.state.log_history)
    stats = trainer.padding.stats
    return {"histories": histories, "packed": stats.packed_tokens, "padded": stats.padded_tokens}
