"""TRL's `RewardTrainer` and ours: one trajectory, whatever the mode."""

import random
from functools import cache

import pytest
import torch
import trl
from datasets import Dataset
from kit.cells import once_each
from kit.trainer_runs import (
    MODES,
    SETTINGS,
    SIDED_MODES,
    assert_mode_ran,
    assert_same,
    break_mode,
    build_model,
    build_tokenizer,
    lora,
    run,
    watch_inputs,
    words,
)
from peft import TaskType
from transformers import BertConfig, BertForSequenceClassification

import trl_padfix.core.heads
from trl_padfix import DataCollatorForReward, PaddingRemovalError, ParityError, RewardConfig, RewardTrainer
from trl_padfix.core.call.pooled import Pooled


METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "num_tokens")
TWO_MODES = ["padding-free, left", "prefix sharing, right"]


def build_pairs(count: int, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    prompts = [words(draw, 2, 18) for _ in range(count // 2)]
    return Dataset.from_list(
        [
            {"prompt": draw.choice(prompts), "chosen": words(draw, 1, 12), "rejected": words(draw, 1, 12)}
            for _ in range(count)
        ]
    )


CASES = {
    "plain": ({}, dict),
    "accumulation": ({"gradient_accumulation_steps": 2, "max_steps": 5}, dict),
    "checkpointing": ({"gradient_checkpointing": True, "max_steps": 5}, dict),
    "centred rewards": ({"center_rewards_coefficient": 0.1, "max_steps": 5}, dict),
    "multiples of 8": ({"pad_to_multiple_of": 8, "max_steps": 5}, dict),
    "lora": ({}, lambda: {"peft_config": lora(task_type=TaskType.SEQ_CLS, modules_to_save=["score"])}),
    "margins": (
        {"max_steps": 5},
        lambda: {"train_dataset": build_pairs(40).add_column("margin", [i % 3 / 2 for i in range(40)])},
    ),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def make_trainer(trainer_class=RewardTrainer, config=None, **given):
        config_class = RewardConfig if issubclass(trainer_class, RewardTrainer) else trl.RewardConfig
        settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
        settings["output_dir"] = str(tmp_path_factory.mktemp("run"))
        defaults = {
            "model": lambda: build_model("reward"),
            "train_dataset": lambda: build_pairs(40),
            "eval_dataset": lambda: build_pairs(12, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", config_class(**SETTINGS | settings | (config or {})))
        return trainer_class(**given)

    return make_trainer


def train(make, case: str, trainer_class=RewardTrainer, **config):
    settings, given = CASES[case]
    return run(make(trainer_class, settings | config, **given()), watch_inputs(""))


@pytest.fixture(scope="module")
def trl_run(make):
    return cache(lambda case: train(make, case, trl.RewardTrainer))


@pytest.mark.parametrize("mode", SIDED_MODES)
def test_ten_steps_and_an_evaluation_are_trls(mode, make, trl_run):
    ours = train(make, "plain", **SIDED_MODES[mode])
    assert len(ours.trajectory()) == 11
    assert_same(ours.trajectory(*METRICS), trl_run("plain").trajectory(*METRICS))
    assert_mode_ran(ours, mode)
    side = mode.split(", ")[1]
    assert any(not mask[:, 0 if side == "left" else -1].all() for _, mask in ours.batches)
    assert all(mask[:, -1 if side == "left" else 0].all() for _, mask in ours.batches)


@pytest.mark.parametrize(("case", "mode"), once_each([case for case in CASES if case != "plain"], TWO_MODES))
def test_every_set_up_is_trls(case, mode, make, trl_run):
    ours = train(make, case, **SIDED_MODES[mode])
    assert_same(ours.trajectory(*METRICS), trl_run(case).trajectory(*METRICS))
    if case != "checkpointing":  # which computes each layer twice
        assert_mode_ran(ours, mode)


def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(make):
    ours = train(make, "plain", max_steps=2)
    for mode in TWO_MODES:
        with pytest.raises(AssertionError):
            assert_mode_ran(ours, mode)


@pytest.mark.parametrize("mode", ["padding-free", "prefix sharing"])
def test_a_leaking_layout_does_not_give_trls_trajectory(mode, make, trl_run, monkeypatch):
    ours = train(make, "plain", **break_mode(monkeypatch, mode), parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(*METRICS), trl_run("plain").trajectory(*METRICS))


@pytest.mark.parametrize("mode", ["padding-free", "prefix sharing"])
def test_a_leaking_layout_stops_training_and_evaluation(mode, make, monkeypatch):
    trainer = make(config=break_mode(monkeypatch, mode))
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.evaluate()


def test_fractions_are_those_of_the_data(make):
    ours = train(make, "plain", **MODES["prefix sharing"], max_steps=3)
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        mask = ours.batches[i][1]
        assert log["padfix/pad_fraction"] == pytest.approx(1 - mask.sum().item() / mask.numel())
        assert 0 < log["padfix/shared_fraction"] < 1
        assert log["perf/tokens_per_second"] > 0
    assert 0 < evaluated["eval_padfix/pad_fraction"] < 1
    assert evaluated["eval_perf/tokens_per_second"] > 0


def test_a_plain_configuration_of_trl_is_taken(make, tmp_path, trl_run):
    settings = SETTINGS | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
    trainer = make(args=trl.RewardConfig(output_dir=str(tmp_path), **settings))
    assert_same(run(trainer, watch_inputs("")).trajectory(), trl_run("plain").trajectory())


def test_the_tokenizers_side_is_the_default(make):
    trainer = make(processing_class=build_tokenizer(padding_side="left"))
    assert isinstance(trainer.data_collator, DataCollatorForReward)
    assert trainer.data_collator.padding_side == "left"
    assert make(config={"padding_side": "right"}).data_collator.padding_side == "right"


def test_the_model_is_left_as_it_was(make):
    trainer = make(config=MODES["prefix sharing"])
    ids = torch.tensor([[39, 39, 5, 6, 7], [2, 3, 4, 5, 6]])
    packed = trainer.model(ids, attention_mask=(ids != 39).long()).logits
    trainer.restore_padding()
    assert not any("forward" in vars(module) for module in trainer.model.modules())
    torch.testing.assert_close(trainer.model(ids, attention_mask=(ids != 39).long()).logits, packed)


# Bad input


def test_a_language_model_is_no_reward_model(make):
    with pytest.raises(ValueError, match=r"scores a whole sequence.*AutoModelForSequenceClassification"):
        make(model=build_model("causal", num_labels=1))


def test_an_encoder_is_refused(make):
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    with pytest.raises(PaddingRemovalError, match="BertForSequenceClassification"):
        make(config=MODES["padding-free"], model=BertForSequenceClassification(config))


def test_a_wrapper_without_a_configuration_is_refused(make):
    class ValueHead(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pretrained_model = build_model("causal")

    with pytest.raises(TypeError, match=r"no `config`.*pass the model inside"):
        make(model=ValueHead())


def test_image_data_is_refused(make):
    data = build_pairs(4).add_column("images", [["a.png"]] * 4)
    with pytest.raises(PaddingRemovalError, match=r"image data.*padding_free=False"):
        make(config=MODES["padding-free"], train_dataset=data)


def test_missing_columns_are_named(make):
    with pytest.raises(ValueError, match="no column 'rejected'; it has"):
        make(train_dataset=build_pairs(4).remove_columns("rejected"))


def test_an_empty_sequence_is_named():
    with pytest.raises(ValueError, match="rejected sequence of pair 0 of the batch has no token"):
        DataCollatorForReward(pad_token_id=39)([{"chosen_ids": [1], "rejected_ids": []}])


def test_another_padding_side_is_refused():
    with pytest.raises(ValueError, match="padding_side"):
        RewardConfig(padding_side="both", use_cpu=True, bf16=False)


# The token that is scored


def train_with_pad(make, trainer_class, pad: str, **config):
    tokenizer = build_tokenizer(pad_token=pad)
    model = build_model("reward")  # the embedding of its own pad token is zero, whatever the tokenizer pads with
    model.config.pad_token_id = tokenizer.pad_token_id
    return run(
        make(trainer_class, {"max_steps": 5} | config, model=model, processing_class=tokenizer), watch_inputs("")
    ).trajectory("mean_reward")


@pytest.fixture(scope="module")
def trl_with_pad(make):
    return cache(lambda pad: train_with_pad(make, trl.RewardTrainer, pad))


@pytest.mark.parametrize("mode", TWO_MODES)
def test_where_the_pad_token_ends_rows_the_score_is_trls_or_that_of_the_last_token(mode, make, trl_with_pad):
    before_the_end, at_the_end = trl_with_pad("<eos>"), trl_with_pad("<pad>")
    config = SIDED_MODES[mode] | {"parity_check": False}
    assert_same(train_with_pad(make, RewardTrainer, "<eos>", **config), before_the_end)
    assert_same(train_with_pad(make, RewardTrainer, "<eos>", pool_last_token=True, **config), at_the_end)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(before_the_end, at_the_end)


@pytest.fixture
def looks(monkeypatch):
    """Batches at which the model had to look to know which tokens it scores."""
    seen = []

    class Looking(Pooled):
        @classmethod
        def of(cls, ids, mask, pad_token_id):
            seen.append(ids)
            return Pooled.of(ids, mask, pad_token_id)

    monkeypatch.setattr(trl_padfix.core.heads, "Pooled", Looking)
    return seen


@pytest.mark.parametrize("mode", TWO_MODES)
def test_which_tokens_are_scored_comes_with_the_batch(mode, make, trl_with_pad, looks, caplog):
    config = SIDED_MODES[mode] | {"parity_check": False}
    assert_same(train_with_pad(make, RewardTrainer, "<eos>", **config), trl_with_pad("<eos>"))
    assert not looks
    warnings = [record.message for record in caplog.records if "scores another token" in record.message]
    assert len(warnings) == 1
    assert "In 8 of 8 rows" in warnings[0]


def test_batches_of_somebody_else_are_looked_at(make, looks):
    trainer = make(config=MODES["padding-free"] | {"parity_check": False})
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, dict(batch))
    assert not looks
    own = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    trainer.compute_loss(trainer.model, dict(own))
    assert len(looks) == 1
    trainer.model.config.pad_token_id = 38
    with pytest.raises(PaddingRemovalError, match="scores the last token that is not `pad_token_id=38`"):
        trainer.compute_loss(trainer.model, dict(batch))
    assert len(looks) == 2
    trainer.padding.task.model_for_loss = lambda model: lambda input_ids, **inputs: model(input_ids.clone(), **inputs)
    trainer.model.config.pad_token_id = 39
    trainer.compute_loss(trainer.model, dict(batch))
    assert len(looks) == 3


def test_padding_that_would_be_scored_is_noticed(make, looks):
    config = SIDED_MODES["padding-free, right"] | {"parity_check": False}
    trainer = make(config=config)
    batch = next(iter(trainer.get_train_dataloader()))
    written = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 5)}
    with pytest.raises(PaddingRemovalError, match="that is padding by the attention mask"):
        trainer.compute_loss(trainer.model, written)  # other ids: they are looked at
    looks.clear()
    batch["input_ids"].data.masked_fill_(batch["attention_mask"] == 0, 5)
    with pytest.raises(PaddingRemovalError, match=r"No padding of the batch is scored.*Rows: \["):
        trainer.compute_loss(trainer.model, batch)
    assert not looks
    trainer = make(config=config, data_collator=DataCollatorForReward(pad_token_id=5))
    with pytest.raises(PaddingRemovalError, match=r"and in rows \[.*\] of the batch that is padding"):
        trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    assert not looks


def test_pooling_the_last_token_needs_padding_free():
    with pytest.raises(ValueError, match="`pool_last_token=True` needs `padding_free=True`"):
        RewardConfig(use_cpu=True, bf16=False, pool_last_token=True)


def test_sequences_of_nothing_but_pad_tokens_are_found_before_the_first_step(make):
    data = Dataset.from_list([{"chosen_ids": [2, 3, 1], "rejected_ids": [1] if i == 2 else [2, 1]} for i in range(4)])
    given = {"model": build_model("reward", pad_token_id=1), "processing_class": build_tokenizer(pad_token="<eos>")}
    given |= {"train_dataset": data, "eval_dataset": None}
    config = SIDED_MODES["padding-free, left"]
    with pytest.raises(ValueError, match="`rejected_ids` of pair 2 of the train dataset is nothing but pad tokens"):
        make(config=config, **given)
    make(config=config | {"pool_last_token": True}, **given)


def test_a_dataset_of_which_no_pair_is_left_is_an_error_before_the_first_step(make):
    with pytest.raises(ValueError, match="No pair of the train dataset is left: all have a sequence of more than"):
        make(config={"max_length": 1})
