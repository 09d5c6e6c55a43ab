"""A trainer that the package does not have, in a few lines: ORPO, which TRL keeps among its experiments."""

import inspect
import random
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from kit.trainer_runs import MODES, SETTINGS, assert_same, break_mode, build_model, build_tokenizer, words
from transformers import PrinterCallback

from trl_padfix import ParityError
from trl_padfix.trainers.base import PaddingFreeMixin
from trl_padfix.trainers.config import PackingConfig
from trl_padfix.trainers.task import Task


orpo = pytest.importorskip("trl.experimental.orpo")


@dataclass
class ORPOConfig(PackingConfig, orpo.ORPOConfig):
    """TRL's, with `padding_free`, `prefix_sharing` and `parity_check`."""


class ORPOTask(Task):
    """Pairs that TRL joins in the step."""

    def padded_batches(self, inputs):
        both = self.trainer.concatenated_inputs(inputs, padding_value=self.trainer.padding_value)
        return [{name: both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}]


class ORPOTrainer(PaddingFreeMixin, orpo.ORPOTrainer):
    """TRL's, without padding."""

    task_class = ORPOTask

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        with self.observe_step(model, batch):  # TRL's evaluation does not go through `compute_loss`
            return super().get_batch_loss_metrics(model, batch, train_eval)


def build_pairs(count: int, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    parts = {"prompt": 18, "chosen": 12, "rejected": 12}
    return Dataset.from_list([{part: words(draw, 2, most) for part, most in parts.items()} for _ in range(count)])


def train(folder, trainer_class=ORPOTrainer, config_class=ORPOConfig, **config):
    settings = SETTINGS | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "max_length": 26}
    trainer = trainer_class(
        model=build_model(),
        args=config_class(str(folder), **settings | config),
        train_dataset=build_pairs(24),
        eval_dataset=build_pairs(11, seed=1),
        processing_class=build_tokenizer(bos_token="<bos>"),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.evaluate()
    return trainer


def trajectory(trainer) -> torch.Tensor:
    logs = trainer.state.log_history
    steps = [[log[n] for n in ("loss", "grad_norm", "rewards/margins", "nll_loss")] for log in logs if "loss" in log]
    ends = [[log["eval_loss"], 0, *(log[f"eval_{n}"] for n in ("rewards/margins", "nll_loss"))] for log in logs[-1:]]
    return torch.tensor(steps + ends)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    trainer = train(tmp_path_factory.mktemp("theirs"), orpo.ORPOTrainer, orpo.ORPOConfig)
    return trajectory(trainer), trainer


@pytest.mark.parametrize("mode", MODES)
def test_orpo_is_trls_in_every_mode(mode, theirs, tmp_path):
    trainer = train(tmp_path, **MODES[mode])
    assert_same(trajectory(trainer), theirs[0])
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["perf/tokens_per_second"] > 0 for log in steps)
    assert trainer.state.log_history[-1]["eval_perf/tokens_per_second"] > 0
    if mode == "padded":
        assert trajectory(trainer).tolist() == theirs[0].tolist()
        return
    stats = trainer.padding.stats
    assert stats.packed_tokens <= stats.real_tokens < stats.padded_tokens
    assert (stats.packed_tokens < stats.real_tokens) == (mode == "prefix sharing")
    assert all(log["padfix/pad_fraction"] > 0 for log in steps)
    assert trainer.padding.parity.keys() == {"train", "eval"}  # compared in training and in evaluation


@pytest.mark.parametrize("mode", ["padding-free", "prefix sharing"])
def test_a_leaking_layout_does_not_give_trls_trajectory(mode, theirs, tmp_path, monkeypatch):
    config = break_mode(monkeypatch, mode)
    with pytest.raises(ParityError):
        train(tmp_path, **config)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trajectory(train(tmp_path, parity_check=False, **config)), theirs[0])


def test_its_signature_is_trls():
    assert inspect.signature(ORPOTrainer) == inspect.signature(orpo.ORPOTrainer)
