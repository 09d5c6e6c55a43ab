"""`padding_free_trainer`: any trainer class, without padding."""

from typing import Any

import pytest
import torch
from kit.observe import entered_tokens
from kit.trainer_runs import (
    assert_same,
    break_mode,
    build_ids,
    build_tokenizer,
    make_plain_trainer,
    trained,
    trajectory,
)
from transformers import DataCollatorForSeq2Seq, Trainer

import trl_padfix
from trl_padfix import ParityError, padding_free_trainer


class Weighted(Trainer):
    """A loss of its own, by hand, and arguments that are passed on."""

    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight = weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = self.weight * loss
        return (loss, outputs) if return_outputs else loss


class Renamed(Weighted):
    """Batches whose names only the class knows."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {k.removeprefix("my_"): v for k, v in inputs.items()}, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


CLASSES = {"transformers'": Trainer, "a loss of its own": Weighted, "names of its own": Renamed}

BEGIN = "w1 w2 w3 w4 w5 w6 "


def train(folder, trainer_class: type[Trainer], **config) -> tuple[Any, int]:
    """The trainer after training and evaluation, and the tokens that entered the policy's first layer meanwhile."""
    given = {"train_dataset": build_ids(24, begin=BEGIN), "eval_dataset": build_ids(10, 1, BEGIN)}
    if issubclass(trainer_class, Renamed):
        collate = DataCollatorForSeq2Seq(build_tokenizer())
        given["data_collator"] = lambda rows: {f"my_{k}": v for k, v in collate(rows).items()}
        given["remove_unused_columns"] = False
    trainer = make_plain_trainer(folder, trainer_class, **given | config)
    computed = entered_tokens(trainer.model)
    trained(trainer)
    return trainer, sum(computed)


@pytest.mark.parametrize(("kind", "sharing"), list(zip(CLASSES, [False, True, False], strict=True)))
def test_any_trainer_runs_without_padding_on_its_own_trajectory(kind, sharing, tmp_path):
    theirs, padded = train(tmp_path / "theirs", CLASSES[kind])
    checked = padding_free_trainer(CLASSES[kind], prefix_sharing=sharing)
    assert issubclass(checked, CLASSES[kind])
    ours, _ = train(tmp_path / "checked", checked)
    assert_same(trajectory(ours), trajectory(theirs))
    reports = ours.padding.parity
    assert {mode: [report.ok for report in reports[mode]] for mode in reports} == {"train": [True], "eval": [True]}
    unchecked = padding_free_trainer(CLASSES[kind], prefix_sharing=sharing, parity_check=False)
    ours, entered = train(tmp_path / "ours", unchecked)
    stats = ours.padding.stats
    assert stats.packed_tokens == entered < stats.padded_tokens == padded
    assert (entered < stats.real_tokens) is sharing
    logs = ours.state.log_history
    assert all(0 < log["padfix/pad_fraction"] < 1 for log in logs if "loss" in log)
    assert logs[-1]["eval_perf/tokens_per_second"] > 0
    ours.padding.restore()
    assert ours.padding.handle is None
    assert "forward" not in vars(ours.model.model)


@pytest.mark.parametrize("kind", ["a loss of its own", "names of its own"])
def test_a_leaking_layout_is_seen(kind, tmp_path, monkeypatch):
    theirs, _ = train(tmp_path / "theirs", CLASSES[kind])
    break_mode(monkeypatch, "padding-free")
    with pytest.raises(ParityError):
        train(tmp_path / "checked", padding_free_trainer(CLASSES[kind]))
    ours, _ = train(tmp_path / "ours", padding_free_trainer(CLASSES[kind], parity_check=False))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trajectory(ours), trajectory(theirs))


def test_switched_off_it_logs_the_figures_of_the_class_to_the_bit(tmp_path):
    theirs, padded = train(tmp_path / "theirs", Weighted)
    ours, entered = train(tmp_path / "ours", padding_free_trainer(Weighted, padding_free=False))
    assert trajectory(ours).tolist() == trajectory(theirs).tolist()
    assert entered == padded
    assert ours.padding.handle is None


def test_what_needs_to_know_the_rows_is_refused():
    with pytest.raises(TypeError, match=r"no settings \['max_tokens_per_batch'\]"):
        padding_free_trainer(Trainer, max_tokens_per_batch=10)
    with pytest.raises(TypeError, match="DPOTrainer removes padding already"):
        padding_free_trainer(trl_padfix.DPOTrainer)
    with pytest.raises(TypeError, match=r"takes a class: .* For a model there is `remove_padding\(model\)`"):
        padding_free_trainer(torch.nn.Linear(2, 2))
