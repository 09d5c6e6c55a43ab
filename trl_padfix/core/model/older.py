"""
Differences between versions of transformers and TRL.

The rest of the package is written for the newest transformers and TRL. The functions here are needed for older
versions; comments say what these do differently. A test says when each function can be deleted.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layout.layout import Layout
from .inspection import names_in, parameters_of
from .positions import PackedMask


__all__ = [
    "CACHES", "checkpoints_in_forward", "decoder_of", "has_cache", "mask_of_rows", "masks_of_decoder",
    "older_attributes", "register_mask_function", "resume_packed_search", "rope_parameters", "segment_arguments",
    "silence_packing_warning", "spare_packed_search", "supports",
]  # fmt: skip


CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Arguments of a forward that hold a cache: the first from transformers 5.24 on, which renames the others."""

_masking: Any = import_module("transformers.masking_utils") if find_spec("transformers.masking_utils") else None
"""transformers' module that makes masks; before 4.53 decoders made them themselves."""


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The text decoder of a model, as transformers defines it."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    # Up to 4.55 many models have no `get_decoder`. In 4.56 and 4.57 all have one, and it returns the model itself if
    # the decoder's attribute is neither `model` nor `decoder` (GPT-2's `transformer`).
    return model.base_model if decoder is model else decoder


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The parameters of a model's rotary embedding, perhaps by type of layer; empty without one."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def has_cache(call: Mapping[str, Any]) -> bool:
    """Whether a call of a model reads a cache, or returns one."""
    return call.get("use_cache") is True or any(call.get(name) is not None for name in CACHES)


def older_attributes(decoder: nn.Module, extra: dict[str, Any]) -> dict[str, Any]:
    """
    Attributes that the view of an older decoder needs to run packed; current decoders do not read them.

    `extra` are keyword arguments that its layers must receive.
    """
    replaced: dict[str, Any] = {}
    # Before `masking_utils` (4.52; fewer and fewer until 5.3) decoders make their mask in a method, which builds a
    # dense `(T, T)` mask for every unknown implementation. Packed attention takes a description or nothing.
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
    """Whether layers checkpoint their `forward`; in older versions their `__call__` or their decoder does."""
    return "__call__" not in vars(GradientCheckpointingLayer)


def register_mask_function(name: str, function: Callable) -> None:
    """Register `function` with transformers' mask functions, if this version has any."""
    if _masking is not None:
        _masking.ALL_MASK_ATTENTION_FUNCTIONS.register(name, function)


def spare_packed_search(user: object, is_known: Callable[[torch.Tensor, bool], bool]) -> None:
    """
    Skip transformers' search for packed sequences in position ids, which waits for the device.

    It is skipped if `is_known(position_ids, or_rows)` is true, until each `user` has called [`resume_packed_search`].

    `or_rows` is true from 5.0 on: then the search is skipped in dry runs over rows, too. Before 5.0 the search does
    not wait. It treats every batch as packed, and some layers (Doge's) need the mask that follows, so dry runs search.
    """
    with _search_lock:
        _search_users.add(user)
        # Some versions after 4.53 have the function under another name.
        search = getattr(_masking, _SEARCH, None)
        if search is None or isinstance(search, _SparedSearch):
            return
        # From 5.0 on the search returns `None` for a single sequence, for which it reads from the device.
        waits = search(torch.arange(2)[None]) is None
        setattr(_masking, _SEARCH, _SparedSearch(search, lambda position_ids: is_known(position_ids, waits)))


def resume_packed_search(user: object) -> None:
    """Undo [`spare_packed_search`] for `user`."""
    with _search_lock:
        _search_users.discard(user)
        search = getattr(_masking, _SEARCH, None)
        if not _search_users and isinstance(search, _SparedSearch):
            setattr(_masking, _SEARCH, search.search)


