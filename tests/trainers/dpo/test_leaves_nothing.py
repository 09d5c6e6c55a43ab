"""Models are as before once they are detached, whatever ended the training."""

import pytest
from kit.trainer_runs import (
    SIDED_MODES,
    TWO_MODES,
    assert_mode_ran,
    assert_same,
    build_model,
    is_bare,
    run,
    watch_inputs,
)

from trl_padfix import DPOTrainer


def test_a_trainer_whose_models_are_detached_trains_padded(make):
    trainer = make(config=SIDED_MODES["padding-free, left"])
    trainer.restore_padding()
    ours = run(trainer, watch_inputs(""))
    assert_same(ours.trajectory(), make.theirs("short").trajectory())
    assert_mode_ran(ours, "padded, left")


def test_an_error_while_the_trainer_is_made_leaves_the_models_as_they_were(make):
    class Fails(DPOTrainer):
        def compute_ref_log_probs(self, model, inputs):
            assert model.config._attn_implementation == "eager"
            raise RuntimeError("out of memory, say")

    policy, reference = build_model(), build_model(seed=1)
    config = SIDED_MODES[TWO_MODES[1]] | {"attn_implementation": "eager", "ref_attn_implementation": "eager"}
    with pytest.raises(RuntimeError, match="out of memory, say"):
        make(Fails, config | {"precompute_ref_log_probs": True}, model=policy, ref_model=reference)
    for model in (policy, reference):
        assert is_bare(model)
        assert model.config._attn_implementation == "sdpa"
