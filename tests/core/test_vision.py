"""Vision-language models: the text decoder packed, on either side, with the numbers of each row computed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from kit.cells import by_turns
from kit.observe import EnteredTokens
from kit.tolerance import assert_close, rounding, tolerance
from kit.trainer_runs import BROKEN
from simulated_gpu.simulated_cuda import to_simulated
from torch import nn
from zoo.family_outcomes import gradients_of, weighted
from zoo.vision_families import Row, VisionModel, build_vision, collate
from zoo.vision_outcomes import ROWS, TEXT, alone, logps

import trl_padfix.core.patches.plan
from trl_padfix import ParityError, check_parity, remove_padding
from trl_padfix.core.anatomy import Anatomy
from trl_padfix.core.call.calls import ModelCall
from trl_padfix.core.context import within
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.core.patches.towers import TowerPatch


EXACT = ["qwen2_5_vl", "qwen3_vl", "llava", "internvl", "smolvlm"]


def assert_same(found: tuple[torch.Tensor, dict], expected: tuple[torch.Tensor, dict]) -> None:
    """Log-probabilities, and the gradients of towers and of the rest, each against its own size."""
    assert_close(found[0].detach(), expected[0], terms=64, depth=24)
    assert found[1].keys() == expected[1].keys()
    assert any("vis" in name for name in expected[1])
    for tower in (True, False):
        names = [name for name in expected[1] if ("vis" in name) == tower]
        ours, theirs = (torch.cat([g[1][name].flatten() for name in names]) for g in (found, expected))
        assert (ours - theirs).norm() <= tolerance(float(theirs.norm()), terms=64, depth=48)


@contextmanager
def wrong_layouts(sharing: bool) -> Iterator[None]:
    """Rows that see each other, or tokens that are taken for every other one at their place."""
    name, broken = BROKEN["prefix sharing" if sharing else "padding-free"]
    with mock.patch(f"trl_padfix.core.call.layout_of.{name}", lambda *args: broken(*args[:2])):
        yield


def numbers(vision: VisionModel, rows: list[Row], side: str, **kwargs: Any) -> tuple[torch.Tensor, dict]:
    scores = logps(vision.model, collate(vision, rows, side), **kwargs)
    return scores, gradients_of(vision.model, weighted(scores))


def difference(vision: VisionModel, rows: list[Row], side: str, expected: torch.Tensor) -> float:
    with torch.no_grad():
        return (logps(vision.model, collate(vision, rows, side)) - expected).abs().max().item()


@pytest.mark.parametrize(("family", "sharing", "side"), by_turns(EXACT, [False, True], ["left", "right"]))
def test_rows_with_images_are_what_they_are_alone(family, side, sharing):
    vision = build_vision(family)
    expected = alone(vision, ROWS)
    batch = collate(vision, ROWS, side)
    with remove_padding(vision.model, prefix_sharing=sharing) as handle:
        assert_same(numbers(vision, ROWS, side), expected)
        assert handle.stats.packed_tokens == (batch.distinct if sharing else batch.mask.sum())
        with wrong_layouts(sharing):
            assert difference(vision, ROWS, side, expected[0]) > 0.01
    assert not any("forward" in vars(module) for module in vision.model.modules())


@pytest.mark.parametrize(("family", "sharing"), [("qwen2_5_vl", False), ("gemma3", True)])
def test_batches_of_text_alone_are_packed_too(family, sharing):
    vision = build_vision(family)
    expected = alone(vision, TEXT)[0]
    with remove_padding(vision.model, prefix_sharing=sharing) as handle:
        for side in ("left", "right"):
            assert difference(vision, TEXT, side, expected) < rounding(expected)
        assert handle.stats.packed_tokens == 2 * (15 if sharing else 17)


# -- positions in rows, deep-stack features


def test_four_rows_of_positions_are_packed():
    vision = build_vision("qwen3_vl")
    batch = collate(vision, ROWS, "left")
    rope, _ = vision.model.model.get_rope_index(
        batch.ids, batch.inputs["mm_token_type_ids"], batch.inputs["image_grid_thw"], attention_mask=batch.mask
    )
    text = (batch.mask.cumsum(1) - 1).clamp(min=0)
    four = torch.cat([text[None], rope])
    with torch.no_grad():
        expected = logps(vision.model, batch, position_ids=four, use_cache=False)
        for sharing in (False, True):
            with remove_padding(vision.model, prefix_sharing=sharing) as handle:
                found = logps(vision.model, batch, position_ids=four)
                assert_close(found, expected, terms=64, depth=24)
            assert handle.stats.packed_tokens == (batch.distinct if sharing else batch.mask.sum())


def test_positions_of_another_row_are_found_wrong(monkeypatch):
    vision = build_vision("qwen2_5_vl")
    expected = alone(vision, ROWS)[0]
    pack = trl_padfix.core.call.arguments.pack_arguments
    monkeypatch.setattr(
        trl_padfix.core.patches.plan,
        "pack_arguments",
        lambda inputs, *args: pack(replace(inputs, positions=inputs.positions.roll(1, dims=1)), *args),
    )
    with remove_padding(vision.model):
        assert difference(vision, ROWS, "right", expected) > 0.01
        with pytest.raises(ParityError):
            check_parity(vision.model, collate(vision, ROWS).call()).raise_if_failed()


@pytest.mark.parametrize(("family", "other"), [("qwen3_vl", -7), ("llava", -4)])
def test_an_image_is_part_of_what_a_prefix_is(family, other, monkeypatch):
    vision = build_vision(family)
    # The `other` image has the size of the first one, so that ids and positions are the same.
    rows = [Row((3, -1, 4, 5)), Row((3, other, 4, 6)), Row((3, -1, 4, 7, 8))]
    batch = collate(vision, rows)
    expected = alone(vision, rows)[0]
    with remove_padding(vision.model, prefix_sharing=True) as handle:
        assert difference(vision, rows, "right", expected) < rounding(expected)
        assert batch.distinct <= handle.stats.packed_tokens < batch.mask.sum()
        monkeypatch.setattr("trl_padfix.core.call.layout_of.token_keys", lambda call, shape: [])  # ids alone
        assert difference(vision, rows, "right", expected) > 0.01


def test_tokens_whose_embeddings_are_equal_by_chance_stay_apart():
    vision = build_vision("llava")
    with torch.no_grad():
        table = vision.model.get_input_embeddings().weight
        table[31] = table[30]  # as those of new tokens are that begin as the mean of all
    rows = [Row((3, 30, -1, 5)), Row((3, 31, -1, 6, 7))]
    expected = alone(vision, rows)
    with remove_padding(vision.model, prefix_sharing=True):
        assert_same(numbers(vision, rows, "right"), expected)


def test_images_with_equal_features_have_gradients_of_their_own():
    """A projector that begins with zeros gives all images one feature."""
    vision = build_vision("llava")
    nn.init.zeros_(vision.model.model.multi_modal_projector.linear_2.weight)
    rows = [Row((3, -1, 4, 5)), Row((3, -4, 4, 6)), Row((3, -7, 4, 7, 8))]
    expected = alone(vision, rows)
    with remove_padding(vision.model, prefix_sharing=True):
        assert_same(numbers(vision, rows, "right"), expected)


# -- the tower


@contextmanager
def counted_patches(vision: VisionModel) -> Iterator[list[int]]:
    """Patches that entered the layers of the tower, call by call."""
    tower = next(m for name, m in vision.model.model.named_children() if "vis" in name)
    layers = next(m for m in tower.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    with EnteredTokens(layers[0]) as counts:
        yield counts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_a_tower_runs_once_for_chosen_and_rejected(family):
    vision = build_vision(family)
    expected = alone(vision, ROWS)
    with counted_patches(vision) as patches:
        logps(vision.model, collate(vision, ROWS))
        with remove_padding(vision.model):
            check_parity(vision.model, collate(vision, ROWS).call())  # tries whether halves may be computed once
            del patches[1:]
            found = numbers(vision, ROWS, "right")
        assert_same(found, expected)
        assert patches[1] * 2 == patches[0]
        assert len(patches) == 2


def test_a_tower_with_dropout_draws_for_every_image():
    vision = build_vision("llava")
    for module in vision.model.model.vision_tower.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.5
    batch = collate(vision, ROWS)
    with counted_patches(vision) as patches, remove_padding(vision.model):
        for training in (True, True, False, False):
            vision.model.train(training)
            logps(vision.model, batch)
    whole, half = 8 * 17, 4 * 17
    assert patches == [whole, whole, half, whole, half]  # in evaluation first tried, then relied on


# -- towers that run once for a batch that repeats its images


class Tower(nn.Module):
    """Counts the images that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 2)
        self.images: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images.append(len(images))
        return self.project(images)


