"""
`remove_padding`: a model whose decoder computes no padding.

The forward of the decoder is wrapped. A padded call is packed at its door and its hidden states are laid back out at
its exit, so whoever calls the model (a trainer, a loss, a plain loop) sees `(B, L, H)` as before. In rows that arrive
packed each sequence is attended by itself. Calls with a cache go through untouched.

Within the decoder the layout travels in the keyword arguments of its layers, so gradient checkpointing recomputes each
layer with the layout of its own forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from .attention import LAYOUT, PackedCall, PaddingRemovalError, attending_with, uses_attention_interface
from .compat import decoder_of
from .layout import Layout, packed_layout, padding_free_layout, prefix_sharing_layout
from .patches import (
    Attachment,
    AttentionPatch,
    DecoderPatch,
    ForwardPatch,
    HeadPatch,
    LMHeadPatch,
    NumberingPatch,
    PoolingPatch,
    PositionPatch,
    pools_by_token_id,
)
from .positions import numbering, position_embeddings, takes_positions
from .refusals import refusal
from .towers import MultimodalPatch, TowerPatch, find_multimodal, token_keys, towers, with_plain_mask


__all__ = ["PaddingRemoval", "PaddingStats", "find_decoder", "find_pretrained", "remove_padding"]


@dataclass
class PaddingStats:
    """
    Tokens of the forwards that went through the decoder packed, summed since attachment or [`PaddingStats.reset`].

    Attributes:
        padded_tokens (`int`): What the padded computation would have put through the decoder.
        real_tokens (`int`): Tokens that are not padding.
        packed_tokens (`int`): What was put through the decoder.
    """

    padded_tokens: int = 0
    real_tokens: int = 0
    packed_tokens: int = 0

    @property
    def pad_fraction(self) -> float:
        """Share of the padded batch that is padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def shared_fraction(self) -> float:
        """Share of the real tokens that were computed once for several rows."""
        return 1 - self.packed_tokens / self.real_tokens if self.real_tokens else 0.0

    def add(self, layout: Layout) -> None:
        self.padded_tokens += layout.padded_tokens
        self.real_tokens += layout.real_tokens
        self.packed_tokens += layout.packed_tokens

    def reset(self) -> None:
        self.padded_tokens = self.real_tokens = self.packed_tokens = 0


