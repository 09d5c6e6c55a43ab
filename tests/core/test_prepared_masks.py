"""Masks in which tokens of an image see each other: parts of segments, and prefixes that part before an image."""

from __future__ import annotations

import pytest
import torch
from kit.observe import CACHE
from kit.tolerance import assert_close, assert_gradients_close
from transformers import AutoConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from zoo.family_outcomes import gradients_of, weighted
from zoo.vision_families import build_vision, collate
from zoo.vision_outcomes import ROWS, alone, logps

import trl_padfix.core.call.arguments
from trl_padfix import PaddingRemovalError, check_parity, remove_padding
from trl_padfix.core.attention.attention import register_packed_attention
from trl_padfix.core.call.prepared_masks import PreparedMasks, with_added_masks
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.core.model.positions import PackedMask
from trl_padfix.core.model.views import ConfigView


def mask_of(blocks: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Causal, and tokens of one block (0 is none) see each other."""
    causal = torch.ones(blocks.shape[1], blocks.shape[1], dtype=torch.bool).tril()
    same = (blocks[:, :, None] == blocks[:, None]) & (blocks[:, :, None] > 0)
    return ((causal | same) & real[:, None].bool())[:, None]


def test_prefixes_part_before_a_block_in_which_rows_differ():
    ids = torch.tensor([[5, 6, 9, 9, 7, 0], [5, 6, 9, 9, 7, 8], [0, 5, 6, 9, 9, 4]])
    real = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    blocks = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]])
    masks = PreparedMasks.of(mask_of(blocks, real))
    keys = masks.keys(real, [ids])
    layout = prefix_sharing_layout(ids, real, keys)
    # The first and the third row agree up to their block's end, the second one's block is longer.
    assert sorted(zip(layout.queries.lengths, layout.keys.lengths, strict=True)) == [(1, 5), (3, 5), (6, 6)]
    lengths = layout.queries.lengths, layout.keys.lengths
    for part, queries, keys in zip(masks.of_segments(None, layout), *lengths, strict=True):
        assert part.shape == (1, 1, queries, keys)
    assert masks.of_segments(None, layout)[layout.queries.lengths.index(1)].all()
    assert prefix_sharing_layout(ids, real).packed_tokens < layout.packed_tokens


@pytest.mark.parametrize(("column", "packed"), [(2, 8), (0, 6)])
def test_a_block_goes_on_to_the_last_token_that_one_of_its_tokens_sees(column, packed):
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 8]])
    real, sees = torch.ones_like(ids), torch.ones(4, 4, dtype=torch.bool).tril()
    sees[0, column] = True  # the token after it sees no later one
    keys = PreparedMasks.of(sees.expand(2, 1, 4, 4)).keys(real, [ids])
    assert prefix_sharing_layout(ids, real, keys).packed_tokens == packed


def test_masks_that_are_added_are_read_as_those_that_are_not():
    real = torch.ones(1, 4, dtype=torch.int64)
    mask = mask_of(torch.tensor([[0, 1, 1, 0]]), real)
    added = with_added_masks({"full": mask, "none": None}, torch.float32)
    assert added["none"] is None
    assert added["full"].unique().tolist() == [torch.finfo(torch.float32).min, 0]
    layout = prefix_sharing_layout(real, real)
    assert torch.equal(PreparedMasks.of(added).of_segments("full", layout)[0], mask)


@pytest.mark.parametrize(("implementation", "sharing"), [("sdpa", False), ("eager", True)])
def test_tokens_of_an_image_see_each_other(implementation, sharing, monkeypatch):
    vision = build_vision("gemma3", implementation)
    expected = alone(vision, ROWS)
    with remove_padding(vision.model, prefix_sharing=sharing) as handle:
        for side in ("left", "right"):
            batch = collate(vision, ROWS, side)
            scores = logps(vision.model, batch)
            gradients = gradients_of(vision.model, weighted(scores))
            assert_close(scores.detach(), expected[0], terms=64, depth=24)
            assert_gradients_close(gradients, expected[1], terms=64, depth=48)
        assert handle.stats.packed_tokens == 2 * (batch.distinct if sharing else batch.mask.sum())
        assert check_parity(vision.model, batch.call()).ok
        monkeypatch.setattr(
            trl_padfix.core.call.arguments,
            "plain_mask",
            lambda call, *_: (call | {"attention_mask": batch.mask}, None),
        )
        assert (logps(vision.model, batch) - expected[0]).abs().max() > 0.01  # attended causally


def test_parity_in_half_precision_compares_with_masks_for_the_other_attention():
    vision = build_vision("gemma3")
    report = check_parity(vision.model.bfloat16(), collate(vision, ROWS).call())
    assert report.ok
    assert report.rounding < 0.1


def test_an_attention_that_knows_no_such_mask_is_refused(monkeypatch):
    vision = build_vision("gemma3")
    monkeypatch.setattr("trl_padfix.core.attention.attention.takes_segments", lambda name: True)
    with remove_padding(vision.model), pytest.raises(PaddingRemovalError, match=r"prepared mask.*'sdpa'"):
        vision.model(**collate(vision, ROWS).call())


# -- the mask that a decoder asks for is described


def described(create, **config):
    """What `create` makes for a model of six packed tokens with this config."""
    config = AutoConfig.for_model("llama", **config)
    config._attn_implementation_internal = "sdpa"
    states, positions = torch.zeros(1, 6, 4), torch.tensor([[0, 1, 2, 0, 1, 2]])
    given = {"position_ids": positions} if create is not create_bidirectional_mask else {}
    register_packed_attention()
    return create(ConfigView(config), states, attention_mask=None, **{CACHE: None}, **given)


DESCRIBED = [
    (create_causal_mask, {}, PackedMask()),
    (create_sliding_window_causal_mask, {"sliding_window": 3}, PackedMask(window=3)),
    (create_sliding_window_causal_mask, {"sliding_window": 0}, PackedMask(window=0, custom=True)),
    (create_chunked_causal_mask, {"attention_chunk_size": 3}, PackedMask(chunk=3)),
    (create_chunked_causal_mask, {"attention_chunk_size": 3, "sliding_window": 3}, PackedMask(chunk=3, custom=True)),
    (create_bidirectional_mask, {}, PackedMask(causal=False)),
]


def test_a_mask_is_described():
    for create, config, expected in DESCRIBED:
        assert described(create, **config) == expected
