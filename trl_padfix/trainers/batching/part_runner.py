"""
Runs the forwards of a step in parts within a token budget.

The rows of a batch are a list of parts ([`BatchParts`]), each with its layout and the prefixes that it reads. A
[`PartRunner`] walks this list in one of two ways:

- part by part: each part has a loss and a backward of its own, and a forward gets the rows of the running part;
- all rows: a forward gets all rows, runs part after part, and returns the outputs of all rows (`merged_output.py`), as
  one forward would. With gradients, each part but the last one is recomputed in the backward pass, one after another.

Either way memory holds the activations of one part at a time, and the gradient equals the one of a single forward, up
to rounding. [`PrefixSchedule`] computes the prefixes that the parts share.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel

from ...core.anatomy import find_decoder, find_multimodal
from ...core.call.batch_cache import BatchVersion
from ...core.context import context, within
from ...core.errors import PaddingRemovalError
from ...core.layout.shared_prefixes import PrefixedLayout
from ..data.batch_rows import BatchParts, ImageCounts, select_rows
from .balancing_loss import record_router_logits
from .bin_packing import RowSplitter
from .merged_output import LossChecks, SubBatchOutput, merge_outputs
from .prefix_schedule import PrefixSchedule, can_read_prefixes, reading_prefixes, recomputed


__all__ = ["PartRunner"]


logger = get_logger(__name__)

_MISSING_PART = (
    "With `max_tokens_per_batch` and `prefix_sharing` the sub-batches of a batch share their common prefixes. The "
    "loss called the model for some sub-batches and not for others, or with tensors that are not from the "
    "batch, so gradients are missing. Leave `max_tokens_per_batch` out, or set `prefix_sharing=False`."
)

_UNKNOWN_LOSS = "it returns a loss that is not a known function of its logits. Compute the loss from the logits"


@dataclass(frozen=True, eq=False)
class _SplitBatch:
    """A batch in parts: its ids (or embeddings) and mask as they were, and those of each part by name."""

    version: BatchVersion
    parts: BatchParts
    inputs: list[dict[str, torch.Tensor]]

    def calls(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each part: its rows of values with one entry per row, and all other values."""
        calls, positions = [], call.get("position_ids")
        for rows, inputs in zip(self.parts.rows, self.inputs, strict=True):
            of_rows = select_rows(call, rows, self.parts.count, self.parts.images)
            if positions is not None and positions.dim() == 3:
                of_rows["position_ids"] = positions[:, rows]  # M-RoPE: `(3, B, L)`, also where `B` is 3
            calls.append(of_rows | inputs)  # not copies: later forwards on these tensors find the layout of the first
        return calls