class PaddingRemoval(Attachment):
    """
    Handle of an attachment made by [`remove_padding`]; a context manager that detaches at its end.

    Attributes:
        decoder (`torch.nn.Module`):
            The decoder that packs its calls.
        prefix_sharing (`bool`):
            Whether repeated prefixes are computed once.
        packs_padded (`bool`):
            Whether padded calls are packed; rows that arrive packed are kept apart either way.
        stats ([`PaddingStats`]):
            Token counts of the packed forwards.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, prefix_sharing: bool):
        super().__init__()
        self.decoder, self.prefix_sharing = decoder, prefix_sharing
        self.packs_padded = True
        self.stats = PaddingStats()
        self.is_pooling = False
        self.scored_layout: Layout | None = None  # of the hidden states that a model's own head is to score
        self._is_scoring = False
        self.call: PackedCall | None = None  # the packed forward that is running
        self._around: dict[str, Any] = {}  # what the module around the decoder was called with
        self._removed, self._recomputable = False, 0
        self._patches.append(DecoderPatch(decoder, self))
        self._patches += [AttentionPatch(m, self) for m in decoder.modules() if uses_attention_interface(m)]
        self._patches += [PositionPatch(m, self) for m in position_embeddings(decoder)]
        self.multimodal = find_multimodal(model, decoder)
        if self.multimodal is not None:
            self._patches += [TowerPatch(m, self) for m in towers(self.multimodal, decoder)]
            self._patches.append(MultimodalPatch(self.multimodal, self))
        # What calls the decoder or, of a multimodal model, the module around it.
        if (self.multimodal or decoder) in model.children() and model.get_output_embeddings() is not None:
            self._patches.append(LMHeadPatch(model, self))
            self._patches.append(HeadPatch(model.get_output_embeddings(), self))
        if pools_by_token_id(model):
            self._patches.append(PoolingPatch(model, self))

    def remove(self) -> None:
        """
        Detach: the model computes as it did before. Removing twice does no harm.

        Where gradient checkpointing has yet to recompute a packed forward, the attention modules stay able to do so,
        and are restored when its graph is gone.
        """
        self.enabled, self._removed = False, True
        needed = [patch for patch in self._patches if self._recomputable and isinstance(patch, AttentionPatch)]
        for patch in reversed(self._patches):
            if patch not in needed:
                patch.undo()
        self._patches = needed

    def remember(self, call: PackedCall) -> None:
        """Keep track of a packed forward for as long as it can be recomputed."""
        self._recomputable += 1
        weakref.finalize(call, self._forget).atexit = False

    def _forget(self) -> None:
        self._recomputable -= 1
        if self._removed:
            self.remove()

    @contextmanager
    def running(self, call: PackedCall | None) -> Iterator[None]:
        saved, self.call = self.call, call
        try:
            yield
        finally:
            self.call = saved

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No packed forward is running until the block ends; its attention implementation is the model's own again."""
        if self.call is None:
            yield
            return
        with attending_with(self.decoder.config, self.call.implementation), self.running(None):
            yield

    @property
    def layout(self) -> Layout | None:
        """The layout of the packed forward that is running, if one is."""
        return self.call.layout if self.call is not None else None

    @property
    def is_running(self) -> bool:
        """Whether a packed forward is running."""
        return self.call is not None

    @contextmanager
    def pooling(self) -> Iterator[None]:
        saved, self.is_pooling = self.is_pooling, True
        try:
            yield
        finally:
            self.is_pooling = saved

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Until the block ends, hidden states of the decoder go to the model's head and nowhere else."""
        saved, self._is_scoring = self._is_scoring, True
        try:
            yield
        finally:
            self._is_scoring, self.scored_layout = saved, None

    def answered(self, layout: Layout | None) -> None:
        """The decoder has returned `(B, L, H)` of this layout."""
        self.scored_layout = layout if self._is_scoring else None

    @contextmanager
    def called_with(self, call: dict[str, Any]) -> Iterator[None]:
        """The module around the decoder is called with `call`, until the block ends."""
        saved, self._around = self._around, call
        try:
            yield
        finally:
            self._around = saved

    def decoder_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A decoder call with the two-dimensional mask of the module around it, where that made masks of it."""
        return with_plain_mask(call, self._around, self.decoder) if self._around else call

    def selects(self, call: dict[str, Any], labels: torch.Tensor) -> bool:
        """Whether the decoder can be asked for the states at some places of a call of the model only."""
        if self.multimodal is None:
            layout = self.layout_of(call)
            return layout is not None and tuple(labels.shape) == layout.batch_shape
        ids = call.get("input_ids")
        return ids is not None and ids.shape == labels.shape and call.get("past_key_values") is None

    def layout_of(self, call: dict[str, Any]) -> Layout | None:
        """The layout of a decoder call, or `None` if the call is to go through as it is."""
        mask, ids, embeds = call.get("attention_mask"), call.get("input_ids"), call.get("inputs_embeds")
        if call.get("past_key_values") is not None or call.get("use_cache") is True:
            return None  # cached: generation, or a caller that asked for the cache
        if LAYOUT in call:
            return None  # packed already
        if call.get("encoder_hidden_states") is not None:
            raise PaddingRemovalError(
                "The decoder was called with `encoder_hidden_states`: its cross-attention looks at another sequence "
                "for each row, and a packed batch has no rows. Run this call inside `with handle.disabled():`."
            )
        batch = ids if ids is not None else embeds
        if batch is None:
            return None
        if mask is None:
            arrived = self._arrived_packed(call, batch)
            if arrived is not None or not self.prefix_sharing or batch.shape[0] == 1:
                return arrived
            mask = torch.ones(batch.shape[:2], dtype=torch.int64, device=batch.device)
        elif not self.packs_padded or call.get("cu_seq_lens_q") is not None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise PaddingRemovalError(
                f"The model was called with an attention mask of {shape}. Padding is removed by a mask of shape "
                "`(B, L)` with 1 for real tokens; a prepared mask cannot be packed. Pass the two-dimensional mask, or "
                "run this call inside `with handle.disabled():`."
            )
        if mask.shape != batch.shape[:2]:
            raise ValueError(
                f"The attention mask has shape {tuple(mask.shape)} and the batch {tuple(batch.shape[:2])}. Without a "
                "cache they must be the same `(B, L)`."
            )
        if mask.device != batch.device:
            raise ValueError(
                f"The attention mask is on {mask.device} and the batch on {batch.device}. Move them to one device."
            )
        if mask.requires_grad:
            raise ValueError("The attention mask requires a gradient; removing padding only reads it. Detach it.")
        if not self.prefix_sharing:
            return _remembered(mask, (mask,), lambda: padding_free_layout(mask))
        if self._around:
            ids = ids if ids is not None else self._around.get("input_ids")
            if ids is not None:
                return prefix_sharing_layout(ids, mask, token_keys(call, ids.shape))
        _check_shareable(call)
        positions = call.get("position_ids")
        return _remembered(
            ids, (ids, call.get("attention_mask"), positions), lambda: prefix_sharing_layout(ids, mask, positions)
        )

    def _arrived_packed(self, call: dict[str, Any], batch: torch.Tensor) -> Layout | None:
        """The layout of a call without a mask whose positions, or bounds, show several sequences in one row."""
        positions, bounds = call.get("position_ids"), call.get("cu_seq_lens_q")
        if (positions is None and bounds is None) or not takes_positions(self.decoder):
            return None
        if positions is None:
            positions = torch.arange(batch.shape[1], device=batch.device).expand(batch.shape[:2])
        if positions.dim() != 2:
            return None  # rows of positions for images
        ids = call.get("input_ids") if self.prefix_sharing else None
        if self.prefix_sharing:
            _check_shareable(call)

        def build() -> Layout:
            return packed_layout(positions.expand(batch.shape[:2]), cu_seqlens=bounds, input_ids=ids)

        layout = _remembered(batch, (batch, call.get("position_ids"), bounds), build)
        return None if layout.is_trivial else layout


def remove_padding(model: nn.Module, *, prefix_sharing: bool = False) -> PaddingRemoval:
    """
    Let the decoder of `model` compute real tokens only.

    Every call of the model with a two-dimensional `attention_mask` then runs packed, in training and evaluation, on
    either padding side, with any attention implementation, and returns what it returned before (but zeros where there
    is padding, and no cache unless `use_cache=True` asks for one). A sequence classifier scores the last token of each
    row's attention mask, whatever its id. A call without a mask whose `position_ids` start anew within a row (or with
    `cu_seq_lens_q`) arrives packed: its sequences are kept apart, with any attention implementation and without a mask
    of all tokens by all tokens. Generation and calls with a cache are not touched. Nothing is stored in the model's
    config or checkpoints.

    Args:
        model (`torch.nn.Module`):
            A [`~transformers.PreTrainedModel`], or anything that contains one: a PEFT model, a DDP or value-head
            wrapper.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute token prefixes that several rows have in common only once.

    Returns:
        [`PaddingRemoval`]: a handle with `.remove()` and `.stats`, usable in a `with` statement.

    Raises:
        TypeError: If there is no pretrained model in `model`, or more than one.
        ValueError: If padding removal is attached to this decoder already.
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
    pretrained = find_pretrained(model)
    decoder = find_decoder(pretrained)
    if attachment_of(pretrained) is not None:
        raise ValueError(
            f"Padding removal is attached to this {type(decoder).__name__} already. Call `.remove()` on the first "
            "handle before attaching again, for instance with another `prefix_sharing`; where a trainer attached it, "
            "`trainer.restore_padding()`."
        )
    reason = refusal(model, pretrained, decoder)
    if reason is not None:
        raise PaddingRemovalError(
            f"Padding cannot be removed from {type(pretrained).__name__}: {reason}. Leave it padded: "
            "`padding_free=False` in a trainer's configuration."
        )
    return PaddingRemoval(pretrained, decoder, prefix_sharing)


