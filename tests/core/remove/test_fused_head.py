"""TRL's fused LM head on a packed decoder: the same figures, from the labels alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from kit.cells import by_turns
from kit.tolerance import assert_close
from trl.trainer.utils import add_fused_lm_head
from zoo.model_numbers import (
    DISTINCT,
    assert_equal_where_real,
    assert_same_gradients,
    checkpointed,
    gradients,
    logits_of,
    lora,
    weighted_sum,
)
from zoo.models import batch, build

from trl_padfix import remove_padding


FUSED = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


def fused(name: str, **config: Any) -> transformers.PreTrainedModel:
    model = build(name, "eager" if name == "gemma2" else "sdpa", **config)
    add_fused_lm_head(model, temperature=0.9, outputs=FUSED)
    return model


def answers(ids: torch.Tensor, mask: torch.Tensor, prompt: int = 3) -> torch.Tensor:
    """Labels: real tokens behind real tokens, the first `prompt` of each row left out."""
    behind_real = torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool() & mask.bool()
    return ids.masked_fill(~behind_real | (mask.cumsum(1) <= prompt), -100)


def fused_numbers(model, ids, mask, labels, **kwargs) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **kwargs)
    (output.loss + weighted_sum((output.log_probs + 0.1 * output.entropy).flatten())).backward()
    return output, gradients(model)


def assert_same_fused_numbers(got, expected) -> None:
    assert got[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert got[0][name].dtype == value.dtype, name
        assert_close(got[0][name], value, terms=64, depth=24, what=name)
    assert_same_gradients(got[1], expected[1])


@pytest.mark.parametrize(
    ("name", "side", "items", "sharing"),
    by_turns([("qwen2", "left"), ("gemma2", "right"), ("qwen3_moe", "holes")], [None, 17], [False, True]),
)
def test_the_fused_head_scores_the_labels_and_nothing_else(name, side, items, sharing):
    ids, mask = batch(side)
    labels = answers(ids, mask)
    kwargs = {} if items is None else {"num_items_in_batch": items}
    model = fused(name)
    expected = fused_numbers(model, ids, mask, labels, **kwargs)
    scored = []
    model.model.register_forward_hook(lambda module, args, output: scored.append(output.last_hidden_state.shape[:2]))

    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels, **kwargs), expected)

    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert scored == [(1, (labels != -100).sum().item())]


@pytest.mark.parametrize("side", ["left", "holes"])
def test_labels_behind_a_hidden_token_are_scored_padded(side):
    ids, mask = batch(side)
    labels = ids.masked_fill(mask == 0, -100)
    model = fused("qwen2")
    expected = fused_numbers(model, ids, mask, labels)
    with remove_padding(model, prefix_sharing=True) as handle:
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)
        assert (handle.stats.padded_forwards, handle.stats.forwards) == (1, 0)
        other = fused_numbers(model, ids, mask, answers(ids, mask, prompt=0))
    with pytest.raises(AssertionError):
        assert_same_fused_numbers(other, expected)
    assert (handle.stats.padded_forwards, handle.stats.forwards) == (1, 1)


def test_a_batch_without_labels_has_no_loss():
    ids, mask = batch("left")
    model = fused("qwen2")
    with remove_padding(model, prefix_sharing=True) as handle:
        output, grads = fused_numbers(model, ids, mask, torch.full_like(ids, -100))

    assert output.loss == 0
    assert not output.label_mask.any()
    assert not output.log_probs.any()
    assert all(not grad.any() for grad in grads.values())
    assert handle.stats.packed_tokens == DISTINCT


def test_the_fused_head_scores_batches_without_anything_to_remove():
    ids = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]])
    mask = torch.ones_like(ids)
    labels = answers(ids, mask, prompt=2)
    model = fused("qwen2")
    for given in (mask, None):
        expected = fused_numbers(model, ids, given, labels)
        with remove_padding(model, prefix_sharing=True):
            assert_same_fused_numbers(fused_numbers(model, ids, given, labels), expected)


def test_the_fused_head_works_with_lora_and_checkpointing():
    ids, mask = batch("mixed")
    labels = answers(ids, mask)
    base = fused("qwen2")
    model = lora(base)
    expected = fused_numbers(model, ids, mask, labels)
    checkpointed(model, reentrant=True)

    with remove_padding(model, prefix_sharing=True):
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)


def test_the_fused_head_may_be_added_after_attaching():
    ids, mask = batch("mixed")
    labels = answers(ids, mask)
    expected = fused_numbers(fused("qwen2"), ids, mask, labels)
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=True) as handle:
        add_fused_lm_head(model, temperature=0.9, outputs=FUSED)
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)
    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)


def test_the_fused_head_stays_when_padding_removal_goes():
    ids, mask = batch("mixed")
    labels = answers(ids, mask)
    model = fused("qwen2")
    forward = model.forward
    expected = fused_numbers(model, ids, mask, labels)

    with remove_padding(model) as handle:
        assert_equal_where_real(logits_of(model, ids, mask), logits_of(build("qwen2"), ids, mask), mask)
        with handle.disabled():
            assert torch.equal(fused_numbers(model, ids, mask, labels)[0].log_probs, expected[0].log_probs)

    assert model.forward is forward
    assert torch.equal(fused_numbers(model, ids, mask, labels)[0].log_probs, expected[0].log_probs)


def test_pre_shifted_labels_are_left_to_trl():
    ids, mask = batch("right")
    shifted = torch.nn.functional.pad(answers(ids, mask)[:, 1:], (0, 1), value=-100)
    model = fused("qwen2")
    with torch.no_grad():
        expected = model(ids, mask, shift_labels=shifted, fused_lm_head=True)
        with remove_padding(model):
            got = model(ids, mask, shift_labels=shifted, fused_lm_head=True)

    assert_close(got.log_probs, expected.log_probs, terms=64, depth=24)
