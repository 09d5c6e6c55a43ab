"""
TRL's `DPOTrainer` and ours: one trajectory, whatever the mode.

A trajectory is the loss, the gradient norm and the reward margin of every step and of the evaluation after the last.
"""

import contextlib
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from datasets import Dataset
from kit.cells import every_second, once_each, slow_but
from kit.dpo_runs import (
    CASES,
    DIVERGENCES,
    MODES,
    OBJECTIVES,
    OTHER_OBJECTIVES,
    PACKED_MODES,
    SET_UPS,
    SHORT,
    STEPS,
    TWO_MODES,
    Case,
    assert_mode_ran,
    is_bare,
    make_case,
    run,
)
from kit.flash_stand_in import flash_attention_stand_in
from kit.trainer_runs import assert_same, break_mode
from peft import PromptTuningConfig, TaskType

from trl_padfix import PaddingRemovalError, ParityError
from trl_padfix.trainers.compilation import Compilation


@pytest.mark.parametrize("mode", slow_but(["padded, left", *TWO_MODES], MODES))
def test_twenty_steps_and_an_evaluation_are_trls(mode, our_run, trl_run):
    assert len(our_run(mode).trajectory) == STEPS + 1
    assert_same(our_run(mode).trajectory, trl_run("sigmoid").trajectory)
    assert_mode_ran(our_run(mode), mode)


@pytest.mark.parametrize(("objective", "mode"), once_each(OBJECTIVES, list(MODES)))
def test_every_objective_is_trls(objective, mode, make, trl_run):
    ours = run(make_case(make, CASES[objective], **MODES[mode]))
    assert_same(ours.trajectory, trl_run(objective).trajectory)
    assert_mode_ran(ours, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "mode"), once_each([*OTHER_OBJECTIVES, *DIVERGENCES], list(MODES)))
def test_every_loss_type_and_divergence_is_trls(objective, mode, make, trl_run):
    ours = run(make_case(make, CASES[objective], **MODES[mode]))
    assert_same(ours.trajectory, trl_run(objective).trajectory)
    assert (ours.trajectory[:-1, :2] > 0).all()


def test_no_loss_type_of_trl_is_left_out():
    text = next(f for f in fields(trl.DPOConfig) if f.name == "loss_type").metadata["help"]
    tried = {loss for name in (OBJECTIVES | OTHER_OBJECTIVES).values() for loss in name.config.get("loss_type", [])}
    assert set(re.findall(r"'(\w+)'", text)) <= tried | {"sigmoid"}
    text = next(f for f in fields(trl.DPOConfig) if f.name == "f_divergence_type").metadata["help"]
    tried = {name.split(",")[0] for name in DIVERGENCES} | {"reverse_kl"}
    assert {d for d in re.findall(r"`(\w+)`", text) if d.endswith(("_kl", "divergence"))} <= tried


@pytest.mark.parametrize(("set_up", "mode"), every_second(once_each(SET_UPS, TWO_MODES)))
def test_every_set_up_is_trls(set_up, mode, make, trl_run):
    ours = run(make_case(make, CASES[set_up], **MODES[mode]))
    assert_same(ours.trajectory, trl_run(set_up).trajectory)
    for handle in ours.trainer.padding.handles:
        assert 0 < handle.stats.packed_tokens <= handle.stats.real_tokens < handle.stats.padded_tokens
        assert handle.prefix_sharing == (handle.stats.packed_tokens < handle.stats.real_tokens)


def test_prompt_tuning_is_trls(make):
    # Right-padded, as TRL does it: left-padded, the virtual tokens of a row stand before its padding.
    settings = {"task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": 3}
    tuned = Case(SHORT, given=lambda: {"ref_model": None, "peft_config": PromptTuningConfig(**settings)})
    ours = run(make_case(make, tuned, padding_free=True))
    assert_same(ours.trajectory, run(make_case(make, tuned, trl.DPOTrainer)).trajectory)
    assert 0 < ours.trainer.padding.stats.packed_tokens < ours.trainer.padding.stats.padded_tokens


# A model of absolute positions gives other numbers where it is not told where the rows begin.
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_is_not_removed_gives_trls_numbers_with_absolute_positions(side, make, trl_run):
    ours = run(make_case(make, CASES["absolute positions"], padding_side=side))
    assert_same(ours.trajectory, trl_run("absolute positions").trajectory)


@pytest.mark.slow
def test_a_compiled_run_is_trls(make, trl_run):
    config = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours = run(make(config=SHORT | MODES["padded, left"] | config))
    assert_same(ours.trajectory, trl_run("short").trajectory)


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(TWO_MODES[1:], TWO_MODES))
def test_a_run_with_compiled_layers_is_trls(mode, make, trl_run):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = run(make(config=SHORT | MODES[mode] | {"torch_compile": True, "torch_compile_backend": "aot_eager"}))
    torch.testing.assert_close(ours.trajectory, trl_run("short").trajectory, rtol=1e-4, atol=1e-4)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 2  # policy and reference
    assert not counters["graph_break"]
    assert not isinstance(ours.trainer.model, torch._dynamo.OptimizedModule)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["padded", "padding-free"])
