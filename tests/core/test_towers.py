"""Towers that run once for a batch that repeats its images."""

from __future__ import annotations

import torch
from simulated_gpu.simulated_cuda import to_simulated
from torch import nn

from trl_padfix.core.anatomy import Anatomy
from trl_padfix.core.call.calls import ModelCall
from trl_padfix.core.context import within
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.core.patches.towers import TowerPatch


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
