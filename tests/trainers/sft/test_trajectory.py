"""Set-ups of SFT that no other method has: TRL's trajectory. `test_every_method.py` has the others."""

import pytest
import trl
from kit.cells import once_each
from kit.trainer_runs import (
    MODES,
    SIDED_MODES,
    TWO_MODES,
    assert_mode_ran,
    assert_same,
    build_model,
    run,
    watch_inputs,
)


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


def test_eager_attention_is_trls(make):
    model = build_model(attn_implementation="eager")
    ours = make.train("short", given={"model": model}, **MODES["prefix sharing"])
    assert_same(ours.trajectory(), make.theirs("short").trajectory())


# -- what TRL refuses


@pytest.mark.parametrize("refused", ["max_length", "a collator"])
def test_what_trl_refuses_runs(refused, make):
    inner = make(trl.SFTTrainer).data_collator
    given = {"data_collator": lambda rows: inner(rows)} if refused == "a collator" else {}
    config = {"padding_free": True} | ({} if refused == "max_length" else {"max_length": None})
    with pytest.raises(ValueError, match=r"padding[-_]free"):
        make(trl.SFTTrainer, config, **given)
    ours = run(make(config=config | {"max_length": 26}, **given), watch_inputs(""))
    assert_same(ours.trajectory(), make.theirs("short").trajectory())
    assert_mode_ran(ours, "padding-free")


# -- NEFTune


NOISE = {"neftune_noise_alpha": 5.0}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_neftune_draws_the_noise_of_the_padded_batch(kind, makers):
    make = makers(kind)
    theirs, ours = make.train("short", make.method.theirs, **NOISE), make.train("short", padding_free=True, **NOISE)
    assert_same(ours.trajectory(), theirs.trajectory(), atol=1e-5)
    stats = ours.trainer.padding.stats
    assert 0 < stats.packed_tokens == stats.real_tokens < stats.padded_tokens
    without = make.train("short", padding_free=True)
    with pytest.raises(AssertionError):
        assert_same(without.trajectory(), theirs.trajectory(), atol=1e-5)


def test_noise_of_the_packed_row_would_be_other_noise(make, monkeypatch):
    theirs = make.train("short", trl.SFTTrainer, **NOISE)
    monkeypatch.setattr("trl_padfix.core.patches.decoder._neftune_embeddings", lambda *_: {})
    ours = make.train("short", padding_free=True, **NOISE)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), theirs.trajectory(), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_noise_is_bounded_by_the_length_of_the_padded_row(side, make):
    trainer = make(config=NOISE | {"padding_free": True, "padding_side": side, "max_steps": 1})
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
