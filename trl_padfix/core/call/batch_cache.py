"""
Values read from the tensors of a batch: their copies on the host, and the layouts built from them.

Reading a tensor on a device makes the host wait for it. Policy and reference get the same tensors, so what was read
for one forward serves the others, until the block of [`batch_cache`] ends.

On the CPU a tensor counts as unchanged if it has the values of its copy. On a device it counts as unchanged if it is
the same object, or a view of it, and its version counter has not moved. A write by `.data` moves no counter, so a
block holds only the forwards of one loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..context import context, within
from ..layout.layout import Layout


__all__ = [
    "BatchVersion", "PlannedLayout", "TensorVersion", "batch_cache", "cache_of_call", "cached_layout", "on_host",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class TensorVersion:
    """A tensor (or `None`) as it was: its version counter, and on the CPU a copy of its values."""

    tensor: torch.Tensor | None
    version: int | None = None
    copy: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> TensorVersion:
        if tensor is None:
            return cls(None)
        # Ids, masks and keys are copied; neither embeddings nor pixels.
        is_small = tensor.dim() <= 2 or not tensor.is_floating_point()
        copy = tensor.detach().clone() if tensor.device.type == "cpu" and is_small else None
        # Inference tensors have no version counter.
        return cls(tensor, None if tensor.is_inference() else tensor._version, copy)

    def matches(self, other: torch.Tensor | None) -> bool:
        """Whether `other` is this tensor, unmodified."""
        tensor = self.tensor
        if tensor is None or other is None:
            return tensor is other
        if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
            return False
        if self.copy is not None:
            return torch.equal(self.copy, other)
        if self.version is None or other.is_inference() or other._version != self.version:
            return False
        # accelerate and DDP pass views of the batch. A view with the same storage and strides is the same data, and it
        # shares the version counter of its base.
        is_same_view = other._is_view() and tensor.stride() == other.stride() and tensor.data_ptr() == other.data_ptr()
        return tensor is other or is_same_view


class BatchVersion(NamedTuple):
    """Ids (or embeddings) and mask of a padded batch as they were."""

    ids: TensorVersion
    mask: TensorVersion

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor | None) -> BatchVersion:
        return cls(TensorVersion.of(ids), TensorVersion.of(mask))

    def matches(self, ids: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
        """Whether these are the same two tensors, unmodified."""
        return self.ids.matches(ids) and self.mask.matches(mask)


class PlannedLayout(NamedTuple):
    """A batch, and the layout that its step has planned for it."""

    batch: BatchVersion
    layout: Layout


@dataclass(eq=False)
class BatchCache:
    """Copies of tensors on the host, and layouts with the tensors and settings that they were built from."""

    copies: list[tuple[TensorVersion, torch.Tensor]] = field(default_factory=list)
    layouts: list[tuple[Hashable, list[TensorVersion], Layout]] = field(default_factory=list)


def batch_cache() -> AbstractContextManager[None]:
    """A block whose forwards share what they read from the same tensors."""
    return within(batch_cache=BatchCache())


def cache_of_call() -> AbstractContextManager[None]:
    """[`batch_cache`] for the modules of one call of a model, unless the call is in such a block."""
    return nullcontext() if context().batch_cache is not None else batch_cache()


def on_host(*tensors: torch.Tensor | None) -> list[Any]:
    """The values of tensors on the host. The host waits once for all of them that were not read before."""
    cache = context().batch_cache or BatchCache()
    found: dict[int, Any] = {id(x): x for x in tensors if x is not None and x.device.type == "cpu"}
    found |= {id(x): copy for version, copy in cache.copies for x in tensors if x is not None and version.matches(x)}
    missing = {id(x): x for x in tensors if x is not None and id(x) not in found}.values()
    if whole := [x for x in missing if not x.is_floating_point()]:
        # One copy, since each is a wait.
        values = torch.cat([x.flatten().to(torch.int64) for x in whole]).cpu().split([x.numel() for x in whole])
        found |= {id(x): value.view(x.shape).to(x.dtype) for x, value in zip(whole, values, strict=True)}
    found |= {id(x): x.detach().cpu() for x in missing if x.is_floating_point()}  # masks with fractions are refused
    cache.copies += [(TensorVersion.of(x), found[id(x)]) for x in missing]
    return [None if x is None else found[id(x)] for x in tensors]


def cached_layout(
    key: Hashable, tensors: list[torch.Tensor | None], device: torch.device, build: Callable[..., Layout]
) -> Layout:
    """
    The layout that `build` makes from the values of these tensors on the host, moved to `device`.

    It is built once for the same tensors with the same settings `key`.
    """
    cache = context().batch_cache
    for other_key, versions, layout in cache.layouts if cache is not None else ():
        if other_key == key and all(v.matches(x) for v, x in zip(versions, tensors, strict=True)):
            return layout
    with torch.inference_mode(False):  # a later forward with gradients cannot use inference tensors
        layout = build(*on_host(*tensors)).to(device)
    if cache is not None:
        cache.layouts.append((key, [TensorVersion.of(x) for x in tensors], layout))
    return layout
