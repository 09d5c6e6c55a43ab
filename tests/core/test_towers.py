"""Towers that run once for a batch that repeats its images: when that is known without a look at the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from simulated_gpu.simulated_cuda import to_simulated
from torch import nn

from trl_padfix import PaddingRemovalError, padding_free_layout
from trl_padfix.core.anatomy import Anatomy
from trl_padfix.core.call.batch_metadata import ForwardMetadata, KnownBatch, TensorVersion, share_layouts
from trl_padfix.core.call.calls import ModelCall
from trl_padfix.core.call.layout_of import LayoutInputs
from trl_padfix.core.context import within
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.core.towers import TowerPatch


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
    """A tower with its patch, called within steps whose batch came with word of its images."""

    def __init__(self) -> None:
        self.tower = Tower()
        decoder = nn.Linear(1, 1)
        self.patch = TowerPatch(self.tower, PaddingRemoval(Anatomy(decoder, decoder)))
        self.call = ModelCall(decoder)

    def step(self, batch: torch.Tensor, *given: torch.Tensor, deferred_checks: Any = None) -> list[torch.Tensor]:
        mask = torch.ones(2, 2, dtype=torch.int64)
        facts = ForwardMetadata(padding_free_layout(mask), halves_equal=True)
        known = replace(KnownBatch.of(LayoutInputs(None, mask), facts), images=(TensorVersion.of(batch),))
        with torch.no_grad(), share_layouts([known], deferred_checks), within(model=self.call):
            return [self.patch.packed(x) for x in given or (batch,)]


def pairs(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 5, 3).repeat(2, 1, 1)


def test_word_is_relied_on_where_it_once_held(gpu):
    model = Model()
    model.step(pairs())
    to_simulated(model.tower)
    images = pairs()
    carried = to_simulated(images)
    gpu.reset()
    (found,) = model.step(carried, deferred_checks=[])
    (cast,) = model.step(carried, carried.to(torch.float64).to(torch.float32), deferred_checks=[])
    assert not gpu.synchronisations
    assert model.tower.images == [2, 4, 2, 2]
    expected = nn.functional.linear(images, model.tower.project.weight.held, model.tower.project.bias.held)
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(cast.cpu(), expected)


def test_word_that_does_not_hold_is_noticed():
    model = Model()
    model.step(pairs())
    with pytest.raises(PaddingRemovalError, match="images of the batch are those of its collator: "):
        model.step(torch.randn(4, 5, 3))


def test_where_word_did_not_hold_at_first_the_tower_looks():
    model = Model()
    for images in (torch.randn(4, 5, 3), pairs(), torch.randn(4, 5, 3)):
        (found,) = model.step(images)
        torch.testing.assert_close(found, model.tower.project(images).detach())
    assert model.tower.images == [4, 2, 4, 4]


class Projected(Model):
    """A projector behind the tower, which is given a part of the features; they may be `written` to before."""

    def __init__(self, written: float = 0.0) -> None:
        super().__init__()
        self.projector, self.written = Tower(), written
        self.projector.project = nn.Linear(2, 2)
        tower, projector = self.patch.packed, TowerPatch(self.projector, self.patch.attachment).packed

        def both(images: torch.Tensor) -> torch.Tensor:
            features = tower(images)
            features[0] += self.written
            return projector(features[:, 1:])

        self.patch.packed = both


def test_word_holds_for_what_a_tower_made_of_the_images(gpu):
    model = Projected()
    model.step(pairs())
    to_simulated(model.tower), to_simulated(model.projector)
    carried = to_simulated(pairs())
    gpu.reset()
    model.step(carried, deferred_checks=[])
    assert not gpu.synchronisations
    assert model.projector.images == [2, 4, 2]
    model.written = 1.0
    with pytest.raises(PaddingRemovalError, match="images of the batch are those"):
        model.step(carried)


def test_without_a_step_the_projector_looks():
    model, images = Projected(written=1.0), pairs()
    with torch.no_grad(), within(model=model.call):
        found = model.patch.packed(images)
    features = model.tower.project(images)
    features[0] += 1.0
    torch.testing.assert_close(found, model.projector.project(features[:, 1:]))
    assert model.projector.images == [4]


def test_tensors_of_another_shape_are_looked_at():
    """A tower that is called image by image, for crops of them, or for what the batch does not name."""
    model, batch = Model(), pairs()
    model.step(batch)
    others = [torch.randn(2, 5, 3), torch.randn(2, 4, 5, 3), torch.randn(8, 5, 3), pairs(4), torch.randn(3, 5, 3)]
    for images, found in zip(others, model.step(batch, *others), strict=True):
        torch.testing.assert_close(found, model.tower.project(images).detach())
    assert model.tower.images == [2, 4, 2, 2, 8, 4, 3]
