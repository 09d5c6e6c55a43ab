"""
Runs a forward in sub-batches within a token budget, for losses that need the outputs of all rows at once.

[`SubBatches`] runs the rows of a call in sub-batches and returns the outputs of all rows, as one forward would.
With gradients, each sub-batch but the last one is recomputed in the backward pass, one after another: memory holds the
activations of one sub-batch at a time, and the gradient equals the one of a single forward, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSet, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
import transformers
from accelerate.logging import get_logger
from packaging.version import Version
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...core.anatomy import find_decoder, find_multimodal
from ...core.call.batch_cache import BatchVersion
from ...core.call.prefix_states import ForwardStates
from ...core.context import context, within
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan
from ...core.model.older import CACHES
from ...core.remove import packs_now
from ..data.batch_rows import ImageCounts, Parts, image_tensors, select_rows
from .balancing_loss import RouterLogits, balancing_loss, check_balancing_loss, record_router_logits
from .bin_packing import RowSplitter
from .prefix_schedule import PrefixSchedule, run_prefix_forward, with_prefix_states


__all__ = ["SubBatches"]


logger = get_logger(__name__)

_UNREAD = {*CACHES, "image_hidden_states", "image_outputs", "video_outputs", "audio_outputs"}
"""Outputs that no loss reads: caches, and features of images (`image_hidden_states` until transformers 5.23)."""

_SUMS = {"num_correct_tokens", "entropy_sum", "num_valid_tokens"}
"""Sums over the labels of a call, which TRL 1.10 reads."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch in parts: its ids (or embeddings) and mask, and those of each sub-batch."""

    version: BatchVersion
    parts: Parts
    inputs: list[tuple[torch.Tensor, torch.Tensor | None]]

    def calls(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each sub-batch: its rows of values with one entry per row, and all other values."""
        name, parts, calls = _name_of_tokens(call), self.parts, []
        for rows, (tokens, mask) in zip(parts.rows, self.inputs, strict=True):
            of_rows = select_rows(call, rows, parts.count, parts.images)
            if (positions := call.get("position_ids")) is not None and positions.dim() == 3:
                of_rows["position_ids"] = positions[:, rows]  # M-RoPE: `(3, B, L)`, also where `B` is 3
            # The same tensors, not copies: later forwards on them find the layout of the first one.
            calls.append(of_rows | ({name: tokens} if mask is None else {name: tokens, "attention_mask": mask}))
        return calls


@dataclass
class SubBatches:
    """
    Runs the forwards of a batch in sub-batches; forwards on the same tensors are split the same way.

    Args:
        make_splitter (`Callable`):
            Returns the [`RowSplitter`] of the step; called at the first forward outside of a chunk.
        images ([`ImageCounts`], *optional*):
            Images of each row. Without them a forward with images is not split.
        keeps (`bool`, *optional*, defaults to `True`):
            Whether a later forward on the same tensors reuses the split of the first one.
        checked_models (`MutableSet`, *optional*):
            Models whose load-balancing loss was compared with ours; `run` adds to it.
    """

    make_splitter: Callable[[], RowSplitter]
    images: ImageCounts | None = None
    keeps: bool = True
    checked_models: MutableSet[Any] = field(default_factory=WeakSet)
    _batches: list[_Batch] = field(default_factory=list, init=False)  # all that were split so far

    @cached_property
    def splitter(self) -> RowSplitter:
        return self.make_splitter()

    def _split(self, ids: torch.Tensor, mask: torch.Tensor | None) -> _Batch:
        """The sub-batches of a batch with these ids `(B, L)`, or embeddings `(B, L, H)`, and this mask."""
        for batch in self._batches:
            if batch.version.matches(ids, mask):
                return batch
        parts = self.splitter.split(ids, mask, images=self.images)
        inputs = [(ids[rows], None if mask is None else mask[rows]) for rows in parts.rows]
        batch = _Batch(BatchVersion.of(ids, mask), parts, inputs)
        self._batches += [batch] if self.keeps else []
        return batch

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """The output of `forward` for all rows, computed in sub-batches."""
        # For image arguments with other names it is unknown which image belongs to which row.
        other_arguments = {k: v for k, v in call.items() if k != "inputs_embeds" and not k.startswith("pixel_")}
        has_images = find_multimodal(model, find_decoder(model)) is not None and bool(image_tensors(other_arguments))
        if has_images or not self.splitter.can_split(call, len(_tokens(call)), self.images):
            reason = "processes that shard the model meet in its vision tower, but not all of their rows have images"
            if self.splitter.sync_count is None:
                reason = "it is unknown which of its images belong to which row"
            self.leave(model, call, f"{reason}. Lower the batch size")
            return forward(**call)
        batch = self._split(_tokens(call), call.get("attention_mask"))
        if len(batch.inputs) == 1:
            return forward(**call)
        model_forward = _ModelForward(model, forward, _wants_router_logits(model, call))
        calls = batch.calls(call)
        layouts = model_forward.layouts(batch.parts.plan, calls)
        # The backward pass begins with the last sub-batch, so its activations are kept and not recomputed.
        *recomputed, last = zip(calls, layouts, strict=True)
        if torch.is_grad_enabled():
            results = [checkpoint(model_forward.run, *args, use_reentrant=False) for args in recomputed]
        else:
            results = [model_forward.run(*args) for args in recomputed]
        outputs, router_logits = zip(*results, model_forward.run(*last), strict=True)
        if not _has_loss_of_logits(model, outputs[0], calls[0]):
            reason = "it returns a loss that is not a known function of its logits. Compute the loss from the logits"
            self.leave(model, call, reason)
            return forward(**call)
        output = _concatenated(model, outputs, calls, torch.cat(batch.parts.rows))
        if outputs[0].get("aux_loss") is not None:
            masks = [sub_call.get("attention_mask") for sub_call in calls]
            if model not in self.checked_models:
                check_balancing_loss(model, router_logits[0], masks[0], outputs[0]["aux_loss"])
                self.checked_models.add(model)
            output["aux_loss"] = balancing_loss(model, router_logits, masks)
        if output.get("loss") is not None and output.get("logits") is not None:
            output["loss"] = _loss_of_logits(model, output, call)
        elif output.get("loss") is not None:
            output["loss"] = output["loss"] + _balancing_term(model, output)
        return output

    def leave(self, model: PreTrainedModel, call: dict[str, Any], reason: str) -> None:
        """Warn once of a forward that is not split, for any number of tokens."""
        ids = call.get("input_ids")
        if ids is None or ids.numel() > self.splitter.budget:
            logger.warning_once(
                f"`max_tokens_per_batch` was not applied to a forward of {type(model).__name__}, which runs "
                f"unsplit: {reason}, or leave the budget out. (Shown once.)"
            )


@dataclass(frozen=True, eq=False)
class _ModelForward:
    """The forward of a model in sub-batches; `with_router_logits` if it returns router logits."""

    model: Any
    forward: Callable[..., Any]
    with_router_logits: bool
    disabled: frozenset[Any] = field(default_factory=lambda: context().disabled)

    def layouts(self, plan: PrefixPlan | None, calls: list[dict[str, Any]]) -> list[PrefixedLayout | None]:
        """Compute the prefixes that sub-batches share; returns the layouts of the sub-batches with these states."""
        # The plan compared ids only, but positions distinguish tokens, too.
        if plan is None or calls[0].get("position_ids") is not None or not packs_now(self.model):
            return [None] * len(calls)
        schedule = PrefixSchedule(plan, detaches=False)
        return [schedule.next_part(partial(self._prefix_states, call)) for call in calls]

    def _prefix_states(
        self, call: dict[str, Any], layout: PrefixedLayout, reads: list[ForwardStates]
    ) -> ForwardStates:
        """The states of a prefix. Like a sub-batch, its forward is recomputed in backward."""
        with_graph = torch.is_grad_enabled()
        outputs = {"output_router_logits": True} if self.with_router_logits else {}

        def run() -> ForwardStates:
            with within(own_checkpoint=True):
                states = run_prefix_forward(find_decoder(self.model), call | outputs, layout, reads)
            # The gradients of all sub-batches are added up in these tensors, so they are float32.
            return states.map(torch.Tensor.float) if with_graph else states

        return checkpoint(run, use_reentrant=False) if with_graph else run()

    def run(self, call: dict[str, Any], layout: PrefixedLayout | None) -> tuple[Any, RouterLogits]:
        """The output of a sub-batch, and its router logits."""
        prefixes = with_prefix_states(call, layout) if layout is not None else nullcontext()
        # The backward runs this again, outside of the blocks of the first forward: `disabled` is set as it was there.
        # `runner=None`, because a sub-batch must not be split again.
        with within(disabled=self.disabled, runner=None, own_checkpoint=True), prefixes:
            if not self.with_router_logits:
                return self.forward(**call), None
            with record_router_logits(self.model) as recorded:
                output = self.forward(**call)
            return output, recorded[0] if len(recorded) == 1 else None


def _name_of_tokens(call: dict[str, Any]) -> str:
    return "input_ids" if call.get("input_ids") is not None else "inputs_embeds"


def _tokens(call: dict[str, Any]) -> torch.Tensor:
    """The ids `(B, L)` or embeddings `(B, L, H)` of a call."""
    return call[_name_of_tokens(call)]


def _wants_router_logits(model: torch.nn.Module, call: dict[str, Any]) -> bool:
    wanted = call.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if wanted is None else wanted)


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def _concatenated(
    model: PreTrainedModel, outputs: Sequence[Any], calls: list[dict[str, Any]], rows: torch.Tensor
) -> Any:
    """
    The output of the whole call, without the losses of its logits and of its experts.

    `rows`: the numbers of the rows, sub-batch after sub-batch.

    Raises:
        ValueError: If an output has neither a value for each row nor its own rule.
    """
    # Inverse permutation: outputs are in the order of the sub-batches; this restores the order of the batch.
    inverse, output = rows.argsort(), outputs[0]
    for name, value in list(output.items()):
        values = [sub_output.get(name) for sub_output in outputs]  # without images there are no features
        if all(_has_rows(v, len(_tokens(call))) for v, call in zip(values, calls, strict=True)):
            output[name] = torch.cat(values).index_select(0, inverse)
        elif name == "aux_loss" or (name == "loss" and outputs[0].get("logits") is not None):
            continue
        elif name in _UNREAD:
            output[name] = None
        elif name == "router_logits":
            output[name] = tuple(_tokens_in_order(layer, calls, inverse) for layer in zip(*values, strict=True))
        elif isinstance(value, tuple) and all(
            _has_rows(x, len(_tokens(c))) for v, c in zip(values, calls, strict=True) for x in v
        ):
            output[name] = tuple(torch.cat(layer).index_select(0, inverse) for layer in zip(*values, strict=True))
        elif name == "loss" and value is not None and value.dim() == 0 and _num_labels(calls[0]) is not None:
            terms = [_balancing_term(model, sub_output) for sub_output in outputs]
            output[name] = _merged_loss([x - term for x, term in zip(values, terms, strict=True)], calls)
        elif name in _SUMS and value is not None:
            output[name] = torch.stack(values).sum(0)
        elif value is not None:
            raise ValueError(
                f"`max_tokens_per_batch` computes a batch in {len(calls)} sub-batches, and `{name}` of the "
                f"{type(output).__name__} is a {type(value).__name__} without one entry for each row. "
                "Leave the budget out, or request fewer outputs."
            )
    return output


def _tokens_in_order(
    values: tuple[torch.Tensor, ...], calls: list[dict[str, Any]], inverse: torch.Tensor
) -> torch.Tensor:
    """Values of the tokens of sub-batches, `(b * L, ...)` each, in the order of the rows of the batch."""
    by_rows = [v.unflatten(0, _tokens(call).shape[:2]) for v, call in zip(values, calls, strict=True)]
    return torch.cat(by_rows).index_select(0, inverse).flatten(0, 1)


def _merged_loss(losses: list[torch.Tensor], calls: list[dict[str, Any]]) -> torch.Tensor:
    """Without logits (TRL's head, Liger) a loss is a mean over labels, or a sum divided by `num_items_in_batch`."""
    if calls[0].get("num_items_in_batch") is not None:
        return torch.stack(losses).sum()
    counts: Any = torch.stack([_num_labels(call) for call in calls])
    return (torch.stack(losses) * counts).sum() / counts.sum().clamp(min=1)


def _num_labels(call: dict[str, Any]) -> Any:
    """The number of labels of a call that has any; `shift_labels` take the place of `labels`."""
    labels, shifted = call.get("labels"), call.get("shift_labels")
    scored = shifted if shifted is not None else None if labels is None else labels[:, 1:]
    return None if scored is None else (scored != -100).sum()


def _loss_of_logits(model: PreTrainedModel, output: Any, call: dict[str, Any]) -> torch.Tensor:
    """The loss that transformers' models compute from their logits, and from the balancing loss of their experts."""
    given = {name: call[name] for name in ("num_items_in_batch", "shift_labels") if name in call}
    vocab_size = output["logits"].shape[-1]
    loss = model.loss_function(logits=output["logits"], labels=call["labels"], vocab_size=vocab_size, **given)
    return loss + _balancing_term(model, output)


def _balancing_term(model: PreTrainedModel, output: Any) -> torch.Tensor | float:
    """The term that the balancing loss of experts adds to the loss of an output."""
    if output.get("aux_loss") is None:
        return 0.0
    # Some models read the weight from their configuration only. TRL's head before 1.16, whose outputs count tokens,
    # does the same under transformers 5.
    weights = [getattr(x, "router_aux_loss_coef", None) for x in (model, model.config.get_text_config())]
    if output.get("num_correct_tokens") is not None and Version(transformers.__version__).major > 4:
        weights.reverse()
    return next((weight for weight in weights if weight is not None), 0.0) * output["aux_loss"]


@torch.no_grad()
def _has_loss_of_logits(model: PreTrainedModel, output: Any, call: dict[str, Any]) -> bool:
    """Whether the loss of an output follows from its logits: the loss of all rows then follows from all logits."""
    loss, logits, labels = output.get("loss"), output.get("logits"), call.get("labels")
    if loss is None or logits is None:
        return True
    if labels is None or logits.dim() != 3 or labels.shape != logits.shape[:-1]:
        return False
    return torch.allclose(_loss_of_logits(model, output, call).to(loss.dtype), loss, rtol=1e-3)
