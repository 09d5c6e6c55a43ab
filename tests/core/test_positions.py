"""Positions of packed tokens for decoders that number their tokens themselves."""

from __future__ import annotations

import pytest
import torch
from kit.families import build
from kit.family_outcomes import TOLERANCE

from trl_padfix import padding_free_layout, remove_padding
from trl_padfix.core.find import find_decoder
from trl_padfix.core.positions import Numbering, packed_positions, position_embeddings


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
IDS = torch.tensor([[9, 9, 5, 6], [5, 1, 7, 9]])  # 1 is RoBERTa's padding, and here a token like any other


def test_rows_are_numbered_from_their_first_token():
    assert packed_positions(Numbering(), {}, padding_free_layout(MASK)).tolist() == [0, 1, 0, 1, 2]


def test_roberta_numbers_the_tokens_that_are_not_padding():
    numbers = Numbering.of(find_decoder(build("roberta")))
    numbers.by_ids.padding_idx = 1
    layout = padding_free_layout(MASK)
    assert packed_positions(numbers, {"input_ids": IDS, "attention_mask": MASK}, layout).tolist() == [2, 3, 2, 1, 3]
    assert packed_positions(numbers, {"attention_mask": MASK}, layout).tolist() == [2, 3, 2, 3, 4]


@pytest.mark.parametrize(("family", "tables"), [("bart", 1), ("marian", 1), ("gpt2", 0), ("llama", 0), ("roberta", 0)])
def test_only_tables_that_the_decoder_numbers_for_are_found(family, tables):
    assert len(position_embeddings(find_decoder(build(family)))) == tables


@pytest.mark.parametrize("family", ["roberta", "bart", "opt"])
@pytest.mark.parametrize("sharing", [False, True])
def test_a_row_is_the_same_wherever_it_stands(family, sharing):
    model = build(family)
    with torch.no_grad(), remove_padding(model, prefix_sharing=sharing):
        packed = model(IDS, attention_mask=MASK, use_cache=False).logits
    with torch.no_grad():
        for row, first, last in ((0, 2, 4), (1, 0, 3)):
            single = model(IDS[row : row + 1, first:last], use_cache=False).logits
            assert (packed[row, first:last] - single[0]).abs().max() < TOLERANCE


def test_a_model_that_calls_its_head_decoder_is_found():
    model = build("modernbert-decoder")
    assert find_decoder(model) is model.model


def test_positions_that_go_on_give_other_numbers(monkeypatch):
    model = build("bart")
    with torch.no_grad(), remove_padding(model) as handle:
        packed = model(IDS, attention_mask=MASK, use_cache=False).logits
        for patch in handle._patches:
            if type(patch).__name__ == "PositionPatch":
                monkeypatch.setattr(patch, "packed", patch.wrapped)
        broken = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert (packed - broken)[MASK.bool()].abs().max() > 0.01
