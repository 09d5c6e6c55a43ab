"""
How the calls of a decoder are computed.

A [`CallPlanner`] chooses the [`Plan`] of a call: on one packed row, after shared prefixes, or padded. [`check_call`]
refuses calls that cannot be packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput

from ..anatomy import gathers_in_parts
from ..attention.attention import attends_within_tokens, implementation_obstacle, is_causal
from ..call.arguments import DecoderInputs, pack_arguments, unpack_output
from ..call.batch_cache import on_host
from ..call.calls import CALL, LocalTokens, ModelCall, PackedCall
from ..call.layout_of import layout_of
from ..call.prefix_states import PrefixStates
from ..context import context, in_backward
from ..errors import PaddingRemovalError, UnpackableCallError
from ..handle import PaddingRemoval
from ..layout.layout import Layout
from ..layout.shared_prefixes import PrefixedLayout
from ..mixers.mixers import DIRECT, ROWS, Mixers
from ..mixers.row_buckets import DryRun, calls_of_layers
from ..model.inspection import hands_arguments_on, parameters_of, takes_any_argument
from ..model.patching import ForwardPatch
from ..model.positions import Numbering


__all__ = ["CallPlanner", "Plan", "batch_obstacle", "check_call"]


@dataclass(frozen=True, eq=False)
class Plan:
    """
    How one call of a decoder is computed: padded, packed, or from the outputs of shared prefixes alone.

    Attributes:
        tokens ([`LocalTokens`]):
            The tokens of its layout that this process computes.
        arguments (`dict`):
            The arguments of the decoder; empty if it computes no token.
        call ([`PackedCall`], *optional*):
            The packed forward: of all `tokens` or, after shared prefixes, of the new ones.
    """

    tokens: LocalTokens
    arguments: dict[str, Any]
    call: PackedCall | None = None

    @property
    def layout(self) -> Layout:
        return self.tokens.layout

    @property
    def prefix_states(self) -> PrefixStates | None:
        """States of shared prefixes that the forward reads or records."""
        return self.layout.prefix_states if isinstance(self.layout, PrefixedLayout) else None

    @property
    def is_padded(self) -> bool:
        """Whether the decoder runs on the padded batch, which has neither padding nor shared prefixes."""
        return self.call is None and self.prefix_states is None

    def unpack(self, output: Any, outer: ModelCall) -> Any:
        """The output for the padded batch, from that of the packed forward; `None` if there was none."""
        layout, states = self.layout, self.prefix_states
        if states is not None:
            count = 0 if self.call is None else self.call.tokens.count
            output = states.prefix_outputs() if output is None else states.prepend_outputs(output, count)
        if isinstance(layout, PrefixedLayout) and layout.is_prefix:
            # The states are recorded, and nothing reads this output. Under FSDP2 the model runs around its decoder. It
            # would compute a load-balancing loss from the router logits of the prefix and the mask of the batch.
            if isinstance(output, ModelOutput) and output.get("router_logits") is not None:
                output["router_logits"] = None
            return output
        unpacked = unpack_output(output, self.tokens, outer)  # may refuse: the head must not pack its states then
        # The head packs its states again with this layout, unless they have another shape than `(B, L, H)`.
        if not (outer.pools_last or outer.scored_index is not None):
            outer.returned[-1:] = [layout]  # of this call
        return unpacked


class CallPlanner:
    """
    Plans the calls of a decoder.

    Args:
        patch ([`ForwardPatch`]):
            The patch of the decoder.
        handle ([`PaddingRemoval`]):
            Handle with the settings.
    """

    def __init__(self, patch: ForwardPatch, handle: PaddingRemoval):
        decoder = patch.module
        self.patch, self.handle, self.mixers = patch, handle, handle.anatomy.mixers
        self.numbering = Numbering.of(decoder)
        self.is_causal = all(is_causal(m) or attends_within_tokens(m) for m in decoder.modules())
        self.hands_on = hands_arguments_on(decoder)  # its keyword arguments, to its layers
        self.accepts_any, self.parameters = takes_any_argument(decoder), frozenset(parameters_of(decoder.forward))
        self.has_rows = bool(self.mixers.in_mode(ROWS))
        self.has_token_types = "embeddings.token_type_ids" in dict(decoder.named_buffers())

    def plan(self, inputs: DecoderInputs) -> Plan | None:
        """
        The plan of a call; `None` if the call must run unchanged.

        Raises:
            UnpackableCallError: If the call cannot be packed.
        """
        handle = self.handle
        if (layout := layout_of(inputs, handle)) is None:
            # Without a cache this is no generation, and other processes may pack their batches.
            if inputs.arguments.get("use_cache") is False:
                self._match_other_processes(inputs.arguments)
            return None
        if (group := handle.context_parallel) is not None:  # or collectives would hang, or mix up two batches
            compared = [layout.positions, *(x for x in (inputs.any_ids, inputs.mask) if x is not None)]
            if not group.all_equal(compared):
                raise ValueError(
                    f"The {group.size} processes that share packed rows were given different batches. Give them the "
                    "same one; with `cp_size`, shuffle with one seed, and leave dispatching to accelerate."
                )
        tokens = handle.tokens_of(layout)
        # With prefix sharing, on a CPU, a row has the same bits in all batches, also without a shared prefix.
        has_fixed_order = bool(handle.prefix_sharing) and layout.positions.device.type == "cpu"
        if layout.is_trivial and not tokens.is_divided and not has_fixed_order:
            # Without padding and shared prefixes the padded forward is exact, with the caller's own masks and with
            # caches as in the model alone.
            masks = {} if inputs.prepared is None else {"attention_mask": inputs.prepared.original}
            self._match_other_processes(inputs.arguments | masks)
            return Plan(tokens, self.accepted(inputs.arguments | masks))
        check_call(handle, inputs, layout)
        if not isinstance(layout, PrefixedLayout):
            return self._packed(inputs, tokens, tokens)
        assert layout.prefix_states is not None  # the schedule of a step sets them before each forward
        if layout.new is None:
            return Plan(tokens, {})
        return self._packed(inputs, tokens, LocalTokens(layout.new), layout.prefix_states)

    def _packed(
        self, inputs: DecoderInputs, tokens: LocalTokens, computed: LocalTokens, states: PrefixStates | None = None
    ) -> Plan:
        """A plan whose forward has the tokens `computed`."""
        handle, decoder = self.handle, self.patch.module
        packed = self._pack(inputs, computed)
        last_position = computed.layout.batch_shape[1] - 1
        if handle.anatomy.length_dependent_ropes and inputs.positions is not None:  # left on the device: no host wait
            last_position = inputs.positions.max()
        arguments = self.accepted(packed)
        call = PackedCall(
            tokens=computed,
            implementation=decoder.config._attn_implementation,
            decoder=decoder,
            position_ids=packed["position_ids"],
            last_position=last_position,
            prepared=inputs.prepared,
            one_bucket=self.needs_equal_calls,
            prefix_states=states,
            fixed_order=bool(handle.prefix_sharing),
            passed_on=frozenset(inputs.arguments) - self.parameters,
            dry_run=DryRun(self.patch, self.mixers.layers, arguments, last_position) if self.has_rows else None,
        )
        if self.hands_on:  # then gradient checkpointing keeps the call with the arguments of each layer
            arguments[CALL] = call
        if call.one_bucket:
            # Before the forward, as in `_match_other_processes`: all processes gather parameters in the same order.
            calls_of_layers(call, one_bucket=True)
        return Plan(tokens, arguments, call)

    def leave_padded(self, inputs: DecoderInputs, plan: Plan | None, error: UnpackableCallError) -> None:
        """
        Leave a call padded that cannot be packed; `plan` is that of its forward, if it had begun.

        Raises:
            UnpackableCallError: `error` itself, if the handle is strict, or if other processes compute their part.
        """
        # From the first layer: its checkpoint could not recompute it packed. A padded forward has no local tokens.
        if plan is not None and plan.tokens.is_divided:
            raise error
        self.handle.run_padded(error)
        self._match_other_processes({"input_ids": inputs.ids, "inputs_embeds": inputs.embeds})

    def _pack(self, inputs: DecoderInputs, tokens: LocalTokens) -> dict[str, Any]:
        """The arguments of the decoder for the local tokens."""
        decoder = self.patch.module
        counts_padding = self.numbering.by_columns and self.numbering.has_table and inputs.positions is None
        if counts_padding and inputs.mask is not None and not on_host(inputs.mask)[0][:, 0].all():
            self.handle.say_once(
                f"{type(decoder).__name__} takes the column of a token as its position, so its padded outputs depend "
                "on the padding before a row. Packed outputs are those of each row alone, and differ from the padded "
                "ones. Pass `position_ids` that begin at 0 in each row to get the same outputs padded."
            )
        packed = tokens.select(pack_arguments(inputs, tokens.layout, decoder, self.numbering))
        if self.has_token_types and packed.get("token_type_ids") is None:
            # BigBird's own zeros are as many as its positions, and a packed row may have more tokens.
            packed["token_type_ids"] = torch.zeros_like(packed["position_ids"])
        return packed

    @property
    def needs_equal_calls(self) -> bool:
        """Whether all processes must call the same modules for any rows: sharded modules gather in each call."""
        return self.has_rows and gathers_in_parts(self.patch.module)

    def _match_other_processes(self, call: dict[str, Any]) -> None:
        """Join the dry run of other processes, although this batch needs none."""
        if self.needs_equal_calls:
            DryRun(self.patch, self.mixers.layers, self.accepted(call), 0).run_for_collectives()

    def accepted(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `call` that the decoder takes."""
        return dict(call) if self.accepts_any else {k: v for k, v in call.items() if k in self.parameters}


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
    if not in_backward() and (reason := (context().unchecked or {}).get(handle)):
        raise UnpackableCallError("unchecked", reason)
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
    if reason := batch_obstacle(layout, inputs.prepared is not None, handle.anatomy.mixers):
        raise UnpackableCallError("holes" if inputs.prepared is None else "image masks", reason)
    # Not in a comparison, whose step may run padded.
    if (hook := handle.changes and handle.changes.check()) and handle.running_stats is handle.stats:
        handle.say_once(
            f"{hook} gets packed states: one row of all real tokens `(1, T, ...)`, with prefix sharing each distinct "
            f"token once, not the padded batch `(B, L, ...)`. If it needs that, hook the {type(decoder).__name__} "
            "itself, or run padded (`with handle.disabled(): ...`, or `padding_free=False`). (Shown once.)",
            "packed hook",
        )
