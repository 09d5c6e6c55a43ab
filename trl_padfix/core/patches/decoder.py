"""
The patches on the forward of a decoder and on its positions.

[`DecoderPatch`] reads a call, plans it, runs it, and unpacks its output to the padded batch. [`plan`] chooses the
[`Plan`]: on one packed row, after shared prefixes, or padded. [`check_call`] refuses calls that cannot be packed.

Within a packed forward [`PositionPatch`] gives positions to decoders that take none, and [`RopePatch`] gives rotary
embeddings the length of the padded batch. [`NumberingPatch`] counts the positions of padded forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_outputs import ModelOutput

from ..anatomy import gathers_in_parts
from ..attention.attention import attends_within_tokens, implementation_obstacle, is_causal
from ..call.arguments import DecoderInputs, pack_arguments, padded_output, unpack_output
from ..call.batch_cache import on_host
from ..call.calls import (
    LAYOUT,
    LocalTokens,
    ModelCall,
    PackedCall,
    call_of,
    model_call,
    packed_call,
    rows_call,
    running,
)
from ..call.layout_of import layout_of
from ..call.prefix_states import PrefixStates
from ..call.prepared_masks import with_added_masks
from ..context import context, in_backward, outside_calls
from ..errors import PaddingRemovalError, UnpackableCallError
from ..layout.layout import Layout
from ..layout.shared_prefixes import PrefixedLayout
from ..mixers.mixers import DIRECT, ROWS, Mixers
from ..mixers.row_buckets import DryRun, calls_of_layers
from ..model.inspection import hands_arguments_on, parameters_of, takes_any_argument
from ..model.older import has_cache, older_attributes
from ..model.patching import BatchPatch, ForwardPatch
from ..model.positions import Numbering


if TYPE_CHECKING:
    from ..handle import PaddingRemoval


__all__ = ["DecoderPatch", "NumberingPatch", "PositionPatch", "RopePatch", "batch_obstacle", "check_call"]


class DecoderPatch(BatchPatch):
    """Packs the arguments of the decoder, runs it on the packed row, and unpacks its output."""

    attachment: PaddingRemoval
    runs_on_view = True

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.numbering = Numbering.of(module)
        self.is_causal = all(is_causal(m) or attends_within_tokens(m) for m in module.modules())
        self.accepts_any, self.hands_on = takes_any_argument(module), hands_arguments_on(module)
        self.parameters = frozenset(parameters_of(module.forward))
        self.has_rows = bool(attachment.mixers.in_mode(ROWS))
        self.depends_on_length = bool(attachment.anatomy.length_dependent_ropes)
        self.has_token_types = "embeddings.token_type_ids" in dict(module.named_buffers())

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
        handle, outer = self.attachment, model_call(self.module)
        inputs = DecoderInputs.read(self.bind(args, kwargs), handle, outer, self.is_causal)
        padded = PaddedPlan(self, None, partial(self.wrapped, *args, **kwargs), inputs.given_mask)
        planned: Plan = padded
        try:
            # Nearly all checks that can refuse the call come before its forward; the others are of its layers.
            planned = plan(inputs, self, padded)
            output = planned.output(outer)
        except UnpackableCallError as error:
            # From the first layer: its checkpoint could not recompute it packed. A padded forward has no local tokens.
            if planned.tokens is not None and planned.tokens.is_divided:
                raise
            handle.run_padded(error)
            tokens = {"input_ids": inputs.ids, "inputs_embeds": inputs.embeds}
            planned = replace(padded, matched={k: x for k, x in tokens.items() if x is not None})
            output = planned.output(outer)
        if planned.tokens is not None and not in_backward():  # which recomputes the forwards of sub-batches
            handle.running_stats.add(planned.tokens.layout)
        return output

    def needs_equal_calls(self) -> bool:
        """Whether all processes must call the same modules for any rows: sharded modules gather in each call."""
        return self.has_rows and gathers_in_parts(self.module)

    def match_other_processes(self, call: dict[str, Any]) -> None:
        """Join the dry run of other processes, although this batch needs none."""
        if self.needs_equal_calls():
            DryRun(self, self.attachment.mixers.layers, self.accepted(call), 0).run_for_collectives()

    def accepted(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `call` that the decoder takes."""
        return dict(call) if self.accepts_any else {k: v for k, v in call.items() if k in self.parameters}


