"""
The check of a step: the trainer's own loss and its gradient, on a few short rows of a batch.

The rows run through the trainer's `compute_loss`, with the prepared model, in training mode without dropout: as
configured, with a token budget in two parts or more, and with padding removal off. So the check covers what
[`check_parity`] does not compute: a user's loss that reads logits at padding, modules and adapters with statistics of
the batch, autocast, wrappers, hooks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import nn
from torch.utils._pytree import tree_map_only

from ...core.anatomy import find_pretrained, reset_gather_order, reshard_parameters
from ...core.call.batch_cache import on_host
from ...core.context import of_this_thread, temporarily_set, within
from ...core.errors import UnpackableCallError
from ...core.handle import PaddingRemoval, PaddingStats
from ...core.model.inspection import bind
from ...core.parity.forwards import other_attention, relative_difference
from ...core.parity.limits import OF_NOISE, Limits, lowest_dtype, precision_of
from ...core.remove import number_padded_rows
from ..checks.user_code import gradient_hook_name
from ..data.batch_rows import BatchParts, are_cut_by_rows, find_images, has_pixels, scored_tokens, split_images
from ..distributed import (
    has_static_graph,
    is_sharded,
    local_metrics_only,
    max_over_processes,
    models_of,
    on_any_process,
    splitting_parallelism,
    step_on_prepared,
)
from ..messages import counted, say
from ..task import Task
from .part import PaddingFreeTrainer, Step
from .saved_state import saved_state


__all__ = [
    "Filling", "StepReport", "check_step", "few_items", "has_padding", "is_told", "other_outputs", "other_padding",
    "precision_in", "without_packing",
]  # fmt: skip

logger = get_logger(__name__)

ITEMS = 4
"""Rows (pairs) of a batch that are compared: short ones, and one of at least twice the length of the shortest."""

REFILLED_ITEMS = 3
"""Those of them that run with other tokens at padding, if the loss is a sum over rows: a smaller padded batch."""

PACKED, REFILLED = "off by", "with other tokens at padding off by"
"""The differences of a step as configured, and of a padded step with other tokens at padding."""

ZEROED, BOTH = "zeros", "other tokens behind zeros"
"""The causes of these: what changes if the decoder returns zeros at padding, and then other tokens stand there."""

NO_PADDING = "its batch is packed, without padding"
"""Why a step is not compared that cannot read padding."""

SAMPLED = 65536
"""Maximum number of compared entries in the gradient of a parameter."""


_Hook: TypeAlias = Callable[..., Any] | None
"""A forward hook, if there is one."""

Filling: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What stands at padding in states or logits, `(B, L, H)`, in place of what the model computes there."""

_Weighted: TypeAlias = list[tuple[float, dict[str, Any]]]
"""Batches, and their weights in a loss."""


class _Values(NamedTuple):
    """A loss, and some entries of the gradient of each parameter; `None` without gradients."""

    loss: float
    gradient: torch.Tensor | None

    @property
    def is_zero(self) -> bool:
        """Whether the gradient is zero, or the loss without a gradient."""
        return self.loss == 0 if self.gradient is None else not self.gradient.any()

    def distance(self, other: _Values) -> tuple[float, float]:
        """Differences of loss and gradient, relative to `other`."""
        loss = abs(self.loss - other.loss) / max(abs(other.loss), 1.0)
        if self.gradient is None or other.gradient is None:
            return loss, 0.0
        return loss, relative_difference(self.gradient, other.gradient)