def number_padded_rows(model: nn.Module) -> Attachment | None:
    """
    Let the decoder of `model` number the tokens of each padded row from its first real one.

    Left padding then gives the numbers of right padding in models with absolute positions too.

    Returns:
        [`Attachment`], *optional*: `None` if the decoder takes no positions, or numbers its tokens itself.
    """
    decoder = find_decoder(find_pretrained(model))
    if not takes_positions(decoder) or numbering(decoder) is not None:
        return None
    attachment = Attachment()
    attachment._patches.append(NumberingPatch(decoder, attachment))
    return attachment


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


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The text decoder of a model: the module between the embeddings and the head."""
    decoder = decoder_of(model)
    if isinstance(decoder, PreTrainedModel) and decoder is not model and decoder.get_output_embeddings() is not None:
        return find_decoder(decoder)  # a language model with a head of its own (BLIP-2's)
    if not isinstance(decoder, PreTrainedModel) or decoder.get_output_embeddings() is not None:
        # Some models call their output layer `decoder`, some find themselves.
        inner = [module for module in model.children() if isinstance(module, PreTrainedModel)]
        decoder = inner[0] if len(inner) == 1 else decoder
    return decoder


def find_pretrained(model: nn.Module) -> PreTrainedModel:
    """
    The one transformers model in `model`.

    Raises:
        TypeError: If there is none, or more than one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`remove_padding` takes a model, got `{type(model).__name__}`.")
    found: list[PreTrainedModel] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            found.append(module)
            inside.update(id(m) for m in module.modules())
    if len(found) != 1:
        names = ", ".join(type(m).__name__ for m in found) or "none"
        raise TypeError(
            f"`remove_padding` takes a transformers model or a wrapper around one, and `{type(model).__name__}` "
            f"contains {names}. Attach to each transformers model on its own."
        )
    return found[0]


