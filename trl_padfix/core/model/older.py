"""
Everything in which older versions of transformers and TRL differ.

The rest of the package is written for the newest transformers and TRL. What an older version needs beyond that is
here, each with what upstream does there; [`GOES_WITH`] says when it can be deleted.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layout.layout import Layout
from .masks import PackedMask


__all__ = [
    "GOES_WITH",
    "checkpoints_in_forward",
    "decoder_of",
    "flash_arguments",
    "mask_of_rows",
    "older_attributes",
    "own_masks",
    "packing_with_any_attention",
    "register_mask_function",
    "resume_packed_search",
    "spare_packed_search",
    "supports",
]


GOES_WITH = {
    "decoder_of": "transformers>=5.0",  # is `model.get_decoder()` then
    "older_attributes": "transformers>=5.4",  # the last mask method was RecurrentGemma's, most went with 5.2
    "checkpoints_in_forward": "transformers>=5.23",
    "register_mask_function": "transformers>=4.53",  # is `ALL_MASK_ATTENTION_FUNCTIONS.register` then
    "spare_packed_search": "transformers>=5.0",  # its `or_rows`, and the look for the function; the rest stays
    "resume_packed_search": "transformers>=5.0",
    "flash_arguments": "transformers>=4.53",
    "supports": "transformers>=4.54",  # the older flag
    "packing_with_any_attention": "trl>=1.16",
    "own_masks": "transformers>=5.2",  # the other spelling
    "mask_of_rows": "transformers>=5.0",
}
"""The oldest version in which each is not needed any more: once `versions.BOUNDS` begins there, it can be deleted."""

_masking: Any = import_module("transformers.masking_utils") if find_spec("transformers.masking_utils") else None
"""What makes masks; before 4.53 decoders made them themselves."""


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """What transformers takes for the text decoder of a model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    # Up to 4.55 many models have no `get_decoder`; from 4.56 to 4.57 it is there for all, and returns the model itself
    # where the decoder is called neither `model` nor `decoder` (GPT-2's `transformer`).
    return model.base_model if decoder is model else decoder


def older_attributes(decoder: nn.Module, extra: dict[str, Any]) -> dict[str, Any]:
    """Attributes with which an older decoder runs packed, its layers given `extra`; none that current ones look at."""
    replaced: dict[str, Any] = {}
    # Before `masking_utils` (4.52; fewer and fewer until 5.3) decoders make their mask in a method, which builds a
    # dense `(T, T)` one for every implementation it does not know. Packed attention wants a description or nothing.
    if hasattr(decoder, "_update_causal_mask"):
        mask = _old_mask(decoder)
        replaced["_update_causal_mask"] = lambda *args, **kwargs: mask
    # Before `GradientCheckpointingLayer` was everywhere (4.53; Zamba's until 5.0), decoders called the checkpoint
    # function themselves, some without their keyword arguments (GPT-2, Mamba).
    checkpoint = getattr(decoder, "_gradient_checkpointing_func", None)
    if checkpoint is not None:
        replaced["_gradient_checkpointing_func"] = lambda layer, *args, **kwargs: checkpoint(
            functools.partial(layer, **extra), *args, **kwargs
        )
    return replaced


def checkpoints_in_forward() -> bool:
    """Whether layers checkpoint their own forward. They did their call before, or their decoder did it for them."""
    return "__call__" not in vars(GradientCheckpointingLayer)


def register_mask_function(name: str, function: Callable) -> None:
    """Enter `function` among the mask functions of transformers, where there are any."""
    if _masking is not None:
        _masking.ALL_MASK_ATTENTION_FUNCTIONS.register(name, function)


def spare_packed_search(user: object, is_known: Callable[[torch.Tensor, bool], bool]) -> None:
    """
    Spare transformers its search for packed rows in positions for which `is_known`: it waits for the device.

    `is_known(position_ids, or_rows)` is asked about forwards over the rows of a packed one too where the search waits.
    Before 5.0 it does not: it calls every batch packed, upon which a mask is made that some layers need (Doge's).

    The search is as it was again when each `user` has called [`resume_packed_search`].
    """
    with _search_lock:
        _search_users.add(user)
        # Some versions after 4.53 have it under another name, and wait for the device.
        search = getattr(_masking, _SEARCH, None)
        if search is None or hasattr(search, "padfix_search"):
            return
        waits = search(torch.arange(2)[None]) is None

        def spared(position_ids: torch.Tensor) -> torch.Tensor | None:
            return None if is_known(position_ids, waits) else search(position_ids)

        vars(spared)["padfix_search"] = search
        setattr(_masking, _SEARCH, spared)