@dataclass(frozen=True)
class StepReport:
    """
    A step as configured, compared with the same step without padding removal.

    Attributes:
        loss, reference (`float`): The loss as configured, and the one that it is compared with.
        items (`str`): The rows that were computed: `"4 rows"`, `"4 pairs"`.
        arbiter (`str`): Where `reference` comes from: `"rows alone"`, or `"padded"`.
        found (`dict[str, tuple[tuple[float, float], Limits]]`):
            Relative differences of loss and gradient (0.0 if it was not computed), with the largest that rounding
            explains; if these are larger, also those of the padded step with other tokens, or zeros, at padding.
        error (`str`): The error of the step as configured; empty if there is none.
        is_zero (`bool`):
            Whether the gradient, or without one the loss, is zero but for rounding. Such a step shows little: where
            all rewards are equal, a loss of GRPO that reads padding multiplies it by zero.
        repeated (`tuple[float, float]`, *optional*):
            Two values of the padded loss on one batch, if they differ.
        has_gradient (`bool`): Whether gradients were computed.
    """

    loss: float
    reference: float
    items: str
    arbiter: str
    found: dict[str, tuple[tuple[float, float], Limits]] = field(default_factory=dict)
    error: str = ""
    is_zero: bool = False
    repeated: tuple[float, float] | None = None
    has_gradient: bool = True

    @property
    def ok(self) -> bool:
        """Whether all differences are within their limits; a NaN never is."""
        return not self.error and all(limits.allow(*distance) for distance, limits in self.found.values())

    def __str__(self) -> str:
        if self.error:
            return f"on {self.items} the padded loss is {self.reference:.6g}, and without padding {self.error}"
        parts = []
        for name, ((loss, gradient), most) in [*self.found.items()][:2]:  # the others only tell causes apart
            of_gradient = f", gradient by {gradient:.1e} (at most {most.gradient:.0e})" if self.has_gradient else ""
            parts.append(f"{name} {loss:.1e} (at most {most.mean:.0e}){of_gradient}")
        return f"on {self.items} {self.loss:.6g}, {self.arbiter} {self.reference:.6g}; {'; '.join(parts)}"


def check_step(trainer: PaddingFreeTrainer, step: Step, *, gradients: bool) -> StepReport | str:
    """
    Compute a step on a few rows of its batch, as configured and without padding removal, and compare them.

    If the loss is a sum over rows with known weights, the step must be the sum of the steps of each row alone. For any
    other loss it must be the padded step, and that step must not change with the tokens at padding. If a fixed limit
    is exceeded, rounding is measured: by that step with embeddings one rounding away and, in half precision, with
    another attention function.

    Metrics, plain attributes of the trainer, buffers, gradients and random states are put back.

    Returns:
        [`StepReport`] or `str`: Why there is none, if the trainer cannot be run on a part of its batch.
    """
    batches, reason = few_items(trainer, step.inputs)
    # Sharded models gather parameters: all processes compute equally many forwards, on equally many rows.
    most, fewest = max_over_processes(trainer, len(batches)), -max_over_processes(trainer, -len(batches))
    if fewest == 0 or (most > fewest and is_sharded(trainer)):
        return reason or "another process has a batch of another size or kind"
    # A backward would run the hooks of FSDP and DeepSpeed, and hooks in which an optimizer steps. DDP with a static
    # graph records the first ones.
    meets = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    has_hook = any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())  # on any process
    is_trained = any(p.requires_grad for p in trainer.model.parameters())
    gradients &= is_trained and not (meets or has_static_graph(trainer) or on_any_process(trainer, has_hook))
    report = _Comparison(trainer, step, gradients).report(most == fewest, *batches)
    for model in models_of(trainer) if meets else []:
        reset_gather_order(find_pretrained(model), step.batches[0]["input_ids"])
        reshard_parameters(model)
    return report


def is_told(trainer: PaddingFreeTrainer, mode: str) -> bool:
    """Whether the log has the comparisons of a mode: of evaluations, only if nothing is trained."""
    return mode == "train" or not (trainer.is_in_train or "train" in trainer.padding.parity)


