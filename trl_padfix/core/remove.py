"""
`remove_padding`: a model whose decoder computes no padding.

The forward of the decoder is wrapped. A padded call is packed at its door and its hidden states are laid back out at
its exit, so whoever calls the model (a trainer, a loss, a plain loop) sees `(B, L, H)` as before. In rows that arrive
packed each sequence is attended by itself. Calls with a cache go through untouched.

Within the decoder the layout travels in the keyword arguments of its layers, so gradient checkpointing recomputes each
layer with the layout of its own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from .attention.attention import register_packed_attention
from .call.layout_of import PrefixSharing
from .decoder import DecoderPatch, NumberingPatch, PositionPatch, RopePatch
from .errors import PaddingRemovalError
from .handle import PaddingRemoval
from .heads import HeadPatch, LMHeadPatch, PoolingPatch
from .mixers.mixers import Mixers
from .model.find import find_decoder, find_multimodal, find_pretrained, pools_by_token_id
from .model.patching import Attachment, ForwardPatch
from .model.positions import Numbering, length_dependent_ropes, position_embeddings, takes_positions
from .refusals import refusal, refuse_devices, refuse_sharing
from .towers import MultimodalPatch, TowerPatch, towers


logger = logging.getLogger(__name__)

__all__ = ["attachment_of", "attachments_of", "number_padded_rows", "remove_padding"]


def remove_padding(
    model: nn.Module, *, prefix_sharing: PrefixSharing = False, pool_last_token: bool = False
) -> PaddingRemoval:
    """
    Let the decoder of `model` compute real tokens only.

    Every call of the model with a two-dimensional `attention_mask` then runs packed, in training and evaluation, on
    either padding side, with any attention implementation, and returns what it returned before (but zeros where there
    is padding, and no cache unless `use_cache=True` asks for one). A call without a mask whose `position_ids` start
    anew within a row (or with `cu_seq_lens_q`) arrives packed: its sequences are kept apart, with any attention
    implementation and without a mask of all tokens by all tokens. Generation and calls with a cache are not touched.
    Nothing is stored in the model's config or checkpoints. What one call has to remember belongs to that call: models
    may share a config, and threads a model.

    Args:
        model (`torch.nn.Module`):
            A [`~transformers.PreTrainedModel`], or anything that contains one: a PEFT model, a DDP or value-head
            wrapper.
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Whether to compute token prefixes that several rows have in common only once. A batch in which that would
            cost more than it saves is computed without. With `"auto"` a model or a call that cannot share is not
            refused: its padding is removed and nothing is shared.
        pool_last_token (`bool`, *optional*, defaults to `False`):
            Whether a sequence classifier scores the last token of each row's attention mask, whatever its id. By
            default it scores what it scores without padding removal: the last token that is not the pad token.

    Returns:
        [`PaddingRemoval`]: a handle with `.remove()` and `.stats`, usable in a `with` statement.

    Raises:
        TypeError: If there is no pretrained model in `model`, or more than one.
        ValueError: If padding removal is attached to this decoder already, or for another `prefix_sharing`.
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
    if prefix_sharing not in (True, False, "auto"):
        raise ValueError(f"`prefix_sharing` is True, False or 'auto', got {prefix_sharing!r}.")
    pretrained = find_pretrained(model)
    decoder = find_decoder(pretrained)
    if attachment_of(pretrained) is not None:
        raise ValueError(
            f"Padding removal is attached to this {type(decoder).__name__} already. Call `.remove()` on the first "
            "handle before attaching again, for instance with another `prefix_sharing`; where a trainer attached it, "
            "`trainer.restore_padding()`."
        )
    mixers = Mixers.of(decoder)
    reason = refusal(model, pretrained, decoder, mixers) or refuse_devices(decoder)
    if reason is not None:
        raise PaddingRemovalError(
            f"Padding cannot be removed from {type(pretrained).__name__}: {reason}. Leave it padded: "
            "`padding_free=False` in a trainer's configuration."
        )
    if prefix_sharing and (why := refuse_sharing(model, decoder)):
        if prefix_sharing != "auto":
            raise PaddingRemovalError(f"{why}. Attach with `prefix_sharing=False`: padding is removed all the same.")
        logger.info(f"prefix_sharing='auto': nothing is shared, since {why}.")
        prefix_sharing = False
    multimodal = find_multimodal(pretrained, decoder)
    handle = PaddingRemoval(decoder, multimodal, prefix_sharing=prefix_sharing, pool_last_token=pool_last_token)
    handle.mixers = mixers
    register_packed_attention()
    return handle.attach(_patches(pretrained, handle))


def _patches(model: PreTrainedModel, handle: PaddingRemoval) -> Iterator[ForwardPatch]:
    """The patches that remove padding from `model`, from its decoder to its head."""
    decoder, multimodal = handle.decoder, handle.multimodal
    yield DecoderPatch(decoder, handle)
    yield from handle.mixers.patches(handle)
    yield from (PositionPatch(m, handle) for m in position_embeddings(decoder))
    yield from (RopePatch(m, handle) for m in length_dependent_ropes(decoder))
    if multimodal is not None:
        yield from (TowerPatch(m, handle) for m in towers(multimodal, decoder))
        yield MultimodalPatch(multimodal, handle)
    # What calls the decoder or, of a multimodal model, the module around it.
    head = model.get_output_embeddings()
    if (multimodal or decoder) in model.children() and head is not None:
        yield LMHeadPatch(model, handle)
        yield HeadPatch(head, handle)
    if pools_by_token_id(model):
        yield PoolingPatch(model, handle)


def number_padded_rows(model: nn.Module) -> Attachment | None:
    """
    Let the decoder of `model` number the tokens of each padded row from its first real one.

    Left padding then gives the numbers of right padding in models with absolute positions too. `None` if the decoder
    takes no positions, or numbers its tokens itself.
    """
    decoder = find_decoder(find_pretrained(model))
    if not takes_positions(decoder) or not Numbering.of(decoder).by_columns:
        return None
    attachment = Attachment()
    return attachment.attach([NumberingPatch(decoder, attachment)])


def attachments_of(model: nn.Module) -> list[Attachment]:
    """What is attached to the decoder of `model`, the last one first."""
    patch, found = find_decoder(find_pretrained(model)).__dict__.get("forward"), []
    while isinstance(patch, ForwardPatch):
        found.append(patch.attachment)
        patch = patch.below
    return found


def attachment_of(model: nn.Module) -> PaddingRemoval | None:
    """The handle of the padding removal that is attached to `model`, if any."""
    return next((a for a in attachments_of(model) if isinstance(a, PaddingRemoval)), None)
