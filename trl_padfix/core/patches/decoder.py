"""The patch on the forward of a decoder: it reads a call, plans it, runs it, and unpacks its output to the batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers.modeling_outputs import ModelOutput

from ..call.arguments import DecoderInputs, padded_output, unpack_output
from ..call.calls import LAYOUT, ModelCall, PackedCall, model_call, packed_call, running
from ..call.prepared_masks import with_added_masks
from ..context import context, in_backward, outside_calls
from ..errors import UnpackableCallError
from ..handle import PaddingRemoval
from ..layout.shared_prefixes import PrefixedLayout
from ..mixers.row_buckets import calls_of_layers
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
        handle, outer, plan = self.attachment, model_call(self.module), None
        inputs = DecoderInputs.read(self.bind(args, kwargs), handle, outer, self.planner.is_causal)
        # Without a cache this is no generation, and other processes may pack their batches.
        matched = inputs.arguments if inputs.arguments.get("use_cache") is False else None
        try:
            # Nearly all checks that can refuse the call come before its forward; the others are of its layers.
            plan = self.planner.plan(inputs)
            if plan is not None:
                output = self._run(plan, outer)
                if not in_backward():  # which recomputes the forwards of sub-batches
                    handle.running_stats.add(plan.layout)
                return output
        except UnpackableCallError as error:
            # From the first layer: its checkpoint could not recompute it packed. A padded forward has no local tokens.
            if plan is not None and plan.tokens.is_divided:
                raise
            handle.run_padded(error)
            tokens = {"input_ids": inputs.ids, "inputs_embeds": inputs.embeds}
            matched = {k: x for k, x in tokens.items() if x is not None}
        if matched is not None:
            self.planner.match_other_processes(matched)
        return padded_output(self.wrapped(*args, **kwargs), outer, inputs.given_mask)

    def _run(self, plan: Plan, outer: ModelCall) -> Any:
        """The output of a planned call for the padded batch."""
        if plan.is_padded:
            self.planner.match_other_processes(plan.arguments)
            return padded_output(self.wrapped(**self.planner.accepted(plan.arguments)), outer)
        states = plan.prefix_states
        if plan.call is not None:
            output = self._run_packed(plan.call, plan.arguments)
            output = output if states is None else states.prepend_outputs(output, plan.call.tokens.count)
        else:
            assert states is not None
            output = states.prefix_outputs()
        return _unpack(output, plan, outer)

    def _run_packed(self, call: PackedCall, arguments: dict[str, Any]) -> Any:
        """The output of the decoder for the tokens of a packed forward."""
        if call.one_bucket:
            # Before the forward, as in `match_other_processes`: all processes gather parameters in the same order.
            calls_of_layers(call, one_bucket=True)
        forward = self.on_view(**older_attributes(self.module, {LAYOUT: call}))
        with running(call):
            output = forward(**arguments)
        self.attachment.remember(call)
        return output


def _unpack(output: Any, plan: Plan, outer: ModelCall) -> Any:
    """The output of a packed forward for the padded batch."""
    if isinstance(plan.layout, PrefixedLayout) and plan.layout.is_prefix:
        # The states are recorded, and nothing reads this output. Under FSDP2 the model runs around its decoder. It
        # would compute a load-balancing loss from the router logits of the prefix and the mask of the batch.
        if isinstance(output, ModelOutput) and output.get("router_logits") is not None:
            output["router_logits"] = None
        return output
    unpacked = unpack_output(output, plan.tokens, outer)  # may refuse: the head must not pack its states then
    # The head packs its states again with this layout, unless they have another shape than `(B, L, H)`.
    if not (outer.pools_last or outer.scored_index is not None):
        outer.returned[-1:] = [plan.layout]  # of this call
    return unpacked
