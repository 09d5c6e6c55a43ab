"""Code of a user's that reads the batch of a step finds TRL's tensors, under a budget too, and has TRL's figures."""

from functools import cache
from types import MethodType

import pytest
import torch
import trl
from kit.budget_runs import ALL_TRAINERS, BUDGET, IMAGE_BUDGETS, assert_same, build_data, make, make_on_images
from kit.cells import every_pair, once_each
from kit.methods import make_trainer
from kit.observe import entered_tokens
from kit.trainer_runs import break_mode, build_tokenizer, make_plain_trainer, trained
from torch.utils.checkpoint import checkpoint
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback

import trl_padfix
from trl_padfix import PaddingRemovalCallback, padding_free_trainer
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def train(name, reader, ours, **config):
        config = {"max_steps": 3} | ({"parity_check": False} if ours else {}) | config
        trainer, read = make(name, tmp_path_factory.mktemp("read"), ours=ours, **config), []
        READERS[reader](trainer, read)
        forwards = entered_tokens(trainer.model)
        return trained(trainer), forwards, read

    return train


@pytest.fixture(scope="module")
def theirs(run):
    return cache(lambda name, reader, **config: run(name, reader, False, **config))


@pytest.mark.parametrize(("name", "reader", "sharing"), every_pair(ALL_TRAINERS, READERS, [False, True]))
def test_a_reader_finds_trls_batch_and_has_trls_figures(name, reader, sharing, run, theirs):
    if (name, reader) in {("reward", "writing"), ("reward", "writing data")}:
        pytest.skip("has neither labels nor a completion mask")
    expected, _, read_there = theirs(name, reader)
    figures, forwards, read = run(name, reader, True, prefix_sharing=sharing)
    assert_same(figures, expected)
    assert max(forwards) <= BUDGET[name]
    assert len(read) == len(read_there) == 3
    for ours, trls in zip(read, read_there, strict=True):
        assert ours.keys() == trls.keys()
        assert all(torch.equal(ours[k], trls[k]) for k in trls)


@pytest.mark.parametrize(("name", "reader"), once_each(["sft", "dpo", "kto"], ["reading", "copying", "writing"]))
def test_so_it_does_with_accumulation(name, reader, run, theirs):
    expected, *_ = theirs(name, reader, **ACCUMULATED)
    figures, forwards, _ = run(name, reader, True, **ACCUMULATED)
    assert_same(figures, expected)
    assert max(forwards) <= BUDGET[name]


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


@pytest.mark.parametrize(("name", "divisor", "where"), every_pair(ALL_TRAINERS, DIVISORS, ["class", "object"]))
def test_a_step_of_its_own_is_called_for_each_micro_batch_of_trl(name, divisor, where, tmp_path, monkeypatch):
    """The last micro-batch of the epoch has fewer rows, and the last step fewer micro-batches."""
    figures, seen, own = [], [], step_of_its_own(DIVISORS[divisor])
    for ours in (False, True):
        given = (
            RAGGED | {"train_dataset": build_data(name).select(range(14))} | ({"parity_check": False} if ours else {})
        )
        trainer = make(name, tmp_path, ours=ours, **given)
        if where == "object":
            trainer.training_step = MethodType(own, trainer)
        else:
            monkeypatch.setattr(trainer, "__class__", type("Own", (type(trainer),), {"training_step": own}))
        forwards = entered_tokens(trainer.model)
        figures.append(trained(trainer))
        seen.append(trainer.seen)
    assert_same(figures[1], figures[0])
    assert seen[0] == seen[1]
    assert len({*seen[0]}) > 1
    assert max(forwards) <= BUDGET[name]


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
    for ours, library in enumerate((trl, trl_padfix)):
        given = RAGGED | {"train_dataset": build_data("dpo").select(range(14))}
        given |= {"padding_free": True, "max_tokens_per_batch": BUDGET["dpo"]} if ours else {}
        kind = type("Own", (Copying, own, library.DPOTrainer), {})
        figures.append(
            trained(make_trainer(library, "DPO", tmp_path / library.__name__, kind, max_length=26, **given))
        )
    assert_same(figures[1], figures[0])


class Halving:
    """A collator that drops the shorter half of the rows that it gets."""

    def __init__(self, collator):
        self.collator = collator

    def __call__(self, examples):
        lengths = [sum(len(v) for v in example.values() if isinstance(v, list)) for example in examples]
        longest = sorted(range(len(examples)), key=lambda i: -lengths[i])[: -(-len(examples) // 2)]
        return self.collator([examples[i] for i in sorted(longest)])


@pytest.mark.parametrize("reader", ["copying", "of its own"])
@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_a_collator_that_drops_rows_does_so_in_each_micro_batch(name, reader, tmp_path):
    figures = []
    for ours in (False, True):
        trainer = make(name, tmp_path, ours=ours, train_dataset=build_data(name).select(range(14)), **RAGGED)
        trainer.data_collator = Halving(trainer.data_collator)
        if reader == "copying":
            READERS[reader](trainer, [])
        else:
            trainer.training_step = MethodType(step_of_its_own(DIVISORS["as it was"]), trainer)
        figures.append(trained(trainer))
    assert_same(figures[1], figures[0], rtol=1e-4)


def test_cut_by_the_rows_of_before_they_are_others(tmp_path, monkeypatch):
    """The control."""
    monkeypatch.setattr(micro_batch_budget.MicroBatchBudget, "note_step", lambda self, batches: None)
    with pytest.raises(AssertionError, match="not close"):
        test_a_collator_that_drops_rows_does_so_in_each_micro_batch("dpo", "of its own", tmp_path)


def test_one_that_gets_the_rows_of_a_step_at_once_has_other_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.trainers.batching.user_steps.joins_micro_batches", lambda trainer: False)
    figures, own = [], step_of_its_own(DIVISORS["as it was"])
    for ours in (False, True):
        trainer = make("sft", tmp_path, ours=ours, **RAGGED)
        trainer.training_step = MethodType(own, trainer)
        figures.append(trained(trainer))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(figures[1], figures[0])


@pytest.mark.parametrize("reader", ["writing", "writing data"])
def test_by_the_micro_batches_of_the_collator_an_edit_is_lost(reader, run, theirs, monkeypatch):
    monkeypatch.setattr(micro_batches.StepBatch, "is_unmodified", True)
    expected, *_ = theirs("sft", reader)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("sft", reader, True)[0], expected)


def test_with_the_counts_of_the_data_loader_those_of_a_user_are_lost(run, theirs):
    """The control of `counting`: TRL counts labels, and its figures are others."""
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("sft", "reading", True)[0], theirs("sft", "counting")[0])


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


