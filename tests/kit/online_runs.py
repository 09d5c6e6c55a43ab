"""Data and rewards for the tests of GRPO and RLOO, and records of their forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.trainer_runs import SETTINGS, WORDS, build_model, build_tokenizer
from packaging.version import Version
from transformers import PreTrainedModel

from trl_padfix.trainers.checks import user_code


user_code.TRUSTED += (__name__,)  # what watches forwards here leaves their values as they are

LOGPS = "_get_per_token_logps_and_entropies"
"""TRL's method with the forwards that score completions."""

ENDS = [1, 2, 3, 4, 5]
"""Tokens that end a completion: so many that completions are ragged."""


def save_policy(path: Path, **more: Any) -> str:
    """A policy in a directory, where TRL finds the reference again."""
    model = build_model(**more)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def load_policy(path: str, **more: Any) -> PreTrainedModel:
    return build_model().from_pretrained(path, dtype=torch.float32, **more)


def reward_words(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that tells completions apart by their words."""
    scores = {word: (7 * i % 11) / 11 for i, word in enumerate(WORDS)}
    return [sum(scores.get(word, 0.0) for word in completion.split()) / 4 for completion in completions]


ONLINE_SETTINGS = SETTINGS | {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "beta": 0.1,
    "disable_dropout": True,
    "learning_rate": 1e-3,
}


def without_groups(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as distillation takes them, which draws one completion of a prompt."""
    return {name: value for name, value in settings.items() if name != "num_generations"} | {"beta": 0.5}


def watch_forwards(completions: list[list[int]], scores: str = LOGPS):
    """Watch the forwards by which the policy `scores` completions, and all completions that are generated."""

    def watch(trainer: Any, batches: list) -> None:
        take, generate = getattr(trainer, scores), trainer._generate_single_turn
        others = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]

        def taken(model, input_ids, attention_mask, logits_to_keep, *batch_size, **kwargs):
            if not any(model is other for other in others):
                size = next(filter(None, [*batch_size, kwargs.get("batch_size")]), len(input_ids))
                batches.extend(zip(input_ids.split(size), attention_mask.split(size), strict=True))
            return take(model, input_ids, attention_mask, logits_to_keep, *batch_size, **kwargs)

        def generated(*args, **kwargs):
            result = generate(*args, **kwargs)
            completions.extend(result[0] if isinstance(result, tuple) else result)
            return result

        setattr(trainer, scores, taken)
        trainer._generate_single_turn = generated

    return watch


def admitted(config_class: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings; a test of one that the installed versions do not have is skipped."""
    lacking = settings.keys() - config_class.__dataclass_fields__.keys()
    if lacking:
        pytest.skip(f"this version of TRL has no {sorted(lacking)}")
    if settings.get("use_transformers_continuous_batching") and Version(transformers.__version__) < Version("5.8"):
        pytest.skip("continuous batching needs transformers 5.8")
    return settings