def plan(inputs: DecoderInputs, patch: DecoderPatch, padded: PaddedPlan) -> Plan:
    """
    How a call of the decoder of `patch` is computed; `padded` runs it unchanged.

    Raises:
        UnpackableCallError: If the call cannot be packed.
    """
    handle = patch.attachment
    layout = layout_of(inputs, handle)
    if layout is None:
        # Without a cache this is no generation, and other processes may pack their batches.
        return replace(padded, matched=inputs.arguments) if inputs.arguments.get("use_cache") is False else padded
    tokens = handle.tokens_of(layout)
    # With prefix sharing, on a CPU, a row has the same bits in all batches, also in batches without a shared prefix.
    has_fixed_order = bool(handle.prefix_sharing) and layout.positions.device.type == "cpu"
    if layout.is_trivial and not tokens.is_divided and not has_fixed_order:
        # Without padding and shared prefixes the padded forward is exact, with the caller's own masks and with caches
        # as in the model alone.
        prepared = inputs.prepared
        arguments = inputs.arguments | ({} if prepared is None else {"attention_mask": prepared.original})
        forward = partial(patch.wrapped, **patch.accepted(arguments))
        return PaddedPlan(patch, tokens, forward, matched=arguments)
    check_call(handle, inputs, layout)
    if not isinstance(layout, PrefixedLayout):
        return PackedPlan(patch, tokens, inputs, _packed(inputs, tokens, patch))
    assert layout.prefix_states is not None  # the schedule of a step sets them before each forward
    new = None if layout.new is None else LocalTokens(layout.new)
    return PrefixedPlan(patch, tokens, inputs, {} if new is None else _packed(inputs, new, patch), new)


def batch_obstacle(layout: Layout, has_prepared_masks: bool, mixers: Mixers) -> str | None:
    """
    Why a batch cannot be packed, for instance one with masked tokens between real ones; `None` if it can.

    `has_prepared_masks`: whether the decoder receives masks in which the tokens of an image attend to each other.
    """
    other_mixers = [mixer for mixer in mixers.mixers if mixer.mode != DIRECT]
    on_rows = [mixer for mixer in other_mixers if mixer.mode == ROWS]
    if has_prepared_masks and on_rows:
        return (
            f"Tokens of an image see each other in this batch, and `{on_rows[0].name}` "
            f"({type(on_rows[0].module).__name__}: {on_rows[0].why}) runs on rows, for which its decoder makes causal "
            "masks. Train this model on images with `padding_free=False`; batches without images can be packed."
        )
    if not other_mixers or layout.spans == layout.keys.lengths:  # equal: no row has holes
        return None
    return (
        f"A row of the batch has masked tokens between real ones, and `{other_mixers[0].name}` "
        f"({type(other_mixers[0].module).__name__}: {other_mixers[0].why}) computes these masked tokens too when "
        "padded, so no packed forward gives the same numbers. Leave out the masked tokens, or run this call inside "
        "`with handle.disabled():`."
    )


