"""Losses and set-ups of DPO that no other method has: TRL's trajectory. `test_every_method.py` has the others."""

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
from kit.dpo_cases import OBJECTIVES, OTHER_OBJECTIVES, SET_UPS
from kit.methods import assert_trls
from kit.trainer_runs import SIDED_MODES, TWO_MODES, assert_same, is_bare

from trl_padfix import PaddingRemovalError
from trl_padfix.trainers.parts.packing import RemovePadding


@pytest.mark.parametrize(("objective", "mode"), once_each(OBJECTIVES, list(SIDED_MODES)))
def test_every_objective_is_trls(objective, mode, make):
    assert_trls(make, objective, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "mode"), once_each(OTHER_OBJECTIVES, list(SIDED_MODES)))
def test_every_loss_type_and_divergence_is_trls(objective, mode, make):
    ours = assert_trls(make, objective, mode)
    assert (ours.trajectory()[:-1] > 0).all()


def test_no_loss_type_of_trl_is_left_out():
    text = next(f for f in fields(trl.DPOConfig) if f.name == "loss_type").metadata["help"]
    configs = [config for config, _ in (OBJECTIVES | OTHER_OBJECTIVES).values()]
    tried = {loss for config in configs for loss in config.get("loss_type", [])}
    assert set(re.findall(r"'(\w+)'", text)) <= tried | {"sigmoid"}
    text = next(f for f in fields(trl.DPOConfig) if f.name == "f_divergence_type").metadata["help"]
    tried = {config.get("f_divergence_type") for config in configs} | {"reverse_kl"}
    assert {d for d in re.findall(r"`(\w+)`", text) if d.endswith(("_kl", "divergence"))} <= tried


@pytest.mark.parametrize(("set_up", "mode"), every_second(once_each(SET_UPS, TWO_MODES)))
def test_every_set_up_is_trls(set_up, mode, make):
    ours = assert_trls(make, set_up, mode)
    for handle in ours.trainer.padding.handles:
        assert handle.prefix_sharing == (handle.stats.packed_tokens < handle.stats.real_tokens)


# A model of absolute positions gives other numbers without the first column of each row.
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_is_not_removed_gives_trls_numbers_with_absolute_positions(side, make):
    assert_trls(make, "absolute positions", f"padded, {side}")


@pytest.mark.slow
def test_a_compiled_run_is_trls(make):
    config = SIDED_MODES["padded, left"] | {"torch_compile": True, "torch_compile_backend": "eager"}
    assert_same(make.train("short", **config).trajectory(), make.theirs("short").trajectory())


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(TWO_MODES[1:], TWO_MODES))
def test_a_run_with_compiled_layers_is_trls(mode, make):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = make.train("short", **SIDED_MODES[mode], torch_compile=True, torch_compile_backend="aot_eager")
    torch.testing.assert_close(ours.trajectory(), make.theirs("short").trajectory(), rtol=1e-4, atol=1e-4)
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
        trainer = make(
            config=SIDED_MODES[f"{mode}, left"] | {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        )
        assert (trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO) is (mode == "padding-free")
        assert trainer.args.torch_compile_backend == "aot_eager"
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def test_compiled_layers_under_zero_3_are_refused_before_the_first_step(make, monkeypatch):
    trainer = make(config=SIDED_MODES["padding-free, left"])
    for stage, refused in ((2, False), (3, True)):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
            patch.setattr(trainer.args, "torch_compile", True)
            patch.setattr("trl_padfix.core.attention.compiled.compile_layers", lambda *args, **kwargs: {})
            with pytest.raises(PaddingRemovalError, match="ZeRO-3") if refused else contextlib.nullcontext():
                trainer.padding.part(RemovePadding).on_init_end()


def test_pairs_without_prompts_and_of_one_token_are_trls(make):
    answers = ["<eos>", "w5 w6 <eos>", "<eos>", "w7 <eos>"]
    data = Dataset.from_list([{"prompt": "", "chosen": "<eos>", "rejected": answer} for answer in answers])
    given = {"train_dataset": data, "eval_dataset": None}
    theirs = make.train("short", trl.DPOTrainer, given)
    assert_same(make.train("short", given=given, padding_free=True).trajectory(), theirs.trajectory())


@pytest.mark.parametrize("mode", TWO_MODES)
def test_every_metric_of_trl_is_logged_as_trl_logs_it(mode, make):
    ours, theirs = make.train("plain", **SIDED_MODES[mode]), make.theirs("plain")
    for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
        their_log = {name: value for name, value in their_log.items() if not re.search("runtime|per_second", name)}
        assert their_log == pytest.approx({name: our_log[name] for name in their_log}, rel=1e-4, abs=1e-5)


def test_the_auxiliary_loss_of_experts_is_trls(make):
    runs = make.train("experts", **SIDED_MODES["prefix sharing, left"]), make.theirs("experts")
    ours, theirs = ([log["aux_loss"] for log in run.logs if "aux_loss" in log] for run in runs)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(ours) == 5


def test_the_default_precision_of_trl_runs_and_passes_the_parity_check(make):
    settings = {"bf16": True, "gradient_checkpointing": True}
    theirs = make.train("short", trl.DPOTrainer, **settings).trajectory()
    ours = make.train("short", **settings | SIDED_MODES["prefix sharing, left"])
    torch.testing.assert_close(ours.trajectory(), theirs, rtol=0.03, atol=0.03)
    ours.trainer.restore_padding()
    assert is_bare(ours.trainer.model)
