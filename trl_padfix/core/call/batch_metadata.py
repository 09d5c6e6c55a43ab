"""
What a step of training or evaluation knows of its batch before its forwards, so that they wait for no device.

A layout serves the very tensors that it was made of, unwritten: they are known by identity and version. Writes that
leave no trace (`.data`, numpy, another process) are looked for on the device, beside the forward; a [`DeferredCheck`] is read
where the host waits anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..context import context, within
from ..errors import PaddingRemovalError
from ..layout.layout import Layout


__all__ = [
    "BatchFacts",
    "DeferredCheck",
    "Known",
    "Pooled",
    "Seen",
    "Step",
    "VerifiedMetadata",
    "defer_check",
    "facts_of",
    "pooled_tokens",
    "run_deferred_checks",
    "share_layouts",
    "share_layouts_in_call",
    "with_known_batch",
]


class Pooled(NamedTuple):
    """Which token of each row a sequence classifier of transformers scores: the last one that is not the pad token."""

    pad_token_id: int | None
    others: tuple[bool, ...]  # of each row, whether it is another one than its last
    padding: tuple[bool, ...]  # and whether it is padding

    @classmethod
    def of(cls, ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None) -> Pooled:
        """What ids and mask say, both `(B, L)`; one synchronisation if they are on a device."""
        others, padding = pooled_tokens(ids, mask, pad_token_id).tolist()
        return cls(pad_token_id, tuple(others), tuple(padding))


def pooled_tokens(ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """`others` and `padding` of [`Pooled`] as a tensor of shape `(2, B)`, where the mask is."""
    column = torch.arange(mask.shape[1], device=mask.device)
    # Without ids or a pad token transformers scores the last column.
    scored = torch.ones_like(mask) if ids is None or pad_token_id is None else ids != pad_token_id
    pooled = (scored * column).argmax(1)
    last = (mask.bool() * column).argmax(1)
    return torch.stack([pooled != last, mask.gather(1, pooled[:, None]).squeeze(1) == 0])


@dataclass(frozen=True, eq=False)
class BatchFacts:
    """What there is to know of a batch before its forward."""

    layout: Layout
    scored: torch.Tensor | None = None  # `(n,)`: places of `(B, L - 1)` from which a label is predicted
    halves_equal: bool | None = None  # whether the halves of the batch have the same images
    pooled: Pooled | None = None  # the tokens that a sequence classifier scores


@dataclass(frozen=True, eq=False)
class Seen:
    """A tensor, or none, as it was when something was made of it."""

    tensor: torch.Tensor | None
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Seen:
        return cls(tensor, None if tensor is None or tensor.is_inference() else tensor._version)

    def is_still(self, other: torch.Tensor | None) -> bool:
        """Whether `other` is this tensor, or a view of all its values, not written to as far as torch counts it."""
        own = self.tensor
        if own is None or other is None:
            return own is other
        if self.version is None or other.is_inference() or other._version != self.version:
            return False
        alike = own.shape == other.shape and own.stride() == other.stride() and own.dtype == other.dtype
        return own is other or (alike and other._is_view() and own.data_ptr() == other.data_ptr())


@dataclass(frozen=True, eq=False)
class Known:
    """A batch of which something is known."""

    key: Any
    facts: BatchFacts
    seen: tuple[Seen, ...]  # the tensors of the key as they were then
    images: tuple[Seen, ...] = ()  # those of which `facts.halves_equal` says something

    @classmethod
    def of(cls, key: Any, facts: BatchFacts) -> Known:
        return cls(key, facts, tuple(map(Seen.of, key.tensors)))

    def serves(self, key: Any) -> bool:
        """Whether its layout is that of `key`."""
        if key.shares != self.key.shares or key.is_packed != self.key.is_packed:
            return False
        needed = self.key.needed
        return all(not n or s.is_still(t) for n, s, t in zip(needed, self.seen, key.tensors, strict=True))


@dataclass(frozen=True, eq=False)
class DeferredCheck:
    """What was relied on, as a sentence without its full stop, and where it is wrong: `(B,)` if known by row."""

    what: str
    wrong: torch.Tensor


@dataclass(eq=False)
class Step:
    """What a step knows of batches, those that its forwards met included, and what it relied on, to be read later."""

    known: list[Known] = field(default_factory=list)
    deferred_checks: list[DeferredCheck] | None = None  # without, nobody can have written to the batches

    def layout(self, key: Any) -> Layout | None:
        """The layout of `key`, if it is known."""
        for known in self.known:
            if known.serves(key):
                layout = known.facts.layout
                if self.deferred_checks is not None:
                    defer_check("The rows of the batch are those that its layout was made of", key.misfits(layout))
                return layout
        return None

    def facts(self, ids: torch.Tensor | None, mask: torch.Tensor | None) -> BatchFacts | None:
        """What came with the batch that has these ids and this mask."""
        found = (k.facts for k in self.known if k.seen[0].is_still(ids) and k.seen[1].is_still(mask))
        return next(found, None)

    def images_are_doubled(self, x: torch.Tensor, made: Iterable[weakref.ref[torch.Tensor]] = ()) -> bool:
        """Whether a batch came with word that its images repeat: `x` is like one, or of what was `made` of them."""
        said = [seen for known in self.known if known.facts.halves_equal for seen in known.images]
        alive = [t for t in (tensor() for tensor in made) if t is not None]
        if said and self.deferred_checks is not None and any(x is t or x._base is t for t in alive):
            return True
        unwritten = [seen.tensor for seen in said if seen.is_still(seen.tensor)]
        return any(t.shape == x.shape and t.device == x.device for t in unwritten if t is not None)


def facts_of(ids: torch.Tensor | None, mask: torch.Tensor | None) -> BatchFacts | None:
    """What the running step, if there is one, knows of the batch that has these ids and this mask."""
    step = context().step
    return step.facts(ids, mask) if step is not None else None


@contextmanager
def share_layouts_in_call() -> Iterator[None]:
    """Let the parts of one call of a model share its layout, also outside of a step."""
    with nullcontext() if context().step is not None else within(step=Step()):
        yield


@contextmanager
def with_known_batch(known: Known) -> Iterator[None]:
    """The running step knows one batch more until the block ends; nothing outside of a step."""
    step = context().step
    with nullcontext() if step is None else within(step=replace(step, known=[known, *step.known])):
        yield


@contextmanager
def share_layouts(known: Iterable[Known] = (), deferred_checks: list[DeferredCheck] | None = None) -> Iterator[None]:
    """
    Let forwards that are given the very same tensors share one layout, until the block ends.

    `known` came with the batch of the step. `deferred_checks` takes what was relied on, for [`run_deferred_checks`] at a time when the
    device has been waited for; by default it is read when the block ends.
    """
    found: list[DeferredCheck] = [] if deferred_checks is None else deferred_checks
    with within(step=Step(list(known), found)):
        yield
    if deferred_checks is None:
        run_deferred_checks(found)


def defer_check(what: str, wrong: torch.Tensor) -> None:
    """Note for the running step that its numbers are right only if `wrong` is false everywhere."""
    step = context().step
    if step is not None and step.deferred_checks is not None:
        step.deferred_checks.append(DeferredCheck(what, wrong))


class VerifiedMetadata:
    """Whether what batches come with holds for those who rely on it: compared once, and noted as a doubt later."""

    def __init__(self) -> None:
        self.holds: bool | None = None

    def verify(self, what: str, wrong: torch.Tensor) -> bool:
        """Whether it can be relied on; where it did not hold at first, never."""
        if self.holds is None:
            self.holds = not bool(wrong.any())
        elif self.holds:
            defer_check(what, wrong)
        return self.holds


def run_deferred_checks(deferred_checks: Iterable[DeferredCheck], of: str = "") -> None:
    """
    Read what was relied on, waiting for the device; `of` says which step it was.

    Raises:
        PaddingRemovalError: If something did not hold, so that numbers of the step are wrong.
    """
    for doubt in deferred_checks:
        if not bool(doubt.wrong.any()):
            continue
        rows = f" Rows: {doubt.wrong.nonzero().flatten().tolist()}." if doubt.wrong.dim() == 1 else ""
        raise PaddingRemovalError(
            f"{doubt.what}: that was relied on{of}, and does not hold, so its numbers are wrong.{rows} Somebody wrote "
            "to the batch after its collator, in a way that leaves no trace (`.data`, numpy, another process), or "
            "gave the model other labels than the batch has. Write to tensors of the batch in place, or put new ones "
            "into it: a layout is then made of what they hold."
        )
