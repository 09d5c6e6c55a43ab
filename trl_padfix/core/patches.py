"""
What runs in place of a module's forward while padding is removed.

[`DecoderPatch`] packs at the decoder's door and unpacks at its exit; [`AttentionPatch`] leads the attention modules to
our attention function; [`PositionPatch`] numbers the tokens of decoders that do it themselves; [`LMHeadPatch`] runs a
fused LM head on labelled positions only; [`PoolingPatch`] lets a sequence classifier pool the last token of the
attention mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from .attention import LAYOUT, PackedCall, PaddingRemovalError, packed_dispatch, refuse_implementation
from .compat import packed_forward
from .layout import Layout, pack, unpack
from .masks import known_positions
from .positions import numbering, packed_positions


if TYPE_CHECKING:
    from typing_extensions import Self

    from .remove import PaddingRemoval

__all__ = [
    "Attachment",
    "AttentionPatch",
    "DecoderPatch",
    "ForwardPatch",
    "HeadPatch",
    "LMHeadPatch",
    "NumberingPatch",
    "PoolingPatch",
    "PositionPatch",
    "bind",
    "pools_by_token_id",
    "visual_mask",
]

_FOR_EACH_TOKEN = {"inputs_embeds", "per_layer_inputs"}

SCORED = "padding_scored_index"
"""Keyword by which the LM head asks the decoder for the hidden states at some places of the padded batch only."""


_SAID_BY_LAYOUT = ("cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say of a packed row what its layout says."""


