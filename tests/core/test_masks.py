"""The mask that a decoder asks for: described, kept within rows, or refused."""

from __future__ import annotations

import pytest
import torch
from kit.cells import by_turns
from kit.observe import CACHE
from kit.tolerance import assert_close
from transformers import AutoConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from zoo.families import build
from zoo.family_outcomes import (
    alone,
    batched,
    leaking_layouts,
)

from trl_padfix import remove_padding
from trl_padfix.core.attention.attention import register_packed_attention
from trl_padfix.core.model.masks import PackedMask
from trl_padfix.core.model.views import ConfigView


ONLY_IN_THE_MASK = ["qwen2_moe", "phimoe", "llama4_text, attn_temperature_tuning=False"]


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
    (
        create_chunked_causal_mask,
        {"attention_chunk_size": 3, "sliding_window": 3},
        PackedMask(chunk=3, custom=True),
    ),
    (create_bidirectional_mask, {}, PackedMask(causal=False)),
]


def test_a_mask_is_described():
    for create, config, expected in DESCRIBED:
        assert described(create, **config) == expected


@pytest.mark.parametrize(("family", "sharing"), by_turns(ONLY_IN_THE_MASK, [True, False]))
def test_windows_and_chunks_that_only_the_mask_knows_are_kept(family, sharing):
    model = build(family)
    expected = alone(model)[0]
    for side in ("left", "right"):
        with torch.no_grad(), leaking_layouts(), remove_padding(model, prefix_sharing=sharing):
            wrong = batched(model, side)
        with torch.no_grad(), remove_padding(model, prefix_sharing=sharing):
            assert_close(batched(model, side), expected, terms=64, depth=16, control=wrong)
