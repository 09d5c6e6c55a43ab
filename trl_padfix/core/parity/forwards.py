"""
The forwards of a comparison (packed, padded, and each row alone), their scores, and the gradient of the scores.

Scores are log-probabilities, or outputs of a pooling head. The gradient is with respect to the embeddings: it passes
the backward of every layer, so an error in any of them changes it. It is summed for each token id: the sums of a
packed batch equal the sums of the padded one. No gradient of a parameter is computed: frozen, quantized and adapted
weights make no difference, and `.grad` stays unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy import differentiates_in_parts, forward_by_name
from ..context import of_this_thread, within
from ..errors import PaddingRemovalError
from ..handle import PaddingRemoval
from ..mixers.mixers import FORKED
from ..model.older import supports
from ..probes import saved_modules
from .limits import WIDEST_SCORE
from .sample import Sample


__all__ = [
    "Forwards", "Outcome", "Scores", "logits_of", "logits_of_packed", "other_attention",
    "relative_difference", "scores_of", "with_gradient",
]  # fmt: skip

EXACT_WEIGHTS = 2**31
"""Bytes of weights in float64 up to which a CPU computes rows alone in float64. A GPU raises an error if full."""

ROUNDED_WEIGHTS = 3
"""Number of computations of rows alone with weights one rounding away: their error varies tenfold in delta nets."""


class Scores(NamedTuple):
    """The scores `(n,)` of a forward, and their gradient `(distinct ids, H)`, if it was computed."""

    values: torch.Tensor
    gradient: torch.Tensor | None


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
        obstacles = {
            "all rows of a batch with images would have to be kept for them": self.sample.has_images,
            "torch is in inference mode": torch.is_inference_mode_enabled(),
            "FSDP or DeepSpeed hooks into the backward pass": differentiates_in_parts(self.model),
        }
        obstacle = next((text for text, is_there in obstacles.items() if is_there and gradients), "")
        gradients = gradients and not obstacle
        packed = self._run(self._packed, gradients)
        if packed.gradient is not None and self.handle.context_parallel is not None:
            # Each process has the gradient of its local tokens, times the group size: their mean is the whole one.
            packed = packed._replace(gradient=self.handle.context_parallel.all_reduce_mean(packed.gradient))
        padded, others = self._twice(partial(self._scores, self.sample), gradients)
        return Outcome(packed, padded, others, self.handle.running_stats.packed_tokens, obstacle)

    def alone(self, gradients: bool) -> tuple[Scores, list[Scores], torch.dtype | None]:
        """
        Each row by itself; the same again, differing by rounding; and the dtype, `None` for the model's own.

        Computed in float64 and again in the model's dtype, if another attention function does not measure all
        rounding, the weights are few, and the code of the model allows it. Code that casts to float32 rounds equally
        in both, but differently where sums begin elsewhere. So the rows also run with weights about one rounding away.
        """
        rows, others = self._twice(self._of_each_row, gradients)
        # A recurrent layer that starts from the state of a prefix rounds differently, whatever the attention function.
        forks = self.handle.prefix_sharing and self.handle.anatomy.mixers.in_mode(FORKED)
        if (self.dtype not in WIDEST_SCORE and not forks) or not _fits_float64(self.model):
            return rows, others, None
        run = partial(self._run, self._of_each_row, gradients)
        with self.handle.disabled():
            try:
                with _weights(self.model, torch.Tensor.double):  # which autocast leaves as they are
                    exact, rounded = run(), [rows]
                for seed in range(ROUNDED_WEIGHTS):
                    with _weights(self.model, partial(_one_rounding_away, self.dtype, seed)):
                        other = run()
                    # In half precision the mean over many scores needs one measurement, and a gradient needs several.
                    rounded.append(other if self.dtype in WIDEST_SCORE else rows._replace(gradient=other.gradient))
            except RuntimeError:  # a cast to float32, a kernel without a dtype, a full GPU
                return rows, others, None
            return exact, rounded, torch.float64

    def packed_from(self, alone: bool) -> torch.Tensor | None:
        """
        Differences of the packed scores from those of each row alone, or from the padded ones; `None` if there are no
        scores, or if the shape of an output depends on the batch.
        """
        unchanged = partial(saved_modules, [*self.model.modules()])
        with unchanged():  # a rotary embedding keeps the frequencies of the longest row
            packed = self._packed()
        with unchanged(), self.handle.disabled():
            reference = self._of_each_row() if alone else self._scores(self.sample)
        return (packed - reference).abs() if packed.shape == reference.shape and len(packed) else None

    def _packed(self) -> torch.Tensor:
        ids, mask = self.sample.ids, self.sample.mask
        if not self.sample.is_packed:
            return self._scores(self.sample)
        return scores_of(logits_of_packed(self.model, ids, mask), ids, mask, self.sample.columns)

    def _of_each_row(self) -> torch.Tensor:
        return torch.cat([self._scores(row) for row in self.sample.rows()])

    def _scores(self, sample: Sample) -> torch.Tensor:
        logits = logits_of(forward_by_name(self.model)(**sample.inputs))
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


def _one_rounding_away(dtype: torch.dtype, seed: int, x: torch.Tensor) -> torch.Tensor:
    """
    `x` with each number one rounding larger or smaller, at random.

    Under autocast by a sixteenth of its rounding: one weight of sixteen is then cast to the next number.
    """
    up = torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device) < 0.5
    eps = torch.finfo(dtype).eps / (1 if dtype in WIDEST_SCORE else 16)
    return x * torch.where(up, 1 + eps, 1 - eps).to(x.dtype)


def _fits_float64(model: nn.Module) -> bool:
    """Whether the weights of `model` are not compressed, and on a CPU few enough for float64."""
    weights = [*model.parameters(), *model.buffers()]
    compressed = any(not p.is_floating_point() or p.dtype.itemsize < 2 for p in model.parameters())
    return not compressed and sum(x.numel() for x in weights if x.device.type == "cpu") * 8 <= EXACT_WEIGHTS


def logits_of_packed(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits `(B, L, V)` of a padded batch that the model receives as one packed row, as from a user who packs."""
    keep = mask.bool()
    positions = (mask.cumsum(1) - 1)[keep][None]
    logits = logits_of(forward_by_name(model)(input_ids=ids[keep][None], position_ids=positions, use_cache=False))
    padded = logits.new_zeros(*ids.shape, logits.shape[-1])
    padded[keep] = logits[0]
    return padded


