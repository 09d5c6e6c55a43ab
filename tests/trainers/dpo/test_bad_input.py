"""Bad input is an error that says what is wrong, why, and what to do."""

import inspect
import logging
import re
import sys
from types import SimpleNamespace

import accelerate
import pytest
import trl
from datasets import Dataset
from kit.dpo_cases import build_pairs
from kit.trainer_runs import SIDED_MODES, TWO_MODES, build_model, build_tokenizer, is_bare, our_warnings
from simulated_gpu.flash_stand_in import flash_attention_stand_in

from trl_padfix import DPOConfig, PaddingRemovalError


BAD_INPUT = {
    "no rejected": (
        {},
        lambda: {"train_dataset": build_pairs(4).remove_columns("rejected")},
        (ValueError, "train dataset has no column 'rejected'; it has .*DPO needs .*rename"),
    ),
    "neither chosen nor rejected": (
        {},
        lambda: {"train_dataset": build_pairs(4).select_columns("prompt")},
        (ValueError, "no column 'chosen' and no column 'rejected'"),
    ),
    "no chosen in the evaluation": (
        {},
        lambda: {"eval_dataset": {"held_out": build_pairs(4).remove_columns("chosen")}},
        (ValueError, "held_out dataset has no column 'chosen'"),
    ),
    "no chosen in a stream": (
        {},
        lambda: {"train_dataset": build_pairs(4).remove_columns("chosen").to_iterable_dataset()},
        (ValueError, "train dataset has no column 'chosen'"),
    ),
    "neither pad nor eos": (
        {},
        lambda: {"processing_class": build_tokenizer(pad_token=None, eos_token=None)},
        (ValueError, "neither a pad token nor an EOS token.*Set `tokenizer.pad_token`"),
    ),
    "no eos to end answers with": (
        {},
        lambda: {"processing_class": build_tokenizer(eos_token=None)},
        (ValueError, "EOS.*Set `tokenizer.eos_token`"),
    ),
    "neftune": (
        {"padding_free": True, "prefix_sharing": True, "neftune_noise_alpha": 5.0},
        dict,
        (PaddingRemovalError, "`neftune_noise_alpha` gives every token .* a noise of its own.*`prefix_sharing=False`"),
    ),
    "only prompts that are too long": (
        {"max_length": 2},
        dict,
        (ValueError, "40 of 40 pairs of the train dataset were left out.* fill `max_length=2`.*Raise `max_length`"),
    ),
    "nothing to train on": (
        {},
        lambda: {"train_dataset": build_pairs(4).select([])},
        (ValueError, "train dataset.*(empty|no pair)"),
    ),
    "nothing to evaluate on": (
        {},
        lambda: {"eval_dataset": build_pairs(4).select([])},
        (ValueError, "The eval dataset is empty"),
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_an_error_that_says_what_why_and_what_to_do(name, make):
    config, given, (error, message) = BAD_INPUT[name]
    with pytest.raises(error, match=f"(?is){message}"):
        make(config=config, **given())


@pytest.mark.parametrize("setting", ["prefix_sharing", "padding_side"])
def test_a_field_that_was_set_on_a_finished_configuration_is_checked_too(setting, make, tmp_path):
    args = DPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    setattr(args, setting, {"prefix_sharing": True, "padding_side": "middle"}[setting])
    with pytest.raises(ValueError, match=f"`{setting}"):
        make(args=args)


def test_sequence_parallelism_is_refused(make, monkeypatch):
    parallelism = SimpleNamespace(tp_size=1, cp_size=1, sp_size=2, cp_enabled=False)
    policy = build_model()
    make_trainer = trl.DPOTrainer.__init__

    def with_parallelism(trainer, *args, **kwargs):
        make_trainer(trainer, *args, **kwargs)
        monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", parallelism)

    monkeypatch.setattr(trl.DPOTrainer, "__init__", with_parallelism)
    monkeypatch.setattr(with_parallelism, "__signature__", inspect.signature(make_trainer), raising=False)
    with pytest.raises(
        PaddingRemovalError, match=r"`sp_size`.*splits every padded row.*`cp_size`.*padding_free=False"
    ):
        make(config={"padding_free": True}, model=policy)
    assert is_bare(policy)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_flash_attention_2_in_float32_says_where_it_runs(mode, make, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")

    with flash_attention_stand_in():
        monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", refuse)
        models = {"model": build_model(attn_implementation="flash_attention_2"), "ref_model": build_model(seed=1)}
        trainer = make(config=SIDED_MODES[mode], **models)
        with pytest.raises(PaddingRemovalError, match=r"failed with torch.float32 on cpu.*bfloat16.*sdpa"):
            trainer.train()


def test_pairs_that_trl_leaves_out_are_counted_in_a_warning(make, caplog):
    columns = build_pairs(4).to_dict() | {"prompt": ["w2 " * 9, "w3 " * 5, "w4 " * 6, "w5 "]}
    with caplog.at_level(logging.WARNING):
        make(config={"max_length": 6}, train_dataset=Dataset.from_dict(columns), eval_dataset=None)
    (warning,) = our_warnings(caplog)
    assert re.search("2 of 4 pairs of the train dataset were left out.*`max_length=6`.*Raise `max_length`", warning)
