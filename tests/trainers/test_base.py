"""`padding_free_trainer`, or the callback: any trainer class, on batches and models of a user's own."""

import inspect
import pickle
import pydoc
import typing
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
import trl
from kit.cells import by_turns
from kit.methods import METHODS, make_trainer
from kit.trainer_runs import (
    assert_other,
    assert_same,
    break_mode,
    build_ids,
    build_model,
    build_tokenizer,
    make_plain_trainer,
    train_beside_plain,
    trained,
)
from packaging.version import Version
from torch import nn
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer
from zoo import models

import trl_padfix
from trl_padfix import PaddingRemovalCallback, PaddingRemovalError, ParityError, padding_free_trainer
from trl_padfix.trainers.base import PaddingFreeMixin
from trl_padfix.trainers.task import Task


PAD = 39
BEGIN = "w1 w2 w3 w4 w5 w6 "


class Weighted(Trainer):
    """A loss of its own, by hand, and arguments that are passed on."""

    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight = weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = self.weight * loss
        return (loss, outputs) if return_outputs else loss


class Renamed(Weighted):
    """Batches whose names only the class knows."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {k.removeprefix("my_"): v for k, v in inputs.items()}, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


class OnStates(Trainer):
    """A loss on the states of a decoder without a head, whose batch it reads by attributes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        states = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state
        loss = (states * inputs.attention_mask[..., None]).square().mean()
        return (loss, {"states": states}) if return_outputs else loss


