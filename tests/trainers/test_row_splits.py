"""A batch that is split by what it holds: the images of each row, the columns that parts need, values without rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trl
from hypothesis import given
from hypothesis import strategies as st
from kit.budget_runs import FREE, IMAGE_BUDGETS, assert_same, figures_of, make, make_on_images, train_split
from kit.cells import slow_but
from kit.observe import entered_tokens

import trl_padfix
from trl_padfix.trainers.batching.bin_packing import RowSplitter
from trl_padfix.trainers.data.batch_rows import find_images, scored_tokens


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {"image_token_id": 7}


def row(*parts: int) -> list[int]:
    """Tokens of text, and runs of image tokens of these lengths between them."""
    return [3, *(token for part in parts for token in [*[7] * part, 4])]


def batch_of(rows: list[list[int]], **more: Any) -> dict[str, Any]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()} | more


@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=5))
def test_images_are_found_by_their_grid_whether_they_touch_or_not(grids):
    """Images of `4 * size` patches, of which four are a token, one directly behind the other."""
    images = [size for of_row in grids for size in of_row]
    batch = batch_of([row(sum(of_row)) if of_row else row() for of_row in grids])
    batch["pixel_values"] = torch.zeros(4 * sum(images), 5)
    batch["image_grid_thw"] = torch.tensor([[1, 2, 2 * size] for size in images]).view(-1, 3)
    found = find_images(batch, batch["input_ids"], Config())
    if images:
        assert found == {"num_images": [len(of_row) for of_row in grids]}
    else:
        assert found is None or not any(found["num_images"])


def test_images_of_one_size_or_apart_from_one_another_are_found():
    pixels = torch.zeros(3, 3, 8, 8)
    alike = batch_of([row(4, 4), row(), row(4)], pixel_values=pixels)
    assert find_images(alike, alike["input_ids"], Config()) == {"num_images": [2, 0, 1]}
    apart = batch_of([row(4, 6), row(), row(5)], pixel_values=pixels)
    assert find_images(apart, apart["input_ids"], Config()) == {"num_images": [2, 0, 1]}
    touching = batch_of([row(10), row(), row(5, 2)], pixel_values=pixels)  # three runs, but is the first one image?
    assert find_images(touching | {"pixel_values": torch.zeros(4, 3, 8, 8)}, touching["input_ids"], Config()) is None
    assert find_images(batch_of([row()]), torch.zeros(1, 1), Config()) is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_columns_of_padding_are_left_out_and_those_that_are_scored_are_not(side):
    ids = torch.zeros(2, 9, dtype=torch.int64)
    places = slice(3, None) if side == "left" else slice(0, 6)
    ids[0, places], ids[1] = 5, 6
    mask = (ids > 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def widths(batch):
        parts = RowSplitter(9, sharing=False).split(ids, mask, scored=scored_tokens(batch))
        return sorted(part["labels"].shape[1] for part in parts.of(batch))

    # On the left one column of padding stays: it predicts the first token, if that has a label.
    assert widths(batch) == [7 if side == "left" else 6, 9]
    scored_padding = labels.clone()
    scored_padding[0, 1 if side == "left" else -1] = 5
    assert widths(batch | {"labels": scored_padding}) == [9, 9]
    assert scored_tokens(batch | {"KL_input_ids": ids}) is None


class Weighted:
    """A collator whose batches have a value for each column, which the loss must not lose."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = dict(self.collator(examples))
        return batch | {"cache_position": torch.arange(batch["input_ids"].shape[1])}


def test_a_batch_with_values_without_rows_is_not_cut(tmp_path):
    runs = []
    for library in (trl, trl_padfix):
        trainer = make(library, "SFT", tmp_path, budget=library is trl_padfix)
        trainer.data_collator = Weighted(trainer.data_collator)
        runs.append(train_split(trainer))
    assert_same(runs[1].figures, runs[0].figures)
    assert not runs[1].chunks
    assert max(runs[1].forwards) <= trainer.args.max_tokens_per_batch


CELLS = [
    ("DPO", "llava"),
    ("SFT", "llava"),
    ("SFT", "idefics3"),
    ("DPO", "gemma3"),
]  # not LLaVA-NeXT, whose tiles have no rows


@pytest.mark.parametrize(("kind", "family"), slow_but([("DPO", "llava"), ("SFT", "idefics3")], CELLS))
def test_batches_with_images_run_in_chunks_with_trls_numbers(kind, family, tmp_path, monkeypatch):
    budget = FREE | IMAGE_BUDGETS[kind]
    theirs = figures_of(make_on_images(trl, kind, family, tmp_path))
    trainer = make_on_images(trl_padfix, kind, family, tmp_path, **budget)
    with entered_tokens(trainer.model.get_decoder()) as entered:
        ours = train_split(trainer)
    assert_same(ours.figures, theirs)
    assert min(ours.chunks) > 1
    assert max(entered) <= budget["max_tokens_per_batch"]
    monkeypatch.setattr(
        "trl_padfix.trainers.batching.token_budget.find_images",
        lambda *args: {"num_images": find_images(*args)["num_images"][::-1]},
    )
    with pytest.raises((AssertionError, ValueError, RuntimeError)):  # images of other rows
        assert_same(figures_of(make_on_images(trl_padfix, kind, family, tmp_path, **budget)), theirs, factor=10)
