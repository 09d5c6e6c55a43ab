"""Models are as before once they are detached, whatever ended the training."""

import pytest
import torch
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_padfix import DPOTrainer
from trl_padfix.core.model.views import PACKED_ATTENTION


def assert_intact(trainer: DPOTrainer) -> None:
    """Models that were trained attached compute as any other once they are detached."""
    trainer.restore_padding()
    # The names that stay registered in transformers, one more after a run with compiled layers; no model keeps one.
    assert {name for name in ALL_ATTENTION_FUNCTIONS if "padfix" in name} <= {
        PACKED_ATTENTION,
        f"{PACKED_ATTENTION}_compiled",
    }
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for model in (trainer.model, trainer.ref_model):
        assert is_bare(model)
        assert model.config._attn_implementation == "sdpa"
        fresh = build_model().eval()
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model.eval()(**inputs).logits, fresh(**inputs).logits)


@pytest.mark.parametrize(("mode", "checkpointing"), [(TWO_MODES[0], False), (TWO_MODES[1], True)])
def test_an_exception_in_a_forward_leaves_models_that_can_be_detached(mode, checkpointing, make):
    trainer = make(config=SIDED_MODES[mode] | {"gradient_checkpointing": checkpointing})
    calls = []

    def fail(module, args, output):
        calls.append(module)
        if len(calls) == 6:
            raise RuntimeError("out of memory, say")

    hook = trainer.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        trainer.train()
    hook.remove()
    assert_intact(trainer)


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
