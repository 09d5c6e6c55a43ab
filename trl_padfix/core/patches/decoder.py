"""
Patches on the forwards of a decoder and of its embeddings.

[`DecoderPatch`] packs the arguments of the decoder and unpacks its output. Within a packed forward [`PositionPatch`]
gives positions to decoders that take none, and [`RopePatch`] gives rotary embeddings the length of the padded batch.
[`NumberingPatch`] counts the positions of padded forwards. Each attention module of the decoder has a [`ViewPatch`].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..attention.attention import attends_within_tokens, is_causal
from ..call.arguments import local_arguments, pack_arguments, padded_output, unpack_output
from ..call.calls import LAYOUT, ModelCall, PackedCall, model_call, packed_call, record_layout, rows_call
from ..call.inputs import DecoderInputs
from ..call.layout_of import layout_of
from ..call.prefix_states import PrefixStates
from ..call.prepared_masks import with_added_masks
from ..context import context, outside_calls, within
from ..errors import PaddingRemovalError, UnpackableCallError
from ..layout.layout import Layout, pack
from ..layout.shared_prefixes import PrefixedLayout
from ..mixers.dry_run import DryRun
from ..mixers.mixers import ROWS
from ..mixers.row_buckets import calls_of_layers, over_whole_rows
from ..model.inspection import bind, hands_arguments_on, parameters_of, takes, takes_any_argument
from ..model.older import has_cache, older_attributes
from ..model.patching import BatchPatch, ForwardPatch
from ..model.positions import Numbering
from ..model.sharded import gathers_in_parts
from ..parallel.layout import ContextParallelLayout
from ..refusals import check_call


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..handle import PaddingRemoval


__all__ = ["DecoderPatch", "NumberingPatch", "PositionPatch", "RopePatch"]


_NO_CACHE = {"use_cache": False}
"""Decoders cache by default, and a packed row has no rows that a later call could continue."""


class DecoderPatch(BatchPatch):
    """Packs the arguments of the decoder, runs it on the packed row, and unpacks its output."""

    attachment: PaddingRemoval
    runs_on_view = True

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.numbering = Numbering.of(module)
        self.takes_whole_rows = bool(attachment.anatomy.whole_rows)
        self.is_causal = all(is_causal(m) or attends_within_tokens(m) for m in module.modules())
        self.accepts_any, self.hands_on = takes_any_argument(module), hands_arguments_on(module)
        self.parameters = frozenset(parameters_of(module.forward))
        self.has_rows = bool(attachment.mixers.in_mode(ROWS))
        self.depends_on_length = bool(attachment.anatomy.length_dependent_ropes)
        self.has_token_types = "embeddings.token_type_ids" in dict(module.named_buffers())

    def call(self, *args: Any, **kwargs: Any) -> Any:
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
        outer, unchanged = model_call(self.module), partial(self.wrapped, *args, **kwargs)
        inputs = DecoderInputs.read(bind(self.wrapped, args, kwargs), self.attachment, outer, self.is_causal)
        try:
            return self._packed_or_padded(inputs, outer, unchanged)
        except IndexError as error:
            rows = self.module.get_input_embeddings().num_embeddings
            if inputs.ids is None or int(inputs.ids.max()) < rows:
                raise
            raise ValueError(
                f"The batch holds token id {int(inputs.ids.max())}, and the embedding of {type(self.module).__name__} "
                f"has {rows} rows. Use the tokenizer of the model, or `model.resize_token_embeddings(len(tokenizer))`."
            ) from error

    def _packed_or_padded(self, inputs: DecoderInputs, outer: ModelCall, unchanged: Callable[[], Any]) -> Any:
        """The output for `inputs` within the call `outer` of the model; `unchanged` is the call of the caller."""
        # All checks that can refuse the call come first: after a refusal it is computed padded, from the start.
        try:
            layout = layout_of(inputs, self.attachment)
            cp_layout = self.attachment.cp_layout_of(layout)
            packed = None
            if layout is not None and not (layout.is_trivial and cp_layout is None):  # else there is nothing to pack
                check_call(self.attachment, inputs, layout)
                new = layout.new if isinstance(layout, PrefixedLayout) else layout
                # Empty if the call computes whole rows, or no token.
                packed = {} if new is None or self.takes_whole_rows else pack_arguments(inputs, new, self.numbering)
        except UnpackableCallError as error:
            return self._padded(inputs, outer, unchanged, error)
        if layout is None:
            if inputs.arguments.get("use_cache") is False:  # no generation: other processes may pack their batches
                self._match_other_processes(inputs.arguments)
            return unchanged()
        if packed is None:
            # Without padding and shared prefixes the padded forward is exact: it gets the caller's own masks, and
            # caches as the model does alone.
            masks = {} if inputs.prepared is None else {"attention_mask": inputs.prepared.original}
            self.attachment.stats.add(layout)
            self._match_other_processes(inputs.arguments | masks)
            return padded_output(self.wrapped(**self._accepted(inputs.arguments | masks)), outer)
        try:
            if isinstance(layout, PrefixedLayout):
                output = self._over_prefixed_rows(inputs, layout, packed)
            elif self.takes_whole_rows:
                output = over_whole_rows(self.wrapped, self._accepted(inputs.arguments | _NO_CACHE), layout)
            else:
                output = self._over_packed_row(inputs, layout, packed, cp_layout)
        except UnpackableCallError as error:  # from the first layer: its checkpoint could not recompute it packed
            if cp_layout is not None:  # a padded forward has no local tokens
                raise
            return self._padded(inputs, outer, unchanged, error)
        self.attachment.stats.add(layout)
        return self._unpacked(output, layout, outer, cp_layout)

    def _unpacked(self, output: Any, layout: Layout, outer: ModelCall, cp_layout: ContextParallelLayout | None) -> Any:
        """The output for the padded batch. The modules after the decoder get the layout, to pack its states again."""
        if isinstance(layout, PrefixedLayout) and layout.is_prefix:
            # The states are recorded, and nothing reads this output. Under FSDP2 the model runs around its decoder. It
            # would compute a load-balancing loss from the router logits of the prefix and the mask of the batch.
            if isinstance(output, ModelOutput) and output.get("router_logits") is not None:
                output["router_logits"] = None
            return output
        # The head packs its states again with this layout, unless they have another shape than `(B, L, H)`.
        if not self.takes_whole_rows and not outer.pools_last and outer.scored_index is None:
            record_layout(outer, layout)
        return unpack_output(output, layout, outer, cp_layout)

    def _padded(
        self, inputs: DecoderInputs, outer: ModelCall, unchanged: Callable[[], Any], error: UnpackableCallError
    ) -> Any:
        """The output of a call that cannot be packed: as it came, with the states that the modules around it need."""
        self.attachment.run_padded(error)
        # The head must not pack the states; it may have the layout of an earlier call of the same decoder.
        record_layout(outer, None)
        tokens = {"input_ids": inputs.ids, "inputs_embeds": inputs.embeds}
        self._match_other_processes({k: x for k, x in tokens.items() if x is not None})
        return padded_output(unchanged(), outer, inputs.given_mask)

    def _over_prefixed_rows(self, inputs: DecoderInputs, layout: PrefixedLayout, packed: dict[str, Any]) -> Any:
        """The output of the decoder for shared prefixes, as recorded, followed by that for the new tokens."""
        states = layout.prefix_states
        assert states is not None  # the schedule of a step sets them before each forward
        if layout.new is None:
            return states.prefix_outputs()
        cp_layout, tokens = self.attachment.cp_layout_of_new(layout), layout.new.packed_tokens
        if cp_layout is not None:
            tokens = cp_layout.local_tokens
            if states.records is not None:
                states.records.divide(cp_layout)
        return states.prepend_outputs(self._over_packed_row(inputs, layout.new, packed, cp_layout, states), tokens)

    def _over_packed_row(
        self,
        inputs: DecoderInputs,
        layout: Layout,
        packed: dict[str, Any],
        cp_layout: ContextParallelLayout | None = None,
        prefix_states: PrefixStates | None = None,
    ) -> Any:
        """The output of the decoder for the packed tokens; with `cp_layout`, for the local ones."""
        packed = packed | _NO_CACHE | _neftune_embeddings(self.module, inputs.ids, layout)
        if inputs.prepared is not None:
            packed["attention_mask"] = inputs.prepared.for_decoder()
        if self.has_token_types and packed.get("token_type_ids") is None:
            # BigBird's own zeros are as many as its positions, and a packed row may have more tokens.
            packed["token_type_ids"] = torch.zeros_like(packed["position_ids"])
        if cp_layout is not None:
            packed = local_arguments(packed, cp_layout)
        positions, last_position = packed["position_ids"], layout.batch_shape[1] - 1
        if self.depends_on_length and inputs.positions is not None:  # left on the device: no host wait
            last_position = inputs.positions.max()
        packed = self._accepted(packed)
        current = PackedCall(
            layout=layout,
            implementation=self.module.config._attn_implementation,
            decoder=self.module,
            position_ids=positions,
            last_position=last_position,
            dry_run=DryRun(self, self.attachment.mixers.layers, packed, last_position),
            prepared=inputs.prepared,
            one_bucket=self._needs_equal_calls(),
            prefix_states=prefix_states,
            cp_layout=cp_layout,
        )
        if current.one_bucket:
            # Before the forward, as in `_match_other_processes`: all processes gather parameters in the same order.
            calls_of_layers(current, one_bucket=True)
        if self.hands_on:  # then gradient checkpointing keeps the call with the arguments of each layer
            packed[LAYOUT] = current
        forward = self.on_view(**older_attributes(self.module, {LAYOUT: current}))
        with within(packed=current):
            output = forward(**packed)
        self.attachment.remember(current)
        return output

    def _needs_equal_calls(self) -> bool:
        """Whether all processes must call the same modules, whatever their rows: sharded ones gather in each call."""
        return self.has_rows and gathers_in_parts(self.module)

    def _match_other_processes(self, call: dict[str, Any]) -> None:
        """Join the dry run of other processes, although this batch needs none."""
        if self._needs_equal_calls():
            DryRun(self, self.attachment.mixers.layers, self._accepted(call), 0).run_for_collectives()

    def _accepted(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `call` that the decoder takes."""
        return call if self.accepts_any else {k: v for k, v in call.items() if k in self.parameters}


