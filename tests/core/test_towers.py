"""What a tower's doubled output says of views of it, without a look at their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.simulated_cuda import to_simulated
from torch import nn

from trl_padfix import PaddingRemovalError, padding_free_layout
from trl_padfix.core.call.calls import ModelCall
from trl_padfix.core.call.doubled import Doubled
from trl_padfix.core.call.layout_of import LayoutKey
from trl_padfix.core.call.step import BatchFacts, Known, Seen, step_layouts
from trl_padfix.core.context import within
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.core.towers import TowerPatch


VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "itself": (lambda x: x, True),
    "without the first token": (lambda x: x[:, 1:], True),
    "one token": (lambda x: x[:, 0], True),
    "some features": (lambda x: x[..., 2:4], True),
    "features in front": (lambda x: x.transpose(1, 2), True),
    "rows of tokens": (lambda x: x.flatten(0, 1), True),
    "one row of each half": (lambda x: x[::2], True),
    "other rows": (lambda x: x[1:3], False),
    "the first half": (lambda x: x[:2], False),
    "detached": (lambda x: x.detach(), False),
    "tokens first": (lambda x: x.transpose(0, 1), False),
    "shifted by a token": (lambda x: x.flatten(0, 1)[1:-1], False),
    "each row twice": (lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1), True),
    "one row four times": (lambda x: x[:1].expand(4, -1, -1), False),
    "rows that overlap": (lambda x: x.as_strided((2, 4, 5), (20, 5, 1), 10), False),
    "a copy": (lambda x: x.clone(), False),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("place", ["host", "device", "with gradients"])
def test_views_whose_halves_are_the_same_are_told_by_where_they_lie(name, place, gpu):
    view, is_known = VIEWS[name]
    half = torch.randn(2, 4, 5, requires_grad=place == "with gradients")
    doubled = Doubled()
    x = view(doubled.of(to_simulated(half) if place == "device" else half))
    gpu.reset()
    assert (x in doubled) == is_known
    assert not gpu.synchronisations
    if is_known:
        assert torch.equal(*(x.held if place == "device" else x).chunk(2))


def test_what_was_written_to_is_not_known_any_more():
    doubled = Doubled()
    x = doubled.of(torch.randn(2, 3))
    assert x in doubled
    x[0] += 1
    assert x not in doubled


def test_tensors_that_are_gone_are_not_kept():
    doubled = Doubled()
    doubled.of(torch.randn(2, 3))
    (made,) = [t for t, _ in doubled._alive()]
    assert made is None
    assert torch.randn(4, 3) not in doubled


# -- the word of a batch


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
        self.patch = TowerPatch(self.tower, PaddingRemoval(decoder, None, prefix_sharing=False))
        self.call = ModelCall(decoder)

    def step(self, batch: torch.Tensor, *given: torch.Tensor, doubts: Any = None) -> list[torch.Tensor]:
        mask = torch.ones(2, 2, dtype=torch.int64)
        facts = BatchFacts(padding_free_layout(mask), images_repeat=True)
        known = replace(Known.of(LayoutKey(None, mask), facts), images=(Seen.of(batch),))
        with torch.no_grad(), step_layouts([known], doubts), within(model=self.call):
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
    (found,) = model.step(carried, doubts=[])
    (cast,) = model.step(carried, carried.to(torch.float64).to(torch.float32), doubts=[])
    assert not gpu.synchronisations
    assert model.tower.images == [2, 4, 2, 2]
    expected = nn.functional.linear(images, model.tower.project.weight.held, model.tower.project.bias.held)
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(cast.cpu(), expected)


def test_word_that_does_not_hold_is_noticed():
    model = Model()
    model.step(pairs())
    with pytest.raises(PaddingRemovalError, match="images of the batch are those that its collator saw: that was"):
        model.step(torch.randn(4, 5, 3))


def test_where_word_did_not_hold_at_first_the_tower_looks():
    model = Model()
    for images in (torch.randn(4, 5, 3), pairs(), torch.randn(4, 5, 3)):
        (found,) = model.step(images)
        torch.testing.assert_close(found, model.tower.project(images).detach())
    assert model.tower.images == [4, 2, 4, 4]


def test_tensors_of_another_shape_are_looked_at():
    """A tower that is called image by image, for crops of them, or for what the batch does not name."""
    model, batch = Model(), pairs()
    model.step(batch)
    others = [torch.randn(2, 5, 3), torch.randn(2, 4, 5, 3), torch.randn(8, 5, 3), pairs(4), torch.randn(3, 5, 3)]
    for images, found in zip(others, model.step(batch, *others), strict=True):
        torch.testing.assert_close(found, model.tower.project(images).detach())
    assert model.tower.images == [2, 4, 2, 2, 8, 4, 3]
