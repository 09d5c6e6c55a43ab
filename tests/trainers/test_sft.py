"""SFT: packed rows, evaluations, and what it has of its own. `test_every_method.py` has its trajectories."""

import pytest
import torch
import trl
from kit.rows import METRICS, build_pairs, build_rows
from kit.sft_cases import NEWEST, evaluated, packing
from kit.tolerance import CONTROL, tolerance
from kit.trainer_runs import (
    MODES,
    SIDED_MODES,
    assert_mode_ran,
    assert_other,
    assert_same,
    build_model,
    run,
    trained,
    watch_inputs,
)
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from torch.utils._python_dispatch import TorchDispatchMode
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
def make(makers):
    return makers("SFT")


@pytest.fixture(scope="module")
def trl_packed(make):
    return run(make(trl.SFTTrainer, packing()), watch_packed)


def test_packing_is_trls(make, trl_packed):
    with flash_attention_stand_in():
        model = build_model(attn_implementation="flash_attention_2")
        ours = run(make(config=packing() | {"padding_free": True}, model=model), watch_packed)
    assert_same(ours.trajectory(*METRICS), trl_packed.trajectory(*METRICS))
    (handle,) = ours.trainer.padding.handles
    tokens = sum(positions.numel() for positions in ours.batches)
    assert handle.stats.packed_tokens == handle.stats.padded_tokens == ours.entered == tokens
    assert all((positions == 0).sum() > 2 for positions in ours.batches[:5])


def test_packed_rows_share_prefixes(make, trl_packed):
    ours = run(make(config=packing() | MODES["prefix sharing"]), watch_packed)
    assert_same(ours.trajectory(*METRICS), trl_packed.trajectory(*METRICS))
    assert 0 < ours.trainer.padding.stats.packed_tokens < trl_packed.entered
    assert all(log["padfix/shared_fraction"] > 0 for log in ours.logs if "loss" in log)


def test_an_evaluation_on_packed_rows_is_one_on_separate_rows(make):
    config = {"max_length": 48, "per_device_eval_batch_size": 24}  # one batch: TRL's metrics are means over batches
    rows = build_rows(24, 1)
    packed = make(config=config | {"packing": True, "eval_packing": True, "padding_free": True}, eval_dataset=rows)
    separate = make(config=config, eval_dataset=rows)
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
    ours = run(make(config=packing() | {"padding_free": True, "parity_check": False}), watch_packed)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), trl_packed.trajectory())


# -- evaluations: TRL's metrics, whatever the batch size

ROUNDING = tolerance(1.0, terms=64, depth=2 * 8 * 2)
EVALUATED = {
    "SFT": ["loss", "mean_token_accuracy", *(["entropy"] if NEWEST else [])],
    "DPO": ["loss", "rewards/margins", "rewards/chosen", "rewards/accuracies", "logps/rejected"]
    + (["entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy"] if NEWEST else []),
}


@pytest.mark.parametrize(("kind", "mode"), [("SFT", "padded, left"), ("DPO", "prefix sharing, right")])
def test_an_evaluation_gives_the_metrics_of_trl_at_any_batch_size(kind, mode, makers):
    make, rows = makers(kind), {"SFT": build_rows, "DPO": build_pairs}[kind](21, 3)

    def metrics(trainer_class, size, config):
        trainer = make(trainer_class, config | {"per_device_eval_batch_size": size}, eval_dataset=rows)
        found = evaluated(trainer)
        return {name: found[f"eval_{name}"] for name in EVALUATED[kind]}

    theirs = {size: metrics(make.method.theirs, size, {}) for size in (1, 8, 64)}
    for size, expected in theirs.items():
        assert metrics(None, size, SIDED_MODES[mode]) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
    assert theirs[8] != pytest.approx(theirs[64], abs=CONTROL * ROUNDING)


class LogitsSized(TorchDispatchMode):
    """Whether something of `(B, L, V)` was made."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == 40:
            self.seen = True
        return out


@pytest.mark.skipif(not NEWEST, reason="TRL computes its loss from logits")
def test_an_evaluation_of_the_loss_makes_no_logits(make):
    trainer = make(config=MODES["padding-free"] | {"parity_check": False})
    with LogitsSized() as logits:
        trainer.evaluate()
    assert not logits.seen
    with LogitsSized() as logits, torch.no_grad():
        trainer.model(torch.tensor([[1, 2]]))
    assert logits.seen


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
def test_neftune_draws_the_noise_of_the_padded_batch(kind, makers, monkeypatch):
    make, of_row = makers(kind), NOISE | {"padding_free": True}
    theirs, ours = make.train("short", make.method.theirs, **NOISE), make.train("short", **of_row)
    assert_same(ours.trajectory(), theirs.trajectory())
    stats = ours.trainer.padding.stats
    assert 0 < stats.packed_tokens == stats.real_tokens < stats.padded_tokens
    assert_other(make.theirs("short").trajectory(), theirs.trajectory())  # without noise
    monkeypatch.setattr("trl_padfix.core.call.arguments._neftune_embeddings", lambda *_: {})
    assert_other(make.train("short", **of_row).trajectory(), theirs.trajectory())  # with noise of the packed row
