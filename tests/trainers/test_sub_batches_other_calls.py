"""A custom loss may call the model in other ways than TRL: the budget holds, or the log says that it does not."""

from functools import partial

import pytest
import torch
import trl
from kit.budget_runs import BUDGETS, assert_same, make, subclass, train_split
from kit.trainer_runs import our_warnings

import trl_padfix
from trl_padfix.trainers.batching.row_splits import RowSplitter
from trl_padfix.trainers.batching.sub_batches import SubBatches


def of_decoder(model, ids, mask):
    return model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)


def of_embeddings(model, ids, mask):
    return model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits


def without_mask(model, ids, mask):
    return model(input_ids=ids).logits


def with_hidden_states(model, ids, mask):
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return output.logits * (1 + output.hidden_states[1].detach()[..., :1])


def with_cache(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, use_cache=True).logits


def with_tensors_for_a_loss(model, ids, mask, weights=None):
    """Labels that need no shift, and perhaps a weight for each token, given to the model."""
    labels = ids.masked_fill(mask == 0, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).masked_fill(mask == 0, -100)
    more = {"shift_labels": shifted} | ({} if weights is None else {"loss_weights": weights})
    output = model(input_ids=ids, attention_mask=mask, labels=labels, **more)
    return output.logits * output.loss


CALLS = (of_decoder, of_embeddings, without_mask, with_hidden_states, with_tensors_for_a_loss)
CALLS = {f.__name__: f for f in CALLS}
CELLS = [  # each call once, the trainers and modes by turns
    (("SFT", "DPO")[i % 2], call, {"prefix_sharing": True} if i // 2 % 2 else {}) for i, call in enumerate(CALLS)
]


def calling(call):
    """A loss that takes its logits from `call`, a mean over rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        labels = inputs["labels"] if "labels" in inputs else ids.masked_fill(inputs["completion_mask"] == 0, -100)
        logits = call(model, ids, mask)[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()

    return compute_loss


def run(name, call, ours, **config):
    trainer = make(trl_padfix if ours else trl, name, "unused", budget=ours, **config)
    return train_split(subclass(trainer, compute_loss=calling(call)))


@pytest.fixture(autouse=True)
def every_shared_prefix_pays(monkeypatch):
    monkeypatch.setattr("trl_padfix.core.layout.shared_prefixes.MIN_SAVED_TOKENS", 1)


@pytest.mark.parametrize(("name", "call", "mode"), CELLS)
def test_the_budget_holds_for_every_way_to_call_the_model(name, call, mode):
    ours = run(name, CALLS[call], True, **mode)
    assert_same(ours.figures, run(name, CALLS[call], False).figures)
    assert max(ours.forwards) <= BUDGETS[name]


def test_a_head_that_gets_shifted_labels_alone_has_trls_loss(monkeypatch):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["attention_mask"]
        shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100).masked_fill(mask == 0, -100)
        call = {"input_ids": inputs["input_ids"], "attention_mask": mask, "shift_labels": shifted}
        return model(**call, fused_lm_head=True).loss

    def trained(package):
        trainer = make(package, "SFT", "unused", budget=package is trl_padfix)
        return train_split(subclass(trainer, compute_loss=compute_loss))

    theirs, ours = trained(trl), trained(trl_padfix)
    assert_same(ours.figures, theirs.figures)
    assert max(ours.forwards) <= BUDGETS["SFT"]
    # The control: every part counts equally.
    monkeypatch.setattr("trl_padfix.trainers.batching.sub_batches._num_labels", lambda call: torch.tensor(1))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trained(trl_padfix).figures, theirs.figures)


def test_a_call_that_cannot_be_split_is_named_once(caplog):
    theirs = run("SFT", with_cache, False).figures
    with caplog.at_level("WARNING"):
        ours = run("SFT", with_cache, True)
    assert_same(ours.figures, theirs)
    assert not ours.forwards  # which leave out those with a cache
    (said,) = (message for message in our_warnings(caplog) if "was not applied" in message)
    assert "Qwen2ForCausalLM" in said
    assert "`use_cache=True`" in said


class Prepared:
    """A collator whose masks say which token attends to which, `(B, 1, L, L)`."""

    def __init__(self, collator):
        self.collator = collator

    def __call__(self, examples):
        batch = dict(self.collator(examples))
        seen = batch["attention_mask"].bool()[:, None, None, :] | torch.eye(batch["input_ids"].shape[1]).bool()
        return batch | {"attention_mask": seen.expand(-1, -1, seen.shape[-1], -1).tril()}


def test_a_collator_with_a_prepared_mask_has_trls_figures(caplog):
    def figures(library):
        trainer = make(library, "SFT", "unused", budget=library is trl_padfix, gradient_accumulation_steps=2)
        trainer.data_collator = Prepared(trainer.data_collator)
        return train_split(trainer).figures

    assert_same(figures(trl_padfix), figures(trl))
    assert any("`attention_mask` is not of shape `(B, L)`" in line for line in our_warnings(caplog))


def test_arguments_without_a_row_for_each_row_are_not_cut():
    """Three rows, and three axes of M-RoPE, three columns to score, three positions in a cache."""
    ids, mask = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.int64)
    axes = torch.arange(36).view(3, 3, 4)
    columns = torch.arange(3)
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids, "position_ids": axes}
    call |= {"logits_to_keep": columns, "cache_position": columns}
    batch = SubBatches(partial(RowSplitter, 8, sharing=False))._split(ids, mask)
    assert len(batch.inputs) == 2
    for rows, of_rows in zip(batch.split.rows, batch.calls(call, None), strict=True):
        assert torch.equal(of_rows["labels"], ids[rows])
        assert torch.equal(of_rows["position_ids"], axes[:, rows])
        assert of_rows["logits_to_keep"] is of_rows["cache_position"] is columns
