"""What a script does with an SFT trainer."""

from unittest.mock import patch

import pytest
import torch
import trl
from kit.rows import METRICS
from kit.sft_cases import packing
from kit.trainer_runs import MODES, assert_mode_ran, assert_same, run, watch_inputs
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils import is_liger_kernel_available
from zoo.models import build

from trl_padfix import DPOTrainer, SFTTrainer


@pytest.mark.gpu
@pytest.mark.skipif(not is_liger_kernel_available(), reason="liger-kernel is not installed")
@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", ["qwen2", "llama"])
def test_evaluations_of_ligers_kernels_under_flash_attention_2(shape, side, padding_free, make):
    config = {"padding_side": side, "padding_free": padding_free, "use_liger_kernel": True, "use_cpu": False}
    config |= {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 2}
    config |= {"max_length": 500, "max_steps": 10}
    # Liger puts its layers into transformers' modules, for every model that is built later.
    with flash_attention_stand_in(), patch.dict(vars(modeling_qwen2)), patch.dict(vars(modeling_llama)):
        trainer = make(config=config, model=build(shape, "flash_attention_2"))
        trainer.train()
    logs = trainer.state.log_history
    assert [log["step"] for log in logs if "eval_loss" in log] == [10]
    assert all(torch.tensor(log["loss"]).isfinite() for log in logs if "loss" in log)
    assert ("padfix/pad_fraction" in logs[0]) is padding_free


def test_a_stage_of_dpo_goes_before(make, makers):
    runs = []
    for dpo, sft, config in ((trl.DPOTrainer, trl.SFTTrainer, {}), (DPOTrainer, SFTTrainer, MODES["prefix sharing"])):
        first = makers("DPO").train("short", dpo, **config).trainer
        runs.append(make.train("short", sft, {"model": first.model}, **config))
    assert_same(runs[1].trajectory(*METRICS), runs[0].trajectory(*METRICS))
    assert_mode_ran(runs[1], "prefix sharing")


def test_a_padded_stage_after_a_packed_one_is_padded(make):
    first = make(config=packing())
    first.train()
    after = run(make(model=first.model), watch_inputs(""))
    assert_mode_ran(after, "padded")
