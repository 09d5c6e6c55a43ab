"""Losses that are not TRL's, wherever they were put: under a token budget each has the figures that it has in TRL."""

from functools import cache, partial, wraps
from types import MethodType

import pytest
import torch
import trl
from kit.budget_runs import ALL_TRAINERS, BUDGET, assert_same, make, subclass, train
from kit.cells import every_pair, once_each
from transformers.loss.loss_utils import ForCausalLMLoss

import trl_padfix
from trl_padfix.trainers.batching.micro_batch_budget import MicroBatchBudget
from trl_padfix.trainers.custom_loss import custom_loss_name


def longest_row_twice(compute_loss):
    """A decorator: rows are compared, because the loss of a batch is scaled by its longest row."""

    @wraps(compute_loss)
    def decorated(self, model, inputs, *args, **kwargs):
        scale = inputs["attention_mask"].sum(1).max()
        result = compute_loss(self, model, inputs, *args, **kwargs)
        return (result[0] * scale, *result[1:]) if isinstance(result, tuple) else result * scale

    return decorated


class Scaled:
    def compute_loss(self, model, inputs, *args, **kwargs):
        theirs = super().compute_loss
        return longest_row_twice(lambda self, *a, **k: theirs(*a, **k))(self, model, inputs, *args, **kwargs)


def on_class(trainer, patch):
    owner = next(c for c in type(trainer).__mro__ if c.__module__.startswith("trl."))
    patch.setattr(owner, "compute_loss", longest_row_twice(owner.compute_loss))


def on_object(trainer, patch):
    trainer.compute_loss = MethodType(longest_row_twice(type(trainer).compute_loss), trainer)


def as_partial(trainer, patch):
    trainer.compute_loss = partial(longest_row_twice(type(trainer).compute_loss), trainer)


def as_mixin(trainer, patch):
    subclass(trainer, Scaled)


PLACES = {place.__name__: place for place in (on_class, on_object, as_partial, as_mixin)}


def run(name, place, ours, **config):
    """A training with a loss that was put `place`."""
    with pytest.MonkeyPatch.context() as patch:
        return train(name, lambda trainer: place(trainer, patch), ours=ours, **config)


theirs = cache(lambda name, place=on_object, **config: run(name, place, False, **config).figures)


@pytest.mark.parametrize(("place", "sharing"), once_each(PLACES, [False, True]))
def test_a_loss_has_trls_figures_wherever_it_was_put(place, sharing):
    ours = run("sft", PLACES[place], True, prefix_sharing=sharing)
    assert_same(ours.figures, theirs("sft"))
    assert max(ours.forwards) <= BUDGET["sft"]


@pytest.mark.parametrize(
    ("name", "place"), once_each([name for name in ALL_TRAINERS if name != "sft"], ["on_class", "on_object"])
)
def test_so_it_has_in_the_other_trainers(name, place):
    assert_same(run(name, PLACES[place], True).figures, theirs(name))


def as_function(trainer, patch):
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )


def test_so_has_a_function_for_the_loss():
    assert_same(run("sft", as_function, True).figures, theirs("sft", as_function))


class Cut:
    """Cuts the columns of a batch to the length of its shortest row."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        width = max(6, int(inputs["attention_mask"].sum(1).min()))
        return {k: v[:, :width] if v.dim() > 1 else v for k, v in inputs.items()}


def cutting(trainer, patch):
    subclass(trainer, Cut)


@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "sharing"])
@pytest.mark.parametrize("name", ["sft", "reward"])
def test_what_prepares_the_inputs_may_compare_rows(name, sharing):
    plain = {"optim": "sgd"}  # AdamW makes much of rounding where a gradient is zero
    ours = run(name, cutting, True, prefix_sharing=sharing, **plain)
    assert_same(ours.figures, theirs(name, cutting, **plain))
    assert max(ours.forwards) <= BUDGET[name]


@pytest.mark.parametrize(("name", "place"), [("sft", on_object), ("dpo", on_object), ("reward", cutting)])
def test_computed_by_micro_batches_it_has_others(name, place, monkeypatch):
    monkeypatch.setattr("trl_padfix.trainers.custom_loss.TRUSTED", ("trl", "transformers.", __name__))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run(name, place, True).figures, theirs(name, place))


def test_a_method_that_trls_loss_calls_counts_and_one_that_it_does_not_call_does_not(tmp_path, monkeypatch):
    trainer = make("kto", tmp_path, ours=True)
    assert custom_loss_name(trainer) is None
    trainer.floating_point_ops = lambda inputs: 0
    assert custom_loss_name(trainer) is None
    monkeypatch.setattr(trl.KTOTrainer, "_compute_loss", longest_row_twice(trl.KTOTrainer._compute_loss))
    assert custom_loss_name(trainer) == "KTOTrainer._compute_loss"
    monkeypatch.undo()
    trainer._compute_kl_logps = partial(type(trainer)._compute_kl_logps, trainer)
    assert custom_loss_name(trainer) == "trainer._compute_kl_logps"


def test_trls_decorators_and_losses_are_trls(tmp_path):
    trainer = make("sft", tmp_path, ours=True)
    assert custom_loss_name(trainer) is None
    trainer.compute_loss_func = ForCausalLMLoss
    assert custom_loss_name(trainer) is None
    trainer.compute_loss_func = longest_row_twice(ForCausalLMLoss)
    assert custom_loss_name(trainer) == "compute_loss_func"
    for name in ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO"):
        bare = object.__new__(getattr(trl_padfix, f"{name}Trainer"))
        assert custom_loss_name(bare) is None, name


def test_a_loss_that_is_set_during_training_is_an_error(tmp_path):
    trainer = make("sft", tmp_path, ours=True, max_steps=3)
    loader = trainer.get_train_dataloader()
    on_object(trainer, None)
    with pytest.raises(ValueError, match=r"`trainer.compute_loss` was set during training.* before `train\(\)`"):
        trainer.training_step(trainer.model, next(iter(loader)))


# -- a step that fails


def skipping(trainer, failing_step, forwards=3):
    """A user's step that skips a batch that does not fit into memory; it fails in its last micro-batch."""
    train, layer = trainer.training_step, trainer.model.model.layers[0]
    state = {"step": 0, "forwards": 0, "skipped": 0}

    def fail(module, args):
        state["forwards"] += 1
        if state["step"] == failing_step and state["forwards"] == forwards:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    layer.register_forward_pre_hook(fail)

    def step(*args, **kwargs):
        state["step"] += 1
        state["forwards"] = 0
        try:
            return train(*args, **kwargs)
        except torch.OutOfMemoryError:
            state["skipped"] += 1
            return torch.zeros(())

    trainer.training_step = step
    return state