def logits_of(output: Any) -> torch.Tensor:
    """A model's logits, or a pipeline's embeddings of rows; without both the largest tensor, such as hidden states."""
    if isinstance(output, torch.Tensor):
        return output
    values = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "logits") else None
    for name in ("logits", "sentence_embedding"):
        if values is not None and isinstance(values.get(name), torch.Tensor):
            return values[name]
    # Not the loss, which is one number: a difference in one token hardly shows in it.
    tensors = [x for x in (output if values is None else values.values()) if isinstance(x, torch.Tensor)]
    return max((x for x in tensors if x.is_floating_point()), key=torch.Tensor.numel)


def scores_of(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(n,)` of the real tokens after `columns`, or the values of a head for tokens or rows."""
    if logits.dim() == 3 and len(logits) == len(ids) and logits.shape[1] > ids.shape[1]:
        logits = logits[:, -ids.shape[1] :]  # prompt tuning prepends virtual tokens to every row
    if logits.dim() == 3 and logits.shape[:2] == ids.shape:
        logits = logits[:, columns]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.dim() == 2 or logits.shape[:2] != (len(ids), len(columns)):
        return logits.flatten()
    if logits.shape[-1] == 1:  # a value for each token, whose log-probability would be 0
        return logits[..., 0][mask[:, columns].bool()]
    # A masked token has no score, and neither has the token after it.
    real = (mask[:, columns] * mask[:, columns + 1]).bool()
    ids = ids[:, columns + 1].clamp(max=logits.shape[-1] - 1)  # ids of image tokens may be larger than the vocabulary
    return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)[real]


def with_gradient(
    model: PreTrainedModel, ids: torch.Tensor, score: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Run `score`, a forward of `model`, and differentiate the sum of its result.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the result, and the gradient with respect to the embedding of each
        distinct id of `ids`, `(distinct ids, H)`, sorted by id.

    Raises:
        RuntimeError: If the forward cannot be differentiated.
        PaddingRemovalError: If it does not embed the ids with the embedding of the model.
    """
    embedded: list[tuple[torch.Tensor, torch.Tensor]] = []

    @of_this_thread
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        leaf = output.detach().requires_grad_()  # cut off from the weights: these need no gradient
        embedded_ids = next(iter((*args, *kwargs.values())))  # the first argument, by position or by name
        embedded.append((embedded_ids, leaf))
        return leaf.clone()  # some models write into their embeddings, which torch forbids for a leaf

    with model.get_input_embeddings().register_forward_hook(keep, with_kwargs=True), torch.enable_grad():
        scores = score()
        if not embedded:
            raise PaddingRemovalError(f"`{type(model).__name__}.forward` does not run its own embedding.")
        # A dry run of the decoder calls its embedding too, and its output is not used.
        gradients = torch.autograd.grad(
            scores.sum(), [leaf for _, leaf in embedded], allow_unused=True, materialize_grads=True
        )
    distinct = ids.unique()  # sorted
    dtype = torch.promote_types(scores.dtype, torch.float32)
    total = distinct.new_zeros(len(distinct), gradients[0].shape[-1], dtype=dtype)
    for (embedded_ids, _), gradient in zip(embedded, gradients, strict=True):
        # `clamp`: the insertion point of an id above all others, such as an image token's, is beyond the end.
        index = torch.searchsorted(distinct, embedded_ids.flatten()).clamp(max=len(distinct) - 1)
        total.index_add_(0, index, gradient.flatten(0, -2).to(total.dtype))
    return scores.detach(), total


def relative_difference(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference `|gradient - other| / |other|`."""
    return ((gradient - other).norm() / other.norm().clamp(min=torch.finfo(other.dtype).tiny)).item()
