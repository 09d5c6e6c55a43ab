"""The model that is trained is the one that is packed: models of `model_init`, of trials, of several trainers."""

import copy

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.observe import entered_tokens
from kit.rows import build_pairs, build_rows
from kit.trainer_runs import (
    assert_same,
    break_mode,
    build_ids,
    build_model,
    build_tokenizer,
    is_bare,
    make_plain_trainer,
    our_warnings,
    trajectory,
)
from transformers import Trainer, TrainerCallback

import trl_padfix
from trl_padfix import PaddingRemovalCallback, check_parity, padding_free_trainer, remove_padding
from trl_padfix.core.context import within
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.trainers.base import PaddingFreeMixin


BEGIN = "w3 w5 w7 w9 "


def make(folder, trainer_class=Trainer, counts=None, **given):
    """A trainer whose models are made by `model_init`; `counts` gets the tokens that enter each of them."""

    def init():
        model = build_model()
        if counts is not None:
            counts.append(entered_tokens(model))
        return model

    given = {"train_dataset": build_ids(20, begin=BEGIN), "train_sampling_strategy": "sequential"} | given
    return make_plain_trainer(folder, trainer_class, model=None, model_init=init, **given)


def fractions(trainer):
    return [[log[f"padfix/{n}_fraction"] for n in ("pad", "shared")] for log in trainer.state.log_history[:-1]]


PackedTrainer = padding_free_trainer(Trainer, prefix_sharing=True, parity_check=False)


@pytest.mark.parametrize(("way", "trials"), [("class", 2), ("callback", 2), ("callback, attached before", 1)])
def test_the_model_that_model_init_makes_is_packed(way, trials, tmp_path):
    theirs = make(tmp_path / "theirs", counts=(padded := []))
    callback = PaddingRemovalCallback(True, parity_check=False)
    by_class = way == "class"
    given = {} if by_class else {"callbacks": [callback]}
    ours = make(tmp_path / "ours", PackedTrainer if by_class else Trainer, packed := [], **given)
    if way == "callback, attached before":
        callback.attach(ours)
    first = ours.model
    for _ in range(trials):
        theirs.train()
        ours.train()
        assert_same(trajectory(ours)[-5:], trajectory(theirs)[-5:])
    stats = ours.padding.stats if by_class else callback.stats
    since = 0 if by_class else -1  # a trainer counts what entered all its models, a callback that of the last
    packed_tokens, padded_tokens = (sum(map(sum, tokens[since:])) for tokens in (packed, padded))
    assert packed_tokens == stats.packed_tokens < stats.real_tokens < stats.padded_tokens == padded_tokens
    assert [sum(tokens) > 0 for tokens in packed] == [False] + [True] * trials
    assert is_bare(first)
    shares = torch.tensor(fractions(ours))
    assert (shares > 0).all()
    assert (shares < 1).all()


# -- two trainers on one model


def make_on(model, kind, folder, **mode):
    given = {"model": model, "max_steps": 3, "parity_check": False} | mode
    if kind == "plain":
        given = {name: given[name] for name in ("model", "max_steps")} | {"train_dataset": build_ids(20, begin=BEGIN)}
        return make_plain_trainer(folder, PackedTrainer, eval_dataset=build_ids(4, begin=BEGIN), **given)
    if kind == "budget":
        given |= {"max_tokens_per_batch": 60, "train_dataset": build_pairs(24)}
    kind = "DPO" if kind == "budget" else kind
    data = {"DPO": build_pairs}.get(kind)
    given |= {"eval_dataset": data(4)} if data else {}
    return make_trainer(trl_padfix, kind, folder, **given)