def check_call(handle: PaddingRemoval, inputs: DecoderInputs, layout: Layout) -> None:
    """
    Check that a call with this layout can be packed.

    Raises:
        UnpackableCallError: If the call cannot.
        PaddingRemovalError: If no call can, because a setting was changed after attachment.
    """
    decoder, config = handle.decoder, handle.decoder.config
    if reason := implementation_obstacle(config._attn_implementation):
        raise PaddingRemovalError(f"Padding cannot be removed from {type(decoder).__name__}: {reason}.")
    with_weights = inputs.arguments.get("output_attentions")
    if with_weights or (with_weights is None and config.output_attentions):
        raise UnpackableCallError(
            "output_attentions",
            "`output_attentions=True` asks for `(B, N, L, L)` weights, which a packed forward never computes. "
            "Leave it off, here and in the config, or remove the handle for this call (`with "
            "handle.disabled(): ...`).",
        )
    if norm := next((m for m in handle.batch_norms if m.training or m.running_mean is None), None):
        reason = f"{type(norm).__name__} computes statistics of all tokens of a batch, padding included."
        raise UnpackableCallError("statistics", reason)
    if reason := batch_obstacle(layout, inputs.prepared is not None, handle.mixers):
        raise UnpackableCallError("holes" if inputs.prepared is None else "image masks", reason)
    if handle.changes is not None and (hook := handle.changes.check()) is not None:
        handle.say_once(
            f"{hook} gets packed states: one row of all real tokens `(1, T, ...)`, with prefix sharing each distinct "
            f"token once, not the padded batch `(B, L, ...)`. If it needs that, hook the {type(decoder).__name__} "
            "itself, or compute padded (`with handle.disabled(): ...`, or `padding_free=False`). (Shown once.)",
            "packed hook",
        )


def _packed(inputs: DecoderInputs, tokens: LocalTokens, patch: DecoderPatch) -> dict[str, Any]:
    """The arguments of the decoder for the local tokens."""
    counts_padding = patch.numbering.by_columns and patch.numbering.has_table and inputs.positions is None
    if counts_padding and inputs.mask is not None and not on_host(inputs.mask)[0][:, 0].all():
        patch.attachment.say_once(
            f"{type(patch.module).__name__} numbers the columns of a batch, so its padded numbers depend on the "
            "padding before a row. Packed, each row has the numbers that it has alone, and these differ. Pass "
            "`position_ids` that begin at 0 in each row to have the same numbers padded. (Shown once.)"
        )
    packed = tokens.select(pack_arguments(inputs, tokens.layout, patch.module, patch.numbering))
    if patch.has_token_types and packed.get("token_type_ids") is None:
        # BigBird's own zeros are as many as its positions, and a packed row may have more tokens.
        packed["token_type_ids"] = torch.zeros_like(packed["position_ids"])
    return packed


