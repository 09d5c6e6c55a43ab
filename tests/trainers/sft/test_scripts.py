"""What a script does with an SFT trainer."""

import inspect
from itertools import product
from unittest.mock import patch

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.flash_stand_in import flash_attention_stand_in
from kit.models import build
from kit.sft_cases import NEWEST, SHORT, is_bare, make_dpo, packing
from kit.sft_runs import METRICS, build_rows
from kit.trainer_runs import MODES, assert_mode_ran, assert_same, build_model, build_tokenizer, run, watch_inputs
from transformers import TrainerCallback
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils import is_liger_kernel_available

from trl_padfix import DataCollatorForLanguageModeling, DPOTrainer, SFTTrainer


# -- evaluation every ten steps, on either side


def scenario(side: str, padding_free: bool) -> dict:
    return {
        "max_length": 500,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "max_steps": 10,
        "padding_side": side,
        "padding_free": padding_free,
    }


def assert_evaluated(trainer, padding_free: bool) -> None:
    logs = trainer.state.log_history
    assert [log["step"] for log in logs if "eval_loss" in log] == [10]
    assert all(torch.tensor(log["loss"]).isfinite() for log in logs if "loss" in log)
    assert ("padfix/pad_fraction" in logs[0]) is padding_free


@pytest.mark.parametrize(
    ("shape", "side", "padding_free"),
    slow_but(
        [("qwen2", "left", True), ("llama", "right", True)],
        product(["qwen2", "llama"], ["left", "right"], [False, True]),
    ),
)
def test_evaluation_every_ten_steps_under_flash_attention_2(shape, side, padding_free, make):
    with flash_attention_stand_in() as calls:
        trainer = make(config=scenario(side, padding_free), model=build(shape, "flash_attention_2"))
        trainer.train()
        assert len(calls) > 0
    assert_evaluated(trainer, padding_free)


@pytest.mark.gpu
@pytest.mark.skipif(not is_liger_kernel_available(), reason="liger-kernel is not installed")
@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", ["qwen2", "llama"])
def test_the_same_with_ligers_kernels(shape, side, padding_free, make):
    config = scenario(side, padding_free) | {"use_liger_kernel": True, "use_cpu": False}
    # Liger puts its layers into transformers' modules, for every model that is built later.
    with flash_attention_stand_in(), patch.dict(vars(modeling_qwen2)), patch.dict(vars(modeling_llama)):
        trainer = make(config=config, model=build(shape, "flash_attention_2"))
        trainer.train()
    assert_evaluated(trainer, padding_free)


# -- what a script does with a trainer


def test_fractions_are_those_of_the_data(make):
    ours = make.train("short", **MODES["prefix sharing"])
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        mask = ours.batches[i][1]
        assert log["padfix/pad_fraction"] == pytest.approx(1 - mask.sum().item() / mask.numel())
        assert log["perf/tokens_per_second"] > 0
    assert 0 < evaluated["eval_padfix/pad_fraction"] < 1


def test_a_stage_of_dpo_goes_before(make, tmp_path):
    runs = []
    for dpo, sft, config in ((trl.DPOTrainer, trl.SFTTrainer, {}), (DPOTrainer, SFTTrainer, MODES["prefix sharing"])):
        first = make_dpo(tmp_path, SHORT | config, dpo)
        first.train()
        runs.append(run(make(sft, SHORT | config, model=first.model), watch_inputs("")))
    assert_same(runs[1].trajectory(*METRICS), runs[0].trajectory(*METRICS), atol=1e-5)
    assert_mode_ran(runs[1], "prefix sharing")


def test_a_padded_stage_after_a_packed_one_is_padded(make):
    first = make(config=packing())
    first.train()
    after = run(make(config=SHORT, model=first.model), watch_inputs(""))
    assert_mode_ran(after, "padded")


@pytest.mark.parametrize("config", [MODES["prefix sharing"], packing()], ids=["sharing", "packing"])
def test_an_interruption_leaves_a_model_that_can_be_detached(config, make):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make(config=config, callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not is_bare(trainer.model)
    trainer.restore_padding()
    assert is_bare(trainer.model)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert trainer.evaluate()["eval_loss"] > 0  # TRL's own way from here on


def test_an_error_while_the_trainer_is_made_leaves_the_model_as_it_was(make):
    model = build_model()
    with pytest.raises(ValueError, match="eval dataset"):
        make(config=MODES["padding-free"], model=model, eval_dataset=build_rows(4).select_columns("prompt"))
    assert is_bare(model)


def test_the_tokenizers_side_is_the_default(make):
    trainer = make(processing_class=build_tokenizer(padding_side="left"))
    assert isinstance(trainer.data_collator, DataCollatorForLanguageModeling)
    assert trainer.data_collator.padding_side == "left"
    assert make(config={"padding_side": "right"}).data_collator.padding_side == "right"


OVERRIDDEN = {
    "_prepare_dataset": "self, dataset, processing_class, args, packing, formatting_func, dataset_name",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
    "evaluation_loop": "self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
    "log": "self, logs, start_time",
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_we_override_has_the_signature_that_we_assume(name):
    if name == "evaluate" and not NEWEST:
        return
    assert ", ".join(inspect.signature(getattr(trl.SFTTrainer, name)).parameters) == OVERRIDDEN[name]


def test_the_parity_check_says_in_one_line_what_it_compared(make, capsys):
    trainer = make(config=MODES["padding-free"] | {"max_steps": 2})
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "parity" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{type(trainer.model).__name__} (model): parity ok ")
    assert "(padding-free, sdpa, torch.float32): difference of" in lines[0]
    assert "(at most 1e-04)" in lines[0]
