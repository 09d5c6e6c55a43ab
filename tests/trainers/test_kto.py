"""TRL's `KTOTrainer` and ours: one trajectory, whatever the mode."""

import random
from functools import cache

import pytest
import torch
import trl
import trl.trainer.kto_trainer as trl_kto
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
from transformers import T5Config, T5ForConditionalGeneration

from trl_padfix import DataCollatorForUnpairedPreference, KTOConfig, KTOTrainer, PaddingRemovalError, ParityError


METRICS = ("kl", "entropy", "num_tokens")
TWO_MODES = ["padding-free, left", "prefix sharing, right"]


def build_examples(count: int, seed: int = 0) -> Dataset:
    """Answers to prompts that follow one another two by two."""
    draw = random.Random(seed)
    prompts = [words(draw, 2, 18) for _ in range(count // 2)]
    return Dataset.from_list(
        [
            {"prompt": prompts[i // 2], "completion": words(draw, 1, 12), "label": draw.random() < 0.5}
            for i in range(count)
        ]
    )


def build_pairs(count: int) -> Dataset:
    draw = random.Random(2)
    return Dataset.from_list(
        [
            {"prompt": words(draw, 2, 9), "chosen": words(draw, 1, 9), "rejected": words(draw, 1, 9)}
            for _ in range(count)
        ]
    )


SHORT = {"max_steps": 5}
CASES = {
    "plain": ({}, dict),
    "apo_zero_unpaired": (SHORT | {"loss_type": "apo_zero_unpaired"}, dict),
    "accumulation": (SHORT | {"gradient_accumulation_steps": 2}, dict),
    "checkpointing": (SHORT | {"gradient_checkpointing": True}, dict),
    "clipped to multiples of 8": (SHORT | {"max_length": 22, "pad_to_multiple_of": 8}, dict),
    "precomputed reference": (SHORT | {"precompute_ref_log_probs": True}, dict),
    "lora": (SHORT, lambda: {"peft_config": lora(task_type="CAUSAL_LM"), "ref_model": None}),
    "pairs": (SHORT, lambda: {"train_dataset": build_pairs(20)}),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def make_trainer(trainer_class=KTOTrainer, config=None, **given):
        config_class = KTOConfig if issubclass(trainer_class, KTOTrainer) else trl.KTOConfig
        settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
        settings["output_dir"] = str(tmp_path_factory.mktemp("run"))
        defaults = {
            "model": build_model,
            "ref_model": lambda: build_model(seed=1),
            "train_dataset": lambda: build_examples(40),
            "eval_dataset": lambda: build_examples(12, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", config_class(**SETTINGS | settings | (config or {})))
        torch.manual_seed(0)  # some versions of TRL draw adapters without a seed
        return trainer_class(**given)

    return make_trainer


def train(make, case: str, trainer_class=KTOTrainer, **config):
    settings, given = CASES[case]
    kl = settings.get("loss_type") != "apo_zero_unpaired"
    return run(make(trainer_class, settings | config, **given()), watch_inputs("", *["KL_"] * kl))


@pytest.fixture(scope="module")
def trl_run(make):
    return cache(lambda case: train(make, case, trl.KTOTrainer))


@pytest.mark.parametrize("mode", SIDED_MODES)
def test_ten_steps_and_an_evaluation_are_trls(mode, make, trl_run):
    ours = train(make, "plain", **SIDED_MODES[mode])
    assert len(ours.trajectory()) == 11
    assert_same(ours.trajectory(*METRICS), trl_run("plain").trajectory(*METRICS))
    assert ours.trajectory("kl")[:, 2].max() > 0.1  # the term of the mismatched completions counts
    rewards = [[(k, v) for k, v in log.items() if "reward" in k or "log" in k] for log in ours.logs]
    theirs = [[(k, v) for k, v in log.items() if "reward" in k or "log" in k] for log in trl_run("plain").logs]
    assert sum(map(len, rewards)) > 20
    for our_log, their_log in zip(rewards, theirs, strict=True):
        assert dict(our_log) == pytest.approx(dict(their_log), rel=1e-4, abs=1e-6)
    assert_mode_ran(ours, mode)
    left = "left" in mode
    assert any(not mask[:, 0 if left else -1].all() for _, mask in ours.batches)
    assert all(mask[:, -1 if left else 0].all() for _, mask in ours.batches)


@pytest.mark.parametrize(("case", "mode"), once_each([case for case in CASES if case != "plain"], TWO_MODES))
def test_every_set_up_is_trls(case, mode, make, trl_run):
    ours = train(make, case, **SIDED_MODES[mode])
    assert_same(ours.trajectory(*METRICS), trl_run(case).trajectory(*METRICS))
    if case not in ("checkpointing", "lora", "pairs"):  # layers run twice, or for the reference, or share nothing
        assert_mode_ran(ours, mode)
    if case == "precomputed reference":
        reference = ours.trainer.padding.ref_handle.stats
        assert 0 < reference.packed_tokens < reference.padded_tokens


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


def test_fractions_are_those_of_both_forwards(make):
    ours = train(make, "plain", **MODES["prefix sharing"], max_steps=3)
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        masks = [mask for _, mask in ours.batches[2 * i : 2 * i + 2]]
        padded, real = sum(m.numel() for m in masks), sum(m.sum().item() for m in masks)
        assert log["padfix/pad_fraction"] == pytest.approx(1 - real / padded)
        assert 0 < log["padfix/shared_fraction"] < 1
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    assert 0 < evaluated["eval_padfix/pad_fraction"] < 1
    assert evaluated["eval_perf/tokens_per_second"] > 0


def test_a_plain_configuration_of_trl_is_taken(make, tmp_path, trl_run):
    settings = SETTINGS | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
    trainer = make(args=trl.KTOConfig(output_dir=str(tmp_path), **settings))
    assert_same(run(trainer, watch_inputs("", "KL_")).trajectory(), trl_run("plain").trajectory())


# The collator

EXAMPLES = [
    {"prompt_ids": [1, 2], "completion_ids": [3, 4], "KL_completion_ids": [5], "label": True},
    {"prompt_ids": [6], "completion_ids": [7], "KL_completion_ids": [8, 9, 10], "label": False},
]


def test_left_padding_moves_each_batch_by_its_own_mask():
    batch = DataCollatorForUnpairedPreference(pad_token_id=0, padding_side="left")(EXAMPLES)
    # Both batches are two rows of up to four tokens, of other lengths.
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3, 4], [0, 0, 6, 7]],
        "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
        "completion_mask": [[0, 0, 1, 1], [0, 0, 0, 1]],
        "KL_input_ids": [[0, 1, 2, 5], [6, 8, 9, 10]],
        "KL_attention_mask": [[0, 1, 1, 1], [1, 1, 1, 1]],
        "KL_completion_mask": [[0, 0, 0, 1], [0, 1, 1, 1]],
        "label": [True, False],
    }


@pytest.mark.parametrize("max_length", [None, 3])
def test_right_padding_is_trls(max_length):
    settings = {"pad_token_id": 0, "max_length": max_length, "pad_to_multiple_of": 8}
    ours = DataCollatorForUnpairedPreference(**settings)(EXAMPLES)
    theirs = trl_kto.DataCollatorForUnpairedPreference(**settings)(EXAMPLES)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_row_without_a_prompt_cannot_be_padded_left():
    rows = [{**row, "prompt_ids": []} for row in EXAMPLES]
    with pytest.raises(ValueError, match=r"begin with a completion token.*Give every row a prompt"):
        DataCollatorForUnpairedPreference(pad_token_id=0, padding_side="left")(rows)


def test_an_empty_completion_is_named():
    with pytest.raises(ValueError, match="completion of example 1 of the batch has no token"):
        DataCollatorForUnpairedPreference(pad_token_id=0)([EXAMPLES[0], EXAMPLES[1] | {"completion_ids": []}])


# Bad input


def test_an_encoder_decoder_is_refused(make):
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(PaddingRemovalError, match="T5ForConditionalGeneration: it is an encoder-decoder"):
        make(config=MODES["padding-free"], model=T5ForConditionalGeneration(config))


def test_images_without_a_vision_model_are_refused(make):
    data = build_examples(4).add_column("image", ["a.png"] * 4)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM takes text only|vision"):
        make(config=MODES["padding-free"], train_dataset=data)


def test_missing_columns_are_named(make):
    with pytest.raises(ValueError, match="no column 'label'; it has"):
        make(train_dataset=build_examples(4).remove_columns("label"))
