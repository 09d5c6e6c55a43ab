"""
State that the patches of one call share.

A [`ModelCall`] is one call of an attached model, a [`PackedCall`] one packed forward of its decoder. How a patch finds
its call:

| patch | finds | where |
|---|---|---|
| decoder, head | [`model_call`] | in the context of this thread, while the model runs |
| layer, attention | [`call_of`] | in its keyword arguments, where a checkpoint keeps it for a backward in any thread |
| module without these arguments | [`call_of`] | in this thread, where its layer sets it again in a recomputation |
| the same, in a dry run | [`rows_call`] | in this thread |

A mixer that runs on padded rows needs the arguments of its layer, and some layers do not pass the layout on to their
attention. [`LayerPatch`] stores both while the layer runs, and when gradient checkpointing runs it again. Since
transformers 5 a layer is checkpointed inside of its own forward. The layer then runs on a view with another checkpoint
function, which sets the running layer for the recomputation too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..context import checkpoint_state, context, within
from ..errors import UnpackableCallError
from ..layout.layout import Layout
from ..model.inspection import takes_any_argument
from ..model.older import checkpoints_in_forward
from ..model.patching import Attachment, ForwardPatch
from ..model.views import config_of
from .prefix_states import PrefixStates
from .prepared_masks import PreparedMasks


__all__ = [
    "CALL", "LayerCall", "LayerPatch", "LocalTokens", "ModelCall", "PackedCall", "RowsCall", "ScoredLabels",
    "call_of", "is_checkpointed", "layer_call", "model_call", "packed_call", "rows_call", "running",
]  # fmt: skip


class LocalTokens:
    """
    The packed tokens that this process computes, `t` of the `T` tokens of a layout: here all of them.

    Attributes:
        layout ([`Layout`]): Layout of the full row.
        is_divided (`bool`): Whether other processes compute the other tokens.
    """

    is_divided = False

    def __init__(self, layout: Layout):
        self.layout = layout

    @property
    def count(self) -> int:
        """Number of local tokens, `t`."""
        return self.layout.packed_tokens

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a decoder for the local tokens, selected from those for all packed tokens."""
        return arguments

    def attend(
        self, attend: Callable[..., torch.Tensor], module: nn.Module, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Attention `attend(module, query, key, value, layout, kwargs)` of the local tokens, `(1, t, N, D)`."""
        return attend(module, query, key, value, self.layout, kwargs)

    def mix(self, name: str, run: Callable) -> Callable:
        """`run`, which replaces the function `name` of a recurrence or convolution, for the local tokens."""
        return run

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all packed tokens, `(t, ...)` to `(T, ...)`."""
        return values

    def states_at(self, states: torch.Tensor, index: torch.Tensor, of_all: bool) -> torch.Tensor:
        """The states `(t, H)` of the packed tokens `index`: `of_all` processes, or of this one alone."""
        return states.index_select(0, index)

    def labels(self, index: torch.Tensor, labels: torch.Tensor) -> ScoredLabels:
        """The labels that this process scores, of all `labels`; `index` locates their states in the batch."""
        return ScoredLabels(index, labels)


class ScoredLabels:
    """The labels that this process scores, `(n,)`, and the indices in the flattened batch of their states."""

    def __init__(self, index: torch.Tensor, labels: torch.Tensor):
        self.index, self.labels = index, labels

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all labels, in their order, gathered from the values of each process's labels."""
        return values

    def complete_loss(self, model: PreTrainedModel, output: Any, num_items: torch.Tensor | int | None) -> None:
        """Replace the loss of the local labels in the output of a model by the loss of all labels."""


T = TypeVar("T")

CALL = "padding_layout"
"""
Keyword under which a [`PackedCall`] travels from the decoder through its layers to the attention function. A compiled
layer puts its segments there.
"""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """
    One call of an attached model, from its head to its decoder and back.

    Attributes:
        decoder (`torch.nn.Module`):
            Decoder of the model.
        outer_arguments (`dict`):
            Arguments of the module around the decoder: ids and mask, if the decoder gets only embeddings.
        scored_index (`torch.Tensor` of shape `(n,)`, *optional*):
            Indices in the flattened batch of the states that the head scores. The decoder then returns only these; if
            there are none, any one state, because every process joins the collectives of backward.
        model_arguments (`dict`):
            Arguments of the model that describe its rows (mask, positions, `cu_seq_lens_q`), for models that do not
            pass them on to their decoder.
        selects_columns (`bool`):
            Whether the model selects columns of the decoder's output by an index, in any order, before its head.
        pools_last (`bool`):
            Whether the decoder returns the state of each row's last real token in all columns of the row.
        returned (`list`):
            For each call of the decoder so far, the layout of the states `(B, L, H)` that it returned, or `None`.
    """

    decoder: nn.Module
    outer_arguments: dict[str, Any] = field(default_factory=dict)
    scored_index: torch.Tensor | None = None
    model_arguments: dict[str, Any] = field(default_factory=dict)
    selects_columns: bool = False
    pools_last: bool = False
    returned: list[Layout | None] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class PackedCall:
    """
    One packed forward of a decoder, with the state that its layers share.

    It lives as long as the forward can be recomputed: gradient checkpointing keeps it until backward is done.

    Attributes:
        tokens ([`LocalTokens`]):
            The packed tokens that this process computes, with the layout of the packed row.
        implementation (`str`):
            Attention implementation to compute with.
        decoder (`torch.nn.Module`):
            The decoder.
        position_ids (`torch.Tensor` of shape `(1, T)` or `(P, 1, T)`):
            Positions that the decoder gets.
        last_position (`int` or `torch.Tensor`):
            Largest position of the padded call, padding included.
        dry_run (`Callable`, *optional*):
            Returns, for each bucket of `RowBuckets`, the arguments of each layer by its `id`; if a mixer needs rows.
        prepared ([`PreparedMasks`], *optional*):
            Masks from the module around the decoder, if they differ from the decoder's own.
        one_bucket (`bool`):
            Whether all rows form one bucket, so that all processes call each mixer equally often.
        prefix_states ([`PrefixStates`], *optional*):
            States of shared prefixes that the forward reads or records.
        fixed_order (`bool`):
            Whether a token has the same bits with its prefix shared and without ([`attend_by_segment`]).
        passed_on (`frozenset[str]`):
            Arguments of the caller that the decoder passes on to its layers without reading them: `shift_labels`.
        cache (`dict`):
            Values of [`PackedCall.cached`].
    """

    tokens: LocalTokens
    implementation: str
    decoder: nn.Module
    position_ids: torch.Tensor
    last_position: int | torch.Tensor = 0
    dry_run: Callable[[Any], list[dict[int, dict[str, Any]]]] | None = None
    prepared: PreparedMasks | None = None
    one_bucket: bool = False
    prefix_states: PrefixStates | None = None
    fixed_order: bool = False
    passed_on: frozenset[str] = frozenset()
    cache: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Layout of the packed row."""
        return self.tokens.layout

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, computed once per forward and kept for its recomputation."""
        # No lock: two threads of a backward may both build it, and build the same.
        if key not in self.cache:
            self.cache[key] = build()
        return self.cache[key]


@dataclass(frozen=True, eq=False)
class RowsCall:
    """A dry run of a decoder over padded rows ([`DryRun`]), with three fields of a [`PackedCall`]."""

    decoder: nn.Module
    position_ids: torch.Tensor
    last_position: int | torch.Tensor = 0


def model_call(decoder: nn.Module) -> ModelCall:
    """The running call of the model around `decoder`; if there is none, a call without arguments."""
    # The running call may belong to another attached model.
    call = context().model
    return call if call is not None and call.decoder is decoder else ModelCall(decoder)


def packed_call(decoder: nn.Module | None = None) -> PackedCall | None:
    """The running packed forward, if there is one; with `decoder` only a forward of that decoder."""
    call = context().packed
    return call if call is not None and decoder in (None, call.decoder) else None


def running(call: PackedCall, **fields: Any) -> AbstractContextManager[None]:
    """A block in which `call` runs: its forward, or a part of it that a checkpoint recomputes."""
    here, state = context(), checkpoint_state()
    if not fields and here.packed is call and here.checkpoint == state:
        return nullcontext()  # as in each layer of a forward without checkpoints
    return within(packed=call, checkpoint=state, **fields)


def call_of(patch: ForwardPatch, kwargs: dict[str, Any]) -> PackedCall | None:
    """
    The packed forward that a patched module is called in, with these keyword arguments.

    Raises:
        UnpackableCallError: If only this thread has it, and a checkpoint began since: backward would not have it.
    """
    if (call := kwargs.get(CALL)) is not None:
        return call
    call = packed_call(patch.attachment.decoder)
    if call is not None and context().checkpoint != checkpoint_state():
        raise checkpointed_from_outside(patch.module)
    return call


def checkpointed_from_outside(module: nn.Module) -> UnpackableCallError:
    """The error for a module whose recomputation could not keep the rows apart."""
    return UnpackableCallError(
        "checkpoint",
        f"{type(module).__name__} is checkpointed from outside and does not get the layout of the packed batch, so "
        "its recomputation could not keep the rows apart. Use `gradient_checkpointing` of transformers 5.23 or later "
        "in place of a checkpoint of your own, or of FSDP's `activation_checkpointing`.",
    )


def rows_call(decoder: nn.Module | None = None) -> RowsCall | None:
    """The running dry run, if there is one; with `decoder` only a dry run of that decoder."""
    call = context().rows
    return call if call is not None and decoder in (None, call.decoder) else None


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer inside of a packed forward, with its arguments by name."""

    layer: nn.Module
    arguments: dict[str, Any]
    call: PackedCall


def layer_call(call: PackedCall | None = None) -> LayerCall | None:
    """The running call of a layer, if there is one; with `call` only one inside of that packed forward."""
    layer = context().layer
    return layer if layer is not None and (call is None or layer.call is call) else None


class LayerPatch(ForwardPatch):
    """
    Sets the running layer for the modules inside of it, in a recomputation too.

    A submodule of a layer that is checkpointed by itself (`is_layer=False`) keeps the running call of its layer.
    """

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: Attachment, is_layer: bool = True):
        super().__init__(module, attachment)
        self.is_layer = is_layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        has_call = CALL in kwargs
        if (call := call_of(self, kwargs)) is None:
            return self.wrapped(*args, **kwargs)
        if not takes_any_argument(self.module):
            kwargs.pop(CALL, None)  # its forward would reject the keyword
        running_layer = None if self.is_layer else layer_call(call)
        layer = running_layer or LayerCall(self.module, self.bind(args, kwargs), call)
        with running(layer.call, layer=layer):
            return self._forward(layer, has_call)(*args, **kwargs)

    def _forward(self, layer: LayerCall, has_call: bool) -> Callable[..., Any]:
        """The forward of the layer; if it is checkpointed, its recomputation has the same running layer."""
        if checkpoints_in_forward():
            checkpoints = is_checkpointed(self.module)
            if checkpoints and issubclass(type(self.module), GradientCheckpointingLayer):
                # A view gets a config for packed attention by default; this one replaces the checkpoint function only.
                config = {} if config_of(self.module) is None else {"config": self.module.config}
                checkpoint = _restoring_layer(self.module._gradient_checkpointing_func, layer)
                return self.on_view(_gradient_checkpointing_func=checkpoint, **config)
        else:
            decoder = layer.call.decoder
            checkpoints = layer.call.cached("checkpointed", lambda: any(map(is_checkpointed, decoder.modules())))
        # A checkpoint around the layer calls it again with the recorded arguments only: the layout must be among them.
        if checkpoints and not has_call:
            raise checkpointed_from_outside(self.module)
        return self.wrapped


def _restoring_layer(checkpoint: Callable[..., Any], layer: LayerCall) -> Callable[..., Any]:
    """The `checkpoint` function, changed so that a recomputation sets this running layer again."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Backward may run in another thread, whose context is empty.
        with running(layer.call, layer=layer):
            return function(*args, **kwargs)

    return lambda function, *args, **kwargs: checkpoint(partial(run, function), *args, **kwargs)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether gradient checkpointing is on for a layer, or for a decoder that checkpoints its layers."""
    return module.training and bool(getattr(module, "gradient_checkpointing", False))
