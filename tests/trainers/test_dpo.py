"""What DPO has of its own, and what a script does with its trainer. `test_every_method.py` has its trajectories."""

import contextlib
from types import SimpleNamespace

import pytest
import trl
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from kit.dpo_cases import build_pairs
from kit.trainer_runs import (
    MODES,
    SIDED_MODES,
    TWO_MODES,
    build_model,
    build_tokenizer,
    is_bare,
)

from trl_padfix import DPOTrainer, PaddingRemovalError
from trl_padfix.trainers.parts.packing import RemovePadding


@pytest.fixture(scope="module")
def make(makers):
    return makers("DPO")


@pytest.mark.parametrize("check", [True, "forward"])
def test_gradients_are_compared_of_the_policy_and_in_training(check, make):
    trainer = make(config=SIDED_MODES["prefix sharing, left"] | {"max_steps": 1, "parity_check": check})
    trainer.train()
    trainer.evaluate()
    (policy, reference), *evaluation = trainer.padding.parity["train"], *trainer.padding.parity["eval"]
    assert (policy.gradient is not None) is (check is True)
    assert [report.gradient for report in (reference, *evaluation)] == [None] * 3
    assert {report.not_compared for report in (policy, reference, *evaluation)} == {""}


def test_no_configuration_at_all_is_trls_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the output directory gets its name from the model
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = DPOTrainer(
        model=build_model(),
        ref_model=build_model(seed=1),
        train_dataset=build_pairs(4),
        processing_class=build_tokenizer(),
    )
    assert type(trainer.args) is trl.DPOConfig
    assert trainer.padding.parts == ()
    assert type(trainer.data_collator).__module__.startswith("trl.")


def test_the_side_is_the_tokenizers_where_none_is_given(make):
    tokenizer = build_tokenizer(padding_side="left")
    assert make(processing_class=tokenizer).data_collator.padding_side == "left"
    assert make(config={"padding_side": "right"}, processing_class=tokenizer).data_collator.padding_side == "right"


# -- models as before, whatever ended the training


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


# -- compiled layers


@pytest.mark.parametrize("mode", ["padded", "padding-free"])
def test_accelerate_compiles_no_model_whose_layers_are_compiled(mode, make):
    """It keeps what the first trainer of a process asks for, which here is this one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        trainer = make(config=MODES[mode] | {"torch_compile": True, "torch_compile_backend": "aot_eager"})
        assert (trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO) is (mode == "padding-free")
        assert trainer.args.torch_compile_backend == "aot_eager"
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def test_compiled_layers_under_zero_3_are_refused_before_the_first_step(make, monkeypatch):
    trainer = make(config=MODES["padding-free"])
    for stage, refused in ((2, False), (3, True)):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
            patch.setattr(trainer.args, "torch_compile", True)
            patch.setattr("trl_padfix.core.attention.compiled.compile_layers", lambda *args, **kwargs: {})
            with pytest.raises(PaddingRemovalError, match="ZeRO-3") if refused else contextlib.nullcontext():
                next(x for x in trainer.padding.parts if isinstance(x, RemovePadding)).on_init_end()
