"""LM heads on packed states: which labels are predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.tolerance import assert_close, assert_gradients_close
from zoo.model_numbers import gradients
from zoo.models import batch, build

from trl_padfix import remove_padding


def labelled(side: str) -> dict[str, torch.Tensor]:
    ids, mask = batch(side)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def model_with_pad() -> Any:
    """A model in which padding predicts something: its embedding is not zero."""
    model = build("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[39] = 1.0
    return model


def test_a_first_label_of_left_padding_is_computed_padded():
    model, given = model_with_pad(), labelled("left")
    rest = given | {"labels": given["labels"].masked_fill(given["attention_mask"].cumsum(1) == 1, -100)}
    expected = [model(**x, use_cache=False).loss for x in (given, rest)]
    with remove_padding(model, prefix_sharing=True) as handle:
        for i, batch_of_model in enumerate((given, rest)):
            assert_close(model(**batch_of_model).loss, expected[i], size=28, terms=64, depth=24)
            assert (handle.stats.padded_forwards, handle.stats.forwards) == (1, i)
    assert abs(expected[0] - expected[1]) > 0.01


@pytest.mark.parametrize("sharing", [False, True])
def test_the_loss_of_labels_is_that_of_right_padding_on_either_side(sharing):
    def without_first(side: str) -> dict[str, torch.Tensor]:
        given = labelled(side)
        return given | {"labels": given["labels"].masked_fill(given["attention_mask"].cumsum(1) == 1, -100)}

    model = build("gpt2")
    expected = model(**without_first("right"), use_cache=False).loss
    expected.backward()
    expected_gradients = gradients(model)
    with remove_padding(model, prefix_sharing=sharing) as handle:
        for side in ("left", "right", "mixed", "both"):
            model.zero_grad()
            loss = model(**without_first(side)).loss
            loss.backward()
            assert_close(loss, expected, size=28, terms=64, depth=24)
            assert_gradients_close(gradients(model), expected_gradients, terms=64, depth=48)
    assert (handle.stats.padded_forwards, handle.stats.forwards) == (0, 4)


def test_labels_predicted_from_padding_are_found_wrong(monkeypatch):
    model = model_with_pad()
    expected = model(**labelled("left"), use_cache=False).loss
    monkeypatch.setattr("trl_padfix.core.patches.heads.follow_padding", lambda labels, mask: False)
    with remove_padding(model):
        assert abs(model(**labelled("left")).loss - expected) > 0.01


def test_labels_given_by_the_caller_stay_as_they_are():
    given = labelled("left")
    kept = given["labels"].clone()
    model = build("qwen2")
    with remove_padding(model):
        model(**given)
    assert torch.equal(given["labels"], kept)