@dataclass
class PartRunner:
    """
    Runs the forwards of models in parts.

    Args:
        splitter ([`RowSplitter`]):
            Splits the rows of a forward of all rows; forwards on the same tensors are split once.
        images ([`ImageCounts`], *optional*):
            Images of each row. Without them a forward of all rows with images is not split.
        loss_checks ([`LossChecks`], *optional*):
            What earlier steps have shown of the losses of models; `run` adds to it.
        parts ([`BatchParts`], *optional*):
            The parts of the batch, if it is computed part by part; [`PartRunner.start`] starts each of them.
        with_head (`bool`, *optional*, defaults to `False`):
            Whether prefixes run through the whole model, not only its decoder: FSDP2 gathers a head with the last
            norm.
    """

    splitter: RowSplitter
    images: ImageCounts | None = None
    loss_checks: LossChecks = field(default_factory=LossChecks)
    parts: BatchParts | None = None
    with_head: bool = False
    index: int = field(default=-1, init=False)
    """Number of the running part."""
    _inputs: BatchVersion | None = field(default=None, init=False)
    _schedules: defaultdict[Any, list[PrefixSchedule]] = field(default_factory=partial(defaultdict, list), init=False)
    # The last ones: KTO's loss has two, which the reference gets after the policy.
    _batches: deque[_SplitBatch] = field(default_factory=partial(deque, maxlen=4), init=False)

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """The output of `forward` for the rows of `call`: those of the running part, or all rows."""
        if self.parts is not None:
            with reading_prefixes(call, self._layout_of_part(self.parts, model, forward, call)):
                return forward(**call)
        if (reason := self._why_whole(model, call)) is None:
            batch = self._split(call)
            if len(batch.inputs) == 1:
                return forward(**call)
            is_known = not self.loss_checks.found_unknown(model, call)
            if is_known and (output := self._run_all_rows(batch, model, forward, call)) is not None:
                return output
            reason = _UNKNOWN_LOSS
        self.leave(model, call, reason)
        return forward(**call)

    def leave(self, model: PreTrainedModel, call: dict[str, Any], reason: str) -> None:
        """Warn once of a forward of all rows that is not split; a part is within the budget, packed or not."""
        ids = call.get("input_ids")
        if self.parts is None and (ids is None or ids.numel() > self.splitter.budget):
            logger.warning_once(
                f"`max_tokens_per_batch` was not applied to a forward of {type(model).__name__}, which runs "
                f"unsplit: {reason}, or leave the budget out. (Shown once.)"
            )

    # -- part by part

    def start(self, index: int, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Set the running part, with its ids and mask."""
        self.index = index
        self.set_inputs(ids, mask)

    def set_inputs(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """
        Set ids and mask of the running part; a call of a model with these very tensors runs it.

        A loss may concatenate them again, from prompts and completions, into tensors of the same shape.
        """
        plan = self.parts and self.parts.plan
        if plan is not None and tuple(ids.shape) == plan.layouts[self.index].batch_shape:
            self._inputs = BatchVersion.of(ids, mask)

    def _layout_of_part(
        self, parts: BatchParts, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]
    ) -> PrefixedLayout | None:
        """
        The layout of a call that belongs to a schedule; prefixes are computed here. `None` for other calls.

        In each part the first call of a model, with or without gradients, belongs to one schedule, the second call to
        another one.
        """
        is_part = self._inputs is not None and self._inputs.matches(call.get("input_ids"), call.get("attention_mask"))
        if parts.plan is None or not is_part or not can_read_prefixes(model, call):
            return None
        schedules = self._schedules[model, torch.is_grad_enabled()]
        if self.index == 0:
            schedules.append(PrefixSchedule(parts.plan, detaches=torch.is_grad_enabled()))
        schedule = next((schedule for schedule in schedules if schedule.index < self.index), None)
        if schedule is None:
            return None
        if schedule.index != self.index - 1:
            raise PaddingRemovalError(_MISSING_PART)
        # With a head the whole model, which must call it.
        if self.with_head:
            return schedule.next_part(forward, call, logits_to_keep=1)
        return schedule.next_part(find_decoder(model), call)

    def check(self) -> None:
        """
        Raises:
            PaddingRemovalError: If a schedule did not reach its last part, so that gradients are missing.
        """
        if any(schedule.index != self.index for schedule in chain(*self._schedules.values())):
            raise PaddingRemovalError(_MISSING_PART)

    # -- all rows

    def _why_whole(self, model: torch.nn.Module, call: dict[str, Any]) -> str | None:
        """Why a call cannot be split, and a remedy; `None` if it may be."""
        # For image arguments with other names it is unknown which image belongs to which row.
        others = (v for k, v in call.items() if k != "inputs_embeds" and not k.startswith("pixel_"))
        has_images = any(isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1 for v in others)
        has_images = has_images and find_multimodal(model, find_decoder(model)) is not None
        if not has_images and self.splitter.can_split(call, len(call[_name_of_tokens(call)]), self.images):
            return None
        reason = "processes that shard the model meet in its vision tower, but not all of their rows have images"
        if not self.splitter.meets_in_tower:
            reason = "it is unknown which of its images belong to which row"
        return f"{reason}. Lower the batch size"

    def _split(self, call: dict[str, Any]) -> _SplitBatch:
        name, mask = _name_of_tokens(call), call.get("attention_mask")
        for batch in self._batches:
            if batch.version.matches(call[name], mask):
                return batch
        tensors = {name: call[name]} | ({} if mask is None else {"attention_mask": mask})
        # A reference may come before the policy, which needs gradients of embeddings.
        with torch.inference_mode(False), torch.enable_grad():
            parts = self.splitter.split(call[name], mask, images=self.images)
            inputs = [{name: x[rows] for name, x in tensors.items()} for rows in parts.rows]
        self._batches.append(_SplitBatch(BatchVersion.of(call[name], mask), parts, inputs))
        return self._batches[-1]

    def _run_all_rows(self, batch: _SplitBatch, model: Any, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """The output for all rows of a batch; `None` after the first part if its loss is unknown."""
        calls, plan, outputs = batch.calls(call), batch.parts.plan, []
        schedule = PrefixSchedule(plan, detaches=False) if plan and can_read_prefixes(model, calls[0]) else None
        if (wants_routers := call.get("output_router_logits")) is None:
            wants_routers = getattr(model.config.get_text_config(), "output_router_logits", False)
        routed = {"output_router_logits": True} if wants_routers else {}
        run = partial(_run_part, model, forward, bool(routed), context().disabled)
        for part in calls:
            layout = schedule and schedule.next_part(find_decoder(model), part | routed)
            # The backward pass begins with the last part, so its activations are kept and not recomputed.
            outputs.append(run(part, layout) if part is calls[-1] else recomputed(run, part, layout))
            if len(outputs) == 1 and not self.loss_checks.check(model, outputs[0], self.splitter.sync_count):
                return None
        return merge_outputs(model, call, outputs, batch.parts.rows)


def _run_part(
    model: Any,
    forward: Callable[..., Any],
    with_router_logits: bool,
    disabled: frozenset[Any],
    call: dict[str, Any],
    layout: PrefixedLayout | None,
) -> SubBatchOutput:
    """The output of a part among all rows."""
    # The backward runs this again, outside of the blocks of the first forward: `disabled` is set as it was there.
    # `runner=None`, because a part must not be split again.
    with (
        within(disabled=disabled, runner=None, own_checkpoint=True),
        reading_prefixes(call, layout),
        record_router_logits(model) if with_router_logits else nullcontext([None]) as router_logits,
    ):
        output = forward(**call)
    return SubBatchOutput(call, output, router_logits[0] if len(router_logits) == 1 else None)


def _name_of_tokens(call: dict[str, Any]) -> str:
    return "input_ids" if call.get("input_ids") is not None else "inputs_embeds"
