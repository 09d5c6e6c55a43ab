"""Positions of packed tokens for decoders that number their tokens themselves."""

from __future__ import annotations

import pytest
import torch
from kit.observe import each_row_alone
from kit.tolerance import assert_close, assert_gradients_close
from zoo.families import build
from zoo.model_numbers import gradients
from zoo.models import batch, real_logps
from zoo.models import build as tiny

from trl_padfix import check_parity, padding_free_layout, remove_padding
from trl_padfix.core.anatomy import find_decoder
from trl_padfix.core.model.positions import Numbering, packed_positions


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
IDS = torch.tensor([[9, 9, 5, 6], [5, 1, 7, 9]])  # 1 is RoBERTa's padding, and here a token like any other


def test_roberta_numbers_the_tokens_that_are_not_padding():
    numbers = Numbering.of(find_decoder(build("roberta")))
    numbers.embedding.padding_idx = 1
    layout = padding_free_layout(MASK)
    assert packed_positions(numbers, IDS, MASK, layout).tolist() == [2, 3, 2, 1, 3]
    assert packed_positions(numbers, None, MASK, layout).tolist() == [2, 3, 2, 3, 4]


@pytest.mark.parametrize(("family", "sharing"), [("roberta", True), ("bart", False), ("opt", True)])
def test_a_row_is_the_same_wherever_it_stands(family, sharing):
    model = build(family)
    with torch.no_grad(), remove_padding(model, prefix_sharing=sharing):
        packed = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert check_parity(model, {"input_ids": IDS, "attention_mask": MASK}, prefix_sharing=sharing).ok
    with torch.no_grad():
        for row, first, last in ((0, 2, 4), (1, 0, 3)):
            single = model(IDS[row : row + 1, first:last], use_cache=False).logits
            assert_close(packed[row, first:last], single[0], terms=64, depth=16)


@pytest.mark.parametrize("family", ["bert", "bart", "big_bird", "gpt2", "roformer"])
def test_a_packed_row_may_have_more_tokens_than_the_model_has_positions(family):
    model, ids = build(family), torch.randint(3, 60, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(30) < torch.tensor([[30], [20], [25], [9]])).long()
    alone = each_row_alone(lambda row, ones: real_logps(model(row, use_cache=False).logits, row, ones), ids, mask)
    with remove_padding(model) as handle:
        packed = real_logps(model(ids, attention_mask=mask, use_cache=False).logits, ids, mask)
    assert handle.stats.packed_tokens > model.config.max_position_embeddings
    assert_close(packed, alone, terms=64, depth=16, control=packed.roll(1))


def test_positions_that_go_on_give_other_numbers(monkeypatch):
    model = build("bart")
    with torch.no_grad(), remove_padding(model) as handle:
        packed = model(IDS, attention_mask=MASK, use_cache=False).logits
        for patch in handle._patches:
            if type(patch).__name__ == "PositionPatch":
                monkeypatch.setattr(patch, "packed", patch.wrapped)
        broken = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert (packed - broken)[MASK.bool()].abs().max() > 0.01


def test_where_the_mask_is_summed_up_a_hole_does_not_count(monkeypatch):
    model = build("opt")
    ids, mask = batch("holes")
    ids = ids.clamp(max=model.config.vocab_size - 1)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        with remove_padding(model, prefix_sharing=True) as handle:
            found = model(ids, attention_mask=mask).logits
            assert check_parity(model, {"input_ids": ids, "attention_mask": mask}).ok
    assert_close(found[mask.bool()], expected[mask.bool()], terms=64, depth=16)
    assert handle.stats.packed_tokens < mask.numel()
    monkeypatch.setattr("trl_padfix.core.model.positions._ranks", lambda layout: layout.positions)  # columns
    assert not check_parity(model, {"input_ids": ids, "attention_mask": mask}).ok


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 1.5, 2.0, 4.0],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize(
    ("kind", "sharing", "given"), [("dynamic", True, False), ("dynamic", False, True), ("longrope", True, True)]
)
def test_rope_that_depends_on_the_length_sees_the_padding(kind, sharing, given, monkeypatch):
    ids, mask = (torch.nn.functional.pad(x, (0, 10)) for x in batch("right"))  # 24 columns, rows of at most 14
    positions = {"position_ids": torch.arange(24).expand_as(ids)} if given else {}
    model = tiny("qwen2", rope_parameters=ROPES[kind], max_position_embeddings=16, head_dim=8).train()
    expected = model(ids, attention_mask=mask, use_cache=False, **positions).logits[mask.bool()]
    expected.square().mean().backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    with remove_padding(model, prefix_sharing=sharing) as handle:
        found = model(ids, attention_mask=mask, **positions).logits[mask.bool()]
        found.square().mean().backward()
    assert handle.stats.packed_tokens < mask.numel()
    assert_close(found.detach(), expected.detach(), terms=64, depth=24)
    assert_gradients_close(gradients(model), expected_gradients, terms=64, depth=48)
    monkeypatch.setattr("trl_padfix.core.anatomy.length_dependent_ropes", lambda decoder: {})  # of the packed row
    with torch.no_grad(), remove_padding(model):
        wrong = model(ids, attention_mask=mask, **positions).logits[mask.bool()]
    assert (wrong - expected).abs().max() > 0.01
