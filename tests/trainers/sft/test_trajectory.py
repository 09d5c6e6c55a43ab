"""Set-ups of SFT that no other method has: TRL's trajectory. `test_every_method.py` has the others."""

import pytest
import trl
from kit.cells import once_each
from kit.flash_stand_in import flash_attention_stand_in
from kit.sft_cases import SHORT, TWO_MODES, make_dpo
from kit.trainer_runs import MODES, SETTINGS, SIDED_MODES, assert_mode_ran, assert_same, build_model, run, watch_inputs

import trl_padfix
from trl_padfix import PaddingRemovalError


def test_prompt_tuning_is_trls(make, trl_run):
    ours = make.train("prompt tuning", padding_free=True)
    assert_same(ours.trajectory(), trl_run("prompt tuning").trajectory())
    assert 0 < ours.trainer.padding.stats.packed_tokens < ours.trainer.padding.stats.padded_tokens


@pytest.mark.parametrize(("objective", "mode"), once_each(["completions only", "dft"], ["padded, left", *TWO_MODES]))
def test_eight_batches_of_one_are_one_batch_of_eight(objective, mode, make):
    runs = [
        make.train(
            objective, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, max_steps=5,
            **SIDED_MODES[mode],
        )
        for size in (1, 8)
    ]  # fmt: skip
    assert_same(runs[0].trajectory(), runs[1].trajectory(), atol=1e-5)


@pytest.mark.parametrize("mode", ["padded, left", *TWO_MODES])
def test_flash_attention_2_is_trls(mode, make, trl_run):
    with flash_attention_stand_in() as calls:
        model = build_model(attn_implementation="flash_attention_2")
        ours = run(make(config=SHORT | SIDED_MODES[mode], model=model), watch_inputs(""))
        assert len(calls) > 0
        if not mode.startswith("padded"):
            assert all(call.causal for call in calls)
    assert_same(ours.trajectory(), trl_run("short").trajectory())
    assert_mode_ran(ours, mode)


def test_eager_attention_is_trls(make, trl_run):
    model = build_model(attn_implementation="eager")
    ours = run(make(config=SHORT | MODES["prefix sharing"], model=model), watch_inputs(""))
    assert_same(ours.trajectory(), trl_run("short").trajectory())


# -- what TRL refuses


@pytest.mark.parametrize("refused", ["max_length", "a collator"])
def test_what_trl_refuses_runs(refused, make, trl_run):
    inner = make(trl.SFTTrainer).data_collator
    given = {"data_collator": lambda rows: inner(rows)} if refused == "a collator" else {}
    config = SHORT | {"padding_free": True} | ({} if refused == "max_length" else {"max_length": None})
    with pytest.raises(ValueError, match=r"padding[-_]free"):
        make(trl.SFTTrainer, config, **given)
    ours = run(make(config=config | {"max_length": 26}, **given), watch_inputs(""))
    assert_same(ours.trajectory(), trl_run("short").trajectory())
    assert_mode_ran(ours, "padding-free")


def test_a_configuration_of_trls_is_taken_as_it_is(make, trl_run, tmp_path):
    settings = SETTINGS | SHORT | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
    args = trl.SFTConfig(output_dir=str(tmp_path), padding_free=True, max_length=26, **settings)
    ours = run(make(args=args), watch_inputs(""))
    assert_same(ours.trajectory(), trl_run("short").trajectory())
    assert_mode_ran(ours, "padding-free")


# -- NEFTune


NOISY = SHORT | {"neftune_noise_alpha": 5.0}


@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
def test_neftune_draws_the_noise_of_the_padded_batch(trainer, make, tmp_path):
    def train_with(library, config):
        trainer_class = getattr(library, trainer)
        made = make(trainer_class, config) if "SFT" in trainer else make_dpo(tmp_path, config, trainer_class)
        return run(made, watch_inputs(""))

    theirs, ours = train_with(trl, NOISY), train_with(trl_padfix, NOISY | {"padding_free": True})
    assert_same(ours.trajectory(), theirs.trajectory(), atol=1e-5)
    stats = ours.trainer.padding.stats
    assert 0 < stats.packed_tokens == stats.real_tokens < stats.padded_tokens
    without = train_with(trl_padfix, SHORT | {"padding_free": True})
    with pytest.raises(AssertionError):
        assert_same(without.trajectory(), theirs.trajectory(), atol=1e-5)


def test_noise_of_the_packed_row_would_be_other_noise(make, monkeypatch):
    theirs = run(make(trl.SFTTrainer, NOISY), watch_inputs(""))
    monkeypatch.setattr("trl_padfix.core.decoder._noisy_embeddings", lambda *_: {})
    ours = run(make(config=NOISY | {"padding_free": True}), watch_inputs(""))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), theirs.trajectory(), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_noise_is_bounded_by_the_length_of_the_padded_row(side, make):
    trainer = make(config={"neftune_noise_alpha": 5.0, "padding_free": True, "padding_side": side} | {"max_steps": 1})
    table = trainer.model.get_input_embeddings().weight.detach().clone()
    batches, embedded = [], []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **how: batches.append(inputs) or compute_loss(model, inputs, **how)
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: embedded.append(args[0].detach()) if m.training else None)
    trainer.train()
    (batch,), (noisy,) = batches, embedded
    clean = table[batch["input_ids"][batch["attention_mask"].bool()]]
    bound = 5.0 / (batch["input_ids"].shape[1] * table.shape[1]) ** 0.5
    assert 0.9 * bound < (noisy[0] - clean).abs().max() <= bound + 1e-6


def test_neftune_with_prefix_sharing_is_refused(make):
    with pytest.raises(PaddingRemovalError, match=r"noise of its own.*prefix_sharing=False"):
        make(config=MODES["prefix sharing"] | {"neftune_noise_alpha": 5.0})
