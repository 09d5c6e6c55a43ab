"""Code of a user's that reads the batch of a step finds TRL's tensors, under a budget too, and has TRL's figures."""

from functools import cache
from types import MethodType

import pytest
import torch
import trl
from kit.budget_runs import (
    ALL_TRAINERS,
    BUDGET,
    IMAGE_BUDGETS,
    assert_same,
    build_data,
    make,
    make_on_images,
    subclass,
    train,
)  # fmt: skip
from kit.cells import every_pair, once_each
from kit.methods import make_trainer
from kit.trainer_runs import trained
from transformers import TrainerCallback

import trl_padfix
from trl_padfix.trainers.batching import micro_batch_budget, micro_batches


RAGGED = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "max_steps": 3}
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def stepping(step):
    """A `training_step` set on the object: `step` gets the batch and the step of the class."""

    def put(trainer, read):
        train = type(trainer).training_step

        def training_step(self, model, inputs, *args):
            read.append({k: v.clone() for k, v in inputs.items()})
            return step(self, model, inputs, lambda batch: train(self, model, batch, *args))

        trainer.training_step = MethodType(training_step, trainer)

    return put


@stepping
def reading(self, model, inputs, train):
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape
    assert "input_ids" in inputs
    assert len(inputs) == len(list(inputs)) == len(inputs.keys())
    return train(inputs)


@stepping
def copying(self, model, inputs, train):
    return train({k: v.to(self.args.device) for k, v in inputs.items()})


@stepping
def writing(self, model, inputs, train):
    labels = inputs["labels"] if "labels" in inputs else inputs["completion_mask"]
    labels[:, 3] = -100 if "labels" in inputs else 0
    return train(inputs)


@stepping
def writing_data(self, model, inputs, train):
    """A write that leaves no trace in the version counter of the tensor."""
    labels = inputs["labels"] if "labels" in inputs else inputs["completion_mask"]
    labels.data[:, 3] = -100 if "labels" in inputs else 0
    return train(inputs)


@stepping
def of_its_own(self, model, inputs, train):
    model.train()
    inputs = self._prepare_inputs(inputs)
    loss = self.compute_loss(model, inputs)
    self.accelerator.backward(loss)
    return loss.detach()


def counting(trainer, read):
    """A `get_batch_samples` that counts labels itself."""
    given = trainer.get_batch_samples

    def get_batch_samples(iterator, count, device):
        batches, _ = given(iterator, count, device)
        read.extend({k: v.clone() for k, v in batch.items()} for batch in batches)
        return batches, sum(batch["attention_mask"].sum() for batch in batches)

    trainer.get_batch_samples = get_batch_samples


READERS = {"reading": reading, "copying": copying, "writing": writing, "writing data": writing_data}
READERS |= {"of its own": of_its_own, "counting": counting}


def run(name, reader, ours, **config):
    """The training, and the batches that were read."""
    read = []
    return train(name, lambda trainer: READERS[reader](trainer, read), ours=ours, **config), read


theirs = cache(lambda name, reader, **config: run(name, reader, False, **config))


@pytest.mark.parametrize(("name", "reader", "sharing"), every_pair(ALL_TRAINERS, READERS, [False, True]))
def test_a_reader_finds_trls_batch_and_has_trls_figures(name, reader, sharing):
    if (name, reader) in {("reward", "writing"), ("reward", "writing data")}:
        pytest.skip("has neither labels nor a completion mask")
    expected, read_there = theirs(name, reader)
    found, read = run(name, reader, True, prefix_sharing=sharing)
    assert_same(found.figures, expected.figures)
    assert max(found.forwards) <= BUDGET[name]
    assert len(read) == len(read_there) == 3
    for ours, trls in zip(read, read_there, strict=True):
        assert ours.keys() == trls.keys()
        assert all(torch.equal(ours[k], trls[k]) for k in trls)