@pytest.mark.parametrize(("name", "forwards"), [("sft", 3), ("reward", 3), ("dpo", 3), ("kto", 7)])
def test_a_step_that_is_skipped_moves_no_weight(name, forwards, tmp_path):
    trainer = make(name, tmp_path, ours=True, max_steps=1, parity_check=False)
    state = skipping(trainer, 1, forwards)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert state["skipped"] == 1
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_gradients_of_before_stay(tmp_path):
    trainer = make("sft", tmp_path, ours=True, parity_check=False)
    skipping(trainer, failing_step=1)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.create_optimizer()
    parameter = next(trainer.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    trainer.training_step(trainer.model, batch, torch.tensor(50))
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert trainer.padding.part(MicroBatchBudget).running is None


# -- a claim about a loss


def reduced(reduction):
    """A loss of a user's own, of the scores of rows or tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        labels = inputs["labels"] if "labels" in inputs else ids.masked_fill(inputs["completion_mask"] == 0, -100)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        counts = (labels[:, 1:] != -100).sum(1)
        rows = losses.sum(1) / counts.clamp(min=1)
        return {"rows": rows.mean(), "tokens": losses.sum() / counts.sum(), "sum": losses.sum()}[reduction]

    return compute_loss


def of_reduction(reduction):
    return lambda trainer, patch: subclass(trainer, compute_loss=reduced(reduction))


@pytest.mark.parametrize(
    ("name", "reduction", "sharing"), every_pair(["sft", "dpo"], ["rows", "tokens", "sum"], [False, True])
)
def test_a_claimed_loss_is_split_without_a_second_forward(name, reduction, sharing):
    place, mode = of_reduction(reduction), {"prefix_sharing": sharing, "max_steps": 6}
    theirs = run(name, place, False, max_steps=6)
    unclaimed, claimed = run(name, place, True, **mode), run(name, place, True, loss_reduction=reduction, **mode)
    assert_same(claimed.figures, theirs.figures)
    assert_same(unclaimed.figures, theirs.figures)
    assert max(claimed.forwards) <= BUDGET[name]
    assert sum(claimed.forwards) < sum(unclaimed.forwards)  # also with the forwards that verify the claim


@pytest.mark.parametrize(
    ("reduction", "claim", "name"),
    once_each([("rows", "tokens"), ("tokens", "rows"), ("sum", "rows"), ("rows", "sum")], ["sft", "dpo"]),
)
def test_a_wrong_claim_is_an_error_with_its_figures(name, reduction, claim):
    with pytest.raises(
        ValueError, match=rf"`loss_reduction='{claim}'` is not what `.*compute_loss` computes: .* loss is"
    ):
        run(name, of_reduction(reduction), True, loss_reduction=claim)


def test_a_claim_about_a_loss_that_compares_rows_is_an_error():
    with pytest.raises(ValueError, match=r"is not what `trainer\.compute_loss` computes"):
        run("sft", on_object, True, loss_reduction="rows")


def test_losses_that_trl_would_add_up_are_refused():
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="The loss is your own, and TRL adds several of them up"):
        run("sft", of_reduction("tokens"), True, **given)


def test_claims_that_cannot_be_kept_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is about a loss in micro-batches\. The loss compares rows"):
        make("kto", tmp_path, ours=True, loss_reduction="rows")
    with pytest.raises(ValueError, match="`loss_reduction` is 'rows', 'tokens' or 'sum', got 'mean'"):
        make("sft", tmp_path, ours=True, loss_reduction="mean")
    with pytest.raises(ValueError, match="and there is no budget"):
        make("sft", tmp_path, ours=True, loss_reduction="rows", max_tokens_per_batch=None)
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make("dpo", tmp_path, ours=True, loss_reduction="sum", **accumulated)
    on_object(trainer, None)
    with pytest.raises(ValueError, match="TRL averages over several such losses in a step"):
        trainer.train()