class Model:
    """A tower with its patch, called within a call of its model."""

    def __init__(self) -> None:
        self.tower = Tower()
        self.decoder = nn.Linear(1, 1)
        self.patch = TowerPatch(self.tower, PaddingRemoval(Anatomy(self.decoder, self.decoder)))
        self.patch.put_on()

    def call(self, *images: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad(), within(model=ModelCall(self.decoder)):
            return [self.patch.packed(x) for x in images]


def pairs(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 5, 3).repeat(2, 1, 1)


def test_the_device_compares_the_halves_in_one_wait(gpu):
    model = Model()
    model.call(pairs())
    to_simulated(model.tower)
    images = pairs()
    carried = to_simulated(images)
    gpu.reset()
    (found,) = model.call(carried)
    assert gpu.synchronisations.total() == 1
    assert model.tower.images == [2, 4, 2]
    expected = nn.functional.linear(images, model.tower.project.weight.held, model.tower.project.bias.held)
    torch.testing.assert_close(found.cpu(), expected)


def test_halves_that_differ_are_computed_both():
    model, partly = Model(), pairs()
    partly[0] += 1.0  # one of two images
    others = [pairs(), torch.randn(4, 5, 3), partly, pairs(4), torch.randn(3, 5, 3), torch.randn(2, 4, 5, 3)]
    for images, found in zip(others, model.call(*others), strict=True):
        torch.testing.assert_close(found, model.tower.project(images).detach())
    assert model.tower.images == [2, 4, 4, 4, 4, 3, 2]
