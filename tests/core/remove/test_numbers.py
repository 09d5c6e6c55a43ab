"""`remove_padding`: the numbers of the padded computation from the real, distinct tokens alone, and nothing else."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import pytest
import torch
from kit.cells import by_turns
from kit.observe import EnteredTokens
from kit.tolerance import assert_close, tolerance
from zoo.model_numbers import (
    DISTINCT,
    REAL,
    SHARING,
    SIDES,
    alone,
    assert_equal_where_real,
    assert_same_numbers,
    checkpointed,
    merge_segments,
    numbers,
    padded_numbers,
)
from zoo.models import SUPPORTED, batch, build, drawn_batches

import trl_padfix.core.call.layout_of
from trl_padfix import padding_free_layout, prefix_sharing_layout, remove_padding


# -- the same numbers


CHECKPOINTING = [None, "reentrant", "non-reentrant"]


@pytest.mark.parametrize(
    ("name", "implementation", "sharing", "side", "checkpointing"),
    by_turns(SUPPORTED, [True, False], SIDES, CHECKPOINTING),
)
def test_every_row_has_the_numbers_that_it_has_alone(name, implementation, sharing, side, checkpointing):
    # FlashAttention counts the tokens of a window, other implementations its columns, hidden ones too.
    ids, mask = batch("both" if side == "holes" and implementation == "flash_attention_2" else side)
    model = build(name, implementation)
    expected = alone(model, ids, mask)
    if checkpointing:
        checkpointed(model, reentrant=checkpointing == "reentrant")
    # Its layers themselves are wrapped by checkpointing.
    norm = next(m for n, m in model.named_modules() if n.endswith(("layers.0.input_layernorm", "h.0.ln_1")))
    entered = EnteredTokens(norm)

    with remove_padding(model, prefix_sharing=sharing) as handle:
        entered.clear()  # what was asked of the model when it was attached
        got = numbers(model, ids, mask)

    assert_same_numbers(got, expected)
    times = 2 if checkpointing else 1
    assert entered == [handle.stats.packed_tokens] * times  # that mode, and that checkpointing, did run
    assert handle.stats.packed_tokens < handle.stats.padded_tokens


tiny = functools.cache(build)


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(sharing=hypothesis.strategies.booleans(), given=drawn_batches())
def test_any_batch_gives_the_same_numbers(name, sharing, given):
    ids, mask = given
    hypothesis.assume((mask[:, 1:] * mask[:, :-1]).any())  # else there is nothing to score
    model = tiny(name)
    expected, gradient = padded_numbers(name, model, ids, mask)
    with remove_padding(model, prefix_sharing=sharing):
        got, packed_gradient = numbers(model, ids, mask)

    assert_close(got, expected, terms=64, depth=24)
    # Of all parameters at once: in rows of two tokens some gradients are zero but for rounding.
    one, other = (torch.cat([g.flatten() for g in each.values()]) for each in (packed_gradient, gradient))
    assert (one - other).norm() <= tolerance(float(other.norm()), terms=64, depth=48)


def keep_counting_positions(layout):
    """Positions do not start at 0 in each row."""
    return dataclasses.replace(layout, positions=torch.arange(layout.packed_tokens))


def share_one_token_too_many(ids, mask):
    """20 is taken for 11: that is where the answers to the first prompt part."""
    return prefix_sharing_layout(ids.masked_fill(ids == 20, 11), mask)


WRONG_LAYOUTS = {
    "rows leak": (False, lambda ids, mask: merge_segments(padding_free_layout(mask))),
    "shared rows leak": (True, lambda ids, mask: merge_segments(prefix_sharing_layout(ids, mask))),
    "positions go on": (True, lambda ids, mask: keep_counting_positions(prefix_sharing_layout(ids, mask))),
    "a token too many is shared": (True, share_one_token_too_many),
}


@pytest.mark.parametrize(("name", "implementation", "wrong"), by_turns(SUPPORTED[::4], list(WRONG_LAYOUTS)))
def test_a_wrong_layout_gives_other_numbers(name, implementation, wrong, monkeypatch):
    ids, mask = batch("mixed")
    model = build(name, implementation)
    expected = padded_numbers(name, model, ids, mask)
    sharing, layout = WRONG_LAYOUTS[wrong]
    monkeypatch.setattr(trl_padfix.core.call.layout_of, "padding_free_layout", lambda mask: layout(ids, mask))
    monkeypatch.setattr(
        trl_padfix.core.call.layout_of, "prefix_sharing_layout", lambda ids, mask, positions: layout(ids, mask)
    )

    with remove_padding(model, prefix_sharing=sharing):
        got = numbers(model, ids, mask)

    with pytest.raises(AssertionError):
        assert_same_numbers(got, expected)
    assert (got[0] - expected[0]).abs().max() > 0.01


# -- real tokens only


@SHARING
def test_the_head_scores_packed_tokens_only(sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = model(input_ids=ids, attention_mask=mask).logits
    project, scored = model.lm_head.forward, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        scored.append(hidden.shape[:2])
        return project(hidden)

    model.lm_head.forward = counted
    with remove_padding(model, prefix_sharing=sharing):
        logits = model(input_ids=ids, attention_mask=mask).logits
        model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)  # by hand: what it is given
    model(input_ids=ids, attention_mask=mask)

    assert scored == [(1, DISTINCT if sharing else REAL), ids.shape, ids.shape]
    assert_equal_where_real(logits, expected, mask)
    assert not logits[~mask.bool()].any()
