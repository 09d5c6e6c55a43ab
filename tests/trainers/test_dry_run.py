"""`dry_run(trainer)`: the first batch as in a run, without a step, and nothing left behind."""

import re

import pytest
import torch
from kit.methods import make_trainer
from kit.trainer_runs import break_mode, build_pairs, to_the_bit

import trl_padfix
from trl_padfix import dry_run


def make(folder, **settings):
    rows = {"train_dataset": build_pairs(24), "eval_dataset": build_pairs(8, seed=1)}
    return make_trainer(trl_padfix, "DPO", folder, max_steps=2, **rows | settings)


def logs(trainer):
    timed = ("runtime", "per_second")
    return [{k: v for k, v in log.items() if not k.endswith(timed)} for log in trainer.state.log_history]


SHARING = {"padding_free": True, "prefix_sharing": True, "eval_strategy": "steps", "eval_steps": 1}


def test_it_compares_and_takes_no_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it from its configuration
    trainer = make(tmp_path / "run", **SHARING, bf16=False)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert dry_run(trainer)
    said, table = capsys.readouterr().out.split("Dry run:")
    assert re.search(r"loss: 8 rows x \d+ tokens, packed and each row alone, forward and backward\n", said)
    assert "gradient" not in table.split("parity, eval, loss")[1]
    assert table.count("parity ok (") == 4  # model and reference, in training and in evaluation: each once
    assert "max_steps" in table
    assert "num_train_epochs" not in table
    assert "micro-batch x 1 process = " in table
    assert "parity, train, loss             parity ok, the trainer's own loss: on 4 pairs" in table
    assert re.search("^mixed_precision +bf16$", table, re.MULTILINE)
    assert table.count("float32 weights") == 2
    for text in ("prefix_sharing", "data  ", "24 pairs; eval: 8 pairs", "parity, train, model", "parity, eval, model"):
        assert text in table
    assert set(trainer.padding.parity) == {"train", "eval"}
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in trainer.model.named_parameters())
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]  # made when the trainer is


def test_it_counts_the_whole_first_batch_also_in_parts(tmp_path, capsys):
    """The parity check of the step has a backward of its own, and a budget one for each part."""
    lines = []
    for settings in ({}, {"eval_strategy": "steps", "eval_steps": 1}, {"max_tokens_per_batch": 60}):
        trainer = make(tmp_path, padding_free=True, **settings)
        assert dry_run(trainer)
        assert dry_run(trainer)
        lines += [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens")]
        assert trainer.padding.stats.forwards == 0  # a training counts its own
    whole, again, evaluated, _, in_parts, _ = ([int(n) for n in re.findall(r"\d+", line)] for line in lines)
    assert again == evaluated == in_parts == whole
    assert whole[2] > 60  # it has parts
    assert 0 < whole[2] == whole[1] < whole[0]


def test_a_training_after_it_is_the_same_training(tmp_path):
    plain, checked = make(tmp_path / "a", **SHARING), make(tmp_path / "b", **SHARING)
    assert dry_run(checked)
    plain.train()
    checked.train()
    assert logs(checked) == logs(plain)
    assert len(logs(plain)) == 5  # two steps, two evaluations and the end


def test_a_training_that_generates_is_the_same_after_it(tmp_path):
    """TRL generates for two micro-batches at once, and counts them."""

    def trained(checks):
        steps = {"max_steps": 2, "gradient_accumulation_steps": 2}
        steps["reward_funcs"] = lambda completions, **_: [len(c) % 3 for c in completions]
        trainer = make_trainer(trl_padfix, "GRPO", tmp_path / str(checks), padding_free=True, **steps)
        if checks:
            assert dry_run(trainer)
            assert set(trainer.padding.parity) == {"train"}
        trainer.train()
        return to_the_bit(trainer.state.log_history)

    assert trained(checks=True) == trained(checks=False)


def test_a_wrong_layout_fails_it(tmp_path, monkeypatch, capsys):
    trainer = make(tmp_path / "run", padding_free=True)
    break_mode(monkeypatch, "padding-free")
    assert not dry_run(trainer)
    assert "FAILED" in capsys.readouterr().out


class ReadingPadding(trl_padfix.DPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return super().compute_loss(model, inputs, *args, **kwargs) + logits.square().mean()


@pytest.mark.parametrize("padded", ["all steps", "evaluations"])
def test_a_loss_or_metrics_that_would_be_computed_padded_fail_it(padded, tmp_path, capsys):
    of_metrics = SHARING | {"compute_metrics": lambda found: {"zeros": (found.predictions == 0).mean()}}
    given = {"all steps": {"padding_free": True, "trainer_class": ReadingPadding}, "evaluations": of_metrics}
    assert not dry_run(make(tmp_path / "run", **given[padded]))
    table = " ".join(capsys.readouterr().out.split())
    reads = {"all steps": "a loss that depends on padding", "evaluations": "metrics that read logits"}
    assert f"PADDED {padded} would run padded. They have {reads[padded]}" in table


@pytest.mark.parametrize("is_padded", [False, True])
def test_it_says_whether_the_loss_was_tested_on_padding(is_padded, tmp_path, capsys):
    lengths = {} if is_padded else {"prompt": (5, 5), "answer": (4, 4)}
    assert dry_run(make(tmp_path / "run", padding_free=True, train_dataset=build_pairs(8, **lengths)))
    table = " ".join(capsys.readouterr().out.split())
    assert table.count("the trainer's own loss: on 4 pairs") == 1
    assert ("; not tested on padding, because the batch has none; " in table) is not is_padded


FREE = {"padding_free": True}


@pytest.mark.parametrize(
    ("settings", "off", "reason"),
    [
        ({}, "", "not compared: TRL's code computes, because `padding_free` is not set"),
        (FREE, "1", "not compared: TRL's code computes, because TRL_PADFIX_OFF is set"),
        (FREE | {"parity_check": False}, "", "not compared: `parity_check` is off"),
    ],
)
def test_it_says_where_nothing_is_compared(settings, off, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRL_PADFIX_OFF", off)
    assert dry_run(make(tmp_path / "run", **settings))
    table = " ".join(capsys.readouterr().out.split())
    assert reason in table
    assert ("runs padded" in table) == ("TRL's" in reason)


def test_other_errors_are_raised_and_callbacks_are_left_alone(tmp_path):
    trainer = make(tmp_path / "run", padding_free=True)
    callbacks = list(trainer.callback_handler.callbacks)
    trainer.data_collator = lambda rows: 1 / 0
    with pytest.raises(ZeroDivisionError):
        dry_run(trainer)
    assert trainer.callback_handler.callbacks == callbacks
    assert not trainer.is_in_train