def resume_packed_search(user: object) -> None:
    """Undo [`spare_packed_search`] for `user`."""
    with _search_lock:
        _search_users.discard(user)
        search: Any = getattr(_masking, _SEARCH, None)
        if not _search_users and hasattr(search, "padfix_search"):
            setattr(_masking, _SEARCH, search.padfix_search)


_SEARCH = "find_packed_sequence_indices"
_search_lock = threading.Lock()
_search_users: weakref.WeakSet[object] = weakref.WeakSet()


def flash_arguments(layout: Layout) -> dict[str, Any]:
    """More arguments of the variable-length call of transformers' FlashAttention function."""
    # 4.52 looks at `cu_seq_lens_q` only where it is given positions as well, and else attends over the whole row:
    # https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/modeling_flash_attention_utils.py#L374
    return {"position_ids": layout.positions.unsqueeze(0)} if _transformers_in("<4.53") else {}


def supports(cls: type[PreTrainedModel], attention: str) -> bool:
    """Whether transformers has an `attention` (`"sdpa"`, `"flash_attn"`, `"flex_attn"`) path for a class of models."""
    # One flag for all versions of FlashAttention since 4.54; code on the Hub may still carry the old one.
    old = attention == "flash_attn" and getattr(cls, "_supports_flash_attn_2", False)
    return bool(old or getattr(cls, f"_supports_{attention}", False))


@contextmanager
def packing_with_any_attention() -> Iterator[None]:
    """Keep TRL from warning that packed rows need FlashAttention, until the block ends: packed attention does not."""
    # https://github.com/huggingface/trl/blob/v1.0.0/trl/trainer/sft_trainer.py#L908
    logger = logging.getLogger("trl.trainer.sft_trainer")

    def other(record: logging.LogRecord) -> bool:
        return "flash attention variant" not in record.getMessage().lower()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def own_masks(config: PretrainedConfig, embeds: torch.Tensor, mask: torch.Tensor) -> Any:
    """The masks that a decoder makes of a two-dimensional one: one, or a `dict` of them by type of layer."""
    given: dict[str, Any] = {"inputs_embeds": embeds}
    # Until 5.1 one argument is spelt differently, and places are asked for that later versions take from the cache.
    if "input_embeds" in inspect.signature(_masking.create_masks_for_generate).parameters:
        given = {"input_embeds": embeds, "cache_position": mask.new_ones(mask.shape[1]).cumsum(0) - 1}
    return _masking.create_masks_for_generate(config=config, attention_mask=mask, past_key_values=None, **given)


def mask_of_rows(rows: torch.Tensor, decoder: nn.Module) -> torch.Tensor | None:
    """The mask of `(n, l)` rows without padding: none, but for older decoders that then attend to all tokens."""
    # Moshi's: https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/moshi/modeling_moshi.py
    is_written_out = getattr(decoder.config, "_attn_implementation", None) == "eager"
    return rows.new_ones(rows.shape) if is_written_out and _transformers_in("<5") else None


def _old_mask(decoder: nn.Module) -> PackedMask | None:
    """The window that the mask of an old decoder gives to all its layers, whatever its `max_window_layers` says."""
    fill = getattr(decoder, "_prepare_4d_causal_attention_mask_with_cache_position", None)
    window = getattr(decoder.config, "sliding_window", None)
    in_mask = fill is not None and "sliding_window" in fill.__code__.co_names
    if window is None or not in_mask or not getattr(decoder.config, "use_sliding_window", True):
        return None
    return PackedMask(window=window)


@functools.cache
def _transformers_in(bounds: str) -> bool:
    return SpecifierSet(bounds).contains(metadata.version("transformers"), prereleases=True)
