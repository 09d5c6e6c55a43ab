"""The handle of padding removal, which counts tokens; what one forward has to remember is in `calls.py`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .call.calls import ModelCall, PackedCall, packed_call, rows_call
from .call.layers import takes_any_argument
from .call.layout_of import PrefixSharing, layout_of
from .call.prepared_masks import PreparedMasks
from .layout.layout import Layout
from .layout.shared_prefixes import PrefixedLayout
from .model.older import resume_packed_search, spare_packed_search
from .model.patching import Attachment, ForwardPatch
from .model.positions import takes_positions
from .parallel.layout import ContextParallelConfig, ContextParallelLayout


if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PaddingRemoval", "PaddingStats"]


@dataclass
class PaddingStats:
    """
    Tokens of the forwards that went through the decoder packed, summed since attachment or [`PaddingStats.reset`].

    Attributes:
        padded_tokens (`int`): What the padded computation would have put through the decoder.
        real_tokens (`int`): Tokens that are not padding.
        packed_tokens (`int`): What was put through the decoder.
        forwards (`int`): How many forwards there were.
        shared_forwards (`int`): How many of them computed a prefix once for several rows.

    Example:

    ```python
    >>> from trl_padfix import PaddingStats

    >>> stats = PaddingStats(padded_tokens=100, real_tokens=60, packed_tokens=45)
    >>> stats.pad_fraction, stats.shared_fraction  # of the padded tokens, of the real ones
    (0.4, 0.25)

    ```
    """

    padded_tokens: int = 0
    real_tokens: int = 0
    packed_tokens: int = 0
    forwards: int = 0
    shared_forwards: int = 0

    @property
    def pad_fraction(self) -> float:
        """Share of the padded batch that is padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def shared_fraction(self) -> float:
        """Share of the real tokens that were computed once for several rows."""
        return 1 - self.packed_tokens / self.real_tokens if self.real_tokens else 0.0

    def add(self, layout: Layout) -> None:
        """Count a forward."""
        computed = layout.computed_tokens
        with _counting:
            self.packed_tokens += computed
            if isinstance(layout, PrefixedLayout) and layout.is_prefix:
                return  # its batch is that of a piece, which counts
            self.padded_tokens += layout.padded_tokens
            self.real_tokens += layout.real_tokens
            self.forwards += 1
            self.shared_forwards += computed < layout.real_tokens

    def reset(self) -> None:
        """Begin anew."""
        self.padded_tokens = self.real_tokens = self.packed_tokens = self.forwards = self.shared_forwards = 0


_counting = threading.Lock()


class PaddingRemoval(Attachment):
    """
    Handle of an attachment made by [`remove_padding`]; a context manager that detaches at its end.

    Attributes:
        decoder (`torch.nn.Module`):
            The decoder that packs its calls.
        multimodal (`torch.nn.Module`, *optional*):
            The module around it that makes its inputs from more than text.
        prefix_sharing (`bool` or `"auto"`):
            Whether repeated prefixes are computed once.
        pool_last_token (`bool`):
            Whether a sequence classifier scores the last token of the mask, instead of the one that it looks for.
        packs_padded (`bool`):
            Whether padded calls are packed; rows that arrive packed are kept apart either way.
        split ([`ContextParallelConfig`], *optional*):
            Between which processes packed rows are split; see [`split_rows`].
        stats ([`PaddingStats`]):
            Token counts of the packed forwards.
        mixers ([`Mixers`]):
            The modules of the decoder that mix tokens, and how each of them runs.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix import remove_padding

    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                                      num_attention_heads=2, num_key_value_heads=1))
    >>> ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]])  # (B, L)
    >>> handle = remove_padding(model, prefix_sharing=True)
    >>> model(ids, attention_mask=(ids > 0).long()).logits.shape  # (B, L, V), as without it
    torch.Size([2, 4, 32])
    >>> handle.stats.packed_tokens, handle.stats.padded_tokens
    (5, 8)
    >>> handle.remove()

    ```
    """

    mixers: Any = None

    def __init__(
        self,
        decoder: nn.Module,
        multimodal: nn.Module | None = None,
        *,
        prefix_sharing: PrefixSharing = False,
        pool_last_token: bool = False,
    ):
        super().__init__()
        self.decoder: Any = decoder
        self.multimodal: Any = multimodal
        self.prefix_sharing: PrefixSharing = prefix_sharing
        self.pool_last_token = pool_last_token
        self.packs_padded = True
        # Mamba's decoder is given the positions of a call, and does not look at them.
        self.takes_positions = takes_positions(decoder) or takes_any_argument(decoder)
        self.split: ContextParallelConfig | None = None
        self.stats = PaddingStats()

    def attach(self, patches: Iterable[ForwardPatch]) -> Self:
        spare_packed_search(self, _are_packed)
        return super().attach(patches)

    def remove(self) -> None:
        """
        Detach: the model computes as it did before. Removing twice does no harm.

        Where gradient checkpointing has yet to recompute a packed forward, the attention modules stay able to do so,
        and are restored when its graph is gone.
        """
        super().remove()
        if not self._patches:
            resume_packed_search(self)

    def remember(self, call: PackedCall) -> None:
        """Keep track of a packed forward for as long as it can be recomputed."""
        self._recomputable.add(id(call))
        weakref.finalize(call, self._forget, id(call)).atexit = False

    def _forget(self, call: int) -> None:
        self._recomputable.discard(call)
        if self._removed:
            self.remove()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_recomputable": set()}  # a copy of the model has no graph

    def layout_of(
        self, call: dict[str, Any], model_call: ModelCall | None = None, prepared: PreparedMasks | None = None
    ) -> Layout | None:
        """The layout of a decoder call, or `None` if the call is to go through as it is; see [`layout_of`]."""
        return layout_of(call, self, model_call, prepared)

    def cp_layout_of(self, layout: Layout | None) -> ContextParallelLayout | None:
        """How a packed row is cut; `None` where every process computes all of it, one with fewer tokens than these."""
        if self.split is None or layout is None or layout.packed_tokens < self.split.group.size:
            return None
        return ContextParallelLayout(layout, self.split.group, self.split.attention)


def _are_packed(position_ids: torch.Tensor, or_rows: bool) -> bool:
    """Whether `position_ids` are those of the packed forward that is running, or of a forward over its rows."""
    call = packed_call() or (rows_call() if or_rows else None)
    return call is not None and position_ids.data_ptr() == call.position_ids.data_ptr()
