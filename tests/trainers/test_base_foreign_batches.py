"""`padding_free_trainer` on batches and models of a user's own: the figures of the padded trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from kit.observe import entered_tokens
from kit.trainer_runs import (
    assert_same,
    break_mode,
    build_ids,
    build_model,
    build_tokenizer,
    make_plain_trainer,
    trained,
)
from torch import nn
from transformers import DataCollatorWithPadding, Trainer

from trl_padfix import PaddingRemovalCallback, ParityError, padding_free_trainer


PAD = 39


def build_rows(count: int = 16) -> Dataset:
    return build_ids(count, low=3, high=12).select_columns("input_ids")


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def labelled(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(examples)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


class Read(Trainer):
    """A loss that takes ids and mask from a batch in a way of its own."""

    @staticmethod
    def read(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs["input_ids"], inputs["attention_mask"]

    def forward(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=ids, attention_mask=mask)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = self.read(inputs)
        return (self.forward(model, ids, mask).float() * mask[..., None]).square().mean()


def reading(read: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> type[Read]:
    return type("Reading", (Read,), {"read": staticmethod(read)})


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


def classifier() -> Any:
    return build_model("reward", num_labels=2, pad_token_id=PAD)


def with_labels(labels: torch.Tensor) -> Any:
    return lambda examples: collate(examples) | {"labels": labels}


CASES = {
    "classes": (Trainer, classifier, with_labels(torch.tensor([0, 1, 1, 0]))),
    "a BatchEncoding": (
        reading(lambda batch: (batch.input_ids, batch.attention_mask)),
        build_model,
        DataCollatorWithPadding(build_tokenizer()),
    ),
    "an embedding model": (Read, lambda: build_model().model, collate),
    "a forward that needs labels": (Trainer, NeedsLabels, labelled),
}


def make_ours(kind: Any, folder: Any, by_callback: bool, sharing: bool = False, **given: Any) -> tuple[Any, Any]:
    """A trainer of a class without padding, by its own class or by the callback; and the callback or its `padding`."""
    if by_callback:
        callback = PaddingRemovalCallback(sharing)
        return make_plain_trainer(folder, kind, callbacks=[callback], **given), callback
    trainer = make_plain_trainer(folder, padding_free_trainer(kind, prefix_sharing=sharing), **given)
    return trainer, trainer.padding


def settings_of(case: str) -> dict[str, Any]:
    _, model, collator = CASES[case]
    given = {"model": model(), "data_collator": collator, "train_dataset": build_rows()}
    return given | {"remove_unused_columns": False, "max_steps": 3}


@pytest.mark.parametrize(
    ("case", "by_callback", "sharing"),
    [*((case, False, i % 2 == 0) for i, case in enumerate(CASES)), ("a forward that needs labels", True, True)],
)
def test_the_figures_are_those_of_the_padded_trainer(case, by_callback, sharing, tmp_path):
    kind = CASES[case][0]
    expected = trained(make_plain_trainer(tmp_path / "theirs", kind, **settings_of(case)))
    ours, padding = make_ours(kind, tmp_path / "ours", by_callback, sharing, **settings_of(case))
    computed = entered_tokens(ours.model if not isinstance(ours.model, NeedsLabels) else ours.model.inner)
    assert_same(trained(ours), expected, rtol=1e-3)
    (report,) = padding.reports if by_callback else padding.parity["train"]
    assert report.ok
    assert report.compared
    stats = padding.stats
    assert (stats.padded_forwards, stats.packed_tokens < stats.padded_tokens) == (0, True)
    assert computed


class OwnStep:
    """A step that never calls `compute_loss`."""

    def training_step(self, model, inputs, *args):
        loss = model(**self._prepare_inputs(inputs))["loss"]
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_step_that_never_calls_compute_loss_is_compared_before_the_weights_change(tmp_path):
    """On its first call of the model: a hook that goes by token passes, and one that goes by column is found."""

    def make_with(change: Any) -> Any:
        model = build_model()
        model.model.layers[0].register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
        kind = padding_free_trainer(type("Own", (OwnStep, Trainer), {}))
        given = {"model": model, "data_collator": labelled, "train_dataset": build_rows(), "max_steps": 2}
        return make_plain_trainer(tmp_path, kind, remove_unused_columns=False, **given)

    trainer = make_with(lambda states: states * 1.1)
    trainer.train()
    (report,) = trainer.padding.parity["train"]
    assert report.ok
    assert trainer.padding.stats.packed_tokens > 0
    trainer = make_with(lambda states: states * (1 + 0.02 * torch.arange(states.shape[-2]))[:, None])
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), weights, strict=True))


class EmptyRows:
    """A collator whose every other batch, from the first on, has a row without a real token."""

    def __init__(self):
        self.batches = 0

    def __call__(self, examples):
        batch, self.batches = labelled(examples), self.batches + 1
        if self.batches % 2:
            batch["attention_mask"][0], batch["labels"][0] = 0, -100
        return batch


def test_batches_with_an_empty_row_are_computed_padded_from_the_first_on(tmp_path, monkeypatch):
    def given():
        return {"data_collator": EmptyRows(), "train_dataset": build_rows(), "remove_unused_columns": False}

    theirs = make_plain_trainer(tmp_path / "theirs", Trainer, **given())
    ours, _ = make_ours(Trainer, tmp_path / "ours", False, sharing=True, **given())
    assert_same(trained(ours), trained(theirs))
    fractions = [log.get("padfix/pad_fraction") for log in ours.state.log_history if "loss" in log]
    assert [fraction is not None for fraction in fractions] == [False, True, False, True, False]
    break_mode(monkeypatch, "prefix sharing")
    with pytest.raises(ParityError):  # in the second batch, the first one that is compared
        make_ours(Trainer, tmp_path / "broken", False, sharing=True, **given())[0].train()
