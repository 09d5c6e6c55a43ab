"""TRL's fused LM head on a packed decoder: the same figures, from the labels alone."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
import transformers
from kit.cells import by_turns
from kit.tolerance import assert_close
from trl.trainer.utils import _ChunkedLogProbFunction, add_fused_lm_head
from zoo.model_numbers import DISTINCT, assert_same_gradients, gradients, weighted_sum
from zoo.models import batch, build

from trl_padfix import remove_padding
from trl_padfix.core.patches import heads


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
def test_the_fused_head_scores_the_labels_and_nothing_else(name, side, items, sharing, monkeypatch):
    ids, mask = batch(side)
    labels = answers(ids, mask)
    kwargs = {} if items is None else {"num_items_in_batch": items}
    model = fused(name)
    expected = fused_numbers(model, ids, mask, labels, **kwargs)
    scored, forward = [], _ChunkedLogProbFunction.forward
    watched = lambda ctx, hidden, *args: (scored.append(len(hidden)), forward(ctx, hidden, *args))[1]  # noqa: E731
    monkeypatch.setattr(_ChunkedLogProbFunction, "forward", staticmethod(watched))

    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels, **kwargs), expected)

    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert scored == [(labels != -100).sum().item()]


def scale_columns(output: Any) -> Any:
    """The output of a decoder, its states scaled by their column."""
    states = output.last_hidden_state
    output["last_hidden_state"] = states * torch.linspace(0.5, 1.5, states.shape[1])[None, :, None]
    return output


def hook_decoder(decoder: torch.nn.Module) -> None:
    decoder.register_forward_hook(lambda module, args, output: scale_columns(output))


def wrap_decoder(decoder: torch.nn.Module) -> None:
    forward = decoder.forward
    decoder.forward = wraps(forward)(lambda *args, **kwargs: scale_columns(forward(*args, **kwargs)))


@pytest.mark.parametrize("change", [hook_decoder, wrap_decoder])
@pytest.mark.parametrize("sharing", [False, True])
def test_code_of_a_user_behind_the_decoder_gets_the_padded_batch(change, sharing, monkeypatch):
    ids, mask = batch("right")
    labels = answers(ids, mask)
    model = fused("qwen2")
    with remove_padding(model, prefix_sharing=sharing) as handle:
        change(model.model)
        got = fused_numbers(model, ids, mask, labels)
        assert (handle.stats.padded_forwards, handle.stats.forwards) == (0, 1)
        with handle.disabled():
            expected = fused_numbers(model, ids, mask, labels)
        assert_same_fused_numbers(got, expected)
        monkeypatch.setattr(heads, "has_reader", lambda module: False)
        wrong = fused_numbers(model, ids, mask, labels)
    with pytest.raises(AssertionError):
        assert_same_fused_numbers(wrong, expected)


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
