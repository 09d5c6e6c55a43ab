"""
Patches on the forwards of a decoder and of its embeddings.

[`DecoderPatch`] packs the arguments of the decoder and unpacks its output. Within a packed forward [`PositionPatch`]
gives positions to decoders that take none, and [`RopePatch`] gives rotary embeddings the length of the padded batch.
[`NumberingPatch`] counts the positions of padded forwards. Each attention module of the decoder has a [`ViewPatch`].
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..call.arguments import padded_output
from ..call.calls import ModelCall, call_of, model_call, packed_call, rows_call
from ..call.inputs import DecoderInputs
from ..call.prepared_masks import with_added_masks
from ..context import context, outside_calls
from ..errors import UnpackableCallError
from ..model.inspection import bind
from ..model.older import has_cache
from ..model.patching import ForwardPatch
from .plan import DecoderForward, Plan, plan


if TYPE_CHECKING:
    from ..handle import PaddingRemoval


__all__ = ["DecoderPatch", "NumberingPatch", "PositionPatch", "RopePatch"]


class DecoderPatch(DecoderForward):
    """Packs the arguments of the decoder, runs it on the packed row, and unpacks its output."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        model_call(self.module).returned.append(None)
        if context().attention:
            call = bind(self.wrapped, args, kwargs)
            # The caller built its masks for the attention in the config; eager attention adds them to its scores.
            if context().attention == "eager":
                dtype = next(self.module.parameters()).dtype
                call["attention_mask"] = with_added_masks(call.get("attention_mask"), dtype)
            return self.on_view()(**call)
        # A call from within a packed forward is a forward of its own.
        with nullcontext() if packed_call(self.module) is None else outside_calls():
            return super().call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._packed_or_padded(args, kwargs)
        except IndexError as error:
            ids = kwargs.get("input_ids", args[0] if args else None)
            rows = self.module.get_input_embeddings().num_embeddings
            unknown = [] if ids is None else ids[(ids < 0) | (ids >= rows)].tolist()
            if not unknown:
                raise
            raise ValueError(
                f"The batch holds token id {unknown[0]}, and the embedding of {type(self.module).__name__} has "
                f"{rows} rows. Use the tokenizer of the model, or `model.resize_token_embeddings(len(tokenizer))`."
            ) from error

    def _packed_or_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a call: packed, or padded if there is nothing to pack, or if it cannot be packed."""
        handle, outer = self.attachment, model_call(self.module)
        unchanged = partial(self.wrapped, *args, **kwargs)
        inputs = DecoderInputs.read(bind(self.wrapped, args, kwargs), handle, outer, self.is_causal)
        planned = None
        try:
            # All checks that can refuse the call come first: after a refusal it is computed padded, from the start.
            planned = plan(inputs, self)
            output = None if planned is None else self._run_packed(planned, outer)
        except UnpackableCallError as error:
            # From the first layer: its checkpoint could not recompute it packed. A padded forward has no local tokens.
            if planned is not None and planned.tokens.is_divided:
                raise
            handle.run_padded(error)
            tokens = {"input_ids": inputs.ids, "inputs_embeds": inputs.embeds}
            self.match_other_processes({k: x for k, x in tokens.items() if x is not None})
            return padded_output(unchanged(), outer, inputs.given_mask)
        if planned is None:
            if inputs.arguments.get("use_cache") is False:  # no generation: other processes may pack their batches
                self.match_other_processes(inputs.arguments)
            return padded_output(unchanged(), outer, inputs.given_mask)
        handle.running_stats.add(planned.tokens.layout)
        return output

    def _run_packed(self, planned: Plan, outer: ModelCall) -> Any:
        self.attachment.check_graphs()
        try:
            output = planned.unpack(planned.run(), outer)
        except Exception:
            self.attachment.check_graphs()
            raise
        self.attachment.check_graphs()
        return output


class PositionPatch(ForwardPatch):
    """Gives a positional embedding the positions of the packed tokens in their rows, not those in the packed row."""

    attachment: PaddingRemoval

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, {})
        if call is None:
            return self.wrapped(*args, **kwargs)
        arguments, positions = bind(self.wrapped, args, kwargs), call.layout.positions
        column = arguments.get("position_ids")  # some decoders pass columns (BioGPT)
        arguments["position_ids"] = positions if column is None else positions.view_as(column)
        return self.wrapped(**arguments)


class RopePatch(ForwardPatch):
    """
    Gives a rotary embedding the length of the padded batch.

    With dynamic and long RoPE the frequencies depend on the largest position of a forward, padding included. The patch
    appends this position to `position_ids`, so that the embedding picks the frequencies of the padded forward, and
    drops the appended token from the output.
    """

    attachment: PaddingRemoval
    serves_recomputation = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, {}) or rows_call(self.attachment.decoder)
        arguments = bind(self.wrapped, args, kwargs) if call is not None else {}
        positions = arguments.get("position_ids")
        if call is None or positions is None:
            return self.wrapped(*args, **kwargs)
        last = torch.as_tensor(call.last_position, dtype=positions.dtype, device=positions.device)
        arguments["position_ids"] = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], dim=-1)
        output = self.wrapped(**arguments)
        return output[..., :-1, :] if isinstance(output, torch.Tensor) else tuple(x[..., :-1, :] for x in output)


class NumberingPatch(ForwardPatch):
    """Counts positions in each padded row from the first real token, if the caller passes none."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = bind(self.wrapped, args, kwargs)
        mask: Any = call.get("attention_mask")
        has_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if not has_mask or has_cache(call) or call.get("position_ids") is not None:
            return self.wrapped(*args, **kwargs)
        column = torch.arange(mask.shape[1], device=mask.device)
        # `argmax` gives the first of several maxima: the first real column. Padding before it would be negative.
        call["position_ids"] = (column - mask.long().argmax(1, keepdim=True)).clamp(min=0)
        return self.wrapped(**call)