@pytest.mark.parametrize(("name", "reader"), once_each(["sft", "dpo", "kto"], ["reading", "copying", "writing"]))
def test_so_it_does_with_accumulation(name, reader):
    found, _ = run(name, reader, True, **ACCUMULATED)
    assert_same(found.figures, theirs(name, reader, **ACCUMULATED)[0].figures)
    assert max(found.forwards) <= BUDGET[name]


def step_of_its_own(divisor):
    """A `training_step` that computes its loss itself, and divides it as transformers' of before and of now."""

    def training_step(self, model, inputs, *args):
        inputs = self._prepare_inputs(inputs)
        counts = inputs["input_ids"].shape[0]
        loss = self.compute_loss(model, inputs) / divisor(self)
        self.accelerator.backward(loss)
        self.seen = [*getattr(self, "seen", []), counts]
        return loss.detach()

    return training_step


DIVISORS = {
    "as it was": lambda trainer: trainer.args.gradient_accumulation_steps,
    "as it is": lambda trainer: trainer.current_gradient_accumulation_steps,
    "not at all": lambda trainer: 1,
}


def ragged(name):
    """Three steps; the last micro-batch has fewer rows than the others, and the last step fewer micro-batches."""
    return RAGGED | {"train_dataset": build_data(name).select(range(14))}


@pytest.mark.parametrize(("name", "divisor", "on_object"), every_pair(ALL_TRAINERS, DIVISORS, [False, True]))
def test_a_step_of_its_own_is_called_for_each_micro_batch_of_trl(name, divisor, on_object):
    own = step_of_its_own(DIVISORS[divisor])

    def change(trainer):
        if on_object:
            trainer.training_step = MethodType(own, trainer)
        else:
            subclass(trainer, training_step=own)

    theirs, ours = (train(name, change, ours=ours, **ragged(name)) for ours in (False, True))
    assert_same(ours.figures, theirs.figures)
    assert ours.trainer.seen == theirs.trainer.seen
    assert len({*theirs.trainer.seen}) > 1
    assert max(ours.forwards) <= BUDGET[name]


def test_so_is_one_that_is_patched_onto_the_class_of_trl(tmp_path, monkeypatch):
    """It calls the model, and never `compute_loss`; each micro-batch of the budget had a mean of its own."""

    def training_step(self, model, inputs, *args):
        inputs = self._prepare_inputs(inputs)
        loss = model(**{name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}).loss
        self.accelerator.backward(loss / self.args.gradient_accumulation_steps)
        return loss.detach() / self.args.gradient_accumulation_steps

    monkeypatch.setattr(trl.SFTTrainer, "training_step", training_step)
    for given in ({"max_steps": 3}, RAGGED):
        figures = [trained(make("sft", tmp_path, ours=ours, **given)) for ours in (False, True)]
        assert_same(figures[1], figures[0])
    monkeypatch.setattr(micro_batch_budget, "computes_loss_itself", lambda step: False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trained(make("sft", tmp_path, ours=True, **RAGGED)), figures[0])


class Copying:
    """A step that passes a copy of its batch on, to another of a user's."""

    def training_step(self, model, inputs, *args):
        return super().training_step(model, dict(inputs), *args)


def test_so_is_one_that_gets_its_batch_of_another(tmp_path):
    figures, own = [], type("Own", (), {"training_step": step_of_its_own(DIVISORS["as it was"])})
    for library in (trl, trl_padfix):
        given = ragged("dpo") | {"max_length": 26}
        given |= {"padding_free": True, "max_tokens_per_batch": BUDGET["dpo"]} if library is trl_padfix else {}
        kind = type("Own", (Copying, own, library.DPOTrainer), {})
        figures.append(trained(make_trainer(library, "DPO", tmp_path, kind, **given)))
    assert_same(figures[1], figures[0])