def few_items(trainer: PaddingFreeTrainer, inputs: Any) -> tuple[list[dict[str, Any]], str]:
    """
    The batch of a few short items of different lengths, that of the first [`REFILLED_ITEMS`] of them, and that of each
    alone; none and the reason if the batch cannot be cut.
    """
    if trainer.padding.settings.pool_last_token:
        return [], "`pool_last_token` scores another token than the padded model"
    if size := splitting_parallelism(trainer.accelerator, "tp_size", "cp_size", "sp_size"):
        return [], f"under `{size}` several processes compute one batch"
    task = trainer.padding.task
    forwards = task.padded_batches(inputs)
    ids, mask = (forwards[0].get(name) for name in ("input_ids", "attention_mask")) if forwards else (None, None)
    if ids is None or mask is None or ids.shape != mask.shape:
        is_packed = mask is None and forwards and forwards[0].keys() & {"position_ids", "cu_seq_lens_q"}
        return [], NO_PADDING if is_packed else "its batch has no `attention_mask` of the shape of its `input_ids`"
    count, of_item = len(ids), task.rows_per_item
    images = find_images(inputs, ids, find_pretrained(trainer.model).config) if has_pixels(inputs) else None
    if split_images(inputs, count, images) is None:
        return [], "it is unknown which of its images belong to which row"
    if not are_cut_by_rows(inputs, count, of_item):
        return [], "its batch has a value whose length is not the number of rows"
    lengths = mask.sum(1).view(of_item, -1).sum(0).tolist()
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    longer = [item for item in by_length if lengths[item] >= 2 * lengths[by_length[0]]]
    first = (longer or by_length[::-1])[0]
    # A loss may read padding at one end only: of prompts, or of completions.
    edges = (m.long().argmax(1).view(of_item, -1).T.tolist() for m in (mask, mask.flip(1)))
    others = [next((item for item in by_length if edge[item] != edge[first]), first) for edge in edges]
    chosen = [*dict.fromkeys([first, *others, *by_length])][:ITEMS]
    items, few = sorted(chosen), sorted(chosen[:REFILLED_ITEMS])
    scored = scored_tokens(inputs)
    needed = mask.bool() if scored is None else mask.bool() | scored
    parts = BatchParts.of_items([items, few, *([item] for item in items)], needed, of_item, images)
    return [task.trimmed(batch) for batch in parts.of(inputs)], ""