class _SparedSearch(NamedTuple):
    """transformers' search for packed sequences, skipped for positions that are known."""

    search: Callable[[torch.Tensor], torch.Tensor | None]
    is_known: Callable[[torch.Tensor], bool]

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if self.is_known(position_ids) else self.search(position_ids)


_SEARCH = "find_packed_sequence_indices"
_search_lock = threading.RLock()  # garbage collection within the lock may remove a handle
_search_users: weakref.WeakSet[object] = weakref.WeakSet()


def segment_arguments(layout: Layout) -> dict[str, Any]:
    """The segments of a layout as arguments of an attention function, such as transformers' FlashAttention."""
    queries, keys = layout.queries, layout.keys
    bounds = {"cu_seq_lens_q": queries.cu_seqlens, "cu_seq_lens_k": keys.cu_seqlens}
    bounds |= {"max_length_q": queries.longest, "max_length_k": keys.longest}
    # 4.52 reads `cu_seq_lens_q` only if there are positions, too, and otherwise attends over the whole row:
    # https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/modeling_flash_attention_utils.py#L374
    return bounds | ({"position_ids": layout.positions.unsqueeze(0)} if _transformers_in("<4.53") else {})


def supports(cls: type[PreTrainedModel], attention: str) -> bool:
    """Whether transformers has an `attention` (`"sdpa"`, `"flash_attn"`, `"flex_attn"`) path for a class of models."""
    # One flag for all versions of FlashAttention since 4.54; code on the Hub may still carry the old one.
    old = attention == "flash_attn" and getattr(cls, "_supports_flash_attn_2", False)
    return bool(old or getattr(cls, f"_supports_{attention}", False))


@contextmanager
def silence_packing_warning() -> Iterator[None]:
    """Silence TRL's warning that packed rows need FlashAttention: packed attention keeps them apart without it."""
    # https://github.com/huggingface/trl/blob/v1.10.0/trl/trainer/sft_trainer.py#L1168
    logger = logging.getLogger("trl.trainer.sft_trainer")

    def is_other(record: logging.LogRecord) -> bool:
        return "flash attention variant" not in record.getMessage().lower()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def masks_of_decoder(config: PretrainedConfig, embeds: torch.Tensor, mask: torch.Tensor) -> Any:
    """The masks that a decoder makes from a two-dimensional one: one mask, or a `dict` by type of layer."""
    parameters = parameters_of(_masking.create_masks_for_generate)
    arguments: dict[str, Any] = {name: None for name in CACHES if name in parameters}
    # Up to 5.1 one argument has another name, and positions in the cache are an argument, too.
    if "input_embeds" in parameters:
        arguments |= {"input_embeds": embeds, "cache_position": mask.new_ones(mask.shape[1]).cumsum(0) - 1}
    else:
        arguments["inputs_embeds"] = embeds
    return _masking.create_masks_for_generate(config=config, attention_mask=mask, **arguments)


def mask_of_rows(rows: torch.Tensor, decoder: Any) -> torch.Tensor | None:
    """The mask of `(n, l)` rows without padding: `None`, except for older decoders that need one to be causal."""
    # Moshi's: https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/moshi/modeling_moshi.py
    is_written_out = decoder.config._attn_implementation == "eager"
    return rows.new_ones(rows.shape) if is_written_out and _transformers_in("<5") else None


def _old_mask(decoder: nn.Module) -> PackedMask | None:
    """The mask of an old decoder: its window holds for all layers; `max_window_layers` has no effect."""
    fill = getattr(decoder, "_prepare_4d_causal_attention_mask_with_cache_position", None)
    window = getattr(decoder.config, "sliding_window", None)
    in_mask = fill is not None and "sliding_window" in names_in(fill)
    if window is None or not in_mask or not getattr(decoder.config, "use_sliding_window", True):
        return None
    return PackedMask(window=window)


@functools.cache
def _transformers_in(bounds: str) -> bool:
    return SpecifierSet(bounds).contains(metadata.version("transformers"), prereleases=True)
