"""
`remove_padding`: let the decoder of a model compute real tokens only.

The forward of the decoder is wrapped. The wrapper packs the arguments of a padded call into one row of real tokens and
unpacks its hidden states to `(B, L, H)`, so that trainers and losses see no difference. In a pre-packed batch it keeps
the sequences apart. Calls with a cache run unchanged.

The layout travels through the decoder in the keyword arguments of its layers. Gradient checkpointing keeps these
arguments, so it recomputes each layer with the layout of its own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from .anatomy import (
    ENCODERS,
    Anatomy,
    find_decoder,
    find_multimodal,
    find_pretrained,
    pipeline_in,
    restore_attention,
    scores_added_tokens,
    set_attention,
)
from .attention.attention import register_packed_attention
from .errors import PaddingRemovalError, require
from .handle import Lengths, PaddingRemoval, PrefixSharing, check_multiple, check_prefix_sharing
from .model.inspection import parameters_of, pools_by_token_id, runs_another, takes
from .model.patching import PLACES, Attachment, ForwardPatch, RunnerPatch, patches_on
from .model.positions import Numbering, length_dependent_ropes
from .patches.decoder import DecoderPatch
from .patches.heads import HeadPatch, LMHeadPatch, PoolingPatch, TokenLabelsPatch
from .patches.positions import NumberingPatch, PositionPatch, RopePatch
from .patches.towers import MultimodalPatch, TowerPatch, towers
from .probes import change_beside_another_row
from .refusals import refusal
from .switch import OFF, is_off


logger = logging.getLogger(__name__)

__all__ = [
    "attach_runner_patch", "attachments_on", "forget_original", "number_padded_rows", "remove_padding", "take_over",
]  # fmt: skip

ATTACHED_BY = {
    "handle": "`remove_padding` did it: first call `.remove()` on its handle, or "
    "`trl_padfix.PaddingRemoval.of(model).remove()`",
    "trainer": "A trainer of this package did it, and needs no callback. `trainer.padding.restore()` detaches it",
    "callback": "A callback did it: `callback.remove()` detaches it. Our trainers need none",
}
"""What to do if padding removal is attached already, by the first word of the name of its handle."""


def remove_padding(
    model: nn.Module,
    *,
    prefix_sharing: PrefixSharing = False,
    pool_last_token: bool = False,
    strict: bool = False,
    packed_multiple_of: Lengths | None = None,
    attn_implementation: str | None = None,
) -> PaddingRemoval:
    """
    Let the decoder of `model` compute real tokens only.

    Every call of the model with an `attention_mask` of shape `(B, L)` then runs packed: in training and evaluation, on
    either padding side, with any attention implementation. It returns the outputs of the padded call, with zeros at
    padding, and no cache.

    A call without a mask is a pre-packed batch if `position_ids` restart within a row, or if it has `cu_seq_lens_q`.
    Its sequences are kept apart with any attention implementation, without a mask of shape `(T, T)`.

    Generation, and calls with a cache, run unchanged; a call with `use_cache=True` and gradients warns. Nothing is
    stored in the config or in checkpoints of the model. The state of a call is local to the call: several models may
    share a config, and several threads a model.

    A deep copy of an attached model is packed, too: `remove_padding(copy).remove()` restores it.

    Args:
        model (`torch.nn.Module`):
            A [`~transformers.PreTrainedModel`], or anything that contains one: a PEFT model, a DDP or value-head
            wrapper, a `SentenceTransformer` or `CrossEncoder`.
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Whether to compute shared prefixes once. `True` and `"auto"` share only where it saves work. They differ
            where sharing is impossible: `"auto"` runs unshared; `True` warns, and is an error with `strict`.
        pool_last_token (`bool`, *optional*, defaults to `False`):
            Whether a sequence classifier scores the last token of each row's attention mask, with any id. By
            default it scores the same token as without padding removal: the last one that is not the pad token.
        strict (`bool`, *optional*, defaults to `False`):
            Whether a forward that cannot be packed (attention weights, prepared masks) raises a
            [`PaddingRemovalError`]. By default it runs padded and unchanged, with one warning for each reason;
            `handle.stats.padded_forwards` counts such forwards.
        packed_multiple_of (`int` or `list[int]`, *optional*):
            Lengthen each packed row to a multiple of this number of tokens, so that few lengths occur; or to the
            smallest of several lengths; a longer row gets a multiple of the largest length. The filler is at the end
            of the row, in segments of its own, and in no output; `handle.stats.filler_tokens` counts it.
        attn_implementation (`str`, *optional*):
            Attention implementation in place of the one that the model was loaded with, until the handle is removed.
            For models that another library loads with an attention of its own, such as the trees of TRL's
            asynchronous GRPO.

    Returns:
        [`PaddingRemoval`]: a handle with `.remove()` and `.stats`, usable in a `with` statement.

    Raises:
        TypeError: If there is no pretrained model in `model`, or more than one.
        ValueError: If padding removal is attached to this decoder already, if `prefix_sharing` or
            `packed_multiple_of` has an invalid value, or if `attn_implementation` cannot be exchanged.
        PaddingRemovalError: If the model cannot be packed with exact results; the message says which part and why.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix import remove_padding

    >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(config).eval()
    >>> ids = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    >>> with remove_padding(model) as handle:
    ...     logits = model(ids, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).logits
    >>> logits.shape, handle.stats.packed_tokens
    (torch.Size([2, 4, 32]), 6)

    ```
    """
    check_prefix_sharing(prefix_sharing)
    check_multiple(packed_multiple_of)
    require(nn.Module, model=model)
    anatomy = Anatomy.of(model)
    handle = PaddingRemoval(
        anatomy,
        prefix_sharing=prefix_sharing,
        pool_last_token=pool_last_token,
        strict=strict,
        packed_multiple_of=packed_multiple_of,
    )
    if is_off():
        logger.warning(f"{OFF} is set: padding is not removed from {type(anatomy.pretrained).__name__}.")
        handle.state = "off by TRL_PADFIX_OFF"
        return handle
    forget_original(model)
    attached = attachments_on(anatomy.decoder)
    for first in (a for a in attached if isinstance(a, PaddingRemoval) and a.state in ("attached", "in use")):
        shared = "One handle packs all models that share a decoder. " * (first.model is not anatomy.pretrained)
        raise ValueError(
            f"Padding removal is attached to this {type(anatomy.decoder).__name__} already. {shared}"
            f"{ATTACHED_BY[first.name.partition('.')[0]]}."
        )
    with ExitStack() as on_error:
        on_error.callback(handle.remove)  # also if a user interrupts a notebook here
        handle.attention_before = [] if attn_implementation is None else set_attention(model, attn_implementation)
        # Before anything is wrapped or taken over: a model that is refused is left untouched.
        _refuse(model, anatomy, pool_last_token)
        if taken := [attachment for attachment in attached if attachment.state in ("paused", "copied")]:
            restore_attention(handle.attention_before)
            for attachment in taken:
                attachment.take_over()  # restores the attention that the model was loaded with
            handle.attention_before = [] if attn_implementation is None else set_attention(model, attn_implementation)
        register_packed_attention()
        handle.attach(_patches(anatomy, handle))
        _probe(handle)
        on_error.pop_all()
    return handle


def _refuse(model: nn.Module, anatomy: Anatomy, pool_last_token: bool) -> None:
    """Raise a [`PaddingRemovalError`] if `model` cannot be packed with exact results."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise PaddingRemovalError(
            "`nn.DataParallel` runs copies of the model that share one decoder. Launch one process per GPU "
            "(`accelerate launch`), or leave the model padded."
        )
    if (reason := refusal(anatomy)) is not None:
        leave = "Or leave it padded" if ". " in reason else "Leave it padded"  # some reasons end in a remedy
        remedy = f"{leave} (`padding_free=False` in a trainer's configuration)."
        raise PaddingRemovalError(
            f"Padding cannot be removed from {type(anatomy.pretrained).__name__}: {reason}. "
            f"{remedy if pipeline_in(model) is None else f'{leave}; {ENCODERS}.'}"
        )
    if scores_added_tokens(model):
        raise PaddingRemovalError(
            "Padding cannot be removed from this model: `query_expansion` scores tokens outside of the attention "
            "mask, which a packed forward does not compute. Set its `attend`, or leave the model padded."
        )
    if pool_last_token and not pools_by_token_id(anatomy.pretrained):
        raise ValueError(
            "`pool_last_token=True` is for sequence classifiers that score one token of each row; "
            f"{type(anatomy.pretrained).__name__} does not."
        )


def _probe(handle: PaddingRemoval) -> None:
    """Raise a [`PaddingRemovalError`] if a row of a pre-packed batch depends on the row in front of it."""
    change, classes = change_beside_another_row(handle)
    if change:
        raise PaddingRemovalError(
            f"Padding cannot be removed from {type(handle.anatomy.pretrained).__name__}: packed, the states of a row "
            f"change by {change:.0e} with the row in front of it. A module combines tokens outside of "
            f"attention. It is one of these: {', '.join(classes[:5])}. Move what combines tokens into a module beside "
            "the attention, whose forward has a parameter `attention_mask`: it then runs row by row. Or leave the "
            "model padded."
        )


def _patches(anatomy: Anatomy, handle: PaddingRemoval) -> Iterator[ForwardPatch]:
    """The patches that remove padding from a model, in the order decoder, mixers, vision towers, head."""
    decoder, multimodal = anatomy.decoder, anatomy.multimodal
    # All or none: if a patch cannot be attached, the handle removes those that it attached before.
    yield DecoderPatch(decoder, handle)
    yield from anatomy.mixers.patches(handle)
    yield from (PositionPatch(table, handle) for table in anatomy.position_tables)
    yield from (RopePatch(rope, handle) for rope in anatomy.length_dependent_ropes)
    if multimodal is not None:
        yield from (TowerPatch(tower, handle) for tower in towers(multimodal, decoder))
        yield MultimodalPatch(multimodal, handle)
    if anatomy.head is not None:
        # Two patches: the model's forward has the labels, the call of the head has the states.
        yield LMHeadPatch(anatomy.pretrained, handle)
        yield HeadPatch(anatomy.head, handle)
    if pools_by_token_id(anatomy.pretrained):
        yield PoolingPatch(anatomy.pretrained, handle)
    elif anatomy.head is None and "labels" in parameters_of(type(anatomy.pretrained).forward):
        yield TokenLabelsPatch(anatomy.pretrained, handle)


def attach_runner_patch(model: nn.Module) -> Attachment:
    """
    Put a [`RunnerPatch`] on `model` and on its decoder, which a loss may call, in place of the patches of earlier
    trainers.
    """
    pretrained = find_pretrained(model)
    decoder, attachment = find_decoder(pretrained), Attachment(pretrained)
    # Modules that compute a padded batch: the model, the module that embeds images, the decoder.
    parts: tuple[Any, ...] = (pretrained, find_multimodal(pretrained, decoder), decoder)
    modules = dict.fromkeys(part for part in parts if part is not None)
    for earlier in [patch for module in modules for patch in patches_on(module) if isinstance(patch, RunnerPatch)]:
        earlier.attachment.remove()
    return attachment.attach(RunnerPatch(module, attachment) for module in modules)


def number_padded_rows(model: nn.Module) -> Attachment | None:
    """
    Let the decoder of `model` count positions in each padded row from the first real token.

    Left padding then gives the same positions as right padding, also in models with absolute positions. Returns `None`
    if the decoder takes no positions, or computes them from ids or mask, and if it has a rotary embedding whose
    frequencies depend on the largest position: that is the last column in TRL and in packed forwards.
    """
    decoder = find_decoder(find_pretrained(model))
    if not (takes(decoder, "position_ids") and Numbering.of(decoder).by_columns) or length_dependent_ropes(decoder):
        return None
    attachment = Attachment(decoder)
    return attachment.attach([NumberingPatch(decoder, attachment)])


def take_over(models: Iterable[nn.Module]) -> None:
    """Detach earlier trainers from `models`: they attach again when they compute again."""
    for patch in [patch for model in models for module in model.modules() for patch in patches_on(module)]:
        if patch.attachment.state in ("in use", "paused", "copied"):
            patch.attachment.take_over()


def forget_original(model: nn.Module) -> None:
    """Delete the forwards of a deep copy that run the original model; TRL and accelerate add them again."""
    for module in model.modules():
        if runs_another(vars(module).get("forward"), module):
            take_over([model])
            for name in ("forward", "_original_forward", PLACES):
                vars(module).pop(name, None)


def attachments_on(decoder: nn.Module) -> list[Attachment]:
    """The attachments of a decoder, the last attached first."""
    return [patch.attachment for patch in patches_on(decoder)]
