"""Prompt tuning and p-tuning: virtual tokens stand directly before each row, whatever the tokenizer's side."""

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import assert_other, assert_same, build_model, build_pairs, build_tokenizer
from peft import PromptEncoderConfig, PromptTuningConfig, get_peft_model

import trl_padfix
from trl_padfix import generate
from trl_padfix.trainers.parts.padding_side import PaddingSide


ADAPTERS = {"prompt tuning": PromptTuningConfig, "p-tuning": PromptEncoderConfig}
MODES = {
    "import alone": {},
    "padding-free": {"padding_free": True},
    "budget": {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 100},
}
DATA = {"SFT": lambda: build_rows(8, kind="texts"), "DPO": lambda: build_pairs(8)}


def tuned():
    model = get_peft_model(build_model(), PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.prompt_encoder.default.embedding.weight, std=0.5)
    return model


def losses(library, kind, adapter, folder, **fields):
    """The losses of two steps of four rows (pairs)."""
    given = {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    model = get_peft_model(build_model(initializer_range=0.2), ADAPTERS[adapter](**given))
    for parameter in model.prompt_encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokenizer = build_tokenizer(padding_side="left")
    batches = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "learning_rate": 2.0,
    } | fields
    batches |= {"ref_model": None} if kind == "DPO" else {}
    data = {"train_dataset": DATA[kind](), "eval_dataset": None, "processing_class": tokenizer}
    trainer = make_trainer(library, kind, folder, model=model, **data, **batches)
    trainer.train()
    return torch.tensor([log["loss"] for log in trainer.state.log_history if "loss" in log], dtype=torch.float64)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", DATA)
def test_a_tokenizer_that_pads_left_gives_the_losses_of_each_row_alone(kind, adapter, tmp_path, monkeypatch):
    alone = losses(trl, kind, adapter, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    for fields in MODES.values():
        assert_same(losses(trl_padfix, kind, adapter, tmp_path, **fields), alone)
    monkeypatch.setattr(PaddingSide, "_has_virtual_tokens", lambda self: False)
    assert_other(losses(trl_padfix, kind, adapter, tmp_path), alone)


def test_prompts_of_several_lengths_are_not_continued_together():
    model, settings = tuned(), {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 39}
    ids = torch.tensor([[39, 5, 6], [7, 8, 9]])
    with pytest.raises(NotImplementedError, match=r"PEFT puts its virtual tokens .*`per_device_eval_batch_size=1`"):
        generate(model, {"input_ids": ids, "attention_mask": (ids != 39).long()}, **settings)
    equal = generate(model, {"input_ids": ids[:, 1:], "attention_mask": torch.ones(2, 2).long()}, **settings)
    assert equal.shape == (2, 4)


@pytest.mark.parametrize("mode", MODES)
def test_to_pad_left_is_an_error(mode, tmp_path):
    collator = trl_padfix.DataCollatorForLanguageModeling(pad_token_id=39, padding_side="left")
    for left in ({"data_collator": collator}, {"padding_side": "left"}):
        with pytest.raises(ValueError, match="PEFT puts its virtual tokens before the padding"):
            make_trainer(trl_padfix, "SFT", tmp_path, model=tuned(), **left, **MODES[mode])