# -- a checkpoint around the model


def checkpointed(reentrant):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def logits(ids, mask, anchor):
            return model(input_ids=ids, attention_mask=mask).logits

        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        anchor = torch.zeros((), requires_grad=True)  # a reentrant checkpoint needs an input with a gradient
        scores = checkpoint(logits, ids, mask, anchor, use_reentrant=reentrant)[:, :-1]
        losses = torch.nn.functional.cross_entropy(scores.transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
        return (losses.sum(1) / (inputs["labels"][:, 1:] != -100).sum(1).clamp(min=1)).mean()

    return compute_loss


@pytest.mark.parametrize(
    ("config", "reentrant"),
    once_each([{}, {"prefix_sharing": True}, {"prefix_sharing": True, "loss_reduction": "rows"}], [False, True]),
)
def test_a_checkpoint_around_the_model_has_trls_figures(reentrant, config, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.layout.shared_prefixes.MIN_SAVED_TOKENS", 1)
    figures = []
    for ours in (False, True):
        given = {"max_steps": 3} | (config if ours else {})
        trainer = make("sft", tmp_path, ours=ours, **given)
        own = type("Own", (type(trainer),), {"compute_loss": checkpointed(reentrant)})
        monkeypatch.setattr(trainer, "__class__", own)
        forwards = entered_tokens(trainer.model)
        figures.append(trained(trainer))
    assert_same(figures[1], figures[0])
    assert max(forwards[2:]) <= BUDGET["sft"]  # but for the parity check


def test_a_checkpoint_whose_forward_leaks_has_others(tmp_path, monkeypatch):
    figures = []
    for ours in (False, True):
        mode = break_mode(monkeypatch, "padding-free") if ours else {}
        trainer = make("sft", tmp_path, ours=ours, max_steps=3, **mode | ({"parity_check": False} if ours else {}))
        own = type("Own", (type(trainer),), {"compute_loss": checkpointed(False)})
        monkeypatch.setattr(trainer, "__class__", own)
        figures.append(trained(trainer))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(figures[1], figures[0])


# -- a collator without a mask


class Maskless:
    def __init__(self, collator):
        self.collator = collator

    def __call__(self, examples):
        batch = dict(self.collator(examples))
        del batch["attention_mask"]
        return batch


def without_mask(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    scores, labels = model(input_ids=inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(scores.transpose(1, 2), labels)


@pytest.mark.parametrize("budget", [None, 60])
@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "sharing"])
def test_a_collator_without_a_mask_has_trls_figures(sharing, budget, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.layout.shared_prefixes.MIN_SAVED_TOKENS", 1)
    figures = []
    for ours in (False, True):
        given = {"max_tokens_per_batch": budget, "prefix_sharing": sharing} if ours else {}
        trainer = make("sft", tmp_path, ours=ours, max_steps=3, **given)
        # TRL's own loss needs a mask.
        monkeypatch.setattr(trainer, "__class__", type("Own", (type(trainer),), {"compute_loss": without_mask}))
        trainer.data_collator = Maskless(trainer.data_collator)
        figures.append(trained(trainer))
    assert_same(figures[1], figures[0])


def test_where_tokens_are_taken_for_others_it_has_others(tmp_path, monkeypatch):
    figures = []
    for ours in (False, True):
        mode = break_mode(monkeypatch, "prefix sharing") | {"max_tokens_per_batch": None} if ours else {}
        trainer = make("sft", tmp_path, ours=ours, max_steps=3, **mode | ({"parity_check": False} if ours else {}))
        monkeypatch.setattr(trainer, "__class__", type("Own", (type(trainer),), {"compute_loss": without_mask}))
        trainer.data_collator = Maskless(trainer.data_collator)
        figures.append(trained(trainer))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(figures[1], figures[0])


@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "sharing"])
@pytest.mark.parametrize("kind", ["trainer", "callback"])
def test_so_has_a_plain_trainer(kind, sharing, tmp_path):
    figures = []
    for packs in (False, True):
        rows = [[2 + (i * j) % 30 for j in range(3 + i % 5)] for i in range(24)]
        given = {"train_dataset": [{"input_ids": row, "labels": row} for row in rows]}
        given |= {"data_collator": Maskless(DataCollatorForSeq2Seq(build_tokenizer()))}
        trainer_class = (
            padding_free_trainer(Trainer, prefix_sharing=sharing) if packs and kind == "trainer" else Trainer
        )
        given |= {"callbacks": [PaddingRemovalCallback(sharing)]} if packs and kind == "callback" else {}
        figures.append(trained(make_plain_trainer(tmp_path, trainer_class, **given)))
    assert_same(figures[1], figures[0])
