"""What a script does with an SFT trainer."""

import trl
from kit.rows import METRICS
from kit.sft_cases import packing
from kit.trainer_runs import MODES, assert_mode_ran, assert_same, run, watch_inputs

from trl_padfix import DPOTrainer, SFTTrainer


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
