"""
What runs in place of the forwards of a decoder's modules while padding is removed.

[`DecoderPatch`] packs at the decoder's door and unpacks at its exit. Within a packed forward [`ViewPatch`] leads
attention modules to packed attention, [`PositionPatch`] numbers tokens for decoders that do it themselves, and
[`RopePatch`] shows rotary embeddings the length of the padded batch. [`NumberingPatch`] is for padded forwards.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .attention.attention import refuse_implementation
from .call.arguments import bind, local_arguments, pack_arguments, unpack_output
from .call.calls import LAYOUT, PackedCall, model_call, packed_call, rows_call
from .call.images import plain_mask
from .call.layers import hands_arguments_on, takes_any_argument
from .call.prefix_states import PrefixStates
from .call.prepared_masks import PreparedMasks, with_added_masks
from .context import context, outside_calls, set_until_reset, within
from .errors import PaddingRemovalError
from .handle import PaddingRemoval
from .layout.layout import Layout, pack
from .layout.shared_prefixes import PrefixedLayout
from .mixers.dry_run import DryRun
from .mixers.mixers import ROWS
from .mixers.row_buckets import calls_of_layers, needs_whole_rows, over_whole_rows
from .model.older import older_attributes
from .model.patching import ForwardPatch
from .model.positions import Numbering, length_dependent_ropes
from .model.sharded import gathers_in_parts
from .parallel.layout import ContextParallelLayout
from .refusals import refuse_batch


__all__ = ["DecoderPatch", "NumberingPatch", "PositionPatch", "RopePatch"]


ROW_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values", "cache_params", "state")
"""Arguments of a decoder by which it knows its rows, or goes on with rows that it knows."""


class DecoderPatch(ForwardPatch):
    """Packs at the decoder's door, unpacks at its exit."""

    runs_on_view = True

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.numbering = Numbering.of(module)
        self.takes_whole_rows = bool(needs_whole_rows(module))
        self.is_causal = all(getattr(m, "is_causal", True) for m in module.modules())
        self.accepts_any, self.hands_on = takes_any_argument(module), hands_arguments_on(module)
        self.parameters = frozenset(inspect.signature(module.forward).parameters)
        self.depends_on_length = bool(length_dependent_ropes(module))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if context().attention:
            call = bind(self.wrapped, args, kwargs)
            if context().attention == "eager":  # masks were made for the attention of the config
                dtype = next(self.module.parameters()).dtype
                call["attention_mask"] = with_added_masks(call.get("attention_mask"), dtype)
            return self.on_view()(**call)
        if packed_call(self.module) is None:
            return super().call(*args, **kwargs)
        with outside_calls():  # a call from within a packed forward is a forward of its own
            return super().call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        asked, prepared = model_call(self.module), None
        call = bind(self.wrapped, args, kwargs)
        try:
            if asked is not None and asked.arguments:
                call, prepared = plain_mask(call, asked.arguments, self.module, self.is_causal)
            elif asked is not None and all(call.get(k) is None for k in ROW_ARGUMENTS):
                # Mamba does not hand positions to its decoder, RWKV not even the mask.
                call |= {k: v for k, v in asked.given.items() if k not in call or call[k] is None}
            if asked is not None and asked.given and asked.given.get("use_cache") is None:
                call.pop("use_cache", None)  # nobody asked for a cache; GIT asks its config
            layout = self.attachment.layout_of(call, asked, prepared)
            if layout is None:
                if call.get("use_cache") is False:
                    self._match_other_processes(call)
                return self.wrapped(*args, **kwargs)
            self.attachment.stats.add(layout)
            call["use_cache"] = False
            cp_layout = self.attachment.cp_layout_of(layout)
            if layout.is_trivial and cp_layout is None:
                if prepared is not None:
                    call["attention_mask"] = prepared.given
                self._match_other_processes(call)
                return unpack_output(self.wrapped(**self._accepted(call)), layout, asked)
            self._check(call, layout, prepared)
            if isinstance(layout, PrefixedLayout):
                output = self._over_piece(call, layout)
                if layout.is_prefix:
                    return output
            elif self.takes_whole_rows:
                output = over_whole_rows(self.wrapped, self._accepted(call), layout)
            else:
                output = self._over_packed_row(call, layout, prepared, cp_layout)
            if not self.takes_whole_rows and asked is not None and not asked.pools_last and asked.scored is None:
                set_until_reset(model=replace(asked, layout=layout))
            return unpack_output(output, layout, asked, cp_layout)
        except IndexError as error:
            _explain_ids_beyond_the_vocabulary(error, self.module, call.get("input_ids"))
            raise

    def _check(self, call: dict[str, Any], layout: Layout, prepared: PreparedMasks | None) -> None:
        """Raise a [`PaddingRemovalError`] if this call, or what was changed since attachment, cannot be packed."""
        config = self.module.config
        if reason := refuse_implementation(config._attn_implementation):
            raise PaddingRemovalError(f"Padding cannot be removed from {type(self.module).__name__}: {reason}.")
        asks_weights = call.get("output_attentions")
        if asks_weights or (asks_weights is None and getattr(config, "output_attentions", False)):
            raise PaddingRemovalError(
                "`output_attentions=True` asks for `(B, N, L, L)` weights, which a packed forward never computes. "
                "Leave it off, here and in the config, or remove the handle for this call (`with "
                "handle.disabled(): ...`)."
            )
        if reason := refuse_batch(layout, prepared is not None, self.attachment.mixers):
            raise PaddingRemovalError(reason)

    def _over_piece(self, call: dict[str, Any], layout: PrefixedLayout) -> Any:
        """The output of the decoder for the tokens that a piece of a step computes, and for those that it sees."""
        if layout.own is None:
            return layout.prefix_states.without_own()
        output = self._over_packed_row(call, layout.own, None, prefix_states=layout.prefix_states)
        return layout.prefix_states.join(output, layout.own.packed_tokens)

    def _over_packed_row(
        self,
        call: dict[str, Any],
        layout: Layout,
        prepared: PreparedMasks | None,
        cp_layout: ContextParallelLayout | None = None,
        prefix_states: PrefixStates | None = None,
    ) -> Any:
        """The output of the decoder for the packed tokens; with `cp_layout`, for those of this process."""
        packed = pack_arguments(call, layout, self.numbering) | _noisy_embeddings(self.module, call, layout)
        if prepared is not None:
            packed["attention_mask"] = prepared.for_decoder()
        if cp_layout is not None:
            packed = local_arguments(packed, cp_layout)
        positions, given, last = packed["position_ids"], call.get("position_ids"), layout.batch_shape[1] - 1
        if self.depends_on_length and given is not None:
            last = given.max()
        packed = self._accepted(packed)
        current = PackedCall(
            layout=layout,
            implementation=self.module.config._attn_implementation,
            decoder=self.module,
            position_ids=positions,
            last_position=last,
            dry_run=DryRun(self, self.attachment.mixers.layers, packed, last),
            prepared=prepared,
            one_block=self._needs_equal_calls(),
            prefix_states=prefix_states,
            cp_layout=cp_layout,
        )
        if current.one_block:
            calls_of_layers(current, one_block=True)
        if self.hands_on:
            packed[LAYOUT] = current
        forward = self.on_view(**older_attributes(self.module, {LAYOUT: current}))
        with within(packed=current):
            output = forward(**packed)
        self.attachment.remember(current)
        return output

    def _needs_equal_calls(self) -> bool:
        """Whether a forward has to call the same parts as those of other processes, whatever rows these have."""
        return bool(self.attachment.mixers.that_are(ROWS)) and gathers_in_parts(self.module)

    def _match_other_processes(self, call: dict[str, Any]) -> None:
        """Look how layers are called, as processes do whose batches are packed; a forward with them as they are."""
        if self._needs_equal_calls():
            DryRun(self, self.attachment.mixers.layers, self._accepted(call), 0).as_called()

    def _accepted(self, call: dict[str, Any]) -> dict[str, Any]:
        return call if self.accepts_any else {k: v for k, v in call.items() if k in self.parameters}