class Halving:
    """A collator that drops the shorter half of the rows that it gets."""

    def __init__(self, collator):
        self.collator = collator

    def __call__(self, examples):
        lengths = [sum(len(v) for v in example.values() if isinstance(v, list)) for example in examples]
        longest = sorted(range(len(examples)), key=lambda i: -lengths[i])[: -(-len(examples) // 2)]
        return self.collator([examples[i] for i in sorted(longest)])


def halved(name, reader):
    """Figures of TRL's and of ours, whose collators drop rows."""

    def change(trainer):
        trainer.data_collator = Halving(trainer.data_collator)
        if reader == "copying":
            copying(trainer, [])
        else:
            trainer.training_step = MethodType(step_of_its_own(DIVISORS["as it was"]), trainer)

    return [train(name, change, ours=ours, **ragged(name)).figures for ours in (False, True)]


@pytest.mark.parametrize("reader", ["copying", "of its own"])
@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_a_collator_that_drops_rows_does_so_in_each_micro_batch(name, reader):
    theirs, ours = halved(name, reader)
    assert_same(ours, theirs, rtol=1e-4)


def test_cut_by_the_rows_of_before_they_are_others(monkeypatch):
    """The control."""
    monkeypatch.setattr(micro_batch_budget.MicroBatchBudget, "note_step", lambda self, batches: None)
    theirs, ours = halved("dpo", "of its own")
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours, theirs, rtol=1e-4)


def test_one_that_gets_the_rows_of_a_step_at_once_has_other_figures(monkeypatch):
    monkeypatch.setattr("trl_padfix.trainers.batching.user_steps.joins_micro_batches", lambda trainer: False)
    own = step_of_its_own(DIVISORS["as it was"])
    theirs, ours = (
        train("sft", lambda t: subclass(t, training_step=own), ours=ours, **RAGGED).figures for ours in (False, True)
    )
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours, theirs)


@pytest.mark.parametrize("reader", ["writing", "writing data"])
def test_by_the_micro_batches_of_the_collator_an_edit_is_lost(reader, monkeypatch):
    monkeypatch.setattr(micro_batches.StepBatch, "is_unmodified", True)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("sft", reader, True)[0].figures, theirs("sft", reader)[0].figures)


def test_with_the_counts_of_the_data_loader_those_of_a_user_are_lost():
    """The control of `counting`: TRL counts labels, and its figures are others."""
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("sft", "reading", True)[0].figures, theirs("sft", "counting")[0].figures)


def test_where_nobody_reads_it_no_batch_is_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batches, "join_batches", lambda *args: pytest.fail("joined"))
    make("sft", tmp_path, ours=True, max_steps=2).train()


class Totals(TrainerCallback):
    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.totals = [int(batch["attention_mask"].sum()) for batch in train_dataloader]


def test_a_callback_reads_the_data_loader(tmp_path):
    totals = []
    for ours in (False, True):
        trainer = make("dpo", tmp_path, ours=ours, max_steps=1)
        trainer.add_callback(callback := Totals())
        trainer.train()
        totals.append(callback.totals)
    assert totals[0] == totals[1]


@pytest.mark.parametrize("kind", IMAGE_BUDGETS)
def test_a_reader_finds_trls_images(kind, tmp_path, monkeypatch):
    figures, batches = [], []
    for library, budget in ((trl, {}), (trl_padfix, IMAGE_BUDGETS[kind])):
        trainer = make_on_images(library, kind, "llava", tmp_path / library.__name__, **budget)
        reading(trainer, read := [])
        figures.append(trained(trainer))
        batches.append(read)
    assert_same(figures[1], figures[0])
    for theirs, ours in zip(*batches, strict=True):
        assert "pixel_values" in theirs
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    monkeypatch.setattr("trl_padfix.trainers.batching.micro_batch_budget.may_read_steps", lambda trainer: False)
    trainer = make_on_images(trl_padfix, kind, "llava", tmp_path / "unread", **IMAGE_BUDGETS[kind])
    reading(trainer, [])
    with pytest.raises(ValueError, match=r"images are not numbered by row.* `training_step` that is there before"):
        trainer.train()
