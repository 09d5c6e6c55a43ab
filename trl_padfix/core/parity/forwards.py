"""The forwards of a comparison: packed, padded, and each row alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from ..anatomy import by_name
from ..context import within
from ..errors import PaddingRemovalError
from ..handle import PaddingRemoval
from ..model.older import supports
from .limits import WIDEST_SCORE
from .sample import Sample
from .scores import gradient_obstacle, logits_of, logits_of_packed, scores_of, with_gradient


__all__ = ["Forwards", "Outcome", "Scores", "other_attention"]

EXACT_WEIGHTS = 2**31
"""Bytes of weights in float64 up to which rows alone are computed in float64."""

ROUNDED_WEIGHTS = 3
"""Number of computations of rows alone with weights one rounding away: their error varies tenfold in delta nets."""


class Scores(NamedTuple):
    """The scores `(n,)` of a forward, and their gradient `(distinct ids, H)`, if it was computed."""

    values: torch.Tensor
    gradient: torch.Tensor | None
    long_row: torch.Tensor | None = None  # further differences, see `check._compare_long_row`


@dataclass(frozen=True, eq=False)
class Outcome:
    """The packed and the padded forward, and one with another attention function, which differs by rounding."""

    packed: Scores
    padded: Scores
    others_padded: list[Scores]  # empty where the tolerance is not measured
    packed_tokens: int
    gradient_obstacle: str = ""  # empty if gradients were compared, or not requested


@dataclass(eq=False)
class Forwards:
    """
    Forwards of a model on a sample, whose `dtype` determines the tolerance.

    In half precision rounding is measured: each padded forward also runs with another attention function.
    """

    model: nn.Module
    sample: Sample
    handle: PaddingRemoval
    dtype: torch.dtype
    size: float = field(default=0.0, init=False)

    def compute(self, gradients: bool) -> Outcome:
        """Packed and padded, with their gradients if these are requested and can be computed."""
        images = "all rows of a batch with images would have to be kept for them" if self.sample.has_images else None
        obstacle = images or gradient_obstacle(self.model)
        if gradients and obstacle is None:
            try:
                return self._packed_and_padded(gradients=True)
            except PaddingRemovalError:
                raise
            except (RuntimeError, NotImplementedError) as error:  # a layer without a backward
                obstacle = str(error).partition("\n")[0]
                self.handle.running_stats.reset()
        outcome = self._packed_and_padded(gradients=False)
        return replace(outcome, gradient_obstacle=(obstacle or "") if gradients else "")

    def _packed_and_padded(self, gradients: bool) -> Outcome:
        packed = self._run(self._packed, gradients)
        if packed.gradient is not None and self.handle.context_parallel is not None:
            # Each process has the gradient of its local tokens, times the group size: their mean is the whole one.
            packed = packed._replace(gradient=self.handle.context_parallel.all_reduce_mean(packed.gradient))
        padded, others = self._twice(partial(self._scores, self.sample), gradients)
        return Outcome(packed, padded, others, self.handle.running_stats.packed_tokens)

    def alone(self, gradients: bool) -> tuple[Scores, list[Scores], torch.dtype | None]:
        """
        Each row by itself; the same again, differing by rounding; and the dtype, `None` for the model's own.

        Computed in float64 and again in the model's dtype, if rounding is not measured by another attention function,
        the weights are few, and the code of the model allows it. Code that casts to float32 rounds equally in both,
        but differently where sums begin elsewhere. So the rows also run with weights one rounding away.
        """
        if self.dtype not in WIDEST_SCORE or not _fits_float64(self.model):
            return *self._twice(self._of_each_row, gradients), None
        run = partial(self._run, self._of_each_row, gradients)
        with self.handle.disabled():
            rows = run()
            try:
                with _weights(self.model, torch.Tensor.double):
                    exact, others = run(), [rows]
                for seed in range(ROUNDED_WEIGHTS):
                    with _weights(self.model, partial(_one_rounding_away, seed=seed)):
                        others.append(run())
            except (RuntimeError, NotImplementedError):  # a cast to float32, or a kernel without a dtype
                return rows, [], None
            return exact, others, torch.float64

    def packed_and_alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the packed forward, and of each row alone in the dtype of the model."""
        packed = self._packed()
        with self.handle.disabled():
            return packed, self._of_each_row()

    def _packed(self) -> torch.Tensor:
        ids, mask = self.sample.ids, self.sample.mask
        if not self.sample.is_packed:
            return self._scores(self.sample)
        return scores_of(logits_of_packed(self.model, ids, mask), ids, mask, self.sample.columns)

    def _of_each_row(self) -> torch.Tensor:
        return torch.cat([self._scores(row) for row in self.sample.rows()])

    def _scores(self, sample: Sample) -> torch.Tensor:
        logits = logits_of(by_name(self.model)(**sample.inputs))
        if logits.numel():
            self.size = max(self.size, *(bound.abs().item() for bound in logits.detach().aminmax()))
        return scores_of(logits, sample.ids, sample.mask, sample.columns)

    def _twice(self, score: Callable[[], torch.Tensor], gradients: bool) -> tuple[Scores, list[Scores]]:
        """The scores without padding removal; if rounding is measured, with another attention function as well."""
        with self.handle.disabled():
            scores, others = self._run(score, gradients), []
            if self.dtype not in WIDEST_SCORE and (attention := other_attention(self.handle)) is not None:
                with within(attention=attention):
                    others.append(self._run(score, gradients))
        return scores, others

    def _run(self, score: Callable[[], torch.Tensor], gradients: bool) -> Scores:
        if not gradients:
            return Scores(score(), None)
        return Scores(*with_gradient(self.handle.anatomy.pretrained, self.sample.ids, score))


def other_attention(handle: PaddingRemoval) -> str | None:
    """Another attention function with the same results as the decoder's, if there is one."""
    if handle.decoder.config._attn_implementation != "eager":
        return "eager"
    return "sdpa" if supports(type(handle.anatomy.pretrained), "sdpa") else None


@contextlib.contextmanager
def _weights(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A block in which the weights of `model` are changed. Modules that share a weight share it there, too."""
    with contextlib.ExitStack() as stack:
        for x in chain(model.parameters(), model.buffers()):
            if x.is_floating_point():
                stack.callback(setattr, x, "data", x.data)
                x.data = change(x.data)
        yield


def _one_rounding_away(x: torch.Tensor, seed: int) -> torch.Tensor:
    """`x` with each number one rounding larger or smaller, at random."""
    up = torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device) < 0.5
    return torch.nextafter(x, torch.where(up, math.inf, -math.inf).to(x.dtype))


def _fits_float64(model: nn.Module) -> bool:
    """Whether the weights of `model` are few enough for float64, and not compressed."""
    weights = [*model.parameters(), *model.buffers()]
    compressed = any(not p.is_floating_point() or p.dtype.itemsize < 2 for p in model.parameters())
    return not compressed and sum(x.numel() for x in weights) * 8 <= EXACT_WEIGHTS