PAIRS = [("SFT", "padded SFT"), ("DPO", "budget"), ("plain", "SFT")]
"""Two trainers on one model; TRL's own DPO does not train once SFT has patched its model."""


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_trainer_takes_its_model_over_again(first, second, tmp_path, caplog):
    mode = {"padding_free": True, "prefix_sharing": True}
    model = build_model()
    one = make_on(model, first, tmp_path / "one", **mode)
    other_mode = {} if second.startswith("padded") else {"padding_free": True}
    two = make_on(model, second.removeprefix("padded "), tmp_path / "two", **other_mode)
    forwards = entered_tokens(model)
    one.train()
    assert sum(forwards) == one.padding.stats.packed_tokens < one.padding.stats.real_tokens
    assert PaddingRemoval.of(model) is one.padding.handle
    assert one.padding.handle.prefix_sharing is True
    forwards.clear()
    two.train()
    if second.startswith("padded"):
        assert sum(forwards) == one.padding.stats.padded_tokens
    else:
        assert PaddingRemoval.of(model) is two.padding.handle
    if two.eval_dataset is None and one.eval_dataset is not None:
        counted = one.padding.stats.forwards
        one.evaluate()
        assert one.padding.stats.forwards > counted > 1
        assert one.padding.stats.packed_tokens < one.padding.stats.real_tokens
    two.padding.restore()
    one.padding.restore()
    assert one.padding.stats.forwards
    assert is_bare(model)
    assert "Nothing was packed" not in " ".join(our_warnings(caplog))


class SeesPadded(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        assert not PaddingRemoval.of(model).enabled

    on_train_begin = on_save = on_step_end


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("computes", ["train", "evaluate", "predict"])
def test_between_trainings_and_evaluations_other_code_finds_the_model_padded(computes, fails, tmp_path):
    model, rows = build_model(), build_ids(8, begin=BEGIN)
    given = {"eval_dataset": rows, "train_dataset": rows, "callbacks": [SeesPadded()]}
    ours = make_plain_trainer(tmp_path, PackedTrainer, model=model, **given)
    plain, forwards = make_plain_trainer(tmp_path, Trainer, model=model, eval_dataset=rows), entered_tokens(model)
    arguments = [rows] if computes == "predict" else []
    if fails:
        model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(ours, computes)(*arguments)
        model.lm_head._forward_hooks.clear()
    else:
        getattr(ours, computes)(*arguments)
    assert sum(forwards)
    forwards.clear()
    plain.evaluate()
    padded = sum(forwards)
    assert padded == sum(batch["input_ids"].numel() for batch in plain.get_eval_dataloader())
    ours.get_train_dataloader()
    assert not PaddingRemoval.of(model).enabled
    with pytest.raises(ValueError, match="pool_last_token"):
        remove_padding(model, pool_last_token=True)
    assert PaddingRemoval.of(model) is ours.padding.handle
    with remove_padding(model) as handle:
        assert PaddingRemoval.of(model) is handle
        with pytest.raises(ValueError, match="attached to this Qwen2Model already"):
            ours.evaluate()
    with pytest.raises(ValueError, match="A trainer of this package did it"), ours.padding.in_use():
        ours.evaluate(), remove_padding(model)
    forwards.clear()
    ours.padding.stats.reset()
    ours.evaluate()
    assert sum(forwards) == ours.padding.stats.packed_tokens < padded


@pytest.mark.parametrize("precision", [{"bf16": True, "gradient_checkpointing": True}, {}])
def test_a_loss_that_is_computed_by_hand_has_a_backward(precision, tmp_path):
    """The budget recomputes sub-batches in the backward, when the trainer computes nothing any more."""

    class OfAllRows(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}, use_cache=False).logits
            return logits[inputs["attention_mask"].bool()].logsumexp(-1).mean() ** 2

    def gradient(**fields):
        given = {"model": build_model(), "per_device_train_batch_size": 6, "parity_check": False} | precision | fields
        trainer = make_trainer(trl_padfix, "SFT", tmp_path, OfAllRows, **given)
        trainer.model.train()
        forwards = entered_tokens(trainer.model)
        with within(unchecked=dict.fromkeys(trainer.padding.handles, "a user's step")):
            trainer.compute_loss(trainer.model, dict(next(iter(trainer.get_train_dataloader())))).backward()
        return trainer.model.lm_head.weight.grad, forwards

    (whole, once), (split, parts) = gradient(padding_free=True), gradient(padding_free=True, max_tokens_per_batch=40)
    assert max(parts) < max(once)
    if precision:
        assert (split - whole).norm() <= 8 * torch.finfo(torch.bfloat16).eps * whole.norm()
    else:
        assert_same(split, whole)


