"""Under a token budget a collator that looks at its whole batch gets the batches of TRL, which are split by rows."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from kit.budget_runs import assert_same, make, train
from kit.cells import every_pair, once_each
from transformers import default_data_collator

from trl_padfix.trainers.batching import sampler
from trl_padfix.trainers.batching.micro_batches import micro_batches_of
from trl_padfix.trainers.batching.step_plan import StepPlan
from trl_padfix.trainers.batching.token_costs import text_costs
from trl_padfix.trainers.custom_loss import is_custom_collator


class Wrapping:
    """A user's collator around that of TRL (which ours replaces)."""

    def __init__(self, inner):
        self.inner = inner


class Augmenting(Wrapping):
    """Appends each row once more, with the tokens of the next row of the batch behind it."""

    def __call__(self, examples):
        names = [name for name in examples[0] if name.endswith(("input_ids", "labels", "rejected_ids", "chosen_ids"))]
        others = examples[1:] + examples[:1]
        longer = [
            row | {n: [*row[n], *other[n][:2]] for n in names} for row, other in zip(examples, others, strict=True)
        ]
        return self.inner([*examples, *longer])


class Longest(Wrapping):
    """Keeps the longest rows of the batch."""

    def __call__(self, examples):
        length = lambda row: sum(len(v) for name, v in row.items() if isinstance(v, list))  # noqa: E731
        return self.inner(sorted(examples, key=length)[-3:])


COLLATORS = {"augmented": Augmenting, "longest": Longest}
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TOKENS = {"dpo": 70, "reward": 70, "sft": 34, "kto": 34}
"""Budgets that hold the longest row, with the tokens that are appended to it."""


def run(name, kind, ours, **config):
    """Three steps with a collator."""
    given = {"max_length": 32} | config | ({"max_tokens_per_batch": TOKENS[name]} if ours else {})
    collating = COLLATORS[kind]

    def change(trainer):
        trainer.data_collator = collating(trainer.data_collator)

    return train(name, change, ours=ours, **given)


theirs = cache(lambda name, kind, **config: run(name, kind, False, **config).figures)


@pytest.mark.parametrize(
    ("name", "kind", "sharing"), every_pair(["sft", "dpo", "reward", "kto"], COLLATORS, [False, True])
)
def test_a_collator_that_looks_at_its_batch_has_trls_figures(name, kind, sharing):
    ours = run(name, kind, True, prefix_sharing=sharing)
    assert_same(ours.figures, theirs(name, kind))
    assert max(ours.forwards) <= TOKENS[name]
    assert len(ours.forwards) > 3


@pytest.mark.parametrize(("name", "kind"), once_each(["sft", "dpo", "reward"], COLLATORS))
def test_so_it_has_with_accumulation(name, kind):
    assert_same(run(name, kind, True, **ACCUMULATED).figures, theirs(name, kind, **ACCUMULATED))


@pytest.mark.parametrize(("name", "kind"), [("sft", "augmented"), ("dpo", "longest")])
def test_called_on_each_micro_batch_it_has_others(name, kind, monkeypatch):
    monkeypatch.setattr(sampler, "is_custom_collator", lambda collator: False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run(name, kind, True).figures, theirs(name, kind))


class Weighting(Wrapping):
    """Adds a value for the whole batch."""

    def __call__(self, examples):
        return {**self.inner(examples), "temperature": torch.tensor(float(len(examples)))}


def test_a_batch_with_a_value_for_all_rows_is_not_split_and_says_so(tmp_path, caplog):
    trainer = make("sft", tmp_path, ours=True)
    trainer.data_collator = Weighting(trainer.data_collator)
    with caplog.at_level("WARNING", logger="trl_padfix"):
        batch = next(iter(trainer.get_train_dataloader()))
    assert len(micro_batches_of(batch)) == 1
    assert micro_batches_of(batch)[0]["temperature"] == 8
    assert "temperature), so it is computed as one" in caplog.text
    assert (
        "the collator is not TRL's and may look at its whole batch. It gets the rows that it gets without"
        in caplog.text
    )


def test_functions_and_subclasses_are_a_users_collators(tmp_path):
    trainer = make("sft", tmp_path, ours=True)
    collator = trainer.data_collator
    assert not is_custom_collator(collator)
    assert not is_custom_collator(default_data_collator)
    own = type("Own", (type(collator),), {"torch_call": lambda self, examples: examples})
    assert is_custom_collator(object.__new__(own))
    assert is_custom_collator(lambda examples: examples)
    assert is_custom_collator(Wrapping(collator).__init__)
    assert is_custom_collator(partial(default_data_collator))


def test_processes_get_the_micro_batches_of_trl():
    plan = StepPlan(rows=12, micro_batch=2, accumulation_steps=2, processes=2)
    shares = plan.rows_per_process(range(12), text_costs(np.arange(1, 13)), equal=True)
    assert [share.rows for share in shares] == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9], [10, 11]]