class _Comparison:
    """The steps of a comparison. `step` is the running one, on the whole batch."""

    def __init__(self, trainer: PaddingFreeTrainer, step: Step, gradients: bool):
        self.trainer, self.step, self.gradients = trainer, step, gradients
        self.num_items = step.arguments.get("num_items_in_batch")
        self.dtype = precision_in(trainer, trainer.model)
        # Of its own: the random numbers of a user's loss are the same in all steps.
        self.draw = torch.Generator().manual_seed(0)

    def report(
        self, is_even: bool, batch: dict[str, Any], few: dict[str, Any], *items: dict[str, Any]
    ) -> StepReport | str:
        """
        Compare the steps on `batch`.

        `few` is the batch of some of its rows (pairs), and `items` are those of each; `is_even`: whether all processes
        have equally many.
        """
        weights = self._weights(is_even, batch, items)
        compared = counted(len(items), self.trainer.padding.task.item)
        arbiter = "padded" if weights is None else "rows alone"
        self._announce(batch, "padded twice" if weights is None else "each row alone")
        compared_with = [(1.0, batch)] if weights is None else list(zip(weights, items, strict=True))
        reference, reason = _Values(math.nan, None), ""
        try:
            reference = self._padded(compared_with)
        except Exception as error:  # a loss may need a whole batch
            reason = f"on a few rows it raises {error!r}"
        if on_any_process(self.trainer, not math.isfinite(reference.loss)):  # all raised, or one has a NaN
            return reason or "on a few rows it is NaN or infinite"
        try:
            packed = self._as_configured(batch)
        except Exception as error:  # a user's loss may fail without padding
            is_single = self.trainer.accelerator.num_processes == 1
            if isinstance(error, torch.OutOfMemoryError) or (is_single and isinstance(error, UnpackableCallError)):
                raise  # with `strict=True` the error says what cannot be packed
            return StepReport(math.nan, reference.loss, compared, arbiter, error=f"{type(error).__name__}: {error}")
        distance = packed.distance(reference)
        found = {PACKED: (distance, Limits.of_step(torch.float32))}
        kind = {"is_zero": reference.is_zero, "has_gradient": self.gradients}
        report = StepReport(packed.loss, reference.loss, compared, arbiter, found, **kind)
        if weights is not None and not on_any_process(self.trainer, not report.ok):
            return report
        # Rounding may hide how rows depend on one another. Tokens at padding change no real token, unless
        # a module or the loss reads it: these two steps run the same kernels on the same shapes.
        # A loss that may mix its rows may need all of them, for instance an even number.
        refilled_batch = batch if weights is None else few
        padded = reference if weights is None else self._padded([(1.0, few)])
        forwards = self.trainer.padding.task.padded_batches(refilled_batch)
        on_embeddings = partial(other_padding, forwards, self.draw)
        refilled = self._padded([(1.0, refilled_batch)], on_embeddings).distance(padded)
        same = Limits.of_step(lowest_dtype(self.trainer.model))
        # Measured only as far as fixed limits explain too little, and on rows alone if they are the reference: they
        # are fewer tokens than the padded batch.
        for rounding in self._roundings(compared_with, reference):
            limits = Limits.of_step(self.dtype, rounding)
            is_noise = limits.gradient == OF_NOISE
            if is_noise:  # the order of sums on a GPU moves such a gradient, too
                same = same._replace(gradient=OF_NOISE)
            found = {PACKED: (distance, limits), REFILLED: (refilled, same)}
            report = replace(report, found=found, is_zero=report.is_zero or is_noise)
            if not on_any_process(self.trainer, not report.ok):
                return report
        again = self._padded([(1.0, refilled_batch)])
        zeroed = self._padded([(1.0, refilled_batch)], at_padding=torch.zeros_like)
        both = self._padded([(1.0, refilled_batch)], on_embeddings, torch.zeros_like)
        causes = {ZEROED: (zeroed.distance(padded), same), BOTH: (both.distance(zeroed), same)}
        repeated = None if same.allow(*again.distance(padded)) else (padded.loss, again.loss)
        return replace(report, found=report.found | causes, repeated=repeated)

    def _announce(self, batch: dict[str, Any], arbiter: str) -> None:
        """Tell what a comparison computes: on a CPU, users take the minutes of a large model for a hang."""
        ids = [forward["input_ids"] for forward in self.trainer.padding.task.padded_batches(batch)]
        sizes = " and ".join(f"{len(x)} rows x {x.shape[1]} tokens" for x in ids)
        passes = f"packed and {arbiter}, forward{' and backward' if self.gradients else ''}"
        if self.trainer.accelerator.is_local_main_process and is_told(self.trainer, self.step.mode):
            said = f"comparing the trainer's own loss: {sizes}, {passes}"
            self.trainer.padding.handles[0].say_once(said, f"compared in {self.step.mode}", tell=say)

    def _as_configured(self, batch: dict[str, Any]) -> _Values:
        budget, task = self.trainer.padding.settings.max_tokens_per_batch, self.trainer.padding.task
        if budget is not None:  # two parts or more, and two items in one of them
            lengths = task.padded_batches(batch)[0]["attention_mask"].sum(1).view(task.rows_per_item, -1).sum(0)
            *_, longest = ordered = sorted(lengths.tolist())
            budget = min(budget, max(longest, sum(ordered[:2]) if len(ordered) > 2 else longest))
        return self._values(batch, budget)

    def _padded(self, batches: _Weighted, on_embeddings: _Hook = None, at_padding: Filling | None = None) -> _Values:
        """The weighted sum of the steps on `batches`, within [`without_packing`]."""
        with without_packing(self.trainer.padding.handles, on_embeddings, at_padding):
            steps = [(weight, self._values(batch, None)) for weight, batch in batches]
        gradients = [weight * step.gradient for weight, step in steps if step.gradient is not None]
        return _Values(sum(weight * step.loss for weight, step in steps), sum(gradients) if gradients else None)

    def _roundings(self, batches: _Weighted, reference: _Values) -> Iterator[list[tuple[float, float]]]:
        """
        Differences of right steps from the `reference`: none at first; then those with embeddings one rounding away.

        In half precision five, one of them with another attention: of fewer draws, the largest is often too small.
        """
        attentions = [None, other_attention(self.trainer.padding.handles[0]), None, None, None]
        yield (found := [])
        for attention in attentions[: 5 if self.dtype.itemsize < 4 else 1]:
            with within(attention=attention):
                rounded = self._padded(batches, partial(_one_rounding_away, self.dtype, self.draw))
            found.append(rounded.distance(reference))
            yield found

    def _weights(self, is_even: bool, batch: dict[str, Any], items: tuple[dict[str, Any], ...]) -> list[float] | None:
        """
        The weights of the items in the loss of `batch` in training; `None` if it may not be a sum over them, on any
        process.
        """
        padding = self.trainer.padding
        # A rotary embedding that depends on the longest row of a forward; virtual tokens with padding after them.
        anatomies = [handle.anatomy for handle in padding.handles]
        depends_on_rows = any(a.length_dependent_ropes or a.has_virtual_tokens for a in anatomies)
        needs_all = type(padding.task).around_chunks is not Task.around_chunks  # KTO's KL term needs all rows
        reason = padding.budget.why_all_rows() or gradient_hook_name(self.trainer)
        is_sum = not (self.step.mode == "eval" or depends_on_rows or needs_all or reason is not None)
        weights = [padding.task.chunk_weight(item, batch, self.num_items) for item in items] if is_sum else [None]
        # Losses gather metrics, so processes compute equally many steps; a hook may be on one of them only.
        is_sum = is_even and all(weight is not None for weight in weights)
        return None if on_any_process(self.trainer, not is_sum) else [float(weight) for weight in weights]

    def _values(self, batch: dict[str, Any], budget: int | None) -> _Values:
        """
        Loss and gradient of the step on `batch` within a token budget. An error of one process is raised on all.

        The others would wait in a backward or in a gather of metrics, so each process first computes its loss alone.
        Processes that shard a model also meet in forwards: there, only an error after the last forward is raised on
        all. Calls of `torch.distributed` in a user's loss still wait.
        """
        failed = None
        if self.trainer.accelerator.num_processes > 1:
            try:
                self._values_of_process(batch, budget, is_local=True)
            except Exception as error:
                failed = error
                if is_sharded(self.trainer):  # others may wait in a forward: the run may hang or abort below
                    logger.error("A compared step raised an error.", exc_info=True, main_process_only=False)
            # If all processes failed, the loss may expect a wrapped model: the step itself shows whether it runs.
            if on_any_process(self.trainer, failed is not None) and on_any_process(self.trainer, failed is None):
                raise failed or RuntimeError("another process raised an error")
        return self._values_of_process(batch, budget)

    def _values_of_process(self, batch: dict[str, Any], budget: int | None, is_local: bool = False) -> _Values:
        """[`_values`] on this process; `is_local`: without gradient, and without waiting for other processes."""
        trainer, padding, step, model = self.trainer, self.trainer.padding, self.step, self.step.model
        with saved_state(trainer), contextlib.ExitStack() as stack:
            stack.enter_context(within(stats=PaddingStats()))
            stack.enter_context(temporarily_set(padding, running=None, in_steps=(padding.budget,)))
            stack.enter_context(temporarily_set(padding.settings, max_tokens_per_batch=budget))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            batch = dict(batch) if isinstance(step.inputs, dict) else type(step.inputs)(dict(batch))
            if self.gradients and not is_local:
                vars(trainer).setdefault("current_gradient_accumulation_steps", 1)  # Trainer sets it in `train`
                loss = step_on_prepared(trainer, model, batch, self.num_items)
                return _Values(float(loss), self._gradient())
            if is_local:
                model = model if is_sharded(trainer) else trainer.accelerator.unwrap_model(model)
                stack.enter_context(local_metrics_only(trainer.accelerator, trainer.accelerator.num_processes))
                stack.enter_context(temporarily_set(padding.budget, _is_in_step=False))  # runs no backward of parts
            loss = trainer.compute_loss(model, batch, **step.arguments)
            return _Values((loss[0] if step.arguments.get("return_outputs") else loss).item(), None)

    def _gradient(self) -> torch.Tensor:
        """Some entries of the gradient of each parameter, all in one row."""
        entries = []
        for parameter in (p for p in self.trainer.model.parameters() if p.requires_grad):
            stride = max(1, -(-parameter.numel() // SAMPLED))
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            entries.append(gradient.flatten()[::stride].float())
        return torch.cat(entries)


@contextlib.contextmanager
def without_packing(
    handles: list[PaddingRemoval], on_embeddings: _Hook = None, at_padding: Filling | None = None
) -> Iterator[None]:
    """
    A block without padding removal, perhaps with a forward hook on the embeddings of the policy.

    With `at_padding`, models and their decoders return its values at padding: packed ones return zeros.
    """
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle.disabled())
            stack.enter_context(number_padded_rows(handle.anatomy.pretrained) or contextlib.nullcontext())
            for module in dict.fromkeys((handle.decoder, handle.anatomy.pretrained)) if at_padding else ():
                hook = of_this_thread(partial(_fill_padding, at_padding))
                stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        if on_embeddings is not None:
            embedding = handles[0].anatomy.pretrained.get_input_embeddings()
            stack.enter_context(embedding.register_forward_hook(of_this_thread(on_embeddings)))
        yield


def precision_in(trainer: PaddingFreeTrainer, model: nn.Module) -> torch.dtype:
    """The lowest precision of the forwards of a model in a trainer."""
    accelerator, precisions = trainer.accelerator, {"bf16": torch.bfloat16, "fp16": torch.float16}
    # `fp16=True` on a CPU computes in float32: accelerate puts no autocast around the forward there.
    casts = accelerator.native_amp or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    dtype = precisions.get(accelerator.mixed_precision) if casts else None
    return dtype or precision_of(model, accelerator.device)


def has_padding(batches: list[dict[str, torch.Tensor]]) -> bool:
    """Whether any row of these batches has padding, by its mask."""
    masks = [mask for batch in batches if isinstance(mask := batch.get("attention_mask"), torch.Tensor)]
    return any(not mask.bool().all() for mask in on_host(*masks))


def other_padding(
    batches: list[dict[str, torch.Tensor]], draw: torch.Generator, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """A forward hook: the embeddings of one of `batches`, `(B, L, H)`, with other tokens' embeddings at padding."""
    for ids, mask in ((batch["input_ids"], batch["attention_mask"]) for batch in batches):
        if args and args[0].shape == ids.shape and torch.equal(args[0], ids):
            order = torch.randperm(mask.numel(), generator=draw)
            others = output.detach().flatten(0, 1)[order.to(mask.device)]
            return torch.where(mask.bool()[..., None], output, others.view_as(output))
    return output


def other_outputs(draw: torch.Generator, x: torch.Tensor) -> torch.Tensor:
    """Other states or logits, `(B, L, H)`: about half of the tokens have zeros, the others random values."""
    scale, direction = (torch.randn(shape, generator=draw) for shape in (x.shape[:2], x.shape[2]))
    return (4 * scale.relu()).to(x)[..., None] * direction.to(x)


def _fill_padding(at_padding: Filling, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: an output with the values of `at_padding` at padding."""
    mask = bind(module.forward, args, kwargs).get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return output

    def filled(x: torch.Tensor) -> torch.Tensor:  # states and logits
        return torch.where(mask[..., None] == 0, at_padding(x), x) if x.shape[:-1] == mask.shape else x

    return tree_map_only(torch.Tensor, filled, output)


def _one_rounding_away(
    dtype: torch.dtype, draw: torch.Generator, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """A forward hook: embeddings with each number one rounding of `dtype` larger or smaller, at random."""
    signs = torch.randint(0, 2, output.shape, generator=draw, dtype=torch.int8) * 2 - 1
    return output + output.detach() * signs.to(output.device) * (torch.finfo(dtype).eps / 2)