@dataclass(frozen=True, eq=False)
class Plan:
    """
    How one call of a decoder is computed.

    Attributes:
        patch ([`DecoderPatch`]): The patch of the decoder.
        tokens ([`LocalTokens`], *optional*): The tokens of its layout that this process computes, if it has a layout.
    """

    patch: DecoderPatch
    tokens: LocalTokens | None

    def output(self, outer: ModelCall) -> Any:
        """The output for the padded batch, with the states that the model around the decoder needs."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class PaddedPlan(Plan):
    """
    The decoder runs on the padded batch.

    Attributes:
        forward (`Callable`): The forward with its arguments.
        mask (*optional*): The mask of the batch; `None` if all tokens are real.
        matched (`dict`, *optional*): Arguments for the dry run of other processes, if these may pack their batches.
    """

    forward: Callable[[], Any]
    mask: Any = None
    matched: dict[str, Any] | None = None

    def output(self, outer: ModelCall) -> Any:
        if self.matched is not None:
            self.patch.match_other_processes(self.matched)
        return padded_output(self.forward(), outer, self.mask)


@dataclass(frozen=True, eq=False)
class PackedPlan(Plan):
    """The decoder runs on one packed row; `packed` are its arguments."""

    tokens: LocalTokens
    inputs: DecoderInputs
    packed: dict[str, Any]

    def output(self, outer: ModelCall) -> Any:
        return self.unpack(self.run(), outer)

    def run(self) -> Any:
        """The output of the decoder for the packed row."""
        return self._forward(self.tokens)

    def unpack(self, output: Any, outer: ModelCall) -> Any:
        """The output for the padded batch."""
        unpacked = unpack_output(output, self.tokens, outer)  # may refuse: the head must not pack its states then
        # The head packs its states again with this layout, unless they have another shape than `(B, L, H)`.
        if not (outer.pools_last or outer.scored_index is not None):
            outer.returned[-1:] = [self.tokens.layout]  # of this call
        return unpacked

    def _forward(self, tokens: LocalTokens, states: PrefixStates | None = None) -> Any:
        """The output of the decoder for the local tokens."""
        patch, handle, decoder = self.patch, self.patch.attachment, self.patch.module
        last_position = tokens.layout.batch_shape[1] - 1
        if patch.depends_on_length and self.inputs.positions is not None:  # left on the device: no host wait
            last_position = self.inputs.positions.max()
        packed = patch.accepted(self.packed)
        call = PackedCall(
            tokens=tokens,
            implementation=decoder.config._attn_implementation,
            decoder=decoder,
            position_ids=self.packed["position_ids"],
            last_position=last_position,
            prepared=self.inputs.prepared,
            one_bucket=patch.needs_equal_calls(),
            prefix_states=states,
            fixed_order=bool(handle.prefix_sharing),
            passed_on=frozenset(self.inputs.arguments) - patch.parameters,
            dry_run=DryRun(patch, handle.mixers.layers, packed, last_position) if patch.has_rows else None,
        )
        if call.one_bucket:
            # Before the forward, as in `match_other_processes`: all processes gather parameters in the same order.
            calls_of_layers(call, one_bucket=True)
        if patch.hands_on:  # then gradient checkpointing keeps the call with the arguments of each layer
            packed[LAYOUT] = call
        forward = patch.on_view(**older_attributes(decoder, {LAYOUT: call}))
        with running(call):
            output = forward(**packed)
        handle.remember(call)
        return output


@dataclass(frozen=True, eq=False)
class PrefixedPlan(PackedPlan):
    """
    The decoder runs on the `new` tokens after shared prefixes, or of a shared prefix, if there are any.

    Its output is the recorded output of the prefixes, followed by the output of the new tokens.
    """

    new: LocalTokens | None

    @property
    def layout(self) -> PrefixedLayout:
        assert isinstance(self.tokens.layout, PrefixedLayout)
        return self.tokens.layout

    def run(self) -> Any:
        states = self.layout.prefix_states
        assert states is not None
        if self.new is None:
            return states.prefix_outputs()
        return states.prepend_outputs(self._forward(self.new, states), self.new.count)

    def unpack(self, output: Any, outer: ModelCall) -> Any:
        if not self.layout.is_prefix:
            return super().unpack(output, outer)
        # The states are recorded, and nothing reads this output. Under FSDP2 the model runs around its decoder. It
        # would compute a load-balancing loss from the router logits of the prefix and the mask of the batch.
        if isinstance(output, ModelOutput) and output.get("router_logits") is not None:
            output["router_logits"] = None
        return output


class PositionPatch(ForwardPatch):
    """Gives a positional embedding the positions of the packed tokens in their rows, not those in the packed row."""

    attachment: PaddingRemoval

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, {})
        if call is None:
            return self.wrapped(*args, **kwargs)
        arguments, positions = self.bind(args, kwargs), call.layout.positions
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
        arguments = self.bind(args, kwargs) if call is not None else {}
        positions = arguments.get("position_ids")
        if call is None or positions is None:
            return self.wrapped(*args, **kwargs)
        last = torch.as_tensor(call.last_position, dtype=positions.dtype, device=positions.device)
        arguments["position_ids"] = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], dim=-1)
        output = self.wrapped(**arguments)
        return output[..., :-1, :] if isinstance(output, torch.Tensor) else tuple(x[..., :-1, :] for x in output)


class NumberingPatch(ForwardPatch):
    """Counts positions in each padded row from the first real token, if the caller passes none."""

    @torch.compiler.disable(recursive=False)  # the decoder beneath computes a padded batch, which can be compiled
    def _untraced(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = self.bind(args, kwargs)
        mask: Any = call.get("attention_mask")
        has_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if not has_mask or has_cache(call) or call.get("position_ids") is not None:
            return self.wrapped(*args, **kwargs)
        column = torch.arange(mask.shape[1], device=mask.device)
        # `argmax` gives the first of several maxima: the first real column. Padding before it would be negative.
        call["position_ids"] = (column - mask.long().argmax(1, keepdim=True)).clamp(min=0)
        return self.wrapped(**call)
