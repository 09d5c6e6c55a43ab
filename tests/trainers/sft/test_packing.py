"""Packed rows are trained and evaluated on as TRL does, on every attention backend."""

from functools import cache

import pytest
import torch
import trl
from kit.rows import METRICS, build_rows
from kit.sft_cases import EXACT, NEWEST, evaluated, packing
from kit.trainer_runs import MODES, assert_same, build_model, run, to_the_bit, trained
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from zoo.models import build

from trl_padfix import ParityError, packed_layout


def watch_packed(trainer, batches):
    compute_loss = trainer.compute_loss

    def watched(model, inputs, *args, **kwargs):
        assert "attention_mask" not in inputs
        batches.append(inputs["position_ids"])
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched


@pytest.fixture(scope="module")
def trl_packed(make):
    return cache(lambda strategy: run(make(trl.SFTTrainer, packing(strategy)), watch_packed))


@pytest.mark.parametrize(
    "implementation",
    ["sdpa", "eager", "flash_attention_2"],
)
def test_packing_is_trls_on_every_backend(implementation, make, trl_packed):
    theirs = trl_packed("bfd")
    with flash_attention_stand_in():
        config = packing() | {"padding_free": True}
        ours = run(make(config=config, model=build_model(attn_implementation=implementation)), watch_packed)
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    (handle,) = ours.trainer.padding.handles
    tokens = sum(positions.numel() for positions in ours.batches)
    assert handle.stats.packed_tokens == handle.stats.padded_tokens == ours.entered == tokens
    assert all((positions == 0).sum() > 2 for positions in ours.batches[:5])


def test_packing_with_none_of_our_fields_is_trls_to_the_bit(make, trl_packed):
    ours, theirs = run(make(config=packing()), watch_packed), trl_packed("bfd")
    assert to_the_bit(ours.logs) == to_the_bit(theirs.logs)
    assert ours.trainer.padding.handles == []


def test_packed_rows_share_prefixes(make, trl_packed):
    theirs = trl_packed("bfd")
    ours = run(make(config=packing() | MODES["prefix sharing"]), watch_packed)
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert 0 < ours.trainer.padding.stats.packed_tokens < theirs.entered
    assert all(log["padfix/shared_fraction"] > 0 for log in ours.logs if "loss" in log)


def test_an_evaluation_on_packed_rows_is_one_on_separate_rows(make):
    config = EXACT | {"max_length": 48, "packing": True, "per_device_eval_batch_size": 3}
    rows = build_rows(24, 1)
    packed = make(config=config | {"eval_packing": True, "padding_free": True}, eval_dataset=rows)
    separate = make(config=EXACT | {"max_length": 48}, eval_dataset=rows)
    assert len(packed.eval_dataset) < 24 == len(separate.eval_dataset)
    metrics = [evaluated(trainer) for trainer in (packed, separate)]
    for name in ["eval_loss", "eval_mean_token_accuracy", *(["eval_entropy"] if NEWEST else [])]:
        assert metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-5)
    assert packed.padding.stats.packed_tokens > 0
    packed.train()
    assert packed.padding.stats.padded_tokens > 0


@pytest.mark.parametrize(
    ("config", "kind"),
    [({"padding_free": True}, "completions"), ({"padding_free": True, "max_tokens_per_batch": 60}, "texts")],
)
def test_labels_of_first_tokens_are_counted_as_trl_counts_them(config, kind, make):
    """transformers counts the labels of GPT-2, whose `loss_type` it does not know, with those of first tokens."""
    given = {"train_dataset": build_rows(40, kind=kind), "eval_dataset": build_rows(8, 1, kind=kind)}
    settings = {"gradient_accumulation_steps": 2}
    ours = make(config=settings | config | {"padding_side": "left"}, model=build("gpt2").train(), **given)
    theirs = make(trl.SFTTrainer, settings, model=build("gpt2").train(), **given)
    assert_same(trained(ours), trained(theirs))
    batch = next(iter(theirs.get_train_dataloader()))
    labels = batch["labels"] != -100
    assert (labels.sum() > labels[:, 1:].sum()) == (kind == "texts")  # it is the first labels that are counted
    assert not getattr(theirs, "_loss_shifts_labels", False)


def test_packed_rows_that_leak_stop_training(make, trl_packed, monkeypatch):
    monkeypatch.setattr(
        "trl_padfix.core.call.layout_of.packed_layout",
        lambda positions, **_: packed_layout(positions, cu_seqlens=torch.tensor([0, 3, positions.shape[1]])),
    )
    with pytest.raises(ParityError, match="parity FAILED"):
        make(config=packing() | {"padding_free": True}).train()
    theirs = trl_packed("bfd")
    ours = run(make(config=packing() | {"padding_free": True, "parity_check": False}), watch_packed)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), theirs.trajectory())