class PositionPatch(ForwardPatch):
    """Gives a positional embedding the places of the packed tokens in their rows, for those in the packed row."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = packed_call(self.attachment.decoder)
        if call is None:
            return self.wrapped(*args, **kwargs)
        arguments, positions = bind(self.wrapped, args, kwargs), call.layout.positions
        given = arguments.get("position_ids")
        arguments["position_ids"] = positions if given is None else positions.view_as(given)
        return self.wrapped(**arguments)


class RopePatch(ForwardPatch):
    """
    Shows a rotary embedding the length of the padded batch.

    With dynamic and long rope its frequencies depend on the largest position of a forward, and padding has positions
    too. One more token takes part with that position, and is cut off again.
    """

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
    """Numbers the tokens of each padded row from its first real one, where the caller gave no positions."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = bind(self.wrapped, args, kwargs)
        mask = call.get("attention_mask")
        cached = call.get("past_key_values") is not None or call.get("use_cache") is True
        if cached or call.get("position_ids") is not None or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return self.wrapped(*args, **kwargs)
        column = torch.arange(mask.shape[1], device=mask.device)
        call["position_ids"] = (column - mask.long().argmax(1, keepdim=True)).clamp(min=0)
        return self.wrapped(**call)


def _explain_ids_beyond_the_vocabulary(error: IndexError, decoder: Any, ids: torch.Tensor | None) -> None:
    rows = decoder.get_input_embeddings().num_embeddings
    if ids is not None and int(ids.max()) >= rows:
        raise ValueError(
            f"The batch holds token id {int(ids.max())}, and the embedding of {type(decoder).__name__} has {rows} "
            "rows. Use the tokenizer of the model, or `model.resize_token_embeddings(len(tokenizer))`."
        ) from error


def _noisy_embeddings(decoder: Any, call: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """
    What NEFTune makes of the embeddings of a batch, packed; nothing where it is off.

    Its hook on the embedding scales the noise by the length of the rows that it sees. It is shown the padded batch,
    and so draws the noise of the padded computation.
    """
    embedding, ids = decoder.get_input_embeddings(), call.get("input_ids")
    if ids is None or not (embedding.training and hasattr(embedding, "neftune_noise_alpha")):
        return {}
    if layout.packed_tokens < layout.real_tokens:
        raise PaddingRemovalError(
            "NEFTune gives every token of every row a noise of its own, so no two rows begin alike. Attach with "
            "`prefix_sharing=False`, or leave `neftune_noise_alpha` out."
        )
    if "per_layer_inputs" in inspect.signature(decoder.forward).parameters:
        raise PaddingRemovalError(
            f"{type(decoder).__name__} looks its token ids up in every layer, and NEFTune's noise can be packed with "
            "the embeddings only. Set one of `padding_free` and `neftune_noise_alpha`."
        )
    return {"input_ids": None, "inputs_embeds": pack(embedding(ids), layout)}
