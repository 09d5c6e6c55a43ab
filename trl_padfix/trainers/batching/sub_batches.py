"""
Runs a forward in sub-batches within a token budget, for losses that need the outputs of all rows at once.

[`SubBatches`] runs the rows of a call in sub-batches and returns the outputs of all rows (`merged_output.py`), as one
forward would. With gradients, each sub-batch but the last one is recomputed in the backward pass, one after another:
memory holds the activations of one sub-batch at a time, and the gradient equals the one of a single forward, up to
rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...core.anatomy import find_decoder, find_multimodal
from ...core.call.batch_cache import BatchVersion
from ...core.call.prefix_states import ForwardStates
from ...core.context import context, within
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan
from ..data.batch_rows import BatchParts, ImageCounts, image_tensors, select_rows
from .balancing_loss import record_router_logits
from .bin_packing import RowSplitter
from .merged_output import LossChecks, SubBatchOutput, merge_outputs
from .prefix_schedule import PrefixSchedule, can_read_prefixes, run_prefix_forward, with_prefix_states


__all__ = ["SubBatches"]


logger = get_logger(__name__)

_UNKNOWN_LOSS = "it returns a loss that is not a known function of its logits. Compute the loss from the logits"


@dataclass(frozen=True, eq=False)
class _SplitBatch:
    """A batch in parts: its ids (or embeddings) and mask as they were, and those of each sub-batch by name."""

    version: BatchVersion
    parts: BatchParts
    inputs: list[dict[str, torch.Tensor]]

    def calls(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each sub-batch: its rows of values with one entry per row, and all other values."""
        calls, positions = [], call.get("position_ids")
        for rows, inputs in zip(self.parts.rows, self.inputs, strict=True):
            of_rows = select_rows(call, rows, self.parts.count, self.parts.images)
            if positions is not None and positions.dim() == 3:
                of_rows["position_ids"] = positions[:, rows]  # M-RoPE: `(3, B, L)`, also where `B` is 3
            calls.append(of_rows | inputs)  # not copies: later forwards on these tensors find the layout of the first
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
        loss_checks ([`LossChecks`], *optional*):
            What earlier steps have shown of the losses of models; `run` adds to it.
    """

    make_splitter: Callable[[], RowSplitter]
    images: ImageCounts | None = None
    loss_checks: LossChecks = field(default_factory=LossChecks)
    # The last ones: KTO's loss has two, which the reference gets after the policy.
    _batches: deque[_SplitBatch] = field(default_factory=partial(deque, maxlen=4), init=False)

    @cached_property
    def splitter(self) -> RowSplitter:
        return self.make_splitter()

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """The output of `forward` for all rows, computed in sub-batches."""
        reason = self._why_whole(model, call)
        if reason is None:
            batch = self._split(call)
            if len(batch.inputs) == 1:
                return forward(**call)
            output = self._run_split(batch, _ModelForward(model, forward, _wants_router_logits(model, call)), call)
            if output is not None:
                return output
            reason = _UNKNOWN_LOSS
        self.leave(model, call, reason)
        return forward(**call)

    def leave(self, model: PreTrainedModel, call: dict[str, Any], reason: str) -> None:
        """Warn once of a forward that is not split, for any number of tokens."""
        ids = call.get("input_ids")
        if ids is None or ids.numel() > self.splitter.budget:
            logger.warning_once(
                f"`max_tokens_per_batch` was not applied to a forward of {type(model).__name__}, which runs "
                f"unsplit: {reason}, or leave the budget out. (Shown once.)"
            )

    def _why_whole(self, model: torch.nn.Module, call: dict[str, Any]) -> str | None:
        """Why a call cannot be split, and a remedy; `None` if it may be."""
        if self.loss_checks.found_unknown(model, call):
            return _UNKNOWN_LOSS
        # For image arguments with other names it is unknown which image belongs to which row.
        other_arguments = {k: v for k, v in call.items() if k != "inputs_embeds" and not k.startswith("pixel_")}
        has_images = find_multimodal(model, find_decoder(model)) is not None and bool(image_tensors(other_arguments))
        if not has_images and self.splitter.can_split(call, len(call[_name_of_tokens(call)]), self.images):
            return None
        reason = "processes that shard the model meet in its vision tower, but not all of their rows have images"
        if self.splitter.sync_count is None:
            reason = "it is unknown which of its images belong to which row"
        return f"{reason}. Lower the batch size"

    def _split(self, call: dict[str, Any]) -> _SplitBatch:
        name, mask = _name_of_tokens(call), call.get("attention_mask")
        for batch in self._batches:
            if batch.version.matches(call[name], mask):
                return batch
        parts = self.splitter.split(call[name], mask, images=self.images)
        tensors = {name: call[name]} | ({} if mask is None else {"attention_mask": mask})
        inputs = [{name: x[rows] for name, x in tensors.items()} for rows in parts.rows]
        self._batches.append(_SplitBatch(BatchVersion.of(call[name], mask), parts, inputs))
        return self._batches[-1]

    def _run_split(self, batch: _SplitBatch, forward: _ModelForward, call: dict[str, Any]) -> Any:
        """The output for all rows of a batch; `None` after the first sub-batch if its loss is unknown."""
        calls, outputs = batch.calls(call), []
        for arguments in zip(calls, forward.layouts(batch.parts.plan, calls), strict=True):
            # The backward pass begins with the last sub-batch, so its activations are kept and not recomputed.
            is_last = len(outputs) == len(calls) - 1
            outputs.append(forward.run(*arguments) if is_last else _recomputed(forward.run, *arguments))
            maximum = self.splitter.sync_count or int
            if len(outputs) == 1 and not self.loss_checks.check(forward.model, outputs[0], maximum):
                return None
        return merge_outputs(forward.model, call, outputs, batch.parts.rows)


@dataclass(frozen=True, eq=False)
class _ModelForward:
    """The forward of a model in sub-batches; `with_router_logits` if it returns router logits."""

    model: Any
    forward: Callable[..., Any]
    with_router_logits: bool
    disabled: frozenset[Any] = field(default_factory=lambda: context().disabled)

    def layouts(self, plan: PrefixPlan | None, calls: list[dict[str, Any]]) -> Iterable[PrefixedLayout | None]:
        """The layouts of sub-batches, one after the other, with the states of the prefixes that they share."""
        if plan is None or not can_read_prefixes(self.model, calls[0]):
            return [None] * len(calls)
        schedule = PrefixSchedule(plan, detaches=False)
        # Not a list: without gradients the states of a prefix are freed after its last user.
        return (schedule.next_part(partial(self._prefix_states, call)) for call in calls)

    def _prefix_states(
        self, call: dict[str, Any], layout: PrefixedLayout, reads: list[ForwardStates]
    ) -> ForwardStates:
        """The states of a prefix. Like a sub-batch, its forward is recomputed in backward."""
        outputs = {"output_router_logits": True} if self.with_router_logits else {}

        def run() -> ForwardStates:
            with within(own_checkpoint=True):
                states = run_prefix_forward(find_decoder(self.model), call | outputs, layout, reads)
            # The gradients of all sub-batches are added up in these tensors, so they are float32.
            return states.map(torch.Tensor.float) if torch.is_grad_enabled() else states

        return _recomputed(run)

    def run(self, call: dict[str, Any], layout: PrefixedLayout | None) -> SubBatchOutput:
        """The output of a sub-batch."""
        prefixes = with_prefix_states(call, layout) if layout is not None else nullcontext()
        recording = record_router_logits(self.model) if self.with_router_logits else nullcontext([None])
        # The backward runs this again, outside of the blocks of the first forward: `disabled` is set as it was there.
        # `runner=None`, because a sub-batch must not be split again.
        with within(disabled=self.disabled, runner=None, own_checkpoint=True), prefixes, recording as router_logits:
            output = self.forward(**call)
        return SubBatchOutput(call, output, router_logits[0] if len(router_logits) == 1 else None)


def _recomputed(run: Callable[..., Any], *args: Any) -> Any:
    """The result of `run`, which a backward computes again; without gradients there is none."""
    return checkpoint(run, *args, use_reentrant=False) if torch.is_grad_enabled() else run(*args)


def _name_of_tokens(call: dict[str, Any]) -> str:
    return "input_ids" if call.get("input_ids") is not None else "inputs_embeds"


def _wants_router_logits(model: torch.nn.Module, call: dict[str, Any]) -> bool:
    wanted = call.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if wanted is None else wanted)