def test_a_padded_trainer_computes_padded_within_the_training_of_a_packed_one(tmp_path):
    model, rows = build_model(), build_ids(8, begin=BEGIN)
    padded = make_on(model, "SFT", tmp_path / "padded", eval_dataset=build_rows(4))

    class Evaluates(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            forwards.clear()
            padded.evaluate()
            within.append(sum(forwards))

    given = {"model": model, "train_dataset": rows, "callbacks": [Evaluates()], "max_steps": 2}
    packed, within = make_plain_trainer(tmp_path, PackedTrainer, **given), []
    forwards = entered_tokens(model)
    packed.train()
    assert within == [sum(batch["input_ids"].numel() for batch in padded.get_eval_dataloader())] * 2
    assert packed.padding.stats.packed_tokens < packed.padding.stats.padded_tokens


def test_the_parity_check_packs_also_between_trainings(tmp_path, monkeypatch):
    model, rows = build_model(), build_ids(4, begin=BEGIN)
    ours = make_plain_trainer(tmp_path, PackedTrainer, model=model, train_dataset=rows)
    batch = {name: x for name, x in next(iter(ours.get_train_dataloader())).items() if name != "labels"}
    report = check_parity(model, batch)
    assert report.ok
    assert 0 < report.packed_tokens < report.padded_tokens
    break_mode(monkeypatch, "prefix sharing")
    assert not check_parity(model, batch).ok
    assert not PaddingRemoval.of(model).enabled


@pytest.mark.parametrize("library", [trl, trl_padfix])
def test_a_copy_of_a_trained_model_trains_as_a_new_model_with_its_weights(library, tmp_path):
    model, free, runs = build_model(), {"padding_free": True}, []
    make_trainer(library, "SFT", tmp_path, model=model, **free if library is trl_padfix else {}).train()
    policy = build_model()
    policy.load_state_dict(model.state_dict())
    for given in ((policy, copy.deepcopy(policy)), (copy.deepcopy(model), copy.deepcopy(model))):
        trainer = make_trainer(trl_padfix, "DPO", tmp_path, model=given[0], ref_model=given[1], **free)
        trainer.train()
        runs.append(trajectory(trainer))
    assert_same(*runs)
    copied, ids = copy.deepcopy(model), torch.tensor([[3, 4, 5], [6, 7, 0]])
    with remove_padding(copied) as handle:  # without a trainer
        copied(ids, attention_mask=ids.sign())
    assert handle.stats.forwards == 1


@pytest.mark.parametrize("fields", [{}, {"padding_side": "left"}, {"padding_free": True}])
def test_a_trainer_that_pads_left_attaches_once_and_again_after_another_one(fields, tmp_path, monkeypatch):
    attached, model = [], build_model()
    attach = PaddingFreeMixin._attach_to_models
    monkeypatch.setattr(PaddingFreeMixin, "_attach_to_models", lambda self: attached.append(self) or attach(self))
    given = {"model": model, "processing_class": build_tokenizer(padding_side="left"), "max_steps": 3}
    one = make_trainer(trl_padfix, "SFT", tmp_path, **given, **fields)
    one.train()
    assert attached == [one]
    two = make_trainer(trl_padfix, "SFT", tmp_path, **given, padding_free=True)
    two.train()
    one.train()
    assert attached == [one, two, one]


def test_a_restored_trainer_splits_no_steps_and_has_its_own_training_step(tmp_path, caplog):
    class OfUser(trl_padfix.DPOTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    trainer = make_trainer(trl_padfix, "DPO", tmp_path, OfUser, padding_free=True, max_tokens_per_batch=60)
    forwards = entered_tokens(trainer.model)
    trainer.train()
    assert "runs padded" not in caplog.text
    split, forwards[:] = [*forwards], []
    trainer.padding.restore()
    assert "training_step" not in vars(trainer)
    trainer.train()
    assert max(split) < min(forwards)
