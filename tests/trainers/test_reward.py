"""What reward modelling has of its own: which token is scored. `test_every_method.py` has the trajectories."""

from functools import cache

import pytest
import trl
from kit.methods import make_trainer
from kit.trainer_runs import (
    MODES,
    SIDED_MODES,
    TWO_MODES,
    assert_same,
    build_model,
    build_pairs,
    build_tokenizer,
    run,
    trained,
    watch_inputs,
)

import trl_padfix
import trl_padfix.core.patches.heads
from trl_padfix import DataCollatorForReward, PaddingRemovalError, RewardTrainer


@pytest.fixture(scope="module")
def make(makers):
    return makers("Reward")


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
def test_where_the_pad_token_ends_rows_the_score_is_trls_or_that_of_the_last_token(mode, make, trl_with_pad, caplog):
    before_the_end, at_the_end = trl_with_pad("<eos>"), trl_with_pad("<pad>")
    config = SIDED_MODES[mode] | {"parity_check": False}
    assert_same(train_with_pad(make, RewardTrainer, "<eos>", **config), before_the_end)
    warnings = [record.message for record in caplog.records if "scores another token" in record.message]
    assert len(warnings) == 1
    assert "In 8 of 8 rows" in warnings[0]  # said once
    assert_same(train_with_pad(make, RewardTrainer, "<eos>", pool_last_token=True, **config), at_the_end)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(before_the_end, at_the_end)


def with_another_pad(make, trainer_class, **config):
    """A training whose collator pads with a token that the model takes for text, on the right."""
    collator = DataCollatorForReward(pad_token_id=5)
    return run(make(trainer_class, {"max_steps": 5} | config, data_collator=collator), watch_inputs(""))


def test_where_padding_is_scored_the_figures_are_trls(make):
    mode = "prefix sharing"
    theirs = with_another_pad(make, trl.RewardTrainer).trajectory("mean_reward", "min_reward")
    ours = with_another_pad(make, RewardTrainer, **MODES[mode])
    assert_same(ours.trajectory("mean_reward", "min_reward"), theirs)
    assert ours.trainer.padding.stats.padded_forwards > 0
    assert ours.entered == ours.counts()["padded"]
    with pytest.raises(PaddingRemovalError, match=r"and in rows \[.*\] of the batch that is padding"):
        with_another_pad(make, RewardTrainer, strict=True, **MODES[mode])


class Hides:
    """Hides a third of all tokens, but not the last one of a row, which is scored."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        mask = inputs["attention_mask"]
        is_last = (mask.flip(1).cumsum(1).flip(1) == 1) & mask.bool()
        return {**inputs, "attention_mask": mask * ((inputs["input_ids"] % 3 != 1) | is_last)}


@pytest.mark.parametrize("config", [{}, {"prefix_sharing": True, "max_tokens_per_batch": 80}], ids=str)
def test_rows_with_hidden_tokens_are_scored_as_trl_scores_them(config, tmp_path):
    """The parity check compares last columns, and leaves batches out in which one of them is hidden."""
    data, figures = build_pairs(16, 0), []
    for library in (trl, trl_padfix):
        kind = type("Own", (Hides, library.RewardTrainer), {})
        given = {"train_dataset": data, "eval_dataset": data, "max_steps": 3, "model": build_model("reward")}
        given |= {"padding_free": True, **config} if library is trl_padfix else {}
        trainer = make_trainer(library, "Reward", tmp_path / library.__name__, kind, **given)
        figures.append(trained(trainer))
    assert_same(*figures)
    assert trainer.padding.stats.packed_tokens > 0
