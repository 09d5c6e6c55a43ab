"""What a script does with an SFT trainer."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.rows import METRICS
from kit.sft_cases import packing
from kit.trainer_runs import MODES, assert_mode_ran, assert_same, is_bare, run, watch_inputs
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from transformers import TrainerCallback
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils import is_liger_kernel_available
from zoo.models import build

from trl_padfix import DPOTrainer, SFTTrainer


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


def test_a_stage_of_dpo_goes_before(make, makers):
    runs = []
    for dpo, sft, config in ((trl.DPOTrainer, trl.SFTTrainer, {}), (DPOTrainer, SFTTrainer, MODES["prefix sharing"])):
        first = makers("DPO").train("short", dpo, **config).trainer
        runs.append(make.train("short", sft, {"model": first.model}, **config))
    assert_same(runs[1].trajectory(*METRICS), runs[0].trajectory(*METRICS), atol=1e-5)
    assert_mode_ran(runs[1], "prefix sharing")


def test_a_padded_stage_after_a_packed_one_is_padded(make):
    first = make(config=packing())
    first.train()
    after = run(make(model=first.model), watch_inputs(""))
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