def _check_shareable(call: dict[str, Any]) -> None:
    ids = call.get("input_ids")
    if ids is None:
        raise PaddingRemovalError(
            "`prefix_sharing=True` compares token ids, and the decoder was called with `inputs_embeds`. Attach "
            "with `prefix_sharing=False`: padding is removed all the same."
        )
    others = [k for k, v in call.items() if isinstance(v, torch.Tensor) and v.shape[:2] == ids.shape]
    others = [k for k in others if k not in ("input_ids", "attention_mask", "position_ids", "labels", "seq_idx")]
    if others:
        raise PaddingRemovalError(
            f"`prefix_sharing=True` compares token ids and positions, and the call also carries {others} for each "
            "token. Attach with `prefix_sharing=False`, or leave them out."
        )


def _remembered(owner: torch.Tensor, parts: tuple[torch.Tensor | None, ...], build: Any) -> Layout:
    """
    The layout of a batch, kept while the batch is: the reference forward finds what the policy forward built.

    It holds for the very same tensors, not written to since.
    """
    build = torch.inference_mode(False)(build)  # it may serve a forward with gradients later
    if any(p is not None and p.is_inference() for p in parts):
        return build()  # inference tensors do not count their writes
    key = tuple((id(p), p._version) if p is not None else None for p in parts)
    kept_key, layout, _ = _kept.get(owner, (None, None, None))
    if layout is None or kept_key != key:
        layout = build()
        # The other parts are kept too, so that their ids stay theirs; the owner is not, it would keep itself.
        _kept[owner] = (key, layout, [p for p in parts if p is not owner])
    return layout


_kept: MutableMapping[torch.Tensor, Any] = WeakIdKeyDictionary()
"""Layouts of the batches that are alive, by the tensor that owns them."""