class NeedsLabels(nn.Module):
    """
    A module around a decoder that takes no `use_cache`, whose forward has labels without a default, and whose output
    is a dictionary without logits.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = build_model().model
        self.head = nn.Linear(self.inner.config.hidden_size, 2)

    def forward(self, input_ids, attention_mask, labels):
        states = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"loss": self.head(states[labels != -100]).square().mean(), "states": states}


def renamed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {f"my_{k}": v for k, v in DataCollatorForSeq2Seq(build_tokenizer())(rows).items()}


def classes(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    labels = torch.tensor([len(row["input_ids"]) % 2 for row in rows])
    return dict(DataCollatorForSeq2Seq(build_tokenizer())(rows)) | {"labels": labels}


def unlabelled(rows: list[dict[str, Any]]) -> Any:
    return DataCollatorWithPadding(build_tokenizer())([{"input_ids": row["input_ids"]} for row in rows])


CASES = {
    "transformers'": {},
    "a loss of its own": {"trainer_class": Weighted},
    "names of its own": {"trainer_class": Renamed, "data_collator": renamed},
    "classes": {"model": lambda: build_model("reward", num_labels=2, pad_token_id=PAD), "data_collator": classes},
    "states of a decoder": {
        "trainer_class": OnStates, "model": lambda: build_model().model, "data_collator": unlabelled,
    },
    "a forward that needs labels": {"model": NeedsLabels},
}  # fmt: skip


def make(case: str, folder: Any, **more: Any) -> Trainer:
    given = {
        "train_dataset": build_ids(24, begin=BEGIN),
        "eval_dataset": build_ids(10, 1, BEGIN),
        "model": build_model,
    }
    given |= {"trainer_class": Trainer, "remove_unused_columns": False} | CASES[case] | more
    return make_plain_trainer(folder, **given | {"model": given["model"]()})


@pytest.mark.parametrize(
    ("case", "way"), [*by_turns(CASES, ["trainer", "callback"]), ("a forward that needs labels", "trainer")]
)
def test_any_trainer_trains_without_padding_as_it_does_padded(case, way, tmp_path, monkeypatch):
    train_beside_plain(way, lambda **given: make(case, tmp_path, **given), monkeypatch)


class LeftPadded(Trainer):
    """Batches that are padded left, with the positions of each row alone if `numbers` is set."""

    numbers = False

    def compute_loss(self, model, inputs, *args, **kwargs):
        count = inputs["attention_mask"].sum(1)
        columns = torch.arange(inputs["input_ids"].shape[1]) + count[:, None]
        inputs["labels"][:, 0] = -100  # padding would predict it
        inputs = {name: x.gather(1, columns % x.shape[1]) for name, x in inputs.items()}
        if self.numbers:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return super().compute_loss(model, inputs, *args, **kwargs)


class Numbered(LeftPadded):
    numbers = True


def test_a_model_that_counts_columns_has_the_numbers_of_each_row_alone(tmp_path, caplog):
    given = {"model": lambda: models.build("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), "max_steps": 2}
    alone, padded = (
        trained(make("transformers'", tmp_path, trainer_class=c, **given)) for c in (Numbered, LeftPadded)
    )
    ours = make("transformers'", tmp_path, trainer_class=padding_free_trainer(LeftPadded), **given)
    assert_same(trained(ours), alone)
    assert ours.padding.stats.padded_forwards == 0
    assert caplog.text.count("GPT2Model takes the column of a token as its position") == 1
    with pytest.raises(AssertionError):  # the control
        assert_same(padded, alone, rtol=1e-3)


def test_switched_off_it_logs_the_figures_of_the_class_to_the_bit(tmp_path):
    ours = make("a loss of its own", tmp_path, trainer_class=padding_free_trainer(Weighted, padding_free=False))
    assert trained(ours).tolist() == trained(make("a loss of its own", tmp_path)).tolist()
    assert ours.padding.handle is None


class PaddingFreeTrainer(padding_free_trainer(Trainer)):
    """For a launcher that spawns processes."""


def test_a_class_of_a_module_can_be_pickled():
    assert pickle.loads(pickle.dumps(PaddingFreeTrainer)) is PaddingFreeTrainer


def test_only_the_nearest_trainer_of_trl_has_a_counterpart_and_a_class_that_was_made_is_made_again():
    experiment = type("GMPOTrainer", (trl.GRPOTrainer,), {"__module__": "trl.experimental.gmpo.gmpo_trainer"})
    for made in (padding_free_trainer(experiment), padding_free_trainer(trl.GRPOTrainer, task_class=Task)):
        assert not issubclass(made, trl_padfix.GRPOTrainer)
        assert made.task_class is Task
    again = padding_free_trainer(padding_free_trainer(Trainer, strict=True), prefix_sharing="auto")
    assert again.fixed_settings == {"padding_free": True, "prefix_sharing": "auto"}
    assert again.__mro__[1:] == padding_free_trainer(Trainer).__mro__[1:]


def test_what_needs_to_know_the_rows_is_refused():
    with pytest.raises(TypeError, match=r"no settings \['max_tokens_per_batch'\]"):
        padding_free_trainer(Trainer, max_tokens_per_batch=10)
    with pytest.raises(TypeError, match="DPOTrainer removes padding already"):
        padding_free_trainer(trl_padfix.DPOTrainer)
    with pytest.raises(TypeError, match=r"takes a class.* got a `Linear` object\. .*, for a model `remove_padding"):
        padding_free_trainer(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"takes a class.* it got GRPOConfig\."):
        padding_free_trainer(trl.GRPOConfig)


@pytest.mark.parametrize("kind", METHODS)
def test_a_subclass_of_trls_trainer_trains_as_a_subclass_of_ours(kind, makers, monkeypatch, capsys):
    make = makers(kind)

    class Doubled(make.method.theirs):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

    kinds = [padding_free_trainer(c, prefix_sharing=True) for c in (Doubled, make.method.theirs)]
    theirs, doubled, plain = (make.train(make.method.plain, c, max_steps=2) for c in (Doubled, *kinds))
    assert_same(doubled.trajectory("num_tokens"), theirs.trajectory("num_tokens"), atol=1e-6)
    assert_other(plain.trajectory("num_tokens"), theirs.trajectory("num_tokens"))  # the control
    assert all(issubclass(c, make.method.ours) for c in kinds)
    assert capsys.readouterr().out.count("parity ok, the trainer's own loss") == 2
    assert doubled.trainer.padding.stats.shared_fraction > 0
    break_mode(monkeypatch, "prefix sharing")
    with pytest.raises(ParityError):
        make.train(make.method.plain, kinds[0], max_steps=1)


class OwnStep:  # its loss reads padding, outside of `compute_loss`, which it may call, too
    def training_step(self, model, inputs, *args):
        outputs = model(**self._prepare_inputs(inputs))
        loss = self.compute_loss(model, inputs) if self.calls_loss else outputs["loss"]
        loss = loss + 0.01 * outputs["logits"].square().mean()
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("calls_loss", [False, True])
@pytest.mark.parametrize("way", ["above", "below", "callback"])
def test_what_a_step_computes_outside_of_compute_loss_runs_padded(calls_loss, way, tmp_path, caplog):
    def steps(is_ours=True, **given):
        change = partial(padding_free_trainer, **given) if is_ours else lambda kind: kind
        kind = type("Own", (OwnStep, change(Trainer) if way == "above" else Trainer), {"calls_loss": calls_loss})
        trainer = make("transformers'", tmp_path, trainer_class=change(kind) if way == "below" else kind, max_steps=2)
        if is_ours and way == "callback":
            trainer.padding = PaddingRemovalCallback(**given)
            trainer.padding.attach(trainer)
        trainer.train()
        return trainer, [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]

    (_, theirs), (trainer, ours) = steps(is_ours=False), steps()
    assert ours == pytest.approx(theirs, rel=1e-4)
    names = ("padfix/padded_forwards", "padfix/pad_fraction")
    assert [sum(name in log for log in trainer.state.log_history) for name in names] == [2, 2 * calls_loss]
    assert "calls the model outside of `compute_loss`" in caplog.text
    trainer, ours = steps(parity_check=False)  # the control
    assert ours != pytest.approx(theirs, rel=1e-4)
    assert sum("padfix/pad_fraction" in log for log in trainer.state.log_history) == 2
    if way != "callback":
        with pytest.raises(PaddingRemovalError, match="outside of `compute_loss`"):
            steps(strict=True)


@pytest.mark.parametrize("labels", [None, list])
def test_a_loss_by_ids_trains_without_a_tensor_of_labels(labels, tmp_path):
    class OfIds(Weighted):
        def compute_loss(self, model, inputs, *args, **kwargs):
            labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            return super().compute_loss(model, dict(inputs) | {"labels": labels}, *args, **kwargs)

    def collate(rows):
        batch = dict(DataCollatorForSeq2Seq(build_tokenizer())(rows))
        return batch | {"labels": labels and labels(batch["labels"])}

    given = {"data_collator": collate, "eval_dataset": None, "max_steps": 2}
    kinds = (OfIds, padding_free_trainer(OfIds))
    theirs, ours = (make("transformers'", tmp_path, trainer_class=kind, **given) for kind in kinds)
    assert_same(trained(ours), trained(theirs))
    assert ours.padding.loss_parity["train"].startswith("parity ok")


def test_a_model_that_was_replaced_in_a_trainer_is_refused(tmp_path):
    trainer = make("transformers'", tmp_path, trainer_class=padding_free_trainer(Trainer), eval_dataset=None)
    trainer.model = build_model()
    with pytest.raises(ValueError, match=r"`trainer\.model` was replaced"):
        trainer.train()
    trainer.model_wrapped = trainer.model  # the control
    trainer.train()


class EmptyRows:
    """A collator whose every other batch, from the first on, has a row without a real token."""

    def __init__(self):
        self.batches, self.collator = 0, DataCollatorForSeq2Seq(build_tokenizer())

    def __call__(self, rows):
        batch, self.batches = self.collator(rows), self.batches + 1
        if self.batches % 2:
            batch["attention_mask"][0], batch["labels"][0] = 0, -100
        return batch


def test_batches_with_an_empty_row_are_computed_padded_from_the_first_on(tmp_path, monkeypatch):
    def build(kind: type) -> Trainer:
        return make("transformers'", tmp_path, trainer_class=kind, data_collator=EmptyRows(), eval_dataset=None)

    ours = build(padding_free_trainer(Trainer, prefix_sharing=True))
    assert_same(trained(ours), trained(build(Trainer)))
    fractions = [log.get("padfix/pad_fraction") for log in ours.state.log_history if "loss" in log]
    assert [fraction is not None for fraction in fractions] == [False, True, False, True, False]
    break_mode(monkeypatch, "prefix sharing")
    with pytest.raises(ParityError):  # in the second batch, the first one that is compared
        build(padding_free_trainer(Trainer, prefix_sharing=True)).train()


# -- what our trainers override of TRL's can be called as TRL calls it

HAS_DISTILLATION = Version(trl.__version__) >= Version("1.16")
ONLINE = ["GRPOTrainer", "RLOOTrainer", *(["DistillationTrainer"] if HAS_DISTILLATION else [])]
TRAINERS = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", *ONLINE]


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_field_that_is_set_after_the_trainer_was_made_is_refused(kind, tmp_path):
    trainer = make_trainer(trl_padfix, kind, tmp_path, max_steps=1)
    trainer.args.padding_free = True
    for run in (trainer.train, lambda: trainer.evaluate(trainer.train_dataset)):
        with pytest.raises(ValueError, match="Changed after this trainer was made"):
            run()
    trainer.args.padding_free = False  # the control
    trainer.train()


def test_a_configuration_has_the_fields_of_trls_and_ours():
    for name in TRAINERS:
        config = name.replace("Trainer", "Config")
        ours, theirs = getattr(trl_padfix, config), getattr(trl, config)
        assert issubclass(ours, theirs)
        defaults = [{f.name: f.default for f in fields(config)} for config in (ours, theirs)]
        assert defaults[0].items() >= defaults[1].items()
        for names in (
            lambda c: {*inspect.signature(c.__init__).parameters},
            lambda c: {*inspect.getfullargspec(c.__init__).args},
        ):
            assert names(theirs) | {"padding_free", "attn_implementation"} <= names(ours)


def answers(function) -> dict:
    """What a script can ask a function for its parameters."""
    spec = inspect.getfullargspec(function)
    arguments = [*spec.args, *filter(None, [spec.varargs, spec.varkw]), *spec.kwonlyargs]
    return {
        "signature": inspect.signature(function),
        "getfullargspec": (arguments, spec.defaults, spec.kwonlydefaults, spec.annotations),
    }


def test_every_introspection_of_a_trainer_answers_as_trls():
    for name in TRAINERS:
        ours, theirs = getattr(trl_padfix, name), getattr(trl, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert f" |  {name}(model: " in pydoc.render_doc(ours, renderer=pydoc.plaintext)
        assert typing.get_type_hints(ours.__init__) == typing.get_type_hints(theirs.__init__)
        assert answers(ours.__init__) == answers(theirs.__init__)
        assert answers(PaddingFreeMixin.__init__) != answers(theirs.__init__)  # the control: as the mixin writes it
