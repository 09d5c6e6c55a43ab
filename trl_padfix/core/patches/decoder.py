"""The patch on the forward of a decoder: it reads a call, plans it, runs it, and unpacks its output to the batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from ..call.arguments import DecoderInputs, padded_output
from ..call.calls import CALL, ModelCall, model_call, packed_call, running
from ..call.prepared_masks import with_added_masks
from ..context import context, outside_calls
from ..errors import UnpackableCallError
from ..handle import PaddingRemoval
from ..model.older import older_attributes
from ..model.patching import BatchPatch
from .plan import CallPlanner, Plan


__all__ = ["DecoderPatch"]


class DecoderPatch(BatchPatch):
    """Packs the arguments of the decoder, runs it on the packed row, and unpacks its output."""

    attachment: PaddingRemoval
    runs_on_view = True

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.planner = CallPlanner(self, attachment)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        model_call(self.module).returned.append(None)
        if context().attention:
            call = self.bind(args, kwargs)
            # The caller built its masks for the attention in the config; eager attention adds them to its scores.
            if context().attention == "eager":
                dtype = next(self.module.parameters()).dtype
                call["attention_mask"] = with_added_masks(call.get("attention_mask"), dtype)
            return self.on_view()(**call)
        # A call from within a packed forward is a forward of its own.
        with nullcontext() if packed_call(self.module) is None else outside_calls():
            return super().call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        """The output of a call: packed, or padded if there is nothing to pack, or if it cannot be packed."""
        outer, plan = model_call(self.module), None
        inputs = DecoderInputs.read(self.bind(args, kwargs), self.attachment, outer, self.planner.is_causal)
        try:
            # Nearly all checks that can refuse the call come before its forward; the others are of its layers.
            if (plan := self.planner.plan(inputs)) is not None:
                output = self._run(plan, outer)
                self.attachment.count(plan.layout)
                return output
        except UnpackableCallError as error:
            self.planner.leave_padded(inputs, plan, error)
        return padded_output(self.wrapped(*args, **kwargs), outer, inputs.given_mask)

    def _run(self, plan: Plan, outer: ModelCall) -> Any:
        """The output of a planned call for the padded batch."""
        if plan.is_padded:
            return padded_output(self.wrapped(**plan.arguments), outer)
        output = None
        if plan.call is not None:
            # GPT-2 warns of padding if a packed row begins or ends with a pad token, which may be the EOS token.
            quiet = {"warn_if_padding_and_no_attention_mask": lambda *_: None}
            forward = self.on_view(**quiet, **older_attributes(self.module, {CALL: plan.call}))
            with running(plan.call):
                output = forward(**plan.arguments)
            self.attachment.remember(plan.call)
        return plan.unpack(output, outer)