class PositionPatch(ForwardPatch):
    """Gives a positional embedding the positions of the packed tokens in their rows, not those in the packed row."""

    attachment: PaddingRemoval

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = packed_call(self.attachment.decoder)
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
        call = packed_call(self.attachment.decoder) or rows_call(self.attachment.decoder)
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


def _neftune_embeddings(decoder: PreTrainedModel, ids: torch.Tensor | None, layout: Layout) -> dict[str, Any]:
    """
    The embeddings of a batch with the noise of NEFTune, packed; empty if NEFTune is off.

    Its hook on the embedding scales the noise by the length of the rows. The hook runs on the padded batch here, so
    that it draws the same noise as in the padded forward.
    """
    embedding = decoder.get_input_embeddings()
    if ids is None or not (embedding.training and hasattr(embedding, "neftune_noise_alpha")):
        return {}
    if layout.computed_tokens < layout.real_tokens:
        raise PaddingRemovalError(
            "NEFTune draws noise for every token of every row, so no two rows have a prefix in common. Attach with "
            "`prefix_sharing=False`, or leave `neftune_noise_alpha` out."
        )
    if takes(decoder, "per_layer_inputs"):
        raise PaddingRemovalError(
            f"{type(decoder).__name__} looks its token ids up in every layer, and NEFTune's noise can be packed with "
            "the embeddings only. Set one of `padding_free` and `neftune_noise_alpha`."
        )
    return {"input_ids": None, "inputs_embeds": pack(embedding(ids), layout)}
