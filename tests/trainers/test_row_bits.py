"""The bits of a row in a training: the ratio of an on-policy step of GRPO is one, under a token budget too."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from datasets import Dataset
from kit.cells import slow_but
from kit.methods import make_trainer
from kit.row_bits import SIZE, skip_without_one_order, with_calls_of_segments
from kit.trainer_runs import MODES, build_model, words

import trl_padfix
from trl_padfix.trainers.checks import user_code


user_code.TRUSTED += (__name__,)  # what records here leaves values as they are

BUDGETS = {"padding-free": 1200, "prefix sharing": 600}
"""Less than half of the tokens of a batch."""


@pytest.fixture(autouse=True)
def machine():
    skip_without_one_order()


def build(**more: Any) -> torch.nn.Module:
    return build_model(hidden_size=SIZE, intermediate_size=2 * SIZE, **more)


def texts() -> Dataset:
    """Eight prompts of 160 to 500 tokens that begin alike to different places."""
    draw = random.Random(0)
    begin = words(draw, 400, 400).split()
    prompts = [" ".join(begin[: 130 + 37 * i]) + " " + words(draw, 30, 110) for i in range(8)]
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


class Ratios:
    """The importance ratios of each optimizer step of a GRPO trainer, and its tokens that are trained."""

    def __init__(self, trainer: Any):
        self.trainer, self.steps, self.batches = trainer, {}, {False: set(), True: set()}
        self.scores, self.loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
        trainer._get_per_token_logps_and_entropies, trainer._compute_loss = self.score, self.compute_loss

    def score(self, *args: Any, **kwargs: Any) -> Any:
        result = self.scores(*args, **kwargs)
        size = kwargs.get("batch_size") or len(args[1])
        self.batches[torch.is_grad_enabled()] |= {str(sorted(rows.tolist())) for rows in args[1].split(size)}
        if torch.is_grad_enabled():
            self.trained = result[0].detach()
        return result

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = self.loss(model, inputs)
        ratio = (self.trained - inputs["old_per_token_logps"]).exp()[inputs["completion_mask"].bool()]
        self.steps.setdefault(self.trainer.state.global_step, []).append(ratio)
        return loss


def ratios(folder: Any, **config: Any) -> list[torch.Tensor]:
    """Of two steps on the same completions: the weights that sampled them, and the weights after one step."""
    given = {"model": build(), "train_dataset": texts(), "max_steps": 2, "num_iterations": 2, "beta": 0.0}
    given |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 4}
    given |= {"max_completion_length": 40, "parity_check": False, "learning_rate": 1e-3}
    trainer = make_trainer(trl_padfix, "GRPO", folder, **given | config)
    recorded = Ratios(trainer)
    trainer.train()
    assert len(recorded.batches[True] - recorded.batches[False]) > 1  # training computes other batches than scoring
    return [torch.cat(steps) for steps in recorded.steps.values()]


@pytest.mark.parametrize(
    ("has_budget", "bf16", "mode"),
    slow_but(
        [(False, True, "padding-free"), (False, False, "prefix sharing"), (True, True, "prefix sharing")],
        product([False, True], [True, False], BUDGETS),
    ),
)
def test_the_ratio_of_an_on_policy_step_is_exactly_one(has_budget, bf16, mode, tmp_path):
    budget = {"max_tokens_per_batch": BUDGETS[mode]} if has_budget else {}
    on_policy, off_policy = ratios(tmp_path, bf16=bf16, **MODES[mode], **budget)
    assert len(on_policy) == len(off_policy) > 100
    assert torch.equal(on_policy, torch.ones_like(on_policy))
    assert float((off_policy != 1).float().mean()) > 0.9  # the control: other weights


def test_the_ratio_differs_from_one_with_calls_of_segments(tmp_path, monkeypatch):
    """The control: scoring and training share a prompt in batches of other rows."""
    with_calls_of_segments(monkeypatch)
    on_policy, _ = ratios(tmp_path, **MODES["prefix sharing"])
    assert not torch.equal(on_policy, torch.ones_like(on_policy))
