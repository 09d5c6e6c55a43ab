"""
Metadata computed with a batch (layout, label positions, ...), so that its forwards need no synchronisation.

A layout is used for the tensors that it was built from, recognised by identity and version counter. Writes that leave
no trace there (`.data`, numpy, another process) are detected on the device, asynchronously: the result of a
[`DeferredCheck`] is read when the host waits for the device anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..context import context, within
from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from .labels import LabelsAfterPadding


if TYPE_CHECKING:
    from .layout_of import LayoutInputs


__all__ = [
    "BatchVersion",
    "DeferredCheck",
    "ForwardMetadata",
    "KnownBatch",
    "KnownBatches",
    "PooledTokens",
    "TensorVersion",
    "VerifiedMetadata",
    "defer_check",
    "find_pooled_tokens",
    "metadata_of",
    "run_deferred_checks",
    "share_layouts",
    "share_layouts_in_call",
    "with_known_batch",
]


class PooledTokens(NamedTuple):
    """
    The token of each row that a sequence classifier of transformers scores: the last one that is not the pad token.

    Attributes:
        pad_token_id (`int`, *optional*): The classifier's pad token.
        not_last (`tuple[bool, ...]`): For each row, whether the scored token is not its last real token.
        is_padding (`tuple[bool, ...]`): For each row, whether the scored token is padding.
    """

    pad_token_id: int | None
    not_last: tuple[bool, ...]
    is_padding: tuple[bool, ...]

    @classmethod
    def of(cls, ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None) -> PooledTokens:
        """Read ids and mask, both `(B, L)`; one synchronisation if they are on a device."""
        not_last, is_padding = find_pooled_tokens(ids, mask, pad_token_id).tolist()
        return cls(pad_token_id, tuple(not_last), tuple(is_padding))


def find_pooled_tokens(ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """`not_last` and `is_padding` of [`PooledTokens`] as a tensor `(2, B)`, bool, on the device of the mask."""
    column = torch.arange(mask.shape[1], device=mask.device)
    # Without ids or a pad token transformers scores the last column.
    is_candidate = torch.ones_like(mask) if ids is None or pad_token_id is None else ids != pad_token_id
    pooled = (is_candidate * column).argmax(1)  # the last candidate; column 0 if there is none, as in transformers
    last = (mask.bool() * column).argmax(1)
    return torch.stack([pooled != last, mask.gather(1, pooled[:, None]).squeeze(1) == 0])


@dataclass(frozen=True, eq=False)
class ForwardMetadata:
    """
    Metadata of a batch, computed before its forward. `None` where a value is not known.

    Attributes:
        layout ([`Layout`]): Layout of the batch.
        label_positions (`torch.Tensor` of shape `(n,)`, *optional*): Flat indices into `(B, L - 1)` of the positions
            that predict a label.
        halves_equal (`bool`, *optional*): Whether both halves of the batch have the same images.
        pooled ([`PooledTokens`], *optional*): The tokens that a sequence classifier scores.
        labels_after_padding ([`LabelsAfterPadding`], *optional*): Which labels follow a masked token.
    """

    layout: Layout
    label_positions: torch.Tensor | None = None
    halves_equal: bool | None = None
    pooled: PooledTokens | None = None
    labels_after_padding: LabelsAfterPadding | None = None


@dataclass(frozen=True, eq=False)
class TensorVersion:
    """Identity and version counter of a tensor (or `None`): detects replacement and in-place writes."""

    tensor: torch.Tensor | None
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> TensorVersion:
        # Inference tensors have no version counter.
        return cls(tensor, None if tensor is None or tensor.is_inference() else tensor._version)

    def matches(self, other: torch.Tensor | None) -> bool:
        """Whether `other` is this tensor, or a view of all its values, with the same version counter."""
        tensor = self.tensor
        if tensor is None or other is None:
            return tensor is other
        if self.version is None or other.is_inference() or other._version != self.version:
            return False
        # accelerate and DDP pass views of the batch. A view with the same storage and strides is the same data, and it
        # shares the version counter of its base.
        same_format = (tensor.shape, tensor.stride(), tensor.dtype) == (other.shape, other.stride(), other.dtype)
        return tensor is other or (same_format and other._is_view() and tensor.data_ptr() == other.data_ptr())


class BatchVersion(NamedTuple):
    """Versions of the ids and the mask of a padded batch."""

    ids: TensorVersion
    mask: TensorVersion

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor | None) -> BatchVersion:
        return cls(TensorVersion.of(ids), TensorVersion.of(mask))

    def matches(self, ids: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
        """Whether these are the same two tensors, unmodified."""
        return self.ids.matches(ids) and self.mask.matches(mask)


@dataclass(frozen=True, eq=False)
class KnownBatch:
    """
    A batch whose metadata has been computed.

    Attributes:
        inputs ([`LayoutInputs`]): The tensors and settings that the layout was built from.
        forward_metadata ([`ForwardMetadata`]): The metadata.
        versions (`tuple[TensorVersion, ...]`): Versions of the tensors in `inputs` when the metadata was computed.
        images (`tuple[TensorVersion, ...]`): Versions of the image tensors that `halves_equal` describes.
    """

    inputs: LayoutInputs
    forward_metadata: ForwardMetadata
    versions: tuple[TensorVersion, ...]
    images: tuple[TensorVersion, ...] = ()

    @classmethod
    def of(cls, inputs: LayoutInputs, forward_metadata: ForwardMetadata) -> KnownBatch:
        return cls(inputs, forward_metadata, tuple(map(TensorVersion.of, inputs.tensors)))

    def matches_inputs(self, inputs: LayoutInputs) -> bool:
        """Whether the layout is valid for `inputs`: same settings, and all tensors that it depends on unmodified."""
        if inputs.shares != self.inputs.shares or inputs.is_packed != self.inputs.is_packed:
            return False
        pairs = zip(self.versions, inputs.tensors, strict=True)
        return all(version.matches(x) for version, x in compress(pairs, self.inputs.depends_on))


@dataclass(frozen=True, eq=False)
class DeferredCheck:
    """
    An assumption about a batch that the device tests while the host goes on.

    Attributes:
        message (`str`): The assumption, as a sentence without its full stop.
        violations (`torch.Tensor` of shape `(B,)` or `()`, bool): Whether each row, or the batch, violates it.
    """

    message: str
    violations: torch.Tensor


@dataclass(eq=False)
class KnownBatches:
    """
    Batches of a step with their metadata: precomputed, or built by a forward of the step.

    Attributes:
        batches (`list` of [`KnownBatch`]): The batches; where several match, the first one counts.
        deferred_checks (`list` of [`DeferredCheck`], *optional*): Checks of the step, to be run later. `None` if the
            batches cannot have been modified, as within one call of a model.
    """

    batches: list[KnownBatch] = field(default_factory=list)
    deferred_checks: list[DeferredCheck] | None = None

    def layout(self, inputs: LayoutInputs) -> Layout | None:
        """The known layout for `inputs`, if there is one. Defers a check that it is still valid."""
        for batch in self.batches:
            if batch.matches_inputs(inputs):
                layout = batch.forward_metadata.layout
                # Version counters do not show all writes: compare the layout with the values too.
                if self.deferred_checks is not None:
                    violations = inputs.rows_that_differ(layout)
                    defer_check("The rows of the batch are those that its layout was made of", violations)
                return layout
        return None

    def metadata_of(self, ids: torch.Tensor | None, mask: torch.Tensor | None) -> ForwardMetadata | None:
        """The metadata of the batch with these ids and this mask."""
        for batch in self.batches:
            if batch.versions[0].matches(ids) and batch.versions[1].matches(mask):
                return batch.forward_metadata
        return None

    def images_are_doubled(self, x: torch.Tensor, doubled_features: Iterable[weakref.ref[torch.Tensor]] = ()) -> bool:
        """
        Whether the metadata says that both halves of `x` are equal.

        It does if both halves of a batch hold the same images and `x` is one of these tensors. It also does if `x` is
        one of the `doubled_features`, which a tower computed from such images.
        """
        images = [version for batch in self.batches if batch.forward_metadata.halves_equal for version in batch.images]
        features = [t for t in (reference() for reference in doubled_features) if t is not None]
        if images and self.deferred_checks is not None and any(x is t or x._base is t for t in features):
            return True
        # Only shape and device are compared, on the host: the caller verifies the values on the device.
        unmodified = [version.tensor for version in images if version.matches(version.tensor)]
        return any(t.shape == x.shape and t.device == x.device for t in unmodified if t is not None)


def metadata_of(ids: torch.Tensor | None, mask: torch.Tensor | None) -> ForwardMetadata | None:
    """The metadata that the running step has for the batch with these ids and this mask; `None` outside of a step."""
    known_batches = context().known_batches
    return known_batches.metadata_of(ids, mask) if known_batches is not None else None


@contextmanager
def share_layouts_in_call() -> Iterator[None]:
    """Share one layout among the modules of one call of a model; inside of a step its layouts are shared already."""
    # Without deferred checks: nothing modifies the batch between the head and the decoder of one call.
    with nullcontext() if context().known_batches is not None else within(known_batches=KnownBatches()):
        yield


@contextmanager
def with_known_batch(batch: KnownBatch) -> Iterator[None]:
    """Add a batch to those of the running step until the block ends; outside of a step nothing happens."""
    known_batches = context().known_batches
    if known_batches is None:
        yield
        return
    # In front: of batches that match, the first one counts.
    with within(known_batches=replace(known_batches, batches=[batch, *known_batches.batches])):
        yield


@contextmanager
def share_layouts(
    batches: Iterable[KnownBatch] = (), deferred_checks: list[DeferredCheck] | None = None
) -> Iterator[None]:
    """
    Share one layout among forwards on the same tensors, until the block ends.

    Args:
        batches (`Iterable` of [`KnownBatch`]):
            Batches with precomputed metadata.
        deferred_checks (`list` of [`DeferredCheck`], *optional*):
            The block appends its checks here. Pass the list to [`run_deferred_checks`] when the host has waited for
            the device. By default the checks run when the block ends.
    """
    checks: list[DeferredCheck] = [] if deferred_checks is None else deferred_checks
    with within(known_batches=KnownBatches(list(batches), checks)):
        yield
    if deferred_checks is None:
        run_deferred_checks(checks)


def defer_check(message: str, violations: torch.Tensor) -> None:
    """Add a [`DeferredCheck`] to the running step: its numbers are right only if there are no `violations`."""
    known_batches = context().known_batches
    if known_batches is not None and known_batches.deferred_checks is not None:
        known_batches.deferred_checks.append(DeferredCheck(message, violations))


class VerifiedMetadata:
    """
    Verifies precomputed metadata: synchronously on the first batch, by a deferred check afterwards.

    Attributes:
        holds (`bool`, *optional*): Result of the first batch; `None` before.
    """

    def __init__(self) -> None:
        self.holds: bool | None = None

    def verify(self, message: str, violations: torch.Tensor) -> bool:
        """Whether the metadata may be used. If the first batch violated the assumption, it is never used."""
        if self.holds is None:
            self.holds = not bool(violations.any())  # the host waits here, once
        elif self.holds:
            defer_check(message, violations)
        return self.holds


def run_deferred_checks(deferred_checks: Iterable[DeferredCheck], which_step: str = "") -> None:
    """
    Read the results of deferred checks; the host waits for the device.

    Args:
        deferred_checks (`Iterable` of [`DeferredCheck`]):
            The checks.
        which_step (`str`, *optional*):
            Names the step in the error, such as `" in step 3 of train"`.

    Raises:
        PaddingRemovalError: If a check fails: numbers of the step are wrong.
    """
    for check in deferred_checks:
        if not bool(check.violations.any()):  # the host waits here
            continue
        # Violations per row are `(B,)`; those of a batch as a whole are `()` and name no row.
        rows = f" Rows: {check.violations.nonzero().flatten().tolist()}." if check.violations.dim() == 1 else ""
        raise PaddingRemovalError(
            f"{check.message}: this assumption{which_step} does not hold, so the numbers of the step are wrong.{rows} "
            "The batch was modified after its collator in a way that leaves no trace (`.data`, numpy, another "
            "process), or the model got other labels than those of the batch. Modify tensors of the batch in place, "
            "or replace them in the batch: a new layout is then built."
        )