class Attachment:
    """Patches on a model that go on and off together; a context manager that detaches at its end."""

    def __init__(self) -> None:
        self.enabled = True
        self.is_trainers = False  # made by a trainer, and replaced by the next one on the same model
        self._patches: list[ForwardPatch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Detach: the model computes as it did before. Removing twice does no harm."""
        self.enabled = False
        for patch in reversed(self._patches):
            patch.undo()
        self._patches = []

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute as before attachment until the block ends."""
        saved, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = saved


class ForwardPatch:
    """
    `module.forward`, wrapped for as long as the patch is on.

    The patch is an instance attribute of the module and looks the wrapped forward up anew in each call: a deep copy of
    the module is a patched module of its own, a class swapped underneath (FSDP2) is followed, and a patch that
    somebody else put on top is left in place when this one goes.
    """

    def __init__(self, module: nn.Module, attachment: Any):
        self.module, self.attachment = module, attachment
        self.below = module.__dict__.get("forward")
        module.forward = self

    @property
    def __signature__(self) -> inspect.Signature:
        # `generate` and `Trainer` read the signature of `model.forward`.
        return inspect.signature(self.wrapped)

    @property
    def wrapped(self) -> Any:
        return self.below if self.below is not None else type(self.module).forward.__get__(self.module)

    @property
    def __func__(self) -> Callable:
        return self.wrapped.__func__  # TRL 1.9 reads the signature of the function of what it takes for a method

    @torch.compiler.disable  # dynamo takes the wrapped forward for the patch itself, and recurses
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:
            args = args[1:]  # accelerate's `unwrap_model(keep_fp32_wrapper=False)` makes a method of what it finds
        return self.packed(*args, **kwargs) if self.attachment.enabled else self.wrapped(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        """The forward while padding removal is on."""
        raise NotImplementedError

    def undo(self) -> None:
        above, current = None, self.module.__dict__.get("forward")
        while isinstance(current, ForwardPatch) and current is not self:
            above, current = current, current.below
        if current is not self:
            return  # somebody else wrapped this patch: it stays below theirs, and passes every call on
        if above is not None:
            above.below = self.below
        elif self.below is None:
            del self.module.forward
        else:
            self.module.forward = self.below


class DecoderPatch(ForwardPatch):
    """Packs at the decoder's door, unpacks at its exit."""

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.numbers = numbering(module)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.attachment.suspended():  # a call from within a packed forward is a forward of its own
            return super().__call__(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        scored = kwargs.pop(SCORED, None)
        call = bind(self.wrapped, args, kwargs)
        try:
            return self._packed(self.attachment.decoder_call(call), scored, args, kwargs)
        except IndexError as error:
            _explain_ids_beyond_the_vocabulary(error, self.module, call.get("input_ids"))
            raise

    def _packed(self, call: dict[str, Any], scored: torch.Tensor | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        layout = self.attachment.layout_of(call)
        if layout is None:
            return self.wrapped(*args, **kwargs)
        self.attachment.stats.add(layout)
        call["use_cache"] = False
        if layout.is_trivial:
            output = self.wrapped(**call)
        else:
            config = self.module.config
            if reason := refuse_implementation(config._attn_implementation):  # changed after attachment
                raise PaddingRemovalError(f"Padding cannot be removed from {type(self.module).__name__}: {reason}.")
            call = _pack_arguments(call, layout, self.numbers) | _noisy_embeddings(self.module, call, layout)
            call[LAYOUT] = running = PackedCall(layout, config._attn_implementation)
            older = packed_forward(self.module, {LAYOUT: running})
            with (
                self.attachment.running(running),
                packed_dispatch(config),
                known_positions(call["position_ids"]),
                older,
            ):
                output = self.wrapped(**call)
            self.attachment.remember(running)
        if self.attachment.is_pooling:
            return _unpack_output(output, layout, _last_everywhere)
        self.attachment.answered(layout if scored is None and not layout.is_trivial else None)
        return _unpack_output(output, layout, None if scored is None else partial(_select, index=scored))


class AttentionPatch(ForwardPatch):
    """Lets an attention module find our attention function, in its forward and in the recomputation of it."""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The recomputation of a packed forward is packed, whatever was switched off in between.
        if LAYOUT not in kwargs and not self.attachment.is_running:
            return self.wrapped(*args, **kwargs)
        with packed_dispatch(self.module.config):
            return self.wrapped(*args, **kwargs)


class PositionPatch(ForwardPatch):
    """Gives a positional embedding the places of the packed tokens in their rows, for those in the packed row."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        layout = self.attachment.layout
        if layout is None:
            return self.wrapped(*args, **kwargs)
        call = bind(self.wrapped, args, kwargs)
        given = call.get("position_ids")
        call["position_ids"] = layout.positions if given is None else layout.positions.view_as(given)
        return self.wrapped(**call)


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


class LMHeadPatch(ForwardPatch):
    """
    Runs a fused LM head on the labelled positions of a batch only.

    TRL's fused head (`model(..., labels=labels, fused_lm_head=True)`, since 1.10) scores every padded position where
    there is no Triton. It also takes `shift_labels`, labels that need no shift: the labelled positions of the batch
    are handed to it as one row, and what it returns for them is laid out over `(B, L - 1)`, zero elsewhere, as it
    would have done itself.
    """

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head"):
            with self.attachment.scoring():
                return self.wrapped(*args, **kwargs)
        if labels is None or kwargs.get("shift_labels") is not None:
            return self.wrapped(*args, **kwargs)
        call = bind(self.wrapped, args, {k: v for k, v in kwargs.items() if k not in ("labels", "fused_lm_head")})
        if not self.attachment.selects(call, labels):
            return self.wrapped(*args, **kwargs)
        # A label is predicted from the column before it. Where that is padding there is nothing to predict it from.
        target = labels[:, 1:] != -100
        if call.get("attention_mask") is not None:
            target = target & call["attention_mask"][:, :-1].bool()
        index = target.flatten().nonzero().squeeze(1)
        if index.numel() == 0:
            return self.wrapped(*args, **kwargs)
        row, column = index // target.shape[1], index % target.shape[1]
        kwargs |= {"labels": None, "shift_labels": labels[row, column + 1].unsqueeze(0)}
        output = self.wrapped(*args, **kwargs, **{SCORED: row * labels.shape[1] + column})
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.shape == (1, index.numel()):
                spread = value.new_zeros(target.numel()).index_copy(0, index, value[0])
                output[name] = spread.view(target.shape)
        return output


class HeadPatch(ForwardPatch):
    """
    Applies the LM head to the packed tokens of a batch, where a model builds logits for all of it.

    What the decoder gave `(B, L, H)` for is packed again, so that no token is projected onto the vocabulary twice and
    no padding at all; the logits are laid out over `(B, L, V)`, zero at padding.
    """

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        layout = self.attachment.scored_layout
        # `logits_to_keep` leaves a slice of the columns.
        if layout is None or not args or args[0].dim() != 3 or tuple(args[0].shape[:2]) != layout.batch_shape:
            return self.wrapped(*args, **kwargs)
        return unpack(self.wrapped(pack(args[0], layout), *args[1:], **kwargs), layout)


class PoolingPatch(ForwardPatch):
    """
    Lets a sequence classifier pool the last token of the attention mask.

    transformers pools the last token whose id is not the pad token's. Where the pad token is the EOS token and a
    sequence ends in it, that is the token before: the state that is scored has not seen the end. Here the decoder
    answers with the state of a row's last real token in every column, so whichever the model picks is the right one;
    pooling, labels and loss stay the model's.
    """

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        with self.attachment.pooling():
            return self.wrapped(*args, **kwargs)


def pools_by_token_id(model: nn.Module) -> bool:
    """Whether the forward of `model` looks for the pad token's id and scores one state of each row."""
    for cls in type(model).__mro__:
        if "forward" in vars(cls):
            code = inspect.unwrap(vars(cls)["forward"]).__code__
            if "pad_token_id" in code.co_names and "pooled_logits" in code.co_varnames:
                return True
            if "__class__" not in code.co_freevars:
                return False  # it does not call `super().forward`
    return False


def bind(forward: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those of `**kwargs` included."""
    bound = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)


def _explain_ids_beyond_the_vocabulary(error: IndexError, decoder: nn.Module, ids: torch.Tensor | None) -> None:
    rows = decoder.get_input_embeddings().num_embeddings
    if ids is not None and int(ids.max()) >= rows:
        raise ValueError(
            f"The batch holds token id {int(ids.max())}, and the embedding of {type(decoder).__name__} has {rows} "
            "rows. Use the tokenizer of the model, or `model.resize_token_embeddings(len(tokenizer))`."
        ) from error


def _noisy_embeddings(decoder: nn.Module, call: dict[str, Any], layout: Layout) -> dict[str, Any]:
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


def _pack_arguments(call: dict[str, Any], layout: Layout, numbers: nn.Module | None) -> dict[str, Any]:
    positions = call.get("position_ids")
    visual = visual_mask(call, layout.batch_shape)
    if visual is not None:
        # Features of visual tokens come in the order of the padded batch: where each packed one is among them.
        order = pack((visual.flatten().cumsum(0) - 1).view(visual.shape), layout)[pack(visual, layout)]
        visual = (int(visual.sum()), order)
    untouched = ("attention_mask", "position_ids", *_SAID_BY_LAYOUT)
    packed = {k: v if k in untouched else _pack_value(k, v, layout, visual) for k, v in call.items()}
    packed["attention_mask"] = None
    if positions is None:
        packed["position_ids"] = packed_positions(numbers, call, layout).unsqueeze(0)
    else:
        rows = positions.expand(*positions.shape[:-2], *layout.batch_shape).reshape(-1, *layout.batch_shape)
        rows = torch.cat([pack(row, layout) for row in rows])
        packed["position_ids"] = rows if positions.dim() == 2 else rows.unsqueeze(1)
    for name in _SAID_BY_LAYOUT:
        packed.pop(name, None)
    return packed


def _pack_value(name: str, value: Any, layout: Layout, visual: tuple[int, torch.Tensor] | None) -> Any:
    """An argument of the decoder for the packed tokens; what is in lists and dictionaries, one by one."""
    if isinstance(value, dict):
        return {k: _pack_value(name, v, layout, visual) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pack_value(name, v, layout, visual) for v in value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    # Numbers for each token, ids or masks; of what could have another shape by chance, what is known to be one.
    is_plain = value.dim() == 2 and not value.is_floating_point()
    if tuple(value.shape[:2]) == layout.batch_shape and (is_plain or name in _FOR_EACH_TOKEN):
        return pack(value, layout)
    if visual is not None and value.shape[0] == visual[0]:
        return value.index_select(0, visual[1])
    raise PaddingRemovalError(
        f"The decoder was called with `{name}` of shape {tuple(value.shape)}, which is not a value for each token of "
        f"the batch {layout.batch_shape}, and a packed batch has no rows to which it could belong. Padding cannot be "
        "removed from this call: use `padding_free=False`, or run it inside `with handle.disabled():`."
    )


def visual_mask(call: dict[str, Any], batch_shape: tuple[int, int]) -> torch.Tensor | None:
    """Where the visual tokens are, `(B, L)`, if the decoder is told: it then takes features in their order."""
    masks = [v for k, v in call.items() if isinstance(v, torch.Tensor) and k != "attention_mask"]
    return next((m for m in masks if m.dtype == torch.bool and tuple(m.shape) == tuple(batch_shape)), None)


def _unpack_output(output: Any, layout: Layout, choose: Callable[[torch.Tensor, Layout], torch.Tensor] | None) -> Any:
    """Lay the decoder's output out over the batch; of the last hidden state what `choose` makes of it, if given."""
    choose = choose or _unpack_value
    if isinstance(output, ModelOutput):
        last = output.last_hidden_state
        for name, value in output.items():
            if name != "last_hidden_state":
                output[name] = _unpack_value(value, layout)
        output["last_hidden_state"] = choose(last, layout)
        return output
    if isinstance(output, tuple):
        return (choose(output[0], layout), *(_unpack_value(value, layout) for value in output[1:]))
    raise PaddingRemovalError(f"The decoder returned a `{type(output).__name__}`, which is not a transformers output.")


def _select(hidden: torch.Tensor, layout: Layout, index: torch.Tensor) -> torch.Tensor:
    """The states of the tokens at `index` in the flattened batch, as one row."""
    index = index if layout.is_trivial else layout.packed_positions_of(index)
    return hidden.flatten(0, 1).index_select(0, index).unsqueeze(0)


def _last_everywhere(hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`(B, L, H)` with the state of a row's last real token in all its columns."""
    return _select(hidden, layout, layout.last_index).transpose(0, 1).expand(-1, layout.batch_shape[1], -1)


def _unpack_value(value: Any, layout: Layout) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_unpack_value(v, layout) for v in value)
    if layout.is_trivial or not isinstance(value, torch.Tensor):
        return value
    if tuple(value.shape[:2]) == (1, layout.packed_tokens):
        return unpack(value, layout)
    if value.dim() == 2 and value.shape[0] == layout.packed_tokens:
        # Router logits: one row per token, `(T, experts)`. Their losses expect `(B * L, experts)` and the mask.
        return unpack(value.unsqueeze(0), layout).flatten(0, 1)
    return value