def test_accelerate_compiles_no_model_whose_layers_are_compiled(mode, make):
    """It keeps what the first trainer of a process asks for, which here is this one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        trainer = make(config=MODES[f"{mode}, left"] | {"torch_compile": True, "torch_compile_backend": "aot_eager"})
        assert (trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO) is (mode == "padding-free")
        assert trainer.args.torch_compile_backend == "aot_eager"
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def test_compiled_layers_under_zero_3_are_refused_before_the_first_step(make, monkeypatch):
    trainer = make(config=MODES["padding-free, left"])
    for stage, refused in ((2, False), (3, True)):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
            patch.setattr(trainer.args, "torch_compile", True)
            patch.setattr("trl_padfix.core.attention.compiled.compile_layers", lambda *args, **kwargs: {})
            with pytest.raises(PaddingRemovalError, match="ZeRO-3") if refused else contextlib.nullcontext():
                trainer.padding.part(Compilation).ready()


def test_pairs_without_prompts_and_of_one_token_are_trls(make):
    answers = ["<eos>", "w5 w6 <eos>", "<eos>", "w7 <eos>"]
    data = Dataset.from_list([{"prompt": "", "chosen": "<eos>", "rejected": answer} for answer in answers])
    given = {"train_dataset": data, "eval_dataset": None}
    theirs = run(make(trl.DPOTrainer, SHORT, **given)).trajectory
    assert_same(run(make(config=SHORT | MODES["padding-free, right"], **given)).trajectory, theirs)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_every_metric_of_trl_is_logged_as_trl_logs_it(mode, our_run, trl_run):
    for our_log, their_log in zip(our_run(mode).logs, trl_run("sigmoid").logs, strict=True):
        their_log = {name: value for name, value in their_log.items() if not re.search("runtime|per_second", name)}
        assert their_log == pytest.approx({name: our_log[name] for name in their_log}, rel=1e-4, abs=1e-5)


def test_the_auxiliary_loss_of_experts_is_trls(make, trl_run):
    ours = run(make_case(make, CASES["experts"], **MODES["prefix sharing, left"]))
    losses = [[log["aux_loss"] for log in logs if "aux_loss" in log] for logs in (ours.logs, trl_run("experts").logs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 5


@pytest.mark.parametrize("mode", slow_but(["padded, left", *TWO_MODES], MODES))
def test_flash_attention_2_evaluates_batches_of_eight_on_either_side(mode, make, trl_run):
    with flash_attention_stand_in() as calls:
        trainer = make(config=SHORT | MODES[mode], attention="flash_attention_2")
        ours = run(trainer)
        assert trainer.model.config._attn_implementation == "flash_attention_2"
        assert len(calls) > 0
        if "padding_free" in MODES[mode]:
            # A segment for every row, but for those that are the beginning of another.
            assert 8 < max(call.segments for call in calls) <= 16
            assert all(call.causal for call in calls)
    assert_same(ours.trajectory, trl_run("short").trajectory)


def test_the_default_precision_of_trl_runs_and_passes_the_parity_check(make):
    settings = SHORT | {"bf16": True, "gradient_checkpointing": True}
    theirs = run(make(trl.DPOTrainer, settings)).trajectory
    ours = run(make(config=settings | MODES["prefix sharing, left"]))
    torch.testing.assert_close(ours.trajectory[:, :2], theirs[:, :2], rtol=0.03, atol=0.03)
    ours.trainer.restore_padding()
    assert is_bare(ours.trainer.model)


# -- the tests can fail


@pytest.fixture(params=["padding-free", "prefix sharing"])
def broken_mode(request, monkeypatch):
    """A mode whose layout is wrong."""
    return break_mode(monkeypatch, request.param) | {"padding_side": "left"}


def test_a_broken_layout_does_not_give_trls_trajectory(broken_mode, make, trl_run):
    ours = run(make(config=broken_mode | {"parity_check": False}))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory, trl_run("sigmoid").trajectory)


def test_a_broken_layout_stops_training_before_the_first_step(broken_mode, make):
    trainer = make(config=broken_mode)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(ParityError, match=r"parity FAILED .* difference of \d+ scores mean .*`padding_free=False`"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_a_broken_layout_stops_an_evaluation(broken_mode, make):
    with pytest.raises(ParityError, match="parity FAILED"):
        make(config=broken_mode).evaluate()


@pytest.mark.parametrize("mode", slow_but([mode for mode in PACKED_MODES if "left" in mode], PACKED_MODES))
def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(mode, our_run):
    side = MODES[mode]["padding_side"]
    padded = our_run(f"padded, {side}")
    assert_mode_ran(padded, f"padded, {side}")
    with pytest.raises(AssertionError):
        assert_mode_ran(padded, mode)
