"""`packed_multiple_of`: packed rows of few lengths, with the numbers of rows of any length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.cells import MATRIX, by_turns
from kit.observe import entered_tokens
from kit.tolerance import assert_close, assert_gradients_close
from zoo.families import build as build_family
from zoo.family_outcomes import alone, batched, gradients_of, stable_topk, weighted
from zoo.model_numbers import merge_segments, numbers, padded_numbers
from zoo.models import COLUMNS, ROWS, batch, build, drawn_batches

from trl_padfix import (
    PaddingRemovalError,
    pack,
    padding_free_layout,
    prefix_sharing_layout,
    remove_padding,
    unpack,
)
from trl_padfix.core.layout.layout import Layout


@given(drawn_batches(), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_filler_is_behind_the_row_and_in_no_output(drawn, multiple, sharing):
    ids, mask = drawn
    layout = prefix_sharing_layout(ids, mask) if sharing else padding_free_layout(mask)
    filled = layout.filled(multiple)
    T = layout.packed_tokens
    assert filled.packed_tokens == len(filled.positions) == sum(filled.queries.lengths) >= T
    assert filled.packed_tokens % multiple == 0
    assert filled.packed_tokens - T == filled.filler < multiple
    assert (filled.computed_tokens, filled.real_tokens) == (T, layout.real_tokens)
    visible = filled.dense_mask()
    assert torch.equal(visible[:T, :T], layout.dense_mask())
    assert not visible[:T, T:].any()
    assert not visible[T:, :T].any()
    assert visible.diagonal().all()  # a query without a key would be NaN
    # Each token of the filler has the position of the real token that it repeats.
    assert torch.equal(filled.positions, pack(unpack(layout.positions[None], layout), filled)[0])
    assert torch.equal(unpack(pack(ids, filled), filled) * mask, ids * mask)
    assert layout.filled(multiple) is filled  # built once for all forwards of a batch


def test_filler_in_a_segment_with_the_rows_gives_other_numbers(monkeypatch):
    """The control: one segment of all rows and the filler."""
    model, (ids, mask) = build("qwen2"), batch("left")
    want = padded_numbers("qwen2", model, ids, mask)
    with_filler = Layout._with_filler
    monkeypatch.setattr(Layout, "_with_filler", lambda layout, filler: merge_segments(with_filler(layout, filler)))
    with remove_padding(model, packed_multiple_of=16):
        got = numbers(model, ids, mask)
    assert (got[0] - want[0]).abs().max() > 1e-2


def test_experts_are_balanced_over_the_tokens_of_the_batch():
    model = build("qwen3_moe").train()
    ids, mask = batch("right")

    def balance(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).aux_loss.detach()

    want = balance(ids, mask)
    with remove_padding(model, packed_multiple_of=64) as handle:
        assert_close(balance(ids, mask), want, terms=int(mask.sum()), depth=4)
        # The control: the tokens of the filler, as a row of the batch, move the balance.
        again = torch.cat([ids, ids[3:4]]), torch.cat([mask, mask[3:4]])
        assert abs(balance(*again) - want) > 1e-4
    assert handle.stats.filler_tokens > 0


# Linear attention, state-space scans (with gradients of states and without), convolutions; rows with ALiBi and an
# indexer; layers that do not hand keyword arguments down.
FAMILIES = ["qwen3_5_text", "mamba2", "lfm2", "bloom"]
OTHERS = ["zamba2", "glm_moe_dsa"]


@pytest.mark.parametrize(
    ("family", "sharing"),
    [*by_turns(FAMILIES, [True, False]), *(pytest.param(f, True, marks=MATRIX) for f in OTHERS)],
)
def test_filler_touches_no_state_of_a_row(family, sharing):
    with stable_topk():
        logps, gradients = alone(build_family(family))
        with remove_padding(model := build_family(family), prefix_sharing=sharing, packed_multiple_of=32) as handle:
            got = batched(model, "left")
            assert_close(got.detach(), logps, terms=64, depth=24)
            assert_gradients_close(gradients_of(model, weighted(got)), gradients, terms=64, depth=48)
        assert 0 < handle.stats.filler_tokens < 32


def test_rows_have_the_smallest_of_several_lengths():
    """Beyond the largest, a multiple of that; with the numbers of rows of any length."""
    lengths, model, plain = [16, 64], build("qwen2"), build("qwen2")
    with remove_padding(model, packed_multiple_of=lengths), entered_tokens(model) as entered:
        for rows in (1, 2, 12):
            ids = torch.tensor([[n, *ROWS[3][1:]] for n in range(1, rows + 1)])
            got = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            want = plain(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            assert_close(got, want, terms=64, depth=24)
    assert entered == [16, 64, -(-12 * COLUMNS // 64) * 64]


def test_other_values_are_errors():
    for value in (0, -64, 64.0, True, "64", [], [64, 0], [128, 64], [64, 64], [64, "128"]):
        with pytest.raises(ValueError, match=r"`packed_multiple_of` is a number of tokens.* lengths in ascending"):
            remove_padding(build("qwen2"), packed_multiple_of=value)


def test_a_decoder_of_whole_rows_is_refused():
    with pytest.raises(PaddingRemovalError, match="there is no packed row whose length could be a multiple"):
        remove_padding(build_family("cpmant"), packed_multiple_of=64)


def test_sharing_where_possible_warns_for_a_decoder_of_whole_rows(caplog):
    with remove_padding(build_family("cpmant"), prefix_sharing="auto") as handle:
        assert handle.prefix_sharing is False
    assert caplog.text.count("prefix_sharing='auto': nothing is shared, since CpmAntModel") == 1
    caplog.clear()
    with remove_padding(build("qwen2"), prefix_sharing="auto"):
        assert not caplog.text
