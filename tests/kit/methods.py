"""
Every method of TRL's, each with the set-ups that must give TRL's trajectory: their trainers, TRL's and ours.

A case of a method is a configuration, and further arguments of its trainer, made again for each trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import trl
from kit import dpo_cases, sft_cases
from kit.online_runs import (
    LOGPS,
    ONLINE_SETTINGS,
    admitted,
    load_policy,
    reward_words,
    save_policy,
    watch_forwards,
    without_groups,
)
from kit.rows import METRICS as SFT_METRICS
from kit.rows import TEMPLATE, build_examples, build_pairs, build_prompts, build_rows
from kit.trainer_runs import SETTINGS, Run, build_model, build_tokenizer, lora, run, watch_inputs
from peft import TaskType
from transformers import PrinterCallback

import trl_padfix
from trl_padfix import versions


PACKED = ["padding-free", "prefix sharing"]
BATCHES = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
ONLINE = {"GRPO": ONLINE_SETTINGS, "RLOO": ONLINE_SETTINGS, "Distillation": without_groups(ONLINE_SETTINGS)}

MODEL = {"model": build_model, "processing_class": build_tokenizer}
REFERENCE = {"ref_model": lambda: build_model(seed=1)}
PROMPTS = {"train_dataset": lambda: build_prompts(24), "eval_dataset": lambda: build_prompts(4, seed=1)}
PAIRS = {"train_dataset": lambda: build_pairs(40), "eval_dataset": lambda: build_pairs(12, seed=1)}
DEFAULTS: dict[str, dict[str, Callable[[], Any]]] = {
    "SFT": {
        "model": build_model,
        "train_dataset": build_rows,
        "eval_dataset": lambda: build_rows(8, 1),
        "processing_class": lambda: build_tokenizer(chat_template=TEMPLATE),
    },
    "DPO": {
        "train_dataset": lambda: dpo_cases.build_pairs(40),
        # One batch: TRL's metrics are means over batches, ours over pairs.
        "eval_dataset": lambda: dpo_cases.build_pairs(8, seed=1),
        **MODEL,
        **REFERENCE,
    },
    "Reward": MODEL | PAIRS | {"model": lambda: build_model("reward")},
    "KTO": {
        "train_dataset": lambda: build_examples(40),
        "eval_dataset": lambda: build_examples(12, seed=1),
        **MODEL,
        **REFERENCE,
        # TRL 1.10 leaves the cache on, and forwards with a cache are not counted: they are those of generation.
        "model": lambda: build_model(use_cache=False),
    },
    "GRPO": MODEL | PROMPTS | {"reward_funcs": lambda: reward_words},
    "RLOO": MODEL | PROMPTS | {"reward_funcs": lambda: reward_words},
    "Distillation": {
        "teacher_model": lambda: build_model(seed=1),
        "train_dataset": lambda: build_prompts(24, begin="w3 w5 w7 w9 "),
        "eval_dataset": lambda: build_prompts(4, seed=1, begin="w3 w5 w7 w9 "),
        **MODEL,
    },
}
"""Arguments of a trainer for which a test sets none."""


def make_trainer(library: Any, kind: str, folder: Any, trainer_class: type | None = None, **given: Any) -> Any:
    """
    The trainer of a `kind` of `trl` or of `trl_padfix`, or a class made of it, which prints nothing.

    Args:
        given:
            Arguments of the trainer, by default tiny models and rows, without an evaluation; and fields of its
            configuration.
    """
    trainer_class = trainer_class or getattr(library, f"{kind}Trainer")
    trls = [c for c in trainer_class.__mro__ if c.__module__.startswith("trl.")]  # the first may pass all on
    own = {name: given.pop(name) for c in trls for name in signature(c).parameters if name in given}
    if kind in ONLINE and "model" not in own:
        own["model"] = load_policy(save_policy(Path(tempfile.mkdtemp()) / "policy"))
    without = {"eval_dataset", *(["ref_model"] if own.get("peft_config") else [])}
    own |= {name: make() for name, make in DEFAULTS.get(kind, {}).items() if name not in own.keys() | without}
    if "args" not in own:
        settings = ONLINE.get(kind, SETTINGS) | {"output_dir": str(folder)} | given
        own["args"] = getattr(library, f"{kind}Config")(**settings)
    torch.manual_seed(0)  # some versions of TRL draw adapters and virtual tokens without a seed
    trainer = trainer_class(**own)
    trainer.remove_callback(PrinterCallback)
    return trainer


@dataclass
class Method:
    """
    A method of TRL's, and how it is trained here.

    Attributes:
        name (`str`): What its trainer's name begins with.
        metrics (`tuple[str, ...]`): Figures of a trajectory beside loss and gradient norm.
        cases (`dict[str, tuple]`): Its set-ups.
        plain (`str`): The case that every mode is tried with.
        settings (`dict`): Configuration of every run.
        side (`bool`): Whether it has a collator, which pads on either side.
        uncounted (`tuple[str, ...]`): Cases in which the layers do not run once for each batch.
        means (`set[str]`): Metrics that are means over micro-batches, which differ where these hold other rows.
    """

    name: str
    metrics: tuple[str, ...]
    cases: dict[str, tuple[dict, Callable[[], dict]]]
    plain: str = "plain"
    settings: dict[str, Any] = field(default_factory=lambda: SETTINGS | BATCHES)
    side: bool = True
    uncounted: tuple[str, ...] = ("checkpointing",)
    means: frozenset[str] = frozenset()

    @property
    def defaults(self) -> dict[str, Callable[[], Any]]:
        return DEFAULTS[self.name]

    @cached_property
    def ours(self) -> type:
        return getattr(trl_padfix, f"{self.name}Trainer")

    @cached_property
    def theirs(self) -> type:
        return getattr(trl, f"{self.name}Trainer")

    def watch(self, config: dict[str, Any], completions: list) -> Callable[[Any, list], None]:
        if not self.side:
            is_distilled = self.name == "Distillation"
            return watch_forwards(completions, "_get_last_hidden_state" if is_distilled else LOGPS)
        has_kl = self.name == "KTO" and config.get("loss_type") != "apo_zero_unpaired"
        return watch_inputs("", *["KL_"] * has_kl)


class Maker:
    """Makes and trains the trainers of a method; those of TRL once for each case."""

    def __init__(self, method: Method, folders: Any):
        self.method, self.folders = method, folders
        self.theirs: Callable[[str], Run] = cache(lambda case: self.train(case, method.theirs))

    @cached_property
    def policy(self) -> str:
        return save_policy(self.folders.mktemp("policy"))

    def __call__(self, trainer_class: type | None = None, config: dict | None = None, **given: Any) -> Any:
        method, trainer_class = self.method, trainer_class or self.method.ours
        package = trl_padfix if issubclass(trainer_class, method.ours) else trl
        settings = method.settings | (config or {})
        if not method.side:
            given.setdefault("model", load_policy(self.policy))
            settings = admitted(getattr(package, f"{method.name}Config"), settings)
        given.setdefault("eval_dataset", method.defaults["eval_dataset"]())
        return make_trainer(package, method.name, self.folders.mktemp("run"), trainer_class, **settings | given)

    def train(
        self,
        case: str,
        trainer_class: type | None = None,
        given: dict | None = None,
        change: Callable[[Any], Any] = lambda trainer: None,
        **config: Any,
    ) -> Run:
        """Train and evaluate a case, with more settings, more of what its trainer is given, and a `change` of it."""
        settings, given_of_case = self.method.cases[case]
        completions: list[list[int]] = []
        watch = self.method.watch(settings | config, completions)
        trainer = self(trainer_class, settings | config, **given_of_case() | (given or {}))
        change(trainer)
        trained = run(trainer, watch)
        trained.completions = completions
        return trained


# -- pairs and single answers

REWARD = {
    "plain": ({}, dict),
    "accumulation": ({"gradient_accumulation_steps": 2}, dict),
    "checkpointing": ({"gradient_checkpointing": True}, dict),
    "lora": ({}, lambda: {"peft_config": lora(task_type=TaskType.SEQ_CLS, modules_to_save=["score"])}),
    "margins": ({}, lambda: {"train_dataset": build_pairs(40).add_column("margin", [i % 3 / 2 for i in range(40)])}),
}
KTO = {
    "plain": ({"max_steps": 10}, dict),  # in the ninth, mismatched completions count
    "apo_zero_unpaired": ({"loss_type": "apo_zero_unpaired"}, dict),
    "accumulation": ({"gradient_accumulation_steps": 2}, dict),
    "checkpointing": ({"gradient_checkpointing": True}, dict),
    "precomputed reference": ({"precompute_ref_log_probs": True}, dict),
    "lora, accumulation": (
        {"gradient_accumulation_steps": 2},
        lambda: {"peft_config": lora(task_type="CAUSAL_LM"), "ref_model": None},
    ),
}
KTO_METRICS = tuple(f"{name}/{of}" for name in ("rewards", "logps", "logits") for of in ("chosen", "rejected"))


# -- online

FOUR = {"max_steps": 4}
SCATTERED = FOUR | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
"""Two groups of four completions, in two micro-batches of one step."""

SAMPLED = {
    "plain": ({}, dict),
    "accumulation": (SCATTERED, dict),
    "checkpointing": (FOUR | {"gradient_checkpointing": True}, dict),
    "lora": (FOUR, lambda: {"peft_config": lora(task_type="CAUSAL_LM")}),
}
RLOO = SAMPLED | {"normalised advantages": (FOUR | {"normalize_advantages": True, "beta": 0.0}, dict)}
GRPO = SAMPLED | {
    "two generations of a step": (SCATTERED | {"steps_per_generation": 2, "gradient_accumulation_steps": 4}, dict),
    "generation without a cache": (FOUR | {"generation_kwargs": {"use_cache": False}}, dict),
    "continuous batching": (
        {
            "max_steps": 2,
            "use_transformers_continuous_batching": True,
            # Else half of the machine's memory becomes its cache.
            "transformers_continuous_batching_config": {"num_blocks": 64, "block_size": 32, "max_batch_tokens": 256},
        },
        lambda: {"eval_dataset": None},
    ),
    "weights by micro-batch": (SCATTERED | {"loss_type": "bnpo"}, dict),
    "quantiles by micro-batch": (SCATTERED | {"top_entropy_quantile": 0.5}, dict),
    "entropy bonus by micro-batch": (SCATTERED | {"entropy_coef": 0.1}, dict),
}
ONLINE_METRICS = ("reward", "reward_std", "kl", "entropy", "completions/mean_length", "num_tokens")
METHODS = {
    method.name: method
    for method in (
        Method(
            "SFT",
            SFT_METRICS,
            sft_cases.CASES,
            plain="completions only",
            settings=SETTINGS | BATCHES | {"max_length": 26},
            # The last three call the model twice.
            uncounted=("checkpointing", "lora, checkpointing", "label smoothing", "a loss of one's own", "wrapped"),
        ),
        Method(
            "DPO",
            ("rewards/margins", "logps/chosen", "num_tokens"),
            dpo_cases.CASES,
            settings=SETTINGS | BATCHES | {"max_length": 26},
            uncounted=(
                *("checkpointing", "reentrant checkpointing", "lora, checkpointing"),
                *("lora, precomputed reference", "an adapter trained before"),
            ),
        ),
        Method("Reward", ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "num_tokens"), REWARD),
        Method(
            "KTO",
            ("kl", "entropy", "num_tokens", *KTO_METRICS),
            KTO,
            uncounted=("checkpointing", "lora, accumulation"),  # adapters run for the reference too
        ),
        Method(
            "GRPO",
            ONLINE_METRICS,
            GRPO,
            settings=ONLINE_SETTINGS,
            side=False,
            # Layers run for the reference too, or in generation without a cache or with paged memory.
            uncounted=("checkpointing", "lora", "generation without a cache", "continuous batching"),
            means=frozenset({"kl", "entropy"}),
        ),
        Method(
            "RLOO",
            ONLINE_METRICS,
            RLOO,
            settings=ONLINE_SETTINGS,
            side=False,
            means=frozenset({"entropy"}),
            uncounted=("checkpointing", "lora"),
        ),
        Method(
            "Distillation",
            ("entropy", "completions/mean_length", "num_tokens"),
            SAMPLED,
            settings=without_groups(ONLINE_SETTINGS),
            side=False,
            uncounted=("checkpointing", "lora"),
            means=frozenset({"entropy"}),
        ),
    )
    if trl.__version__ in versions.NEWER.get(f"{method.name}Trainer", versions.BOUNDS["trl"])
}
"""Methods that the installed TRL has."""
